package libvirthook

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start serves until the test ends.
func start(t *testing.T, h Handler, options ...Option) wire.Client {
	t.Helper()
	dir := t.TempDir()
	l, err := Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	s := New(h, append([]Option{WithUser(os.Getuid())}, options...)...)
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return wire.Client{Socket: filepath.Join(dir, wire.SocketName)}
}

func prepare(domain string) Event {
	return Event{Driver: wire.QEMU, Domain: domain, Operation: wire.Prepare, Sub: "begin", Extra: "-", XML: []byte("<domain/>")}
}

func TestEventsReachTheHandler(t *testing.T) {
	var mu sync.Mutex
	var got []Event
	var outcomes []Outcome
	c := start(t, HandlerFunc(func(_ context.Context, e Event) (Answer, error) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, e)
		return Answer{XML: []byte("<new/>")}, nil
	}), WithObserver(func(o Outcome) { mu.Lock(); outcomes = append(outcomes, o); mu.Unlock() }))
	n := 0
	for _, driver := range wire.Drivers() {
		for _, op := range wire.Operations(driver) {
			n++
			e := Event{Driver: driver, Domain: "d", Operation: op, Sub: "begin", Extra: "-", XML: []byte("<domain/>")}
			a, err := c.Call(t.Context(), e)
			if err != nil || (len(a.XML) > 0) != e.Filters() {
				t.Errorf("%s %s: %s, %v", driver, op, a.XML, err)
			}
		}
	}
	// What nobody knows yet is no business of the handler's.
	if _, err := c.Call(t.Context(), Event{Driver: wire.LibXL, Domain: "d", Operation: wire.Restore}); err != nil {
		t.Error(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(got) != n || string(got[0].XML) != "<domain/>" || got[0].Extra != "-" {
		t.Errorf("%d events of %d: %+v", len(got), n, got)
	}
	if len(outcomes) != n+1 || outcomes[0].Status != wire.Done || outcomes[0].Took <= 0 {
		t.Errorf("%+v", outcomes)
	}
}

func TestRefusal(t *testing.T) {
	c := start(t, HandlerFunc(func(context.Context, Event) (Answer, error) {
		return Answer{}, errors.New("GPU 0000:65:00.0 is vm2's: gpuctl get claims")
	}))
	var denied *wire.DeniedError
	if _, err := c.Call(t.Context(), prepare("d")); !errors.As(err, &denied) || !strings.Contains(denied.Message, "vm2") {
		t.Error(err)
	}
}

func TestXMLThatIsTooLongIsRefused(t *testing.T) {
	c := start(t, HandlerFunc(func(context.Context, Event) (Answer, error) { return Answer{XML: make([]byte, wire.MaxXML+1)}, nil }))
	e := prepare("d")
	e.Operation = wire.Migrate
	var denied *wire.DeniedError
	if _, err := c.Call(t.Context(), e); !errors.As(err, &denied) {
		t.Error(err)
	}
}

// A handler that ends with its context, and one that does not: both are late,
// and libvirtd is not kept waiting.
func TestDeadline(t *testing.T) {
	release := make(chan struct{})
	c := start(t, HandlerFunc(func(ctx context.Context, e Event) (Answer, error) {
		<-ctx.Done()
		if e.Domain == "stuck" {
			<-release
		}
		return Answer{}, ctx.Err()
	}), WithDeadline(wire.Prepare, 50*time.Millisecond))
	for _, domain := range []string{"obedient", "stuck"} {
		began := time.Now()
		_, err := c.Call(t.Context(), prepare(domain))
		if took := time.Since(began); !errors.Is(err, wire.ErrLate) || took < 40*time.Millisecond || took > 3*time.Second {
			t.Errorf("%s: %v after %v", domain, err, took)
		}
	}
	close(release)
}

// The hook's patience counts where it is shorter.
func TestTheHooksBudgetCounts(t *testing.T) {
	c := start(t, HandlerFunc(func(ctx context.Context, _ Event) (Answer, error) {
		<-ctx.Done()
		return Answer{}, ctx.Err()
	}))
	ctx, cancel := context.WithTimeout(t.Context(), 900*time.Millisecond)
	defer cancel()
	if _, err := c.Call(ctx, prepare("d")); !errors.Is(err, wire.ErrLate) || ctx.Err() != nil {
		t.Errorf("%v (%v)", err, ctx.Err())
	}
}

func TestAHookThatIsKilledEndsTheWork(t *testing.T) {
	ended := make(chan struct{})
	started := make(chan struct{})
	c := start(t, HandlerFunc(func(ctx context.Context, _ Event) (Answer, error) {
		close(started)
		<-ctx.Done()
		close(ended)
		return Answer{}, ctx.Err()
	}))
	conn, err := net.Dial("unix", c.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := wire.WriteRequest(conn, wire.Request{Event: prepare("d")}); err != nil {
		t.Fatal(err)
	}
	<-started
	conn.Close()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("the handler goes on for nobody")
	}
}

func TestOthersAreTurnedAway(t *testing.T) {
	var log bytes.Buffer
	dir := t.TempDir()
	l, err := Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(dir, wire.SocketName)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	s := New(HandlerFunc(func(context.Context, Event) (Answer, error) {
		t.Error("the handler was asked")
		return Answer{}, nil
	}), WithLog(slog.New(slog.NewTextHandler(&log, nil))))
	s.users = map[int]bool{os.Getuid() + 1: true}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	c := wire.Client{Socket: filepath.Join(dir, wire.SocketName)}
	if _, err := c.Call(t.Context(), prepare("d")); !errors.Is(err, wire.ErrUnreachable) {
		t.Error(err)
	}
	if _, err := c.Ping(t.Context()); err == nil {
		t.Error("a stranger's ping was answered")
	}
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if !strings.Contains(log.String(), "turned away") {
		t.Errorf("log: %s", log.String())
	}
}

func TestPingNeedsNoHandler(t *testing.T) {
	c := start(t, nil)
	if v, err := c.Ping(t.Context()); err != nil || v == "" {
		t.Errorf("%q, %v", v, err)
	}
}

// Garbage, silence and callers that only look do not stop the server.
func TestServerOutlivesBadCallers(t *testing.T) {
	c := start(t, HandlerFunc(func(context.Context, Event) (Answer, error) { return Answer{}, nil }))
	for _, text := range []string{"", "x", "GET / HTTP/1.1\r\n\r\n", "GXH1\xff\xff\xff\xff"} {
		conn, err := net.Dial("unix", c.Socket)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, text)
		conn.Close()
	}
	if _, err := c.Call(t.Context(), prepare("d")); err != nil {
		t.Error(err)
	}
}

