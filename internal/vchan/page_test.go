package vchan

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
)

func TestRings(t *testing.T) {
	for _, c := range []struct {
		left, right uint32
		bad         bool
	}{
		{10, 11, false},
		{11, 10, false},
		{12, 12, false},
		{20, 20, false},
		{10, 12, false},
		{20, 11, false},
		{18, 18, false},
		{9, 12, true},
		{12, 9, true},
		{21, 12, true},
		{12, 21, true},
		{0, 0, true},
		{0xffff, 12, true},
		{12, 0xffff, true},
		{10, 10, true},
		{11, 11, true},
		{10, 20, true},
		{20, 10, true}, // 256 grants end behind the ring's start
	} {
		left, right, err := ringsOf(c.left, c.right)
		if (err != nil) != c.bad || c.bad && !errors.Is(err, ErrProtocol) {
			t.Errorf("%d, %d: %v", c.left, c.right, err)
		}
		if err == nil && (left.size != 1<<c.left || right.size != 1<<c.right) {
			t.Errorf("%d, %d: %d and %d bytes", c.left, c.right, left.size, right.size)
		}
	}
	for size, want := range map[int]uint32{0: 18, 1: 10, 1024: 10, 1025: 11, 2048: 11, 2049: 12, 4096: 12, 4097: 13, MaxRing: 20} {
		if got, err := order(size); err != nil || got != want {
			t.Errorf("%d bytes: order %d, %v; want %d", size, got, err, want)
		}
	}
	for _, size := range []int{-1, MaxRing + 1} {
		if _, err := order(size); err == nil {
			t.Errorf("%d bytes are no error", size)
		}
	}
}

// halves are both ends of one ring, whose indexes begin at start.
func halves(page []byte, size int, start uint32) (w, r *half) {
	*word(page, 0), *word(page, 4) = start, start
	ring := make([]byte, size)
	return &half{ring: ring, own: start, mine: word(page, 4), theirs: word(page, 0)},
		&half{ring: ring, own: start, mine: word(page, 0), theirs: word(page, 4)}
}

// The indexes run over, and the ring's end is anywhere.
func TestIndexesRunOver(t *testing.T) {
	w, r := halves(make([]byte, pageSize), 1024, ^uint32(0)-5000)
	rnd := rand.New(rand.NewPCG(1, 2))
	var in, out byte
	p := make([]byte, 2000)
	for range 5000 {
		n, err := w.space()
		if err != nil {
			t.Fatal(err)
		}
		want := rnd.IntN(1500)
		for i := range want {
			p[i] = in + byte(i)
		}
		in += byte(w.write(p[:want], n))
		if n, err = r.ready(); err != nil {
			t.Fatal(err)
		}
		got := p[:r.read(p[:rnd.IntN(1500)], n)]
		for i, b := range got {
			if b != out+byte(i) {
				t.Fatalf("byte %d of %d is %d, want %d", i, len(got), b, out+byte(i))
			}
		}
		out += byte(len(got))
	}
	if w.own > 1<<31 {
		t.Error("the index has not run over")
	}
}

func FuzzPage(f *testing.F) {
	page := make([]byte, pageSize)
	f.Add(page)
	good := bytes.Clone(page)
	*word(good, offOrders) = 12 | 12<<16
	*word(good, offGrants) = 8
	f.Add(good)
	inPage := bytes.Clone(page)
	*word(inPage, offOrders) = 10 | 11<<16
	*word(inPage, offLeft+4) = 1000
	f.Add(inPage)
	f.Fuzz(func(t *testing.T, in []byte) {
		page := make([]byte, pageSize)
		copy(page, in)
		left, right, err := readOrders(page)
		if err != nil {
			if !errors.Is(err, ErrProtocol) {
				t.Error(err)
			}
			return
		}
		l, r := readGrants(page, left, right)
		if len(l) != left.pages || len(r) != right.pages || left.pages > 256 || right.pages > 256 {
			t.Errorf("%d and %d grants", len(l), len(r))
		}
		for _, p := range []place{left, right} {
			if p.pages == 0 && p.offset+p.size > pageSize || p.pages > 0 && p.pages*pageSize != p.size {
				t.Errorf("%+v", p)
			}
			at := offLeft
			h := &half{ring: make([]byte, p.size), own: *word(page, at), mine: word(page, at), theirs: word(page, at+4)}
			for i := range 8 {
				buf := make([]byte, 1+i*p.size/4)
				if n, err := h.ready(); err == nil && h.read(buf, n) > p.size {
					t.Error("more than the ring has")
				}
				if n, err := h.space(); err == nil && h.write(buf, n) > p.size {
					t.Error("more than the ring has")
				}
				atomic.StoreUint32(h.theirs, *word(page, 4*i)*2654435761)
			}
		}
	})
}
