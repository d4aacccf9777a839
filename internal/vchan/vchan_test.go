package vchan_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/internal/vchan/vchantest"
	"github.com/gpuctl/gpuctl/internal/xenstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const path = "data/test"

// host is a host with a listener in domain 7.
type host struct {
	*vchantest.Hypervisor
	t           *testing.T
	guest, dom0 *vchantest.Domain
	inGuest     *xenstore.Client
	inDom0      *xenstore.Client
	l           *vchan.Listener
}

func newHost(t *testing.T, opts vchan.Options) *host {
	t.Helper()
	h := &host{Hypervisor: vchantest.New(t, nil), t: t}
	h.guest, h.dom0 = h.Domain(7), h.Domain(0)
	h.inGuest, h.inDom0 = h.guest.Xenstore(), h.dom0.Xenstore()
	opts.Devices = h.guest
	l, err := vchan.Listen(t.Context(), h.inGuest, path, 0, opts)
	if err != nil {
		t.Fatal(err)
	}
	h.l = l
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func (h *host) dial(opts vchan.Options) (*vchan.Conn, error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), 20*time.Second)
	defer cancel()
	opts.Devices = h.dom0
	return vchan.Dial(ctx, h.inDom0, h.guest.ID(), path, opts)
}

// connect returns both ends.
func (h *host) connect() (server, client net.Conn) {
	h.t.Helper()
	accepted := make(chan error, 1)
	go func() {
		var err error
		server, err = h.l.Accept()
		accepted <- err
	}()
	client, err := h.dial(vchan.Options{Wait: true})
	if err != nil {
		h.t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() {
		_ = client.Close()
		_ = server.Close()
	})
	return server, client
}

func check(t *testing.T, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) || (got == nil) != (want == nil) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// What goes in comes out, in any pieces, in both directions at once.
func TestBytes(t *testing.T) {
	for _, size := range [][2]int{{1024, 2048}, {2048, 1024}, {1024, 4096}, {4096, 4096}, {8192, 2048}, {0, 0}, {vchan.MaxRing, 1 << 16}} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			server, client := vchantest.Pair(t, vchan.Options{FromPeer: size[0], ToPeer: size[1]})
			var wg sync.WaitGroup
			for i, way := range [][2]net.Conn{{server, client}, {client, server}} {
				const total = 3 << 20
				var sent, got [sha256.Size]byte
				var both sync.WaitGroup
				both.Go(func() {
					sum, rnd, p := sha256.New(), rand.New(rand.NewPCG(uint64(i), 1)), make([]byte, 1<<17)
					for left := total; left > 0; {
						n := min(left, 1+rnd.IntN(1<<rnd.IntN(17)))
						for i := range n {
							p[i] = byte(rnd.Uint32())
						}
						if m, err := way[0].Write(p[:n]); err != nil || m != n {
							t.Errorf("wrote %d of %d: %v", m, n, err)
							return
						}
						sum.Write(p[:n])
						left -= n
					}
					sum.Sum(sent[:0])
				})
				both.Go(func() {
					sum, rnd, p := sha256.New(), rand.New(rand.NewPCG(uint64(i), 2)), make([]byte, 1<<17)
					for left := total; left > 0; {
						n, err := way[1].Read(p[:1+rnd.IntN(1<<rnd.IntN(17))])
						if err != nil || n == 0 {
							t.Errorf("read %d: %v", n, err)
							return
						}
						sum.Write(p[:n])
						left -= n
					}
					sum.Sum(got[:0])
				})
				wg.Go(func() {
					both.Wait()
					if sent != got {
						t.Error("other bytes came out")
					}
				})
			}
			wg.Wait()
		})
	}
}

// The rules of net.Conn, with rings that are smaller and larger than what the
// tests write.
func TestConn(t *testing.T) {
	for _, size := range []int{4096, vchan.DefaultRing} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			h := newHost(t, vchan.Options{FromPeer: size, ToPeer: size})
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				server, client := h.connect()
				return server, client, func() {
					_ = client.Close()
					_ = server.Close()
				}, nil
			})
		})
	}
}

