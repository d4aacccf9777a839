package executor

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/arena"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// arenaParts is how many executors of a session may exist at the same time: the one that
// serves the session, the target of a swap, and earlier targets that a driver prevents from
// ending.
const arenaParts = wire.ArenaParts

// ErrOwned is returned for memory in the arena that another executor owns.
var ErrOwned = errors.New("memory of the arena has two owners")

// span is a range in the arena, in bytes.
type span struct{ Off, Size uint64 }

// hostMemory allocates memory in the executor's part of the arena. The executors of a
// session share the lower half of the arena, in which each has a part of its own. A lock,
// which ends with the process, tells all others that the part is owned. In addition to its
// part, an executor has the ranges that it has taken over: ranges of objects that were
// created by earlier executors, wherever they are. What the former executor of a swap still
// holds is foreign: it is in use, and this executor never changes or frees it.
type hostMemory struct {
	region  *shm.Region
	locks   int // an open file description of the ring, of our own; it has the locks of the parts and of the executor
	size    uint64
	own     int // number of the own part
	former  int // number of the part of the executor before this one; -1: there is none
	all     *arena.Allocator
	unpin   func(off, size uint64)   // called before pages are freed
	freed   func(off, size uint64)   // called after that; nil: nobody has to know
	foreign map[uint64]*foreignRange // by offset
}

type foreignRange struct {
	size uint64
	used bool // an object of this executor uses it, too
}

// takeHostMemory takes a part of [0, split) that no living executor owns.
// wanted is the number of the part; below 0, it is the first one.
func takeHostMemory(r *shm.Region, ringFD int, split uint64, wanted int) (hostMemory, error) {
	h := hostMemory{region: r, size: split / arenaParts &^ (arena.Huge - 1), former: -1, foreign: map[uint64]*foreignRange{}, unpin: func(uint64, uint64) {}}
	h.all = arena.New(h.size * arenaParts)
	var err error
	if h.locks, err = shm.Reopen(ringFD); err != nil {
		return h, fmt.Errorf("arena: %w", err)
	}
	for h.own = range arenaParts {
		if wanted >= 0 && h.own != wanted {
			continue
		}
		err = h.lock(h.own)
		if err == nil {
			return h, nil
		}
		if !errors.Is(err, shm.ErrLocked) {
			break
		}
	}
	_ = unix.Close(h.locks)
	return h, fmt.Errorf("every part of the session's memory belongs to an executor that has not ended: %w: %w", ErrOwned, err)
}

func (h *hostMemory) lock(part int) error { return shm.LockByte(h.locks, wire.LockPart+int64(part)) }

func (h *hostMemory) unlock(part int) { _ = shm.UnlockByte(h.locks, wire.LockPart+int64(part)) }

func (h *hostMemory) bounds(part int) (lo, hi uint64) {
	return uint64(part) * h.size, uint64(part+1) * h.size
}

func (h *hostMemory) alloc(size uint64) (uint64, error) {
	lo, hi := h.bounds(h.own)
	off, err := h.all.AllocIn(size, lo, hi)
	if err != nil {
		return 0, fmt.Errorf("host memory for %d bytes: %w", size, err)
	}
	return off, nil
}

// begin records what the former executor holds now, before one of its graphs is restored.
// A range that it held at the time of the last graph, and that no object uses, is
// forgotten. If the former executor had the part that this executor has, it has ended,
// because it has lost the lock.
func (h *hostMemory) begin(part int, held []span) error {
	h.former = part
	for off, f := range h.foreign {
		if !f.used {
			_, _ = h.all.Free(off)
			delete(h.foreign, off)
		}
	}
	for _, x := range held {
		if h.foreign[x.Off] != nil {
			continue
		}
		if err := h.reserve(x.Off, x.Size, false); err != nil {
			return err
		}
	}
	return nil
}

// inherit takes over a range that the former executor holds, for an object that is kept.
func (h *hostMemory) inherit(off, size uint64) error {
	f := h.foreign[off]
	switch {
	case f == nil:
		return h.reserve(off, size, true)
	case f.size != pages(size):
		return fmt.Errorf("%d bytes at %#x, of which %d are taken: %w", size, off, f.size, ErrOwned)
	}
	f.used = true
	return nil
}

func (h *hostMemory) reserve(off, size uint64, used bool) error {
	if err := h.all.Reserve(off, size); err != nil {
		return fmt.Errorf("%d bytes at %#x: %w: %w", size, off, ErrOwned, err)
	}
	h.foreign[off] = &foreignRange{pages(size), used}
	return nil
}

// free frees a range and its pages; the content is lost. A foreign range does not change
// until its other owner has ended.
func (h *hostMemory) free(off uint64) {
	if f := h.foreign[off]; f != nil {
		f.used = false
		return
	}
	if size, err := h.all.Free(off); err == nil {
		h.punch(off, size)
	}
}

// punch frees pages.
func (h *hostMemory) punch(off, size uint64) {
	h.unpin(off, size)
	_ = h.region.PunchHole(off, size)
	if h.freed != nil {
		h.freed(off, size)
	}
}

// settle is called when the former executor has ended and does not have the session any
// more. What it held belongs to this executor alone now. What no object uses is freed.
func (h *hostMemory) settle() {
	h.former = -1
	for off, f := range h.foreign {
		delete(h.foreign, off)
		if !f.used {
			h.free(off)
		}
	}
}

// held lists what this executor holds outside of its part.
func (h *hostMemory) held() []span {
	var out []span
	lo, hi := h.bounds(h.own)
	h.all.Live(func(off, size uint64) {
		if off < lo || off+size > hi {
			out = append(out, span{off, size})
		}
	})
	return out
}

// sweep frees the pages of a part that this executor does not use. An executor that has ended
// has left them. The part must be locked.
func (h *hostMemory) sweep(part int) {
	lo, hi := h.bounds(part)
	h.all.Gaps(lo, hi, h.punch)
}

// reclaim frees what executors that have ended left in their parts. It reports whether no
// other executor exists. Only the executor that serves the session may call it.
func (h *hostMemory) reclaim() (alone bool) {
	alone = true
	if h.former == h.own {
		h.settle()
	}
	for part := range arenaParts {
		if part == h.own {
			continue
		}
		if h.lock(part) != nil {
			alone = false
			continue
		}
		if part == h.former {
			h.settle()
		}
		h.sweep(part)
		h.unlock(part)
	}
	return alone
}

func pages(size uint64) uint64 { return (size + arena.Page - 1) &^ (arena.Page - 1) }
