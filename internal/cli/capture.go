package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/gpuctl/gpuctl/internal/capture"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/hook/install"
	"github.com/gpuctl/gpuctl/internal/size"
)

const captureFile = "gpuctl-capture.tar.gz"

type captureFlags struct {
	root   string
	redact bool
	files  bool
	force  bool
}

func (a *app) hostCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "host", Short: "Look at this host itself, without hostd",
		Args: noSuchCommand, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.captureCommand())
	return cmd
}

func (a *app) captureCommand() *cobra.Command {
	var f captureFlags
	cmd := &cobra.Command{
		Use: "capture [FILE]", Short: "Take a picture of this host for a bug report",
		Long: `Write one archive with what gpuctl decides by: the PCI devices with their
drivers, groups and configuration spaces, the kernel's and the hypervisor's
facts, gpuctl's configuration, and what xl and virsh say. It is a tar archive:
look into it before you hand it over. FILE is gpuctl-capture.tar.gz unless you
name another; - is standard output.

Secrets are left out: passwords, keys, tokens, domains' metadata and command
lines. --redact leaves out, too, whose machine it is: names of host and domains,
serial numbers, MAC and IP addresses, UUIDs.`,
		Example: `  gpuctl host capture
  gpuctl host capture --redact /tmp/host.tar.gz
  gpuctl host capture - | tar tz`,
		Args: arguments(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := captureFile
			if len(args) > 0 {
				name = args[0]
			}
			return a.capture(cmd.Context(), f, name)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.root, "root", "/", "`folder` with the files of the system that is meant; of another than / no commands are run")
	flags.BoolVar(&f.redact, "redact", false, "leave out whose machine it is")
	flags.BoolVar(&f.files, "no-commands", false, "take files only, and run neither xl nor virsh")
	flags.BoolVar(&f.force, "force", false, "replace the file if it exists")
	_ = cmd.MarkFlagDirname("root")
	return cmd
}

func (a *app) capture(ctx context.Context, f captureFlags, name string) error {
	root, err := filepath.Abs(f.root)
	if err != nil {
		return fmt.Errorf("--root: %w", err)
	}
	o := capture.Options{Version: cmdutil.Version(), Redact: f.redact, Extra: a.hookFacts(ctx, root)}
	if root == "/" && !f.files {
		o.Run = capture.Commands
	}
	if name == "-" {
		if isTerminal(a.Out) {
			return cmdutil.Usage(errors.New("standard output is a terminal: name a file"))
		}
		if a.structured() {
			return cmdutil.Usage(errors.New("standard output gets the archive: name a file, or leave --output out"))
		}
		m, err := capture.Write(ctx, a.Out, os.DirFS(root), o)
		if err != nil {
			return err
		}
		a.sayMissing(m)
		return nil
	}
	m, bytes, err := writeCapture(ctx, name, f.force, os.DirFS(root), o)
	if err != nil {
		return err
	}
	if a.structured() {
		return a.print(m)
	}
	a.sayMissing(m)
	return a.say(clean(fmt.Sprintf("%s: %d files, %d facts, %s", name, m.Files, answered(m), size.Format(uint64(bytes)))))
}

// writeCapture writes the archive. If it fails, no incomplete file stays.
func writeCapture(ctx context.Context, name string, force bool, root fs.FS, o capture.Options) (m capture.Manifest, n int64, err error) {
	if _, err := os.Lstat(name); err == nil && !force {
		return m, 0, fmt.Errorf("%s exists: name another file, or say --force", name)
	}
	out, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+"-*") // readable by its owner only
	if err != nil {
		return m, 0, fmt.Errorf("capture: %w", err)
	}
	defer func() {
		_ = out.Close()
		if err != nil {
			_ = os.Remove(out.Name())
		}
	}()
	if m, err = capture.Write(ctx, out, root, o); err != nil {
		return m, 0, err
	}
	if n, err = out.Seek(0, io.SeekCurrent); err != nil {
		return m, 0, fmt.Errorf("capture: %w", err)
	}
	if err = out.Close(); err != nil {
		return m, 0, fmt.Errorf("capture: %w", err)
	}
	if err = os.Rename(out.Name(), name); err != nil {
		return m, 0, fmt.Errorf("capture: %w", err)
	}
	return m, n, nil
}

// hookFacts returns the status of libvirt's hook as facts.
func (a *app) hookFacts(ctx context.Context, root string) map[string][]byte {
	f := hookFlags{root: root}
	m := install.Machine{Root: root, Source: f.hookProgram()}
	var all []install.Status
	for _, d := range m.Drivers() {
		all = append(all, m.Check(ctx, d))
	}
	data, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return nil
	}
	return map[string][]byte{"hook.json": append(data, '\n')}
}

func (a *app) sayMissing(m capture.Manifest) {
	if n := len(m.Missing) + len(m.Facts) - answered(m); n > 0 {
		fmt.Fprintf(a.Err, "%d things could not be read or asked; manifest.json in the archive names them\n", n)
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(a.Err, "not run as root: configuration spaces are cut off")
	}
}

// answered counts the facts that were obtained.
func answered(m capture.Manifest) int {
	n := 0
	for _, f := range m.Facts {
		if f.Error == "" {
			n++
		}
	}
	return n
}
