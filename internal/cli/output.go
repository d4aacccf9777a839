package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/size"
)

// structured reports whether the output is for programs.
func (a *app) structured() bool { return a.output == "json" || a.output == "yaml" }

func (a *app) wide() bool { return a.output == "wide" }

// print writes a value as JSON or YAML.
func (a *app) print(v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	if a.output == "yaml" {
		// Through JSON, so that both formats have the same names in the same order.
		var node yaml.Node
		if err := yaml.Unmarshal(data, &node); err != nil {
			return fmt.Errorf("output: %w", err)
		}
		blockStyle(&node)
		if data, err = yaml.Marshal(&node); err != nil {
			return fmt.Errorf("output: %w", err)
		}
	} else {
		data = append(data, '\n')
	}
	_, err = a.Out.Write(data)
	return err
}

func blockStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		blockStyle(c)
	}
}

// table writes rows below a heading, in columns.
func table(w io.Writer, heading []string, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	write := func(cells []string) {
		for i, c := range cells {
			if i > 0 {
				_, _ = io.WriteString(t, "\t")
			}
			if c == "" {
				c = "-"
			}
			_, _ = io.WriteString(t, clean(c))
		}
		_, _ = io.WriteString(t, "\n")
	}
	write(heading)
	for _, r := range rows {
		write(r)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	return nil
}

// clean removes control characters from names that applications or vendors have chosen,
// so that they cannot control the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// line does the same, and makes one line of a text.
func line(s string) string {
	return clean(strings.ReplaceAll(strings.TrimSpace(s), "\n", "; "))
}

// cut shortens a text to n characters.
func cut(s string, n int) string {
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}

func bytesOr(n uint64, none string) string {
	if n == 0 {
		return none
	}
	return size.Format(n)
}

// duration formats a time with at most three digits.
func duration(ns int64) string {
	d := time.Duration(ns)
	switch {
	case d >= 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d >= 10*time.Millisecond:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d >= time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/1e6)
	}
	return fmt.Sprintf("%d µs", d.Microseconds())
}

// terminal reports whether a stream is a terminal, and its width.
func terminal(w io.Writer) (columns int, ok bool) {
	f, isFile := w.(*os.File)
	if !isFile {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, false
	}
	return max(40, int(size.Col)), true
}
