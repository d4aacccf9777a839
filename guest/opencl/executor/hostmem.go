package executor

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/arena"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// arenaParts is how many executors of a session may be alive at once: the one
// that serves, the target of a swap, and earlier targets that a driver keeps
// from ending.
const arenaParts = wire.ArenaParts

// ErrOwned is returned for memory of the arena that somebody else has.
var ErrOwned = errors.New("memory of the arena has two owners")

// span is a range of the arena, in bytes.
type span struct{ Off, Size uint64 }

// hostMemory hands out the executor's part of the arena. The executors of a
// session share its lower half, each has a part of its own there, and the lock
// of that part, which ends with the process, says so to all others. Beside its
// part an executor has what it took over: ranges that live objects have had
// since an earlier executor, wherever they lie. What the former executor of a
// swap still holds is foreign: taken, but never changed or freed by this one.
type hostMemory struct {
	region  *shm.Region
	locks   int // a description of the ring of our own; its locks are the parts'
	size    uint64
	own     int // number of our part
	former  int // of the executor that this one takes over from; -1: there is none
	all     *arena.Allocator
	unpin   func(off, size uint64)   // called before pages are given back
	foreign map[uint64]*foreignRange // by offset
}

type foreignRange struct {
	size uint64
	used bool // an object of this executor has it, too
}

// takeHostMemory takes a part of [0, split) that no living executor has.
func takeHostMemory(r *shm.Region, ringFD int, split uint64) (hostMemory, error) {
	h := hostMemory{region: r, size: split / arenaParts &^ (arena.Huge - 1), former: -1, foreign: map[uint64]*foreignRange{}, unpin: func(uint64, uint64) {}}
	h.all = arena.New(h.size * arenaParts)
	var err error
	if h.locks, err = shm.Reopen(ringFD); err != nil {
		return h, fmt.Errorf("arena: %w", err)
	}
	for h.own = range arenaParts {
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

// begin takes in what the former executor holds now, before a graph of its is
// restored; what it held when the last graph was made and no object uses is
// forgotten. A former that had this executor's part has ended: it has lost the lock.
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

// inherit takes over a range that the former executor holds, for an object
// that lives on.
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

// free gives the range and its pages back; what was in it is gone. A foreign
// range stays as it is until its other owner has ended.
func (h *hostMemory) free(off uint64) {
	if f := h.foreign[off]; f != nil {
		f.used = false
		return
	}
	if size, err := h.all.Free(off); err == nil {
		h.punch(off, size)
	}
}

// punch gives pages back to the system.
func (h *hostMemory) punch(off, size uint64) {
	h.unpin(off, size)
	_ = h.region.PunchHole(off, size)
}

// settle is called when the former executor has ended and has the session no
// more: what it held belongs to this one alone, and what no object needs goes.
func (h *hostMemory) settle() {
	h.former = -1
	for off, f := range h.foreign {
		delete(h.foreign, off)
		if !f.used {
			h.free(off)
		}
	}
}

// held lists what this executor has outside of its part.
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

// sweep frees the pages of a part that this executor does not hold: what an
// executor that has ended left there. The part must be locked.
func (h *hostMemory) sweep(part int) {
	lo, hi := h.bounds(part)
	h.all.Gaps(lo, hi, h.punch)
}

// reclaim frees what executors that have ended left in their parts. It reports
// whether there is no other one left. Only who serves the session may call it.
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
