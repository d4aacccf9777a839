package executor

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/arena"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// hostRoot returns the object whose arena memory shows the content of m, and the offset of
// m in it.
func (m *mem) hostRoot() (*mem, uint64) {
	if m.kind == memImage {
		return m, 0
	}
	return m.root()
}

// shadowSize returns how much arena memory the mapped form of the object takes, in bytes.
func (m *mem) shadowSize() uint64 {
	if m.kind != memImage {
		return m.size
	}
	row, slice := m.pitches()
	r := m.region()
	return max(row*r[1]*r[2], slice*r[2])
}

// shadow allocates memory in the arena for the object, if it has none.
func (s *session) shadow(m *mem) cl.Status {
	if m.hasArena {
		return cl.Success
	}
	off, err := s.host.alloc(m.shadowSize())
	if err != nil {
		s.log.Warn("mapping", "object", m.id, "err", err)
		return cl.MapFailure
	}
	m.arena, m.hasArena = off, true
	s.hugePages(off, m.shadowSize())
	return cl.Success
}

// Shadows are pinned from pinMin bytes on, and prepared in advance from readyMin bytes on.
const (
	pinMin   = 1 << 20
	readyMin = 32 << 20
)

// pinShadow makes the driver pin the shadow of an object that is mapped more than once, or
// for which the application has requested host memory. Pinning takes about as long as one
// transfer from memory that is not pinned.
func (s *session) pinShadow(m *mem) {
	again := m.wasMapped
	m.wasMapped = true
	if m.pinTried || m.unified || m.shadowSize() < pinMin || !again && m.flags&cl.MemAllocHostPtr == 0 {
		return
	}
	m.pinTried = true
	s.pins.add(m.ctx, m.arena, m.shadowSize())
}

// readyShadow allocates and pins the shadow of a new buffer that was created to be mapped.
// Drivers do that while they create it; here it is done in another goroutine.
func (s *session) readyShadow(m *mem) {
	if !s.pins.wanted || s.unified || m.flags&cl.MemAllocHostPtr == 0 || m.size < readyMin || s.shadow(m) != cl.Success {
		return
	}
	m.users++
	m.pinTried = true
	b := s.arenaBytes(m.arena, m.size)
	go func() {
		populate(b)
		s.pins.add(m.ctx, m.arena, m.size)
		s.mu.Lock()
		defer s.mu.Unlock()
		m.users--
		s.dropMem(m)
		s.endLeft()
	}()
}

// hugePages requests huge pages, if the kernel has them for shared memory. They are much
// faster to allocate and to pin.
func (s *session) hugePages(off, n uint64) {
	if n >= 2*arena.Huge {
		_ = unix.Madvise(s.arenaBytes(off, n), unix.MADV_HUGEPAGE)
	}
}

func (s *session) addMapping(m *mem, mp *mapping) error {
	if m.maps == nil {
		m.maps = map[uint32]*mapping{}
	}
	if m.maps[mp.ID] != nil {
		return fmt.Errorf("mapping %d of object %d is taken: %w", mp.ID, m.id, errHostile)
	}
	mp.unseen = s.far != nil && mp.shownFirst()
	m.maps[mp.ID] = mp
	s.mapped(m, mp)
	return nil
}

// block returns where in the arena the application has a mapping.
func (m *mem) block(mp *mapping) remote.Block {
	if m.kind != memImage {
		return remote.Range(mp.At, mp.Size)
	}
	row, slice := m.pitches()
	if m.desc.Type == cl.MemObjectImage1dArray {
		row = slice
	}
	return remote.Block{At: mp.At, Row: mp.Region[0] * m.elem, Rows: mp.Region[1], Slices: mp.Region[2], RowPitch: row, SlicePitch: slice}
}

