package mediate

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// mapper changes an address space in one of the modes.
type mapper struct {
	r    *rig
	v    *VGPU
	mode Mode
	d    *guestdriver.Driver
}

// Where the tables of three directory entries are, in the VM's memory (not Para).
var (
	smallAt = [3]uint64{0x100000, 0x110000, 0x120000}
	largeAt = [3]uint64{0x130000, 0x131000, 0x132000}
)

const testSize = 3 // tables of 16 MiB

func newMapper(t fataler, mode Mode) *mapper {
	r := newRig(t)
	m := &mapper{r: r, v: r.add(1, mode), mode: mode}
	m.d = r.open(1)
	r.settle()
	return m
}

func (m *mapper) tables(i int, large, small bool) {
	if m.mode == Para {
		w := uint32(testSize << 8)
		if large {
			w |= 1
		}
		if small {
			w |= 2
		}
		m.r.slot(1, 4, call(ParaTables, 2, uint32(16+i), w)...)
		return
	}
	var l, s HostPA
	if large {
		l = HostPA(largeAt[i])
	}
	if small {
		s = HostPA(smallAt[i])
	}
	e := nvc0.MakePDE(l, s, testSize)
	if !large && !small {
		e = 0
	}
	m.r.poke(1, 0x30000+8*uint64(16+i), uint64(e))
}

// entry sets an entry. A para-virtual call that is refused leaves what was there; what the tables
// of the other modes then have is an entry without a page, so that is asked for.
func (m *mapper) entry(i int, large bool, n int, e nvc0.PTE) {
	page, at := uint64(nvc0.PageSize), smallAt[i]
	if large {
		page, at = nvc0.LargePage, largeAt[i]
	}
	if m.mode != Para {
		m.r.poke(1, at+8*uint64(n), uint64(e))
		return
	}
	va := uint64(16+i)*nvc0.TableSpan + uint64(n)*page
	high := uint32(va >> 32)
	if large {
		high |= 1 << 31
	}
	if s := m.r.slot(1, 7, call(ParaMapPages, 2, uint32(va), high, 1, uint32(e), uint32(e>>32))...); s != ParaDone {
		m.r.slot(1, 5, call(ParaUnmap, 2, uint32(va), high, 1)...)
	}
}

func (m *mapper) flush() {
	m.r.set(1, nvc0.RegTLBSpace, 0x300)
	m.r.set(1, nvc0.RegTLBTrigger, 1<<31|1)
}

// use makes the hardware use the space: a doorbell.
func (m *mapper) use() {
	m.r.store(1, 1, 0x06000000+nvc0.UserdIBPut, 4, uint64(m.v.channels[0].put+1)&511)
	m.r.settle()
}

// shadow is the hardware's tables, with each table's address taken out, and the VM's base.
func (m *mapper) shadow() string {
	s := m.v.channels[0].space
	var out []byte
	for _, i := range slices.Sorted(maps.Keys(s.tables)) {
		t := s.tables[i]
		var pde [8]byte
		m.r.hw.Load(nvc0.Mediator, s.shadow+HostPA(8*i), pde[:])
		d := nvc0.PDE(binary.LittleEndian.Uint64(pde[:]))
		if d != nvc0.MakePDE(t.large, t.small, t.size) {
			return fmt.Sprintf("entry %d is %#x and should be of %+v", i, uint64(d), t)
		}
		out = fmt.Appendf(out, "%d: %v %v %d\n", i, t.large != 0, t.small != 0, t.size)
		for _, part := range []struct {
			at HostPA
			n  int
		}{{t.large, nvc0.LargeEntries >> t.size}, {t.small, nvc0.SmallEntries >> t.size}} {
			if part.at == 0 {
				continue
			}
			b := make([]byte, 8*part.n)
			m.r.hw.Load(nvc0.Mediator, part.at, b)
			out = append(out, b...)
		}
	}
	return string(out)
}

// change is one that a VM makes, in all modes.
type change struct {
	kind         int
	i, n         int
	large, small bool
	e            nvc0.PTE
}

func drawChange(t *rapid.T) change {
	return change{
		kind: rapid.SampledFrom([]int{0, 1, 1, 1, 1, 1, 2, 3}).Draw(t, "kind"),
		i:    rapid.IntRange(0, 2).Draw(t, "table"), n: rapid.IntRange(0, 20).Draw(t, "entry"),
		large: rapid.Bool().Draw(t, "large"), small: rapid.Bool().Draw(t, "small"),
		e: nvc0.MakePTE(
			rapid.SampledFrom([]uint64{0, 0x20000, 0x1000, 0x200000, 4*mib - 4096, 4*mib - nvc0.LargePage, 4 * mib, mib - 4096, mib}).Draw(t, "page"),
			uint8(rapid.IntRange(0, 3).Draw(t, "target")), rapid.Bool().Draw(t, "read-only")) |
			nvc0.PTE(rapid.SampledFrom([]uint64{0, 0, 0, 1 << 32, 0xfe << 36, 1 << 36, 1 << 45}).Draw(t, "bits")),
	}
}

