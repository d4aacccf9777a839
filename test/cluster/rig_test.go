package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/rundir"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/test/rig"
)

// root is a folder like that of a build: bin, lib and the test programs.
type root string

func (r root) bin(name string) string     { return filepath.Join(string(r), "bin", name) }
func (r root) program(name string) string { return filepath.Join(string(r), "test", "cl", "bin", name) }

// build makes the programs from the sources as they are. What is made with a C
// compiler for applications comes from the last make.
func build(t *testing.T) root {
	t.Helper()
	from, err := rig.Root()
	if err != nil {
		t.Fatal(err)
	}
	to := t.TempDir()
	for _, name := range []string{"gpuctl", "hostd", "gpuguest"} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(to, "bin", name), "./cmd/"+name)
		cmd.Dir = from
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", name, err, out)
		}
	}
	for _, name := range []string{"lib", "test"} {
		if err := os.Symlink(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
			t.Fatal(err)
		}
	}
	r := root(to)
	if _, err := os.Stat(r.program("stream")); err != nil {
		t.Fatalf("no test programs (%v): run make", err)
	}
	return r
}

const hostConfig = `version: 1
discover: false
cluster: {host: %s, listen: "%s"}
gpus:
  - id: small
    runtime: pocl
    env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "1"}
    model: Small
  - id: large
    runtime: pocl
    env: {POCL_DEVICES: pthread, POCL_MEMORY_LIMIT: "4"}
    model: Large
models:
  - {name: Large, rank: 2}
  - {name: Small, rank: 1}
`

// host is one hostd.
type host struct {
	t          *testing.T
	root       root
	name, dir  string
	data, port string
	log        *testkit.Log
	cmd        *exec.Cmd
	ended      chan struct{}
}

func newHost(t *testing.T, r root, name string) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "gx") // short: sockets lie in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := rig.Passable(dir); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	h := &host{t: t, root: r, name: name, dir: dir, data: filepath.Join(dir, "data"), port: l.Addr().String(), log: &testkit.Log{}}
	if err := os.WriteFile(filepath.Join(dir, "hostd.yaml"), fmt.Appendf(nil, hostConfig, name, h.port), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.stop()
		if t.Failed() {
			text := h.log.String()
			t.Logf("log of %s:\n%s", name, text[max(0, len(text)-6<<10):])
		}
	})
	return h
}

func (h *host) socket() string { return filepath.Join(h.dir, "hostd.sock") }

func (h *host) start() {
	h.t.Helper()
	h.cmd = exec.Command(h.root.bin("hostd"), "--config", filepath.Join(h.dir, "hostd.yaml"), "--rundir", h.dir, "--data-dir", h.data)
	h.cmd.Stdout, h.cmd.Stderr = h.log, h.log
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	h.cmd.WaitDelay = time.Second // gpuguest has the log, too
	if err := h.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan struct{})
	h.ended = ended
	go func(cmd *exec.Cmd) { _ = cmd.Wait(); close(ended) }(h.cmd)
	testkit.Until(h.t, "hostd of "+h.name+" answers", func() error {
		select {
		case <-ended:
			h.t.Fatalf("hostd of %s ended", h.name)
		default:
		}
		return testkit.Want(rundir.Answers(h.socket()))
	})
}

// kill ends hostd as a crash does; gpuguest and its sessions go on.
func (h *host) kill() {
	_ = h.cmd.Process.Kill()
	<-h.ended
}

func (h *host) stop() {
	if h.cmd == nil {
		return
	}
	_ = h.cmd.Process.Signal(syscall.SIGCONT)
	_ = h.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-h.ended:
	case <-time.After(10 * time.Second):
		h.t.Errorf("hostd of %s does not end", h.name)
		h.kill()
	}
	if peer, err := unixrpc.PeerOf(filepath.Join(h.dir, "guest.sock")); err == nil {
		_ = syscall.Kill(int(peer.PID), syscall.SIGTERM)
	}
	h.cmd = nil
}

func (h *host) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, h.root.bin("gpuctl"), args...)
	cmd.Env = append(os.Environ(), "GPUCTL_HOST=unix://"+h.socket())
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// gpuctl runs a command; an error has what it said.
func (h *host) gpuctl(ctx context.Context, args ...string) (string, error) {
	return output(h.command(ctx, args...))
}

func output(cmd *exec.Cmd) (string, error) {
	var out, all bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.MultiWriter(&out, &all), &all
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("gpuctl %s: %w: %s", strings.Join(cmd.Args[1:], " "), err, strings.TrimSpace(all.String()))
	}
	return out.String(), nil
}

func (h *host) must(ctx context.Context, args ...string) string {
	h.t.Helper()
	out, err := h.gpuctl(ctx, args...)
	if err != nil {
		h.t.Fatalf("%s: %v", h.name, err)
	}
	return out
}

type object = map[string]any

// get lists a kind.
func (h *host) get(ctx context.Context, kind string, args ...string) (out []object, err error) {
	text, err := h.gpuctl(ctx, append([]string{"-o", "json", "get", kind}, args...)...)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		return nil, fmt.Errorf("get %s: %w: %s", kind, err, text)
	}
	return out, nil
}

// names are the objects' values of a field, sorted.
func names(objects []object, field string) []string {
	var out []string
	for _, o := range objects {
		out = append(out, fmt.Sprint(o[field]))
	}
	slices.Sort(out)
	return out
}

type status struct {
	Joined  bool   `json:"joined"`
	Leader  string `json:"leader"`
	Message string `json:"message"`
	Members []struct {
		Host    string `json:"host"`
		Voter   bool   `json:"voter"`
		Healthy bool   `json:"healthy"`
	} `json:"members"`
}

func (h *host) status(ctx context.Context) (s status, err error) {
	text, err := h.gpuctl(ctx, "-o", "json", "cluster", "status")
	if text != "" { // it is printed when something is wrong, too
		err = json.Unmarshal([]byte(text), &s)
	}
	return s, err
}

// within checks how long something took. On a machine with more to do than it
// has processors, that is not the program's doing.
func within(t *testing.T, what string, took, limit time.Duration) {
	t.Helper()
	t.Logf("%s: %v", what, took.Round(time.Millisecond))
	if took <= limit {
		return
	}
	var load float64
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(text), &load)
	}
	if busy := 2 * float64(runtime.NumCPU()); load > busy && took <= 5*limit {
		t.Logf("%s: longer than %v, with a load of %v", what, limit, load)
		return
	}
	t.Errorf("%s: it took %v, not %v at most; load %v", what, took, limit, load)
}

// complete waits until all vote and are healthy.
func complete(ctx context.Context, t *testing.T, hosts []*host) {
	t.Helper()
	testkit.Until(t, "complete", func() error {
		l, _, err := leader(ctx, hosts)
		if err != nil {
			return err
		}
		s, err := l.status(ctx)
		if err != nil {
			return err
		}
		n := 0
		for _, m := range s.Members {
			if m.Voter && m.Healthy {
				n++
			}
		}
		if n != len(hosts) {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

func leader(ctx context.Context, hosts []*host) (l *host, others []*host, err error) {
	for _, h := range hosts {
		s, e := h.status(ctx)
		if err = e; err != nil {
			continue
		}
		for _, x := range hosts {
			if x.name == s.Leader {
				l = x
			} else {
				others = append(others, x)
			}
		}
		if l != nil {
			return l, others, nil
		}
		others, err = nil, errors.New("there is no leader")
	}
	return nil, nil, err
}
