package cuda

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/guest/cuda/driver"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

const (
	programs = "../../test/cuda/bin"
	cardA    = ask.UUID("GPU-23350000-0000-0000-0000-00000000000a")
	cardB    = ask.UUID("GPU-23350000-0000-0000-0000-00000000000b")
	other    = ask.UUID("GPU-20b00000-0000-0000-0000-00000000000c")
)

// TestMain makes the fake, or is one of the processes that the manager starts, or a
// gpuguest that is to die.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 {
		var err error
		switch os.Args[1] {
		case "helper":
			err = driver.Serve(ask.Op(os.Args[2]), os.Stdin, os.Stdout)
		case "canary":
			err = driver.Canary(ask.UUID(os.Args[2]), os.Stdin, os.Stdout)
		case "guest":
			err = dyingGuest(os.Args[2:])
		default:
			os.Exit(m.Run())
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// rig is a machine with cards of the fake, and a gpuguest.
type rig struct {
	t      *testing.T
	dir    string
	cfg    Config
	m      *Manager
	log    *testkit.Log
	broken bool // the test breaks the driver's rules itself
}

func newRig(t *testing.T, change ...func(*Config)) *rig {
	t.Helper()
	if out, err := exec.Command("make", "-C", "../../test/cuda").CombinedOutput(); err != nil {
		t.Fatalf("make the fake: %v\n%s", err, out)
	}
	r := &rig{t: t, dir: t.TempDir(), log: &testkit.Log{}}
	for _, d := range []string{"dev", "cards", "procs"} {
		if err := os.Mkdir(filepath.Join(r.dir, d), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []string{"nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"} {
		if err := os.WriteFile(filepath.Join(r.dir, "dev", n), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	r.configure()
	r.cfg = configOf(r.dir)
	for _, c := range change {
		c(&r.cfg)
	}
	r.open()
	t.Cleanup(func() {
		r.m.Close()
		if b, _ := os.ReadFile(filepath.Join(r.dir, "violations")); len(b) > 0 && !r.broken {
			t.Errorf("the driver's rules were broken:\n%s", b)
		}
		if t.Failed() {
			t.Log(r.log.String())
		}
	})
	return r
}

func environment(dir string) []string {
	lib, err := filepath.Abs(programs + "/fake")
	if err != nil {
		panic(err)
	}
	return append(os.Environ(), "GPUCTL_FAKE_CUDA="+dir, "LD_LIBRARY_PATH="+lib)
}

func configOf(dir string) Config {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	env := environment(dir)
	return Config{
		Dir: filepath.Join(dir, "run"), Faults: true, NoCanary: true, Parallel: 1, UID: uint32(os.Geteuid()),
		Roots:  holders.Roots{Dev: filepath.Join(dir, "dev")},
		CRIU:   criu.Program{Path: filepath.Join(dir, "criu")},
		Helper: ask.Helper{Path: exe, Args: []string{"helper"}, Env: env},
		Canary: ask.Helper{Path: exe, Args: []string{"canary"}, Env: env},
	}
}

// configure writes the fake's configuration: two cards of one chip with 64 MiB, and what is
// added.
func (r *rig) configure(lines ...string) {
	r.t.Helper()
	head := []string{
		"gpu " + string(cardA) + " 233510de 00000000:01:00.0 256",
		"gpu " + string(cardB) + " 233510de 00000000:02:00.0 256",
	}
	r.write(append(head, lines...)...)
}

func (r *rig) write(lines ...string) {
	r.t.Helper()
	path := filepath.Join(r.dir, "config")
	if err := os.WriteFile(path+".new", []byte(strings.Join(lines, "\n")+"\n"), 0o666); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) open() {
	r.t.Helper()
	m, err := New(r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.m = m
}

// program is cudaloop.
type program struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
	pid   int
}

// start starts cudaloop in a session of its own and waits until it has its memory.
func (r *rig) start(env []string, args ...string) *program {
	r.t.Helper()
	return r.startProgram(programs+"/cudaloop", append(environment(r.dir), env...), nil, args...)
}

func (r *rig) startProgram(path string, env []string, as *syscall.Credential, args ...string) *program {
	r.t.Helper()
	cmd := exec.Command(path, args...)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: as}
	p := &program{t: r.t, cmd: cmd, lines: make(chan string, 64)}
	var err error
	if p.in, err = cmd.StdinPipe(); err != nil {
		r.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	p.pid = cmd.Process.Pid
	r.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	go func() {
		defer close(p.lines)
		sc := bufio.NewScanner(out)
		for sc.Scan() {
			p.lines <- sc.Text()
		}
	}()
	if line := <-p.lines; !strings.HasPrefix(line, "ready ") {
		r.t.Fatalf("cudaloop says %q", line)
	}
	return p
}

// works ends the program, which compares what its GPU has computed with what the host has.
func (p *program) works() {
	p.t.Helper()
	p.in.Close()
	last := ""
	for line := range p.lines {
		last = line
	}
	if !strings.HasPrefix(last, "ok") {
		p.t.Errorf("the program says %q after all, not that its result is right", last)
	}
}

// adopt makes a session of a process.
func (r *rig) adopt(pid int) string {
	r.t.Helper()
	resp, err := r.m.Adopt(context.Background(), &gpuctlv1.AdoptRequest{Pid: uint32(pid)})
	if err != nil || len(resp.GetSessions()) != 1 {
		r.t.Fatalf("adopt: %v, %v", resp, err)
	}
	return resp.GetSessions()[0].GetId()
}

func targetTo(uuids ...ask.UUID) *gpuctlv1.Target {
	t := &gpuctlv1.Target{}
	for _, u := range uuids {
		t.Driver = append(t.Driver, &gpuctlv1.DriverGPU{Uuid: string(u)})
	}
	return t
}

// do runs an operation.
func (r *rig) do(id, kind string, to ...ask.UUID) *gpuctlv1.SwapResult {
	r.t.Helper()
	res, err := r.m.operate(context.Background(), id, kind, targetTo(to...), 2000, "", nil)
	if err != nil {
		r.t.Fatalf("%s: %v", kind, err)
	}
	return res
}

// done runs an operation that must succeed.
func (r *rig) done(id, kind string, to ...ask.UUID) *gpuctlv1.SwapResult {
	r.t.Helper()
	res := r.do(id, kind, to...)
	if res.GetError() != "" {
		r.t.Fatalf("%s: %s", kind, res.GetError())
	}
	return res
}

func (r *rig) session(id string) *gpuctlv1.Session {
	r.t.Helper()
	s, err := r.m.lookup(id)
	if err != nil {
		r.t.Fatal(err)
	}
	return s.snapshot()
}

// state asks the driver.
func (r *rig) state(pid int) ask.State {
	r.t.Helper()
	a, err := r.m.ask.Call(context.Background(), ask.Request{Op: ask.GetState, PID: pid}, time.Minute)
	if err != nil {
		r.t.Fatalf("state of %d: %v", pid, err)
	}
	return a.State
}

// on returns the GPUs that processes have memory on.
func (r *rig) on(pid int) []ask.UUID {
	r.t.Helper()
	c, err := r.m.look(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	us, _ := c.uses(pid)
	return us
}

// nodes returns the nodes that a process has open.
func (r *rig) nodes(pid int) []string {
	r.t.Helper()
	l, err := r.cfg.Roots.Take(true)
	if err != nil {
		r.t.Fatal(err)
	}
	if h := l.Holders[pid]; h != nil {
		return h.Nodes
	}
	return nil
}

func (r *rig) touch(name string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), nil, 0o666); err != nil {
		r.t.Fatal(err)
	}
}

// codes returns the codes of reasons.
func codes(rs []*gpuctlv1.Reason) []string {
	var out []string
	for _, r := range rs {
		out = append(out, r.GetCode())
	}
	return out
}

// settled waits until no operation runs, and returns the session.
func (r *rig) settled(id string) *gpuctlv1.Session {
	r.t.Helper()
	testkit.Until(r.t, "the session is settled", func() error {
		s, err := r.m.lookup(id)
		if err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.op != nil {
			return errors.New(s.message)
		}
		return nil
	})
	return r.session(id)
}

// dyingGuest runs one operation and dies at a call of the driver: DIR KIND TO WHEN OP N.
// With the kinds store and revive: DIR KIND POINT CRIU.
func dyingGuest(args []string) error {
	cfg := configOf(args[0])
	if args[1] == kindStore || args[1] == kindRevive {
		die := func(point string) {
			if point == args[2] {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
		cfg.at, cfg.crash = die, func(when string, o ask.Op) { die(when + " " + string(o)) }
		cfg.CRIU.Path = args[3]
		m, err := New(cfg)
		if err != nil {
			return err
		}
		dir := filepath.Join(args[0], "disk")
		var res *gpuctlv1.SwapResult
		if args[1] == kindStore {
			res, err = m.Store(context.Background(), m.list()[0].id, dir, 2000, "", nil)
		} else {
			res, err = m.Revive(context.Background(), dir, nil, "", nil)
		}
		return fmt.Errorf("did not die: %v, %w", res, err)
	}
	n, err := strconv.Atoi(args[5])
	if err != nil {
		return err
	}
	cfg.crash = func(when string, o ask.Op) {
		if string(o) != args[4] {
			return
		}
		if when == "before" {
			n--
		}
		switch {
		case n != 0:
		case args[3] == when:
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		case args[3] == "during" && when == "before":
			go func() { // the fake's call is slow then
				time.Sleep(100 * time.Millisecond)
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}()
		}
	}
	m, err := New(cfg)
	if err != nil {
		return err
	}
	ss := m.list()
	if len(ss) != 1 {
		return fmt.Errorf("%d sessions", len(ss))
	}
	res, err := m.operate(context.Background(), ss[0].id, args[1], targetTo(ask.UUID(args[2])), 2000, "", nil)
	return fmt.Errorf("did not die: %v, %w", res, err)
}
