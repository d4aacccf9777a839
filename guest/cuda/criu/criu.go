package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/internal/beneath"
)

// ErrUnfit means that criu is missing, is too old, or can't work with this kernel.
var ErrUnfit = errors.New("criu can't be used here")

const (
	leastMajor, leastMinor = 4, 1 // what was shown to give CUDA programs back unchanged

	checkTime = 20 * time.Second
	mostTail  = 2 << 10 // bytes of a log that go into an error
	mostLog   = 64 << 20
	killDelay = 5 * time.Second

	shell   = "/bin/sh"
	waiting = `read -r go && [ "$go" = go ] && exec "$0" "$@" </dev/null`
)

// Program is the program criu.
type Program struct {
	Path string // empty: criu of the path
}

func (p Program) path() string {
	if p.Path == "" {
		return "criu"
	}
	return p.Path
}

// Check returns criu's version, or an error that wraps ErrUnfit. It changes nothing.
func (p Program) Check(ctx context.Context) (version string, err error) {
	out, err := p.short(ctx, "--version")
	if err != nil {
		return "", err
	}
	version = parseVersion(out)
	var major, minor int
	if n, _ := fmt.Sscanf(version, "%d.%d", &major, &minor); n < 2 {
		return "", fmt.Errorf("%w: %s does not tell its version", ErrUnfit, p.path())
	}
	if major < leastMajor || major == leastMajor && minor < leastMinor {
		return "", fmt.Errorf("%w: it is of version %s, and %d.%d is needed", ErrUnfit, version, leastMajor, leastMinor)
	}
	if _, err := p.short(ctx, "check"); err != nil {
		return "", err
	}
	return version, nil
}

func parseVersion(out string) string {
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "Version:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// short runs a command that touches nothing.
func (p Program) short(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	var out bytes.Buffer
	cmd := p.command(ctx, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: criu %s: %w: %s", ErrUnfit, strings.Join(args, " "), err, tail(out.Bytes()))
	}
	return out.String(), nil
}

func (p Program) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.path(), append([]string{"--no-default-config"}, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives a gpuguest that dies: it must not be cut off
	cmd.WaitDelay = killDelay
	return cmd
}

// Dump writes a process and all that descend from it to a folder, and leaves them stopped.
// began is told criu's pid before criu begins, and an error of it keeps criu from that. After an error they go on, unless criu was cut off by the
// limit: a process from which criu has not withdrawn may end.
func (p Program) Dump(ctx context.Context, root int, dir string, limit time.Duration, began func(pid int) error) error {
	return p.long(ctx, dir, "dump", limit, began, "--tree", strconv.Itoa(root), "--leave-stopped")
}

// Restore makes the processes of a folder again. After an error there are none, or those
// that criu, which was cut off by the limit, has left.
func (p Program) Restore(ctx context.Context, dir string, limit time.Duration, began func(pid int) error) error {
	return p.long(ctx, dir, "restore", limit, began, "--restore-detached")
}

// long runs a command on a folder. Plugins are looked for in that folder, where there are
// none: criu's own for CUDA would ask the driver a second time.
func (p Program) long(ctx context.Context, dir, what string, limit time.Duration, began func(pid int) error, args ...string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	log := what + ".log"
	cmd := p.command(ctx, append([]string{what, "--images-dir", dir, "--libdir", dir, "--log-file", log, "-v2"}, args...)...)
	// It is criu only after its pid was noted: one that nobody has noted ends by itself.
	if cmd.Err != nil {
		return fmt.Errorf("criu %s: %w", what, cmd.Err)
	}
	cmd.Path, cmd.Args = shell, append([]string{shell, "-c", waiting, cmd.Path}, cmd.Args[1:]...)
	gate, err := cmd.StdinPipe()
	if err != nil {
		return fmt.Errorf("criu %s: %w", what, err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("criu %s: %w", what, err)
	}
	berr := began(cmd.Process.Pid)
	if berr == nil {
		_, berr = io.WriteString(gate, "go\n")
	}
	_ = gate.Close()
	err = cmd.Wait()
	if berr != nil {
		return fmt.Errorf("criu %s has not begun: %w", what, berr)
	}
	if ctx.Err() != nil {
		err = fmt.Errorf("not done in %v", limit)
	}
	if err != nil {
		b, _ := beneath.ReadFile(dir, log, mostLog)
		err = fmt.Errorf("criu %s: %w: %s", what, err, tail(b))
	}
	return err
}

// tail returns the end of a log as one line: the errors in it if there are any.
func tail(b []byte) string {
	lines := strings.Split(strings.TrimSpace(strings.ToValidUTF8(string(b), "?")), "\n")
	var bad []string
	for _, l := range lines {
		if strings.Contains(l, "Error") {
			bad = append(bad, l)
		}
	}
	if len(bad) > 0 {
		lines = bad
	}
	text := strings.Join(lines[max(0, len(lines)-4):], "; ")
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
	return text[max(0, len(text)-mostTail):]
}
