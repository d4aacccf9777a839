package executor

import (
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// command runs a command that is enqueued in a queue.
func (s *session) command(c call, m wire.Request) (outcome, error) {
	switch m := m.(type) {
	case *wire.ReadBuffer:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, m.Pend, m.Blocking != 0, func(x *cmd) (cl.Status, error) { return s.readBuffer(x, m) })
	case *wire.WriteBuffer:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, m.Pend, m.Blocking != 0, func(x *cmd) (cl.Status, error) { return s.writeBuffer(x, m) })
	case *wire.ReadBufferRect:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, m.Pend, m.Blocking != 0, func(x *cmd) (cl.Status, error) { return s.readBufferRect(x, m) })
	case *wire.WriteBufferRect:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, m.Pend, m.Blocking != 0, func(x *cmd) (cl.Status, error) { return s.writeBufferRect(x, m) })
	case *wire.CopyBuffer:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.copyBuffer(x, m) })
	case *wire.CopyBufferRect:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.copyBufferRect(x, m) })
	case *wire.FillBuffer:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.fillBuffer(x, m) })
	case *wire.ReadImage:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, m.Pend, m.Blocking != 0, func(x *cmd) (cl.Status, error) { return s.readImage(x, m) })
	case *wire.WriteImage:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, m.Pend, m.Blocking != 0, func(x *cmd) (cl.Status, error) { return s.writeImage(x, m) })
	case *wire.CopyImage:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.copyImage(x, m) })
	case *wire.FillImage:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.fillImage(x, m) })
	case *wire.CopyImageToBuffer:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.copyImageToBuffer(x, m) })
	case *wire.CopyBufferToImage:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.copyBufferToImage(x, m) })
	case *wire.MapBuffer:
		return s.mapBuffer(c, m)
	case *wire.MapImage:
		return s.mapImage(c, m)
	case *wire.Unmap:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.unmap(x, m) })
	case *wire.Migrate:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) { return s.migrate(x, m) })
	case *wire.Marker:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) {
			return x.marker(), nil
		})
	case *wire.Barrier:
		return s.enqueue(c, m, m.Queue, m.Event, m.Wait, 0, false, func(x *cmd) (cl.Status, error) {
			return x.barrier(), nil
		})
	}
	return outcome{}, wire.ErrUnknownOp
}

// cmd is a command while it is enqueued.
type cmd struct {
	q       *queue
	e       *event
	wait    []cl.Event
	out     *cl.Event // where the vendor's event is stored; nil if nobody needs it
	own     cl.Event
	mem     *mem
	pend    uint32
	keep    *runtime.Pinner
	show    remote.Block // what the client must have got before it learns of the end; only for one on another host
	of      *mem         // the object and the mapping that show is of
	mapping *mapping
	failed  func() // if not nil, called when a blocking call ends with an error of its command
	aside   after  // if not nil, the rest of the command, which runs without the lock: a small blocking read
}

// track makes the vendor create an event for the command.
func (x *cmd) track() {
	if x.out == nil {
		x.out = &x.own
	}
}

// marker enqueues a marker in place of a command that has no work left.
func (x *cmd) marker() cl.Status {
	return cl.EnqueueMarkerWithWaitList(x.q.vendor, x.wait, x.out)
}

// barrier enqueues a barrier. In an out-of-order queue, the transfers after it that the
// executor carries itself have to know it.
func (x *cmd) barrier() cl.Status {
	if x.q.inOrder() {
		return cl.EnqueueBarrierWithWaitList(x.q.vendor, x.wait, x.out)
	}
	x.track()
	st := cl.EnqueueBarrierWithWaitList(x.q.vendor, x.wait, x.out)
	if st == cl.Success {
		cl.RetainEvent(*x.out)
		x.q.setBarrier(*x.out)
	}
	return st
}

