package hostile

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// If root starts the clients, those of each boundary are a user of their own, so
// that none takes what its user may have from the others: LastUID and those
// before it. All are of the group GID.
const (
	LastUID = 65534
	GID     = 65534
)

const (
	variable = "GPUCTL_TEST_HOSTILE"
	held     = 20 * time.Second       // how long a client holds what it has got
	ending   = 5 * time.Minute        // how long clients may take to end: they get what others leave
	piece    = 500 * time.Microsecond // of what a neighbour computes
	calm     = 100 * time.Millisecond // after what was refused at once

	ticksPerSecond = 100 // of processors' time in /proc
)

// Target is what is attacked.
type Target struct {
	Root    string   `json:"root"`    // of the build: bin, test/cl/bin
	Dir     string   `json:"dir"`     // hostd's run folder
	Address string   `json:"address"` // of the port, HOST:PORT; it must listen on 127.0.0.0/8
	GPUs    []string `json:"gpus"`    // for hostile applications, one each

	// Compute, if not nil, has the clients of each boundary attack nothing and
	// compute instead, for so many seconds each second.
	Compute map[string]float64 `json:"compute,omitempty"`
}

func (t Target) hostd() string { return filepath.Join(t.Dir, "hostd.sock") }
func (t Target) apps() string  { return filepath.Join(t.Dir, "app.sock") }

// client is one way to be hostile. Its run is called again and again, by so many
// at a time, and returns how often it did what it does.
type client struct {
	name string
	many int
	run  func(context.Context, Target) int
}

// Boundaries are where they knock.
func Boundaries() []string { return []string{"applications", "programs", "local", "port"} }

func clients(boundary string) []client {
	switch boundary {
	case "applications":
		return applications()
	case "programs":
		return programs()
	case "local":
		return local()
	}
	return port()
}

// Main plays hostile clients and does not return, in a process that Start has
// started. In all others it does nothing.
func Main() {
	name := os.Getenv(variable)
	if name == "" {
		return
	}
	yield(os.Getpid())
	var t Target
	in := bufio.NewReader(os.Stdin)
	line, err := in.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &t)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "hostile:", err)
		os.Exit(1)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, in)
		cancel()
	}()
	list := clients(name)
	if t.Compute != nil {
		list = []client{neighbour(t.Compute[name])}
	}
	_ = json.NewEncoder(os.Stdout).Encode(play(ctx, t, list))
	os.Exit(0)
}

// Group is a control group whose processes get the processors that nobody else
// wants. Where the kernel groups processes by session (autogroup), a policy such
// as SCHED_IDLE holds within a session alone: between sessions, one of the least
// priority still keeps a processor up to a tick of the clock while others wait.
type Group struct{ dir string }

// NewGroup makes a group, if this process may and the kernel has such groups.
// Without one, Take does what policies and priorities can.
func NewGroup() *Group {
	for _, root := range []string{"/sys/fs/cgroup/cpu", "/sys/fs/cgroup"} {
		dir, err := os.MkdirTemp(root, "gpuctl-hostile-")
		if err != nil {
			continue
		}
		if os.WriteFile(filepath.Join(dir, "cpu.idle"), []byte("1"), 0) == nil {
			return &Group{dir}
		}
		_ = os.Remove(dir) // no groups of processors here
	}
	return &Group{}
}

// Idle reports whether the processes of the group really get what is left only.
func (g *Group) Idle() bool { return g.dir != "" }

func (g *Group) set(idle string) {
	if g.dir != "" {
		_ = os.WriteFile(filepath.Join(g.dir, "cpu.idle"), []byte(idle), 0)
	}
}

// Take puts a process that leads a session of its own, and what it starts, into
// the group.
func (g *Group) Take(pid int) error {
	yield(pid)
	if g.dir == "" {
		return nil
	}
	if err := os.WriteFile(filepath.Join(g.dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("hostile clients: control group: %w", err)
	}
	return nil
}

// Close removes the group; its processes must have ended.
func (g *Group) Close() error {
	if g.dir == "" {
		return nil
	}
	if err := os.Remove(g.dir); err != nil {
		return fmt.Errorf("hostile clients: control group: %w", err)
	}
	return nil
}

func yield(pid int) {
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, t := range tasks {
		tid, _ := strconv.Atoi(t.Name())
		_ = unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0)
	}
	if sid, err := unix.Getsid(pid); err == nil && sid == pid {
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/autogroup", pid), []byte("10"), 0) // not every kernel has it
	}
}

// play runs clients until ctx ends, and says how often each did what it does.
func play(ctx context.Context, t Target, clients []client) map[string]int64 {
	done := make([]atomic.Int64, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		for range c.many {
			wg.Go(func() {
				for ctx.Err() == nil {
					n := c.run(ctx, t)
					done[i].Add(int64(n))
					if n == 0 {
						rest(ctx, calm)
					}
				}
			})
		}
	}
	wg.Wait()
	out := map[string]int64{}
	for i, c := range clients {
		out[c.name] = done[i].Load()
	}
	return out
}

