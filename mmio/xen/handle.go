package xen

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/gpuctl/gpuctl/mmio"
)

// maxCount is the most accesses of one request. Xen makes at most 4096 of an instruction.
const maxCount = 4096

// handle does what a request asks, and returns what a read reads. If the request cannot
// be, ok is false, and a read reads ones.
func (s *Server) handle(r request, d mmio.Device) (data uint64, ok bool) {
	switch r.word.kind() {
	case kindTimeOffset, kindInvalidate: // for every server, and of no interest here
		return r.data, true
	case kindConfig:
		return s.configuration(r)
	case kindCopy:
		return s.memory(r, d)
	}
	return ^uint64(0), false
}

// configuration does an access to the configuration space. Xen's address has the device
// in its upper half and the register in its lower one.
func (s *Server) configuration(r request) (uint64, bool) {
	if s.space == nil || r.addr>>32 != s.sbdf() || r.count != 1 || r.word.pointer() {
		return ^uint64(0), false
	}
	register := r.addr & 0xffffffff
	if r.word.read() {
		v, ok := s.space.Read(register, int(r.size))
		return uint64(v), ok
	}
	moved, ok := s.space.Write(register, int(r.size), uint32(r.data))
	s.pin(false) // its driver may have enabled or disabled the pin
	if moved {
		ok = s.move(s.space.Windows) == nil && ok
	}
	return 0, ok
}

// find returns where all bytes of an access are.
func (s *Server) find(addr uint64, size int) (bar int, offset uint64, ok bool) {
	if s.space != nil {
		return s.space.Find(addr, size)
	}
	for _, w := range s.config.Windows {
		if w.Contains(addr, size) {
			return w.BAR, addr - w.Start, true
		}
	}
	return 0, 0, false
}

// memory does accesses to BARs: r.count of them, one after the other in the direction of
// the VM's instruction. With a pointer, data is an address in the VM's memory.
func (s *Server) memory(r request, d mmio.Device) (uint64, bool) {
	size, count := uint64(r.size), uint64(r.count)
	if size != 1 && size != 2 && size != 4 && size != 8 || count == 0 || count > maxCount {
		return ^uint64(0), false
	}
	step := size
	low := func(first uint64) uint64 { return first }
	if r.word.backwards() {
		step = -size
		low = func(first uint64) uint64 { return first - size*(count-1) }
	}
	if !r.word.pointer() {
		return s.accesses(r, count, step, d, func(uint64) uint64 { return r.data }, func(uint64, uint64) {})
	}
	buffer := make([]byte, size*count)
	start := low(r.data)
	if start > r.data { // below the beginning of memory
		return ^uint64(0), false
	}
	at := func(i uint64) []byte { return buffer[r.data+i*step-start:][:size] }
	if !r.word.read() {
		if err := s.ReadMemory(start, buffer); err != nil {
			return ^uint64(0), false
		}
	}
	v, ok := s.accesses(r, count, step, d, func(i uint64) uint64 {
		var b [8]byte
		copy(b[:], at(i))
		return binary.LittleEndian.Uint64(b[:])
	}, func(i, v uint64) {
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], v)
		copy(at(i), b[:size])
	})
	if r.word.read() && s.WriteMemory(start, buffer) != nil {
		ok = false
	}
	return v, ok
}

// accesses does each access. get returns what a write writes, put gets what a read reads.
func (s *Server) accesses(r request, count, step uint64, d mmio.Device, get func(i uint64) uint64, put func(i, v uint64)) (last uint64, ok bool) {
	ok = true
	for i := range count {
		a := mmio.Access{VM: s.config.VM, Size: uint8(r.size), Write: !r.word.read()}
		bar, offset, found := s.find(r.addr+i*step, int(r.size))
		a.BAR, a.Offset = uint8(bar), offset
		switch {
		case !found:
			// A BAR may have been moved by another vCPU meanwhile.
			ok, last = false, mmio.Ones(a.Size)
		case a.Write:
			a.Data = get(i) & mmio.Ones(a.Size)
			d.Write(a)
			continue
		default:
			last = d.Read(a) & mmio.Ones(a.Size)
		}
		if !a.Write {
			put(i, last)
		}
	}
	return last, ok
}