func (s *session) enqueue(c call, m wire.Request, queueID, eventID uint32, wait []uint32, pend uint32, blocking bool, f func(*cmd) (cl.Status, error)) (outcome, error) {
	if _, bulk := wire.Bulk(m); bulk {
		return s.enqueueBulk(c, m, queueID, eventID, wait, pend)
	}
	q := lookup[queue](s, queueID)
	if q == nil {
		return s.refuse(c, nil, nil, pend, cl.InvalidCommandQueue), nil
	}
	hold, failed, st := s.mustHold(q, c.op, wait)
	if st != cl.Success {
		return s.refuse(c, q, nil, pend, st), nil
	}
	if hold {
		return s.park(c, m, q, eventID, wait)
	}
	e, err := s.commandEvent(q, eventID)
	if err != nil {
		return outcome{}, err
	}
	if failed {
		e.fail(cl.ExecStatusErrorForEventsInWaitList)
		o := s.refuse(c, nil, nil, pend, cl.ExecStatusErrorForEventsInWaitList)
		s.afterFail()
		return o, nil
	}
	s.bulkSlot = c.slot
	x := &cmd{q: q, e: e, wait: s.waits(wait), pend: pend}
	if e != nil {
		x.out = &e.vendor
	}
	if blocking || s.tracked(q, c.op) {
		x.track()
	}
	st, err = f(x)
	if err != nil {
		return outcome{}, err
	}
	if st != cl.Success {
		if x.keep != nil {
			x.keep.Unpin()
		}
		return s.refuse(c, q, e, pend, st), nil
	}
	q.seq++
	if x.aside != nil {
		return later(x.aside), nil
	}
	if e != nil {
		e.state = eventVendor
	}
	ev := x.own
	if e != nil {
		ev = e.vendor
	}
	if x.pend != 0 || x.keep != nil || x.show.Row != 0 {
		cl.RetainEvent(ev)
		q.pends = append(q.pends, pending{ev, x.pend, x.keep, x.show, x.of, x.mapping})
	}
	s.launch(q, c.op, nil, ev)
	o := done(cl.Success)
	if blocking {
		n, data, told := q.seq, s.answer, q
		if data != nil { // it has the pointer of a mapping, which an error would hide
			told = nil
		}
		o = s.waitThen(c, told, []cl.Event{ev}, cl.Success, func(st cl.Status) []byte {
			if q.inOrder() && st == cl.Success { // the earlier commands have ended, too
				q.idle = max(q.idle, n)
				s.gateIfIdle()
			}
			if st != cl.Success && x.failed != nil {
				x.failed()
			}
			return data
		})
	}
	if x.own != 0 {
		cl.ReleaseEvent(x.own)
	}
	return o, nil
}

// commandEvent creates the event of a command, or finds the one with which it was parked.
func (s *session) commandEvent(q *queue, id uint32) (*event, error) {
	if s.redo != nil {
		return s.redo.e, nil
	}
	if id == 0 {
		return nil, nil
	}
	e := &event{id: id, ctx: q.ctx, q: q, state: eventVendor}
	return e, s.put(id, e)
}

// refuse reports that a command could not be enqueued. If the caller does not wait, the
// error goes to the command's event and to the queue's next blocking call.
func (s *session) refuse(c call, q *queue, e *event, pend uint32, st cl.Status) outcome {
	if pend != 0 {
		s.ring.PendDone(pend, wire.PendFailed)
	}
	if e != nil {
		e.fail(st)
		s.afterFail()
	}
	if q != nil && c.slot == wire.NoSlot {
		s.log.Warn("posted command failed", "op", c.op, "queue", q.id, "err", st)
		if q.failed == cl.Success {
			q.failed = st
		}
	}
	return done(st)
}

// afterFail runs the commands that have waited for a failed event, or lets them fail, too.
func (s *session) afterFail() {
	s.wakeWatches()
	s.advance()
}

func pos(o, r []uint64) (origin, region [3]uint64, ok bool) {
	if len(o) != 3 || len(r) != 3 {
		return origin, region, false
	}
	return [3]uint64(o), [3]uint64(r), true
}

// staged finds the staged data of a rectangle or an image region, and checks that it is
// large enough.
func (s *session) staged(x *cmd, mode uint32, off, n uint64, id uint32, region []uint64) (unsafe.Pointer, cl.Status, error) {
	x.mem = lookup[mem](s, id)
	if x.mem == nil {
		return nil, cl.InvalidMemObject, nil
	}
	if len(region) != 3 {
		return nil, cl.InvalidValue, nil
	}
	need, elem := uint64(1), uint64(1)
	if x.mem.kind == memImage {
		elem = x.mem.elem
	}
	for _, v := range []uint64{elem, region[0], region[1], region[2]} {
		if v == 0 || v > 1<<40 || need > 1<<44/v {
			return nil, cl.InvalidValue, nil
		}
		need *= v
	}
	p, ok := s.arenaRange(off, n)
	if mode != wire.DataStaged || !ok || n < need {
		return nil, 0, fmt.Errorf("%d staged bytes at %#x for %d: %w", n, off, need, errHostile)
	}
	return p, cl.Success, nil
}

