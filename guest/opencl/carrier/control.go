package carrier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/executor"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// errState is returned for a request that does not fit the carrier's state.
var errState = errors.New("not in this state")

// defaultFreeze is how long a freeze may wait for the application, as in an executor.
const defaultFreeze = 10 * time.Second

func acceptNothing() connect.ClientOption { return connect.WithAcceptCompression("gzip", nil, nil) }

// controller implements ExecutorService. Most calls are forwarded to the far executor.
type controller struct {
	c  *carrier
	op sync.Mutex
}

var _ gpuctlv1connect.ExecutorServiceHandler = (*controller)(nil)

// forwarded turns an error of the far executor into one of this carrier.
func forwarded(err error) error {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return err
	}
	out := connect.NewError(ce.Code(), errors.New(ce.Message()))
	if ce.Code() == connect.CodeUnavailable { // the caller would take it for a carrier that is not ready
		out = connect.NewError(connect.CodeAborted, fmt.Errorf("the far host is not reached: %s", ce.Message()))
	}
	for _, d := range ce.Details() {
		out.AddDetail(d)
	}
	return out
}

func unary[Req, Resp any](ctx context.Context, r *connect.Request[Req], call func(context.Context, *connect.Request[Req]) (*connect.Response[Resp], error)) (*connect.Response[Resp], error) {
	resp, err := call(ctx, connect.NewRequest(r.Msg))
	if err != nil {
		return nil, forwarded(err)
	}
	return connect.NewResponse(resp.Msg), nil
}

// sender is the caller's end of a stream.
type sender[Msg any] interface{ Send(m *Msg) error }

// relay forwards a stream of the far executor.
func relay[Req, Msg any](ctx context.Context, r *connect.Request[Req], out sender[Msg],
	call func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Msg], error),
) error {
	st, err := call(ctx, connect.NewRequest(r.Msg))
	if err != nil {
		return forwarded(err)
	}
	defer st.Close()
	for st.Receive() {
		if err := out.Send(st.Msg()); err != nil {
			return err
		}
	}
	if err := st.Err(); err != nil {
		return forwarded(err)
	}
	return nil
}

// Describe implements ExecutorService.
func (k *controller) Describe(ctx context.Context, r *connect.Request[gpuctlv1.DescribeRequest]) (*connect.Response[gpuctlv1.DescribeResponse], error) {
	resp, err := unary(ctx, r, k.c.far.Describe)
	if err != nil {
		return nil, err
	}
	k.c.freezesAfter.Store(resp.Msg.FreezesAfter)
	resp.Msg.Generation, resp.Msg.Active = k.c.cfg.Generation, k.c.active.Load()
	// The application stands still as long as its requests are not read, whatever the far executor does.
	resp.Msg.Frozen = resp.Msg.Frozen || resp.Msg.Active && k.c.gate.closed.Load()
	if resp.Msg.Usage == nil {
		resp.Msg.Usage = &gpuctlv1.Usage{}
	}
	resp.Msg.Usage.ToFar = k.c.dialer.Compress.Traffic()
	return resp, nil
}

