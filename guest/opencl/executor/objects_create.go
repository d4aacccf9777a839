package executor

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

func (s *session) createSubDevices(m *wire.CreateSubDevices) (outcome, error) {
	parent := lookup[device](s, m.Parent)
	if parent == nil {
		return done(cl.InvalidDevice), nil
	}
	if len(m.Props) == 0 || m.Props[len(m.Props)-1] != 0 {
		return done(cl.InvalidValue), nil
	}
	parts, st := cl.CreateSubDevices(parent.vendor, m.Props)
	if st != cl.Success {
		return done(st), nil
	}
	b := pair(nil, uint32(len(parts)), 0)
	for i, v := range parts {
		if i >= len(m.IDs) {
			cl.ReleaseDevice(v)
			continue
		}
		d := &device{id: m.IDs[i], parent: parent, part: append([]uint64(nil), m.Props...), index: i, vendor: v}
		if err := s.put(d.id, d); err != nil {
			return outcome{}, err
		}
		ps := deviceParams(v, s.cfg.Device, deviceLimits(v))
		b = appendParams(pair(b, d.id, uint32(len(ps))), ps)
	}
	return answer(b), nil
}

func (s *session) vendorDevices(ids []uint32) ([]*device, []cl.Device, bool) {
	var ds []*device
	var vs []cl.Device
	for _, id := range ids {
		d := lookup[device](s, id)
		if d == nil {
			return nil, nil, false
		}
		ds, vs = append(ds, d), append(vs, d.vendor)
	}
	return ds, vs, true
}

func (s *session) createContext(m *wire.CreateContext) (outcome, error) {
	ds, vs, ok := s.vendorDevices(m.Devices)
	if !ok || len(ds) == 0 {
		return done(cl.InvalidDevice), nil
	}
	v, st := cl.CreateContext(vs)
	if st != cl.Success {
		return done(st), nil
	}
	return done(cl.Success), s.put(m.ID, &clContext{id: m.ID, devices: ds, vendor: v})
}

func newQueue(c *clContext, d *device, props uint64) (cl.Queue, cl.Status) {
	v, st := cl.CreateCommandQueue(c.vendor, d.vendor, props)
	if st == cl.InvalidQueueProperties && props&cl.QueueProfilingEnable != 0 {
		v, st = cl.CreateCommandQueue(c.vendor, d.vendor, props&^cl.QueueProfilingEnable)
	}
	return v, st
}

func (s *session) createQueue(m *wire.CreateQueue) (outcome, error) {
	c, d := lookup[clContext](s, m.Context), lookup[device](s, m.Device)
	switch {
	case c == nil:
		return done(cl.InvalidContext), nil
	case d == nil || !c.has(d):
		return done(cl.InvalidDevice), nil
	}
	v, st := newQueue(c, d, m.Props)
	if st != cl.Success {
		return done(st), nil
	}
	q := &queue{id: m.ID, ctx: c, dev: d, props: m.Props, vendor: v}
	c.queues = append(c.queues, q)
	return done(cl.Success), s.put(m.ID, q)
}

// closeQueue gives a queue back whose commands have ended. The client releases a queue only
// after its events.
func (s *session) closeQueue(q *queue) {
	q.setBarrier(0)
	cl.ReleaseCommandQueue(q.vendor)
	q.vendor = 0
	c := q.ctx
	for i, x := range c.queues {
		if x == q {
			c.queues = append(c.queues[:i], c.queues[i+1:]...)
			break
		}
	}
	s.bury(c)
	s.endLeft()
}

const hostPtrFlags = cl.MemUseHostPtr | cl.MemCopyHostPtr | cl.MemAllocHostPtr

// createVendorBuffer creates the vendor's object of a buffer. If the device computes in the
// arena, the buffer's memory is there.
func (s *session) createVendorBuffer(m *mem) cl.Status {
	// Always readable and writable, whatever flags the application gave: programs write to
	// read-only buffers, most runtimes accept that, and a runtime that does not would
	// change the result.
	flags := m.flags&cl.MemAllocHostPtr | cl.MemReadWrite
	var p unsafe.Pointer
	m.unified = s.unified
	if s.unified {
		if !m.hasArena {
			off, err := s.host.alloc(m.size)
			if err != nil {
				s.log.Warn("buffer", "err", err)
				return cl.MemObjectAllocationFailure
			}
			m.arena, m.hasArena = off, true
		}
		p = s.arena.Pointer(m.arena)
		flags = flags&^cl.MemAllocHostPtr | cl.MemUseHostPtr
	}
	v, st := cl.CreateBuffer(m.ctx.vendor, flags, m.size, p)
	if st != cl.Success {
		if s.unified {
			s.host.free(m.arena)
			m.hasArena = false
		}
		return st
	}
	m.vendor = v
	return cl.Success
}

