package executor

import (
	"cmp"
	"context"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/exact"
)

// clock converts the device's timestamps to those of the session, in nanoseconds. They
// continue from one device to the next and never go back.
type clock struct {
	offset int64  // session time minus device time
	last   uint64 // the largest value that the application has read
}

func (c *clock) session(device uint64) uint64 {
	return uint64(int64(device) + c.offset)
}

// now returns CLOCK_MONOTONIC of the application's host in nanoseconds. That is exact enough
// for commands that the executor runs itself.
func (s *session) now() uint64 { return uint64(monotonic() + s.ahead) }

func (s *session) createUserEvent(m *wire.CreateUserEvent) (outcome, error) {
	c := lookup[clContext](s, m.Context)
	if c == nil {
		return done(cl.InvalidContext), nil
	}
	return done(cl.Success), s.put(m.ID, &event{id: m.ID, ctx: c, user: true, state: eventPending})
}

func (s *session) setUserEvent(m *wire.SetUserEvent) (outcome, error) {
	e := lookup[event](s, m.Event)
	if e == nil || !e.user {
		return done(cl.InvalidEvent), nil
	}
	if m.Status > 0 {
		return done(cl.InvalidValue), nil
	}
	if e.state == eventDone {
		return done(cl.InvalidOperation), nil
	}
	s.resolve(e, m.Status)
	return done(cl.Success), nil
}

// resolve gives an event its final status, and runs what has waited for it.
func (s *session) resolve(e *event, status int32) {
	e.state, e.status = eventDone, status
	s.wakeWatches()
	s.advance()
}

// fail ends an event whose command will not run. The events that depend on it fail, too.
func (e *event) fail(status cl.Status) {
	if e != nil {
		e.state, e.status = eventDone, int32(status)
	}
}

// settle sets the completion words of staged transfers that have ended. It is called before
// the application can learn that any command has ended.
func (s *session) settle(q *queue, all bool) {
	if len(q.pends) == 0 {
		return
	}
	keep := q.pends[:0]
	for i, p := range q.pends {
		status := int32(cl.Complete)
		if !all {
			var st cl.Status
			if status, st = cl.EventStatus(p.ev); st != cl.Success {
				status = int32(st)
			}
		} else if n, st := cl.EventStatus(p.ev); st == cl.Success && n < 0 {
			status = n
		}
		if status > 0 {
			if q.inOrder() {
				keep = append(keep, q.pends[i:]...)
				break
			}
			keep = append(keep, p)
			continue
		}
		s.finishPending(p, status)
	}
	q.pends = keep
}

func (s *session) finishPending(p pending, status int32) {
	if p.keep != nil {
		p.keep.Unpin()
	}
	cl.ReleaseEvent(p.ev)
	s.showOf(p.show, p.of, p.mp) // also if it has failed: a carrier counts
	if p.mp != nil {
		p.mp.unseen = false
	}
	if p.pend != 0 {
		w := uint32(wire.PendDone)
		if status < 0 {
			w = wire.PendFailed
		}
		s.ring.PendDone(p.pend, w)
	}
}

func (s *session) settleAll() {
	for _, c := range s.contexts() {
		for _, q := range c.queues {
			s.settle(q, false)
		}
	}
}

// poll reads the state of a vendor's event.
func (s *session) poll(e *event) int32 {
	switch e.state {
	case eventDone:
		return e.status
	case eventPending:
		switch {
		case e.user:
			return cl.Submitted
		case s.isParked(e):
			return cl.Queued
		}
		return cl.Running
	}
	n, st := cl.EventStatus(e.vendor)
	if st != cl.Success {
		return int32(st)
	}
	if n <= cl.Complete && !s.out.offer() {
		return cl.Running // until there is room for what it has printed
	}
	return n
}

func (s *session) isParked(e *event) bool {
	for _, p := range s.parked {
		if p.e == e {
			return true
		}
	}
	return false
}

func (s *session) eventStatus(m *wire.EventStatus) (outcome, error) {
	e := lookup[event](s, m.Event)
	if e == nil {
		return done(cl.InvalidEvent), nil
	}
	n := s.poll(e)
	if n <= 0 {
		s.settleAll()
	} else if e.q != nil && e.state == eventVendor {
		// An application that polls must see progress, so the commands must reach the
		// device.
		cl.Flush(e.q.vendor)
	}
	return answer(pair(nil, uint32(n), 0)), nil
}

