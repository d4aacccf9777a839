package mediate

import (
	"slices"

	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// extent is consecutive units of something.
type extent struct{ at, n int }

// pool gives out consecutive units, the first that fit.
type pool struct{ free []extent }

func (p *pool) take(n int) (at int, ok bool) {
	for i, e := range p.free {
		if n > e.n {
			continue
		}
		var rest []extent
		if n < e.n {
			rest = append(rest, extent{e.at + n, e.n - n})
		}
		p.free = slices.Replace(p.free, i, i+1, rest...)
		return e.at, true
	}
	return 0, false
}

func (p *pool) give(at, n int) {
	i, _ := slices.BinarySearchFunc(p.free, at, func(e extent, at int) int { return e.at - at })
	p.free = slices.Insert(p.free, i, extent{at, n})
	if i+1 < len(p.free) && at+n == p.free[i+1].at {
		p.free[i].n += p.free[i+1].n
		p.free = slices.Delete(p.free, i+1, i+2)
	}
	if i > 0 && p.free[i-1].at+p.free[i-1].n == at {
		p.free[i-1].n += p.free[i].n
		p.free = slices.Delete(p.free, i, i+1)
	}
}

func (p *pool) left() (n int) {
	for _, e := range p.free {
		n += e.n
	}
	return n
}

// frames takes consecutive frames of the mediator's memory for a VM. They are zero.
func (v *VGPU) frames(n int, use nvc0.Use) (HostPA, bool) {
	if v.tables+n > v.request.Tables { //check:quota
		return 0, false
	}
	at, ok := v.g.shadow.take(n)
	if !ok {
		return 0, false
	}
	pa := HostPA(at) * nvc0.PageSize
	if err := v.g.hw.Tag(pa, uint64(n)*nvc0.PageSize, nvc0.Mediator, v.holder(use), use); err != nil {
		v.tell("frames of the mediator are withdrawn, as they are not its own: " + err.Error())
		return 0, false
	}
	v.tables += n
	return pa, true
}

// holder is whose the frames of a use are.
func (v *VGPU) holder(use nvc0.Use) nvc0.Owner {
	if use == nvc0.Userd {
		return v.owner
	}
	return nvc0.Mediator
}

// release scrubs frames and gives them back.
func (v *VGPU) release(at HostPA, n int, use nvc0.Use) {
	size := uint64(n) * nvc0.PageSize
	v.g.zero(nvc0.Mediator, at, size) //check:scrub-tables
	v.tables -= n
	if err := v.g.hw.Tag(at, size, v.holder(use), nvc0.Mediator, nvc0.Table); err != nil {
		v.tell("frames of the mediator are withdrawn, as they are not its own: " + err.Error())
		return
	}
	v.g.shadow.give(int(at/nvc0.PageSize), n)
}

// zero clears memory.
func (g *GPU) zero(on nvc0.Owner, at HostPA, size uint64) {
	for done := uint64(0); done < size; done += uint64(len(g.zeros)) {
		g.hw.Store(on, at+HostPA(done), g.zeros[:min(uint64(len(g.zeros)), size-done)])
	}
}
