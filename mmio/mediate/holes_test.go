package mediate

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/regs"
)

// The isolation holes of GPUvm's published code, GX-1 to GX-12. In each test VM 1 is
// hostile, and VM 2 has a secret at the start of its memory. Whatever reaches
// memory of another owner fails the test by itself (rig).

const secret = 0x5ec4e75ec4e7

// stage is a rig with the two.
func stage(t fataler, mode Mode) (*rig, *VGPU, *VGPU) {
	r := newRig(t)
	a, b := r.add(1, mode), r.add(2, Eager)
	r.poke(2, 0, secret)
	r.poke(2, 0x1000, secret)
	return r, a, b
}

// unharmed checks that VM 2 has its secret, and can work.
func unharmed(t fataler, r *rig) {
	t.Helper()
	if w := r.peek(2, 0); w != secret {
		t.Errorf("the other VM's memory is %#x", w)
	}
	work(t, r.open(2), 11)
	if n := r.hw.Violations(); n != 0 {
		t.Errorf("%d violations", n)
	}
}

// expect checks that something was refused for a reason, and told.
func expect(t fataler, r *rig, reason mmio.Reason) {
	t.Helper()
	if r.refused(1, reason) == 0 {
		t.Errorf("nothing was refused as %v", reason)
	}
	for _, e := range r.events {
		if e.VM == 1 && e.Reason == reason && e.Name == "vm1" {
			return
		}
	}
	t.Errorf("no event names %v", reason)
}

func TestGX01WindowReachesNoOtherMemory(t *testing.T) {
	r, a, b := stage(t, Eager)
	from, _ := a.Partition()
	to, _ := b.Partition()
	for _, base := range []uint32{1 << 24, 2 << 24, 3<<24 | 1, 0xffffffff} { // targets
		r.set(1, 0x1700, base)
		if w := r.get(1, 0x1700); w != 0 {
			t.Errorf("the window is %#x", w)
		}
	}
	expect(t, r, mmio.BadTarget)
	for _, base := range []uint32{uint32((to - from) >> 16), uint32(4 * mib >> 16), 0x00ffffff} {
		r.set(1, 0x1700, base)
		r.store(1, 0, 0x700000, 8, 0xbad)
		if w := r.load(1, 0, 0x700000, 8); w != uint64(regs.Refused) {
			t.Errorf("base %#x: read %#x", base, w)
		}
	}
	r.set(1, 0x1700, 4*mib>>16-1) // the last 64 KiB, and what is behind them
	if r.store(1, 0, 0x70fff8, 8, 7); r.load(1, 0, 0x70fff8, 8) != 7 {
		t.Error("the end of the partition can't be used")
	}
	if w := r.load(1, 0, 0x710000, 8); w != uint64(regs.Refused) {
		t.Errorf("read %#x behind the partition", w)
	}
	expect(t, r, mmio.OutOfPartition)
	unharmed(t, r)
}

func TestGX02PeepholeIsDenied(t *testing.T) {
	r, _, _ := stage(t, Eager)
	for _, at := range []uint32{0x1718, 0x60000, 0x6000c, 0x60010, 0x60014} {
		r.set(1, at, 0x80000000)
		if w := r.get(1, at); w != regs.Refused {
			t.Errorf("%#x reads %#x", at, w)
		}
	}
	expect(t, r, mmio.DeniedRegister)
	unharmed(t, r)
}

func TestGX03StoreToAnInstanceBlockBringsNoDirectoryOfTheVMs(t *testing.T) {
	r, a, b := stage(t, Eager)
	d := r.open(1)
	other, _ := b.Partition()
	for _, dir := range []uint64{uint64(other) | 1, 1<<39 | 1, 0x30000 | 2, 0x30000 | 3} {
		r.store(1, 3, 0x2000+nvc0.InstDirectory, 8, dir) // through BAR3, a store to the live block
		var inst [8]byte
		r.hw.Load(nvc0.Mediator, a.channels[0].shadow+nvc0.InstDirectory, inst[:])
		if at := HostPA(binary.LittleEndian.Uint64(inst[:]) &^ 0xfff); at != 0 {
			t.Errorf("directory %#x: the hardware's is at %#x", dir, at)
		}
		if err := d.Submit(0); err != nil {
			t.Fatal(err)
		}
		r.settle()
	}
	if expect(t, r, mmio.OutOfPartition); r.refused(1, mmio.BadTarget) == 0 {
		t.Error("a directory in system memory was not refused")
	}
	unharmed(t, r)
}