func (s *session) createBuffer(r *wire.CreateBuffer) (outcome, error) {
	c := lookup[clContext](s, r.Context)
	if c == nil {
		return done(cl.InvalidContext), nil
	}
	if r.Size == 0 || r.Size > s.limits.MaxAlloc {
		return done(cl.InvalidBufferSize), nil
	}
	if !s.takeMemory(r.Size) {
		return done(cl.MemObjectAllocationFailure), nil
	}
	m := &mem{id: r.ID, ctx: c, kind: memBuffer, flags: r.Flags, size: r.Size}
	if st := s.createVendorBuffer(m); st != cl.Success {
		s.giveMemory(m.size)
		return done(st), nil
	}
	m.initDirty()
	if r.Mode == wire.DataInline || r.Mode == wire.DataStaged {
		if st, err := s.initialise(m, r.Mode, r.Content, r.StageOff, r.StageLen); err != nil || st != cl.Success {
			s.dropVendorMem(m)
			s.giveMemory(m.size)
			return done(st), err
		}
	}
	s.usage.LargestAlloc = max(s.usage.LargestAlloc, m.size)
	s.readyShadow(m)
	return answer(u64s(m.size, 0, 0, 0)), s.put(r.ID, m)
}

// initialise writes a new object's first content.
func (s *session) initialise(m *mem, mode uint32, inline []byte, off, n uint64) (cl.Status, error) {
	var p unsafe.Pointer
	switch {
	case mode == wire.DataInline && uint64(len(inline)) >= m.size:
		p = unsafe.Pointer(unsafe.SliceData(inline))
	case mode == wire.DataStaged && n >= m.size:
		q, ok := s.arenaRange(off, n)
		if !ok {
			return 0, fmt.Errorf("initial content at %#x, %d bytes: %w", off, n, errHostile)
		}
		p = q
	default:
		return 0, fmt.Errorf("initial content of %d bytes for an object of %d: %w", max(n, uint64(len(inline))), m.size, errHostile)
	}
	if m.unified {
		copy(s.arenaBytes(m.arena, m.size), unsafe.Slice((*byte)(p), m.size))
		return cl.Success, nil
	}
	q, st := s.xfer.queue(m.ctx)
	if st != cl.Success {
		return st, nil
	}
	return s.writeWhole(q, m, p), nil
}

// writeWhole writes all of an object from tightly packed memory and waits.
func (s *session) writeWhole(q cl.Queue, m *mem, p unsafe.Pointer) cl.Status {
	if m.kind == memImage {
		var o [3]uint64
		r := m.region()
		return cl.EnqueueWriteImage(q, m.vendor, true, &o, &r, 0, 0, p, nil, nil)
	}
	return cl.EnqueueWriteBuffer(q, m.vendor, true, 0, m.size, p, nil, nil)
}

func (s *session) createSubBuffer(r *wire.CreateSubBuffer) (outcome, error) {
	p := lookup[mem](s, r.Parent)
	if p == nil || p.kind != memBuffer {
		return done(cl.InvalidMemObject), nil
	}
	if r.Size == 0 || r.Origin > p.size || r.Size > p.size-r.Origin {
		return done(cl.InvalidValue), nil
	}
	m := &mem{id: r.ID, ctx: p.ctx, kind: memSub, flags: r.Flags, size: r.Size, parent: p, origin: r.Origin}
	if st := m.createVendorSub(); st != cl.Success {
		return done(st), nil
	}
	p.users++
	p.subs = append(p.subs, m)
	return answer(u64s(m.size, 0, 0, 0)), s.put(r.ID, m)
}

func (m *mem) createVendorSub() cl.Status {
	v, st := cl.CreateSubBuffer(m.parent.vendor, cl.MemReadWrite, m.origin, m.size)
	if st == cl.Success {
		m.vendor = v
	}
	return st
}

// region returns the size of the whole image in pixels, as transfer calls take it.
func (m *mem) region() [3]uint64 {
	d := m.desc
	switch d.Type {
	case cl.MemObjectImage1d, cl.MemObjectImage1dBuffer:
		return [3]uint64{d.Width, 1, 1}
	case cl.MemObjectImage1dArray:
		return [3]uint64{d.Width, d.ArraySize, 1}
	case cl.MemObjectImage2d:
		return [3]uint64{d.Width, d.Height, 1}
	case cl.MemObjectImage2dArray:
		return [3]uint64{d.Width, d.Height, d.ArraySize}
	}
	return [3]uint64{d.Width, d.Height, d.Depth}
}