// Snapshot implements ExecutorService.
func (k *controller) Snapshot(ctx context.Context, r *connect.Request[gpuctlv1.SnapshotRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	return unary(ctx, r, k.c.far.Snapshot)
}

// Prepare implements ExecutorService.
func (k *controller) Prepare(ctx context.Context, r *connect.Request[gpuctlv1.PrepareRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	k.op.Lock()
	defer k.op.Unlock()
	if r.Msg.Final {
		reads, err := executor.ParkedReads(r.Msg.Graph)
		if err != nil {
			return connect.NewError(connect.CodeInvalidArgument, err)
		}
		k.c.mu.Lock()
		for _, x := range reads {
			if x.Off < k.c.arena.Size() && x.Len <= k.c.arena.Size()-x.Off {
				k.c.expect(x.Slot, x.Pend, x.Off, x.Len)
			}
		}
		k.c.mu.Unlock()
	}
	if err := relay(ctx, r, out, k.c.far.Prepare); err != nil {
		return err
	}
	k.c.prepared.Store(r.Msg.Final)
	return nil
}

// Export implements ExecutorService.
func (k *controller) Export(ctx context.Context, r *connect.Request[gpuctlv1.ExportRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	k.op.Lock()
	defer k.op.Unlock()
	switch {
	case r.Msg.Peer == "":
		return k.c.exportState(ctx, r.Msg, out)
	case r.Msg.Fetch != "":
		return k.c.exportStraight(ctx, r.Msg, out)
	}
	return k.c.export(ctx, r.Msg, out)
}

// Digest implements ExecutorService.
func (k *controller) Digest(ctx context.Context, r *connect.Request[gpuctlv1.DigestRequest]) (*connect.Response[gpuctlv1.DigestResponse], error) {
	k.op.Lock()
	defer k.op.Unlock()
	return unary(ctx, r, k.c.far.Digest)
}

// EndFetch implements ExecutorService. It does not wait for other calls.
func (k *controller) EndFetch(ctx context.Context, r *connect.Request[gpuctlv1.EndFetchRequest]) (*connect.Response[gpuctlv1.EndFetchResponse], error) {
	return unary(ctx, r, k.c.far.EndFetch)
}

// Discard implements ExecutorService.
func (k *controller) Discard(ctx context.Context, r *connect.Request[gpuctlv1.DiscardRequest]) (*connect.Response[gpuctlv1.DiscardResponse], error) {
	k.op.Lock()
	defer k.op.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	resp, err := unary(ctx, r, k.c.far.Discard)
	if err == nil { // a frozen session's state may be all that there is
		k.c.dropState()
		k.c.exports.drop()
	}
	return resp, err
}

// Freeze implements ExecutorService. First the ring's reader stops, and what it has read
// reaches the far executor. When the far executor is frozen, its answers are waited for.
func (k *controller) Freeze(ctx context.Context, r *connect.Request[gpuctlv1.FreezeRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	k.op.Lock()
	defer k.op.Unlock()
	c := k.c
	if !c.active.Load() || c.frozen.Load() {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("freeze: %w", errState))
	}
	gated := time.Now()
	// A reader that can't send, as the connection is broken, does not keep the caller.
	c.gate.close(c.ring.WakeReader, func() bool { return c.over() || ctx.Err() != nil })
	resp, last, err := c.freezeFar(ctx, r.Msg)
	if err != nil {
		if connect.CodeOf(err) == connect.CodeFailedPrecondition {
			c.gate.open()
		} else { // it may be frozen, or the request still be under way
			c.unsure.Store(r.Msg.Freeze)
		}
		return nil, err
	}
	c.frozen.Store(true)
	c.mapped.Store(resp.Msg.GetUsage().GetMapped() > 0)
	late, err := executor.LateUnmaps(resp.Msg.Graph)
	if err == nil {
		err = c.keepLate(late)
	}
	if err == nil {
		err = c.awaitAnswer(ctx, last)
	}
	if err != nil {
		return nil, err
	}
	limit := time.Duration(r.Msg.TimeoutMs) * time.Millisecond
	if limit <= 0 {
		limit = defaultFreeze
	}
	taken, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := c.awaitTaken(taken); err != nil {
		return nil, err // the caller thaws
	}
	resp.Msg.GatedNs = time.Since(gated).Nanoseconds()
	return resp, nil
}

// freezeFar freezes the far executor when it has done what was sent. It also returns the question whose
// answer follows all that the far executor had said before. A network's delay is part of the
// downtime, so the far executor waits for the first question itself, and answers the second one
// unasked.
func (c *carrier) freezeFar(ctx context.Context, m *gpuctlv1.FreezeRequest) (*connect.Response[gpuctlv1.SnapshotResponse], question, error) {
	q, err := c.ask(ctx)
	orders := c.freezesAfter.Load()
	if err == nil && !orders {
		err = c.awaitAnswer(ctx, q)
	}
	if err != nil {
		return nil, q, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	req := &gpuctlv1.FreezeRequest{TimeoutMs: m.TimeoutMs, Freeze: m.Freeze}
	last := q
	if orders {
		req.After, req.Streams = q.n, uint32(len(q.streams))
		last = c.next(q)
	}
	resp, err := unary(ctx, connect.NewRequest(req), c.far.Freeze)
	if err == nil && !orders {
		last, err = c.ask(ctx)
	}
	return resp, last, err
}

// Thaw implements ExecutorService.
func (k *controller) Thaw(ctx context.Context, r *connect.Request[gpuctlv1.ThawRequest]) (*connect.Response[gpuctlv1.ThawResponse], error) {
	k.op.Lock()
	defer k.op.Unlock()
	if k.c.ring.Owner() != k.c.cfg.Generation {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("thaw, but another executor owns the session: %w", errState))
	}
	return k.c.thaw(ctx, r)
}

func (c *carrier) thaw(ctx context.Context, r *connect.Request[gpuctlv1.ThawRequest]) (*connect.Response[gpuctlv1.ThawResponse], error) {
	if n := c.unsure.Load(); n != 0 {
		r.Msg.Freeze = n
	}
	resp, err := unary(ctx, r, c.far.Thaw)
	// An error may mean that only the answer was lost.
	d, derr := unary(ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}), c.far.Describe)
	if derr != nil || d.Msg.Frozen {
		return resp, cmp.Or(err, derr)
	}
	c.dropState()
	c.exports.drop()
	_ = c.keepLate(nil)
	c.unsure.Store(0)
	c.frozen.Store(false)
	c.gate.open()
	return connect.NewResponse(&gpuctlv1.ThawResponse{}), nil
}

// Send implements ExecutorService.
func (k *controller) Send(ctx context.Context, r *connect.Request[gpuctlv1.SendRequest], out *connect.ServerStream[gpuctlv1.StateChunk]) error {
	k.op.Lock()
	defer k.op.Unlock()
	return relay(ctx, r, out, k.c.far.Send)
}

// Receive implements ExecutorService.
func (k *controller) Receive(ctx context.Context, in *connect.ClientStream[gpuctlv1.StateChunk]) (*connect.Response[gpuctlv1.ReceiveResponse], error) {
	k.op.Lock()
	defer k.op.Unlock()
	st := k.c.far.Receive(ctx)
	for in.Receive() {
		if err := st.Send(in.Msg()); err != nil {
			break // the far executor's answer has the reason
		}
	}
	if err := in.Err(); err != nil {
		return nil, err // without the end, the far executor refuses what has come
	}
	resp, err := st.CloseAndReceive()
	if err != nil {
		return nil, forwarded(err)
	}
	return connect.NewResponse(resp.Msg), nil
}

// Activate implements ExecutorService.
func (k *controller) Activate(ctx context.Context, _ *connect.Request[gpuctlv1.ActivateRequest]) (*connect.Response[gpuctlv1.ActivateResponse], error) {
	k.op.Lock()
	defer k.op.Unlock()
	c := k.c
	if c.ring.Owner() != c.cfg.Generation {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("activate generation %d, the ring's owner is %d: %w", c.cfg.Generation, c.ring.Owner(), errState))
	}
	if err := c.activate(ctx); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.ActivateResponse{}), nil
}