func TestGX03StoreToAnInstanceBlockIsFollowed(t *testing.T) {
	r, a, _ := stage(t, Eager)
	r.open(1)
	before := a.channels[0].space
	r.store(1, 3, 0x2000+nvc0.InstDirectory, 8, 0x10001) // the one of BAR3
	if s := a.channels[0].space; s == nil || s == before || s.at != 0x10000 {
		t.Errorf("the channel's space is %+v", s)
	}
	if _, ok := a.spaces[0x30000]; ok {
		t.Error("the old space is still there")
	}
	unharmed(t, r)
}

func TestGX04InstanceBlocksOutsideAreRefused(t *testing.T) {
	r, a, b := stage(t, Eager)
	from, _ := a.Partition()
	to, _ := b.Partition()
	for _, inst := range []uint32{uint32((to - from) >> 12), 4 * mib >> 12, 0x0fffffff} {
		r.set(1, 0x3000, 1<<31|inst)
		if w := r.hw.ReadRegister(0x3000 + 8*uint32(a.first)); w != 0 {
			t.Errorf("instance %#x: the hardware has %#x", inst, w)
		}
		r.set(1, 0x1704, 1<<31|inst)
		r.set(1, 0x1714, 1<<31|inst)
		for _, bar := range []uint8{1, 3} {
			r.store(1, bar, 0, 8, 0xbad)
			if w := r.load(1, bar, 0, 8); w != uint64(regs.Refused) {
				t.Errorf("BAR%d reads %#x", bar, w)
			}
		}
	}
	expect(t, r, mmio.OutOfPartition)
	for _, at := range []uint32{0x3000, 0x1704, 0x1714} {
		r.set(1, at, 1<<31|2<<28|2)
		if w := r.get(1, at); w>>28&3 != 0 {
			t.Errorf("%#x is %#x", at, w)
		}
	}
	if w := r.hw.ReadRegister(0x3000 + 8*uint32(a.first)); w != 0 {
		t.Errorf("the hardware has %#x", w)
	}
	expect(t, r, mmio.BadTarget)
	unharmed(t, r)
}

func TestGX04UserdOfTheVMIsNeverTheHardwares(t *testing.T) {
	r, a, b := stage(t, Eager)
	d := r.open(1)
	other, _ := b.Partition()
	r.store(1, 3, 0x2000+nvc0.InstUserd, 8, uint64(other)) // another VM's memory
	if err := d.Submit(0); err != nil {
		t.Fatal(err)
	}
	if err := d.Wait(); err != nil {
		t.Fatal(err)
	}
	var inst [8]byte
	r.hw.Load(nvc0.Mediator, a.channels[0].shadow+nvc0.InstUserd, inst[:])
	if at := HostPA(binary.LittleEndian.Uint64(inst[:])); at != a.channels[0].userd {
		t.Errorf("the hardware's USERD page is at %#x", at)
	}
	unharmed(t, r)
}

