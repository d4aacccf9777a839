package nvc0

import "fmt"

// FaultReason is why an address has no memory.
type FaultReason uint8

// The reasons, as the hardware numbers them.
const (
	FaultNoTable   FaultReason = 0
	FaultTooShort  FaultReason = 1
	FaultNoPage    FaultReason = 2
	FaultLimit     FaultReason = 3
	FaultNoChannel FaultReason = 4
	FaultReadOnly  FaultReason = 6
)

// Units that fault.
const (
	UnitGraph   = 0
	UnitSubfifo = 7
)

// Fault is an access of a channel to an address that has no memory for it.
type Fault struct {
	VA     uint64
	Reason FaultReason
	Unit   uint8
	Write  bool
}

func (f *Fault) Error() string {
	return fmt.Sprintf("unit %d: no memory at %#x (reason %d, write %v)", f.Unit, f.VA, f.Reason, f.Write)
}

type tlbKey struct {
	directory HostPA
	page      uint64
}

const tlbEntries = 1024

// translate finds the page of an address, in the TLB or in the tables.
func (g *GPU) translate(c *channel, va uint64, write bool, unit uint8) (PTE, *Fault) {
	fault := func(r FaultReason) (PTE, *Fault) {
		return 0, &Fault{VA: va, Reason: r, Unit: unit, Write: write}
	}
	if va>>AddressBits != 0 || va > c.limit {
		return fault(FaultLimit)
	}
	key := tlbKey{c.directory, va >> 12}
	e, ok := g.tlb[key]
	if !ok {
		var r FaultReason
		var found bool
		if e, r, found = g.walk(c.owner, c.directory, va); !found {
			return fault(r)
		}
		if len(g.tlbOrder) >= tlbEntries {
			delete(g.tlb, g.tlbOrder[0])
			g.tlbOrder = g.tlbOrder[1:]
		}
		g.tlb[key] = e
		g.tlbOrder = append(g.tlbOrder, key)
	}
	if write && e.ReadOnly() {
		return fault(FaultReadOnly)
	}
	return e, nil
}

// walk reads the tables. The entry is of the small page at va, whatever size the
// page has.
func (g *GPU) walk(on Owner, directory HostPA, va uint64) (PTE, FaultReason, bool) {
	raw, ok := g.fetch64(on, directory+HostPA(va/TableSpan*8), "fetch of a page directory")
	if !ok {
		return 0, FaultNoTable, false
	}
	d := PDE(raw)
	large, lt := d.Large()
	small, st := d.Small()
	if lt != TableVRAM && st != TableVRAM {
		return 0, FaultNoTable, false
	}
	in := va % TableSpan
	if in >= d.Span() {
		return 0, FaultTooShort, false
	}
	if st == TableVRAM {
		raw, ok := g.fetch64(on, HostPA(small+in/PageSize*8), "fetch of a page table")
		if e := PTE(raw); ok && e.Present() {
			return e, 0, true
		}
	}
	if lt == TableVRAM {
		raw, ok := g.fetch64(on, HostPA(large+in/LargePage*8), "fetch of a page table")
		if e := PTE(raw); ok && e.Present() {
			off := in % LargePage &^ (PageSize - 1)
			return e&^0xfffffff0 | PTE((e.Addr()+off)>>12)<<4&0xfffffff0, 0, true
		}
	}
	return 0, FaultNoPage, false
}

// virtual reads or writes a channel's memory.
func (g *GPU) virtual(c *channel, va uint64, p []byte, write bool, unit uint8) *Fault {
	for len(p) > 0 {
		e, f := g.translate(c, va, write, unit)
		if f != nil {
			return f
		}
		n := min(len(p), int(PageSize-va%PageSize))
		at := e.Addr() + va%PageSize
		switch e.Target() {
		case TargetVRAM:
			if !g.access(c.owner, HostPA(at), p[:n], write, "access of an engine") {
				return &Fault{VA: va, Reason: FaultNoPage, Unit: unit, Write: write}
			}
		default:
			if g.config.Bus == nil || e.Target() == 1 || !g.config.Bus(c.owner, at, p[:n], write) {
				return &Fault{VA: va, Reason: FaultNoPage, Unit: unit, Write: write}
			}
		}
		p, va = p[n:], va+uint64(n)
	}
	return nil
}

func (g *GPU) flushTLB(directory HostPA, all bool) {
	keep := g.tlbOrder[:0]
	for _, k := range g.tlbOrder {
		if all || k.directory == directory {
			delete(g.tlb, k)
		} else {
			keep = append(keep, k)
		}
	}
	g.tlbOrder = keep
}
