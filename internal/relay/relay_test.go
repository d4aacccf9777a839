package relay

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a VM and its host, with TCP between them, and ports outside.
type world struct {
	t      *testing.T
	ctx    context.Context
	socket string
	guest  *Guest
	host   *Host
	log    *testkit.Log
	nobody atomic.Bool  // may connect
	ways   atomic.Int64 // in use
	broken atomic.Int64
	watch  func(instance string) (end func())
}

// newWorld has the host watch as "one", and let the VM reach what listen has made.
func newWorld(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "relay")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &world{t: t, socket: filepath.Join(dir, "s"), log: &testkit.Log{}}
	log := slog.New(slog.NewTextHandler(w.log, nil))
	w.guest = NewGuest(func(uid uint32) bool { return uid == uint32(os.Getuid()) && !w.nobody.Load() }, log)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: w.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(w.guest)
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 32}}
	w.host = &Host{
		May: func(address string, first []byte) error {
			if !strings.HasPrefix(address, "127.0.0.1:") || len(first) > 0 && first[0] == 'X' {
				return errors.New("not for this VM")
			}
			return nil
		},
		Open: func(context.Context, bool) (*http.Client, func(error), error) {
			w.ways.Add(1)
			return client, func(err error) {
				w.ways.Add(-1)
				if err != nil {
					w.broken.Add(1)
				}
			}, nil
		},
		URL: srv.URL, Log: log,
	}
	var cancel context.CancelFunc
	w.ctx, cancel = context.WithCancel(t.Context())
	var work sync.WaitGroup
	work.Go(func() { _ = w.guest.Serve(w.ctx, l) })
	w.watch = func(instance string) (end func()) {
		ctx, cancel := context.WithCancel(w.ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = w.guest.Watch(ctx, instance, func(all []Wish) error {
				w.host.Take(w.ctx, all)
				return nil
			})
		}()
		return func() {
			cancel()
			<-ended
		}
	}
	t.Cleanup(func() {
		cancel()
		w.host.Wait()
		work.Wait()
		client.CloseIdleConnections()
		srv.Close()
		if n := w.ways.Load(); n != 0 {
			t.Errorf("%d ways are still in use", n)
		}
	})
	return w
}

func echo(conn net.Conn) { _, _ = io.Copy(conn, conn) }

func (w *world) dial(address, first string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(w.ctx, 30*time.Second)
	defer cancel()
	return Dial(ctx, w.socket, address, false, []byte(first))
}

// exchanges sends bytes through a connection and expects them back.
func exchanges(conn net.Conn, expect []byte, size int) error {
	data := make([]byte, size)
	_, _ = rand.Read(data)
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(data)
		sent <- err
	}()
	got := make([]byte, len(expect)+size)
	_, err := io.ReadFull(conn, got)
	if err = errors.Join(err, <-sent); err == nil && !bytes.Equal(got, append(bytes.Clone(expect), data...)) {
		err = errors.New("other bytes have come back")
	}
	return err
}

