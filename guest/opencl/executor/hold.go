package executor

import (
	"slices"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// A command that waits for something that only the application can do (a user event, or a
// bulk transfer in which it takes part) is parked here in the form in which it was
// received, and is run later as if it had just been received. So the device never waits for
// the application, a frozen session drains in a limited time, and parked commands move to
// another executor as plain data.

// parkedCall is one request that could not be run yet.
type parkedCall struct {
	call
	q      *queue   // of a command
	e      *event   // its event; nil if the application wants none
	kernel *kernel  // of a launch: a copy with the arguments of the moment of the call
	wait   []*event // what it waits for
	pins   []*int   // user counters of the objects that it uses
	drops  []any    // those objects
	alias  map[uint32]uint32

	looked, bulk bool // whether it is a bulk transfer, if looked is set
	fetch        int  // of a request to unmap, from a client on another host
}

// isFence reports whether the command delays everything after it (fence), as a barrier does
// even in an out-of-order queue, and whether it waits for everything before it (waitsAll).
func isFence(op wire.Op, wait int) (fence, waitsAll bool) {
	switch op {
	case wire.OpBarrier:
		return true, wait == 0
	case wire.OpMarker:
		return false, wait == 0
	case wire.OpFinish:
		return false, true
	}
	return false, false
}

// mustHold reports whether a command must not be run now. failed means that an event in its
// wait list has ended with an error.
func (s *session) mustHold(q *queue, op wire.Op, wait []uint32) (hold, failed bool, st cl.Status) {
	if q != nil && (q.held > 0 || q.bulk > 0) && s.redo == nil {
		_, all := isFence(op, len(wait))
		if q.inOrder() || q.fence > 0 || all {
			return true, false, cl.Success
		}
	}
	for _, id := range wait {
		e := lookup[event](s, id)
		if e == nil {
			return false, false, cl.InvalidEventWaitList
		}
		switch {
		case e.state == eventPending:
			hold = true
		case e.state == eventDone && e.status < 0:
			failed = true
		}
	}
	return hold || !s.mayLaunch(q, op), failed, cl.Success
}

// waits returns the vendor's events of ids, without those that have ended.
func (s *session) waits(ids []uint32) []cl.Event {
	if len(ids) == 0 {
		return nil
	}
	s.wait = s.wait[:0]
	for _, id := range ids {
		if e := lookup[event](s, id); e != nil && e.state == eventVendor && e.vendor != 0 {
			s.wait = append(s.wait, e.vendor)
		}
	}
	if len(s.wait) == 0 {
		return nil
	}
	return s.wait
}

// park keeps a request to run it later.
func (s *session) park(c call, m wire.Request, q *queue, eventID uint32, wait []uint32) (outcome, error) {
	if s.redo != nil { // it cannot run yet: it keeps its objects
		s.enlist(s.redo)
		return held(), nil
	}
	p, err := s.newParked(c, q, eventID)
	if err != nil {
		return outcome{}, err
	}
	if n, ok := m.(*wire.Ndrange); ok {
		k := lookup[kernel](s, n.Kernel)
		if k == nil {
			return s.refuse(c, q, p.e, 0, cl.InvalidKernel), nil
		}
		kc, st := s.copyKernel(k)
		if st != cl.Success {
			return s.refuse(c, q, p.e, 0, st), nil
		}
		p.kernel = kc
	}
	if !waitsForReply(m) { // the application may have to continue before this can run
		s.reply(p.slot, cl.Success, s.answer)
		p.slot = wire.NoSlot
	}
	s.pinAll(p, wire.Mems(m), wait)
	s.enlist(p)
	s.askTurns()
	return held(), nil
}

// newParked copies a request and creates its event.
func (s *session) newParked(c call, q *queue, eventID uint32) (*parkedCall, error) {
	p := &parkedCall{call: call{c.op, c.slot, append([]byte(nil), c.body...)}, q: q}
	if eventID != 0 {
		p.e = &event{id: eventID, ctx: q.ctx, q: q, state: eventPending}
		if err := s.put(eventID, p.e); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// waitsForReply reports whether the call returns only when its command has ended.
func waitsForReply(m wire.Request) bool {
	switch m.(type) {
	case *wire.Finish, *wire.WaitEvents:
		return true
	}
	return wire.Blocking(m)
}

// pinAll keeps the objects that a parked call uses, even if they are released.
func (s *session) pinAll(p *parkedCall, ids, wait []uint32) {
	pin := func(o any) {
		var n *int
		switch o := o.(type) {
		case *mem:
			n = &o.users
		case *queue:
			n = &o.users
		case *event:
			n = &o.users
		case *sampler:
			n = &o.users
		default:
			return
		}
		*n++
		p.pins, p.drops = append(p.pins, n), append(p.drops, o)
	}
	if p.q != nil {
		pin(p.q)
	}
	for _, id := range ids {
		if o := lookup[mem](s, id); o != nil {
			pin(o)
		}
	}
	for _, id := range wait {
		if e := lookup[event](s, id); e != nil {
			pin(e)
			p.wait = append(p.wait, e)
		}
	}
	if p.e != nil {
		pin(p.e)
	}
	if p.kernel != nil {
		for i := range p.kernel.args {
			if a := &p.kernel.args[i]; a.set {
				pin(a.to)
			}
		}
	}
}

func (s *session) enlist(p *parkedCall) {
	s.parked = append(s.parked, p)
	if p.q != nil {
		p.q.held++
		if f, _ := isFence(p.op, len(p.wait)); f {
			p.q.fence++
		}
	}
}

// ghost gives another id to a released object that parked calls, sub-buffers or images
// still use, because the application may use the old id again.
func (s *session) ghost(id uint32, o any, users int) {
	if users == 0 {
		return
	}
	g := s.ghostOf(o)
	switch o := o.(type) {
	case *mem:
		o.ghost = g
	case *program:
		o.ghost = g
	case *event:
		o.ghost = g
	}
	for _, p := range slices.Concat(s.parked, s.moving) {
		for _, x := range p.drops {
			if x != o {
				continue
			}
			if p.alias == nil {
				p.alias = map[uint32]uint32{}
			}
			p.alias[id] = g
			break
		}
		if p.kernel == nil {
			continue
		}
		for i := range p.kernel.args {
			if a := &p.kernel.args[i]; a.to == o {
				a.object = g
			}
		}
	}
}

func (s *session) parkedUse(o any) bool {
	for _, p := range slices.Concat(s.parked, s.moving) {
		for _, x := range p.drops {
			if x == o {
				return true
			}
		}
	}
	return false
}

// unpin gives up the objects that a parked call has used.
func (s *session) unpin(p *parkedCall) {
	for _, n := range p.pins {
		*n--
	}
	for _, o := range p.drops {
		switch o := o.(type) {
		case *mem:
			s.dropMem(o)
		case *queue:
			s.dropQueue(o)
		case *event:
			s.dropEvent(o)
		case *sampler:
			s.dropSampler(o)
		}
	}
	if p.kernel != nil {
		cl.ReleaseKernel(p.kernel.vendor)
		p.kernel.prog.kernels--
		s.dropProgram(p.kernel.prog)
	}
	for _, g := range p.alias {
		if _, ok := s.ghosts[g].(*mem); !ok && !s.parkedUse(s.ghosts[g]) { // dropMem decides when a memory object is removed
			delete(s.ghosts, g)
		}
	}
	p.pins, p.drops = nil, nil
	s.endLeft()
}

// forsake drops the commands of a released context that can never run: they wait for an event that
// nobody can end any more, or are behind one that does. Nobody learns what they would do, and with
// them, the session could not be moved.
func (s *session) forsake(c *clContext) {
	never, drop := map[*event]bool{}, map[*parkedCall]bool{}
	for again := true; again; {
		again = false
		blocked, fenced := map[*queue]bool{}, map[*queue]bool{}
		for _, p := range s.parked {
			if p.q == nil || p.q.ctx != c || p.slot != wire.NoSlot { // somebody waits for it
				continue
			}
			fence, all := isFence(p.op, len(p.wait))
			stuck := blocked[p.q] && (p.q.inOrder() || all) || fenced[p.q] || slices.ContainsFunc(p.wait, func(e *event) bool {
				return e.state == eventPending && (e.user && e.dead || never[e])
			})
			if !stuck {
				continue
			}
			blocked[p.q], fenced[p.q] = true, fenced[p.q] || fence
			if !drop[p] {
				drop[p], again = true, true
				if p.e != nil {
					never[p.e] = true
				}
			}
		}
	}
	s.parked = slices.DeleteFunc(slices.Clone(s.parked), func(p *parkedCall) bool { return drop[p] })
	for p := range drop {
		p.q.held--
		if fence, _ := isFence(p.op, len(p.wait)); fence {
			p.q.fence--
		}
		p.e.fail(cl.OutOfResources)
		if n := p.pend(); n != 0 {
			_ = s.ring.PendDone(n, wire.PendFailed)
		}
		s.unpin(p)
	}
}

// pend returns the completion word of a parked transfer, 0 if it has none.
func (p *parkedCall) pend() uint32 {
	m := wire.New(p.op)
	if m == nil || m.Decode(p.body) != nil {
		return 0
	}
	switch m := m.(type) {
	case *wire.ReadBuffer:
		return m.Pend
	case *wire.WriteBuffer:
		return m.Pend
	case *wire.ReadBufferRect:
		return m.Pend
	case *wire.WriteBufferRect:
		return m.Pend
	case *wire.ReadImage:
		return m.Pend
	case *wire.WriteImage:
		return m.Pend
	}
	return 0
}

// advance runs each parked call that need not wait any more, in the order of the calls. When
// the gate is closed, it runs none: a freeze waits for what was launched before. Who opens the
// gate calls it.
func (s *session) advance() {
	if s.redo != nil || s.frozen || s.gate.Load() {
		return
	}
	defer s.askTurns()
	for again := true; again; {
		again = false
		blocked := map[*queue]bool{}
		fenced := map[*queue]bool{}
		for i, p := range s.parked {
			f, _ := isFence(p.op, len(p.wait))
			if !s.ready(p, blocked, fenced) || !s.mayLaunch(p.q, p.op) {
				if p.q != nil {
					blocked[p.q] = true
					fenced[p.q] = fenced[p.q] || f
				}
				continue
			}
			again = true
			s.parked = s.unlisted(i)
			if p.q != nil {
				p.q.held--
				if f {
					p.q.fence--
				}
			}
			if !p.isBulk() {
				s.rerun(p)
			} else if run := s.begin(p); run != nil {
				s.spawn(run)
			}
			break // the call may have changed the list
		}
	}
}

// unlisted returns the parked calls without one of them.
func (s *session) unlisted(i int) []*parkedCall {
	if i == 0 { // what waits for turns is mostly taken in order, and may be long
		return s.parked[1:]
	}
	return append(s.parked[:i:i], s.parked[i+1:]...)
}

func (s *session) ready(p *parkedCall, blocked, fenced map[*queue]bool) bool {
	if q := p.q; q != nil {
		_, all := isFence(p.op, len(p.wait))
		if q.inOrder() && (blocked[q] || q.bulk > 0) || fenced[q] || all && (blocked[q] || q.bulk > 0) {
			return false
		}
	}
	for _, e := range p.wait {
		if e.state == eventPending {
			return false
		}
	}
	return (!p.isBulk() || s.canCarry()) && s.fetched(p)
}

// rerun runs a parked call as if it had just been received.
func (s *session) rerun(p *parkedCall) {
	m := wire.New(p.op)
	if err := m.Decode(p.body); err != nil {
		s.log.Error("parked call", "op", p.op, "err", err)
		return
	}
	s.redo = p
	o, err := s.run(p.call, m)
	s.redo = nil
	switch {
	case err != nil:
		s.log.Error("parked call", "op", p.op, "err", err)
		s.reply(p.slot, cl.OutOfResources, nil)
	case o.parked:
		return
	case o.after != nil:
		s.spawn(func() { o.after(func() {}) })
	default:
		s.reply(p.slot, o.status, o.data)
	}
	if p.q != nil && p.q.vendor != 0 {
		cl.Flush(p.q.vendor)
	}
	s.unpin(p)
}