func TestGX05PlaylistsHaveOwnChannelsOnly(t *testing.T) {
	r, a, b := stage(t, Eager)
	r.open(1)
	victim := r.open(2)
	r.set(2, 0x2274, 0x1f<<20) // VM 2 takes its channel off
	list := []uint64{uint64(b.first), uint64(b.first - a.first), 4, 127, 128, 0xffffffff, 0}
	for i, ch := range list {
		r.poke(1, 0x3000+8*uint64(i), ch|4<<32)
	}
	r.set(1, 0x2274, uint32(len(list))|0x1f<<20)
	expect(t, r, mmio.BadChannel)
	if r.hw.ReadRegister(0x3004+8*uint32(b.first))&1 != 0 {
		t.Error("another VM's channel is listed")
	}
	if r.hw.ReadRegister(0x3004+8*uint32(a.first))&1 == 0 {
		t.Error("the VM's own channel is not listed")
	}
	for _, at := range []uint32{4 * mib >> 12, 0x0fffffff} {
		r.set(1, 0x2270, at)
		r.set(1, 0x2274, 4)
	}
	r.set(1, 0x2270, 2<<28|3)
	r.set(1, 0x2274, 1)
	r.set(1, 0x2270, 3)
	r.set(1, 0x2274, 0xfff)
	if expect(t, r, mmio.OutOfPartition); r.refused(1, mmio.BadTarget) == 0 || r.refused(1, mmio.OverQuota) == 0 {
		t.Error("a list in system memory or one that is too long was read")
	}
	r.set(2, 0x2274, 1|0x1f<<20)
	work(t, victim, 3)
	unharmed(t, r)
}

// entry makes VM 1's driver run with an entry of its table changed, and returns what the
// hardware has in its place.
func entry(r *rig, a *VGPU, e nvc0.PTE) nvc0.PTE {
	const at = 0x60000 + 0x200000/nvc0.PageSize*8
	r.poke(1, at, uint64(e))
	r.set(1, nvc0.RegTLBSpace, 0x30000>>8)
	r.set(1, nvc0.RegTLBTrigger, 1<<31)
	return shadowPTE(r, a.channels[0].space, 0x20200000)
}

// shadowPTE is the small page's entry in a shadow.
func shadowPTE(r *rig, s *space, va uint64) nvc0.PTE {
	var b [8]byte
	r.hw.Load(nvc0.Mediator, s.tables[int(va/nvc0.TableSpan)].small+HostPA(va%nvc0.TableSpan/nvc0.PageSize*8), b[:])
	return nvc0.PTE(binary.LittleEndian.Uint64(b[:]))
}

func TestGX06EntriesOfOtherTargetsAndFramesAreNotPresent(t *testing.T) {
	r, a, _ := stage(t, Eager)
	r.open(1)
	good := nvc0.MakePTE(0x200000, nvc0.TargetVRAM, true) | 1<<32
	if e := entry(r, a, good); e.Addr() != uint64(a.base)+0x200000 || !e.ReadOnly() || e&(1<<32) == 0 {
		t.Fatalf("a good entry became %#x", uint64(e))
	}
	system := nvc0.MakePTE(0x5000, nvc0.TargetSystem, false)
	if e := entry(r, a, system); e.Addr() != a.window64|0x5000 || e.Target() != nvc0.TargetSystem {
		t.Fatalf("system memory became %#x", uint64(e))
	}
	for name, bad := range map[string]nvc0.PTE{
		"target 1":                       nvc0.MakePTE(0x200000, 1, false),
		"behind the partition":           nvc0.MakePTE(4*mib, nvc0.TargetVRAM, false),
		"the last frame":                 nvc0.MakePTE(1<<40-4096, nvc0.TargetVRAM, false),
		"system memory that is not":      nvc0.MakePTE(mib, nvc0.TargetSystem, false),
		"system memory of another":       nvc0.MakePTE(3<<windowBits, nvc0.TargetSystem, false),
		"unsnooped memory that is not":   nvc0.MakePTE(1<<33, nvc0.TargetSystemFree, false),
		"an unknown kind":                good | 0x10<<36,
		"compression tags":               good | 1<<44,
		"the last of compression's bits": good | 1<<60,
	} {
		if e := entry(r, a, bad); e != 0 {
			t.Errorf("%s: the hardware has %#x", name, uint64(e))
		}
	}
	if expect(t, r, mmio.BadEntry); r.refused(1, mmio.BadTarget) == 0 || r.refused(1, mmio.OutOfPartition) != 5 {
		t.Error("not all was counted")
	}
	unharmed(t, r)
}

