// Command gen writes the manual of the commands, as Markdown and as man pages,
// from the commands themselves, and the lists of errors and of mediated GPUs'
// registers from their tables. Run by
// `make generate`.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/gpuctl/gpuctl/hostd/command"
	"github.com/gpuctl/gpuctl/internal/cli"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: gen FOLDER")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

// run writes dir/cli/*.md, dir/man/*, dir/errors.md and dir/mmio-registers.md, in
// place of what was there.
func run(dir string) error {
	markdown, man := filepath.Join(dir, "cli"), filepath.Join(dir, "man")
	for _, d := range []string{markdown, man} {
		if err := os.RemoveAll(d); err != nil {
			return fmt.Errorf("clear %s: %w", d, err)
		}
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	for _, c := range []struct {
		cmd     *cobra.Command
		section string
	}{
		{cli.Command(cmdutil.Stdio{}), "1"},
		{command.Command(cmdutil.Stdio{}), "8"},
	} {
		c.cmd.DisableAutoGenTag = true // a date would differ every day
		if err := doc.GenMarkdownTree(c.cmd, markdown); err != nil {
			return fmt.Errorf("%s: %w", c.cmd.Name(), err)
		}
		header := &doc.GenManHeader{
			Title: strings.ToUpper(c.cmd.Name()), Section: c.section, Source: "gpuctl", Manual: "gpuctl manual",
		}
		if err := genMan(c.cmd, header, man); err != nil {
			return fmt.Errorf("%s: %w", c.cmd.Name(), err)
		}
	}
	if err := writeErrors(dir); err != nil {
		return err
	}
	return writeRegisters(dir)
}

// genMan writes a page per command, without a date: it would differ every day.
func genMan(cmd *cobra.Command, header *doc.GenManHeader, dir string) error {
	for _, sub := range cmd.Commands() {
		if !sub.IsAvailableCommand() || sub.IsAdditionalHelpTopicCommand() {
			continue
		}
		if err := genMan(sub, header, dir); err != nil {
			return err
		}
	}
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
	h := *header
	h.Title = strings.ToUpper(name)
	var none time.Time // given, since cobra fills in today for none
	h.Date = &none
	var b bytes.Buffer
	if err := doc.GenMan(cmd, &h, &b); err != nil {
		return err
	}
	page := bytes.Replace(b.Bytes(), []byte(none.Format("Jan 2006")), nil, 1)
	return os.WriteFile(filepath.Join(dir, name+"."+header.Section), page, 0o644)
}