func (s *session) mapBuffer(c call, r *wire.MapBuffer) (outcome, error) {
	m, st := s.bufferRange(r.Mem, r.Offset, r.Size)
	if st != cl.Success {
		return done(st), nil
	}
	root, base := m.hostRoot()
	if s.redo == nil {
		if st := s.shadow(root); st != cl.Success {
			return done(st), nil
		}
		at := root.arena + base + r.Offset
		if err := s.addMapping(m, &mapping{ID: r.Map, Flags: r.Flags, At: at, Offset: r.Offset, Size: r.Size}); err != nil {
			return outcome{}, err
		}
	}
	mp := m.maps[r.Map]
	var at uint64 // the offset that the application has got, maybe from another executor
	if mp != nil {
		at = mp.At
	}
	return s.mapping(c, r, r.Queue, r.Event, r.Wait, r.Blocking != 0, m, mp, u64s(at, 0, 0, 0), func(x *cmd) (cl.Status, error) {
		if mp == nil {
			return cl.MapFailure, nil
		}
		if root.unified && at == root.arena+base+r.Offset {
			if r.Flags&cl.MapWriteInvalidateRegion == 0 {
				s.showsMap(x, m, mp)
			}
			p, st := cl.EnqueueMapBuffer(x.q.vendor, m.vendor, false, r.Flags, r.Offset, r.Size, x.wait, x.out)
			if st == cl.Success && p != s.arena.Pointer(at) {
				s.log.Error("runtime maps outside the memory it was given", "object", m.id)
				return cl.MapFailure, nil
			}
			mp.vendor = p
			return st, nil
		}
		s.pinShadow(root)
		if r.Flags&cl.MapWriteInvalidateRegion != 0 {
			return x.marker(), nil
		}
		s.showsMap(x, m, mp)
		x.track()
		return mp.readBy(x, r.Blocking != 0, cl.EnqueueReadBuffer(x.q.vendor, m.vendor, false, r.Offset, r.Size, s.arena.Pointer(at), x.wait, x.out)), nil
	})
}

func (s *session) mapImage(c call, r *wire.MapImage) (outcome, error) {
	m := lookup[mem](s, r.Image)
	if m == nil || m.kind != memImage {
		return done(cl.InvalidMemObject), nil
	}
	o, reg, ok := pos(r.Origin, r.Region)
	if !ok {
		return done(cl.InvalidValue), nil
	}
	whole := m.region()
	for i := range whole {
		if reg[i] == 0 || o[i] > whole[i] || reg[i] > whole[i]-o[i] {
			return done(cl.InvalidValue), nil
		}
	}
	if s.redo == nil {
		if st := s.shadow(m); st != cl.Success {
			return done(st), nil
		}
		at, _, _ := m.pixel(o)
		if err := s.addMapping(m, &mapping{ID: r.Map, Flags: r.Flags, At: at, Origin: o, Region: reg}); err != nil {
			return outcome{}, err
		}
	}
	mp := m.maps[r.Map]
	var at uint64
	if mp != nil {
		at = mp.At
	}
	row, slice := m.pitches()
	return s.mapping(c, r, r.Queue, r.Event, r.Wait, r.Blocking != 0, m, mp, u64s(at, row, slice, 0), func(x *cmd) (cl.Status, error) {
		if mp == nil {
			return cl.MapFailure, nil
		}
		if r.Flags&cl.MapWriteInvalidateRegion != 0 {
			return x.marker(), nil
		}
		s.showsMap(x, m, mp)
		rp, sp := m.transferPitches()
		x.track()
		return mp.readBy(x, r.Blocking != 0, cl.EnqueueReadImage(x.q.vendor, m.vendor, false, &o, &reg, rp, sp, s.arena.Pointer(at), x.wait, x.out)), nil
	})
}

// readBy keeps the event of the command that reads the mapping's content. A blocking call does not
// return before it has ended.
func (mp *mapping) readBy(x *cmd, blocking bool, st cl.Status) cl.Status {
	if st == cl.Success && !blocking {
		mp.reads = *x.out
		cl.RetainEvent(mp.reads)
	}
	return st
}

// arrived reports whether the application can have written to the mapping: not before its
// content is there. It may be asked once.
func (mp *mapping) arrived() bool {
	if mp.reads == 0 {
		return true
	}
	status, st := cl.EventStatus(mp.reads)
	cl.ReleaseEvent(mp.reads)
	mp.reads = 0
	return st == cl.Success && status == cl.Complete
}

// failed reports whether the mapping's content has not come and will not.
func (mp *mapping) failed() bool {
	if mp.reads == 0 {
		return false
	}
	status, st := cl.EventStatus(mp.reads)
	return st != cl.Success || status < cl.Complete
}

// isSent reports whether the transfer that an unmap command waits for has written the
// mapping's content already. It was taken when it was complete; what a client on another
// host sends with the request to unmap may be older.
func (s *session) isSent(mp *mapping, wait []uint32) bool {
	return mp.sent != nil && len(wait) == 1 && lookup[event](s, wait[0]) == mp.sent
}

// wrote notes the event of a transfer to exactly the region of a mapping.
func (m *mem) wrote(b *bulk, e *event) {
	for _, mp := range m.maps {
		same := mp.Offset == b.off && mp.Size == b.box[0] && !b.rect
		if m.kind == memImage {
			same = mp.Origin == b.origin && [3]uint64{mp.Region[0] * m.elem, mp.Region[1], mp.Region[2]} == b.box
		}
		if same {
			mp.sent = e
		}
	}
}