func TestGX06ReadOnlyPagesAreReadOnlyThroughBARs(t *testing.T) {
	r, _, _ := stage(t, Eager)
	r.open(1)
	r.poke(1, 0x20000+8*16, uint64(nvc0.MakePTE(16*nvc0.LargePage, nvc0.TargetVRAM, true)))
	r.poke(1, 16*nvc0.LargePage, 5)
	r.store(1, 3, 16*nvc0.LargePage, 8, 6)
	if w := r.load(1, 3, 16*nvc0.LargePage, 8); w != 5 {
		t.Errorf("it reads %#x", w)
	}
	expect(t, r, mmio.OutOfPartition)
	unharmed(t, r)
}

func TestGX07TablesOutsideAreRefused(t *testing.T) {
	r, a, b := stage(t, Eager)
	r.open(1)
	from, _ := a.Partition()
	to, _ := b.Partition()
	for name, e := range map[string]nvc0.PDE{
		"another VM's":                nvc0.MakePDE(0, to-from, 3),
		"the end of the partition":    nvc0.MakePDE(0, 4*mib, 3),
		"over the end":                nvc0.MakePDE(0, 4*mib-4096, 3),
		"large, another VM's":         nvc0.MakePDE(to-from, 0, 3),
		"large, over the end":         nvc0.MakePDE(4*mib-4096, 0, 0),
		"in system memory":            nvc0.MakePDE(0, 0x60000, 3) | 2<<32,
		"large, in system memory":     nvc0.MakePDE(0x60000, 0, 3) | 2,
		"at the end of all addresses": nvc0.MakePDE(0, 1<<40-4096, 0),
	} {
		for _, dir := range []uint64{0x30000, 0x10000} {
			r.poke(1, dir+8*9, uint64(e))
			r.set(1, nvc0.RegTLBSpace, uint32(dir>>8))
			r.set(1, nvc0.RegTLBTrigger, 1<<31)
		}
		if n, ok := a.channels[0].space.tables[9]; ok {
			t.Errorf("%s: the shadow has %+v", name, n)
		}
		if w := r.load(1, 3, 0, 8); w == uint64(regs.Refused) {
			t.Fatal("BAR3 is gone")
		}
	}
	expect(t, r, mmio.BadTable)
	// BAR3's own walk.
	r.poke(1, 0x10000, uint64(nvc0.MakePDE(to-from, 0, 0)))
	if w := r.load(1, 3, 0x1000, 8); w != uint64(regs.Refused) {
		t.Errorf("BAR3 reads %#x", w)
	}
	unharmed(t, r)
}

func TestGX08LargePagesAreWhollyInside(t *testing.T) {
	r, a, _ := stage(t, Eager)
	r.open(1)
	const table = 0x2f0000
	r.poke(1, 0x30000+8*9, uint64(nvc0.MakePDE(table, 0, 3)))
	for i, e := range []nvc0.PTE{
		nvc0.MakePTE(4*mib-nvc0.LargePage, nvc0.TargetVRAM, false),
		nvc0.MakePTE(4*mib-nvc0.PageSize, nvc0.TargetVRAM, false), // only its first 4 KiB are inside
		nvc0.MakePTE(nvc0.PageSize, nvc0.TargetVRAM, false),
		nvc0.MakePTE(mib-nvc0.PageSize, nvc0.TargetSystem, false),
		nvc0.MakePTE(mib-nvc0.LargePage, nvc0.TargetSystem, false),
	} {
		r.poke(1, table+8*uint64(i), uint64(e))
	}
	r.set(1, nvc0.RegTLBSpace, 0x30000>>8)
	r.set(1, nvc0.RegTLBTrigger, 1<<31)
	shadow := make([]byte, 40)
	r.hw.Load(nvc0.Mediator, a.channels[0].space.tables[9].large, shadow)
	for i, want := range []bool{true, false, false, false, true} {
		if e := nvc0.PTE(binary.LittleEndian.Uint64(shadow[8*i:])); e.Present() != want {
			t.Errorf("entry %d became %#x", i, uint64(e))
		}
	}
	expect(t, r, mmio.BadEntry)
	unharmed(t, r)
}

