package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/demo/timeline"
	"github.com/gpuctl/gpuctl/test/rig"
)

const (
	config   = "version: 1\ndiscover: false\n"
	patience = 2 * time.Minute
	each     = 3 * time.Second // of undisturbed work between operations
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "demo failed:", err)
		os.Exit(1)
	}
}

type demo struct {
	out   io.Writer
	rig   *rig.Rig
	fake  string // folder of the fake driver; empty: NVIDIA's own
	loop  string // the CUDA program
	mib   int
	lines *timeline.Timeline
}

func run(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("cuda-demo", flag.ContinueOnError)
	dir := fs.String("dir", ".demo", "`folder` for the timeline")
	mib := fs.Int("mib", 0, "memory of the program on the GPU in `MiB` (default 4096, of the fake driver 256)")
	fake := fs.Bool("fake", !exists("/dev/nvidiactl"), "use the fake driver")
	if err := fs.Parse(args); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "gd")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	d := &demo{out: out, mib: *mib}
	root, err := rig.Root()
	if err != nil {
		return err
	}
	d.loop = filepath.Join(root, "test/cuda/bin/cudaloop")
	var env []string
	if *fake {
		d.fake = filepath.Join(tmp, "driver")
		if env, err = fakeDriver(d.fake, filepath.Join(root, "test/cuda/bin/fake")); err != nil {
			return err
		}
	}
	if d.mib == 0 {
		if d.mib = 4096; *fake {
			d.mib = 256
		}
	}
	d.heading("1. A host with NVIDIA's driver", map[bool]string{true: "There is no NVIDIA GPU here, so a fake driver with two cards stands in for it."}[*fake])
	if d.rig, err = rig.Start(ctx, rig.Options{Dir: filepath.Join(tmp, "run"), Config: config, Env: env}); err != nil {
		return err
	}
	defer d.rig.Close()
	if err := d.show(ctx, "inventory"); err != nil {
		return err
	}
	if err := d.work(ctx, env); err != nil {
		return err
	}
	d.lines.Draw(out, "tens of kernels")
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		return err
	}
	svg := filepath.Join(*dir, "cuda.svg")
	if err := os.WriteFile(svg, d.lines.SVG("a CUDA program: tens of kernels per second while it is suspended, resumed and moved"), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(out, "  the same as a drawing: %s\n", svg)
	return nil
}

// fakeDriver makes the folder of a fake driver with two cards of one chip, and returns the
// environment of programs that use it.
func fakeDriver(dir, libraries string) ([]string, error) {
	for _, name := range []string{"dev", "cards", "procs"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			return nil, err
		}
	}
	text := "cuda 13000\ndriver 580.159.04\n"
	for i := range 2 {
		text += fmt.Sprintf("gpu GPU-00000000-0000-4000-8000-00000000000%d 233010de 0000:%02x:00.0 2048\n", i+1, 10+i)
		node := filepath.Join(dir, "dev", fmt.Sprintf("nvidia%d", i))
		if err := errors.Join(os.WriteFile(node, nil, 0o666), os.Truncate(node, 2<<30)); err != nil {
			return nil, err
		}
	}
	for _, name := range []string{"nvidiactl", "nvidia-uvm"} {
		if err := os.WriteFile(filepath.Join(dir, "dev", name), nil, 0o666); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "config"), []byte(text), 0o644); err != nil {
		return nil, err
	}
	return []string{"GPUCTL_FAKE_CUDA=" + dir, "GPUCTL_DRIVER_NODES=" + filepath.Join(dir, "dev"), "LD_LIBRARY_PATH=" + libraries}, nil
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

func (d *demo) heading(title, text string) {
	fmt.Fprintf(d.out, "\n%s\n%s\n", title, strings.Repeat("─", len([]rune(title))))
	if text != "" {
		fmt.Fprintln(d.out, text)
	}
}

// show runs a command of gpuctl and shows it with what it prints.
func (d *demo) show(ctx context.Context, args ...string) error {
	fmt.Fprintf(d.out, "  $ gpuctl %s\n", strings.Join(args, " "))
	text, err := d.rig.Gpuctl(ctx, args...)
	for line := range strings.Lines(string(text)) {
		fmt.Fprint(d.out, "    ", line)
	}
	return err
}

// program is the CUDA program while it runs.
type program struct {
	in    io.Closer
	ready chan struct{}
	ended chan error

	mu   sync.Mutex
	last string // line that it printed last
}

