package unixrpc

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/pace"
)

func TestOneUserCannotHoldAllConnections(t *testing.T) {
	whose := func(uid uint32) uint32 {
		if uid >= 100000 { // users that 1000 has by /etc/subuid
			return 1000
		}
		return uid
	}
	l := &limited{places: placesOf(7, 4, 16), whose: whose}
	took := func(uid uint32, n int) (taken int) {
		for range n {
			if _, ok := l.take(uid); ok {
				taken++
			}
		}
		return taken
	}
	for _, c := range []struct {
		uid       uint32
		ask, want int
	}{
		{1000, 1, 1},
		{100000, 10, 3}, // with those of 1000
		{100001, 10, 0},
		{1001, 10, 4},
		{1002, 10, 4},
		{1003, 10, 0}, // three quarters are taken
		{0, 2, 2},
		{7, 10, 2},
		{0, 1, 0},
	} {
		if got := took(c.uid, c.ask); got != c.want {
			t.Errorf("uid %d: %d of %d, want %d", c.uid, got, c.ask, c.want)
		}
	}
	l.places.Give(1000)
	l.places.Give(7)
	if got := took(1001, 1) + took(1003, 3); got != 0 {
		t.Errorf("%d into the part that is root's", got)
	}
	if l.places.total != 14 {
		t.Errorf("%d are counted", l.places.total)
	}
}

func TestOneUserWhoSendsWithoutEndIsReadAtAPace(t *testing.T) {
	inner, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	const rate, atOnce, reads = 20, 5, 15
	l := &limited{Listener: inner, places: placesOf(7, 4, 16), whose: func(uid uint32) uint32 { return uid }, pacer: pace.New(rate, atOnce)}
	defer l.Close()
	took := func(uid uint32) time.Duration {
		client, err := net.Dial("unix", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		accepted, err := inner.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := l.take(uid); !ok {
			t.Fatal("not taken")
		}
		c := l.count(accepted, uid, uid)
		defer c.Close()
		if _, err := client.Write(make([]byte, reads)); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		for range reads {
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		return time.Since(began)
	}
	least := (reads - atOnce) * time.Second / rate
	if d := took(1000); d < least {
		t.Errorf("%d reads of a user in %v", reads, d)
	}
	for _, uid := range []uint32{0, 7} {
		if l.flow(uid, uid) != nil {
			t.Errorf("uid %d is paced", uid)
		}
	}
}

func TestConnectionsAreCountedUntilTheyAreClosed(t *testing.T) {
	inner, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	self := uint32(os.Geteuid())
	refused := make(chan Peer, 1)
	l := Limit(inner, self+1, 1, 1, nil, func(p Peer) { refused <- p }) // root, too, is bounded by the whole
	defer l.Close()
	if self != 0 {
		l.(*limited).places = placesOf(self+1, 1, 4)
	}
	accepted := make(chan net.Conn, 8)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c, err := net.Dial("unix", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	dial()
	first := <-accepted
	if peer, err := Credentials(first); err != nil || peer.UID != self || peer.PID != int32(os.Getpid()) {
		t.Errorf("%+v, %v", peer, err)
	}
	second := dial()
	if _, err := second.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("one too many: %v", err)
	}
	if p := <-refused; p.UID != self {
		t.Errorf("refused %+v", p)
	}
	first.Close()
	first.Close() // counts once
	dial()
	if c := <-accepted; c == nil {
		t.Error("its place is not free again")
	} else {
		c.Close()
	}
}