func TestGX09RegistersOfTheWholeCardAreNeverReached(t *testing.T) {
	r, a, b := stage(t, Eager)
	victim := r.open(2)
	for _, at := range []uint32{0x5000, 0x5ffc, 0x40000, 0x40120, 0x42004, 0x2630, 0x262c, 0x104050, 0x10a000, 0x400200, 0x418000, 0x4188b4, 0x610010} {
		r.set(1, at, 0xffffffff)
		if w := r.get(1, at); w != regs.Refused {
			t.Errorf("%#x reads %#x", at, w)
		}
	}
	expect(t, r, mmio.DeniedRegister)
	for _, at := range []uint32{0x200, 0x204, 0x2200, 0x2204, 0x2208, 0x140, 0x2140} { // each VM has its own
		was := r.get(2, at)
		if r.set(1, at, 0x5a5a); r.get(1, at) != 0x5a5a || r.get(2, at) != was {
			t.Errorf("%#x is %#x, and the other VM's %#x", at, r.get(1, at), r.get(2, at))
		}
	}
	for i := a.first + 4; i < 128; i++ { // others' channels
		r.set(1, 0x3000+8*uint32(i), 1<<31)
		r.set(1, 0x3004+8*uint32(i), 1)
		r.set(1, nvc0.RegKick, uint32(i))
	}
	if expect(t, r, mmio.BadChannel); r.hw.ReadRegister(0x3000+8*uint32(b.first))>>31 != 1 {
		t.Error("the other VM's channel is gone")
	}
	r.open(1)
	for i := uint64(1); i < 128; i++ { // USERD pages of channels that are not bound, or others'
		before := r.refused(1, mmio.BadChannel)
		r.store(1, 1, 0x06000000+i*nvc0.PageSize+nvc0.UserdIBPut, 4, 1)
		if w := r.load(1, 1, 0x06000000+i*nvc0.PageSize+nvc0.UserdIBGet, 4); w != uint64(regs.Refused) || r.refused(1, mmio.BadChannel) != before+2 {
			t.Errorf("USERD page %d reads %#x", i, w)
		}
	}
	if a, hw := r.get(1, nvc0.RegKick), r.hw.ReadRegister(nvc0.RegKick); a != 0 || hw >= uint32(b.first)+4 {
		t.Errorf("KICK is %#x, and the hardware's %#x", a, hw)
	}
	work(t, victim, 3)
	unharmed(t, r)
}

// slot writes calls into a slot of VM 1 and makes them.
func (r *rig) slot(n, length uint32, words ...uint32) (status uint32) {
	g := r.guests[1]
	page := make([]byte, nvc0.PageSize)
	binary.LittleEndian.PutUint32(page[4:], length)
	for i, w := range words {
		binary.LittleEndian.PutUint32(page[8+4*i:], w)
	}
	_ = g.WriteMemory(0x10000+uint64(n)*nvc0.PageSize, page)
	r.store(1, 5, ParaCall, 4, uint64(n))
	var b [4]byte
	_ = g.ReadMemory(0x10000+uint64(n)*nvc0.PageSize, b[:])
	return binary.LittleEndian.Uint32(b[:])
}

func call(op uint32, args ...uint32) []uint32 {
	return append([]uint32{ParaHeader(op, uint32(len(args)))}, args...)
}

