package channel_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second

// agent is a guest's side over a console.
type agent struct {
	hangUps atomic.Int32
	stop    func()
}

func serve(t *testing.T, c *channeltest.Console) *agent {
	t.Helper()
	root := t.TempDir()
	c.Root(root, channel.Name)
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "here") })
	mux.HandleFunc("/sum", func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		if _, err := io.Copy(h, r.Body); err != nil {
			panic(http.ErrAbortHandler)
		}
		_, _ = w.Write(h.Sum(nil))
	})
	mux.HandleFunc("/bytes", func(w http.ResponseWriter, r *http.Request) {
		var n int
		_, _ = fmt.Sscan(r.FormValue("n"), &n)
		_, _ = w.Write(noise(n))
	})
	mux.HandleFunc("/hang", func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	a := &agent{}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		port := channel.Port{Root: root}
		err := channel.Serve(ctx, port.Open, mux, channel.WithHangUp(func() { a.hangUps.Add(1) }))
		if err != nil {
			t.Error(err)
		}
	}()
	a.stop = sync.OnceFunc(func() {
		cancel()
		<-over
	})
	t.Cleanup(a.stop)
	return a
}

// noise is the same for every n.
func noise(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func dial(t *testing.T, c *channeltest.Console, opts ...channel.Option) *channel.Client {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client, err := channel.Dial(ctx, c.Socket(), opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func get(ctx context.Context, c *channel.Client, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, channel.BaseURL+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.HTTP().Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

func mustGet(t *testing.T, c *channel.Client, path string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	b, err := get(ctx, c, path)
	if err != nil {
		t.Fatalf("%s: %v; %+v", path, err, c.State())
	}
	return b
}

// answers waits until the agent does: what was under way when a connection was
// lost fails.
func answers(t *testing.T, c *channel.Client) {
	t.Helper()
	ctx := testkit.Context(t)
	testkit.Until(t, "the agent answers", func() error {
		if _, err := get(ctx, c, "/hello"); err != nil {
			return fmt.Errorf("%w; %+v", err, c.State())
		}
		return nil
	})
}

func post(t *testing.T, c *channel.Client, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	data := noise(n)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, channel.BaseURL+"/sum", bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.HTTP().Do(req)
	if err != nil {
		t.Fatalf("%v; %+v", err, c.State())
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if want := sha256.Sum256(data); err != nil || !bytes.Equal(got, want[:]) {
		t.Fatalf("%d bytes arrived as others (%v)", n, err)
	}
}

func TestRequest(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	client := dial(t, c)
	if got := mustGet(t, client, "/hello"); string(got) != "here" {
		t.Fatalf("got %q", got)
	}
	if s := client.State(); !s.Up || s.Connections != 1 || s.Instance == 0 || s.RoundTrip == 0 {
		t.Errorf("state %+v", s)
	}
}

func TestManyMegabytes(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	client := dial(t, c)
	post(t, client, 64<<20)
	if got := mustGet(t, client, "/bytes?n=8388608"); !bytes.Equal(got, noise(8<<20)) {
		t.Error("other bytes came back")
	}
	if s := client.State(); s.Connections != 1 {
		t.Errorf("state %+v", s)
	}
}

// A channel that loses, garbles and repeats costs time and nothing else.
func TestBadChannel(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	client := dial(t, c)
	c.Set(channeltest.Faults{Lose: 0.01, Garble: 0.01, Repeat: 0.01})
	post(t, client, 1<<20)
	if got := mustGet(t, client, "/bytes?n=1000000"); !bytes.Equal(got, noise(1000000)) {
		t.Error("other bytes came back")
	}
	if s := client.State(); s.Connections != 1 {
		t.Errorf("a connection was lost: %+v", s)
	}
}

// At the speed of a real console a small request does not wait for a large one
// to end.
func TestSmallBesideLarge(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	client := dial(t, c)
	c.Set(channeltest.Faults{Rate: 100 << 10})
	before := c.ToGuest()
	var wg sync.WaitGroup
	defer wg.Wait()
	var posted atomic.Bool
	wg.Go(func() {
		post(t, client, 600<<10)
		posted.Store(true)
	})
	testkit.Until(t, "a part of the large one is on its way", func() error {
		return testkit.Want(c.ToGuest() > before+10<<10, c.ToGuest())
	})
	for range 3 {
		began := time.Now()
		mustGet(t, client, "/hello")
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("a small request took %v", took)
		}
	}
	if posted.Load() {
		t.Error("the small ones waited until the large one was over")
	}
}

func TestMigration(t *testing.T) {
	c := channeltest.New(t)
	a := serve(t, c)
	client := dial(t, c)
	for i := range 4 {
		mustGet(t, client, "/hello")
		c.Migrate()
		answers(t, client)
		if got := a.hangUps.Load(); got != int32(i+1) {
			t.Fatalf("%d hang-ups after %d migrations", got, i+1)
		}
	}
}

// Clients come and go; what each leaves behind is the next one's to skip.
func TestReconnectStorm(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	for i := range 40 {
		client := dial(t, c)
		mustGet(t, client, "/hello")
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
		_, _ = get(ctx, client, "/bytes?n=300000") // cut off anywhere
		cancel()
		if i%2 == 0 {
			c.Drop()
			answers(t, client)
		}
		if err := client.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestHalfMessageBefore(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	first := dial(t, c)
	mustGet(t, first, "/hello")
	first.Close()
	// Not through the client: the first bytes of a frame, and a line that a
	// terminal with echo would answer.
	conn, err := net.Dial("unix", c.Socket())
	if err != nil {
		t.Fatal(err)
	}
	half := []byte("\xc7gc\x01\x03h\x08\x00half\r\n\x03\x13")
	before := c.ToGuest()
	_, _ = conn.Write(half)
	conn.Close()
	testkit.Until(t, "the half message is with the guest", func() error {
		return testkit.Want(c.ToGuest() >= before+int64(len(half)), c.ToGuest())
	})
	mustGet(t, dial(t, c), "/hello")
}

func TestAgentComesLate(t *testing.T) {
	c := channeltest.New(t)
	client, err := channel.Open(c.Socket(), channel.WithWait(time.Second), channel.WithDeadAfter(time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := get(t.Context(), client, "/hello"); !errors.Is(err, channel.ErrDown) {
		t.Fatalf("without an agent: %v", err)
	}
	a := serve(t, c)
	answers(t, client)
	first := client.State().Instance
	a.stop()
	serve(t, c)
	answers(t, client)
	if s := client.State(); s.Instance == first {
		t.Errorf("the agent was started anew: %+v", s)
	}
}

// Requests end when the guest falls silent, whatever they wait for.
func TestSilentGuest(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	client := dial(t, c, channel.WithDeadAfter(800*time.Millisecond))
	over := make(chan error, 1)
	go func() {
		_, err := get(context.WithoutCancel(t.Context()), client, "/hang")
		over <- err
	}()
	time.Sleep(1500 * time.Millisecond) // longer than the limit: a guest that answers is not dead
	if s := client.State(); !s.Up || s.Connections != 1 {
		t.Fatalf("an idle connection was given up: %+v", s)
	}
	c.Set(channeltest.Faults{Lose: 1})
	select {
	case err := <-over:
		if err == nil {
			t.Error("the request has an answer")
		}
	case <-time.After(patience):
		t.Fatal("the request never ended")
	}
	c.Set(channeltest.Faults{})
	answers(t, client)
}

func TestSecondClientIsRefused(t *testing.T) {
	c := channeltest.New(t)
	serve(t, c)
	client := dial(t, c)
	if _, err := channel.Open(c.Socket()); !errors.Is(err, channel.ErrBusy) {
		t.Fatalf("a second client: %v", err)
	}
	mustGet(t, client, "/hello")
	client.Close()
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(c.Socket()), "*.lock")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	mustGet(t, dial(t, c), "/hello")
	if _, err := client.Wait(t.Context()); !errors.Is(err, channel.ErrClosed) {
		t.Errorf("a closed client: %v", err)
	}
}

func TestNoSocket(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := channel.Dial(ctx, filepath.Join(t.TempDir(), "none"))
	if !errors.Is(err, channel.ErrDown) || !errors.Is(err, os.ErrNotExist) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if err == nil || !strings.Contains(err.Error(), "none") {
		t.Errorf("error %v does not name the socket", err)
	}
}
