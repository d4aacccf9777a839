package arena

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Granularities in bytes.
const (
	Page = 4 << 10
	Huge = 2 << 20
)

// Errors of an allocator.
var (
	// ErrFull is returned when no free extent is large enough.
	ErrFull = errors.New("arena full")
	// ErrInvalid is returned for a size of 0, and for an invalid offset or size.
	ErrInvalid = errors.New("invalid range")
	// ErrInUse is returned by Reserve if a part of the range is not free.
	ErrInUse = errors.New("range in use")
	// ErrNotAllocated is returned by Free for an offset where no allocation begins.
	ErrNotAllocated = errors.New("not allocated")
)

type extent struct{ off, size uint64 }

func (e extent) end() uint64 { return e.off + e.size }

// within returns the part of the extent in [lo, hi). Its size is 0 if there is none.
func (e extent) within(lo, hi uint64) extent {
	off, end := max(e.off, lo), min(e.end(), hi)
	return extent{off, max(end, off) - off}
}

// Allocator allocates ranges of [0, size). It is safe for concurrent use.
type Allocator struct {
	size uint64

	mu   sync.Mutex
	free []extent          // sorted by offset; none is empty, and no two touch each other
	live map[uint64]uint64 // size by offset
	used uint64
}

// New returns an allocator of size bytes, rounded down to whole pages. All of them are
// free.
func New(size uint64) *Allocator {
	size &^= Page - 1
	a := &Allocator{size: size, live: map[uint64]uint64{}}
	if size > 0 {
		a.free = []extent{{0, size}}
	}
	return a
}

// Alloc allocates size bytes, rounded up to pages, in the smallest free extent that they
// fit into. It returns their offset.
func (a *Allocator) Alloc(size uint64) (off uint64, err error) { return a.AllocIn(size, 0, a.size) }

// AllocIn is Alloc restricted to [lo, hi).
func (a *Allocator) AllocIn(size, lo, hi uint64) (off uint64, err error) {
	if size == 0 {
		return 0, fmt.Errorf("allocate 0 bytes: %w", ErrInvalid)
	}
	if lo > hi || hi > a.size || size > hi-lo {
		return 0, fmt.Errorf("allocate %d bytes: %w", size, ErrFull)
	}
	size = roundUp(size, Page)
	align := uint64(Page)
	if size >= Huge {
		align = Huge
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	best, room := -1, uint64(0)
	for i, e := range a.free {
		e = e.within(lo, hi)
		if at := roundUp(e.off, align); e.size > 0 && at <= e.end() && size <= e.end()-at && (best < 0 || e.size < room) {
			best, room = i, e.size
		}
	}
	if best < 0 {
		return 0, fmt.Errorf("allocate %d bytes, %d of %d used: %w", size, a.used, a.size, ErrFull)
	}
	off = roundUp(a.free[best].within(lo, hi).off, align)
	a.take(best, extent{off, size})
	return off, nil
}

// Gaps calls f for each range of [lo, hi) that is free, in order.
func (a *Allocator) Gaps(lo, hi uint64, f func(off, size uint64)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, e := range a.free {
		if e = e.within(lo, hi); e.size > 0 {
			f(e.off, e.size)
		}
	}
}

// Live calls f for each allocation, with its size in whole pages.
func (a *Allocator) Live(f func(off, size uint64)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for off, size := range a.live {
		f(off, size)
	}
}

// Free frees the allocation that begins at off and returns its size.
func (a *Allocator) Free(off uint64) (size uint64, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	size, ok := a.live[off]
	if !ok {
		return 0, fmt.Errorf("free %d: %w", off, ErrNotAllocated)
	}
	delete(a.live, off)
	a.used -= size
	i := a.after(off)
	joinsNext := i < len(a.free) && a.free[i].off == off+size
	joinsLast := i > 0 && a.free[i-1].end() == off
	switch {
	case joinsLast && joinsNext:
		a.free[i-1].size += size + a.free[i].size
		a.free = slices.Delete(a.free, i, i+1)
	case joinsLast:
		a.free[i-1].size += size
	case joinsNext:
		a.free[i] = extent{off, size + a.free[i].size}
	default:
		a.free = slices.Insert(a.free, i, extent{off, size})
	}
	return size, nil
}

// Reserve allocates a given range. It is for rebuilding an allocator from a session's
// graph. The size is rounded up to pages, as in Alloc.
func (a *Allocator) Reserve(off, size uint64) error {
	if off%Page != 0 || size == 0 || size > a.size || off > a.size-roundUp(size, Page) {
		return fmt.Errorf("reserve %d bytes at %d of %d: %w", size, off, a.size, ErrInvalid)
	}
	want := extent{off, roundUp(size, Page)}
	a.mu.Lock()
	defer a.mu.Unlock()
	i := a.after(off+1) - 1
	if i < 0 || a.free[i].end() < want.end() {
		return fmt.Errorf("reserve %d bytes at %d: %w", size, off, ErrInUse)
	}
	a.take(i, want)
	return nil
}

// Used returns how many bytes are allocated, in whole pages.
func (a *Allocator) Used() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.used
}

// Size returns the number of bytes of the allocator.
func (a *Allocator) Size() uint64 { return a.size }

// take removes a range from free extent i, which contains it.
func (a *Allocator) take(i int, r extent) {
	e := a.free[i]
	before := extent{e.off, r.off - e.off}
	behind := extent{r.end(), e.end() - r.end()}
	switch {
	case before.size > 0 && behind.size > 0:
		a.free[i] = before
		a.free = slices.Insert(a.free, i+1, behind)
	case before.size > 0:
		a.free[i] = before
	case behind.size > 0:
		a.free[i] = behind
	default:
		a.free = slices.Delete(a.free, i, i+1)
	}
	a.live[r.off] = r.size
	a.used += r.size
}

// after returns the index of the first free extent at or after off.
func (a *Allocator) after(off uint64) int {
	i, _ := slices.BinarySearchFunc(a.free, off, func(e extent, off uint64) int {
		switch {
		case e.off < off:
			return -1
		case e.off > off:
			return 1
		}
		return 0
	})
	return i
}

// roundUp rounds up to a multiple of to, which is a power of two.
func roundUp(v, to uint64) uint64 { return (v + to - 1) &^ (to - 1) }