func rest(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// Clients are all hostile clients, at work.
type Clients struct {
	group     *Group
	processes []*process
}

type process struct {
	boundary string
	cmd      *exec.Cmd
	stdin    io.Closer
	stdout   *bufio.Reader
}

// Start starts every client, or those of the boundaries that are named, in a
// group. The running program's Main plays them. On one machine, clients and those
// who are measured want the same processors: traces of the scheduler show that
// two thirds of what the slowest calls wait for is that a client has the processor,
// if the clients are processes of the least priority. In a group that is idle they
// give it up at once, and what others notice is what gpuctl does for them.
func Start(g *Group, t Target, only ...string) (*Clients, error) {
	const self = "/proc/self/exe" // which other users may start wherever it lies
	target, err := json.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("hostile clients: %w", err)
	}
	c := &Clients{group: g}
	g.set("1")
	for i, name := range Boundaries() {
		if len(only) > 0 && !slices.Contains(only, name) {
			continue
		}
		p := &process{boundary: name, cmd: exec.Command(self)}
		p.cmd.Env = append(os.Environ(), variable+"="+name, "HOME=/nonexistent")
		p.cmd.Stderr = os.Stderr
		p.cmd.WaitDelay = 5 * time.Second
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
		if os.Geteuid() == 0 {
			p.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: LastUID - uint32(i), Gid: GID}
		}
		stdin, err := p.cmd.StdinPipe()
		if err != nil {
			return c, fmt.Errorf("hostile clients: %w", err)
		}
		p.stdin = stdin
		stdout, err := p.cmd.StdoutPipe()
		if err != nil {
			return c, fmt.Errorf("hostile clients: %w", err)
		}
		p.stdout = bufio.NewReader(stdout)
		if err := p.cmd.Start(); err != nil {
			return c, fmt.Errorf("hostile clients: %w", err)
		}
		c.processes = append(c.processes, p)
		if err := g.Take(p.cmd.Process.Pid); err != nil { // it waits for its target
			return c, err
		}
		if _, err := stdin.Write(append(target, '\n')); err != nil {
			return c, fmt.Errorf("hostile clients: %w", err)
		}
	}
	return c, nil
}

// Processor is how many seconds of a processor the clients of each boundary, and
// what they have started, have had so far.
func (c *Clients) Processor() map[string]float64 {
	had := map[int]float64{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		text, _ := os.ReadFile(file)
		// After the name: state, parent, group, session, ..., and from the 12th on
		// ticks as user and as system, and the same of children that were waited for.
		f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		if len(f) < 15 {
			continue // it has just ended
		}
		session, _ := strconv.Atoi(f[3])
		for _, ticks := range f[11:15] {
			n, _ := strconv.ParseFloat(ticks, 64)
			had[session] += n / ticksPerSecond
		}
	}
	out := map[string]float64{}
	for _, p := range c.processes {
		out[p.boundary] = had[p.cmd.Process.Pid]
	}
	return out
}

// Stop ends them all and says how often each did what it does, as "BOUNDARY: CLIENT".
func (c *Clients) Stop() (map[string]int64, error) {
	c.group.set("0") // on a busy machine they could not even end
	for _, p := range c.processes {
		_ = p.stdin.Close()
	}
	all := map[string]int64{}
	var errs []error
	for _, p := range c.processes {
		// What it has started is of its process group, too.
		late := time.AfterFunc(ending, func() { _ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) })
		var done map[string]int64
		if err := json.NewDecoder(p.stdout).Decode(&done); err != nil {
			errs = append(errs, fmt.Errorf("hostile clients of %s: %w", p.boundary, err))
		}
		if err := p.cmd.Wait(); err != nil {
			errs = append(errs, fmt.Errorf("hostile clients of %s: %w", p.boundary, err))
		}
		late.Stop()
		for name, n := range maps.All(done) {
			all[p.boundary+": "+name] = n
		}
	}
	c.processes = nil
	return all, errors.Join(errs...)
}

// once dials, and calls f with a connection that ends with it, with ctx, or
// after a time.
func once(ctx context.Context, network, address string, f func(net.Conn)) int {
	c, err := dialer(network).DialContext(ctx, network, address)
	if err != nil {
		return 0
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	_ = c.SetDeadline(time.Now().Add(held))
	f(c)
	return 1
}

// dialer comes from one of several addresses, as several machines would.
func dialer(network string) *net.Dialer {
	d := &net.Dialer{Timeout: held}
	if network == "tcp" {
		d.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+rand.IntN(16)))}
	}
	return d
}

// neighbour does nothing to gpuctl. It computes for a share of the time, in short
// pieces as the hostile do.
func neighbour(share float64) client {
	return client{"neighbour", 1, func(ctx context.Context, _ Target) int {
		for begin, had := time.Now(), own(); ctx.Err() == nil; {
			if (own() - had).Seconds() >= share*time.Since(begin).Seconds() {
				rest(ctx, piece)
				continue
			}
			for end := time.Now().Add(piece); time.Now().Before(end); {
			}
		}
		return 1
	}}
}

// own is how long this process has had a processor.
func own() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// hold waits until the other side ends the connection.
func hold(c net.Conn) { _, _ = io.Copy(io.Discard, c) }

func noise(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return b
}

// pour writes without end.
func pour(w io.Writer, b []byte) {
	for {
		if _, err := w.Write(b); err != nil {
			return
		}
	}
}

// trickle writes a few bytes a second.
func trickle(ctx context.Context, c net.Conn, b []byte) {
	for i := range b {
		if _, err := c.Write(b[i : i+1]); err != nil || ctx.Err() != nil {
			return
		}
		rest(ctx, 300*time.Millisecond)
	}
}
