package mediate

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// villain makes accesses that a hostile VM makes: registers of the table and beside it,
// tables, instance blocks, lists and rings with random and with almost right
// contents, calls, doorbells.
type villain struct {
	vm  mmio.VM
	rnd *rand.Rand
}

// interesting is a number that is wrong in an interesting way, or right.
func (h *villain) interesting() uint64 {
	pick := func(n ...uint64) uint64 { return n[h.rnd.IntN(len(n))] }
	switch h.rnd.IntN(8) {
	case 0:
		return h.rnd.Uint64()
	case 1:
		return uint64(nvc0.MakePTE(pick(0, 0x1000, 0x200000, 4*mib-4096, 4*mib-nvc0.LargePage, 4*mib, 8*mib, 1<<40-4096), uint8(h.rnd.IntN(4)), h.rnd.IntN(2) == 0)) |
			pick(0, 0, 1<<32, 1<<36, 0xfe<<36, 1<<44)
	case 2:
		return uint64(nvc0.MakePDE(HostPA(pick(0, 0x60000, 0x30000, 0x1000, 4*mib)), HostPA(pick(0, 0x60000, 0x20000, 4*mib-4096)), uint8(h.rnd.IntN(4)))) | pick(0, 0, 2, 3, 2<<32)
	case 3:
		return pick(1<<31|1, 1<<31|2, 3<<30|2, 1<<31|0x3ff, 1<<31|0x400, 1<<31|2<<28|2, 0)
	case 4:
		return pick(0, 1, 2, 3, 4, 5, 64, 127, 128, 0xfff, 0xffffffff)
	case 5:
		return pick(0x30001, 0x10001, 0x30000, 0x30002, 0x1000, 0x300, 0x100)
	case 6:
		return nvc0.IBEntry(0x20000000+pick(0x50000, 0x40000, 0x41000, 0x100000), uint32(h.rnd.IntN(64)))
	default:
		return pick(uint64(nvc0.Incr(uint32(h.rnd.IntN(3)), pick32(h.rnd, 0, 0x10, 0x1c, 0x238, 0x300, 0x30c, 0x31c, 0x368, 0x1608, 0x1b0c), uint32(h.rnd.IntN(5)))),
			nvc0.ClassCompute, nvc0.ClassM2MF, 0x20041000, 0x20043000)
	}
}

func pick32(r *rand.Rand, n ...uint32) uint32 { return n[r.IntN(len(n))] }

// act does one thing.
func (h *villain) act(r *rig) {
	vm := h.vm
	switch h.rnd.IntN(12) {
	case 0, 1: // any register of the table
		rows := r.gpu.table.Rows()
		row := rows[h.rnd.IntN(len(rows)-1)]
		at := row.Offset + row.Stride*uint32(h.rnd.IntN(int(min(row.Count, 6))))
		if h.rnd.IntN(3) == 0 {
			r.get(vm, at)
		} else {
			r.set(vm, at, uint32(h.interesting()))
		}
	case 2, 3, 4: // a structure, through a window
		base := []uint64{0x1000, 0x2000, 0x3000, 0x10000, 0x20000, 0x30000, 0x40000, 0x42000, 0x43000, 0x50000, 0x60000}[h.rnd.IntN(11)]
		off := 8 * uint64(h.rnd.IntN(16))
		if base == 0x1000 || base == 0x2000 {
			off = []uint64{8, 0x48, 0x4c & ^uint64(7), 0x200, 0x208}[h.rnd.IntN(5)]
		}
		if base == 0x60000 {
			off = 8 * (0x40 + uint64(h.rnd.IntN(0x20)))
		}
		if h.rnd.IntN(2) == 0 {
			r.poke(vm, base+off, h.interesting())
		} else {
			r.store(vm, 3, base+off, 8, h.interesting())
		}
	case 5: // flush
		r.set(vm, nvc0.RegTLBSpace, pick32(h.rnd, 0x300, 0x100, uint32(h.rnd.Uint64())))
		r.set(vm, nvc0.RegTLBTrigger, 1<<31|uint32(h.rnd.IntN(8)))
	case 6: // a doorbell
		r.store(vm, 1, 0x06000000+4096*uint64(h.rnd.IntN(5))+nvc0.UserdIBPut, 4, uint64(h.rnd.IntN(600)))
	case 7: // anything in any BAR
		a := mmio.Access{VM: vm, BAR: uint8(h.rnd.IntN(8)), Size: []uint8{1, 2, 4, 8, 3, 0}[h.rnd.IntN(6)], Offset: h.rnd.Uint64() >> h.rnd.IntN(64), Data: h.interesting()}
		if h.rnd.IntN(2) == 0 { // past the router
			r.gpu.Write(a)
			r.gpu.Read(a)
		} else {
			r.router.Write(a)
			r.router.Read(a)
		}
	case 8: // a channel
		i := uint32(h.rnd.IntN(6))
		r.set(vm, 0x3000+8*i, uint32(h.interesting()))
		r.poke(vm, 0x3000+8*uint64(h.rnd.IntN(4)), uint64(i))
		r.set(vm, 0x2270, 3)
		r.set(vm, 0x2274, uint32(h.rnd.IntN(5)))
	case 9:
		h.calls(r)
	default: // time
		if h.rnd.IntN(2) == 0 {
			r.clock += 1000 * 1000 * 50
		}
		r.tick()
	}
}

