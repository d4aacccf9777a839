package executor

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/cl"
	"github.com/gpuctl/gpuctl/guest/wire"
)

// A bulk transfer is a blocking read or write that the application's thread
// takes part in: it copies straight into or out of the buffer's memory where
// the device computes in the arena, and through a ring of chunks elsewhere.
// While it runs, the queue's later commands are parked.

// bulkTimeout is how long a client may leave a transfer that it began.
const bulkTimeout = 30 * time.Second

var errStalled = errors.New("the application does not go on with its transfer")

func (s *session) bulk(x *cmd, m *mem, write bool, off, n, stage, stageLen, chunk uint64) (cl.Status, error) {
	if _, ok := s.arenaRange(stage, stageLen); !ok || chunk == 0 || stageLen < chunk || stageLen/chunk > 1<<10 || n/chunk > 1<<30 {
		return 0, fmt.Errorf("bulk transfer in %d bytes at %#x by %d: %w", stageLen, stage, chunk, errHostile)
	}
	slot := s.bulkSlot
	if slot == wire.NoSlot {
		return 0, fmt.Errorf("bulk transfer without a slot: %w", errHostile)
	}
	q, e := x.q, x.e
	x.out = nil
	root, base := m.root()
	wait := append([]cl.Event(nil), x.wait...)
	for _, w := range wait {
		cl.RetainEvent(w)
	}
	q.bulk++
	q.users++
	m.users++
	if e != nil {
		e.state = eventPending
		e.times[0] = hostNow()
		e.times[1] = e.times[0]
	}
	x.bulk = func() {
		st := s.awaitTurn(q, wait)
		start := hostNow()
		if st == cl.Success {
			if root.unified {
				st = s.direct(slot, root.arena+base+off)
			} else {
				st = s.stream(slot, q, m, write, off, n, stage, stageLen, chunk)
			}
		}
		s.out.deliver(s.stop)
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, w := range wait {
			cl.ReleaseEvent(w)
		}
		if write { // an export may have read the buffer meanwhile, and called it clean
			m.touch(off, n)
		}
		q.bulk--
		s.settleAll()
		if e != nil {
			e.times[2], e.times[3], e.times[4] = start, hostNow(), hostNow()
			e.timed = q.props&cl.QueueProfilingEnable != 0
			s.clock.last = max(s.clock.last, e.times[4])
			e.state, e.status = eventDone, int32(min(st, 0))
		}
		s.reply(slot, st, nil)
		q.users--
		m.users--
		s.dropMem(m)
		s.wakeWatches()
		s.advance()
		s.dropQueue(q)
	}
	return cl.Success, nil
}

// awaitTurn waits for what the command has to come after.
func (s *session) awaitTurn(q *queue, wait []cl.Event) cl.Status {
	if len(wait) > 0 {
		if st := cl.WaitForEvents(wait); st != cl.Success {
			return st
		}
	}
	if !q.inOrder() {
		return cl.Success
	}
	return cl.Finish(q.vendor)
}

// direct lets the client copy at an offset of the arena.
func (s *session) direct(slot uint16, at uint64) cl.Status {
	s.ring.Phase(slot, wire.PhaseDirect, at)
	if !s.awaitCount(s.ring.WaitConsumed, slot, 1) {
		s.log.Warn("bulk transfer", "err", errStalled)
		return cl.OutOfResources
	}
	return cl.Success
}

// awaitCount waits until a counter of the slot has reached n.
func (s *session) awaitCount(load func(uint16, uint32, time.Duration) uint32, slot uint16, n uint32) bool {
	deadline := time.Now().Add(bulkTimeout)
	for got := load(slot, 0, 0); !s.closed.Load(); {
		if int32(got-n) >= 0 {
			return true
		}
		got = load(slot, got, 100*time.Millisecond)
		if time.Now().After(deadline) {
			return false
		}
	}
	return false
}

// stream moves the bytes through the client's chunks, with the device working
// on some while the client copies others.
func (s *session) stream(slot uint16, q *queue, m *mem, write bool, off, n, stage, stageLen, chunk uint64) cl.Status {
	depth := uint32(stageLen / chunk)
	count := uint32((n + chunk - 1) / chunk)
	evs := make([]cl.Event, depth)
	defer func() {
		for _, e := range evs {
			if e != 0 {
				cl.WaitForEvents([]cl.Event{e})
				cl.ReleaseEvent(e)
			}
		}
	}()
	s.xfer.pin(s, m.ctx, stage, stageLen)
	at := func(i uint32) (unsafe.Pointer, uint64, uint64) {
		o := uint64(i) * chunk
		return s.arena.Pointer(stage + uint64(i%depth)*chunk), off + o, min(chunk, n-o)
	}
	settle := func(i uint32) cl.Status {
		e := &evs[i%depth]
		if *e == 0 {
			return cl.Success
		}
		st := cl.WaitForEvents([]cl.Event{*e})
		cl.ReleaseEvent(*e)
		*e = 0
		return st
	}
	s.ring.Phase(slot, wire.PhaseStream, 0)
	if write {
		settled := uint32(0)
		for i := range count {
			if !s.awaitCount(s.ring.WaitProduced, slot, i+1) {
				return cl.OutOfResources
			}
			p, o, l := at(i)
			if st := cl.EnqueueWriteBuffer(q.vendor, m.vendor, false, o, l, p, nil, &evs[i%depth]); st != cl.Success {
				return st
			}
			cl.Flush(q.vendor)
			// Give back the chunk that the client needs next but one.
			for settled+max(depth-1, 1) <= i || settled == i && depth == 1 {
				if st := settle(settled); st != cl.Success {
					return st
				}
				settled++
				s.ring.SetConsumed(slot, settled)
			}
		}
		for ; settled < count; settled++ {
			if st := settle(settled); st != cl.Success {
				return st
			}
			s.ring.SetConsumed(slot, settled+1)
		}
		return cl.Success
	}
	issued := uint32(0)
	for i := range count {
		for issued < count && issued < i+depth {
			if issued >= depth && !s.awaitCount(s.ring.WaitConsumed, slot, issued-depth+1) {
				return cl.OutOfResources
			}
			p, o, l := at(issued)
			if st := cl.EnqueueReadBuffer(q.vendor, m.vendor, false, o, l, p, nil, &evs[issued%depth]); st != cl.Success {
				return st
			}
			cl.Flush(q.vendor)
			issued++
			if issued > i+1 && issued >= depth {
				break
			}
		}
		if st := settle(i); st != cl.Success {
			return st
		}
		s.ring.SetProduced(slot, i+1)
	}
	// The client must have taken everything before the chunks are reused.
	if !s.awaitCount(s.ring.WaitConsumed, slot, count) {
		return cl.OutOfResources
	}
	return cl.Success
}
