package arena

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// check checks the invariants of the allocator.
func check(t interface{ Fatalf(string, ...any) }, a *Allocator) {
	var free uint64
	for i, e := range a.free {
		if e.size == 0 || e.off%Page != 0 || e.size%Page != 0 || e.end() > a.size {
			t.Fatalf("free extent %+v", e)
		}
		if i > 0 && a.free[i-1].end() >= e.off {
			t.Fatalf("free extents %+v and %+v", a.free[i-1], e)
		}
		free += e.size
	}
	owner := map[uint64]uint64{} // allocation by page
	var used uint64
	for off, size := range a.live {
		used += size
		for p := off; p < off+size; p += Page {
			if o, ok := owner[p]; ok {
				t.Fatalf("page %d belongs to %d and %d", p, o, off)
			}
			owner[p] = off
		}
	}
	if used != a.used || used+free != a.size {
		t.Fatalf("%d used, %d counted, %d free, %d in all", used, a.used, free, a.size)
	}
	for _, e := range a.free {
		for p := e.off; p < e.end(); p += Page {
			if o, ok := owner[p]; ok {
				t.Fatalf("page %d is free and belongs to %d", p, o)
			}
		}
	}
}

func TestInvariants(t *testing.T) {
	sizes := rapid.OneOf(rapid.Uint64Range(1, 20*Page), rapid.Uint64Range(Huge-Page, 3*Huge))
	rapid.Check(t, func(t *rapid.T) {
		a := New(rapid.Uint64Range(1, 8*Huge/Page).Draw(t, "pages") * Page)
		model := map[uint64]uint64{}
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) { check(t, a) },
			"alloc": func(t *rapid.T) {
				size := sizes.Draw(t, "size")
				off, err := a.Alloc(size)
				if errors.Is(err, ErrFull) {
					for _, e := range a.free {
						if e.size >= roundUp(size, Page) && (size <= Huge-Page || e.size >= roundUp(size, Page)+Huge) {
							t.Fatalf("%d bytes do not fit into %+v", size, e)
						}
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				if off%Page != 0 || size >= Huge && off%Huge != 0 {
					t.Fatalf("%d bytes at %d", size, off)
				}
				model[off] = size
			},
			"free": func(t *rapid.T) {
				if len(model) == 0 {
					t.Skip()
				}
				off := rapid.SampledFrom(sortedKeys(model)).Draw(t, "off")
				size, err := a.Free(off)
				if err != nil || size != roundUp(model[off], Page) {
					t.Fatalf("free %d: %d, %v", off, size, err)
				}
				if _, err := a.Free(off); !errors.Is(err, ErrNotAllocated) {
					t.Fatalf("freed twice: %v", err)
				}
				delete(model, off)
			},
			"reserve": func(t *rapid.T) {
				off, size := rapid.Uint64Range(0, a.size/Page).Draw(t, "page")*Page, sizes.Draw(t, "size")
				overlaps := false
				for o, s := range model {
					overlaps = overlaps || off < o+roundUp(s, Page) && o < off+roundUp(size, Page)
				}
				want := error(nil)
				switch {
				case off+roundUp(size, Page) > a.size:
					want = ErrInvalid
				case overlaps:
					want = ErrInUse
				default:
					model[off] = size
				}
				if err := a.Reserve(off, size); !errors.Is(err, want) {
					t.Fatalf("reserve %d at %d: %v, want %v", size, off, err, want)
				}
			},
			"rebuild": func(t *rapid.T) {
				b := New(a.size)
				for off, size := range model {
					if err := b.Reserve(off, size); err != nil {
						t.Fatal(err)
					}
				}
				check(t, b)
				if b.Used() != a.Used() || len(b.free) != len(a.free) {
					t.Fatalf("%d used in %d extents, want %d in %d", b.Used(), len(b.free), a.Used(), len(a.free))
				}
				a = b
			},
		})
		for off := range model {
			if _, err := a.Free(off); err != nil {
				t.Fatal(err)
			}
		}
		if a.Used() != 0 || len(a.free) != 1 || a.free[0].size != a.size {
			t.Fatalf("not all free again: %d used, %+v", a.Used(), a.free)
		}
	})
}

