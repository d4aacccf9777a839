package executor

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/arena"
)

func (c *client) hostMemory() *hostMemory {
	c.t.Helper()
	h, err := takeHostMemory(c.arena, c.ring.FD(), testSplit, -1)
	if err != nil {
		c.t.Fatal(err)
	}
	return &h
}

// Two living executors never share memory, whatever executors there were before.
func TestLivingExecutorsHavePartsOfTheirOwn(t *testing.T) {
	c := newClient(t)
	var hs []*hostMemory
	taken := map[int]bool{}
	for range arenaParts {
		h := c.hostMemory()
		if taken[h.own] {
			t.Fatalf("part %d was given away twice", h.own)
		}
		taken[h.own] = true
		hs = append(hs, h)
		lo, hi := h.bounds(h.own)
		for _, size := range []uint64{1, arena.Page, arena.Huge, h.size / 2} {
			if off, err := h.alloc(size); err != nil || off < lo || off+size > hi {
				t.Fatalf("%d bytes of part %d at %#x: %v", size, h.own, off, err)
			}
		}
	}
	if _, err := takeHostMemory(c.arena, c.ring.FD(), testSplit, -1); !errors.Is(err, ErrOwned) {
		t.Fatalf("a part for one executor too many: %v", err)
	}
	hs[1].end()
	if h := c.hostMemory(); h.own != 1 {
		t.Fatalf("part %d, not the one whose executor has ended", h.own)
	}
}

// Memory that the source of a swap holds in the target's part does not change, even if no
// live object of the graph uses it: a kernel may still read a released buffer.
func TestTargetSparesWhatItsSourceStillReads(t *testing.T) {
	c := newClient(t)
	first, source := c.hostMemory(), c.hostMemory()
	off, err := first.alloc(arena.Page)
	if err != nil {
		t.Fatal(err)
	}
	c.arena.Bytes()[off] = 7
	if err := source.begin(first.own, nil); err != nil {
		t.Fatal(err)
	}
	if err := source.inherit(off, arena.Page); err != nil {
		t.Fatal(err)
	}
	first.end()
	source.reclaim()
	target := c.hostMemory()
	if target.own != first.own {
		t.Fatalf("the target has part %d, not the first one's, %d", target.own, first.own)
	}
	if err := target.begin(source.own, source.held()); err != nil {
		t.Fatal(err)
	}
	target.sweep(target.own)
	if n, err := target.alloc(arena.Page); err != nil || n == off {
		t.Fatalf("the range at %#x was given away again: %v", off, err)
	}
	target.free(off)
	target.reclaim() // it frees nothing of the source, which is alive
	if c.arena.Bytes()[off] != 7 {
		t.Fatal("the source's bytes are gone")
	}
	source.end()
	if !target.reclaim() || c.arena.Bytes()[off] != 0 {
		t.Fatal("what nobody needs was kept")
	}
}

// The executor that resumes a session may get the part of the executor that has ended, and
// keeps the memory that live objects have in it.
func TestResumedExecutorKeepsWhatItsPartHeld(t *testing.T) {
	c := newClient(t)
	former := c.hostMemory()
	var offs [2]uint64
	for i := range offs {
		var err error
		if offs[i], err = former.alloc(arena.Page); err != nil {
			t.Fatal(err)
		}
		c.arena.Bytes()[offs[i]] = 7
	}
	former.end()
	next := c.hostMemory()
	if err := errors.Join(next.begin(former.own, nil), next.inherit(offs[1], arena.Page)); err != nil {
		t.Fatal(err)
	}
	next.sweep(next.own)
	next.reclaim()
	if c.arena.Bytes()[offs[0]] != 0 || c.arena.Bytes()[offs[1]] != 7 {
		t.Fatal("the wrong bytes were kept")
	}
	next.free(offs[1])
	if c.arena.Bytes()[offs[1]] != 0 {
		t.Fatal("what was inherited of an executor that has ended is not its heir's")
	}
}

// A range with two owners makes the operation fail.
func TestMemoryWithTwoOwnersIsAnError(t *testing.T) {
	c := newClient(t)
	source, target := c.hostMemory(), c.hostMemory()
	off, err := source.alloc(3 * arena.Page)
	if err != nil {
		t.Fatal(err)
	}
	if err := target.begin(source.own, nil); err != nil {
		t.Fatal(err)
	}
	if err := target.inherit(off, 3*arena.Page); err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]span{
		"its middle":   {off + arena.Page, arena.Page},
		"less":         {off, arena.Page},
		"more":         {off, 4 * arena.Page},
		"outside":      {target.size * arenaParts, arena.Page},
		"not a page":   {off + 8*arena.Page + 1, arena.Page},
		"no bytes":     {off + 8*arena.Page, 0},
		"all there is": {0, ^uint64(0)},
	} {
		if err := target.inherit(x.Off, x.Size); !errors.Is(err, ErrOwned) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// end releases the part, as the end of the process does.
func (h *hostMemory) end() { _ = unix.Close(h.locks) }
