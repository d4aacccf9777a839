package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// near serves a socket, and returns its path. What ends it is part of the test's end.
func near(t *testing.T, n *Near) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	n.Log = quiet()
	if n.May == nil {
		n.May = func(uint32) bool { return true }
	}
	if n.First == nil {
		n.First = func([]byte) error { return nil }
	}
	if n.Dial == nil {
		n.Dial = func(ctx context.Context, address string) (io.ReadWriteCloser, error) {
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}
	}
	run(t, func(ctx context.Context) { _ = n.Serve(ctx, l) })
	return path
}

// run ends f with the test.
func run(t *testing.T, f func(context.Context)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan struct{})
	go func() {
		defer close(over)
		f(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-over
	})
}

func TestNearMakesConnections(t *testing.T) {
	socket := near(t, &Near{})
	address := testkit.Port(t, echo)
	var work sync.WaitGroup
	for i := range 32 {
		work.Go(func() {
			first := fmt.Sprint("first of ", i)
			conn, err := Dial(testkit.Context(t), socket, address, false, []byte(first))
			if err == nil {
				defer conn.Close()
				err = exchanges(conn, []byte(first), 1<<20+i)
			}
			if err != nil {
				t.Error(i, err)
			}
		})
	}
	work.Wait()
}

func TestNearSaysWhyNot(t *testing.T) {
	socket := near(t, &Near{First: func(first []byte) error {
		if len(first) > 0 {
			return errors.New("not for you")
		}
		return nil
	}})
	for name, c := range map[string]struct{ address, first, says string }{
		"who may not":    {testkit.Port(t, echo), "x", "not for you"},
		"nobody listens": {"127.0.0.1:1", "", "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := Dial(testkit.Context(t), socket, c.address, false, []byte(c.first))
			if err == nil {
				conn.Close()
			}
			if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), c.says) {
				t.Error(err)
			}
		})
	}
}

// Who may not connect takes no place of those who may.
func TestNearGivesStrangersNoPlace(t *testing.T) {
	var friend atomic.Bool
	socket := near(t, &Near{May: func(uint32) bool { return friend.Load() }})
	for range mostJoined {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(headFor / 2))
		if answer, err := readLine(conn, 2*maxText); err != nil || !strings.Contains(answer, "may not connect") {
			t.Fatalf("a stranger hears %q: %v", answer, err)
		}
	}
	friend.Store(true)
	conn, err := Dial(testkit.Context(t), socket, testkit.Port(t, echo), false, nil)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

// One session's executor keeps no place of the others'.
func TestNearGivesAUserFewConnections(t *testing.T) {
	n, self := nearPlaces(), uint32(os.Geteuid())
	user := self + 1
	for i := range mostJoined {
		if err := n.Take(user, user); (err == nil) != (i < mostOfUser) {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	for range mostOfUser {
		n.Give(user)
	}
	for i := range mostJoined + 1 {
		if err := n.Take(self, self); (err == nil) != (i < mostJoined) {
			t.Fatalf("connection %d of this process's user: %v", i, err)
		}
	}
	if err := n.Take(user, user); !errors.Is(err, unixrpc.ErrFull) {
		t.Error(err)
	}
}

// incoming is a way by which connections come, from addresses that the test chooses.
type incoming chan struct {
	conn net.Conn
	from netip.Addr
}

// from returns the far end of a new connection.
func (c incoming) from(t *testing.T, address string) net.Conn {
	t.Helper()
	there, here := net.Pipe()
	t.Cleanup(func() { _ = there.Close() })
	c <- struct {
		conn net.Conn
		from netip.Addr
	}{here, netip.MustParseAddr(address)}
	return there
}

// passes passes on what comes to a port, if it begins with "ok".
func passes(t *testing.T, port string) incoming {
	t.Helper()
	c := make(incoming)
	run(t, func(ctx context.Context) {
		p := &Pass{
			Log: quiet(),
			Accept: func() (io.ReadWriteCloser, netip.Addr, error) {
				select {
				case x := <-c:
					return x.conn, x.from, nil
				case <-ctx.Done():
					return nil, netip.Addr{}, net.ErrClosed
				}
			},
			First: func(r io.Reader) ([]byte, error) {
				b := make([]byte, 2)
				if _, err := io.ReadFull(r, b); err != nil {
					return nil, err
				}
				if string(b) != "ok" {
					return nil, errors.New("no carrier")
				}
				return b, nil
			},
			Dial: func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", port) },
		}
		p.Serve(ctx)
	})
	return c
}

// ended reports whether the other end closes a connection without a byte.
func ended(conn net.Conn) error {
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		return fmt.Errorf("%d bytes: %w", n, err)
	}
	return nil
}

func TestPassPassesOn(t *testing.T) {
	c := passes(t, testkit.Port(t, echo))
	conn := c.from(t, "192.0.2.1")
	if _, err := conn.Write([]byte("ok")); err != nil {
		t.Fatal(err)
	}
	if err := exchanges(conn, []byte("ok"), 3<<20); err != nil {
		t.Error(err)
	}
}

// What does not begin as it should never reaches the port, which may be somebody else's.
func TestPassKeepsStrangersFromThePort(t *testing.T) {
	c := passes(t, testkit.Port(t, func(net.Conn) { t.Error("a stranger has reached the port") }))
	conn := c.from(t, "192.0.2.1")
	_, _ = conn.Write([]byte("no"))
	if err := ended(conn); err != nil {
		t.Error(err)
	}
}

// Somebody who says nothing keeps his own places only: others come through, and he does again
// when he has left.
func TestPassGivesStrangersFewConnections(t *testing.T) {
	c := passes(t, testkit.Port(t, echo))
	var silent []net.Conn
	for range mostUnproven {
		silent = append(silent, c.from(t, "192.0.2.1"))
	}
	silent = append(silent, c.from(t, "192.0.2.1"))
	if err := ended(silent[0]); err != nil {
		t.Errorf("the oldest does not make room for one more: %v", err)
	}
	for range 2 * mostStrange { // each has its answer, and takes no place
		conn := c.from(t, "192.0.2.2")
		_, _ = conn.Write([]byte("ok"))
		if err := exchanges(conn, []byte("ok"), 1); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range silent {
		_ = s.Close()
	}
	testkit.Until(t, "there is a place", func() error {
		conn := c.from(t, "192.0.2.1")
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		_, _ = conn.Write([]byte("ok"))
		return exchanges(conn, []byte("ok"), 1)
	})
}

// Nor do many who say nothing keep others out.
func TestPassMakesRoomForWhoSpeaks(t *testing.T) {
	c := passes(t, testkit.Port(t, echo))
	for i := range 2 * mostStrange {
		_ = c.from(t, fmt.Sprint("198.51.100.", i%3))
	}
	conn := c.from(t, "192.0.2.1")
	_ = conn.SetDeadline(time.Now().Add(headFor / 2))
	_, _ = conn.Write([]byte("ok"))
	if err := exchanges(conn, []byte("ok"), 1); err != nil {
		t.Error(err)
	}
}
