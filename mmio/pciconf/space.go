package pciconf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"

	"github.com/gpuctl/gpuctl/mmio"
)

// Size is the size of a configuration space in bytes. Extended space does not exist.
const Size = 256

const (
	minBAR     = 16
	maxBAR     = 1 << 30
	maxWideBAR = 1 << 40

	addressBits = 48 // of guest physical addresses

	regCommand    = 0x04
	regStatus     = 0x06
	regBAR        = 0x10
	regCapability = 0x34
	regLine       = 0x3c
	regPin        = 0x3d
	regMSI        = 0x40

	commandMemory = 1 << 1
	commandMaster = 1 << 2
	commandNoINTx = 1 << 10
	statusCaps    = 1 << 4
	prefetchable  = 1 << 3
	wide          = 1 << 2
	capabilityMSI = 5
	msiEnable     = 1 << 0
	msi64         = 1 << 7
	pinA          = 1
)

// ErrFunction means that a function cannot exist as described, or is another one.
var ErrFunction = errors.New("no such PCI function is possible")

func check(f mmio.Function) error {
	if f.Vendor == 0xffff || f.Class >= 1<<24 {
		return fmt.Errorf("%w: vendor %#x, class %#x", ErrFunction, f.Vendor, f.Class)
	}
	for i, b := range f.BARs {
		most := uint64(maxBAR)
		if b.Wide {
			most = maxWideBAR
			if i+1 == len(f.BARs) || f.BARs[i+1] != (mmio.Window{}) {
				return fmt.Errorf("%w: the BAR after the wide BAR %d must not exist", ErrFunction, i)
			}
		}
		if b.Size != 0 && (b.Size < minBAR || b.Size > most || bits.OnesCount64(b.Size) != 1) || b.Size == 0 && b.Wide {
			return fmt.Errorf("%w: BAR %d has %d bytes, not a power of two from %d to %d", ErrFunction, i, b.Size, minBAR, most)
		}
	}
	return nil
}

// Window is a BAR where the VM sees it.
type Window struct {
	BAR   int
	Start uint64 // guest physical address
	Size  uint64
}

// Contains reports whether all bytes of an access are in the window.
func (w Window) Contains(addr uint64, size int) bool {
	return size > 0 && addr >= w.Start && addr-w.Start < w.Size && uint64(size) <= w.Size-(addr-w.Start)
}

// Space is the configuration space of one function. It is safe for concurrent use.
type Space struct {
	f    mmio.Function
	mask [Size]byte // bits that a VM can change

	mu   sync.Mutex
	data [Size]byte
	now  []Window // where data says that the BARs are; replaced, never changed
}

// New returns the space of a function after a reset. Errors wrap ErrFunction.
func New(f mmio.Function) (*Space, error) {
	if err := check(f); err != nil {
		return nil, err
	}
	s := &Space{f: f}
	le := binary.LittleEndian
	le.PutUint16(s.mask[regCommand:], commandMemory|commandMaster|commandNoINTx)
	s.mask[regLine] = 0xff
	for i, b := range f.BARs {
		switch at := regBAR + 4*i; {
		case b.Wide:
			le.PutUint64(s.mask[at:], ^(b.Size - 1))
		case b.Size != 0:
			le.PutUint32(s.mask[at:], ^uint32(b.Size-1))
		}
	}
	if !f.MSI {
		s.Reset()
		return s, nil
	}
	le.PutUint16(s.mask[regMSI+2:], msiEnable)
	le.PutUint32(s.mask[regMSI+4:], ^uint32(3))
	le.PutUint32(s.mask[regMSI+8:], ^uint32(0))
	le.PutUint16(s.mask[regMSI+12:], 0xffff)
	s.Reset()
	return s, nil
}

// Function returns what New got.
func (s *Space) Function() mmio.Function { return s.f }

// Reset brings the space to its state after a reset.
func (s *Space) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.data[:])
	le := binary.LittleEndian
	le.PutUint16(s.data[0:], s.f.Vendor)
	le.PutUint16(s.data[2:], s.f.Device)
	le.PutUint32(s.data[8:], s.f.Class<<8|uint32(s.f.Revision))
	for i, b := range s.f.BARs {
		if b.Prefetchable {
			s.data[regBAR+4*i] |= prefetchable
		}
		if b.Wide {
			s.data[regBAR+4*i] |= wide
		}
	}
	le.PutUint16(s.data[0x2c:], s.f.Subvendor)
	le.PutUint16(s.data[0x2e:], s.f.Subsystem)
	s.data[regPin] = pinA
	if s.f.MSI {
		le.PutUint16(s.data[regStatus:], statusCaps)
		s.data[regCapability] = regMSI
		s.data[regMSI] = capabilityMSI
		le.PutUint16(s.data[regMSI+2:], msi64)
	}
	s.now = s.decode()
}