// activate makes the far executor serve the session, and begins to read the ring.
func (c *carrier) activate(ctx context.Context) error {
	if c.active.Load() {
		return nil
	}
	said, err := c.freeLanes(true)
	if err != nil {
		return err
	}
	if said { // it must know which lanes are in use before it uses any
		if err := c.sync(ctx); err != nil {
			return connect.NewError(connect.CodeAborted, err)
		}
	}
	if _, err := unary(ctx, connect.NewRequest(&gpuctlv1.ActivateRequest{NamesShown: true}), c.far.Activate); err != nil {
		// If only the answer was lost, the far executor serves the session, and nobody else may.
		d, derr := unary(ctx, connect.NewRequest(&gpuctlv1.DescribeRequest{}), c.far.Describe)
		if derr != nil || !d.Msg.Active {
			return err
		}
	}
	c.imports.drop()
	c.ring.SetServing(c.cfg.Generation)
	c.ring.SetBulkFrom(bulkFrom)
	c.active.Store(true)
	c.gate.open()
	return nil
}

// Retire implements ExecutorService.
func (k *controller) Retire(ctx context.Context, r *connect.Request[gpuctlv1.RetireRequest]) (*connect.Response[gpuctlv1.RetireResponse], error) {
	k.c.retire(ctx)
	return connect.NewResponse(&gpuctlv1.RetireResponse{}), nil
}

