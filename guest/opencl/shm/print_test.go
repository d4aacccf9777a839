package shm

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// take reads what is printed, as the client's library does.
func take(r *Region, most uint32) []byte {
	head, tail := r.Load32(wire.HdrOutHead), r.Load32(wire.HdrOutTail)
	n := min(tail-head, most)
	b := make([]byte, n)
	for i := range b {
		b[i] = r.Bytes()[wire.OutOff+uint64((head+uint32(i))%wire.OutSize)]
	}
	r.Store32(wire.HdrOutHead, head+n)
	FutexWake(r.Word32(wire.HdrOutHead), All)
	return b
}

func TestPrintIsTakenInOrder(t *testing.T) {
	r := newRegion(t, wire.RingMem)
	q, err := NewRing(r)
	if err != nil {
		t.Fatal(err)
	}
	q.Init(1<<20, 1<<19)
	// The counters overflow during the test, too.
	start := ^uint32(0) - wire.OutSize
	r.Store32(wire.HdrOutTail, start)
	r.Store32(wire.HdrOutHead, start)
	var all bytes.Buffer
	for i := range 5 << 20 / 7 {
		all.Write([]byte{byte(i), byte(i >> 8), byte(i >> 16), 'a', 'b', 'c', '\n'})
	}
	go func() {
		for rest := all.Bytes(); len(rest) > 0; {
			n, err := q.Print(rest[:min(len(rest), 50000)])
			if err != nil {
				t.Error(err)
				return
			}
			if n == 0 {
				q.AwaitPrint(time.Minute)
			}
			rest = rest[n:]
		}
	}()
	var got []byte
	for len(got) < all.Len() {
		got = append(got, take(r, 77777)...)
	}
	if !bytes.Equal(got, all.Bytes()) {
		t.Error("something else came than was printed")
	}
}

func TestPrintIsBounded(t *testing.T) {
	r := newRegion(t, wire.RingMem)
	q, err := NewRing(r)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := q.Print(make([]byte, wire.OutSize+5)); n != wire.OutSize || err != nil {
		t.Error(n, err)
	}
	if n, err := q.Print([]byte("x")); n != 0 || err != nil {
		t.Error(n, err)
	}
	take(r, 3)
	if n, err := q.Print([]byte("12345")); n != 3 || err != nil {
		t.Error(n, err)
	}
	q.AwaitPrint(0)
	r.Store32(wire.HdrOutHead, r.Load32(wire.HdrOutTail)+1) // a client that took more than there was
	if _, err := q.Print([]byte("x")); !errors.Is(err, ErrRing) {
		t.Error(err)
	}
}
