package replica

import (
	"context"
	"fmt"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// LeaderTask is a task of the leader. Run is called when this node leads and has applied
// everything that was committed before. Its context ends with the leadership; Run must
// then return soon. If Run returns earlier, it is called again.
type LeaderTask struct {
	Name string
	Run  func(ctx context.Context, l *Lead) error
}

// Lead is one term of leadership. After its end, Apply fails.
type Lead struct {
	store *Store
	term  uint64
	since time.Duration // on the store's monotonic clock
}

// View returns the state. It contains everything that was committed before this term, and
// everything that this leader has applied since.
func (l *Lead) View() *state.View { return l.store.fsm.state.View() }

// Apply does the same as Store.Apply, but only in this term: a former leader must not act
// on an old state.
func (l *Lead) Apply(ctx context.Context, cmd *clusterv1.Command) (*clusterv1.Result, error) {
	s := l.store
	c := s.stamp(cmd)
	if s.raft.CurrentTerm() != l.term {
		return nil, fmt.Errorf("command %s: %w", c.GetId(), s.notLeader())
	}
	a := s.propose(ctx, []*clusterv1.Command{c})
	if a.err != nil {
		return nil, fmt.Errorf("command %s: %w", c.GetId(), fate(a.err, a.maybe))
	}
	return a.results[0], nil
}

// follow starts the leader's tasks and ends them.
func (s *Store) follow() {
	var end func()
	for {
		select {
		case <-s.ctx.Done():
			if end != nil {
				end()
			}
			return
		case leads := <-s.raft.LeaderCh():
			// Losing and regaining the leadership may be reported only once, as a gain.
			if end != nil {
				end()
				end = nil
			}
			if leads {
				end = s.begin()
			}
		}
	}
}

// begin starts the leader's tasks. The returned function ends them and waits for their
// end.
func (s *Store) begin() func() {
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.lead(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

func (s *Store) lead(ctx context.Context) {
	s.pulse.reset()
	term, err := s.leading(ctx)
	if err != nil {
		if ctx.Err() == nil {
			s.log.Info("leadership was lost before it began", "err", err)
		}
		return
	}
	s.log.Info("this host leads", "term", term)
	l := &Lead{store: s, term: term, since: s.cfg.Clock.Monotonic()}
	tasks := append([]LeaderTask{
		{Name: "liveness", Run: s.watchHosts},
		{Name: "members", Run: s.review},
		{Name: "reservations", Run: s.expire},
	}, s.cfg.Tasks...)
	done := make(chan struct{})
	for _, t := range tasks {
		go func() {
			defer func() { done <- struct{}{} }()
			s.keep(ctx, l, t)
		}()
	}
	for range tasks {
		<-done
	}
}

// keep runs a task again and again.
func (s *Store) keep(ctx context.Context, l *Lead, t LeaderTask) {
	for ctx.Err() == nil {
		if err := t.Run(ctx, l); err != nil && ctx.Err() == nil {
			s.log.Warn("leader's work failed; it is tried again", "task", t.Name, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}
