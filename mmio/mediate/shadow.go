package mediate

import (
	"bytes"
	"encoding/binary"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

const (
	chunk       = nvc0.PageSize / 8 // entries that are read at once
	windowBits  = 34                // of a VM's part of the GPU's bus addresses
	maxWindows  = 1 << (nvc0.AddressBits - windowBits)
	keptBits    = 1 << 32 // of a PTE's further bits: volatile
	compression = 0x1ffff << 44
)

// space is an address space of a VM's: a shadow page directory and its tables.
type space struct {
	at     GuestPA // the VM's page directory, or the space's number (Para)
	shadow HostPA
	tables map[int]tables // by index in the directory
	users  int            // channels
	dirty  bool           // the VM's tables may have changed since they were read
	reads  bool           // a scan is under way
	scan   position
}

// tables is what a shadow directory's entry refers to.
type tables struct {
	large, small HostPA // 0: none
	size         uint8  // they map 128 MiB >> size
}

func (t tables) largeFrames() int { return frames(nvc0.LargeEntries >> t.size * 8) }
func (t tables) smallFrames() int { return frames(nvc0.SmallEntries >> t.size * 8) }

func frames(n int) int { return (n + nvc0.PageSize - 1) / nvc0.PageSize }

// position is how far a scan is: in the directory, and if from is not 0 in a table.
type position struct {
	pde   int
	large bool    // the table of large pages, which comes first
	from  GuestPA // the VM's table, 0: none
	entry int
	next  GuestPA // the VM's table of small pages, if it comes after the large one
}

func (v *VGPU) newSpace(at GuestPA) (*space, bool) {
	pd, ok := v.frames(directoryFrames, nvc0.Table)
	if !ok {
		return nil, false
	}
	s := &space{at: at, shadow: pd, tables: map[int]tables{}}
	v.spaces[at] = s
	return s, true
}

// drop gives a space and all of its frames back. No channel uses it any more.
func (v *VGPU) drop(s *space) {
	for i := range s.tables {
		v.setTables(s, i, tables{})
	}
	v.flush(s) //check:flush-drop
	v.release(s.shadow, directoryFrames, nvc0.Table)
	delete(v.spaces, s.at)
}

// flush makes the hardware forget what it knows of a space's tables.
func (v *VGPU) flush(s *space) {
	v.g.hw.WriteRegister(nvc0.RegTLBSpace, uint32(s.shadow>>8))
	v.g.hw.WriteRegister(nvc0.RegTLBTrigger, nvc0.TLBFlush)
}

// setTables makes an entry of the shadow directory refer to tables of its own, and
// gives those back that it referred to before. Only what differs is changed.
func (v *VGPU) setTables(s *space, i int, want tables) bool {
	have := s.tables[i]
	ok := true
	keep := have
	if have.large != 0 && (want.large == 0 || want.size != have.size) {
		keep.large = 0
	}
	if have.small != 0 && (want.small == 0 || want.size != have.size) {
		keep.small = 0
	}
	if keep != have { // the hardware lets go of tables before they are anybody else's
		v.entry(s, i, keep)
	}
	if have.large != keep.large {
		v.release(have.large, have.largeFrames(), nvc0.Table)
	}
	if have.small != keep.small {
		v.release(have.small, have.smallFrames(), nvc0.Table)
	}
	keep.size = want.size
	if want.large != 0 && keep.large == 0 {
		keep.large, ok = v.frames(keep.largeFrames(), nvc0.Table)
	}
	if want.small != 0 && keep.small == 0 && ok {
		keep.small, ok = v.frames(keep.smallFrames(), nvc0.Table)
	}
	if !ok {
		v.refuse(mmio.OverQuota, "page table of directory entry", uint64(i))
	}
	if keep != have {
		v.entry(s, i, keep)
	}
	return ok
}

// entry writes an entry of the shadow directory.
func (v *VGPU) entry(s *space, i int, t tables) {
	if t.large == 0 && t.small == 0 {
		delete(s.tables, i)
		t = tables{}
	} else {
		s.tables[i] = t
	}
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(nvc0.MakePDE(t.large, t.small, t.size)))
	v.g.hw.Store(nvc0.Mediator, s.shadow+HostPA(8*i), b[:])
}

