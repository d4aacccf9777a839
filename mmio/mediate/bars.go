package mediate

import (
	"encoding/binary"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/regs"
)

// userdPage finds the channel whose USERD page BAR1 has at an offset.
func (v *VGPU) userdPage(off uint64) (channel int, in uint32, ok bool) {
	base := uint64(v.plain[regs.BAR1Base][0]&instPage) << 12
	if base == 0 || off < base || off >= base+nvc0.Channels*nvc0.PageSize {
		return 0, 0, false
	}
	return int((off - base) / nvc0.PageSize), uint32(off % nvc0.PageSize), true
}

func (v *VGPU) readUserd(i int, off uint32, size uint8) uint64 {
	if i >= len(v.channels) || !v.channels[i].valid { //check:userd-read
		v.refuse(mmio.BadChannel, "USERD page of channel", uint64(i))
		return uint64(regs.Refused) & mmio.Ones(size)
	}
	var b [8]byte
	v.g.hw.Load(nvc0.Mediator, v.channels[i].userd+HostPA(off), b[:size])
	return binary.LittleEndian.Uint64(b[:])
}

func (v *VGPU) writeUserd(i int, off uint32, a mmio.Access) {
	if i >= len(v.channels) || !v.channels[i].valid { //check:userd-write
		v.refuse(mmio.BadChannel, "USERD page of channel", uint64(i))
		return
	}
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], a.Data)
	for at := uint32(0); at < uint32(a.Size); at += 4 {
		n := min(uint32(a.Size)-at, 4)
		switch word := off + at; word &^ 3 {
		case nvc0.UserdGet, nvc0.UserdRef, nvc0.UserdIBGet, 0x60: // the hardware's
			continue
		case nvc0.UserdIBPut:
			if n != 4 {
				v.refuse(mmio.BadSize, "doorbell of channel", uint64(i))
				continue
			}
			v.g.hw.Store(nvc0.Mediator, v.channels[i].userd+HostPA(word), b[at:at+n])
			v.doorbell(i, binary.LittleEndian.Uint32(b[at:])&(1<<nvc0.MaxRingOrder-1))
		default:
			v.g.hw.Store(nvc0.Mediator, v.channels[i].userd+HostPA(word), b[at:at+n])
		}
	}
}

// place is where a BAR has an address: in the VM's part of the GPU's memory, or in the VM's
// own.
type place struct {
	system bool
	at     uint64
}

// readMapped reads through BAR1 (0) or BAR3 (1).
func (v *VGPU) readMapped(bar int, a mmio.Access) uint64 {
	var b [8]byte
	p, ok := v.locate(bar, a.Offset, false)
	switch {
	case !ok:
	case p.system:
		ok = v.request.Guest.ReadMemory(p.at, b[:a.Size]) == nil
	default:
		ok = v.load(GuestPA(p.at), b[:a.Size])
	}
	if !ok {
		v.refuse(mmio.OutOfPartition, "read through a BAR at", a.Offset)
		return uint64(regs.Refused) & mmio.Ones(a.Size)
	}
	return binary.LittleEndian.Uint64(b[:])
}

func (v *VGPU) writeMapped(bar int, a mmio.Access) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], a.Data)
	p, ok := v.locate(bar, a.Offset, true)
	switch {
	case !ok:
	case p.system:
		ok = v.request.Guest.WriteMemory(p.at, b[:a.Size]) == nil
	default:
		ok = v.store(GuestPA(p.at), b[:a.Size])
	}
	if !ok {
		v.refuse(mmio.OutOfPartition, "write through a BAR at", a.Offset)
	}
}

// locate finds where a BAR's tables have an offset. They are read at each access, in the
// VM's own memory: a walk looks at four words, and there is nothing to go stale.
func (v *VGPU) locate(bar int, off uint64, write bool) (place, bool) {
	var e nvc0.PTE
	if v.request.Mode == Para {
		s := v.spaces[GuestPA(v.bar[bar]&instPage)]
		if s == nil || v.bar[bar]>>31 == 0 {
			return place{}, false
		}
		e = v.shadowEntry(s, off)
	} else {
		e = v.guestEntry(bar, off)
	}
	if !e.Present() || write && e.ReadOnly() { //check:bar-read-only
		return place{}, false
	}
	at := e.Addr() + off%nvc0.PageSize
	switch e.Target() {
	case nvc0.TargetVRAM:
		return place{at: at}, true
	case nvc0.TargetSystem, nvc0.TargetSystemFree:
		return place{system: true, at: at}, true
	}
	return place{}, false
}

// guestEntry walks the VM's own tables. The entry is in the VM's terms, and of the small
// page at an offset.
func (v *VGPU) guestEntry(bar int, off uint64) nvc0.PTE {
	if v.bar[bar]>>31 == 0 {
		return 0
	}
	inst := GuestPA(v.bar[bar]&instPage) << 12
	pd, ok := v.load64(inst + nvc0.InstDirectory)
	if !ok {
		return 0
	}
	raw, ok := v.load64(GuestPA(pd&0xff_fffff000) + GuestPA(off/nvc0.TableSpan*8))
	d := nvc0.PDE(raw)
	if in := off % nvc0.TableSpan; !ok || in >= d.Span() {
		return 0
	}
	return walk(d, off%nvc0.TableSpan, func(at uint64) nvc0.PTE {
		e, _ := v.load64(GuestPA(at))
		return nvc0.PTE(e)
	})
}

// shadowEntry walks a shadow, and returns the entry in the VM's terms.
func (v *VGPU) shadowEntry(s *space, va uint64) nvc0.PTE {
	t, ok := s.tables[int(va/nvc0.TableSpan)]
	d := nvc0.MakePDE(t.large, t.small, t.size)
	if in := va % nvc0.TableSpan; !ok || in >= d.Span() {
		return 0
	}
	return v.guestTerms(walk(d, va%nvc0.TableSpan, func(at uint64) nvc0.PTE {
		var b [8]byte
		v.g.hw.Load(nvc0.Mediator, HostPA(at), b[:])
		return nvc0.PTE(binary.LittleEndian.Uint64(b[:]))
	}))
}

// guestTerms is the reverse of translate.
func (v *VGPU) guestTerms(e nvc0.PTE) nvc0.PTE {
	if !e.Present() {
		return 0
	}
	addr := e.Addr()
	if e.Target() == nvc0.TargetVRAM {
		addr -= uint64(v.base)
	} else {
		addr &^= v.window64
	}
	return e&^0xfffffff0 | nvc0.PTE(addr>>12)<<4
}

// walk looks an address up in the tables of a directory's entry, small pages first as
// the hardware does.
func walk(d nvc0.PDE, in uint64, load func(at uint64) nvc0.PTE) nvc0.PTE {
	if at, t := d.Small(); t == nvc0.TableVRAM {
		if e := load(at + in/nvc0.PageSize*8); e.Present() {
			return e
		}
	}
	if at, t := d.Large(); t == nvc0.TableVRAM {
		if e := load(at + in/nvc0.LargePage*8); e.Present() {
			off := in % nvc0.LargePage &^ (nvc0.PageSize - 1)
			return e&^0xfffffff0 | nvc0.PTE((e.Addr()+off)>>12)<<4&0xfffffff0
		}
	}
	return 0
}