func (c *carrier) retire(ctx context.Context) {
	c.once.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		if _, err := c.far.Retire(ctx, connect.NewRequest(&gpuctlv1.RetireRequest{})); err != nil {
			c.log.Warn("the far executor is left to the end of its lease", "err", err)
		}
		close(c.stop)
	})
}

// farPulseAfter is how long a call lasts before the far executor is asked for its pulse, too. That
// takes a connection of its own, which ends with it. Most calls for which an application stands still are over
// before.
const farPulseAfter = 2 * time.Second

// Pulse implements ExecutorService. A connection that is broken is something to wait for.
func (k *controller) Pulse(ctx context.Context, r *connect.Request[gpuctlv1.PulseRequest], out *connect.ServerStream[gpuctlv1.PulseResponse]) error {
	every := time.Duration(r.Msg.EveryMs) * time.Millisecond
	if every <= 0 {
		every = time.Second
	}
	var mu sync.Mutex
	last := &gpuctlv1.PulseResponse{}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-ctx.Done():
		case <-time.After(farPulseAfter):
		}
		for ctx.Err() == nil {
			if st, err := k.c.far.Pulse(ctx, connect.NewRequest(r.Msg)); err == nil {
				for st.Receive() {
					mu.Lock()
					last = st.Msg()
					mu.Unlock()
				}
				st.Close()
			}
			select {
			case <-ctx.Done():
			case <-time.After(every):
			}
		}
	}()
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		mu.Lock()
		p := last
		mu.Unlock()
		if since := k.c.brokenSince(); since != 0 {
			p = &gpuctlv1.PulseResponse{WaitsFor: "the connection to the far host is broken", ForNs: time.Now().UnixNano() - since}
		}
		if err := out.Send(p); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-k.c.ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// brokenSince returns since when a stream has no connection, or 0 if each has one.
func (c *carrier) brokenSince() (ns int64) {
	for i := range c.broken {
		if t := c.broken[i].Load(); t != 0 && (ns == 0 || t < ns) {
			ns = t
		}
	}
	return ns
}

// handed is the last file that gpuguest has sent.
type handed struct {
	mu   sync.Mutex
	name string
	f    *os.File
}

func (h *handed) serve(l *net.UnixListener) {
	_ = handover.Serve(l, func(name string, f *os.File) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.f != nil {
			h.f.Close()
		}
		h.name, h.f = name, f
	})
}

func (h *handed) take(name string) (*os.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.f == nil || h.name != name {
		return nil, fmt.Errorf("%s was not handed over: %w", name, errState)
	}
	f := h.f
	h.name, h.f = "", nil
	return f, nil
}

// takeOver takes the executor's lock, as an executor does. It waits for nothing else, not for a connection either.
func (c *carrier) takeOver() {
	shm.Take(c.locks, wire.LockExecutor, func() bool { return c.active.Load() && c.ring.Owner() == c.cfg.Generation }, c.over)
}

// guard is what an executor's is: it decides what becomes of the session if gpuguest ends in the middle of a swap.
func (c *carrier) guard() {
	orphan := 0
	for !c.over() {
		time.Sleep(100 * time.Millisecond)
		mine := c.ring.Owner() == c.cfg.Generation
		if c.active.Load() {
			_, _ = c.freeLanes(false)
		}
		c.reclaim()
		managed, err := shm.Locked(c.locks, wire.LockManager)
		if err != nil || managed || c.active.Load() && !c.gate.closed.Load() {
			orphan = 0
			continue
		}
		if orphan++; orphan < 50 { // five seconds, in which a new gpuguest may take over
			continue
		}
		orphan = 0
		ctx, cancel := context.WithTimeout(c.ctx, 30*time.Second)
		switch {
		case mine && c.active.Load():
			c.log.Warn("gpuguest is gone: the session goes on here")
			_, err = c.thaw(ctx, connect.NewRequest(&gpuctlv1.ThawRequest{}))
		case mine && c.prepared.Load() && c.ring.State() == wire.StateRunning:
			c.log.Warn("gpuguest is gone: the session goes on here")
			err = c.activate(ctx)
		default:
			c.log.Warn("gpuguest is gone: another executor has the session")
			c.retire(ctx)
		}
		cancel()
		if err != nil {
			c.log.Warn("guard", "err", err)
		}
	}
}
