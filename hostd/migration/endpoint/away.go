package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/guest/statestream"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/hostd/migration/stash"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/migrate"
)

// errNoStash means that this host is configured to keep no GPU states in its memory.
var errNoStash = errors.New("it keeps no GPU states (devices.stash)")

// states returns a client that transfers states to and from a VM. It works until done is
// called.
func (g *Guests) states(ctx context.Context, uuid string) (c gpuctlv1connect.GuestServiceClient, done func(), err error) {
	client, done, err := g.Bulk(ctx, uuid)
	if err != nil {
		return nil, nil, err
	}
	// Compression in the VM is slower than any of the connections.
	plain := connect.WithAcceptCompression("gzip", nil, nil)
	return gpuctlv1connect.NewGuestServiceClient(client, channel.BaseURL, append(channel.ConnectOptions(), plain)...), done, nil
}

// copies are the copies of a state that is being written: one on this host, and one on
// the destination.
type copies struct {
	here  *stash.Writer
	to    string
	there *connect.ClientStreamForClient[gpuctlv1.SiteKeepRequest, gpuctlv1.SiteDone] // nil: no other copy, or its transfer has ended
}

// begin reserves room for a state on all hosts that are to keep it.
func (l *Local) begin(ctx context.Context, m *gpuctlv1.SiteMachine, session, id string, expect uint64, to string) (*copies, error) {
	if l.Stash == nil {
		return nil, fmt.Errorf("host %s: %w", l.Name, errNoStash)
	}
	c := &copies{to: to}
	var err error
	if c.here, err = l.Stash.Begin(m.GetUuid(), session, m.GetMigration(), id, expect); err != nil {
		return nil, fmt.Errorf("host %s: %w", l.Name, err)
	}
	if to != "" && to != l.Name {
		if c.there, err = l.upload(ctx, m, session, statestream.Mark{ID: id}, expect, to); err != nil {
			c.here.Abort()
			return nil, err
		}
	}
	return c, nil
}

// upload begins to send a state to another host. The end of ctx cancels it.
func (l *Local) upload(ctx context.Context, m *gpuctlv1.SiteMachine, session string, mark statestream.Mark, expect uint64, to string) (*connect.ClientStreamForClient[gpuctlv1.SiteKeepRequest, gpuctlv1.SiteDone], error) {
	if err := l.Party(m, to); err != nil {
		return nil, err
	}
	peer, err := l.Peer(to)
	if err != nil {
		return nil, peerError(to, err)
	}
	st := peer.Keep(ctx)
	first := &gpuctlv1.SiteKeepRequest{Machine: m, Session: session, Expect: expect, Mark: &gpuctlv1.StateMark{Id: mark.ID}}
	if mark.Size > 0 {
		first.Mark = mark.Proto()
	}
	if st.Send(first) != nil {
		_, err := st.CloseAndReceive()
		return nil, peerError(to, cmp.Or(err, statestream.ErrTruncated))
	}
	return st, nil
}

// take writes a chunk to all copies. kept reports that it was the last one, and all
// copies are complete.
func (c *copies) take(chunk *gpuctlv1.StateChunk) (kept bool, err error) {
	if c.there != nil && c.there.Send(&gpuctlv1.SiteKeepRequest{Chunk: chunk}) != nil {
		return false, peerError(c.to, cmp.Or(c.close(), statestream.ErrTruncated))
	}
	if kept, err = c.here.Take(chunk); err != nil || !kept || c.there == nil {
		return kept, err
	}
	if err := c.close(); err != nil {
		return false, peerError(c.to, err)
	}
	return true, nil
}

// close waits for the other host's answer.
func (c *copies) close() error {
	there := c.there
	c.there = nil
	_, err := there.CloseAndReceive()
	return err
}

// end drops incomplete copies. The caller has cancelled the calls to the other host.
func (c *copies) end() {
	c.here.Abort()
	if c.there != nil {
		_ = c.close()
	}
}

