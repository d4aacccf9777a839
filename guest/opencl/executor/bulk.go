package executor

import (
	"cmp"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// A bulk transfer is a read or write whose bytes the application's library copies, in a
// thread of its own or in the thread that waits in a blocking call. If the device computes
// in the arena, the library copies into or out of the buffer itself. Otherwise it copies
// through a lane, which is a ring of chunks in the arena: the device works on some chunks
// while the library copies others. So a transfer takes no more host memory than a lane has,
// and any number of transfers together take no more than all lanes.
//
// A transfer is parked until it is its turn and a lane is free. While it runs, later
// commands of its queue are parked. When the session is frozen, the transfer stops between
// two chunks and is parked again with the bytes that are left.

const (
	// laneBytes is the size of one lane in the arena, in bytes.
	laneBytes = wire.LaneChunk * wire.LaneChunks
	// directAhead is how many chunks the client may copy directly into or out of the buffer
	// before the executor raises the limit. The executor does nothing else for these
	// chunks.
	directAhead = 32
	// sharedBulk is the size in bytes from which threads of the library help the thread
	// that waits in a blocking call.
	sharedBulk = 8 << 20
	// stallPatience is how long a freeze waits for an application that does not copy its
	// chunks, for example because it was stopped with a signal.
	stallPatience = 2 * time.Second
)

// bulk is one bulk transfer.
type bulk struct {
	p          *parkedCall
	req        wire.Request
	m          *mem
	write      bool
	rect       bool
	off        uint64     // of a buffer
	origin     [3]uint64  // of a rectangle or an image
	row, slice uint64     // pitches of a rectangle in a buffer
	box        [3]uint64  // bytes of a row, rows, slices
	total      uint64     // bytes
	moved      uint64     // bytes moved so far
	pend       uint32     // completion word
	wait       []cl.Event // events that must end before it
	barrier    cl.Event   // the last barrier of its queue, which must end, too, but may fail; or 0
	lane       int
	start      uint64
}

// isBulk reports whether the call is a bulk transfer.
func (p *parkedCall) isBulk() bool {
	if !p.looked {
		p.looked = true
		if m := wire.New(p.op); m != nil && m.Decode(p.body) == nil {
			_, p.bulk = wire.Bulk(m)
		}
	}
	return p.bulk
}

// describeBulk reads from a request what it moves.
func (s *session) describeBulk(m wire.Request) (*bulk, cl.Status, error) {
	b := &bulk{req: m}
	var id uint32
	var origin, region []uint64
	image := false
	switch m := m.(type) {
	case *wire.ReadBuffer:
		b.pend, b.off, b.box = m.Pend, m.Offset, [3]uint64{m.Size, 1, 1}
		id = m.Mem
	case *wire.WriteBuffer:
		b.pend, b.off, b.box, b.write = m.Pend, m.Offset, [3]uint64{m.Size, 1, 1}, true
		id = m.Mem
	case *wire.ReadBufferRect:
		b.pend, b.rect, b.row, b.slice = m.Pend, true, m.RowPitch, m.SlicePitch
		id, origin, region = m.Mem, m.Origin, m.Region
	case *wire.WriteBufferRect:
		b.pend, b.rect, b.row, b.slice, b.write = m.Pend, true, m.RowPitch, m.SlicePitch, true
		id, origin, region = m.Mem, m.Origin, m.Region
	case *wire.ReadImage:
		b.pend, image = m.Pend, true
		id, origin, region = m.Image, m.Origin, m.Region
	case *wire.WriteImage:
		b.pend, image, b.write = m.Pend, true, true
		id, origin, region = m.Image, m.Origin, m.Region
	}
	moved, _ := wire.Bulk(m)
	b.moved = *moved
	if b.pend == 0 || b.pend >= wire.PendCount {
		return nil, 0, fmt.Errorf("bulk transfer with completion word %d: %w", b.pend, errHostile)
	}
	switch {
	case !b.rect && !image:
		var st cl.Status
		if b.m, st = s.bufferRange(id, b.off, b.box[0]); st != cl.Success {
			return b, st, nil
		}
	default:
		b.m = lookup[mem](s, id)
		if b.m == nil || (b.m.kind == memImage) != image {
			return b, cl.InvalidMemObject, nil
		}
		var ok bool
		if b.origin, b.box, ok = pos(origin, region); !ok {
			return b, cl.InvalidValue, nil
		}
		elem := uint64(1)
		if image {
			elem = b.m.elem
		}
		need := elem
		for _, v := range b.box {
			if v == 0 || v > 1<<40 || need > 1<<44/v {
				return b, cl.InvalidValue, nil
			}
			need *= v
		}
		b.box[0] *= elem
	}
	b.total = b.box[0] * b.box[1] * b.box[2]
	if b.moved >= b.total {
		return nil, 0, fmt.Errorf("bulk transfer of %d bytes begun at %d: %w", b.total, b.moved, errHostile)
	}
	return b, cl.Success, nil
}

// enqueueBulk parks a bulk transfer, and begins it if it is its turn.
func (s *session) enqueueBulk(c call, m wire.Request, queueID, eventID uint32, wait []uint32, pend uint32) (outcome, error) {
	q := lookup[queue](s, queueID)
	if q == nil {
		return s.refuse(c, nil, nil, pend, cl.InvalidCommandQueue), nil
	}
	hold, _, st := s.mustHold(q, c.op, wait)
	if st != cl.Success {
		return s.refuse(c, q, nil, pend, st), nil
	}
	b, st, err := s.describeBulk(m)
	switch {
	case err != nil:
		return outcome{}, err
	case st != cl.Success:
		e, err := s.commandEvent(q, eventID)
		if err != nil {
			return outcome{}, err
		}
		return s.refuse(c, q, e, pend, st), nil
	case b.moved != 0:
		return outcome{}, fmt.Errorf("bulk transfer that begins in its middle: %w", errHostile)
	}
	p, err := s.newParked(c, q, eventID)
	if err != nil {
		return outcome{}, err
	}
	p.looked, p.bulk = true, true
	s.pinAll(p, wire.Mems(m), wait)
	if hold || !s.canCarry() {
		s.enlist(p)
		return held(), nil
	}
	run := s.begin(p)
	switch {
	case run == nil:
	case c.slot != wire.NoSlot:
		return later(func(func()) { run() }), nil
	default:
		s.spawn(run)
	}
	return held(), nil
}

// freeLane returns a lane that is free, or -1.
func (s *session) freeLane() int {
	for i, used := range s.lanes {
		if !used && s.ring.LaneFree(i) {
			return i
		}
	}
	return -1
}

// canCarry reports whether a bulk transfer may begin now.
func (s *session) canCarry() bool { return !s.gate.Load() && s.freeLane() >= 0 }

// begin prepares a transfer whose turn it is. The caller must call run without the lock.
// run is nil if the transfer has failed and is over.
func (s *session) begin(p *parkedCall) (run func()) {
	m := wire.New(p.op)
	if err := m.Decode(p.body); err != nil {
		s.log.Error("parked call", "op", p.op, "err", err)
		s.reply(p.slot, cl.OutOfResources, nil)
		s.unpin(p)
		return nil
	}
	s.redo = p
	b, st, err := s.describeBulk(m)
	s.redo = nil
	if err != nil {
		s.log.Error("parked call", "op", p.op, "err", err)
		st = cl.OutOfResources
	}
	if b == nil {
		b = &bulk{req: m}
	}
	b.p = p
	for _, e := range p.wait {
		switch {
		case e.state == eventDone && e.status < 0:
			st = cl.ExecStatusErrorForEventsInWaitList
		case e.state == eventVendor && e.vendor != 0:
			cl.RetainEvent(e.vendor)
			b.wait = append(b.wait, e.vendor)
		}
	}
	if e := p.q.barrier; e != 0 {
		cl.RetainEvent(e)
		b.barrier = e
	}
	if e := p.e; e != nil && e.times[0] == 0 {
		e.times[0] = s.now()
		e.times[1] = e.times[0]
	}
	if st != cl.Success {
		s.endBulk(b, st)
		return nil
	}
	b.lane = s.freeLane()
	s.lanes[b.lane] = true
	s.moving = append(s.moving, p)
	p.q.bulk++
	p.q.seq++
	b.touch()
	return func() { s.carry(b) }
}

func (b *bulk) touch() {
	switch {
	case !b.write:
	case b.rect || b.m.kind == memImage:
		b.m.touch(0, b.m.size)
	default:
		b.m.touch(b.off, b.box[0])
	}
}

// carry moves the bytes of a transfer.
func (s *session) carry(b *bulk) {
	st := s.awaitTurn(b)
	b.start = s.now()
	s.mu.Lock()
	s.settleAll() // a write may send data that the client still has to get from an earlier read
	s.mu.Unlock()
	r := laneRun{s: s, b: b}
	if st == cl.Success && !s.gate.Load() {
		root, base := b.m.root()
		switch {
		case root.unified && root.kind == memBuffer && !b.rect && b.m.kind != memImage:
			r.direct(root.arena + base + b.off)
		case b.write:
			st = r.streamIn()
		default:
			st = r.streamOut()
		}
	}
	if st != cl.Success || b.moved == b.total { // it is over
		s.out.deliver(s.stop)
	}
	p := b.p
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.begun {
		state := uint32(wire.LaneFree)
		if r.left {
			state = wire.LaneLeft
		}
		s.ring.EndLane(b.lane, state)
	}
	s.lanes[b.lane] = false
	s.moving = slices.DeleteFunc(s.moving, func(x *parkedCall) bool { return x == p })
	p.q.bulk--
	if p.q.inOrder() && st == cl.Success { // nothing else can have been enqueued since
		p.q.idle = p.q.seq
	}
	// Mark the object again: an export may have recorded it as clean while the transfer
	// ran.
	b.touch()
	if st == cl.Success && b.moved < b.total {
		s.putBack(b)
		return
	}
	s.endBulk(b, st)
	s.gateIfIdle()
}

// releaseWait gives back the events that were waited for.
func (b *bulk) releaseWait() {
	for _, w := range b.wait {
		cl.ReleaseEvent(w)
	}
	if b.barrier != 0 {
		cl.ReleaseEvent(b.barrier)
	}
}

// putBack parks a transfer again that had to stop. It comes before everything else that its
// queue has parked.
func (s *session) putBack(b *bulk) {
	p := b.p
	b.releaseWait()
	if e := p.e; e != nil && e.times[2] == 0 {
		e.times[2] = b.start
	}
	moved, _ := wire.Bulk(b.req)
	*moved = b.moved
	p.body = b.req.Append(nil)
	s.parked = append([]*parkedCall{p}, s.parked...)
	p.q.held++
	s.gateIfIdle()
	if !s.gate.Load() { // the freeze was given up in the meantime
		s.advance()
	}
}

// endBulk reports the end of a transfer to its event, its queue and the client.
func (s *session) endBulk(b *bulk, st cl.Status) {
	p := b.p
	b.releaseWait()
	s.settleAll()
	word := uint32(wire.PendDone)
	if st != cl.Success {
		word = wire.PendFailed
	}
	if b.pend != 0 {
		_ = s.ring.PendDone(b.pend, word)
	}
	if e := p.e; e != nil {
		if e.times[2] == 0 {
			e.times[2] = b.start
		}
		e.times[3] = s.now()
		e.times[4] = e.times[3]
		e.timed = p.q.props&cl.QueueProfilingEnable != 0 && st == cl.Success
		s.clock.last = max(s.clock.last, e.times[4])
		e.state, e.status = eventDone, int32(min(st, 0))
		if b.write && st == cl.Success {
			b.m.wrote(b, e)
		}
	}
	if st != cl.Success && st != cl.ExecStatusErrorForEventsInWaitList && p.slot == wire.NoSlot && p.q.failed == cl.Success {
		s.log.Warn("posted command failed", "op", p.op, "queue", p.q.id, "err", st)
		p.q.failed = st
	}
	if p.slot != wire.NoSlot {
		st = p.q.take(st)
	}
	s.reply(p.slot, st, nil)
	s.ring.RingCaller(p.slot)
	s.unpin(p)
	s.wakeWatches()
	s.advance()
}

// awaitTurn waits for the commands and events that must end before the command. Those before
// it in its queue end first even if it fails: the queue is taken for idle then.
func (s *session) awaitTurn(b *bulk) cl.Status {
	if b.barrier != 0 {
		ended(b.barrier)
	}
	st := cl.Success
	if len(b.wait) > 0 {
		st = cl.WaitForEvents(b.wait)
	}
	if b.p.q.inOrder() {
		st = cmp.Or(st, cl.Finish(b.p.q.vendor))
	}
	return st
}

// cut returns the size in bytes of the chunk that begins at pos.
func (b *bulk) cut(pos uint64) uint64 {
	return remote.Cut{Row: b.box[0], Slice: b.box[0] * b.box[1], Total: b.total}.At(pos)
}

// chunks returns how many chunks are left.
func (b *bulk) chunks() (n uint32) {
	for at := b.moved; at < b.total; n++ {
		at += b.cut(at)
	}
	return n
}

// enqueue makes the vendor move n bytes at pos between the object and p.
func (b *bulk) enqueue(pos, n uint64, p unsafe.Pointer, ev *cl.Event) cl.Status {
	row, slice := b.box[0], b.box[0]*b.box[1]
	x, y, z := pos%row, pos%slice/row, pos/slice
	r := [3]uint64{n, 1, 1}
	switch {
	case pos%slice == 0 && n >= slice:
		r = [3]uint64{row, b.box[1], n / slice}
	case x == 0 && n >= row:
		r = [3]uint64{row, n / row, 1}
	}
	q, m := b.p.q.vendor, b.m
	switch {
	case m.kind == memImage:
		o := [3]uint64{b.origin[0] + x/m.elem, b.origin[1] + y, b.origin[2] + z}
		r[0] /= m.elem
		if b.write {
			return cl.EnqueueWriteImage(q, m.vendor, false, &o, &r, 0, 0, p, nil, ev)
		}
		return cl.EnqueueReadImage(q, m.vendor, false, &o, &r, 0, 0, p, nil, ev)
	case b.rect:
		o := [3]uint64{b.origin[0] + x, b.origin[1] + y, b.origin[2] + z}
		if b.write {
			return cl.EnqueueWriteBufferRect(q, m.vendor, false, &o, &[3]uint64{}, &r, b.row, b.slice, r[0], r[0]*r[1], p, nil, ev)
		}
		return cl.EnqueueReadBufferRect(q, m.vendor, false, &o, &[3]uint64{}, &r, b.row, b.slice, r[0], r[0]*r[1], p, nil, ev)
	case b.write:
		return cl.EnqueueWriteBuffer(q, m.vendor, false, b.off+pos, n, p, nil, ev)
	}
	return cl.EnqueueReadBuffer(q, m.vendor, false, b.off+pos, n, p, nil, ev)
}

// laneRun is one run of a transfer in a lane.
type laneRun struct {
	s     *session
	b     *bulk
	begun bool
	left  bool   // given up while the client was copying
	count uint32 // number of chunks
	limit uint32 // number of chunks that the client may copy so far
	done  uint32 // number of chunks that the client has copied
	seen  uint32 // the client's count as it was last read
	evs   [wire.LaneChunks]cl.Event
	sizes [wire.LaneChunks]uint64
}

func (r *laneRun) start(direct bool, at uint64, limit uint32) {
	r.begun, r.limit = true, min(limit, r.count)
	r.s.ring.StartLane(r.b.lane, shm.Lane{
		Direct: direct, Word: r.b.pend, From: r.b.moved, At: at, Limit: r.limit,
		Write: r.b.write, Row: r.b.box[0], Slice: r.b.box[0] * r.b.box[1], Total: r.b.total,
	})
	r.ring()
}

// ring wakes the client's thread that copies the data.
func (r *laneRun) ring() {
	if r.b.p.slot == wire.NoSlot || r.b.total >= sharedBulk {
		r.s.ring.RingMovers()
	}
	r.s.ring.RingCaller(r.b.p.slot)
}

func (r *laneRun) raise(limit uint32) {
	if limit = min(limit, r.count); limit > r.limit {
		r.limit = limit
		r.s.ring.RaiseLane(r.b.lane, limit)
		r.ring()
	}
}

// learn records how many chunks the client has copied. The client can write any number, so a
// number out of range is ignored.
func (r *laneRun) learn(n uint32) {
	r.seen = n
	if n > r.done && n <= r.limit {
		r.done = n
	}
}

// await waits until the client has copied n chunks. It returns false if the client does not
// go on while the session must be frozen, or if the session has ended.
func (r *laneRun) await(n uint32) bool {
	var since time.Time
	for r.done < n {
		before := r.done
		r.learn(r.s.ring.WaitLane(r.b.lane, r.seen, 20*time.Millisecond))
		switch {
		case r.s.closed.Load():
			r.left = true
		case r.done != before || !r.s.gate.Load():
			since = time.Time{}
		case since.IsZero():
			since = time.Now()
		case time.Since(since) > stallPatience:
			r.left = true
		}
		if r.left {
			return false
		}
	}
	return true
}

// settle waits until the device has done a chunk.
func (r *laneRun) settle(i uint32) cl.Status {
	e := &r.evs[i%wire.LaneChunks]
	if *e == 0 {
		return cl.Success
	}
	st, _ := ended(*e)
	cl.ReleaseEvent(*e)
	*e = 0
	return st
}

func (r *laneRun) settleAll() {
	for i := range uint32(wire.LaneChunks) {
		r.settle(i)
	}
}

// issue makes the device move chunk i, which begins at pos at, and returns where the next
// chunk begins.
func (r *laneRun) issue(i uint32, at uint64) (next uint64, st cl.Status) {
	n, k := r.b.cut(at), i%wire.LaneChunks
	r.sizes[k] = n
	off := r.s.laneMemory(r.b.lane) + uint64(k)*wire.LaneChunk
	if st = r.b.enqueue(at, n, r.s.arena.Pointer(off), &r.evs[k]); st != cl.Success {
		r.evs[k] = 0
		return at, st
	}
	return at + n, cl.Flush(r.b.p.q.vendor)
}

// laneMemory returns the offset in the arena of a lane's first chunk.
func (s *session) laneMemory(lane int) uint64 {
	return (s.split+wire.LaneChunk-1)&^(wire.LaneChunk-1) + uint64(lane)*laneBytes
}

// direct lets the client copy into or out of the arena at an offset.
func (r *laneRun) direct(at uint64) {
	b := r.b
	from := b.moved
	r.count = b.chunks()
	r.start(true, at, directAhead)
	for stop := false; r.done < r.count; {
		stop = stop || r.s.gate.Load()
		if stop && r.done == r.limit || !r.await(r.done+1) {
			break
		}
		if !stop && r.limit-r.done <= directAhead/2 {
			r.raise(r.done + directAhead)
		}
	}
	b.moved = min(from+uint64(r.done)*wire.LaneChunk, b.total)
}

// streamIn writes the object: the client fills chunks, and the device reads them.
func (r *laneRun) streamIn() cl.Status {
	b, s := r.b, r.s
	defer r.settleAll()
	s.pins.add(b.m.ctx, s.laneMemory(b.lane), laneBytes)
	r.count = b.chunks()
	r.start(false, 0, wire.LaneChunks)
	var issued, settled uint32
	at, st, stop := b.moved, cl.Success, false
	for {
		stop = stop || st != cl.Success || s.gate.Load()
		last := r.count
		if stop {
			last = r.limit // the client may be filling these already
		}
		if settled == last {
			return st
		}
		if issued < last {
			if !r.await(issued + 1) {
				return st
			}
			if st == cl.Success {
				at, st = r.issue(issued, at)
			}
			issued++
		}
		// Half of the chunks are for the device, and half for the client.
		for settled < issued && (issued-settled > wire.LaneChunks/2 || issued == last) {
			if x := r.settle(settled); st == cl.Success {
				st = x
			}
			if st == cl.Success {
				b.moved += r.sizes[settled%wire.LaneChunks]
			}
			settled++
			if !stop && st == cl.Success {
				r.raise(settled + wire.LaneChunks)
			}
		}
	}
}

// streamOut reads the object: the device fills chunks, and the client reads them.
func (r *laneRun) streamOut() cl.Status {
	b, s := r.b, r.s
	defer r.settleAll()
	s.pins.add(b.m.ctx, s.laneMemory(b.lane), laneBytes)
	r.count = b.chunks()
	r.start(false, 0, 0)
	var issued, settled, taken uint32
	at, st, stop := b.moved, cl.Success, false
	for {
		r.learn(s.ring.WaitLane(b.lane, r.seen, 0))
		for ; taken < r.done; taken++ {
			b.moved += r.sizes[taken%wire.LaneChunks]
		}
		stop = stop || st != cl.Success || s.gate.Load()
		for !stop && issued < r.count && issued-taken < wire.LaneChunks {
			if at, st = r.issue(issued, at); st != cl.Success {
				stop = true
				break
			}
			issued++
		}
		switch {
		case settled < issued && st == cl.Success:
			if st = r.settle(settled); st == cl.Success {
				settled++
				r.raise(settled)
			}
		case taken < settled:
			if !r.await(taken + 1) {
				return st
			}
		case stop || settled == r.count:
			return st
		}
	}
}
