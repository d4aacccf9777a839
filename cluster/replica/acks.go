package replica

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// acks remembers, for each server, the latest AppendEntries that the server has answered
// in the term in which it was sent. The answer proves that at the time of sending, nobody
// could have won that server's vote for a later term.
type acks struct {
	mu    sync.Mutex
	last  map[raft.ServerID]ack
	moved chan struct{}
}

type ack struct {
	term uint64
	sent time.Time // time of the monotonic clock
}

func newAcks() *acks {
	return &acks{last: map[raft.ServerID]ack{}, moved: make(chan struct{})}
}

func (a *acks) note(id raft.ServerID, term uint64, sent time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if l := a.last[id]; l.term > term || l.term == term && !sent.After(l.sent) {
		return
	}
	a.last[id] = ack{term, sent}
	close(a.moved)
	a.moved = make(chan struct{})
}

// since counts the servers that have answered something sent after t.
func (a *acks) since(ids []raft.ServerID, term uint64, t time.Time) (int, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := 0
	for _, id := range ids {
		if l, ok := a.last[id]; ok && l.term == term && l.sent.After(t) {
			n++
		}
	}
	return n, a.moved
}

// transport is Raft's transport. It passes answers to acks, and calls of other hosts to
// admit.
//
// It omits the library's fast path for heartbeats, which handles them outside the main
// thread. There, a heartbeat of an old term that is delayed between reading the current
// term and storing its own could undo a vote that was given meanwhile. The price is that
// a follower with a busy disk answers late. Pre-votes keep such a follower from
// disturbing the others.
type transport struct {
	raft.Transport
	raft.WithPreVote
	acks    *acks
	stalled func() bool
	calls   chan raft.RPC // from Transport's Consumer, by way of pass
}

var errStalled = errors.New("nothing is sent while this host's disk stands still")

func (t *transport) AppendEntries(id raft.ServerID, to raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if t.stalled() {
		return errStalled
	}
	sent := time.Now()
	if err := t.Transport.AppendEntries(id, to, args, resp); err != nil {
		return err
	}
	if resp.Term == args.Term {
		t.acks.note(id, args.Term, sent)
	}
	return nil
}

// Consumer implements raft.Transport.
func (t *transport) Consumer() <-chan raft.RPC { return t.calls }

// pass passes the calls of other hosts on to Raft, until ctx ends.
func (t *transport) pass(ctx context.Context, admit func(command any)) {
	for {
		select {
		case <-ctx.Done():
			return
		case rpc := <-t.Transport.Consumer():
			admit(rpc.Command)
			select {
			case t.calls <- rpc:
			case <-ctx.Done():
				return
			}
		}
	}
}

// admit makes Raft consider a candidate that this node does not know as a voter. The
// library refuses it. But its promotion may be an entry that this node has not got yet,
// and if the leader fails now, that candidate may be the only one that can win: without
// this node's vote there would never be a leader again. Raft does not ask for such a
// check: a server grants its vote also to a candidate that is not in its configuration
// (Ongaro, Consensus: Bridging Theory and Practice, 4.1); the comparison of the logs
// makes that safe. A removed server does not disturb the others, because a node that
// has a leader refuses both kinds of votes.
func (s *Store) admit(command any) {
	var h *raft.RPCHeader
	switch c := command.(type) {
	case *raft.RequestVoteRequest:
		h = &c.RPCHeader
	case *raft.RequestPreVoteRequest:
		h = &c.RPCHeader
	default:
		return
	}
	var voter raft.ServerID
	for _, x := range s.servers() {
		if x.Suffrage != raft.Voter {
			continue
		}
		if x.ID == raft.ServerID(h.ID) {
			return
		}
		voter = x.ID
	}
	if voter != "" {
		h.ID = []byte(voter) // used for that check only; the vote is given to the candidate's address
	}
}

// SetHeartbeatHandler implements raft.Transport. It ignores the handler; see above.
func (*transport) SetHeartbeatHandler(func(raft.RPC)) {}