// translate makes an entry for the hardware of one of the VM's, 0 if there is none or if
// it is refused.
func (v *VGPU) translate(e nvc0.PTE, large bool) nvc0.PTE {
	if !e.Present() {
		return 0
	}
	size := uint64(nvc0.PageSize)
	if large {
		size = nvc0.LargePage
	}
	if e.Addr()%size != 0 { //check:large-aligned
		v.refuse(mmio.BadEntry, "page that is not aligned", uint64(e))
		return 0
	}
	if k := e.Kind(); k != 0 && k != 0xfe { //check:kind
		v.refuse(mmio.BadEntry, "page of a kind that is not shared", uint64(e))
		return 0
	}
	if uint64(e)&compression != 0 { //check:compression
		v.refuse(mmio.BadEntry, "page with a compression tag", uint64(e))
		return 0
	}
	var addr uint64
	switch e.Target() {
	case nvc0.TargetVRAM:
		pa, ok := v.host(GuestPA(e.Addr()), size)
		if !ok { //check:entry-range
			v.refuse(mmio.OutOfPartition, "page", uint64(e))
			return 0
		}
		addr = uint64(pa)
	case nvc0.TargetSystem, nvc0.TargetSystemFree:
		if all := min(v.request.Guest.MemorySize(), 1<<windowBits); e.Addr() >= all || size > all-e.Addr() { //check:system-range
			v.refuse(mmio.OutOfPartition, "page of system memory", uint64(e))
			return 0
		}
		addr = v.window64 | e.Addr()
	default: //check:entry-target
		v.refuse(mmio.BadTarget, "page", uint64(e))
		return 0
	}
	return nvc0.MakePTE(addr, e.Target(), e.ReadOnly()) | nvc0.PTE(uint64(e)&keptBits) | nvc0.PTE(e.Kind())<<36
}

// scan begins to bring a space up to date with the VM's tables, from the start if it was
// under way, and does as much of it as the exit still may.
func (v *VGPU) scan(s *space) {
	v.stats.Scan()
	s.dirty, s.reads, s.scan = false, true, position{}
	v.step(s)
	if s.reads {
		v.stats.Defer()
		v.g.rouse()
	}
}

// unread reports whether tables are still to be read for what the VM has asked.
func (v *VGPU) unread() bool {
	for _, s := range v.spaces {
		if s.reads {
			return true
		}
	}
	return false
}

// work goes on with scans, as much as the exit still may.
func (v *VGPU) work() {
	for _, s := range v.spaces {
		if s.reads {
			if v.step(s); v.left <= 0 {
				return
			}
		}
	}
}

// step does a part of a scan: at most about so many entries as the exit may still look
// at, whatever it has done before.
func (v *VGPU) step(s *space) {
	from := v.left
	for s.reads {
		if v.left <= 0 { //check:exit-budget
			break
		}
		if s.scan.from != 0 {
			v.left -= v.stepTable(s)
		} else {
			v.left -= v.stepDirectory(s)
		}
	}
	v.stats.Entries(from - v.left)
	if !s.reads {
		v.flush(s) //check:flush-scan
		v.promote()
	}
}

// stepDirectory looks for the next entry of the VM's directory that has a table, in the same
// page. A page of entries without any costs as much as one.
func (v *VGPU) stepDirectory(s *space) (cost int) {
	p := &s.scan
	if p.pde >= nvc0.DirectoryLen {
		s.reads = false
		return 1
	}
	var b [nvc0.PageSize]byte
	n := chunk - p.pde%chunk
	v.load(s.at+GuestPA(8*p.pde), b[:8*n])
	if bytes.Equal(b[:8*n], v.g.zeros[:8*n]) && !s.within(p.pde, n) {
		p.pde += n
		return 1
	}
	for i := range n {
		e := nvc0.PDE(binary.LittleEndian.Uint64(b[8*i:]))
		if _, had := s.tables[p.pde]; e == 0 && !had {
			p.pde++
			continue
		}
		if v.directoryEntry(s, e); p.from != 0 {
			return i + 1
		}
	}
	return n
}

// within reports whether any of n entries from i on is something.
func (s *space) within(i, n int) bool {
	for j := range s.tables {
		if j >= i && j < i+n {
			return true
		}
	}
	return false
}