func (d *demo) start(ctx context.Context, env []string) (*program, error) {
	cmd := exec.CommandContext(ctx, d.rig.Bin("gpuctl"), "run", "--engine", "driver", "--", d.loop, "--mib", fmt.Sprint(d.mib), "--pause", "1000", "--say", "10")
	cmd.Env = append(d.rig.Env(), env...)
	cmd.Stderr = d.out
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	text, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p := &program{in: in, ready: make(chan struct{}), ended: make(chan error, 1)}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		lines := bufio.NewScanner(text)
		for lines.Scan() {
			line := lines.Text()
			switch {
			case strings.HasPrefix(line, "ready "):
				close(p.ready)
			case strings.HasPrefix(line, "round "):
				d.lines.Frame()
			}
			p.mu.Lock()
			p.last = line
			p.mu.Unlock()
		}
		p.ended <- cmd.Wait()
	}()
	return p, nil
}

// work runs the program and the operations on it.
func (d *demo) work(ctx context.Context, env []string) error {
	d.heading("2. A CUDA program", fmt.Sprintf("It has %d MiB on the GPU, changes them with kernels, and compares at its end.", d.mib))
	fmt.Fprintf(d.out, "  $ gpuctl run --engine driver -- cudaloop --mib %d\n", d.mib)
	d.lines = timeline.New()
	p, err := d.start(ctx, env)
	if err != nil {
		return err
	}
	defer p.in.Close()
	select {
	case <-p.ready:
	case err := <-p.ended:
		return fmt.Errorf("the program ended: %w: %s", errors.Join(err), p.last)
	case <-time.After(patience):
		return errors.New("the program does not begin")
	}
	id, err := d.rig.Session(ctx)
	if err != nil {
		return err
	}
	if err := d.show(ctx, "sessions"); err != nil {
		return err
	}
	second, err := d.other(ctx, id)
	if err != nil {
		return err
	}
	d.heading("3. Suspended, the GPU is free; resumed, it goes on", "")
	for _, args := range [][]string{{"suspend", id}, {"inventory"}, {"resume", id}} {
		if err := d.step(ctx, args...); err != nil {
			return err
		}
	}
	if second != "" {
		d.heading("4. Rehearsed, and moved to another GPU", "")
		for _, args := range [][]string{{"migrate", id, "--rehearse"}, {"migrate", id, "--to", second}, {"sessions"}} {
			if err := d.step(ctx, args...); err != nil {
				return err
			}
		}
	}
	if err := pause(ctx, each); err != nil {
		return err
	}
	d.lines.Finish()
	if err := p.in.Close(); err != nil {
		return err
	}
	d.heading("Verdict", "")
	if err := <-p.ended; err != nil {
		return fmt.Errorf("the program: %w: %s", err, p.last)
	}
	fmt.Fprintf(d.out, "  the program says: %s\n", p.last)
	if !strings.HasPrefix(p.last, "ok ") {
		return errors.New("its results are wrong")
	}
	return nil
}

// step lets the program work, and then runs a command. An operation is put on the timeline.
func (d *demo) step(ctx context.Context, args ...string) error {
	if args[0] == "inventory" || args[0] == "sessions" {
		return d.show(ctx, args...)
	}
	if err := pause(ctx, each); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "  $ gpuctl %s\n", strings.Join(args, " "))
	from := d.lines.Now()
	s, err := d.rig.Operate(ctx, args[0], args[1:]...)
	if err != nil {
		return err
	}
	if s.Error != "" {
		return fmt.Errorf("%s: %s", args[0], s.Error)
	}
	fmt.Fprintf(d.out, "    %s in %d ms\n", args[0], s.Total.Milliseconds())
	verb := args[0]
	if args[len(args)-1] == "--rehearse" {
		verb = "rehearse"
	}
	d.lines.Mark(timeline.Band{From: from, To: d.lines.Now(), Stopped: s.Stopped, Verb: verb})
	return nil
}

// other returns a free GPU of the same model as the session's, or "".
func (d *demo) other(ctx context.Context, id string) (string, error) {
	text, err := d.rig.Gpuctl(ctx, "-o", "json", "inventory", "--where", `free && "driver" in engines`)
	if err != nil {
		return "", err
	}
	var free []struct {
		ID    string `json:"id"`
		Model string `json:"model"`
	}
	if err := json.Unmarshal(text, &free); err != nil {
		return "", err
	}
	text, err = d.rig.Gpuctl(ctx, "-o", "json", "describe", "session", id)
	if err != nil {
		return "", err
	}
	var has struct {
		Model string `json:"model"`
	}
	if err := json.Unmarshal(text, &has); err != nil {
		return "", err
	}
	for _, g := range free {
		if g.Model == has.Model {
			return g.ID, nil
		}
	}
	return "", nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
