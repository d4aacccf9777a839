package executor

import (
	"runtime"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// One worker at a time, the leader, reads the ring. A leader that must wait for the device
// announces that it sleeps (sleep = 1), so that the application's next request wakes a
// stand-by worker, which leads then. If no worker was needed in the meantime, the former
// leader continues. With one busy application thread, which is the common case, the leader
// never changes.

const (
	standbyWait = time.Second
	gateNap     = 2 * time.Millisecond
)

// patience is how long an idle leader watches the ring before it sleeps. It is longer if
// that was often useful. If the application cannot run while the leader watches, because
// there are too few processors, watching is never useful. From time to time, the longest
// time is tried, which shows whether that has changed.
type patience struct {
	now, most time.Duration
	tries     uint
}

const (
	leastPatience = 2 * time.Microsecond
	tryEvery      = 16
)

func newPatience() patience {
	most := 200 * time.Microsecond
	if runtime.NumCPU() <= 2 {
		most = 100 * time.Microsecond
	}
	return patience{now: most, most: most}
}

func (p *patience) next() time.Duration {
	if p.tries++; p.tries%tryEvery == 0 {
		return p.most
	}
	return p.now
}

// learn records whether it was useful to watch the ring for this time.
func (p *patience) learn(spent time.Duration, useful bool) {
	if useful {
		p.now = min(max(2*p.now, spent), p.most)
	} else {
		p.now = max(p.now/2, leastPatience)
	}
}

// naps are the leader's short sleeps in a burst of posted commands. If the processors are
// busy, mostly because the runtime computes on them, each wake-up takes a processor from
// the application's kernels. A leader that naps is not woken for each command. If a burst
// ends without a call that waits, a few naps were useless; if that happens often, there are
// fewer naps.
type naps struct {
	most  int // 0: no naps
	now   int
	taken int
	tries uint
}

const (
	firstNap = 50 * time.Microsecond
	mostNaps = 3
)

func newNaps(sharesProcessors bool) naps {
	if !sharesProcessors {
		return naps{}
	}
	return naps{most: mostNaps, now: mostNaps}
}

// next returns how long to nap; 0 for no nap.
func (n *naps) next() time.Duration {
	limit := n.now
	if n.taken == 0 {
		if n.tries++; n.tries%tryEvery == 0 {
			n.now = n.most
			limit = n.most
		}
	}
	if n.taken >= limit {
		if n.taken > 0 {
			n.now = max(n.now-1, 0)
		}
		n.taken = 0
		return 0
	}
	n.taken++
	return firstNap << (n.taken - 1)
}

// ended is called when a request has arrived after all.
func (n *naps) ended() {
	if n.taken > 0 {
		n.now = min(n.now+1, n.most)
		n.taken = 0
	}
}

func (s *session) canLead() bool {
	return s.active.Load() && !s.gate.Load() && !s.closed.Load()
}

// worker leads if no other worker does. Otherwise it stands by.
func (s *session) worker() {
	for !s.closed.Load() {
		if s.canLead() && s.leader.CompareAndSwap(false, true) {
			s.lead()
			continue
		}
		if s.standby.Load() >= 2 {
			return
		}
		s.standBy()
	}
}

// standBy sleeps until a client rings the doorbell, or for some time. The doorbell may be
// rung between reading its word and the wait, so the wait is short while a leader is away.
func (s *session) standBy() {
	if !s.canLead() {
		// Do not wait for the doorbell: its next ring is for another executor.
		time.Sleep(gateNap)
		return
	}
	seen := s.ring.Bell()
	if s.canLead() && !s.leader.Load() && !s.ring.Empty() {
		return
	}
	nap := standbyWait
	if s.inflight.Load() > 0 {
		nap = 5 * time.Millisecond
	}
	s.standby.Add(1)
	s.ring.AwaitBell(seen, nap)
	s.standby.Add(-1)
}

// wakeAll wakes every worker that sleeps.
func (s *session) wakeAll() {
	s.ring.RingBell()
}

// lead reads and runs requests while this worker leads.
func (s *session) lead() {
	buf := make([]byte, wire.MaxRequest)
	var idle time.Time // since when the ring is empty; zero if it is not
	var spin time.Duration
	posted := false // the last request was posted, so more may follow
	s.ring.Withdraw()
	for {
		if !s.canLead() {
			s.leader.Store(false)
			return
		}
		rec, ok, err := s.ring.Next(buf)
		if err != nil {
			s.condemn(err)
			return
		}
		if ok {
			if !idle.IsZero() {
				if s.naps.taken == 0 {
					s.patience.learn(spin, true)
				}
				idle = time.Time{}
			}
			s.mu.Lock()
			if s.gate.Load() {
				s.mu.Unlock()
				continue
			}
			s.naps.ended()
			posted = rec.Slot == wire.NoSlot && rec.Op != wire.OpFlush
			after, err := s.dispatch(call{rec.Op, rec.Slot, rec.Body})
			s.calls++
			s.ring.Advance()
			if after != nil {
				s.inflight.Add(1)
			}
			s.mu.Unlock()
			if err != nil {
				s.condemn(err)
				return
			}
			if after != nil && !s.aside(after) {
				return
			}
			continue
		}
		now := time.Now()
		if idle.IsZero() {
			idle, spin = now, 0
			if s.naps.taken == 0 {
				spin = s.patience.next()
			}
		}
		if now.Sub(idle) < spin {
			for i := 0; i < 64 && s.ring.Empty(); i++ {
				shm.Spin(1)
			}
			continue
		}
		idle = time.Time{}
		if posted {
			if d := s.naps.next(); d > 0 {
				s.ring.Nap(d)
				continue
			}
		}
		s.patience.learn(spin, false)
		if !s.sleep() {
			return
		}
	}
}

// sleep gives up the lead until a client rings the doorbell. It reports whether the caller
// leads again.
func (s *session) sleep() bool {
	s.leader.Store(false)
	s.ring.Announce()
	if s.ring.Empty() && s.canLead() {
		s.standby.Add(1)
		s.ring.AwaitBell(1, standbyWait)
		s.standby.Add(-1)
	}
	if !s.leader.CompareAndSwap(false, true) {
		return false
	}
	s.ring.Withdraw()
	return true
}

// aside gives up the lead, and runs the part of a call that waits for the device or the
// application. It reports whether the caller leads again.
func (s *session) aside(f after) bool {
	if s.standby.Load() == 0 {
		go s.worker()
	}
	s.leader.Store(false)
	s.ring.Announce()
	if !s.ring.Empty() { // a request has arrived between the last look and the announcement
		s.wakeAll()
	}
	leads := false
	back := func() {
		if !leads && s.leader.CompareAndSwap(false, true) {
			leads = true
			s.ring.Withdraw()
		}
	}
	f(back)
	s.inflight.Add(-1)
	back()
	return leads
}

// spawn runs a waiting part in another goroutine. It is for requests that were parked, and
// that another call has released.
func (s *session) spawn(after func()) {
	s.inflight.Add(1)
	go func() {
		defer s.inflight.Add(-1)
		after()
	}()
}

// condemn ends a session whose client has violated the protocol.
func (s *session) condemn(err error) {
	s.log.Error("session ended: protocol violation", "err", err)
	s.closed.Store(true)
	s.leader.Store(false)
	s.ring.SetState(wire.StateLost)
}