// valid reports whether PCI has such an access: 1, 2 or 4 bytes, aligned.
func valid(offset uint64, size int) bool {
	return (size == 1 || size == 2 || size == 4) && offset < Size && offset%uint64(size) == 0
}

// Read returns a register. An access that PCI does not have reads as ones; ok is false.
func (s *Space) Read(offset uint64, size int) (value uint32, ok bool) {
	if !valid(offset, size) {
		return ^uint32(0), false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var b [4]byte
	copy(b[:], s.data[offset:offset+uint64(size)])
	return binary.LittleEndian.Uint32(b[:]), true
}

// Write changes the bits of a register that a VM can change. An access that PCI does not
// have changes nothing; ok is false. moved reports whether Windows has changed.
func (s *Space) Write(offset uint64, size int, value uint32) (moved, ok bool) {
	if !valid(offset, size) {
		return false, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range uint64(size) {
		m := s.mask[offset+i]
		s.data[offset+i] = s.data[offset+i]&^m | byte(value>>(8*i))&m
	}
	now := s.decode()
	moved = !slices.Equal(s.now, now)
	s.now = now
	return moved, true
}

// Windows returns the BARs that the VM has enabled and given an address. An address of 0
// is none, as is the highest. The caller must not change the result.
func (s *Space) Windows() []Window {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

func (s *Space) decode() []Window {
	le := binary.LittleEndian
	if le.Uint16(s.data[regCommand:])&commandMemory == 0 {
		return nil
	}
	var out []Window
	for i, b := range s.f.BARs {
		if b.Size == 0 {
			continue
		}
		start, end := uint64(le.Uint32(s.data[regBAR+4*i:])&^0xf), uint64(1<<32)
		if b.Wide {
			start |= uint64(le.Uint32(s.data[regBAR+4*i+4:])) << 32
			end = 1 << addressBits
		}
		// The highest address is what a driver reads while it asks for the size.
		if start == 0 || start > end-2*b.Size || start == 1<<32-b.Size {
			continue
		}
		out = append(out, Window{i, start, b.Size})
	}
	return out
}

// Find returns the BAR that all bytes of an access are in, and the offset in it.
func (s *Space) Find(addr uint64, size int) (bar int, offset uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.now {
		if w.Contains(addr, size) {
			return w.BAR, addr - w.Start, true
		}
	}
	return 0, 0, false
}

// MSI returns where the VM wants the interrupt; ok is false if it has not enabled it.
func (s *Space) MSI() (addr uint64, data uint32, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	le := binary.LittleEndian
	if le.Uint16(s.data[regMSI+2:])&msiEnable == 0 || le.Uint16(s.data[regCommand:])&commandMaster == 0 {
		return 0, 0, false
	}
	return le.Uint64(s.data[regMSI+4:]), uint32(le.Uint16(s.data[regMSI+12:])), true
}

// INTx reports whether the function may use its interrupt pin.
func (s *Space) INTx() bool {
	_, _, msi := s.MSI()
	s.mu.Lock()
	defer s.mu.Unlock()
	return !msi && binary.LittleEndian.Uint16(s.data[regCommand:])&commandNoINTx == 0
}

// Save returns the space for Restore.
func (s *Space) Save() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]byte(nil), s.data[:]...)
}

// Restore sets the space from Save of the same Function. It takes only
// the bits that a VM can change. If the rest differs, the error wraps ErrFunction, and
// nothing changes.
func (s *Space) Restore(saved []byte) error {
	if len(saved) != Size {
		return fmt.Errorf("%w: a saved configuration space has %d bytes, not %d", ErrFunction, len(saved), Size)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, b := range saved {
		if (b^s.data[i])&^s.mask[i] != 0 {
			return fmt.Errorf("%w: byte %#x of the saved configuration space is another function's", ErrFunction, i)
		}
	}
	copy(s.data[:], saved)
	s.now = s.decode()
	return nil
}

// SameWindows reports whether two saved spaces of a function have its BARs at the same
// addresses. One that is not this function's has none.
func SameWindows(f mmio.Function, a, b []byte) bool {
	var windows [2][]Window
	for i, saved := range [][]byte{a, b} {
		s, err := New(f)
		if err != nil || s.Restore(saved) != nil {
			return false
		}
		windows[i] = s.Windows()
	}
	return slices.Equal(windows[0], windows[1])
}