func TestGX10IndexesOfParaCallsAreChecked(t *testing.T) {
	r, a, _ := stage(t, Para)
	r.open(1)
	if s := r.slot(0, 2, call(ParaNewSpace, 7)...); s != ParaDone {
		t.Fatalf("status %#x", s)
	}
	pages := func(n, have int) []uint32 {
		c := call(ParaMapPages, append([]uint32{2, 0x20200000, 0, uint32(n)}, make([]uint32, 2*have)...)...)
		return c
	}
	for name, c := range map[string][]uint32{
		"a space that is there":    call(ParaNewSpace, 7),
		"a space's number":         call(ParaNewSpace, maxSpace),
		"freeing none":             call(ParaFreeSpace, 8),
		"freeing one that is used": call(ParaFreeSpace, 2),
		"a channel":                call(ParaSetSpace, 4, 7),
		"a channel's number":       call(ParaSetSpace, 0xffffffff, 7),
		"an unbound channel":       call(ParaSetSpace, 1, 7),
		"a channel's space":        call(ParaSetSpace, 0, 9),
		"a BAR":                    call(ParaBarSpace, 2, 7),
		"a BAR's space":            call(ParaBarSpace, 0, 9),
		"a directory's entry":      call(ParaTables, 7, nvc0.DirectoryLen, 2),
		"a directory's last":       call(ParaTables, 7, 0xffffffff, 2),
		"more than a batch":        pages(ParaBatch+1, ParaBatch+1),
		"entries that are not":     pages(8, 7),
		"very many":                pages(-1, 0),
		"no table":                 call(ParaMapPages, 7, 0, 0, 1, 1, 0),
		"over the table":           call(ParaMapPages, 2, 0x20fff000, 0, 2, 1, 0, 0x11, 0),
		"an odd address":           call(ParaMapPages, 2, 0x20200800, 0, 1, 1, 0),
		"a foreign frame":          call(ParaMapPages, 2, 0x20200000, 0, 1, 0x4001, 0),
		"unmapping too much":       call(ParaUnmap, 2, 0x20000000, 0, maxUnmap+1),
		"an operation":             call(99, 1, 2, 3),
		"no operation":             call(0, 1, 2, 3),
		"too few arguments":        call(ParaTables, 7),
		"no length":                {ParaNewSpace},
		"a length beyond":          {ParaNewSpace | 9<<16, 1},
	} {
		before := r.refused(1, mmio.BadCall) + r.refused(1, mmio.OutOfPartition)
		if s := r.slot(1, uint32(len(c)), c...); s != ParaRefused {
			t.Errorf("%s: status %#x", name, s)
		}
		if r.refused(1, mmio.BadCall)+r.refused(1, mmio.OutOfPartition) == before {
			t.Errorf("%s: not counted", name)
		}
	}
	if s := r.slot(1, 1023); s != ParaRefused {
		t.Errorf("a slot that is longer than it is: status %#x", s)
	}
	for _, n := range []uint32{ParaSlots, 0xffffffff} {
		before := r.refused(1, mmio.BadCall)
		if r.store(1, 5, ParaCall, 4, uint64(n)); r.refused(1, mmio.BadCall) == before {
			t.Errorf("slot %#x was used", n)
		}
	}
	expect(t, r, mmio.BadCall)
	for _, at := range []uint64{mib - 4096, mib, 1 << 43, ^uint64(0)} { // slots outside
		r.store(1, 5, ParaSlotsLow, 4, at&0xffffffff)
		r.store(1, 5, ParaSlotsHi, 4, at>>32)
		if r.store(1, 5, ParaMap, 4, 1); r.load(1, 5, ParaMap, 4) != 0 {
			t.Errorf("slots at %#x", at)
		}
		r.store(1, 5, ParaCall, 4, 0)
	}
	if len(a.spaces) != 3 {
		t.Errorf("%d spaces", len(a.spaces))
	}
	unharmed(t, r)
}

func TestGX10ParaCallsOfAVMInAnotherModeAreRefused(t *testing.T) {
	r, a, _ := stage(t, Eager)
	for _, at := range []uint64{ParaMap, ParaSlotsLow, ParaSlotsHi, ParaCall, 0x10} {
		r.store(1, 5, at, 4, 1)
		if w := r.load(1, 5, at, 4); w != uint64(regs.Refused) {
			t.Errorf("%#x reads %#x", at, w)
		}
	}
	if n := r.refused(1, mmio.UnknownRegister); n != 10 || a.mapped {
		t.Errorf("%d refused", n)
	}
	unharmed(t, r)
}