// peerError describes an error of another host. If the call may succeed when it is
// repeated, the error wraps migrate.ErrUnreachable.
func peerError(host string, err error) error {
	var c *connect.Error
	if err == nil {
		return nil
	}
	if !errors.As(err, &c) {
		return fmt.Errorf("host %s: %w", host, err)
	}
	// If the other host has not sent the error itself, the connection has failed,
	// possibly within an answer. The code does not matter then.
	said := connect.IsWireError(err)
	switch c.Code() {
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeCanceled, connect.CodeAborted:
		said = false
	default:
	}
	if said {
		return fmt.Errorf("host %s: %s", host, c.Message())
	}
	return fmt.Errorf("host %s: %w: %s", host, migrate.ErrUnreachable, c.Message())
}

// suspendAway suspends a session and sends its state to this host and to another one
// while the state is being extracted. If this host has the state already, it only makes
// sure that the other host has it, too.
func (l *Local) suspendAway(ctx context.Context, m *gpuctlv1.SiteMachine, o *guest, s *gpuctlv1.Session, to string, times freezeTimes, report migrate.Progress) error {
	if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_SUSPENDED {
		if !isAway(s) {
			return nil // the state is in the VM
		}
		return l.deposit(ctx, m, s, to, report)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	id := random.Hex(8)
	c, err := l.begin(ctx, m, s.GetId(), id, s.GetUsage().GetMemory(), to)
	if err != nil {
		return err
	}
	defer func() { cancel(); c.end() }()
	states, done, err := l.Guests.states(ctx, m.GetUuid())
	if err != nil {
		return err
	}
	defer done()
	stream, err := o.work.Suspend(ctx, connect.NewRequest(&gpuctlv1.SuspendRequest{Session: s.GetId(), FreezeTimeoutMs: times.freeze, TimeoutMs: times.still, Away: id}))
	if err != nil {
		return err
	}
	// A session is suspended only after KeptState has confirmed that its state is kept.
	return accompany(ctx, cancel, stream, report, func(ctx context.Context) error {
		err := takeState(ctx, states, o.work, s.GetId(), id, c)
		if err != nil { // without this call, gpuguest would notice late that nobody reads the state
			_, _ = o.work.KeptState(ctx, connect.NewRequest(&gpuctlv1.KeptStateRequest{Session: s.GetId(), Mark: &gpuctlv1.StateMark{Id: id}, Refused: err.Error()}))
		}
		return err
	})
}

// accompany waits for the end of a suspend or resume while carry transfers the state. If
// carry fails, gpuguest notices it, undoes the operation and reports that. Only if it
// does not do so within undoTime, the operation is cancelled.
func accompany(ctx context.Context, cancel context.CancelFunc, stream *connect.ServerStreamForClient[gpuctlv1.Progress], report migrate.Progress, carry func(context.Context) error) error {
	carried := make(chan error, 1)
	began := false
	err := watch(stream, func(done, total uint64, waits string) {
		if !began { // after the first progress, the operation accepts the transfer
			began = true
			go func() {
				err := carry(ctx)
				if err != nil {
					time.AfterFunc(undoTime, cancel)
				}
				carried <- err
			}()
		}
		report(done, total, waits)
	})
	cancel()
	if !began {
		return err
	}
	if lost := <-carried; err != nil && lost != nil {
		return fmt.Errorf("%w (%w)", lost, err)
	}
	return err
}

// undoTime is how long gpuguest may take to undo an operation whose state could not be
// transferred. Much of the state may still be queued in the channel.
const undoTime = 30 * time.Second

// takeState reads a session's state, and confirms to gpuguest that it is kept.
func takeState(ctx context.Context, states, work gpuctlv1connect.GuestServiceClient, session, id string, c *copies) error {
	way, hangUp := context.WithCancel(ctx)
	defer hangUp()
	st, err := states.TakeState(way, connect.NewRequest(&gpuctlv1.TakeStateRequest{Session: session, Id: id}))
	if err != nil {
		return err
	}
	defer func() { hangUp(); _ = st.Close() }() // do not wait for the rest of the stream
	for st.Receive() {
		kept, err := c.take(st.Msg())
		if err != nil {
			return err
		}
		if kept {
			_, err := work.KeptState(ctx, connect.NewRequest(&gpuctlv1.KeptStateRequest{Session: session, Mark: st.Msg().GetMark()}))
			return err
		}
	}
	return cmp.Or(st.Err(), statestream.ErrTruncated)
}

// kept returns the state that a suspended session needs for its resume. Errors wrap
// stash.ErrNotFound if this host does not have it, and statestream.ErrStale if it has
// another one.
func (l *Local) kept(uuid string, s *gpuctlv1.Session) (stash.State, error) {
	if l.Stash == nil {
		return stash.State{}, fmt.Errorf("host %s: %w", l.Name, errNoStash)
	}
	want, err := statestream.MarkOf(s.GetAway())
	if err != nil {
		return stash.State{}, err
	}
	state, err := l.Stash.Find(uuid, s.GetId())
	if err == nil && state.Mark != want {
		err = fmt.Errorf("%v is kept, and it waits for %v: %w", state.Mark, want, statestream.ErrStale)
	}
	if err != nil {
		return stash.State{}, fmt.Errorf("host %s: %w", l.Name, err)
	}
	return state, nil
}

// deposit makes sure that another host keeps a session's state, too.
func (l *Local) deposit(ctx context.Context, m *gpuctlv1.SiteMachine, s *gpuctlv1.Session, to string, report migrate.Progress) error {
	state, err := l.kept(m.GetUuid(), s)
	if err != nil || to == "" || to == l.Name {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st, err := l.upload(ctx, m, s.GetId(), state.Mark, 0, to) // without a size, this asks whether the host has it
	if err != nil {
		return err
	}
	if _, err = st.CloseAndReceive(); err == nil || connect.CodeOf(err) != connect.CodeNotFound {
		return peerError(to, err)
	}
	if st, err = l.upload(ctx, m, s.GetId(), state.Mark, state.Mark.Size, to); err != nil {
		return err
	}
	var n uint64
	err = l.Stash.Send(state, func(chunk *gpuctlv1.StateChunk) error {
		n += uint64(len(chunk.GetData()))
		report(n, state.Mark.Size, "")
		return st.Send(&gpuctlv1.SiteKeepRequest{Chunk: chunk})
	})
	if errors.Is(err, statestream.ErrCorrupt) || errors.Is(err, stash.ErrNotFound) {
		cancel()
		_, _ = st.CloseAndReceive()
		return err
	}
	_, err = st.CloseAndReceive() // the answer contains why it did not accept everything
	return peerError(to, err)
}

// Deposit makes sure that another host has a copy of each state that this one keeps for
// the given sessions.
func (l *Local) Deposit(ctx context.Context, r *gpuctlv1.SiteSessionsRequest, report migrate.Progress) error {
	return l.each(ctx, r.GetMachine(), r.GetSessions(), isAway, func(_ *guest, s *gpuctlv1.Session, report migrate.Progress) error {
		if s.GetState() != gpuctlv1.SessionState_SESSION_STATE_SUSPENDED || !isAway(s) {
			return nil
		}
		return l.deposit(ctx, r.GetMachine(), s, r.GetTo(), report)
	}, report)
}

func isAway(s *gpuctlv1.Session) bool { return s.GetAway() != nil }

// resumeAway resumes a session and sends its state back to it.
func (l *Local) resumeAway(ctx context.Context, uuid string, o *guest, s *gpuctlv1.Session, target *gpuctlv1.Target, report migrate.Progress) error {
	state, err := l.kept(uuid, s)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := o.work.Resume(ctx, connect.NewRequest(&gpuctlv1.ResumeRequest{Session: s.GetId(), Target: target, TimeoutMs: timesOf(ctx, 0).still}))
	if err != nil {
		return err
	}
	return accompany(ctx, cancel, stream, report, func(ctx context.Context) error { return l.giveState(ctx, uuid, s, state) })
}

// giveState sends a session its state while it is being resumed.
func (l *Local) giveState(ctx context.Context, uuid string, s *gpuctlv1.Session, state stash.State) error {
	states, done, err := l.Guests.states(ctx, uuid)
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st := states.GiveState(ctx)
	err = st.Send(&gpuctlv1.GiveStateRequest{Session: s.GetId(), Id: state.Mark.ID})
	if err == nil {
		err = l.Stash.Send(state, func(chunk *gpuctlv1.StateChunk) error { return st.Send(&gpuctlv1.GiveStateRequest{Chunk: chunk}) })
	}
	if errors.Is(err, statestream.ErrCorrupt) || errors.Is(err, stash.ErrNotFound) {
		cancel()
		_, _ = st.CloseAndReceive()
		return err
	}
	_, err = st.CloseAndReceive() // the answer contains why it did not accept everything
	return err
}

// Forget removes the states of a VM that are kept for a migration.
func (l *Local) Forget(m *gpuctlv1.SiteMachine) error {
	if l.Stash == nil {
		return nil
	}
	return l.Stash.Forget(m.GetUuid(), m.GetMigration())
}

// Keep stores a state that the VM's host sends. Without a size in the request, it only
// reports whether this host has the state.
func (s *Service) Keep(ctx context.Context, in *connect.ClientStream[gpuctlv1.SiteKeepRequest]) (*connect.Response[gpuctlv1.SiteDone], error) {
	if !in.Receive() {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.Join(in.Err(), errors.New("no state is named")))
	}
	l, first := s.local, in.Msg()
	if l.Stash == nil {
		return nil, toConnect(errNoStash)
	}
	caller, _ := access.From(ctx)
	if err := l.Fence.Admit(first.GetMachine()); err != nil {
		return nil, toConnect(err)
	}
	if err := l.Party(first.GetMachine(), caller.Host); err != nil {
		return nil, toConnect(err)
	}
	uuid, session := first.GetMachine().GetUuid(), first.GetSession()
	if len(first.GetMark().GetDigest()) > 0 && first.GetExpect() == 0 { // it only asks whether the state is kept
		if _, err := l.kept(uuid, &gpuctlv1.Session{Id: session, Away: first.GetMark()}); err != nil {
			return nil, connect.NewError(connect.CodeNotFound, err)
		}
		return done(nil)
	}
	w, err := l.Stash.Begin(uuid, session, first.GetMachine().GetMigration(), first.GetMark().GetId(), first.GetExpect())
	if err != nil {
		return nil, toConnect(err)
	}
	defer w.Abort()
	for in.Receive() {
		kept, err := w.Take(in.Msg().GetChunk())
		if err != nil {
			return nil, toConnect(err)
		}
		if kept {
			return done(nil)
		}
	}
	return nil, connect.NewError(connect.CodeAborted, errors.Join(in.Err(), statestream.ErrTruncated))
}

// Deposit makes sure that another host has a copy of the states that this one keeps.
func (s *Service) Deposit(ctx context.Context, req *connect.Request[gpuctlv1.SiteSessionsRequest], out *connect.ServerStream[gpuctlv1.SiteProgress]) error {
	return toConnect(s.step(req.Msg.GetMachine(), func() error { return s.local.Deposit(ctx, req.Msg, telling(out)) }))
}

// Forget removes the states of a VM that are kept for a migration.
func (s *Service) Forget(_ context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteDone], error) {
	return done(s.step(req.Msg, func() error { return s.local.Forget(req.Msg) }))
}