// Many programs connect at once, more than there are places for such that no port has
// answered. What each sends comes back, first what it sends first.
func TestConnectionsGoThroughTheHost(t *testing.T) {
	w := newWorld(t)
	defer w.watch("one")()
	address := testkit.Port(t, echo)
	go func() { // the host looks again for those that it has left out
		for w.ctx.Err() == nil {
			w.guest.mu.Lock()
			w.guest.changed()
			w.guest.mu.Unlock()
			time.Sleep(10 * time.Millisecond)
		}
	}()
	var work sync.WaitGroup
	for i := range 48 {
		work.Go(func() {
			first := fmt.Sprint("first of ", i)
			conn, err := w.dial(address, first)
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
	if w.broken.Load() > 0 {
		t.Error("a way was broken")
	}
	testkit.Until(t, "none is left", func() error { return testkit.Want(w.host.Active() == 0, w.host.Active()) })
}

// What was sent before the end arrives, in either direction, and the end too.
func TestTheEndComesAfterWhatWasSent(t *testing.T) {
	w := newWorld(t)
	defer w.watch("one")()
	got := make(chan int64, 1)
	takes := testkit.Port(t, func(conn net.Conn) {
		_, _ = conn.Write([]byte("!"))
		n, _ := io.Copy(io.Discard, conn)
		got <- n
	})
	gives := testkit.Port(t, func(conn net.Conn) { _, _ = conn.Write(make([]byte, 3<<20)) })
	conn, err := w.dial(takes, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write(make([]byte, 3<<20)); err != nil {
		t.Error(err)
	}
	conn.Close()
	if n := <-got; n != 3<<20 {
		t.Errorf("%d bytes have arrived outside", n)
	}
	if conn, err = w.dial(gives, ""); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if n, err := io.Copy(io.Discard, conn); n != 3<<20 || err != nil {
		t.Errorf("%d bytes have arrived in the VM: %v", n, err)
	}
}

// A program is told why it gets no connection.
func TestRefusedConnectionsSayWhy(t *testing.T) {
	w := newWorld(t)
	defer w.watch("one")()
	free := testkit.Port(t, echo)
	for name, c := range map[string]struct{ address, first, says string }{
		"not the VM's":         {"127.0.0.2:1", "", "not for this VM"},
		"what it sends":        {free, "X", "not for this VM"},
		"nobody listens":       {"127.0.0.1:1", "", "refused"},
		"no address":           {"nowhere", "", "not HOST:PORT"},
		"too much first":       {free, strings.Repeat("y", maxFirst+1), "to be sent first"},
		"address of two lines": {"127.0.0.1:1\nok", "", "not HOST:PORT"},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := w.dial(c.address, c.first)
			if err == nil {
				conn.Close()
			}
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
		})
	}
	w.nobody.Store(true)
	if _, err := w.dial(free, ""); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "user") {
		t.Errorf("a user that may not: %v", err)
	}
}

// Connections stay while the same host asks anew, and end when another one does: the VM has
// moved. One that began while no host asked waits.
func TestConnectionsEndWhenTheVMHasMoved(t *testing.T) {
	w := newWorld(t)
	address := testkit.Port(t, echo)
	type result struct {
		conn net.Conn
		err  error
	}
	early := make(chan result, 1)
	go func() {
		conn, err := w.dial(address, "a")
		early <- result{conn, err}
	}()
	testkit.Until(t, "it waits", func() error {
		w.guest.mu.Lock()
		defer w.guest.mu.Unlock()
		return testkit.Want(len(w.guest.waiting) == 1)
	})
	end := w.watch("one")
	r := <-early
	if r.err != nil {
		t.Fatal(r.err)
	}
	defer r.conn.Close()
	if err := exchanges(r.conn, []byte("a"), 100); err != nil {
		t.Error(err)
	}
	end()
	again := w.watch("one")
	if err := exchanges(r.conn, nil, 100); err != nil {
		t.Errorf("the same host has asked again: %v", err)
	}
	other := w.watch("two") // the first call ends
	defer other()
	again()
	if _, err := r.conn.Read(make([]byte, 1)); err == nil {
		t.Error("it goes on after another host has asked")
	}
	conn, err := w.dial(address, "b")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := exchanges(conn, []byte("b"), 100); err != nil {
		t.Error(err)
	}
}

// A hostile VM that wants connections without end, to a port that does not answer, gets a few
// at a time. What it names twice, or with an id or address that no Guest makes, costs nothing.
func TestHostileVMsGetFewConnections(t *testing.T) {
	w := newWorld(t)
	var reached atomic.Int64
	quiet := testkit.Port(t, func(conn net.Conn) {
		reached.Add(1)
		_, _ = io.Copy(io.Discard, conn)
	})
	var all []Wish
	for i := range 1000 {
		all = append(all, Wish{ID: fmt.Sprint("w", i), Address: quiet}, Wish{ID: fmt.Sprint("w", i), Address: quiet})
	}
	for range 3 {
		w.host.Take(w.ctx, all)
	}
	testkit.Until(t, "the VM, which gives no stream, is refused", func() error {
		return testkit.Want(strings.Contains(w.log.String(), "gives no stream"), w.log)
	})
	if n := reached.Load(); n > mostUnproven {
		t.Errorf("%d connections at once", n)
	}
	w.host.Take(w.ctx, []Wish{{Address: quiet}, {ID: strings.Repeat("x", maxID+1), Address: quiet}})
	// A port that takes connections, and no more, holds a place until its time is over.
	w.host.mu.Lock()
	defer w.host.mu.Unlock()
	if w.host.unproven > mostUnproven || len(w.host.busy) > mostUnproven {
		t.Errorf("%d unproven, %d busy", w.host.unproven, len(w.host.busy))
	}
}

// A hostile host asks for connections that do not wait, and twice for one that does.
func TestHostileHostsGetOneStreamPerConnection(t *testing.T) {
	w := newWorld(t)
	srv := httptest.NewServer(w.guest)
	defer srv.Close()
	ask := func(method, id, header, value string) int {
		r, err := http.NewRequestWithContext(w.ctx, method, srv.URL+Path+id, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Connection", "Upgrade")
		r.Header.Set(header, value)
		res, err := srv.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		return res.StatusCode
	}
	ended := make(chan error, 1)
	go func() {
		conn, err := w.dial("127.0.0.1:1", "")
		if err == nil {
			_, err = conn.Read(make([]byte, 1))
			conn.Close()
		}
		ended <- err
	}()
	var id string
	testkit.Until(t, "it waits", func() error {
		w.guest.mu.Lock()
		defer w.guest.mu.Unlock()
		for id = range w.guest.waiting {
			return nil
		}
		return errors.New("none")
	})
	for what, c := range map[string]struct {
		got, want int
	}{
		"no method":    {ask(http.MethodGet, id, "Upgrade", protocol), http.StatusBadRequest},
		"no protocol":  {ask(http.MethodPost, id, "Upgrade", "websocket"), http.StatusBadRequest},
		"another's id": {ask(http.MethodPost, "../x", "Upgrade", protocol), http.StatusGone},
	} {
		if c.got != c.want {
			t.Errorf("%s: %d", what, c.got)
		}
	}
	if got := ask(http.MethodPost, id, "Upgrade", protocol); got != http.StatusSwitchingProtocols {
		t.Errorf("%d", got)
	}
	if got := ask(http.MethodPost, id, refusal, "late"); got != http.StatusGone {
		t.Errorf("twice: %d", got)
	}
	if err := <-ended; !errors.Is(err, io.EOF) { // the host has closed the stream at once
		t.Errorf("%v", err)
	}
}

// FuzzHead reads what a program says first.
func FuzzHead(f *testing.F) {
	f.Add(Wish{Address: "10.0.0.1:7651", First: []byte("GXRR")}.head())
	f.Add(Wish{Address: "[fd00::1]:7651", Bulk: true}.head())
	f.Add([]byte("c nowhere\n\x00"))
	f.Add([]byte("b 1:1\n\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		w, err := readHead(r)
		if err != nil {
			return
		}
		if err := w.Check(); err != nil {
			t.Fatal(err)
		}
		read := b[:len(b)-r.Len()]
		if !bytes.Equal(w.head(), read) {
			t.Fatalf("%q is %q", read, w.head())
		}
	})
}

// An end that takes nothing keeps nothing once the other end has gone, and what an end sent
// before it went arrives at one that takes it.
func TestJoinSeesTheEndOfWhoIsNotRead(t *testing.T) {
	for what, every := range map[string]time.Duration{"takes nothing": 50 * time.Millisecond, "takes all": lookEvery} {
		t.Run(what, func(t *testing.T) {
			program, near := sockets(t)
			far, there := net.Pipe() // takes no more than is read
			defer there.Close()
			over := make(chan struct{})
			go func() {
				defer close(over)
				joinLooking(&proving{Conn: near, proven: func() {}}, far, every)
			}()
			const sent = 100 << 10
			if _, err := program.Write(make([]byte, sent)); err != nil {
				t.Fatal(err)
			}
			program.Close()
			if every == lookEvery {
				if b, err := io.ReadAll(there); err != nil || len(b) != sent {
					t.Errorf("%d bytes have arrived: %v", len(b), err)
				}
			}
			select {
			case <-over:
			case <-time.After(20 * time.Second):
				t.Fatal("it goes on")
			}
		})
	}
}

// sockets returns the ends of a connection, of which the first is closed at the end.
func sockets(t *testing.T) (a, b net.Conn) {
	t.Helper()
	a, b = testkit.Sockets(t)
	t.Cleanup(func() { a.Close() })
	return a, b
}
