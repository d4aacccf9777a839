package mediate

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/regs"
)

// hostile runs villains on a rig with an honest VM, and checks P1, P3, P4, P7 and P9.
func hostile(t fataler, seed uint64, steps int) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	r := newRig(t, func(c *Config) { c.Work = []int{DefaultWork, 700, 64}[rnd.IntN(3)] })
	r.add(2, Eager)
	r.poke(2, 0, secret)
	var all []*villain
	for vm := mmio.VM(3); vm < 5; vm++ {
		r.add(vm, everyMode[rnd.IntN(3)], func(q *Request) { q.Tables = 200 })
		if rnd.IntN(4) > 0 {
			r.open(vm)
		}
		all = append(all, &villain{vm: vm, rnd: rnd})
	}
	for i := range steps {
		h := all[rnd.IntN(len(all))]
		h.act(r)
		if i%16 == 0 {
			r.sound()
		}
		switch rnd.IntN(300) {
		case 0:
			r.router.Reset(h.vm)
		case 1:
			if err := r.gpu.Destroy(h.vm); err != nil {
				t.Errorf("%v", err)
			}
			r.add(h.vm, everyMode[rnd.IntN(3)], func(q *Request) { q.Tables = 200 })
		case 2:
			_ = r.gpu.Pause(h.vm)
		case 3, 4:
			_ = r.gpu.Resume(h.vm)
		}
	}
	r.settle()
	r.sound()
	unharmed(t, r)
	r.empty()
}

// TestHostileVMsReachNothing is P1, P3, P4, P7 and P9 over random streams.
func TestHostileVMsReachNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		hostile(t, rapid.Uint64().Draw(t, "seed"), 400)
	})
}

func FuzzHostile(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(seed)
	}
	f.Add(uint64(0x108cebf1)) // takes the instance block of a listed channel away
	f.Fuzz(func(t *testing.T, seed uint64) { hostile(t, seed, 300) })
}

// FuzzAccesses decodes accesses from bytes: 12 for each.
func FuzzAccesses(f *testing.F) {
	f.Add([]byte("\x00\x84\x00\x00\x17\x00\x00\x00\x00\x01\x00\x00\x00\x48\x00\x00\x70\x00\x00\x00\x00\x00\x00\x00"))
	f.Add(bytes.Repeat([]byte{1, 0x84, 0x8c, 0, 0, 6, 1, 0, 0, 0, 0, 0}, 4))
	f.Add(bytes.Repeat([]byte{0, 0x84, 0, 0x30, 0, 0, 2, 0, 0, 0xc0, 0, 0}, 4))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newRig(t)
		for vm, mode := range everyMode {
			r.add(mmio.VM(vm+3), mode)
			r.open(mmio.VM(vm + 3))
		}
		r.add(2, Eager)
		r.poke(2, 0, secret)
		for n := 0; len(b) >= 12 && n < 400; n++ {
			a := mmio.Access{
				VM: 3 + mmio.VM(b[0]>>4%3), BAR: b[0] & 7, Size: b[1] & 15, Offset: uint64(binary.LittleEndian.Uint32(b[2:])),
				Data: uint64(binary.LittleEndian.Uint32(b[6:])) | uint64(b[10])<<32, Write: b[1]&0x80 != 0,
			}
			if a.Write {
				r.gpu.Write(a)
			} else {
				r.gpu.Read(a)
			}
			if b[11]&1 != 0 {
				r.tick()
			}
			b = b[12:]
		}
		r.sound()
		r.settle()
		unharmed(t, r)
	})
}