func (m *mem) createVendorImage() cl.Status {
	desc := m.desc
	if m.parent != nil {
		desc.MemObject = m.parent.vendor
	}
	flags := m.flags &^ (hostPtrFlags | cl.MemHostReadOnly | cl.MemHostWriteOnly | cl.MemHostNoAccess)
	v, st := cl.CreateImage(m.ctx.vendor, flags, &m.format, &desc, nil)
	if st != cl.Success {
		return st
	}
	b, st := cl.GetImageInfo(v, cl.ImageElementSize)
	switch {
	case st != cl.Success || len(b) < 8:
		st = cl.OutOfResources
	case m.elem == 0:
		m.elem = cl.Uint64(b)
	case m.elem != cl.Uint64(b): // a graph may have any value, and with a wrong one, transfers would overrun their memory
		st = cl.InvalidImageFormatDescriptor
	}
	if st != cl.Success {
		cl.ReleaseMemObject(v)
		return st
	}
	m.vendor = v
	return cl.Success
}

const (
	maxExtent = 1 << 40 // of an image in each dimension, and of its pitches
	maxPixel  = 16      // bytes
)

func (s *session) createImage(r *wire.CreateImage) (outcome, error) {
	c := lookup[clContext](s, r.Context)
	if c == nil {
		return done(cl.InvalidContext), nil
	}
	m := &mem{
		id: r.ID, ctx: c, kind: memImage, flags: r.Flags,
		format: cl.ImageFormat{ChannelOrder: r.Order, ChannelType: r.Type},
		desc: cl.ImageDesc{
			Type: r.ImageType, Width: r.Width, Height: r.Height, Depth: r.Depth, ArraySize: r.ArraySize,
			RowPitch: r.RowPitch, SlicePitch: r.SlicePitch, NumMipLevels: r.MipLevels, NumSamples: r.Samples,
		},
	}
	if r.Buffer == 0 { // host data is always tightly packed
		m.desc.RowPitch, m.desc.SlicePitch = 0, 0
	} else {
		if m.parent = lookup[mem](s, r.Buffer); m.parent == nil {
			return done(cl.InvalidImageDescriptor), nil
		}
	}
	if max(r.Width, r.Height, r.Depth, r.ArraySize, r.RowPitch, r.SlicePitch) > maxExtent {
		return done(cl.InvalidImageSize), nil
	}
	if st := m.createVendorImage(); st != cl.Success {
		return done(st), nil
	}
	reg := m.region()
	m.size = reg[0] * reg[1] * reg[2] * m.elem
	if m.parent == nil {
		if !s.takeMemory(m.size) {
			cl.ReleaseMemObject(m.vendor)
			return done(cl.MemObjectAllocationFailure), nil
		}
		s.usage.LargestAlloc = max(s.usage.LargestAlloc, m.size)
		m.initDirty()
	} else {
		m.parent.users++
	}
	if r.Mode == wire.DataStaged {
		if st, err := s.initialise(m, r.Mode, nil, r.StageOff, r.StageLen); err != nil || st != cl.Success {
			m.dead = true
			s.dropMem(m)
			return done(st), err
		}
	}
	row, slice := m.pitches()
	return answer(u64s(m.size, row, slice, m.elem)), s.put(r.ID, m)
}

// pitches returns the pitches in bytes of the image when it is tightly packed; 0 for a
// dimension that it does not have.
func (m *mem) pitches() (row, slice uint64) {
	row = m.desc.Width * m.elem
	if m.desc.RowPitch != 0 {
		row = m.desc.RowPitch
	}
	switch m.desc.Type {
	case cl.MemObjectImage1dArray:
		slice = row
	case cl.MemObjectImage2dArray, cl.MemObjectImage3d:
		slice = row * m.desc.Height
	}
	return row, slice
}

func (s *session) imageFormats(r *wire.ImageFormats) (outcome, error) {
	c := lookup[clContext](s, r.Context)
	if c == nil {
		return done(cl.InvalidContext), nil
	}
	fs, st := cl.GetSupportedImageFormats(c.vendor, r.Flags, r.ImageType)
	if st != cl.Success {
		return done(st), nil
	}
	var b []byte
	for _, f := range fs {
		b = binary.LittleEndian.AppendUint32(b, f.ChannelOrder)
		b = binary.LittleEndian.AppendUint32(b, f.ChannelType)
	}
	return answer(b), nil
}

