package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
)

// Deadlines are time limits of calls of the driver. A helper that takes longer is killed.
type Deadlines struct {
	Look  time.Duration // to list GPUs
	State time.Duration // to ask for a process's state
	Slack time.Duration // for every other call, beside what its bytes take
	Rate  uint64        // bytes a second that a state is moved with at least
}

func (d Deadlines) withDefaults() Deadlines {
	set := func(v *time.Duration, to time.Duration) {
		if *v <= 0 {
			*v = to
		}
	}
	set(&d.Look, time.Minute) // without persistence mode, the driver wakes each GPU first, which takes seconds
	set(&d.State, 10*time.Second)
	set(&d.Slack, time.Minute)
	if d.Rate == 0 {
		d.Rate = 100 << 20 // a tenth of the slowest that was measured
	}
	return d
}

// of returns the time limit of a call.
func (d Deadlines) of(o ask.Op, bytes uint64, lock time.Duration) time.Duration {
	switch o {
	case ask.GetState:
		return d.State
	case ask.Lock:
		return d.Slack + lock
	}
	return d.Slack + time.Duration(bytes/d.Rate)*time.Second
}

// after returns the state that a call leads to.
func after(o ask.Op) ask.State {
	switch o {
	case ask.Checkpoint:
		return ask.Checkpointed
	case ask.Unlock:
		return ask.Running
	}
	return ask.Locked
}

// goal is a state that members are brought into.
type goal struct {
	state ask.State
	// dest has the GPUs of each member; nil: those that it has.
	dest [][]ask.UUID
}

func (g goal) of(i int) []ask.UUID {
	if g.dest == nil {
		return nil
	}
	return g.dest[i]
}

// caller asks the driver about the members of one session.
type caller struct {
	s     *session
	shown []ask.UUID    // GPUs that the driver shows now
	lock  time.Duration // how long the driver may wait for kernels
	pool  *pool
	began func(ask.Op) // called before each call of the driver; may be nil
}

// bring brings a member into a state, on given GPUs if dest is not nil. It begins with the
// state that the driver reports, so it may be repeated. Errors may wrap ErrLost,
// ErrUnsettled or holders.ErrGone.
func (c *caller) bring(ctx context.Context, mb *member, want ask.State, dest []ask.UUID) error {
	const most = 8 // calls; a way that is longer goes in circles
	for range most {
		st, err := c.state(ctx, mb)
		if err != nil {
			return err
		}
		there := dest == nil || slices.Equal(mb.Uses, dest)
		if st == want && (there || st == ask.Checkpointed) {
			return nil
		}
		var next ask.Op
		switch st {
		case ask.Running:
			next = ask.Lock
		case ask.Locked:
			next = ask.Checkpoint
			if want == ask.Running && there {
				next = ask.Unlock
			}
		case ask.Checkpointed:
			next = ask.Restore
		case ask.Failed:
			return lostError(mb.PID, errors.New("its state is FAILED"))
		default: // another program stores its state, or one did and died
			return fmt.Errorf("pid %d is %s: %w", mb.PID, st, ErrUnsettled)
		}
		to := dest
		if to == nil {
			to = mb.Uses
		}
		if err := c.call(ctx, mb, next, to); err != nil {
			return err
		}
	}
	return fmt.Errorf("pid %d does not become %s: %w", mb.PID, want, ErrUnsettled)
}

// state returns the state of a member. It asks the driver if it is not known.
func (c *caller) state(ctx context.Context, mb *member) (ask.State, error) {
	if mb.state != "" {
		return mb.state, nil
	}
	m := c.s.m
	if err := c.outlive(ctx, mb); err != nil {
		return "", err
	}
	a, err := m.ask.Call(context.WithoutCancel(ctx), ask.Request{Op: ask.GetState, PID: mb.PID, Start: mb.Start}, m.cfg.Deadlines.State)
	var refused *ask.DriverError
	switch {
	case errors.Is(err, ask.ErrGone):
		return "", fmt.Errorf("pid %d: %w", mb.PID, holders.ErrGone)
	case errors.As(err, &refused) && refused.NoCUDA():
		if c.gone(mb) {
			return "", fmt.Errorf("pid %d: %w", mb.PID, holders.ErrGone)
		}
		return "", lostError(mb.PID, err)
	case err != nil:
		return "", fmt.Errorf("pid %d: %w: %w", mb.PID, ErrUnsettled, err)
	}
	if err := c.settle(mb, a.State); err != nil {
		return "", err
	}
	return a.State, nil
}