func (s *session) bufferRange(id uint32, off, n uint64) (*mem, cl.Status) {
	m := lookup[mem](s, id)
	if m == nil || m.kind == memImage {
		return nil, cl.InvalidMemObject
	}
	if n == 0 || off > m.size || n > m.size-off {
		return nil, cl.InvalidValue
	}
	return m, cl.Success
}

func (s *session) readBuffer(x *cmd, r *wire.ReadBuffer) (cl.Status, error) {
	m, st := s.bufferRange(r.Mem, r.Offset, r.Size)
	if st != cl.Success {
		return st, nil
	}
	p, ok := s.arenaRange(r.StageOff, r.StageLen)
	if r.Mode != wire.DataStaged || !ok || r.StageLen < r.Size {
		return 0, fmt.Errorf("%d staged bytes for %d: %w", r.StageLen, r.Size, errHostile)
	}
	s.shows(x, remote.Range(r.StageOff, r.Size))
	if r.Blocking != 0 && x.e == nil && r.Size <= directRead {
		x.aside = s.readAside(x, m, r.Offset, r.Size, p)
		return cl.Success, nil
	}
	x.track()
	return cl.EnqueueReadBuffer(x.q.vendor, m.vendor, false, r.Offset, r.Size, p, x.wait, x.out), nil
}

// directRead is the size in bytes up to which the vendor's own blocking read is used: for
// little data, it is much faster than to wait for an event.
const directRead = 64 << 10

// readAside makes the vendor enqueue and wait in one call, without the lock. A command of
// another thread may overtake it. But the application's call has not returned, so nothing
// is ordered after it.
func (s *session) readAside(x *cmd, m *mem, off, n uint64, p unsafe.Pointer) after {
	q, slot, show := x.q, s.bulkSlot, x.show
	wait := append([]cl.Event(nil), x.wait...)
	for _, w := range wait {
		cl.RetainEvent(w)
	}
	q.users++
	m.users++
	return func(back func()) {
		st := cl.EnqueueReadBuffer(q.vendor, m.vendor, true, off, n, p, wait, nil)
		s.out.deliver(s.stop)
		back()
		s.mu.Lock()
		for _, w := range wait {
			cl.ReleaseEvent(w)
		}
		s.settleAll()
		if st == cl.Success {
			s.show(show)
		}
		s.reply(slot, q.take(st), nil)
		q.users--
		m.users--
		s.dropMem(m)
		s.dropQueue(q)
		s.mu.Unlock()
	}
}

func (s *session) writeBuffer(x *cmd, r *wire.WriteBuffer) (cl.Status, error) {
	m, st := s.bufferRange(r.Mem, r.Offset, r.Size)
	if st != cl.Success {
		return st, nil
	}
	switch r.Mode {
	case wire.DataInline:
		if uint64(len(r.Content)) < r.Size {
			return 0, fmt.Errorf("%d inline bytes for %d: %w", len(r.Content), r.Size, errHostile)
		}
		b := append([]byte(nil), r.Content[:r.Size]...)
		x.keep = new(runtime.Pinner)
		x.keep.Pin(&b[0])
		x.track()
		m.touch(r.Offset, r.Size)
		return cl.EnqueueWriteBuffer(x.q.vendor, m.vendor, false, r.Offset, r.Size, unsafe.Pointer(&b[0]), x.wait, x.out), nil
	}
	p, ok := s.arenaRange(r.StageOff, r.StageLen)
	if r.Mode != wire.DataStaged || !ok || r.StageLen < r.Size {
		return 0, fmt.Errorf("%d staged bytes for %d: %w", r.StageLen, r.Size, errHostile)
	}
	x.track()
	m.touch(r.Offset, r.Size)
	return cl.EnqueueWriteBuffer(x.q.vendor, m.vendor, false, r.Offset, r.Size, p, x.wait, x.out), nil
}