func (s *session) createSampler(r *wire.CreateSampler) (outcome, error) {
	c := lookup[clContext](s, r.Context)
	if c == nil {
		return done(cl.InvalidContext), nil
	}
	x := &sampler{id: r.ID, ctx: c, normalized: r.Normalized, addr: r.Addressing, filt: r.Filter}
	var st cl.Status
	if x.vendor, st = cl.CreateSampler(c.vendor, r.Normalized != 0, r.Addressing, r.Filter); st != cl.Success {
		return done(st), nil
	}
	return done(cl.Success), s.put(r.ID, x)
}

// root returns the object that owns the bytes, and the offset of m in it.
func (m *mem) root() (*mem, uint64) {
	off := uint64(0)
	for m.parent != nil {
		off += m.origin
		m = m.parent
	}
	return m, off
}

func (m *mem) initDirty() {
	m.dirty = make([]bool, (m.size+dirtyChunk-1)/dirtyChunk)
	for i := range m.dirty {
		m.dirty[i] = true
	}
}

// touch marks bytes of the object as written.
func (m *mem) touch(off, n uint64) {
	r, base := m.root()
	if n == 0 {
		return
	}
	if m.kind == memImage { // in a buffer, its rows may lie apart
		off, n = 0, min(m.shadowSize(), r.size-base)
	}
	first, last := (base+off)/dirtyChunk, (base+off+n-1)/dirtyChunk
	if r.kind == memImage {
		first, last = 0, uint64(len(r.dirty))-1
	}
	for i := first; i <= last && i < uint64(len(r.dirty)); i++ {
		r.dirty[i] = true
	}
}

// dropMem releases an object that neither the application nor a command needs any more.
func (s *session) dropMem(m *mem) {
	if !m.dead || m.users > 0 || m.gone { // gone: a command may name an object twice, or an object and a part of it
		return
	}
	m.gone = true
	if m.callback != 0 {
		s.notifyDestroyed(m.callback, m.ctx)
	}
	delete(s.ghosts, m.ghost)
	for _, mp := range m.maps { // never unmapped
		mp.arrived()
	}
	s.dropVendorMem(m)
	if p := m.parent; p != nil {
		p.users--
		for i, x := range p.subs {
			if x == m {
				p.subs = append(p.subs[:i], p.subs[i+1:]...)
				break
			}
		}
		s.dropMem(p)
	} else {
		s.giveMemory(m.size)
	}
}

// takeMemory counts memory of the session, and reports whether it and all sessions of its
// claim on this GPU stay within what they may have.
func (s *session) takeMemory(n uint64) bool {
	if limit := s.memoryLimit(); s.memory > limit || n > limit-s.memory {
		return false
	}
	take := s.cfg.Budget.Take
	if !s.active.Load() { // another executor may serve the session now
		take = s.cfg.Budget.Reach
	}
	if !take(s.memory + n) {
		return false
	}
	s.memory += n
	return true
}

func (s *session) giveMemory(n uint64) {
	s.memory -= n
	if s.active.Load() && !s.frozen { // a frozen session's next executor has the same line
		s.cfg.Budget.Take(s.memory)
	}
}

// dropVendorMem releases the vendor's object. The device may still use its host memory, so
// that is freed when the context is idle.
func (s *session) dropVendorMem(m *mem) {
	if m.vendor != 0 {
		cl.ReleaseMemObject(m.vendor)
		m.vendor = 0
	}
	if m.kind == memSub { // its bytes are its buffer's; an image in a buffer is mapped in memory of its own
		return
	}
	c := m.ctx
	for _, x := range m.extra {
		c.zombies = append(c.zombies, x.Off)
	}
	m.extra = nil
	if !m.hasArena {
		return
	}
	m.hasArena = false
	c.zombies = append(c.zombies, m.arena)
	c.zombieBytes += m.size
	if c.zombieBytes > maxZombies {
		for _, q := range c.queues {
			if cl.Finish(q.vendor) == cl.Success {
				q.idle = q.seq
			}
		}
	}
	s.bury(c)
}

const maxZombies = 256 << 20

// bury frees the memory of released buffers if the context is idle.
func (s *session) bury(c *clContext) {
	if len(c.zombies) == 0 || c.busy() {
		return
	}
	for _, off := range c.zombies {
		s.host.free(off)
	}
	c.zombies, c.zombieBytes = c.zombies[:0], 0
}