// stamps returns the profiling times of an event that has ended, in session time.
func (s *session) stamps(e *event) ([5]uint64, cl.Status) {
	var t [5]uint64
	if e.timed {
		return e.times, cl.Success
	}
	if e.state != eventVendor {
		return t, cl.ProfilingInfoNotAvailable
	}
	for i, p := range []uint32{cl.ProfilingCommandQueued, cl.ProfilingCommandSubmit, cl.ProfilingCommandStart, cl.ProfilingCommandEnd, cl.ProfilingCommandComplete} {
		v, st := cl.EventTime(e.vendor, p)
		if st != cl.Success && i == 4 {
			t[4] = t[3]
			break
		}
		if st != cl.Success {
			return t, st
		}
		t[i] = s.clock.session(v)
		if i > 0 {
			t[i] = max(t[i], t[i-1]) //nolint:gosec // i is above 0
		}
	}
	s.clock.last = max(s.clock.last, t[4])
	return t, cl.Success
}

func (s *session) eventProfiling(m *wire.EventProfiling) (outcome, error) {
	e := lookup[event](s, m.Event)
	if e == nil {
		return done(cl.InvalidEvent), nil
	}
	if s.poll(e) > 0 {
		return done(cl.ProfilingInfoNotAvailable), nil
	}
	s.profiled = true
	s.settleAll()
	t, st := s.stamps(e)
	if st != cl.Success {
		return done(st), nil
	}
	return answer(u64s(t[:]...)), nil
}

func (s *session) waitEvents(c call, m *wire.WaitEvents) (outcome, error) {
	hold, failed, st := s.mustHold(nil, c.op, m.Wait)
	if st != cl.Success {
		return done(cl.InvalidEvent), nil
	}
	if hold {
		return s.park(c, m, nil, 0, m.Wait)
	}
	evs := append([]cl.Event(nil), s.waits(m.Wait)...)
	if failed { // the others are waited for all the same: the application may free what they use
		st = cl.ExecStatusErrorForEventsInWaitList
	}
	if len(m.Wait) == 0 { // the library waits for transfers to end, and some runtimes begin them only after a flush
		s.flushBusy()
	}
	if len(evs) == 0 {
		s.settleAll()
		return done(st), nil
	}
	e := s.timedAlone(m.Wait)
	if e == nil {
		return s.waitThen(c, nil, evs, st, func(cl.Status) []byte { return nil }), nil
	}
	e.users++ // it may be released in the meantime
	return s.waitThen(c, nil, evs, st, func(cl.Status) (times []byte) {
		if t, st := s.stamps(e); st == cl.Success {
			times = u64s(t[:]...)
		}
		e.users--
		s.dropEvent(e)
		return times
	}), nil
}

func (s *session) flushBusy() {
	for _, c := range s.contexts() {
		for _, q := range c.queues {
			if q.busy() {
				cl.Flush(q.vendor)
			}
		}
	}
}

// timedAlone returns the event that is waited for, if it is the only one and the
// application usually asks for its times next, as a program that measures does. The answer
// then contains them.
func (s *session) timedAlone(wait []uint32) *event {
	if !s.profiled || len(wait) != 1 {
		return nil
	}
	e := lookup[event](s, wait[0])
	if e == nil || e.state != eventVendor || e.q == nil || e.q.props&cl.QueueProfilingEnable == 0 {
		return nil
	}
	return e
}

// waitThen waits for vendor events without the lock, and then answers the call with the
// result of then, or with the error of an earlier command of q, if q is not nil. known is the
// error of what has ended before.
func (s *session) waitThen(c call, q *queue, evs []cl.Event, known cl.Status, then func(st cl.Status) []byte) outcome {
	for _, e := range evs {
		cl.RetainEvent(e)
	}
	return later(func(back func()) {
		st := cmp.Or(known, cl.WaitForEvents(evs))
		s.out.deliver(s.stop)
		back()
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, e := range evs {
			cl.ReleaseEvent(e)
		}
		s.settleAll()
		s.endTurns()
		data := then(st)
		if q != nil {
			st = q.take(st)
		}
		s.reply(c.slot, st, data)
	})
}

func (s *session) deviceTimer(m *wire.DeviceTimer) (outcome, error) {
	d := lookup[device](s, m.Device)
	if d == nil {
		return done(cl.InvalidDevice), nil
	}
	now := s.now()
	return answer(u64s(now, now)), nil
}

// watch is an event callback that is to be delivered.
type watch struct {
	e     *event
	typ   int32
	token uint32
}

