package executor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/exact"
)

// Errors of the control interface.
var (
	// ErrBusy is returned by Freeze when the device does not drain in time.
	ErrBusy = errors.New("the device is still busy")
	// ErrState is returned for a request that does not fit the executor's state.
	ErrState = errors.New("not in this state")
)

// controller implements ExecutorService. gpuguest sends one request after the other; op
// protects against two gpuguests at the same time.
type controller struct {
	s  *session
	op sync.Mutex
}

func (c *controller) Describe(_ context.Context, _ *connect.Request[gpuctlv1.DescribeRequest]) (*connect.Response[gpuctlv1.DescribeResponse], error) {
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &gpuctlv1.DescribeResponse{Usage: s.describe(), Generation: s.cfg.Generation, Frozen: s.frozen, Active: s.active.Load(), Freezes: s.freezes, FreezesAfter: s.far != nil}
	for _, d := range s.devices {
		r.Devices = append(r.Devices, deviceLimits(d.vendor))
	}
	b, _ := cl.GetPlatformInfo(s.platf, cl.PlatformName)
	r.Platform, r.Driver = cl.CString(b), infoString(s.devices[0].vendor, cl.DriverVersion)
	return connect.NewResponse(r), nil
}

// describe returns what the session uses, for users and for the check of limits.
func (s *session) describe() *gpuctlv1.Usage {
	u := &gpuctlv1.Usage{
		Memory: s.memory, LargestAlloc: s.usage.LargestAlloc, LargestWorkGroup: s.usage.LargestWorkGroup,
		WorkItemSizes: s.usage.WorkItems[:], LocalMemory: s.usage.LocalMemory, Dirty: s.dirtyBytes(),
		Calls: s.calls, Launches: s.usage.Launches, Held: uint32(len(s.parked)),
	}
	if s.far != nil {
		u.FromFar = s.cfg.Far.Acceptor.Compress.Traffic()
	}
	u.LargestAlloc = 0 // only of existing objects; released ones need not fit another device
	s.each(func(_ uint32, _ uint64, o any) {
		switch o := o.(type) {
		case *mem:
			if o.kind == memImage {
				u.Images++
			} else {
				u.Buffers++
			}
			if o.parent == nil {
				u.LargestAlloc = max(u.LargestAlloc, o.size)
			}
			u.Mapped += uint32(len(o.maps))
		case *program:
			u.Programs++
		case *kernel:
			u.Kernels++
		case *queue:
			u.Queues++
		case *clContext:
			u.Contexts++
		}
	})
	return u
}