// calls fills a slot.
func (h *villain) calls(r *rig) {
	g := r.guests[h.vm]
	r.store(h.vm, 5, ParaSlotsLow, 4, 0x10000)
	r.store(h.vm, 5, ParaMap, 4, 1)
	var page [256]byte
	n := 0
	put := func(w uint32) {
		binary.LittleEndian.PutUint32(page[8+4*n:], w)
		n++
	}
	for range h.rnd.IntN(5) {
		args := h.rnd.IntN(9)
		put(ParaHeader(uint32(h.rnd.IntN(9)), uint32(args)))
		for i := range args {
			if h.rnd.IntN(2) == 0 {
				put(uint32(h.rnd.IntN(4)))
			} else {
				put(uint32(h.interesting() >> (32 * (i & 1))))
			}
		}
	}
	binary.LittleEndian.PutUint32(page[4:], uint32(n))
	if h.rnd.IntN(8) == 0 {
		binary.LittleEndian.PutUint32(page[4:], h.rnd.Uint32())
	}
	_ = g.WriteMemory(0x10000, page[:])
	r.store(h.vm, 5, ParaCall, 4, 0)
}

// sound checks what the hardware goes by: P3 and P4.
func (r *rig) sound() {
	r.t.Helper()
	books := 0
	for vm, v := range r.gpu.vgpus {
		books += v.tables
		if v.tables > v.request.Tables {
			r.t.Errorf("VM %d has %d frames, may have %d", vm, v.tables, v.request.Tables)
		}
		if n := len(v.ready) + len(v.waiting); n > v.request.Pending+len(v.channels) {
			r.t.Errorf("VM %d has %d commands queued", vm, n)
		}
		for i := range v.channels {
			r.soundChannel(vm, v, i)
		}
	}
	if n := int(r.gpu.config.Reserve/nvc0.PageSize) - 3 - r.gpu.shadow.left(); n != books { // the first frame and the playlists
		r.t.Errorf("%d frames are taken, and VMs have %d", n, books)
	}
	for p := range uint32(nvc0.Channels) {
		if r.hw.ReadRegister(nvc0.RegChannel+8*p+4)&1 != 0 && !r.listed(int(p)) {
			r.t.Errorf("channel %d is listed, and nobody asked for it", p)
		}
	}
}

// listed reports whether a VM has listed the channel. The hardware keeps one listed whose
// instance block was taken away, and has nothing to run there.
func (r *rig) listed(p int) bool {
	for _, v := range r.gpu.vgpus {
		if i := p - v.first; i >= 0 && i < len(v.channels) {
			c := &v.channels[i]
			return c.listed && (c.valid || r.hw.ReadRegister(nvc0.RegChannel+8*uint32(p))&nvc0.ChannelValid == 0)
		}
	}
	return false
}

func (r *rig) mine(at HostPA, size uint64) bool {
	return uint64(at)+size <= r.gpu.config.Reserve && at != 0
}