func TestGX11NoVMTakesAllOfTheMediatorsMemory(t *testing.T) {
	for _, mode := range everyMode {
		r, a, _ := stage(t, mode)
		d := r.open(1)
		if mode == Para {
			for i := range uint32(2000) {
				r.slot(1, 2, call(ParaNewSpace, 100+i)...)
				r.slot(1, 4, call(ParaTables, 2, i, 3)...)
			}
		} else {
			for i := range uint64(nvc0.DirectoryLen) { // tables everywhere, with cycles: the directory is one, too
				r.store(1, 3, 0x30000+8*i, 8, uint64(nvc0.MakePDE(0x30000, 0x30000, 0)))
			}
			r.set(1, nvc0.RegTLBSpace, 0x30000>>8)
			r.set(1, nvc0.RegTLBTrigger, 1<<31)
			_ = d.Submit(0)
		}
		r.settle()
		if n := a.Tables(); n > a.request.Tables {
			t.Errorf("%s: %d frames of %d", mode, n, a.request.Tables)
		}
		expect(t, r, mmio.OverQuota)
		unharmed(t, r)
	}
}

func TestGX12SlotsAreReadOnce(t *testing.T) {
	r, a, _ := stage(t, Para)
	r.open(1)
	g := r.guests[1]
	good := call(ParaMapPages, 2, 0x20200000, 0, 1, uint32(nvc0.MakePTE(0x200000, 0, false)), 0)
	g.reads = 0
	g.after = func(g *guest) { // another vCPU writes a foreign frame, an index and a length
		binary.LittleEndian.PutUint32(g.bytes[0x11004:], 0xffff)
		binary.LittleEndian.PutUint32(g.bytes[0x11008+4:], 77)
		binary.LittleEndian.PutUint32(g.bytes[0x11008+4*5:], 0x40001)
	}
	r.slot(1, uint32(len(good)), good...)
	g.after = nil
	if g.reads != 2 { // the mediator's and the test's
		t.Errorf("%d reads", g.reads)
	}
	if e := shadowPTE(r, a.spaces[2], 0x20200000); e.Addr() != uint64(a.base)+0x200000 {
		t.Errorf("the hardware has %#x", uint64(e))
	}
	unharmed(t, r)
}

// TestGX06BusAddressesOfOthersReachNothing asks as the hardware would if a page table were wrong.
func TestGX06BusAddressesOfOthersReachNothing(t *testing.T) {
	r, a, b := stage(t, Eager)
	r.guests[1].bytes, r.guests[1].size = make([]byte, 2*mib), mib // a transport that would reach more
	p := make([]byte, 4096)
	for name, c := range map[string]struct {
		on   nvc0.Owner
		addr uint64
		want bool
	}{
		"its own":              {a.owner, a.window64 | 0x1000, true},
		"another VM's":         {a.owner, b.window64 | 0x1000, false},
		"behind its memory":    {a.owner, a.window64 | mib, false},
		"over its end":         {a.owner, a.window64 | mib - 8, false},
		"nobody's":             {a.owner, 63 << windowBits, false},
		"nobody that there is": {12345, a.window64 | 0x1000, false},
	} {
		for _, write := range []bool{false, true} {
			if got := r.gpu.DMA(c.on, c.addr, p, write); got != c.want {
				t.Errorf("%s: %v", name, got)
			}
		}
	}
	unharmed(t, r)
}

