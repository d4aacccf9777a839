package lend

import (
	"context"
	"encoding/hex"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type taken struct {
	name string
	conn net.Conn
}

// start serves a port whose only lease has the token of ones. Connections that gpuguest
// would get are sent to the channel.
func start(t *testing.T, c Config) (address string, got chan taken) {
	t.Helper()
	dir := t.TempDir()
	c.Socket = filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: c.Socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	got = make(chan taken, 8)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = handover.Serve(l, func(name string, f *os.File) {
			conn, err := net.FileConn(f)
			_ = f.Close()
			if err == nil {
				got <- taken{name, conn}
			}
		})
	}()
	if c.Listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	var ones remote.Token
	for i := range ones {
		ones[i] = 1
	}
	c.Expects = func(token []byte) bool { return string(token) == string(ones[:]) }
	c.Log = slog.New(slog.DiscardHandler)
	p := New(c)
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() { defer close(over); p.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-over
		_ = l.Close()
		<-served
	})
	return c.Listener.Addr().String(), got
}

func dial(t *testing.T, address string, say []byte) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err := c.Write(say); err != nil {
		t.Fatal(err)
	}
	return c
}

func closed(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); err == nil || n > 0 {
		t.Errorf("it is open: %d bytes, %v", n, err)
	}
}

func preamble(fill byte, plain bool) remote.Preamble {
	p := remote.Preamble{Role: remote.Commands, Plain: plain}
	for i := range p.Token {
		p.Token[i] = fill
	}
	return p
}

func TestAConnectionWithTheTokenOfALeaseIsHandedOverUnread(t *testing.T) {
	address, got := start(t, Config{})
	p := preamble(1, false)
	c := dial(t, address, append(p.Append(nil), "hello"...))
	x := <-got
	defer x.conn.Close()
	if x.name != hex.EncodeToString(p.Append(nil)) {
		t.Errorf("handed over as %s", x.name)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(x.conn, b); err != nil || string(b) != "hello" {
		t.Errorf("%q %v: bytes after the preamble were lost", b, err)
	}
	if _, err := x.conn.Write([]byte("answer")); err != nil {
		t.Fatal(err)
	}
	b = make([]byte, 6)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "answer" {
		t.Errorf("%q %v", b, err)
	}
}

func TestStrangersAreClosed(t *testing.T) {
	address, got := start(t, Config{})
	for what, say := range map[string][]byte{
		"another token": preamble(2, false).Append(nil),
		"without TLS":   preamble(1, true).Append(nil),
		"HTTP":          []byte("GET / HTTP/1.1\r\nHost: somebody.example\r\n\r\n"),
	} {
		t.Run(what, func(t *testing.T) { closed(t, dial(t, address, say)) })
	}
	select {
	case x := <-got:
		t.Errorf("gpuguest got %s", x.name)
	default:
	}
}

// However many connections of one address, or of all, say nothing: the oldest of them goes
// when one more comes, and a carrier gets in at once.
func TestSilentConnectionsKeepNobodyOut(t *testing.T) {
	for what, c := range map[string]Config{"one address": {Most: 8, MostEach: 2}, "all": {Most: 2, MostEach: 8}} {
		t.Run(what, func(t *testing.T) {
			address, got := start(t, c)
			oldest := dial(t, address, []byte{0x47})
			var later []net.Conn
			for range 4 {
				later = append(later, dial(t, address, []byte{0x47}))
			}
			closed(t, oldest)
			dial(t, address, preamble(1, false).Append(nil))
			x := <-got
			_ = x.conn.Close()
			closed(t, later[0])
		})
	}
}

// One address that opens more than all others does not cost these their places.
func TestTheAddressWithMostSilentConnectionsMakesRoom(t *testing.T) {
	p := New(Config{Most: 4, MostEach: 3})
	conn := func(ip string) *addressed { return &addressed{ip: ip} }
	other := conn("192.0.2.7")
	flood := []*addressed{conn("198.51.100.1"), conn("198.51.100.1"), conn("198.51.100.1")}
	for _, c := range append([]*addressed{other}, flood...) {
		if err := p.admit(c); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.admit(conn("203.0.113.5")); err != nil {
		t.Fatal(err)
	}
	if other.closed || !flood[0].closed || flood[1].closed || flood[2].closed {
		t.Errorf("closed: the other address %v; of the first %v %v %v", other.closed, flood[0].closed, flood[1].closed, flood[2].closed)
	}
}

// addressed is a connection from an address.
type addressed struct {
	net.Conn
	ip     string
	closed bool
}

func (a *addressed) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(a.ip), Port: 7} }
func (a *addressed) Close() error         { a.closed = true; return nil }
