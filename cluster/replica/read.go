package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/gpuctl/gpuctl/cluster/state"
)

// Read returns the state. If stale, it is the state that is applied on this host.
// Otherwise it contains everything that was committed before the call; Read waits for a
// leader until ctx ends. Errors wrap those of this package.
func (s *Store) Read(ctx context.Context, stale bool) (*state.View, error) {
	if stale {
		return s.fsm.state.View(), nil
	}
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		if err := s.alive(); err != nil {
			return nil, fmt.Errorf("read: %w", err)
		}
		index, err := s.index(ctx)
		if err == nil {
			if err := s.fsm.wait(ctx, index); err != nil {
				return nil, fmt.Errorf("read: entry %d is not applied here: %w", index, err)
			}
			return s.fsm.state.View(), nil
		}
		if errors.Is(err, ErrNotInCluster) {
			return nil, fmt.Errorf("read: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("read: %w: %w (%w)", ErrNoLeader, err, ctx.Err())
		case <-time.After(wait):
		}
	}
}

// index asks the leader for a read index.
func (s *Store) index(ctx context.Context) (uint64, error) {
	if s.IsLeader() {
		return s.ReadIndex(ctx)
	}
	return s.remote.do(ctx, s.ctx, s.cfg.Timing.RPC, s.ask)
}

func (s *Store) ask(ctx context.Context) (uint64, error) {
	address, _ := s.raft.LeaderWithID()
	if address == "" {
		if err := s.member(); err != nil {
			return 0, err
		}
		return 0, ErrNoLeader
	}
	if string(address) == s.cfg.Address || s.cfg.Peers == nil {
		return 0, ErrNoLeader // this node has just lost or gained the leadership
	}
	return s.cfg.Peers.ReadIndex(ctx, string(address))
}

// ReadIndex returns an index that is at least that of each command committed before the
// call. If this node is not the leader, it returns a *NotLeaderError.
func (s *Store) ReadIndex(ctx context.Context) (uint64, error) {
	if err := s.alive(); err != nil {
		return 0, err
	}
	return s.reads.do(ctx, s.ctx, s.cfg.Timing.RPC, s.confirm)
}

// leading waits until this node has applied everything that was committed before its
// term, and returns the term. It has done so when it has applied an entry of its own
// term, because everything before that is committed, too.
func (s *Store) leading(ctx context.Context) (uint64, error) {
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		term := s.raft.CurrentTerm()
		if !s.IsLeader() {
			return 0, s.notLeader()
		}
		if s.ready.Load() == term {
			return term, nil
		}
		commit := s.raft.CommitIndex()
		var l raft.Log
		if s.logs.GetLog(commit, &l) == nil && l.Term == term {
			index, err := s.lastCommand(commit)
			if err != nil {
				return 0, err
			}
			if err := s.fsm.wait(ctx, index); err != nil {
				return 0, err
			}
			s.ready.Store(term)
			continue
		}
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return 0, ErrClosed
		case <-ctx.Done():
			return 0, fmt.Errorf("%w: the new leader has not committed its first entry: %w", ErrNoLeader, ctx.Err())
		}
	}
}

// confirm is one round of ReadIndex. See the package's documentation.
func (s *Store) confirm(ctx context.Context) (uint64, error) {
	term, err := s.leading(ctx)
	if err != nil {
		return 0, err
	}
	commit, start := s.raft.CommitIndex(), time.Now()
	others, need := s.others()
	if len(others) > 0 {
		s.raft.VerifyLeader() // triggers heartbeats; its own answer is not used
	}
	for {
		n, moved := s.acks.since(others, term, start)
		if !s.IsLeader() || s.raft.CurrentTerm() != term {
			return 0, s.notLeader()
		}
		if n >= need {
			return s.lastCommand(commit)
		}
		select {
		case <-moved:
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return 0, fmt.Errorf("%w: no majority answers: %w", ErrNoLeader, ctx.Err())
		}
	}
}

// lastCommand returns the index of the last command up to an index. The state machine can
// wait for a command, but not for Raft's internal entries.
func (s *Store) lastCommand(index uint64) (uint64, error) {
	for ; index > s.fsm.index(); index-- {
		var l raft.Log
		err := s.logs.GetLog(index, &l)
		if errors.Is(err, raft.ErrLogNotFound) {
			break // it was compacted, so each command up to it is applied
		}
		if err != nil {
			return 0, fmt.Errorf("entry %d: %w", index, err)
		}
		if l.Type == raft.LogCommand {
			return index, nil
		}
	}
	return min(index, s.fsm.index()), nil
}

// coalescer lets callers share rounds. A round serves only callers that came before it
// began.
type coalescer struct {
	mu   sync.Mutex
	next *round
	busy bool
}

type round struct {
	done  chan struct{}
	index uint64
	err   error
}

func (c *coalescer) do(ctx, base context.Context, limit time.Duration, f func(context.Context) (uint64, error)) (uint64, error) {
	c.mu.Lock()
	if c.next == nil {
		c.next = &round{done: make(chan struct{})}
	}
	r := c.next
	if !c.busy {
		c.busy = true
		go c.run(base, limit, f)
	}
	c.mu.Unlock()
	select {
	case <-r.done:
		return r.index, r.err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// run makes rounds as long as callers wait.
func (c *coalescer) run(base context.Context, limit time.Duration, f func(context.Context) (uint64, error)) {
	for {
		c.mu.Lock()
		r := c.next
		c.next = nil
		if r == nil {
			c.busy = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		ctx, cancel := context.WithTimeout(base, limit)
		r.index, r.err = f(ctx)
		cancel()
		close(r.done)
	}
}