// TestOthersAreNotNoticed is P2: what a VM reads, and what its memory is in the end, are the
// same whether it is alone or beside a villain. Its clock, and how long it waits, may
// differ; so it waits for the end of what it started before it looks.
func TestOthersAreNotNoticed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		mode := everyMode[seed%3]
		run := func(beside bool) (reads []uint64, memory []byte) {
			r := newRig(t)
			v := r.add(1, mode)
			other := &villain{vm: 2, rnd: rand.New(rand.NewPCG(seed, 2))}
			if beside {
				r.add(2, everyMode[seed/3%3])
				r.open(2)
			}
			r.open(1)
			me := rand.New(rand.NewPCG(seed, 3))
			h := &villain{vm: 1, rnd: me}
			for range 60 {
				if me.IntN(3) == 0 {
					reads = append(reads, look(r, me))
				} else {
					h.act(r)
				}
				if beside {
					for range other.rnd.IntN(6) {
						other.act(r)
					}
				}
				r.settle()
			}
			memory = make([]byte, v.size)
			r.hw.Load(v.owner, v.base, memory)
			return reads, append(memory, r.guests[1].bytes...)
		}
		alone, mine := run(false)
		beside, mineToo := run(true)
		if fmt.Sprint(alone) != fmt.Sprint(beside) {
			t.Fatalf("reads alone\n%x\nand beside another\n%x", alone, beside)
		}
		if !bytes.Equal(mine, mineToo) {
			t.Fatalf("its memory differs")
		}
	})
}

// look reads a register or memory.
func look(r *rig, rnd *rand.Rand) uint64 {
	rows := r.gpu.table.Rows()
	row := rows[rnd.IntN(len(rows))]
	if row.ID == regs.TimeLow || row.ID == regs.TimeHigh {
		return 0
	}
	switch rnd.IntN(9) {
	case 0, 1, 2:
		return r.load(1, 3, 8*uint64(rnd.IntN(4*mib/8)), 8)
	case 3, 4:
		return r.load(1, 1, 0x06000000+4096*uint64(rnd.IntN(5))+4*uint64(rnd.IntN(40)), 4)
	}
	return uint64(r.get(1, row.Offset+row.Stride*uint32(rnd.IntN(int(min(row.Count, 200))))))
}

// TestEveryDwordOfBAR0IsDecidedByTheTable is P6.
func TestEveryDwordOfBAR0IsDecidedByTheTable(t *testing.T) {
	r := newRig(t)
	v := r.add(1, Lazy)
	before := func() (n uint64) { return v.told[mmio.UnknownRegister] + v.told[mmio.DeniedRegister] } // as the counters are, but faster
	hardware := fmt.Sprint(r.hw.ReadRegister(nvc0.RegPlaylistAddress), r.hw.ReadRegister(nvc0.RegKick), r.hw.ReadRegister(nvc0.RegTLBSpace))
	denied := 0
	for at := uint32(0); at < regs.Size; at += 4 {
		row := r.gpu.table.Row(r.gpu.table.At(at))
		if row.ID == regs.Aperture {
			continue // memory: P8
		}
		n := before()
		if row.Class != regs.Deny {
			if r.get(1, at); before() != n {
				t.Fatalf("%s at %#x is refused", row.Name, at)
			}
			if !row.Write {
				readOnly := v.told[mmio.ReadOnly]
				was := r.get(1, at)
				r.set(1, at, 0xffffffff)
				if counted := v.told[mmio.ReadOnly] != readOnly; counted == (row.Class == regs.Const) || r.get(1, at) != was {
					t.Fatalf("%s at %#x: a write was counted: %v", row.Name, at, counted)
				}
			}
			continue
		}
		denied++
		r.set(1, at, 0xffffffff)
		if w := r.get(1, at); w != regs.Refused || before() != n+2 {
			t.Fatalf("%#x reads %#x, and %d refusals were counted", at, w, before()-n)
		}
	}
	if n := r.refused(1, mmio.UnknownRegister) + r.refused(1, mmio.DeniedRegister); denied < 3*mib || v.window != 0 || n != before() {
		t.Errorf("%d dwords are denied", denied)
	}
	if now := fmt.Sprint(r.hw.ReadRegister(nvc0.RegPlaylistAddress), r.hw.ReadRegister(nvc0.RegKick), r.hw.ReadRegister(nvc0.RegTLBSpace)); now != hardware {
		t.Errorf("the hardware has %s, had %s", now, hardware)
	}
}

