package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/statestream"
)

const (
	meetTimeout = time.Minute     // for the host to come for a state, or to bring it
	keptTimeout = 5 * time.Minute // for the host to store safely all that was sent
)

// transit is where an operation and the host meet, for a state that leaves the VM or comes
// back. It lasts as long as the operation.
type transit struct {
	id   string
	out  bool
	meet chan *flow
	kept chan statestream.Mark // the mark of what the host says that it keeps
	lost chan error            // why the host does not keep it
	over chan struct{}         // closed when the operation ends
}

// flow is one call of the host that carries chunks. Only one chunk is in flight at a time,
// so the slower side delays the other.
type flow struct {
	ctx    context.Context // context of the call
	chunks chan *gpuctlv1.StateChunk
	result chan error // the operation's result
}

func newTransit(id string, out bool) *transit {
	return &transit{id: id, out: out, meet: make(chan *flow), kept: make(chan statestream.Mark, 1), lost: make(chan error, 1), over: make(chan struct{})}
}

func checkStateID(id string) error {
	if len(id) > statestream.MaxID {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the id of a state has %d bytes, and at most %d are allowed", len(id), statestream.MaxID))
	}
	return nil
}

// offer sets the session's transit, where the operation meets the host. end removes it.
func (op *operation) offer(t *transit) (end func()) {
	s := op.s
	s.mu.Lock()
	s.transit = t
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		s.transit = nil
		s.mu.Unlock()
		close(t.over)
	}
}

// transit finds the transit of a running operation.
func (m *Manager) transit(session, id string, out bool) (*transit, error) {
	s, err := m.lookup(session)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	t := s.transit
	s.mu.Unlock()
	if t == nil || t.id != id || t.out != out {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("session %s: no operation moves state %q now", session, id))
	}
	return t, nil
}

