package executor

import (
	"slices"
	"sync"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
)

// pins are the ranges in the arena that the driver has pinned, because transfers from
// pinned memory run at the speed of the bus.
//
// A device reaches a pinned range by its physical pages. If the range's pages are freed in
// the meantime, the device continues with the old ones, and what the application writes to
// the new ones never arrives. So a range is pinned only if no other process can free its
// pages (memory of this executor, and lanes), or if its owner has announced how long it will
// not free them (the window of a swap's source). hostMemory drops all pins of a range before
// it frees pages.
type pins struct {
	wanted bool // the device has memory of its own, and pinning makes transfers faster
	arena  *shm.Region

	mu   sync.Mutex
	held []pinned
}

type pinned struct {
	span
	ctx *clContext
	mem cl.Mem // makes the driver pin the range
}

// add pins a range for a context, if it is not pinned already.
func (p *pins) add(c *clContext, off, n uint64) {
	if !p.wanted {
		return
	}
	at := span{off, n}
	p.mu.Lock()
	defer p.mu.Unlock()
	if slices.ContainsFunc(p.held, func(x pinned) bool { return x.ctx == c && x.span == at }) {
		return
	}
	if m, st := cl.CreateBuffer(c.vendor, cl.MemReadWrite|cl.MemUseHostPtr, n, p.arena.Pointer(off)); st == cl.Success {
		p.held = append(p.held, pinned{at, c, m})
	}
}

// drop removes every pin that has bytes of the range.
func (p *pins) drop(off, n uint64) {
	p.dropIf(func(x pinned) bool { return x.Off < off+n && off < x.Off+x.Size })
}

// forget removes the pins of a context that is released.
func (p *pins) forget(c *clContext) {
	p.dropIf(func(x pinned) bool { return x.ctx == c })
}

func (p *pins) dropIf(is func(pinned) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = slices.DeleteFunc(p.held, func(x pinned) bool {
		if is(x) {
			cl.ReleaseMemObject(x.mem)
			return true
		}
		return false
	})
}