func (c *controller) Snapshot(_ context.Context, _ *connect.Request[gpuctlv1.SnapshotRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	return c.s.snapshot()
}

func (s *session) snapshot() (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, err := s.graph(s.frozen).encode()
	if err != nil {
		return nil, err
	}
	s.checkConst()
	return connect.NewResponse(&gpuctlv1.SnapshotResponse{Graph: b, Usage: s.describe(), Dirty: s.dirtyBytes()}), nil
}

func (c *controller) Prepare(_ context.Context, r *connect.Request[gpuctlv1.PrepareRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	c.op.Lock()
	defer c.op.Unlock()
	s := c.s
	defer s.does("objects are being made")()
	if s.active.Load() {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("prepare an active executor: %w", ErrState))
	}
	g, err := decodeGraph(r.Msg.Graph)
	if err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	if r.Msg.Final && !g.Final {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("graph of a running session as the final one: %w", ErrState))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var last time.Time
	report := func(step string, done, total uint64) {
		if time.Since(last) < 50*time.Millisecond {
			return
		}
		last = time.Now()
		_ = out.Send(&gpuctlv1.Progress{Step: step, BytesDone: done, BytesTotal: total})
	}
	if err := s.restore(g, report); err != nil {
		code := connect.CodeInternal
		if errors.Is(err, ErrRefused) {
			code = connect.CodeFailedPrecondition
		}
		return connect.NewError(code, err)
	}
	s.prepared = g.Final
	return nil
}

func (c *controller) Export(ctx context.Context, r *connect.Request[gpuctlv1.ExportRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	c.op.Lock()
	defer c.op.Unlock()
	// The request may have waited for a long time. It must not take the connection of a later one.
	if err := ctx.Err(); err != nil {
		return err
	}
	s := c.s
	defer s.does("contents are being read")()
	m := r.Msg
	if m.Final && !s.isFrozen() {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("final export of a running session: %w", ErrState))
	}
	var last time.Time
	var sentTotal uint64
	report := func(step string, done, total uint64) {
		sentTotal = done
		if time.Since(last) < 50*time.Millisecond && done < total {
			return
		}
		last = time.Now()
		_ = out.Send(&gpuctlv1.Progress{Step: step, BytesDone: done, BytesTotal: total})
	}
	var err error
	switch {
	case m.Fetch != "" && s.far != nil:
		err = s.far.fetches.export(ctx, s, m.Fetch, m.All, m.Final, report)
	case m.Peer != "" && s.far != nil:
		err = s.far.exportHome(ctx, s, m, report)
	case m.Peer != "":
		var p *peerSink
		if p, err = s.dialPeer(ctx, m.Peer); err == nil {
			err = s.export(ctx, m.Peer, m.All, m.Final, p, report)
		}
	case m.Memory:
		err = s.exportState(ctx, "memory", m, report)
	case m.File != "":
		err = s.exportState(ctx, m.File, m, report)
	default:
		err = connect.NewError(connect.CodeInvalidArgument, errors.New("export to where?"))
	}
	if err != nil {
		var ce *connect.Error
		if errors.As(err, &ce) {
			return err
		}
		return connect.NewError(connect.CodeInternal, err)
	}
	return out.Send(&gpuctlv1.Progress{Step: "copy", BytesDone: sentTotal, BytesTotal: sentTotal})
}

// exportState writes contents to a state file. The first call reserves space in the file;
// so most of a session can be written before it is frozen.
func (s *session) exportState(ctx context.Context, to string, m *gpuctlv1.ExportRequest, report progress) error {
	if m.All || s.stateName != to {
		s.dropState()
	}
	if s.stateTo == nil {
		f := s.state
		if to != "memory" {
			var err error
			if f, err = s.takeFile(to, true); err != nil {
				return err
			}
		} else if err := f.Truncate(0); err != nil {
			return fmt.Errorf("state memory: %w", err)
		}
		s.stateTo, s.stateName = newStateFile(s, f, to == "memory"), to
	}
	w := s.stateTo
	if err := w.reserve(); err != nil {
		s.dropState()
		return err
	}
	if err := s.export(ctx, to, m.All, m.Final, w, report); err != nil {
		s.dropState() // who has given it up may not live to say so
		return err
	}
	if !m.Final {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	defer w.letGo()
	if err := w.finish(); err != nil {
		return err
	}
	w.whole = true
	return nil
}

// handed is the last file descriptor that gpuguest has sent. An executor opens no file that
// a request names.
type handed struct {
	mu   sync.Mutex
	name string
	f    *os.File
}

func (h *handed) put(name string, f *os.File) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.f != nil {
		h.f.Close()
	}
	h.name, h.f = name, f
}

// takeFile returns the file that was handed over with that name. A far executor has a file of
// its own, whose content the carrier brings or gets.
func (s *session) takeFile(name string, create bool) (*os.File, error) {
	if s.far == nil {
		return s.handed.take(name)
	}
	return s.far.stateFile(name, create)
}

func (h *handed) take(name string) (*os.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.f == nil || h.name != name {
		return nil, fmt.Errorf("%s was not handed over: %w", name, ErrState)
	}
	f := h.f
	h.name, h.f = "", nil
	return f, nil
}

// Discard is for a caller that must not empty the state memory itself: this process dies
// when it writes to pages that are no longer there.
func (c *controller) Discard(ctx context.Context, _ *connect.Request[gpuctlv1.DiscardRequest]) (*connect.Response[gpuctlv1.DiscardResponse], error) {
	c.op.Lock()
	defer c.op.Unlock()
	// The request may have waited for a long time. It must not undo a later export.
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if c.s.isFrozen() { // the state may be complete, and is all that there is then
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("discard the state of a frozen session: %w", ErrState))
	}
	c.s.dropState()
	c.s.far.dropOutlets()
	c.s.mu.Lock()
	c.s.closeWindow()
	c.s.mu.Unlock()
	return connect.NewResponse(&gpuctlv1.DiscardResponse{}), nil
}