// TestPushBuffersThatJumpOutOfRangeStopTheirChannelOnly: rings and push buffers at
// addresses without memory, illegal headers, methods and classes.
func TestPushBuffersThatJumpOutOfRangeStopTheirChannelOnly(t *testing.T) {
	for name, ring := range map[string]uint64{
		"no memory":     nvc0.IBEntry(0x3_0000_0000, 4),
		"the last byte": nvc0.IBEntry(1<<40-4, 4),
		"unmapped":      nvc0.IBEntry(0x20300000, 4),
		"over its end":  nvc0.IBEntry(0x2005fffc, 4),
	} {
		r, a, _ := stage(t, Lazy)
		d := r.open(1)
		if err := d.Wait(); err != nil {
			t.Fatal(err)
		}
		r.store(1, 1, 0x40000+8, 8, ring)
		r.store(1, 1, 0x06000000+nvc0.UserdIBPut, 4, 2)
		r.settle()
		if !a.channels[0].dead || r.get(1, 0x2100)&(1<<28) == 0 || r.get(1, 0x259c) == 0 {
			t.Errorf("%s: the channel goes on, PFIFO_INTR is %#x", name, r.get(1, 0x2100))
		}
		if r.guests[1].ups == 0 {
			t.Errorf("%s: no interrupt", name)
		}
		if inst := r.get(1, 0x2800) + r.get(1, 0x2870); inst != 2 {
			t.Errorf("%s: the fault names instance %#x", name, inst)
		}
		expect(t, r, mmio.BadCommand)
		unharmed(t, r)
	}
	for name, words := range map[string][]uint32{
		"header": {7 << 29},
		"class":  {nvc0.Incr(0, 0, 1), 0x1234},
		"method": {nvc0.Incr(0, 0x100, 1), 1},
		"copy":   {nvc0.Incr(0, nvc0.M2MFLength, 2), 1 << 31, 1 << 31, nvc0.Incr(0, nvc0.M2MFExec, 1), 0x110},
		"launch": {nvc0.Incr(1, nvc0.ComputeGridYX, 2), 0xffffffff, 0xffff, nvc0.Incr(1, nvc0.ComputeLaunch, 1), 0},
	} {
		r, a, _ := stage(t, Lazy)
		d := r.open(1)
		if err := d.Submit(words...); err != nil {
			t.Fatal(err)
		}
		r.settle()
		if err := d.Wait(); err == nil || !a.channels[0].dead {
			t.Errorf("%s: the channel goes on", name)
		}
		expect(t, r, mmio.BadCommand)
		unharmed(t, r)
	}
}

// TestFloodOfDoorbellsIsBoundedAndLosesNothing: who rings without end has its
// commands joined, all of them run, and the other VM has its share.
func TestFloodOfDoorbellsIsBoundedAndLosesNothing(t *testing.T) {
	r, a, _ := stage(t, Lazy)
	d := r.open(1)
	victim := r.open(2)
	for range 400 {
		if err := d.Submit(nvc0.Incr(0, nvc0.MethodRef, 1), 1); err != nil {
			t.Fatal(err)
		}
		if n := len(a.ready) + len(a.waiting); n > 64 {
			t.Fatalf("%d commands are queued", n)
		}
	}
	expect(t, r, mmio.OverQuota)
	work(t, victim, 5)
	if err := d.Wait(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(r.events[len(r.events)-1].String(), "over_quota") {
		t.Errorf("the last event is %v", r.events[len(r.events)-1])
	}
}

// TestCommandThatNeverEndsIsStopped: it waits for a semaphore that nobody releases.
func TestCommandThatNeverEndsIsStopped(t *testing.T) {
	r, a, _ := stage(t, Lazy)
	d := r.open(1)
	if err := d.Submit(nvc0.Incr(0, nvc0.MethodSemaphoreHigh, 4), 0, 0x20041100, 99, nvc0.SemaphoreAcquire); err != nil {
		t.Fatal(err)
	}
	victim := r.open(2)
	if err := victim.Submit(0); err != nil {
		t.Fatal(err)
	}
	for !victim.Done() {
		r.clock += ms
		r.gpu.Poll()
		if r.clock > sec {
			t.Fatal("the other VM never runs")
		}
	}
	if !a.channels[0].dead {
		t.Error("the channel goes on")
	}
	expect(t, r, mmio.Overdue)
	if err := d.Wait(); err == nil {
		t.Error("the driver is not told")
	}
	r.set(1, 0x3000, 0)
	work(t, r.open(1), 3) // bound again, it works
	unharmed(t, r)
}