func TestNothingIsAllocated(t *testing.T) {
	server, client := vchantest.Pair(t, vchan.Options{})
	p := make([]byte, 8192)
	if n := testing.AllocsPerRun(500, func() {
		if _, err := server.Write(p); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(client, p); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%.1f allocations for a write and a read", n)
	}
}

func TestDeadlines(t *testing.T) {
	server, client := vchantest.Pair(t, vchan.Options{FromPeer: 4096, ToPeer: 4096})
	timeout := func(what string, err error) {
		t.Helper()
		check(t, what, err, os.ErrDeadlineExceeded)
		var n net.Error
		if !errors.As(err, &n) || !n.Timeout() {
			t.Errorf("%s: %v is no time-out", what, err)
		}
	}
	soon := func() time.Time { return time.Now().Add(20 * time.Millisecond) }
	p := make([]byte, 10000)
	check(t, "set", client.SetReadDeadline(soon()), nil)
	_, err := client.Read(p)
	timeout("read", err)
	_, err = client.Read(p)
	timeout("read again", err)
	check(t, "set", client.SetWriteDeadline(soon()), nil)
	n, err := client.Write(p)
	timeout("write", err)
	if n != 4096 {
		t.Errorf("%d bytes fitted into a ring of 4096", n)
	}
	// A deadline that is set later interrupts what waits already.
	check(t, "set", client.SetDeadline(time.Time{}), nil)
	ended := make(chan error)
	go func() {
		_, err := client.Read(p)
		ended <- err
	}()
	testkit.Parked(t, "vchan.(*Conn).Read", 1)
	_ = client.SetReadDeadline(time.Unix(1, 0))
	timeout("read that waits", <-ended)
	// And one that is taken away lets it go on.
	check(t, "set", client.SetDeadline(time.Now().Add(time.Hour)), nil)
	go func() {
		_ = client.SetDeadline(time.Time{})
		_, _ = server.Write([]byte("x"))
	}()
	if n, err := client.Read(p); n != 1 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := io.ReadFull(server, p[:4096]); err != nil {
		t.Errorf("%d, %v", n, err)
	}
	if n, err := client.Write(nil); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

func TestClose(t *testing.T) {
	for _, who := range []string{"server", "client"} {
		t.Run(who, func(t *testing.T) {
			h := newHost(t, vchan.Options{})
			server, client := h.connect()
			one, other := server, client
			if who == "client" {
				one, other = client, server
			}
			_, err := one.Write([]byte("the last words"))
			check(t, "write", err, nil)
			check(t, "close", one.Close(), nil)
			check(t, "close again", one.Close(), nil)
			_, err = one.Read(make([]byte, 1))
			check(t, "read of what is closed", err, net.ErrClosed)
			_, err = one.Write([]byte("x"))
			check(t, "write to what is closed", err, net.ErrClosed)
			check(t, "deadline of what is closed", one.SetDeadline(time.Time{}), net.ErrClosed)
			_, err = other.Write([]byte("x"))
			check(t, "write to who is gone", err, syscall.EPIPE)
			if b, err := io.ReadAll(other); string(b) != "the last words" || err != nil {
				t.Errorf("%q, %v", b, err)
			}
			_ = other.Close()
			// The next pair has a new ring.
			server, client = h.connect()
			go func() { _, _ = server.Write([]byte("hello")) }()
			b := make([]byte, 5)
			if _, err := io.ReadFull(client, b); err != nil || string(b) != "hello" {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
}

// blocking is a read and a write that wait. What a read finds at once it keeps
// until it is asked how it ended.
type blocking struct {
	c           net.Conn
	read, write error
	asked       chan struct{}
}

func (b *blocking) reads() {
	_, b.read = b.c.Read(make([]byte, 1))
	<-b.asked
}

func (b *blocking) writes() {
	_, b.write = b.c.Write(make([]byte, 2*vchan.MaxRing))
	<-b.asked
}

// blocked begins a read and a write that wait, the nth of its test, and returns
// how they end.
func blocked(t *testing.T, c net.Conn, nth int) func() (read, write error) {
	t.Helper()
	b := &blocking{c: c, asked: make(chan struct{})}
	var wg sync.WaitGroup
	wg.Go(b.reads)
	wg.Go(b.writes)
	testkit.Parked(t, "vchan_test.(*blocking).reads", nth)
	testkit.Parked(t, "vchan_test.(*blocking).writes", nth)
	return func() (error, error) {
		close(b.asked)
		done := make(chan struct{})
		go func() { wg.Wait(); close(done) }()
		select {
		case <-done:
		case <-testkit.Context(t).Done():
			t.Fatal("it waits for good")
		}
		return b.read, b.write
	}
}

func TestCloseWakes(t *testing.T) {
	h := newHost(t, vchan.Options{})
	server, client := h.connect()
	ended := make(chan error)
	read := func(c net.Conn) {
		_, err := c.Read(make([]byte, 1))
		ended <- err
	}
	go read(client)
	testkit.Parked(t, "vchan.(*Conn).Read", 1)
	_ = client.Close()
	check(t, "own read", <-ended, net.ErrClosed)
	if _, err := server.Read(make([]byte, 1)); err != io.EOF { //nolint:errorlint // as net.Conn says
		t.Errorf("other side's read: %v", err)
	}
	_ = server.Close()

	server, client = h.connect()
	write := func(c net.Conn) {
		_, err := c.Write(make([]byte, 2*vchan.MaxRing))
		ended <- err
	}
	go write(server)
	testkit.Parked(t, "vchan.(*Conn).Write", 1)
	_ = client.Close()
	check(t, "other side's write", <-ended, syscall.EPIPE)
	_ = server.Close()

	server, client = h.connect()
	go write(server)
	testkit.Parked(t, "vchan.(*Conn).Write", 1)
	_ = server.Close()
	check(t, "own write", <-ended, net.ErrClosed)
	if n, err := io.Copy(io.Discard, client); n != vchan.DefaultRing || err != nil {
		t.Errorf("of what filled the ring came %d bytes, %v", n, err)
	}
}

func TestDeath(t *testing.T) {
	for _, who := range []string{"server", "client"} {
		t.Run(who, func(t *testing.T) {
			h := newHost(t, vchan.Options{})
			server, client := h.connect()
			dead, other, domain := server, client, h.guest
			if who == "client" {
				dead, other, domain = client, server, h.dom0
			}
			_, err := dead.Write([]byte("the last words"))
			check(t, "write", err, nil)
			b := make([]byte, 14)
			_, err = io.ReadFull(other, b)
			check(t, "read", err, nil)
			_, err = dead.Write([]byte("more"))
			check(t, "write", err, nil)
			ended := blocked(t, other, 1)
			domain.Kill()
			read, write := ended()
			check(t, "read of what is left", read, nil)
			check(t, "write", write, vchan.ErrDied)
			b, err = io.ReadAll(other)
			check(t, "read", err, vchan.ErrDied)
			if string(b) != "ore" {
				t.Errorf("%q was left", b)
			}
			_ = dead.Close() // only for this process
			_ = other.Close()
			// A new process is where the old one was.
			h.connect()
		})
	}
}

// What a server leaves behind that died is no server.
func TestDeadServer(t *testing.T) {
	h := newHost(t, vchan.Options{})
	h.guest.Kill()
	_, err := h.dial(vchan.Options{})
	check(t, "dial", err, vchan.ErrNoServer)
	l, err := vchan.Listen(t.Context(), h.inGuest, path, 0, vchan.Options{Devices: h.guest})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := h.dial(vchan.Options{})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

func TestMigration(t *testing.T) {
	h := newHost(t, vchan.Options{})
	for to := uint16(8); to < 11; to++ {
		server, client := h.connect()
		inGuest, inDom0 := blocked(t, server, 1), blocked(t, client, 2)
		if n := h.MappedOf(to - 1); n == 0 {
			t.Error("nothing is mapped")
		}
		h.guest.Migrate(to)
		for side, ended := range map[string]func() (error, error){"guest": inGuest, "dom0": inDom0} {
			// Of the first byte that each wrote one may have come.
			_, write := ended()
			check(t, side+" writes", write, vchan.ErrMoved)
		}
		testkit.Until(t, "the domain that was left is no zombie", func() error { return testkit.Want(h.MappedOf(to-1) == 0, h.MappedOf(to-1)) })
		_ = server.Close()
		_ = client.Close()
	}
	server, client := h.connect()
	go func() { _, _ = client.Write([]byte("there")) }()
	b := make([]byte, 5)
	if _, err := io.ReadFull(server, b); err != nil || string(b) != "there" {
		t.Errorf("%q, %v", b, err)
	}
}

// A program that closes its end before it has heard of the migration.
func TestCloseAfterMigration(t *testing.T) {
	h := newHost(t, vchan.Options{})
	server, client := h.connect()
	_ = client.Close()
	h.guest.Migrate(8)
	_ = server.Close() // the fake complains if that reaches the kernel
	h.connect()
}

func TestMigrationBeforeAClient(t *testing.T) {
	h := newHost(t, vchan.Options{})
	h.guest.Migrate(12)
	h.connect()
}

func TestDestroyed(t *testing.T) {
	h := newHost(t, vchan.Options{})
	server, client := h.connect()
	ended := blocked(t, client, 1)
	h.guest.Destroy()
	_, write := ended()
	check(t, "write", write, vchan.ErrMoved)
	if n := h.MappedOf(7); n != 0 {
		t.Errorf("%d pages of a domain that is gone are mapped", n)
	}
	_ = server.Close()
}

func TestOneClient(t *testing.T) {
	h := newHost(t, vchan.Options{})
	server, client := h.connect()
	_, err := h.dial(vchan.Options{})
	check(t, "second client", err, vchan.ErrNoServer)
	second := make(chan error, 1)
	go func() {
		c, err := h.dial(vchan.Options{Wait: true})
		if err == nil {
			_, err = c.Write([]byte("second"))
			_ = c.Close()
		}
		second <- err
	}()
	testkit.Parked(t, "vchan.Dial", 1)
	_ = client.Close()
	_ = server.Close()
	next, err := h.l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(next); err != nil || string(b) != "second" {
		t.Errorf("%q, %v", b, err)
	}
	_ = next.Close()
	check(t, "second client", <-second, nil)
}

func TestAcceptEnds(t *testing.T) {
	h := newHost(t, vchan.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := h.l.AcceptContext(ctx)
	check(t, "accept", err, context.DeadlineExceeded)
	accepted := make(chan error)
	go func() {
		_, err := h.l.Accept()
		accepted <- err
	}()
	testkit.Parked(t, "vchan.(*Listener).Accept", 1)
	_ = h.l.Close()
	check(t, "accept of what is closed", <-accepted, net.ErrClosed)
	testkit.Until(t, "the path is removed", func() error {
		v, ok := h.Store().Get("/local/domain/7/data/test/ring-ref")
		return testkit.Want(!ok, v)
	})
	_, err = h.dial(vchan.Options{})
	check(t, "dial", err, vchan.ErrNoServer)
	check(t, "dial", err, fs.ErrNotExist)
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = vchan.Dial(ctx, h.inDom0, 7, path, vchan.Options{Devices: h.dom0, Wait: true})
	check(t, "dial that waits", err, context.DeadlineExceeded)
	check(t, "dial that waits", err, vchan.ErrNoServer)
}

// A connection outlives its listener.
func TestListenerClosesFirst(t *testing.T) {
	h := newHost(t, vchan.Options{})
	server, client := h.connect()
	check(t, "close", h.l.Close(), nil)
	go func() { _, _ = server.Write([]byte("still")) }()
	b := make([]byte, 5)
	if _, err := io.ReadFull(client, b); err != nil || string(b) != "still" {
		t.Errorf("%q, %v", b, err)
	}
	_ = server.Close()
	testkit.Until(t, "the path is removed", func() error {
		v, ok := h.Store().Get("/local/domain/7/data/test")
		return testkit.Want(!ok, v)
	})
}

func TestOthersMayNot(t *testing.T) {
	h := newHost(t, vchan.Options{})
	other := h.Domain(9)
	_, err := vchan.Dial(t.Context(), other.Xenstore(), 7, "/local/domain/7/"+path, vchan.Options{Devices: other})
	check(t, "another domain reads the path", err, syscall.EACCES)
	_, err = vchan.Listen(t.Context(), h.inGuest, "/tool/x", 0, vchan.Options{Devices: h.guest})
	check(t, "listen where the guest may not write", err, syscall.EACCES)
	for _, opts := range []vchan.Options{{FromPeer: -1}, {ToPeer: vchan.MaxRing + 1}, {FromPeer: 1, ToPeer: 1}, {FromPeer: 1, ToPeer: vchan.MaxRing}} {
		opts.Devices = h.guest
		if _, err := vchan.Listen(t.Context(), h.inGuest, "data/other", 0, opts); err == nil {
			t.Errorf("%+v: no error", opts)
		}
	}
	var more []io.Closer
	for i := range 8 { // 512 pages each and one
		l, err := vchan.Listen(t.Context(), h.inGuest, fmt.Sprintf("data/more%d", i), 0, vchan.Options{Devices: h.guest, FromPeer: vchan.MaxRing, ToPeer: vchan.MaxRing})
		if err != nil {
			check(t, "too many pages", err, syscall.ENOSPC)
			break
		}
		more = append(more, l)
	}
	if len(more) != 1 {
		t.Errorf("%d listeners of 2 MiB", len(more))
	}
	for _, l := range more {
		_ = l.Close()
	}
}

// The store hangs: what is open still ends, and nothing is closed of which
// nobody knows whether it may be.
func TestStoreHangs(t *testing.T) {
	h := newHost(t, vchan.Options{})
	server, client := h.connect()
	h.Store().Hang(true)
	began := time.Now()
	_ = client.Close()
	if d := time.Since(began); d > time.Second {
		t.Errorf("dom0's end took %v to close", d)
	}
	if _, err := server.Read(make([]byte, 1)); err != io.EOF { //nolint:errorlint // as net.Conn says
		t.Error(err)
	}
	_ = server.Close()
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("the guest's end took %v to close", d)
	}
	h.Store().Hang(false)
}

func TestNoDevices(t *testing.T) {
	h := newHost(t, vchan.Options{})
	nowhere := vchan.Xen{Dir: t.TempDir()}
	_, err := vchan.Listen(t.Context(), h.inGuest, "data/x", 0, vchan.Options{Devices: nowhere})
	check(t, "listen", err, vchan.ErrDevices)
	_, err = vchan.Dial(t.Context(), h.inDom0, 7, path, vchan.Options{Devices: nowhere, Wait: true})
	check(t, "dial", err, vchan.ErrDevices)
	check(t, "dial", err, fs.ErrNotExist)
	if !strings.Contains(err.Error(), "evtchn") {
		t.Error(err)
	}
}

func BenchmarkThroughput(b *testing.B) {
	for _, size := range []int{4096, vchan.DefaultRing, vchan.MaxRing} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			server, client := vchantest.Pair(b, vchan.Options{FromPeer: size})
			const chunk = 1 << 18
			p := bytes.Repeat([]byte{1}, chunk)
			b.SetBytes(chunk)
			b.ReportAllocs()
			go func() {
				for range b.N {
					if _, err := client.Write(p); err != nil {
						b.Error(err)
					}
				}
			}()
			q := make([]byte, chunk)
			for range b.N {
				if _, err := io.ReadFull(server, q); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