// directoryEntry follows an entry of the VM's directory.
func (v *VGPU) directoryEntry(s *space, e nvc0.PDE) {
	p := &s.scan
	size := uint8(e >> 2 & 3)
	lat, lt := e.Large()
	sat, st := e.Small()
	large := v.tableAt(lat, lt, nvc0.LargeEntries>>size)
	small := v.tableAt(sat, st, nvc0.SmallEntries>>size)
	want := tables{size: size}
	if large != 0 {
		want.large = 1 // some
	}
	if small != 0 {
		want.small = 1
	}
	v.setTables(s, p.pde, want)
	have := s.tables[p.pde]
	if have.large == 0 {
		large = 0
	}
	if have.small == 0 {
		small = 0
	}
	switch {
	case large != 0:
		p.from, p.large, p.entry, p.next = large, true, 0, small
	case small != 0:
		p.from, p.large, p.entry, p.next = small, false, 0, 0
	default:
		p.pde++
	}
}

// tableAt checks where a directory's entry has a table. 0 means that there is none:
// a table at 0 is refused, too, as the hardware's directory has no such.
func (v *VGPU) tableAt(at uint64, target uint8, entries int) GuestPA {
	if target == nvc0.TableNone {
		return 0
	}
	if target != nvc0.TableVRAM { //check:table-target
		v.refuse(mmio.BadTable, "page table of a target", uint64(target))
		return 0
	}
	if _, ok := v.host(GuestPA(at), uint64(entries)*8); !ok || at == 0 { //check:table-range
		v.refuse(mmio.BadTable, "page table", at)
		return 0
	}
	return GuestPA(at)
}

// stepTable translates a page of a table.
func (v *VGPU) stepTable(s *space) (cost int) {
	p := &s.scan
	t := s.tables[p.pde]
	to, n := t.small, nvc0.SmallEntries>>t.size
	if p.large {
		to, n = t.large, nvc0.LargeEntries>>t.size
	}
	if to == 0 { // the space's tables changed meanwhile
		p.from, p.next = 0, 0
		p.pde++
		return 1
	}
	some := min(chunk, n-p.entry)
	var b, have [nvc0.PageSize]byte
	v.load(p.from+GuestPA(8*p.entry), b[:8*some])
	v.g.hw.Load(nvc0.Mediator, to+HostPA(8*p.entry), have[:8*some])
	if !bytes.Equal(b[:8*some], v.g.zeros[:8*some]) {
		for i := range some {
			if e := nvc0.PTE(binary.LittleEndian.Uint64(b[8*i:])); e != 0 {
				binary.LittleEndian.PutUint64(b[8*i:], uint64(v.translate(e, p.large)))
			}
		}
	}
	if !bytes.Equal(b[:8*some], have[:8*some]) {
		v.g.hw.Store(nvc0.Mediator, to+HostPA(8*p.entry), b[:8*some])
	}
	if p.entry += some; p.entry >= n {
		p.from, p.entry = 0, 0
		if p.next != 0 {
			p.from, p.next, p.large = p.next, 0, false
		} else {
			p.pde++
		}
	}
	return some
}

// flushed is a write of TLB_TRIGGER: the VM says that it has changed tables.
func (v *VGPU) flushed(w uint32) {
	if w>>31 == 0 {
		return
	}
	if v.request.Mode == Para {
		return // its tables are the mediator's, and flushed with each change
	}
	at := GuestPA(v.tlbSpace>>4) << 12
	for _, s := range v.spaces {
		if s.at != at && w&nvc0.TLBAllSpaces == 0 {
			continue
		}
		s.dirty = true
		if v.request.Mode == Eager || s.reads || v.inFlight(s) {
			v.scan(s)
		}
	}
}

// inFlight reports whether a command in a space runs or waits.
func (v *VGPU) inFlight(s *space) bool {
	if r := v.g.running; r != nil && r.v == v && v.channels[r.channel].space == s {
		return true
	}
	for _, q := range [][]command{v.ready, v.waiting} {
		for _, c := range q {
			if v.channels[c.channel].space == s {
				return true
			}
		}
	}
	return false
}