// EndFetch does not wait for other calls: what it ends may be what they wait for.
func (c *controller) EndFetch(context.Context, *connect.Request[gpuctlv1.EndFetchRequest]) (*connect.Response[gpuctlv1.EndFetchResponse], error) {
	c.s.far.endFetch()
	return connect.NewResponse(&gpuctlv1.EndFetchResponse{}), nil
}

// dropState forgets a state file that is not needed. The client of the request removes the
// file.
func (s *session) dropState() {
	if s.stateTo == nil {
		return
	}
	s.stateTo.release()
	if s.stateTo.memory {
		_ = s.state.Truncate(0)
	} else {
		s.stateTo.f.Close()
	}
	s.stateTo = nil
}

func (c *controller) Freeze(ctx context.Context, r *connect.Request[gpuctlv1.FreezeRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	c.op.Lock()
	defer c.op.Unlock()
	defer c.s.does("what was launched has to end")()
	if err := c.s.expects(r.Msg.Freeze); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	limit := time.Duration(r.Msg.TimeoutMs) * time.Millisecond
	if limit <= 0 {
		limit = 10 * time.Second
	}
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	asked, err := c.s.far.awaitAsked(within, r.Msg.After, r.Msg.Streams)
	if err == nil {
		err = c.s.far.drain(within)
	}
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	if blockers, err := c.s.freeze(ctx, limit); err != nil {
		ce := connect.NewError(connect.CodeFailedPrecondition, err)
		if d, derr := connect.NewErrorDetail(&gpuctlv1.SnapshotResponse{Blockers: blockers}); derr == nil {
			ce.AddDetail(d)
		}
		return nil, ce
	}
	r2, err := c.s.snapshot()
	if err == nil {
		r2.Msg.GatedNs = time.Since(c.s.gatedAt).Nanoseconds()
	}
	for _, st := range asked {
		c.s.far.sayDone(st, remote.Words(r.Msg.After+1))
	}
	return r2, err
}

// expects returns an error for the request of a freeze that was undone before it came.
func (s *session) expects(freeze uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if next := s.freezes + 1; freeze != 0 && freeze != next {
		return fmt.Errorf("freeze %d, but the next one is %d: %w", freeze, next, ErrState)
	}
	return nil
}

func (s *session) isFrozen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.frozen
}