func sortedKeys(m map[uint64]uint64) []uint64 {
	return slices.Sorted(maps.Keys(m))
}

func TestBestFit(t *testing.T) {
	a := New(16 * Page)
	var offs []uint64
	for _, n := range []uint64{1, 4, 1, 2, 1} { // then 7 free pages
		off, err := a.Alloc(n * Page)
		if err != nil {
			t.Fatal(err)
		}
		offs = append(offs, off)
	}
	a.Free(offs[1])
	a.Free(offs[3])
	if off, _ := a.Alloc(2 * Page); off != offs[3] {
		t.Errorf("2 pages went to %d, not into the hole of 2 at %d", off, offs[3])
	}
	if off, _ := a.Alloc(3 * Page); off != offs[1] {
		t.Errorf("3 pages went to %d, not into the hole of 4 at %d", off, offs[1])
	}
}

func TestInvalid(t *testing.T) {
	if a := New(2*Page - 1); a.Size() != Page {
		t.Errorf("%d bytes of a page and a part", a.Size())
	}
	a := New(4 * Page)
	if _, err := a.Alloc(0); !errors.Is(err, ErrInvalid) {
		t.Errorf("nothing: %v", err)
	}
	for _, size := range []uint64{4*Page + 1, ^uint64(0)} {
		if _, err := a.Alloc(size); !errors.Is(err, ErrFull) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	for _, r := range []extent{{1, Page}, {0, 0}, {0, ^uint64(0)}, {^uint64(Page - 1), Page}, {4 * Page, Page}, {0, 4*Page + 1}} {
		if err := a.Reserve(r.off, r.size); !errors.Is(err, ErrInvalid) {
			t.Errorf("reserve %+v: %v", r, err)
		}
	}
	empty := New(0)
	if _, err := empty.Alloc(1); !errors.Is(err, ErrFull) {
		t.Errorf("empty arena: %v", err)
	}
}

func BenchmarkAllocFree(b *testing.B) {
	a := New(1 << 40)
	offs := make([]uint64, 4096)
	for i := range offs {
		offs[i], _ = a.Alloc(uint64(1+i%64) * Page)
	}
	for i := 0; i < len(offs); i += 2 { // 2048 holes
		a.Free(offs[i])
	}
	for b.Loop() {
		off, _ := a.Alloc(30 * Page)
		a.Free(off)
	}
}

// An allocation that is restricted to bounds is inside them, or there is no room there.
func TestAllocIn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 8 * Huge
		a := New(size)
		for range rapid.IntRange(0, 20).Draw(t, "before") {
			_ = a.Reserve(rapid.Uint64Range(0, size/Page-1).Draw(t, "at")*Page, rapid.Uint64Range(1, Huge).Draw(t, "size"))
		}
		lo := rapid.Uint64Range(0, size/Page).Draw(t, "lo") * Page
		hi := rapid.Uint64Range(lo/Page, size/Page).Draw(t, "hi") * Page
		want := rapid.Uint64Range(1, 2*Huge).Draw(t, "want")
		room := false
		a.Gaps(lo, hi, func(off, n uint64) {
			if off < lo || off+n > hi {
				t.Fatalf("gap of %d bytes at %d in [%d, %d)", n, off, lo, hi)
			}
			align := uint64(Page)
			if roundUp(want, Page) >= Huge {
				align = Huge
			}
			if at := roundUp(off, align); at+roundUp(want, Page) <= off+n {
				room = true
			}
		})
		off, err := a.AllocIn(want, lo, hi)
		if (err == nil) != room {
			t.Fatalf("%d bytes in [%d, %d): %v, room %v", want, lo, hi, err, room)
		}
		if err == nil && (off < lo || off+roundUp(want, Page) > hi) {
			t.Fatalf("%d bytes at %d in [%d, %d)", want, off, lo, hi)
		}
		check(t, a)
	})
}
