package lossy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// TCP carries bytes unchanged through a link that loses and reorders packets, and nothing
// passes while it is cut.
func TestTCPPassesThrough(t *testing.T) {
	l, err := New(Quality{Loss: 0.02, Delay: 500 * time.Microsecond, Jitter: time.Millisecond, Reorder: 0.05})
	if errors.Is(err, ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ln, err := l.Listen()
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	got := make(chan []byte, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		got <- b
	}()
	var near net.Conn
	l.InNear(func() { near, err = net.Dial("tcp", ln.Addr().String()) })
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("0123456789"), 200<<10)
	if _, err := near.Write(want[:1<<20]); err != nil {
		t.Fatal(err)
	}
	l.Cut(true)
	before := l.Counts().Cut
	if _, err := near.Write(want[1<<20 : 1<<20+1]); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "a packet that the cut has lost", func() error {
		return testkit.Want(l.Counts().Cut > before, l.Counts())
	})
	l.Cut(false)
	if _, err := near.Write(want[1<<20+1:]); err != nil {
		t.Fatal(err)
	}
	near.Close()
	if b := <-got; !bytes.Equal(b, want) {
		t.Errorf("%d bytes, of %d, or others", len(b), len(want))
	}
	if c := l.Counts(); c.Lost == 0 || c.Overtaken == 0 || c.Passed == 0 {
		t.Errorf("the link was too good: %+v", c)
	}
}