// want is what an entry has to become, by the rules and not by the mediator's code.
func want(e nvc0.PTE, v *VGPU, large bool) (nvc0.PTE, bool) {
	page := uint64(4096)
	if large {
		page = 128 << 10
	}
	at, kind := e.Addr(), uint64(e)>>36&0xff
	if at%page != 0 || kind != 0 && kind != 0xfe || uint64(e)>>44&0x1ffff != 0 {
		return 0, false
	}
	switch e.Target() {
	case 0:
		if at+page > 4*mib {
			return 0, false
		}
		at += uint64(v.base)
	case 2, 3:
		if at+page > mib {
			return 0, false
		}
		at += v.window64
	default:
		return 0, false
	}
	return e&^0xfffffff0 | nvc0.PTE(at>>12<<4), true
}

// TestModesHaveTheSameShadow is P5: after a flush and at the next use, eager, lazy and
// para-virtual tables are the same bit for bit, and each entry is what it has to be.
func TestModesHaveTheSameShadow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var all []*mapper
		for _, mode := range everyMode {
			all = append(all, newMapper(t, mode))
		}
		type place struct {
			i     int
			large bool
			n     int
		}
		has := map[int][2]bool{}
		entries := map[place]nvc0.PTE{}
		for range rapid.IntRange(1, 40).Draw(t, "changes") {
			c := drawChange(t)
			switch c.kind {
			case 0:
				for _, m := range all {
					m.tables(c.i, c.large, c.small)
				}
				// An entry of a VM's table stays when the directory lets go of it. A para-virtual table is gone. So
				// only tables that were not there before are changed, and emptied first.
				for p := range entries {
					if p.i == c.i && (p.large && !c.large || !p.large && !c.small) {
						for _, m := range all {
							if m.mode != Para {
								m.entry(p.i, p.large, p.n, 0)
							}
						}
						delete(entries, p)
					}
				}
				has[c.i] = [2]bool{c.large, c.small}
			case 1:
				if h := has[c.i]; c.large && !h[0] || !c.large && !h[1] {
					continue
				}
				for _, m := range all {
					m.entry(c.i, c.large, c.n, c.e)
				}
				entries[place{c.i, c.large, c.n}] = c.e
			case 2:
				for _, m := range all {
					m.flush()
				}
			default:
				for _, m := range all {
					m.flush()
					m.use()
				}
			}
		}
		for _, m := range all {
			m.flush()
			m.use()
		}
		first := all[0].shadow()
		for _, m := range all {
			if m.shadow() != first {
				t.Fatalf("%s has another shadow than %s", m.mode, all[0].mode)
			}
			if m.v.channels[0].dead && m.r.refused(1, mmio.BadCommand) == 0 {
				t.Fatalf("%s: the channel was stopped", m.mode)
			}
		}
		for p, e := range entries {
			s := all[0].v.channels[0].space
			at := s.tables[16+p.i].small
			if p.large {
				at = s.tables[16+p.i].large
			}
			var b [8]byte
			all[0].r.hw.Load(nvc0.Mediator, at+HostPA(8*p.n), b[:])
			good, ok := want(e, all[0].v, p.large)
			if have := nvc0.PTE(binary.LittleEndian.Uint64(b[:])); have != good || ok != have.Present() {
				t.Fatalf("%+v: %#x became %#x, want %#x", p, uint64(e), uint64(have), uint64(good))
			}
		}
	})
}

// TestLazyReadsBeforeUse: what was changed and flushed is there when a command runs, for
// each way to use it.
func TestLazyReadsBeforeUse(t *testing.T) {
	for name, use := range map[string]func(*rig, *mapper){
		"a doorbell": func(_ *rig, m *mapper) { m.use() },
		"a bind": func(r *rig, _ *mapper) {
			r.set(1, 0x409500, 1<<31|2)
			r.set(1, 0x409504, 3)
		},
	} {
		m := newMapper(t, Lazy)
		scans := m.v.Stats().Total().Scans
		m.tables(0, false, true)
		for n := range 10 {
			m.entry(0, false, n, nvc0.MakePTE(0x200000, 0, false))
			m.flush()
		}
		if n := m.v.Stats().Total().Scans; n != scans {
			t.Errorf("%s: %d scans before the use", name, n-scans)
		}
		use(m.r, m)
		if n := m.v.Stats().Total().Scans; n != scans+1 {
			t.Errorf("%s: %d scans", name, n-scans)
		}
		if e := shadowPTE(m.r, m.v.channels[0].space, 16*nvc0.TableSpan+9*nvc0.PageSize); !e.Present() {
			t.Errorf("%s: the last page is not there", name)
		}
	}
}

// TestUnmappedPageFaults: the hardware's TLB has no more what the VM has taken out and
// flushed, in each mode.
func TestUnmappedPageFaults(t *testing.T) {
	for _, mode := range everyMode {
		m := newMapper(t, mode)
		d := m.d
		buf, err := d.Alloc(4096)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Launch(nvc0.KernelFill, buf, buf, buf, 1, 64); err != nil {
			t.Fatal(err)
		}
		if err := d.Wait(); err != nil {
			t.Fatal(err)
		}
		if mode == Para {
			m.r.slot(1, 5, call(ParaUnmap, 2, uint32(buf.VA), 0, 1)...)
		} else {
			m.r.poke(1, 0x60000+(buf.VA-0x20000000)/4096*8, 0)
			m.flush()
		}
		if err := d.Launch(nvc0.KernelFill, buf, buf, buf, 2, 64); err != nil {
			t.Fatal(err)
		}
		if m.r.settle(); !m.v.channels[0].dead {
			t.Errorf("%s: the kernel ran", mode)
		}
	}
}