// join waits until the operation reaches the step that moves the state.
func (t *transit) join(ctx context.Context) (*flow, error) {
	f := &flow{ctx: ctx, chunks: make(chan *gpuctlv1.StateChunk), result: make(chan error, 1)}
	select {
	case t.meet <- f:
		return f, nil
	case <-t.over:
		return nil, connect.NewError(connect.CodeAborted, errors.New("the operation has ended before its state moved"))
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// await is the operation's side of join.
func (t *transit) await(ctx context.Context) (*flow, error) {
	timer := time.NewTimer(meetTimeout)
	defer timer.Stop()
	select {
	case f := <-t.meet:
		return f, nil
	case err := <-t.lost:
		return nil, err
	case <-timer.C:
		return nil, fmt.Errorf("the host has not come for the state within %v", meetTimeout)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

var errHostLeft = errors.New("the host went away")

// sendAway passes the contents that the source streams on to the host. It returns after the
// host has confirmed that it keeps all of them.
func (op *operation) sendAway(ctx context.Context, t *transit, total uint64) (mark statestream.Mark, err error) {
	f, err := t.await(ctx)
	if err != nil {
		return mark, err
	}
	check := statestream.NewCheck()
	err = op.source.send(ctx, op, func(chunk *gpuctlv1.StateChunk) error {
		end, err := check.Take(chunk)
		if err != nil {
			return err
		}
		if end {
			mark = check.Mark()
			mark.ID = t.id
			chunk = &gpuctlv1.StateChunk{Mark: mark.Proto()}
		}
		select {
		case f.chunks <- chunk:
		case err := <-t.lost:
			return err
		case <-f.ctx.Done():
			return errHostLeft
		case <-ctx.Done():
			return ctx.Err()
		}
		op.progress(&gpuctlv1.Progress{BytesDone: check.Size(), BytesTotal: max(total, check.Size())})
		return nil
	})
	if err == nil && mark.ID == "" {
		err = statestream.ErrTruncated
	}
	f.result <- err
	op.result.BytesFrozen = check.Size()
	if err != nil {
		return mark, err
	}
	timer := time.NewTimer(keptTimeout)
	defer timer.Stop()
	select {
	case kept := <-t.kept:
		if kept != mark {
			return mark, fmt.Errorf("the host keeps %v, and %v went out: %w", kept, mark, statestream.ErrStale)
		}
		return mark, nil
	case err := <-t.lost:
		return mark, err
	case <-timer.C:
		return mark, fmt.Errorf("the host has not said within %v that it keeps the state", keptTimeout)
	case <-ctx.Done():
		return mark, ctx.Err()
	}
}

// receiveAway makes the target load what the host brings back, if that is what was sent
// out.
func (op *operation) receiveAway(ctx context.Context, t *transit, want statestream.Mark) error {
	f, err := t.await(ctx)
	if err != nil {
		return err
	}
	check := statestream.NewCheck()
	err = op.target.receive(ctx, op, func() (*gpuctlv1.StateChunk, error) {
		var chunk *gpuctlv1.StateChunk
		var more bool
		select {
		case chunk, more = <-f.chunks:
			if !more {
				return nil, statestream.ErrTruncated
			}
		case <-f.ctx.Done():
			return nil, errHostLeft
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		end, err := check.Take(chunk)
		if err == nil && end && check.Mark() != want {
			err = fmt.Errorf("the host brings %v, and %v went out: %w", check.Mark(), want, statestream.ErrStale)
		}
		op.progress(&gpuctlv1.Progress{BytesDone: check.Size(), BytesTotal: max(want.Size, check.Size())})
		return chunk, err
	})
	op.result.BytesFrozen = check.Size()
	f.result <- err
	return err
}

// TakeState implements GuestService.
func (m *Manager) TakeState(ctx context.Context, req *connect.Request[gpuctlv1.TakeStateRequest], st *connect.ServerStream[gpuctlv1.StateChunk]) error {
	t, err := m.transit(req.Msg.GetSession(), req.Msg.GetId(), true)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f, err := t.join(ctx)
	if err != nil {
		return err
	}
	for {
		select {
		case chunk := <-f.chunks:
			if err := st.Send(chunk); err != nil {
				return err
			}
		case err := <-f.result:
			return aborted(err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// KeptState implements GuestService.
func (m *Manager) KeptState(_ context.Context, req *connect.Request[gpuctlv1.KeptStateRequest]) (*connect.Response[gpuctlv1.KeptStateResponse], error) {
	t, err := m.transit(req.Msg.GetSession(), req.Msg.GetMark().GetId(), true)
	if err != nil {
		return nil, err
	}
	if why := req.Msg.GetRefused(); why != "" {
		select {
		case t.lost <- fmt.Errorf("the host does not keep the state: %s", why):
		default: // it was reported before
		}
		return connect.NewResponse(&gpuctlv1.KeptStateResponse{}), nil
	}
	mark, err := statestream.MarkOf(req.Msg.GetMark())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	select {
	case t.kept <- mark:
	default:
	}
	return connect.NewResponse(&gpuctlv1.KeptStateResponse{}), nil
}

// GiveState implements GuestService.
func (m *Manager) GiveState(ctx context.Context, in *connect.ClientStream[gpuctlv1.GiveStateRequest]) (*connect.Response[gpuctlv1.GiveStateResponse], error) {
	if !in.Receive() {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.Join(in.Err(), errors.New("no state is named")))
	}
	t, err := m.transit(in.Msg().GetSession(), in.Msg().GetId(), false)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f, err := t.join(ctx)
	if err != nil {
		return nil, err
	}
	for in.Receive() {
		select {
		case f.chunks <- in.Msg().GetChunk():
		case err := <-f.result:
			return nil, aborted(cmp.Or(err, statestream.ErrCorrupt)) // nil: the host sends more than the state
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if err := in.Err(); err != nil {
		return nil, err
	}
	close(f.chunks)
	select {
	case err := <-f.result:
		if err != nil {
			return nil, aborted(err)
		}
		return connect.NewResponse(&gpuctlv1.GiveStateResponse{}), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func aborted(err error) error {
	if err == nil {
		return nil
	}
	return connect.NewError(connect.CodeAborted, err)
}
