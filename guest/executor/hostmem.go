package executor

import (
	"fmt"
	"maps"
	"slices"

	"github.com/gpuctl/gpuctl/guest/arena"
	"github.com/gpuctl/gpuctl/guest/shm"
)

// hostMemory hands out the executor's part of the arena. Two executors share
// it during a swap, so each allocates in a half of its own, by the parity of
// its generation, and inherits what live objects already hold in either.
type hostMemory struct {
	region    *shm.Region
	lo, hi    uint64
	own       *arena.Allocator
	inherited map[uint64]uint64 // offset → size, in the other half
	sizes     map[uint64]uint64
}

func newHostMemory(r *shm.Region, split uint64, generation uint32) hostMemory {
	half := split / 2 &^ (2<<20 - 1)
	lo := uint64(0)
	if generation%2 == 0 {
		lo = half
	}
	return hostMemory{
		region: r, lo: lo, hi: lo + half, own: arena.New(half),
		inherited: map[uint64]uint64{}, sizes: map[uint64]uint64{},
	}
}

func (h *hostMemory) alloc(size uint64) (uint64, error) {
	off, err := h.own.Alloc(size)
	if err != nil {
		return 0, fmt.Errorf("host memory for %d bytes: %w", size, err)
	}
	h.sizes[h.lo+off] = size
	return h.lo + off, nil
}

// inherit takes over a range that the session's former executor allocated.
func (h *hostMemory) inherit(off, size uint64) error {
	if h.sizes[off] != 0 {
		return nil
	}
	if off >= h.lo && off < h.hi {
		if err := h.own.Reserve(off-h.lo, size); err != nil {
			return fmt.Errorf("host memory at %#x: %w", off, err)
		}
	} else {
		h.inherited[off] = size
	}
	h.sizes[off] = size
	return nil
}

// free gives the range and its pages back; what was in it is gone.
func (h *hostMemory) free(off uint64) {
	if size, ok := h.disown(off); ok {
		_ = h.region.PunchHole(off, (size+4095)&^4095)
	}
}

// disown forgets the range but leaves its pages: another executor has it.
func (h *hostMemory) disown(off uint64) (size uint64, ok bool) {
	if size, ok = h.sizes[off]; !ok {
		return 0, false
	}
	delete(h.sizes, off)
	if _, other := h.inherited[off]; other {
		delete(h.inherited, off)
	} else {
		h.own.Free(off - h.lo)
	}
	return size, true
}

// sweep frees the pages of this executor's half that nobody holds: what an
// executor that was killed in the middle of a swap left there.
func (h *hostMemory) sweep() {
	at := h.lo
	for _, off := range slices.Sorted(maps.Keys(h.sizes)) {
		if off < h.lo || off >= h.hi {
			continue
		}
		_ = h.region.PunchHole(at, off-at)
		at = off + (h.sizes[off]+4095)&^4095
	}
	if at < h.hi {
		_ = h.region.PunchHole(at, h.hi-at)
	}
}