// pixel returns where a pixel of the image is in the arena, and the pitches.
func (m *mem) pixel(o [3]uint64) (at, row, slice uint64) {
	row, slice = m.pitches()
	if m.desc.Type == cl.MemObjectImage1dArray {
		return m.arena + o[1]*slice + o[0]*m.elem, row, slice
	}
	return m.arena + o[2]*slice + o[1]*row + o[0]*m.elem, row, slice
}

// transferPitches returns the pitches that a transfer between the image and its shadow must
// have.
func (m *mem) transferPitches() (row, slice uint64) {
	row, slice = m.pitches()
	switch m.desc.Type {
	case cl.MemObjectImage1d, cl.MemObjectImage1dBuffer, cl.MemObjectImage2d:
		slice = 0
	case cl.MemObjectImage1dArray: // PoCL takes the one, other runtimes the other
		slice = row
	}
	return row, slice
}

// mapping enqueues a map command. Its pointer is known at once. A blocking map is answered
// when the data has arrived.
func (s *session) mapping(c call, m wire.Request, queueID, eventID uint32, wait []uint32, blocking bool, o *mem, mp *mapping, data []byte, f func(*cmd) (cl.Status, error)) (outcome, error) {
	s.answer = data
	out, err := s.enqueue(c, m, queueID, eventID, wait, 0, blocking, func(x *cmd) (cl.Status, error) {
		x.failed = func() { s.notMapped(o, mp, false) }
		return f(x)
	})
	s.answer = nil
	if err != nil {
		return out, err
	}
	switch {
	case out.parked, out.after != nil: // answered when it was parked, or when the wait ends
	case out.status != cl.Success:
		if mp != nil {
			s.notMapped(o, mp, mp.shownFirst()) // a carrier waits for each that it is told of
		}
		if out.status == cl.ExecStatusErrorForEventsInWaitList && !blocking { // its event tells of it, as if that had failed later
			out = done(cl.Success)
			out.data = data
		}
	default:
		out.data = data
	}
	return out, nil
}

// notMapped forgets a mapping whose command has failed in the call: the application has got no pointer. show makes
// a carrier see its content as if it had come.
func (s *session) notMapped(o *mem, mp *mapping, show bool) {
	delete(o.maps, mp.ID)
	if s.far != nil {
		root, _ := o.hostRoot()
		root.mapFailed.Store(true)
		root.markAll() // what is on its way may be left out already
	}
	if show {
		s.showOf(o.block(mp), o, mp)
	}
	s.isOver(o, mp)
}

func (s *session) unmap(x *cmd, r *wire.Unmap) (cl.Status, error) {
	m := lookup[mem](s, r.Mem)
	if m == nil {
		return cl.InvalidMemObject, nil
	}
	mp := m.maps[r.Map]
	if mp == nil { // its map command has failed, and the application gives the pointer back that it has all the same
		return x.marker(), nil
	}
	delete(m.maps, r.Map)
	if mp.told {
		s.isOver(m, mp)
	}
	root, base := m.hostRoot()
	// Drivers take little data when a write of it is enqueued: of a region that is still to be
	// read they would write what was there before.
	writes := mp.arrived() && mp.writes() && !s.isSent(mp, r.Wait)
	if writes {
		m.touch(mp.Offset, max(mp.Size, 1))
	}
	defer s.shed(root)
	switch {
	case root.unified && mp.vendor != nil:
		return cl.EnqueueUnmapMemObject(x.q.vendor, m.vendor, mp.vendor, x.wait, x.out), nil
	case !writes || root.unified && mp.At == root.arena+base+mp.Offset:
		return x.marker(), nil
	case m.kind == memImage:
		rp, sp := m.transferPitches()
		return cl.EnqueueWriteImage(x.q.vendor, m.vendor, false, &mp.Origin, &mp.Region, rp, sp, s.arena.Pointer(mp.At), x.wait, x.out), nil
	}
	return cl.EnqueueWriteBuffer(x.q.vendor, m.vendor, false, mp.Offset, mp.Size, s.arena.Pointer(mp.At), x.wait, x.out), nil
}

// shed frees memory that only mappings from before a swap have used. It does so when there
// is no such mapping any more and the device has got what was written from it.
func (s *session) shed(m *mem) {
	if len(m.extra) == 0 || m.isMapped() {
		return
	}
	for _, x := range m.extra {
		m.ctx.zombies = append(m.ctx.zombies, x.Off)
	}
	m.extra = nil
}
