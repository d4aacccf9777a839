package replica

import (
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

// transport is Raft's transport, and passes answers to acks.
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

// SetHeartbeatHandler implements raft.Transport. It ignores the handler; see above.
func (*transport) SetHeartbeatHandler(func(raft.RPC)) {}