// TestSizesOfAccessesAgree is P8: memory behaves as memory in each window and size, and a
// register of eight bytes is two of four. What is malformed is refused by the mediator,
// too, if nobody did before.
func TestSizesOfAccessesAgree(t *testing.T) {
	r := newRig(t)
	r.add(1, Eager)
	r.open(1)
	memory := make([]byte, 0x10000)
	windows := []struct {
		bar  uint8
		base uint64
	}{{0, 0x700000}, {1, 0x200000}, {3, 0x200000}}
	r.set(1, 0x1700, 0x200000>>16)
	rapid.Check(t, func(t *rapid.T) {
		w := windows[rapid.IntRange(0, 2).Draw(t, "window")]
		size := uint8(1) << rapid.IntRange(0, 3).Draw(t, "size")
		at := rapid.Uint64Range(0, 0xffff).Draw(t, "at") &^ uint64(size-1)
		a := mmio.Access{VM: 1, BAR: w.bar, Size: size, Offset: w.base + at, Data: rapid.Uint64().Draw(t, "data")}
		if rapid.Bool().Draw(t, "write") {
			r.router.Write(a)
			for i := range uint64(size) {
				memory[at+i] = byte(a.Data >> (8 * i))
			}
		}
		var want uint64
		for i := range uint64(size) {
			want |= uint64(memory[at+i]) << (8 * i)
		}
		if have := r.router.Read(a); have != want {
			t.Fatalf("%v: %#x, want %#x", a, have, want)
		}
	})
	r.store(1, 0, 0x200, 8, 0x1122334455667788)
	if a, b := r.get(1, 0x200), r.get(1, 0x204); a != 0x55667788 || b != 0x11223344 || r.load(1, 0, 0x200, 8) != 0x1122334455667788 {
		t.Errorf("%#x and %#x", a, b)
	}
	for _, a := range []mmio.Access{{Size: 1, Offset: 0x200}, {Size: 2, Offset: 0x202}} {
		a.VM = 1
		if w := r.router.Read(a); w != uint64(regs.Refused)&mmio.Ones(a.Size) {
			t.Errorf("%v: %#x", a, w)
		}
		r.router.Write(a)
	}
	if n := r.refused(1, mmio.BadSize); n != 4 || r.get(1, 0x200) != 0x55667788 {
		t.Errorf("%d refused", n)
	}
	for _, a := range []mmio.Access{{Size: 3}, {Size: 0}, {Size: 16}, {Size: 4, Offset: 2}, {Size: 8, Offset: 4}, {Size: 4, Offset: regs.Size}, {BAR: 1, Size: 8, Offset: barDataSize}, {BAR: 2, Size: 4}, {BAR: 9, Size: 4}, {BAR: 5, Size: 4, Offset: 4096}} {
		a.VM = 1
		before := r.gpu.vgpus[1].Stats().Total().Refusals()
		if w := r.gpu.Read(a); w != mmio.Ones(a.Size) {
			t.Errorf("%v: %#x", a, w)
		}
		if r.gpu.Write(a); r.gpu.vgpus[1].Stats().Total().Refusals() != before+2 {
			t.Errorf("%v is not refused", a)
		}
	}
}