func (r *rig) soundChannel(vm mmio.VM, v *VGPU, i int) {
	r.t.Helper()
	c := &v.channels[i]
	w := r.hw.ReadRegister(nvc0.RegChannel + 8*uint32(v.first+i))
	if !c.valid {
		if w != 0 {
			r.t.Errorf("VM %d: unbound channel %d has %#x", vm, i, w)
		}
		return
	}
	inst := HostPA(w&0x0fffffff) << 12
	if w>>28&3 != 0 || !r.mine(inst, nvc0.PageSize) {
		r.t.Errorf("VM %d: channel %d has %#x", vm, i, w)
		return
	}
	var b [nvc0.PageSize]byte
	r.hw.Load(nvc0.Mediator, inst, b[:])
	if u := HostPA(binary.LittleEndian.Uint64(b[nvc0.InstUserd:])); u != c.userd || !r.mine(u, nvc0.PageSize) {
		r.t.Errorf("VM %d: channel %d has its USERD page at %#x", vm, i, u)
	}
	limit := binary.LittleEndian.Uint64(b[nvc0.InstLimit:])
	dir := HostPA(binary.LittleEndian.Uint64(b[nvc0.InstDirectory:]) &^ 0xfff)
	if dir == 0 && limit == 0 {
		return
	}
	if !r.mine(dir, nvc0.DirectorySize) {
		r.t.Errorf("VM %d: channel %d has its directory at %#x", vm, i, dir)
		return
	}
	r.soundDirectory(vm, v, dir)
}

func (r *rig) soundDirectory(vm mmio.VM, v *VGPU, dir HostPA) {
	all := make([]byte, nvc0.DirectorySize)
	r.hw.Load(nvc0.Mediator, dir, all)
	for i := range nvc0.DirectoryLen {
		d := nvc0.PDE(binary.LittleEndian.Uint64(all[8*i:]))
		if d == 0 {
			continue
		}
		for _, large := range []bool{true, false} {
			at, target := d.Small()
			page := uint64(nvc0.PageSize)
			if large {
				at, target = d.Large()
				page = nvc0.LargePage
			}
			if target == nvc0.TableNone {
				continue
			}
			n := int(d.Span() / page)
			if target != nvc0.TableVRAM || !r.mine(HostPA(at), uint64(8*n)) {
				r.t.Errorf("VM %d: entry %d of the directory is %#x", vm, i, uint64(d))
				continue
			}
			table := make([]byte, 8*n)
			r.hw.Load(nvc0.Mediator, HostPA(at), table)
			for j := range n {
				if e := nvc0.PTE(binary.LittleEndian.Uint64(table[8*j:])); e.Present() && !within(v, e, page) {
					r.t.Errorf("VM %d: entry %d of table %d is %#x", vm, j, i, uint64(e))
				}
			}
		}
	}
}

// within reports whether a page is the VM's.
func within(v *VGPU, e nvc0.PTE, page uint64) bool {
	at := e.Addr()
	if at%page != 0 {
		return false
	}
	switch e.Target() {
	case nvc0.TargetVRAM:
		return at >= uint64(v.base) && at+page <= uint64(v.base)+v.size
	case nvc0.TargetSystem, nvc0.TargetSystemFree:
		return at >= v.window64 && at+page <= v.window64+v.request.Guest.MemorySize()
	}
	return false
}

// empty destroys all VMs, and checks that nothing of them is left: P9.
func (r *rig) empty() {
	r.t.Helper()
	r.gpu.mu.Lock()
	var vms []mmio.VM
	for vm := range r.gpu.vgpus {
		vms = append(vms, vm)
	}
	r.gpu.mu.Unlock()
	for _, vm := range vms {
		if err := r.gpu.Destroy(vm); err != nil {
			r.t.Errorf("%v", err)
		}
		r.sound()
	}
	if memory, channels, tables := r.gpu.Free(); memory != 24*mib || channels != nvc0.Channels || tables != 8*mib/nvc0.PageSize-3 {
		r.t.Errorf("%d bytes, %d channels and %d frames are free", memory, channels, tables)
	}
	if err := r.hw.Tag(8*mib, 24*mib, nvc0.Nobody, 999, nvc0.Data); err != nil {
		r.t.Errorf("memory is somebody's: %v", err)
	}
	all := make([]byte, 24*mib)
	r.hw.Load(999, 8*mib, all)
	reserve := make([]byte, 8*mib-3*nvc0.PageSize)
	r.hw.Load(nvc0.Mediator, 3*nvc0.PageSize, reserve)
	for _, b := range [][]byte{all, reserve} {
		for i, x := range b {
			if x != 0 {
				r.t.Errorf("%#x is left at %#x of %d bytes", x, i, len(b))
				break
			}
		}
	}
	for p := range nvc0.Channels {
		if r.hw.ReadRegister(nvc0.RegChannel+8*uint32(p)) != 0 || r.hw.Position(p) != (nvc0.Position{}) {
			r.t.Errorf("channel %d has something left", p)
		}
	}
}