func (s *session) eventCallback(m *wire.EventCallback) (outcome, error) {
	e := lookup[event](s, m.Event)
	if e == nil {
		return done(cl.InvalidEvent), nil
	}
	if e.state == eventVendor && e.q != nil {
		cl.Flush(e.q.vendor)
	}
	if n := s.poll(e); n <= m.Type && n > cl.Complete {
		// The state is reached already: the callback must not be delivered with a later
		// state.
		s.callback(m.Callback, m.Type, wire.CbEvent)
		return done(cl.Success), nil
	}
	e.users++
	s.watches = append(s.watches, &watch{e, m.Type, m.Callback})
	s.wakeWatches()
	return done(cl.Success), nil
}

func (s *session) wakeWatches() {
	select {
	case s.watchWake <- struct{}{}:
	default:
	}
}

// Between two looks at the events whose callbacks are waited for.
const (
	firstLook = 20 * time.Microsecond
	lastLook  = time.Millisecond
	// The wait is as long as the part 1/lookPart of how long the youngest event is looked at already, so a
	// callback comes late by that part of its command's time at most.
	lookPart = 8
	// Looks take the part 1/looksCost of the time at most, however many the events are.
	looksCost = 8
)

// watchEvents delivers event callbacks. It polls, first often and then less and less,
// because a thread for each event would cost more.
func (s *session) watchEvents() {
	woken := make(chan struct{}, 1)
	timer := exact.NewTimer(func() {
		select {
		case woken <- struct{}{}:
		default:
		}
	})
	defer timer.Close()
	since := time.Now()
	for !s.closed.Load() {
		s.mu.Lock()
		look := time.Now()
		n, hit := len(s.watches), s.deliver()
		now := time.Now()
		s.mu.Unlock()
		if hit {
			since = now
		}
		if n == 0 {
			select {
			case <-s.watchWake:
			case <-time.After(time.Second):
			}
			since = time.Now()
			continue
		}
		timer.Reset(max(firstLook, min(now.Sub(since)/lookPart, lastLook), looksCost*now.Sub(look)))
		select {
		case <-s.watchWake:
			since = time.Now()
		case <-woken:
		}
	}
}

func (s *session) deliver() bool {
	keep, hit := s.watches[:0], false
	for _, w := range s.watches {
		n := s.poll(w.e)
		if n > w.typ {
			keep = append(keep, w)
			continue
		}
		s.settleAll() // for each: more may have ended since the last
		hit = true
		status := w.typ
		if n < 0 {
			status = n
		}
		s.callback(w.token, status, wire.CbEvent)
		w.e.users--
		s.dropEvent(w.e)
	}
	clear(s.watches[len(keep):])
	s.watches = keep
	return hit
}

// callback adds a callback for the application to the queue, in order.
func (s *session) callback(token uint32, status int32, kind uint32) {
	s.cbMu.Lock()
	s.cbs = append(s.cbs, [3]uint32{token, uint32(status), kind})
	s.cbMu.Unlock()
	select {
	case s.cbWake <- struct{}{}:
	default:
	}
}

// pushCallbacks moves callbacks to the shared ring, and waits for space there.
func (s *session) pushCallbacks() {
	for {
		select {
		case <-s.stop:
			return
		case <-s.cbWake:
		}
		for {
			s.cbMu.Lock()
			todo := s.cbs
			s.cbs, s.cbPushing = nil, len(todo) > 0
			s.cbMu.Unlock()
			if len(todo) == 0 {
				break
			}
			for _, c := range todo {
				if err := s.ring.PushCallback(c[0], int32(c[1]), c[2], s.stop); err != nil {
					s.log.Warn("callback", "err", err)
				}
			}
		}
	}
}

// awaitPushed waits until every callback is in the application's ring, and reports whether
// that was so in time. Another executor does not know of those that are left, and two must
// not write to that ring.
func (s *session) awaitPushed(ctx context.Context, deadline time.Time) bool {
	for nap := 5 * time.Microsecond; ; nap = min(2*nap, time.Millisecond) {
		s.cbMu.Lock()
		pushed := !s.cbPushing && len(s.cbs) == 0
		s.cbMu.Unlock()
		if pushed || ctx.Err() != nil || time.Now().After(deadline) {
			return pushed
		}
		exact.Sleep(nap)
	}
}

// notifyDestroyed tells the application that a memory object is destroyed, when the commands
// that may use it have ended.
func (s *session) notifyDestroyed(token uint32, c *clContext) {
	evs, _ := s.markers([]*clContext{c})
	if len(evs) == 0 {
		s.settleAll()
		s.callback(token, 0, wire.CbDestroyed)
		return
	}
	s.spawn(func() {
		await(evs)
		s.out.deliver(s.stop)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.settleAll()
		s.callback(token, 0, wire.CbDestroyed)
	})
}