// TestWorkOfAnExitIsBounded is P7 for scans: an exit looks at so many entries and
// no more, and the work is done in the end.
func TestWorkOfAnExitIsBounded(t *testing.T) {
	for _, mode := range []Mode{Eager, Lazy} {
		r := newRig(t, func(c *Config) { c.Work = 512 })
		v := r.add(1, mode)
		d := r.open(1)
		entries := func() uint64 { return v.Stats().Total().Entries }
		r.poke(1, 0x30000+8*9, uint64(nvc0.MakePDE(0, 0x100000, 0)))
		r.set(1, nvc0.RegTLBSpace, 0x300)
		r.set(1, nvc0.RegTLBTrigger, 1<<31)
		if err := d.Submit(0); err != nil {
			t.Fatal(err)
		}
		if len(v.waiting) != 1 {
			t.Fatalf("%s: %d commands wait for tables", mode, len(v.waiting))
		}
		exits := 0
		for r.get(1, 0x100c80)&0x8000 == 0 {
			before := entries()
			r.get(1, 0)
			if n := entries() - before; n > 512+chunk || n == 0 {
				t.Fatalf("%s: an exit looked at %d entries", mode, n)
			}
			exits++
		}
		if exits < 3 || v.Stats().Total().Deferred == 0 {
			t.Errorf("%s: %d exits", mode, exits)
		}
		if err := d.Wait(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestNothingIsLeftOfAVMForTheNext is P9: memory, tables, USERD pages, registers and the
// state of channels. The next VM gets the same place.
func TestNothingIsLeftOfAVMForTheNext(t *testing.T) {
	for _, how := range []string{"destroyed", "reset"} {
		for _, mode := range everyMode {
			r := newRig(t)
			v := r.add(1, mode)
			d := r.open(1)
			work(t, d, 3)
			r.poke(1, 0x3ff000, secret)
			if err := d.Submit(nvc0.Incr(1, nvc0.ComputeCodeHigh, 2), 1, 2); err != nil { // runs while it is taken away
				t.Fatal(err)
			}
			base, first := v.base, v.first
			if how == "reset" {
				r.router.Reset(1)
				r.sound()
			} else {
				if err := r.gpu.Destroy(1); err != nil {
					t.Fatal(err)
				}
				v = r.add(1, Lazy)
			}
			if v.base != base || v.first != first {
				t.Fatalf("it is at %#x", v.base)
			}
			for at := uint64(0); at < 4*mib; at += 4096 {
				if w := r.peek(1, at); w != 0 {
					t.Fatalf("%s, %s: %#x is left at %#x", how, mode, w, at)
				}
			}
			if w := r.peek(1, 0x3ff000); w != 0 || r.get(1, 0x200) != 0 || r.get(1, 0x2140) != 0 || r.get(1, 0x1704) != 0 {
				t.Errorf("%s, %s: something is left", how, mode)
			}
			work(t, r.open(1), 5)
			r.settle()
			r.empty()
		}
	}
}

// TestNextVMHasNoPagesOfTheLast: the hardware remembers translations by the place of a
// directory, and the next VM's is in the same place.
func TestNextVMHasNoPagesOfTheLast(t *testing.T) {
	for _, mode := range everyMode {
		r := newRig(t)
		v := r.add(1, mode)
		r.add(2, Eager)
		work(t, r.open(1), 3)
		r.settle()
		dir := v.channels[0].space.shadow
		if err := r.gpu.Destroy(1); err != nil {
			t.Fatal(err)
		}
		v = r.add(1, mode, func(q *Request) { q.Memory = 8 * mib }) // elsewhere in memory
		d := r.open(1)
		if at := v.channels[0].space.shadow; at != dir {
			t.Fatalf("%s: the directory is at %#x, was at %#x", mode, at, dir)
		}
		work(t, d, 5)
		if n := r.hw.Violations(); n != 0 {
			t.Errorf("%s: %d violations", mode, n)
		}
	}
}

// TestNextVMHasNoPagesOfTheLastWithoutMappingAny: nothing that the next VM does makes the hardware
// forget, so taking the last one's tables away has to.
func TestNextVMHasNoPagesOfTheLastWithoutMappingAny(t *testing.T) {
	r := newRig(t)
	v := r.add(1, Para)
	r.add(2, Eager)
	work(t, r.open(1), 3)
	r.settle()
	dir := v.channels[0].space.shadow
	if err := r.gpu.Destroy(1); err != nil {
		t.Fatal(err)
	}
	v = r.add(1, Para, func(q *Request) { q.Memory = 8 * mib })
	r.store(1, 5, ParaSlotsLow, 4, 0x10000)
	r.store(1, 5, ParaMap, 4, 1)
	calls := append(append(call(ParaNewSpace, 1), call(ParaTables, 1, 0, 1)...), call(ParaNewSpace, 2)...)
	if s := r.slot(0, uint32(len(calls)), calls...); s != ParaDone || v.spaces[2].shadow != dir {
		t.Fatalf("status %#x, the directory is not where the last one was", s)
	}
	r.poke(1, 0x2000+nvc0.InstRing, 0x20040000|9<<48)
	r.poke(1, 0x2000+nvc0.InstLimit, 1<<40-1)
	r.poke(1, 0x3000, 4<<32)
	r.set(1, 0x2254, 0x06000000>>12)
	r.set(1, 0x3000, 1<<31|2)
	if s := r.slot(0, 3, call(ParaSetSpace, 0, 2)...); s != ParaDone {
		t.Fatalf("status %#x", s)
	}
	r.set(1, 0x2270, 3)
	r.set(1, 0x2274, 1)
	r.store(1, 1, 0x06000000+nvc0.UserdIBPut, 4, 1)
	if r.settle(); !v.channels[0].dead {
		t.Error("its empty address space has a page")
	}
	if n := r.hw.Violations(); n != 0 {
		t.Errorf("%d violations", n)
	}
}