// freeze closes the gate of the ring and waits until the device is idle. Nothing on the
// device waits for the application, so this ends when the commands that were launched have
// ended.
func (s *session) freeze(ctx context.Context, limit time.Duration) ([]string, error) {
	if !s.active.Load() || s.isFrozen() {
		return nil, fmt.Errorf("freeze: %w", ErrState)
	}
	deadline := time.Now().Add(limit)
	idle := min(limit/8, longestIdleWait)
	if s.far != nil {
		idle = 0 // the carrier reads no requests any more: the application stands still already
	}
	s.awaitIdle(ctx, idle)
	s.wakeAll()
	s.mu.Lock()
	cs := s.contexts()
	marks, _ := s.markers(cs) // what they do not tell of is waited for at the end
	s.mu.Unlock()
	drained := make(chan bool, 1)
	go func() {
		_, all := awaitAll(marks)
		drained <- all
	}()
	undo := func(what ...string) ([]string, error) {
		s.out.begin()
		if !s.out.offer() {
			what = append(what, "what its kernels print is not taken: the application makes no call, or nobody reads its output")
		}
		s.mu.Lock()
		s.gate.Store(false)
		s.advance() // it continues transfers that have stopped for the freeze
		s.mu.Unlock()
		s.wakeAll()
		go s.tidy()
		return what, fmt.Errorf("%w after %s: %v", ErrBusy, limit, what)
	}
	select {
	case all := <-drained:
		if !all {
			return undo("the runtime refuses to wait for a command, which has not ended")
		}
	case <-time.After(time.Until(deadline)):
		return undo("a command that was launched has not ended")
	case <-ctx.Done():
		return undo("given up by the caller")
	}
	for nap := 5 * time.Microsecond; s.inflight.Load() > 0; nap = min(2*nap, time.Millisecond) {
		if time.Now().After(deadline) {
			return undo(s.busyWith())
		}
		if ctx.Err() != nil {
			return undo("given up by the caller")
		}
		exact.Sleep(nap)
	}
	if !s.out.hold(ctx, deadline) {
		return undo()
	}
	if ctx.Err() != nil { // the client has gone and would not know that the session is frozen
		return undo("given up by the caller")
	}
	s.mu.Lock()
	for _, c := range s.contexts() {
		for _, q := range c.queues {
			if q.busy() {
				q.drain()
				q.idle = q.seq
			}
			s.settle(q, true)
		}
		s.bury(c)
	}
	s.deliver()
	s.mu.Unlock()
	if !s.awaitPushed(ctx, deadline) {
		return undo("the application does not run its callbacks: more of them wait than its ring has room for")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frozen = true
	s.freezes++
	return nil, nil
}

// longestIdleWait is how long a freeze waits for a moment in which the device has nothing
// to do. An application that waits for its results has such moments. If one is found, the
// time in which earlier commands end is not part of the downtime.
const longestIdleWait = 300 * time.Millisecond

// awaitIdle closes the gate when the device has nothing to do, or when the time is over.
func (s *session) awaitIdle(ctx context.Context, limit time.Duration) {
	s.mu.Lock()
	s.gateWanted, s.gated = true, make(chan struct{})
	gated := s.gated
	s.gateIfIdle()
	s.mu.Unlock()
	select {
	case <-gated:
	case <-ctx.Done():
	case <-time.After(limit):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gateWanted {
		s.closeGate()
	}
}

// gateIfIdle closes the gate if that was requested and the device has nothing to do. The
// caller holds s.mu.
func (s *session) gateIfIdle() {
	if !s.gateWanted {
		return
	}
	for _, c := range s.contexts() {
		if c.busy() {
			return
		}
	}
	s.closeGate()
}

func (s *session) closeGate() {
	s.gateWanted = false
	s.gatedAt = time.Now()
	s.gate.Store(true)
	s.withdrawTurns()
	close(s.gated)
}

func (s *session) busyWith() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	builds := 0
	for _, o := range s.objs {
		if p, ok := o.(*program); ok && p.building {
			builds++
		}
	}
	if builds > 0 {
		return fmt.Sprintf("%d programs are being built", builds)
	}
	return fmt.Sprintf("%d calls have not ended", s.inflight.Load())
}

func (c *controller) Thaw(ctx context.Context, r *connect.Request[gpuctlv1.ThawRequest]) (*connect.Response[gpuctlv1.ThawResponse], error) {
	c.op.Lock()
	defer c.op.Unlock()
	if c.s.ring.Owner() != c.s.cfg.Generation {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("thaw, but another executor owns the session: %w", ErrState))
	}
	// The request may have waited for a long time. It must not undo a later freeze.
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.s.mu.Lock()
	due := c.s.frozen && (r.Msg.GetFreeze() == 0 || r.Msg.GetFreeze() == c.s.freezes)
	if !c.s.frozen && r.Msg.GetFreeze() == c.s.freezes+1 {
		c.s.freezes++ // its request may still be under way
	}
	c.s.mu.Unlock()
	if due {
		c.s.thaw()
	}
	return connect.NewResponse(&gpuctlv1.ThawResponse{}), nil
}

func (s *session) thaw() {
	s.dropState()
	s.far.dropOutlets()
	s.mu.Lock()
	s.out.begin()
	s.frozen, s.sent = false, false
	s.exportedTo = ""
	s.closeWindow()
	s.gate.Store(false)
	s.advance()
	s.mu.Unlock()
	s.wakeWatches()
	s.wakeAll()
	go s.worker()
	go s.tidy() // it frees what only the target needed
}

func (c *controller) Load(ctx context.Context, r *connect.Request[gpuctlv1.LoadRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	c.op.Lock()
	defer c.op.Unlock()
	s := c.s
	defer s.does("contents are being loaded")()
	if s.active.Load() {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("load into an active executor: %w", ErrState))
	}
	f := s.state
	if !r.Msg.Memory {
		var err error
		if f, err = s.takeFile(r.Msg.File, false); err != nil {
			return connect.NewError(connect.CodeNotFound, err)
		}
		defer f.Close()
	}
	if err := s.fetchContents(ctx); err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	var last time.Time
	err := s.load(f, func(step string, done, total uint64) {
		if time.Since(last) > 50*time.Millisecond || done == total {
			last = time.Now()
			_ = out.Send(&gpuctlv1.Progress{Step: step, BytesDone: done, BytesTotal: total})
		}
	})
	if err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	return nil
}