var _ mmio.Guest = (*Server)(nil)

// ErrNoMemory means that not all of a range is memory of the VM.
var ErrNoMemory = errors.New("not memory of the VM")

func errMemory(gpa, n uint64) error {
	return fmt.Errorf("%d bytes at %#x: %w", n, gpa, ErrNoMemory)
}

// pagesAtOnce is how many pages of a VM are mapped at once.
const pagesAtOnce = 256

// each calls do for mapped parts of a range of the VM's memory.
func (s *Server) each(gpa uint64, p []byte, writable bool, do func(vm, p []byte)) error {
	for len(p) > 0 {
		in := gpa % pageSize
		n := min(uint64(len(p)), pagesAtOnce*pageSize-in)
		if gpa > 1<<48 {
			return errMemory(gpa, n)
		}
		frames := make([]uint64, 0, pagesAtOnce)
		for f := gpa / pageSize; f <= (gpa+n-1)/pageSize; f++ {
			frames = append(frames, f)
		}
		m, err := s.hv.MapForeign(s.config.Domain, frames, writable)
		if err != nil {
			return errMemory(gpa, n)
		}
		do(m.Bytes()[in:in+n], p[:n])
		if err := m.Close(); err != nil {
			return err
		}
		if writable {
			if err := s.modified(frames); err != nil {
				return fmt.Errorf("say that %d bytes at %#x have changed: %w", n, gpa, err)
			}
		}
		p, gpa = p[n:], gpa+n
	}
	return nil
}

// modified tells Xen of consecutive frames of the VM that were written. A live migration does
// not notice what others write into a VM's memory, and would leave the old contents behind.
func (s *Server) modified(frames []uint64) error {
	var extent [16]byte
	binary.LittleEndian.PutUint64(extent[:], frames[0])
	binary.LittleEndian.PutUint32(extent[8:], uint32(len(frames)))
	s.hypercalls.Add(1)
	return s.hv.DeviceOp(s.config.Domain, op(opModified, func(b []byte) { binary.LittleEndian.PutUint32(b, 1) }), extent[:])
}

// ReadMemory implements mmio.Guest.
func (s *Server) ReadMemory(gpa uint64, p []byte) error {
	return s.each(gpa, p, false, func(vm, p []byte) { copy(p, vm) })
}

// WriteMemory implements mmio.Guest.
func (s *Server) WriteMemory(gpa uint64, p []byte) error {
	return s.each(gpa, p, true, func(vm, p []byte) { copy(vm, p) })
}

// MemorySize implements mmio.Guest.
func (s *Server) MemorySize() uint64 { return s.config.Memory }

// Interrupt implements mmio.Guest. A VM that has not enabled interrupts gets none.
func (s *Server) Interrupt(up bool) {
	if s.space == nil {
		return
	}
	if addr, data, ok := s.space.MSI(); ok && up {
		_ = s.do(op(opInjectMSI, func(b []byte) {
			binary.LittleEndian.PutUint32(b, data)
			binary.LittleEndian.PutUint64(b[8:], addr)
		})) // an address that is no interrupt's is the VM's own loss
	}
	s.line.Lock()
	s.wanted = up
	s.line.Unlock()
	s.pin(false)
}

// pin has Xen know the level of the function's interrupt pin, if it has changed or always. It is
// down while the VM has disabled it (PCI Local Bus Specification 3.0, 6.2.2). A pin that stays up
// with nobody who handles it keeps the VM's processor busy for good.
func (s *Server) pin(always bool) {
	s.line.Lock()
	defer s.line.Unlock()
	up := s.wanted && s.space.INTx()
	if up == s.raised && !always {
		return
	}
	s.raised = up
	_ = s.do(op(opINTxLevel, func(b []byte) {
		b[3] = s.config.Slot
		if up {
			b[5] = 1
		}
	}))
}
