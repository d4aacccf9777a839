package hostile

import (
	"bufio"
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
	"strconv"
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
	least    = 19                     // of the priorities
	held     = 20 * time.Second       // how long a client holds what it has got
	calm     = 100 * time.Millisecond // after what was refused at once
)

// Target is what is attacked.
type Target struct {
	Root    string   `json:"root"`    // of the build: bin, test/cl/bin
	Dir     string   `json:"dir"`     // hostd's run folder
	Address string   `json:"address"` // of the port, HOST:PORT; it must listen on 127.0.0.0/8
	GPUs    []string `json:"gpus"`    // for hostile applications, one each
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

// boundaries are where they knock.
func boundaries() []string { return []string{"applications", "programs", "local", "port"} }

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
	Yield(os.Getpid())
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
	_ = json.NewEncoder(os.Stdout).Encode(play(ctx, t, clients(name)))
	os.Exit(0)
}

// Yield gives a process that leads a session of its own, and what it starts, few
// of the processors. Where the kernel groups processes by session
// (autogroup), priorities hold within a session alone, and the session has one
// of its own.
func Yield(pid int) {
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
	processes []*process
}

type process struct {
	boundary string
	cmd      *exec.Cmd
	stdin    io.Closer
	stdout   *bufio.Reader
}

// Start starts every client. The running program's Main plays them. They get
// processors that nobody else wants (SCHED_IDLE): with another priority they are
// left to their slices while those wait who are to be measured.
func Start(t Target) (*Clients, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("hostile clients: %w", err)
	}
	target, err := json.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("hostile clients: %w", err)
	}
	c := &Clients{}
	for i, name := range boundaries() {
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
		if _, err := stdin.Write(append(target, '\n')); err != nil {
			return c, fmt.Errorf("hostile clients: %w", err)
		}
	}
	return c, nil
}

// Stop ends them all and says how often each did what it does, as "BOUNDARY: CLIENT".
func (c *Clients) Stop() (map[string]int64, error) {
	for _, p := range c.processes {
		_ = p.stdin.Close()
	}
	all := map[string]int64{}
	var errs []error
	for _, p := range c.processes {
		// What it has started is of its process group, too.
		late := time.AfterFunc(held, func() { _ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) })
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