func (c *controller) Activate(ctx context.Context, r *connect.Request[gpuctlv1.ActivateRequest]) (*connect.Response[gpuctlv1.ActivateResponse], error) {
	c.op.Lock()
	defer c.op.Unlock()
	s := c.s
	s.far.endFetch() // the former host has no say any more
	if s.far != nil {
		s.far.names.Store(r.Msg.NamesShown)
	}
	if err := s.far.own(ctx, s); err != nil {
		return nil, connect.NewError(connect.CodeUnavailable, err)
	}
	if s.ring.Owner() != s.cfg.Generation {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("activate generation %d, the ring's owner is %d: %w", s.cfg.Generation, s.ring.Owner(), ErrState))
	}
	if !s.active.Load() {
		s.activate()
	}
	return connect.NewResponse(&gpuctlv1.ActivateResponse{}), nil
}

// activate makes this executor serve the session.
func (s *session) activate() {
	s.mu.Lock()
	s.resumeClock()
	s.ring.SetServing(s.cfg.Generation)
	s.unpinPeerWindow()
	s.out.begin()
	s.active.Store(true)
	s.cfg.Budget.Take(s.memory) // no more than was counted already
	s.advance()
	s.mu.Unlock()
	go s.worker()
	s.wakeWatches()
	go s.tidy()
}

// tidy frees host memory that only former executors needed, when they have ended and no
// command can use it any more.
func (s *session) tidy() {
	const most = 2 * time.Second
	for nap, again := 20*time.Millisecond, true; again; nap = min(2*nap, most) {
		time.Sleep(nap)
		s.mu.Lock()
		if s.frozen || s.closed.Load() { // another executor may serve the session; a thaw calls tidy again
			s.mu.Unlock()
			return
		}
		again = !s.host.reclaim()
		for _, m := range s.buffers() {
			if m.unified || !m.inArena || !m.hasArena {
				continue
			}
			if m.users > 0 || m.ctx.busy() || m.isMapped() {
				again = true
				continue
			}
			s.host.free(m.arena)
			m.pinTried = false
			m.hasArena, m.inArena = false, false
		}
		s.mu.Unlock()
	}
}

// buffers lists the objects that own content, except images.
func (s *session) buffers() []*mem {
	var out []*mem
	s.each(func(_ uint32, _ uint64, o any) {
		if m, ok := o.(*mem); ok && m.kind == memBuffer {
			out = append(out, m)
		}
	})
	return out
}

func (c *controller) Retire(_ context.Context, _ *connect.Request[gpuctlv1.RetireRequest]) (*connect.Response[gpuctlv1.RetireResponse], error) {
	c.s.retire()
	return connect.NewResponse(&gpuctlv1.RetireResponse{}), nil
}

func (s *session) retire() {
	s.once.Do(func() {
		s.gate.Store(true)
		s.mu.Lock()
		s.closeWindow()
		if s.frozen && s.ring.Owner() == s.cfg.Generation && (s.sent || s.stateTo != nil && s.stateTo.whole && !s.stateTo.memory) {
			// All content is in the file or has left the VM, and nobody has taken over.
			// So host memory can be freed, except what the application has mapped.
			s.each(func(_ uint32, _ uint64, o any) {
				if m, ok := o.(*mem); ok && m.parent == nil && m.hasArena && !m.isMapped() {
					s.host.punch(m.arena, pages(m.shadowSize()))
				}
			})
		}
		s.mu.Unlock()
		close(s.stop)
	})
}

// contexts returns those that the application has, and those that it has released but not its commands.
func (s *session) contexts() []*clContext {
	cs := slices.Clone(s.leaving)
	for _, o := range s.objs {
		if c, ok := o.(*clContext); ok {
			cs = append(cs, c)
		}
	}
	return cs
}