// More calls than slots: those that wait too long hear so, none is lost.
func TestManyAtOnce(t *testing.T) {
	open, begun := make(chan struct{}), make(chan struct{}, atOnce+100)
	c := start(t, HandlerFunc(func(ctx context.Context, _ Event) (Answer, error) {
		begun <- struct{}{}
		select {
		case <-open:
		case <-ctx.Done():
		}
		return Answer{}, ctx.Err()
	}))
	const waiting = 8
	results := make(chan error, atOnce+waiting)
	for range atOnce + waiting {
		go func() {
			_, err := c.Call(t.Context(), prepare("d"))
			results <- err
		}()
	}
	for range atOnce {
		<-begun
	}
	testkit.Parked(t, "libvirthook.(*Server).serve", atOnce+waiting)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := c.Call(ctx, prepare("d")); !errors.Is(err, wire.ErrUnreachable) {
		t.Errorf("one too many: %v", err)
	}
	close(open)
	for range atOnce + waiting {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	l, err := Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	began, ended := make(chan struct{}), false
	s := New(HandlerFunc(func(ctx context.Context, _ Event) (Answer, error) {
		close(began)
		<-ctx.Done()
		time.Sleep(20 * time.Millisecond) // undoing
		ended = true
		return Answer{}, ctx.Err()
	}), WithUser(os.Getuid()))
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	called := make(chan error, 1)
	go func() {
		_, err := wire.Client{Socket: filepath.Join(dir, wire.SocketName)}.Call(t.Context(), prepare("d"))
		called <- err
	}()
	<-began
	stop()
	if err := <-served; err != nil || !ended {
		t.Errorf("%v; the handler has ended: %v", err, ended)
	}
	if err := <-called; !errors.Is(err, wire.ErrLate) {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(dir, wire.SocketName)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}