// settle notes what a call has done whose answer was lost: the state tells.
func (c *caller) settle(mb *member, st ask.State) error {
	return c.s.update(func(*record) {
		mb.state = st
		call := mb.Call
		if call == nil {
			return
		}
		if st == after(call.Op) {
			mb.done(call)
		}
		mb.Call = nil
	})
}

// done notes that a call was done.
func (mb *member) done(call *callRecord) {
	switch call.Op {
	case ask.Restore:
		mb.Uses = slices.Clone(call.Uses)
	case ask.Checkpoint:
		mb.Shown = slices.Clone(call.Shown)
	}
}

// outlive waits for the helper of an earlier gpuguest: its call may still run.
func (c *caller) outlive(ctx context.Context, mb *member) error {
	if mb.Call == nil || mb.Call.Helper <= 1 {
		return nil
	}
	p, err := holders.Pin(mb.Call.Helper, mb.Call.Start)
	if errors.Is(err, holders.ErrGone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("helper of an earlier gpuguest: %w: %w", ErrUnsettled, err)
	}
	defer p.Close()
	limit := time.NewTimer(c.s.m.cfg.Deadlines.of(mb.Call.Op, mb.bytes(), c.lock))
	defer limit.Stop()
	select {
	case <-p.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pid %d: %w: %w", mb.PID, ErrUnsettled, ctx.Err())
	case <-limit.C:
		return fmt.Errorf("pid %d: %w: helper %d of an earlier gpuguest still asks the driver to %s it", mb.PID, ErrUnsettled, p.PID, mb.Call.Op)
	}
}

func (mb *member) bytes() (n uint64) {
	for _, b := range mb.Used {
		n += b
	}
	return n
}

func (c *caller) gone(mb *member) bool {
	p, err := holders.Pin(mb.PID, mb.Start)
	if err != nil {
		return errors.Is(err, holders.ErrGone)
	}
	p.Close()
	return false
}

// call asks the driver for one thing. It is journalled before the helper is asked: a helper
// that nobody has asked ends by itself.
func (c *caller) call(ctx context.Context, mb *member, o ask.Op, dest []ask.UUID) error {
	m := c.s.m
	req := ask.Request{Op: o, PID: mb.PID, Start: mb.Start}
	rec := &callRecord{Op: o}
	switch o {
	case ask.Lock:
		req.TimeoutMS = max(1, c.lock.Milliseconds())
	case ask.Checkpoint:
		rec.Shown = c.shown
	case ask.Restore:
		rec.Uses = dest
		pairs, err := pairsFor(mb.Uses, dest, mb.Shown, c.shown)
		if err != nil {
			return fmt.Errorf("pid %d: %w", mb.PID, err)
		}
		req.Pairs = pairs
	}
	w, err := c.pool.take(m, o, mb.PID)
	if err != nil {
		return err
	}
	rec.Helper = w.PID()
	if p, err := holders.Pin(w.PID(), 0); err == nil {
		rec.Start = p.Start
		p.Close()
	}
	if err := c.s.update(func(*record) { mb.Call = rec }); err != nil {
		w.End()
		return err
	}
	if c.began != nil {
		c.began(o)
	}
	if m.cfg.crash != nil {
		m.cfg.crash("before", o)
	}
	_, err = w.Ask(req, m.cfg.Deadlines.of(o, mb.bytes(), c.lock))
	if m.cfg.crash != nil {
		m.cfg.crash("after", o)
	}
	if err == nil {
		return c.settle(mb, after(o))
	}
	c.s.mu.Lock()
	mb.state = ""
	c.s.mu.Unlock()
	return c.failed(ctx, mb, o, err)
}

// failed judges a call that has failed, by the code and the state that the process has now.
func (c *caller) failed(ctx context.Context, mb *member, o ask.Op, err error) error {
	if errors.Is(err, ask.ErrGone) || c.gone(mb) {
		return fmt.Errorf("pid %d: %w", mb.PID, holders.ErrGone)
	}
	var refused *ask.DriverError
	if errors.As(err, &refused) {
		switch {
		case o == ask.Restore && (refused.Code == ask.CodeOutOfMemory || refused.Code == ask.CodeSystem):
			return lostError(mb.PID, err) // each later call says the same
		case o == ask.Unlock && (refused.Code == ask.CodeSystem || refused.Code == ask.CodeIllegalState):
			return lostError(mb.PID, err)
		}
	}
	st, serr := c.state(ctx, mb)
	switch {
	case errors.Is(serr, holders.ErrGone), errors.Is(serr, ErrLost):
		return serr
	case serr != nil:
		return fmt.Errorf("%w; %w", err, serr)
	case st == ask.Failed:
		return lostError(mb.PID, err)
	case st == after(o):
		return nil // only the answer was lost
	}
	return err
}
