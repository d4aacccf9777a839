package cuda

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/driver"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/excerpt"
)

// noCapability is more than any capability's number.
const noCapability = ^uintptr(0)

// canary is a process with a pattern on a GPU, which goes before the session's processes.
type canary struct {
	m       *Manager
	cmd     *exec.Cmd
	in      io.WriteCloser
	lines   chan string
	msg     *tail
	mb      *member
	settled bool // its state is known: it may be ended
}

// tail keeps the beginning of what a canary says.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b[:min(len(b), 1024-len(t.b))]...)
	return len(b), nil
}

func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return excerpt.Of(string(t.b), 256)
}

// startCanary starts one and waits until it has its pattern.
func (m *Manager) startCanary(gpu ask.UUID) (*canary, error) {
	h := m.cfg.Canary
	if h.Path == "" {
		h.Path, h.Args = "/proc/self/exe", []string{"driver", "canary"}
	}
	cmd := exec.Command(h.Path, append(slices.Clone(h.Args), string(gpu))...)
	cmd.Env = h.Env
	if cmd.Env == nil {
		cmd.Env = syscall.Environ()
	}
	// It must see the GPU, whatever gpuguest was told to see.
	cmd.Env = slices.DeleteFunc(slices.Clone(cmd.Env), func(v string) bool { return strings.HasPrefix(v, "CUDA_VISIBLE_DEVICES=") })
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	msg := &tail{}
	cmd.Stderr, cmd.WaitDelay = msg, time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	err = confine.OnThread(func() error {
		if err := confine.KeepOnly(noCapability); err != nil {
			return err
		}
		return cmd.Start()
	})
	if err != nil {
		return nil, fmt.Errorf("start a canary: %w", err)
	}
	c := &canary{m: m, cmd: cmd, in: in, lines: make(chan string, 4), msg: msg, settled: true}
	go func() {
		defer close(c.lines)
		sc := bufio.NewScanner(io.LimitReader(out, 1<<20))
		for sc.Scan() {
			c.lines <- sc.Text()
		}
	}()
	if err := c.expect(driver.CanaryReady); err != nil {
		c.end()
		return nil, fmt.Errorf("start a canary on %s: %w", gpu, err)
	}
	p, err := holders.Pin(cmd.Process.Pid, 0)
	if err != nil {
		c.end()
		return nil, err
	}
	p.Close()
	c.mb = &member{PID: p.PID, Start: p.Start, Uses: []ask.UUID{gpu}, Used: []uint64{0}, Slots: []int{0}, state: ask.Running}
	return c, nil
}

// expect waits for a word.
func (c *canary) expect(word string) error {
	select {
	case line, ok := <-c.lines:
		if !ok {
			return fmt.Errorf("it has ended: %s", c.msg.text())
		}
		if line != word {
			return fmt.Errorf("it says %.80q, not %q", line, word)
		}
		return nil
	case <-time.After(c.m.cfg.Deadlines.Slack):
		return ask.ErrDeadline
	}
}

// end ends a canary. It has been suspended if it was restored: killing a process that was
// restored has hung hosts.
func (c *canary) end() {
	c.in.Close()
	if c.settled {
		_ = c.cmd.Process.Kill()
	}
	done := make(chan struct{})
	go func() {
		_ = c.cmd.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(c.m.cfg.Deadlines.State):
		c.m.log.Warn("a canary does not end", "pid", c.cmd.Process.Pid)
	}
}

// way has a canary locked, suspended, restored on a GPU and unlocked, and look whether its
// pattern is there.
func (c *canary) way(ctx context.Context, by *caller, to ask.UUID) error {
	c.settled = false
	for _, g := range []struct {
		state ask.State
		dest  []ask.UUID
	}{{ask.Checkpointed, nil}, {ask.Running, []ask.UUID{to}}} {
		if err := by.bring(ctx, c.mb, g.state, g.dest); err != nil {
			return err
		}
	}
	if _, err := io.WriteString(c.in, driver.CanaryCheck+"\n"); err != nil {
		return err
	}
	return c.expect(driver.CanaryGood)
}

// canaries sends a canary through the operation: on each GPU that the session is on, and
// from there to the one that it goes to.
func (op *operation) canaries(ctx context.Context) error {
	s := op.s
	s.mu.Lock()
	from := slices.Clone(s.rec.GPUs)
	s.mu.Unlock()
	by := *op.caller
	by.began = nil
	by.s = &session{m: s.m, id: s.id, log: s.log, silent: true} // not in the session's journal
	for slot, f := range from {
		first, then := f.UUID, op.to[slot]
		if op.kind == kindResume || op.kind == kindRevive {
			first = then // the old one may be gone
		}
		op.reporter.Waits(fmt.Sprintf("a canary tries it on %s", first))
		if err := op.canary(ctx, &by, first, then); err != nil {
			if ctx.Err() != nil || errors.Is(err, ErrUnsettled) {
				return fmt.Errorf("a canary on %s: %w", first, err)
			}
			var rs reasons
			rs.add(ReasonCanary, "a test process did not bear what the session's were to go through, from %s to %s: %v", first, then, err)
			return engine.Refuse([]*gpuctlv1.Reason(rs))
		}
	}
	return nil
}

func (op *operation) canary(ctx context.Context, by *caller, first, then ask.UUID) error {
	c, err := op.s.m.startCanary(first)
	if err != nil {
		return err
	}
	defer c.end()
	err = c.way(ctx, by, first)
	if err == nil && then != first {
		err = c.way(ctx, by, then)
	}
	if err == nil {
		err = by.bring(ctx, c.mb, ask.Checkpointed, nil)
	}
	c.settled = err == nil || c.mb.state == ask.Checkpointed || c.mb.state == ask.Failed || errors.Is(err, ErrLost)
	return err
}