// ndrange is called most often. It allocates nothing if nobody needs the event.
func (s *session) ndrange(c call, m *wire.Ndrange) (outcome, error) {
	q := lookup[queue](s, m.Queue)
	if q == nil {
		return s.refuse(c, nil, nil, 0, cl.InvalidCommandQueue), nil
	}
	hold, failed, st := s.mustHold(q, c.op, m.Wait)
	if st != cl.Success {
		return s.refuse(c, q, nil, 0, st), nil
	}
	if hold {
		return s.park(c, m, q, m.Event, m.Wait)
	}
	k := lookup[kernel](s, m.Kernel)
	if s.redo != nil && s.redo.kernel != nil {
		k = s.redo.kernel
	}
	if k == nil {
		return s.refuse(c, q, nil, 0, cl.InvalidKernel), nil
	}
	e, err := s.commandEvent(q, m.Event)
	if err != nil {
		return outcome{}, err
	}
	if failed {
		e.fail(cl.ExecStatusErrorForEventsInWaitList)
		s.afterFail()
		return done(cl.Success), nil
	}
	if m.Dims < 1 || m.Dims > 3 {
		return s.refuse(c, q, e, 0, cl.InvalidWorkDimension), nil
	}
	if k.refused > 0 {
		return s.refuse(c, q, e, 0, cl.InvalidKernelArgs), nil
	}
	if k.local > s.limits.LocalMemory { // some runtimes crash in this case
		return s.refuse(c, q, e, 0, cl.OutOfResources), nil
	}
	for _, x := range s.written(k) {
		if x.vendor != 0 {
			x.touch(0, x.size)
		}
	}
	s.off, s.glob, s.loc = [3]uint64{m.Off0, m.Off1, m.Off2}, [3]uint64{m.Glob0, m.Glob1, m.Glob2}, [3]uint64{m.Loc0, m.Loc1, m.Loc2}
	var off, loc *[3]uint64
	if m.Has&1 != 0 {
		off = &s.off
	}
	if m.Has&2 != 0 {
		loc = &s.loc
		for i := range m.Dims {
			if s.loc[i] == 0 {
				return s.refuse(c, q, e, 0, cl.InvalidWorkGroupSize), nil
			}
		}
	}
	var out *cl.Event
	switch {
	case e != nil:
		out = &e.vendor
	case s.tracked(q, c.op):
		s.own = 0
		out = &s.own
	}
	if st := cl.EnqueueNDRangeKernel(q.vendor, k.vendor, m.Dims, off, &s.glob, loc, s.waits(m.Wait), out); st != cl.Success {
		return s.refuse(c, q, e, 0, st), nil
	}
	if e != nil {
		e.state = eventVendor
	}
	q.seq++
	if out != nil {
		s.launch(q, c.op, k, *out)
	}
	if out == &s.own {
		cl.ReleaseEvent(s.own)
	}
	if loc != nil {
		s.used(k, m.Dims)
	}
	q.kernel, q.launched = k.name, time.Now()
	s.usage.Launches++
	s.usage.LocalMemory = max(s.usage.LocalMemory, k.local)
	return done(cl.Success), nil
}

// used records how large a work-group was launched.
func (s *session) used(k *kernel, dims uint32) {
	n := uint64(1)
	for i := range dims {
		n *= max(s.loc[i], 1)
		s.usage.WorkItems[i] = max(s.usage.WorkItems[i], s.loc[i])
	}
	s.usage.LargestWorkGroup = max(s.usage.LargestWorkGroup, n)
	k.group = max(k.group, n)
}

func (s *session) flush(m *wire.Flush) (outcome, error) {
	q := lookup[queue](s, m.Queue)
	if q == nil {
		return done(cl.InvalidCommandQueue), nil
	}
	return done(cl.Flush(q.vendor)), nil
}

func (s *session) finish(c call, m *wire.Finish) (outcome, error) {
	q := lookup[queue](s, m.Queue)
	if q == nil {
		return done(cl.InvalidCommandQueue), nil
	}
	if hold, _, _ := s.mustHold(q, c.op, nil); hold {
		return s.park(c, m, q, 0, nil)
	}
	v, n := q.vendor, q.seq
	q.users++
	slot := c.slot
	return later(func(back func()) {
		st := cl.Finish(v)
		s.out.deliver(s.stop)
		back()
		s.mu.Lock()
		q.users--
		if st == cl.Success { // if not, commands may run
			q.idle = max(q.idle, n)
		}
		s.settle(q, q.seq == q.idle)
		s.settleAll()
		s.bury(q.ctx)
		s.endTurns()
		s.gateIfIdle()
		s.reply(slot, q.take(st), nil)
		s.dropQueue(q)
		s.mu.Unlock()
	}), nil
}
