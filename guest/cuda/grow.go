package cuda

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
)

// A job may begin to use CUDA with one more process after it became a session. That process is a
// member from then on: without it the session would end, and its GPUs would be free, when those end
// that were there before.

// joining is what has joined the job of a session.
type joining struct {
	s    *session
	root *holders.Process
	new  []*holders.Holder
}

// parts returns the session that a job is, if it is one, and what of the job is in no session.
func (m *Manager) parts(j *holders.Job) (of *session, others []*holders.Holder) {
	for _, h := range j.Holders {
		if s := m.sessionOf(h.PID, h.Start); s == nil {
			others = append(others, h)
		} else if of == nil {
			of = s
		}
	}
	return of, others
}

// joins reports whether a process of a session's job is to be a member. by is the offer that it has
// the token of. A script may start programs with several offers, and such as have none.
func (m *Manager) joins(s *session, by *gpuctlv1.OfferRequest) bool {
	claim := s.snapshot().GetClaim()
	if by != nil {
		return by.GetClaim() == claim
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.offers {
		if o.GetClaim() == claim {
			return false
		}
	}
	return true
}

// grow makes those that use CUDA members of the session. While an operation runs, it has found them
// itself, or the next look does.
func (m *Manager) grow(ctx context.Context, g *joining) error {
	c, err := m.look(ctx)
	if err != nil {
		return err
	}
	found, _, err := m.members(ctx, c, &holders.Job{Root: g.root, Holders: g.new})
	if err != nil || len(found) == 0 {
		return err
	}
	m.adopting.Lock() // a process is in one session only
	defer m.adopting.Unlock()
	found = slices.DeleteFunc(found, func(mb *member) bool { return m.sessionOf(mb.PID, mb.Start) != nil })
	s := g.s
	grown, err := s.join(c, found)
	if err != nil {
		return fmt.Errorf("session %s: %w", s.id, err)
	}
	if grown {
		s.log.Info("more processes of the session use CUDA", "pids", pids(found))
		m.changed(s)
	}
	return nil
}

// join adds members to a session that runs and has no operation.
func (s *session) join(c *machine, more []*member) (joined bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.op != nil || s.ended || s.rec.Lost != "" || s.rec.SuspendedTo != "" || len(more) == 0 || len(s.rec.Members)+len(more) > mostMembers {
		return false, nil
	}
	before := s.rec
	var all []*member
	for _, mb := range s.rec.Members {
		mb := *mb // who has it may read it without the lock
		all = append(all, &mb)
	}
	all = append(all, more...)
	s.rec.Members, s.rec.GPUs = all, gpusOf(c, all, before.GPUs)
	if err := s.rec.write(s.m.cfg.Dir); err != nil {
		s.rec = before
		return false, err
	}
	return true, nil
}

// strangers are processes that are in a session's job, and may use no CUDA: a child that was forked
// has the nodes open. They are asked for at longer and longer intervals.
type strangers map[holders.Process]stranger

type stranger struct {
	next  time.Time
	pause time.Duration
}

// mostRest is the longest interval.
const mostRest = time.Minute

// due returns those that are to be asked for now.
func (ss strangers) due(all []*holders.Holder, now time.Time) (due []*holders.Holder) {
	for _, h := range all {
		id := holders.Process{PID: h.PID, Start: h.Start}
		x := ss[id]
		if now.Before(x.next) {
			continue
		}
		x.pause = min(max(2*x.pause, lookEvery), mostRest)
		x.next = now.Add(x.pause)
		ss[id] = x
		due = append(due, h)
	}
	return due
}

// forget drops those that were not there for a while.
func (ss strangers) forget(now time.Time) {
	maps.DeleteFunc(ss, func(_ holders.Process, x stranger) bool { return now.Sub(x.next) > mostRest })
}
