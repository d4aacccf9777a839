package systemd_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/hostd/telemetry/systemd"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// listen is systemd's end.
func listen(t *testing.T) *net.UnixConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return c
}

func watched(t *testing.T, every time.Duration) {
	t.Helper()
	t.Setenv("WATCHDOG_USEC", strconv.FormatInt(every.Microseconds(), 10))
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
}

// next message, or "" if none comes in time.
func next(t *testing.T, c *net.UnixConn, patience time.Duration) string {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 4096)
	n, err := c.Read(b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func TestMessages(t *testing.T) {
	c := listen(t)
	n := systemd.New(quiet())
	if !n.Enabled() {
		t.Fatal("not enabled")
	}
	n.Ready("4 GPUs")
	n.Ready("a\nWATCHDOG=trigger\n b")
	n.Stopping("")
	n.Stopping(strings.Repeat("é", 400))
	for _, want := range []string{
		"READY=1\nSTATUS=4 GPUs", "READY=1\nSTATUS=a WATCHDOG=trigger b", "STOPPING=1", "STOPPING=1\nSTATUS=" + strings.Repeat("é", 256),
	} {
		if diff := cmp.Diff(want, next(t, c, 5*time.Second)); diff != "" {
			t.Error(diff)
		}
	}
	n.Reloading()
	at, ok := strings.CutPrefix(next(t, c, 5*time.Second), "RELOADING=1\nMONOTONIC_USEC=")
	if us, err := strconv.ParseInt(at, 10, 64); !ok || err != nil || us <= 0 {
		t.Errorf("reloading at %q", at)
	}
}

func TestWithoutSystemd(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	t.Setenv("WATCHDOG_USEC", "")
	for _, n := range []*systemd.Notifier{nil, systemd.New(quiet())} {
		if n.Enabled() {
			t.Error("enabled")
		}
		n.Ready("")
		n.Reloading()
		n.Stopping("x")
		n.Watch(t.Context(), func(context.Context) error { // returns at once
			t.Error("asked")
			return nil
		})
	}
}

func TestSystemdThatHasGone(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", filepath.Join(t.TempDir(), "gone"))
	systemd.New(quiet()).Ready("x")
}

func TestWatchdogOfAnother(t *testing.T) {
	c := listen(t)
	for name, env := range map[string][2]string{"other process": {"30000", "1"}, "nonsense": {"soon", strconv.Itoa(os.Getpid())}} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("WATCHDOG_USEC", env[0])
			t.Setenv("WATCHDOG_PID", env[1])
			systemd.New(quiet()).Watch(t.Context(), func(context.Context) error { return nil })
			if m := next(t, c, 50*time.Millisecond); m != "" {
				t.Errorf("sent %q", m)
			}
		})
	}
}

func watch(t *testing.T, n *systemd.Notifier, health func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { n.Watch(ctx, health) })
	return func() {
		cancel()
		wg.Wait()
	}
}

func TestWatchdogIsPettedWhileHealthy(t *testing.T) {
	c := listen(t)
	watched(t, 750*time.Millisecond)
	var sick atomic.Bool
	stop := watch(t, systemd.New(quiet()), func(context.Context) error {
		if sick.Load() {
			return errors.New("ledger:\nstuck")
		}
		return nil
	})
	defer stop()
	for range 3 {
		if m := next(t, c, 5*time.Second); m != "WATCHDOG=1" {
			t.Fatalf("sent %q", m)
		}
	}
	sick.Store(true)
	m := next(t, c, 5*time.Second)
	for range 3 { // those on their way
		if m != "WATCHDOG=1" {
			break
		}
		m = next(t, c, 5*time.Second)
	}
	if m != "STATUS=unhealthy: ledger: stuck" {
		t.Fatalf("sent %q", m)
	}
	if m := next(t, c, 800*time.Millisecond); m != "" {
		t.Fatalf("petted while unhealthy: %q", m)
	}
	sick.Store(false)
	if m := next(t, c, 5*time.Second); m != "WATCHDOG=1" {
		t.Fatalf("not petted after recovery: %q", m)
	}
}

func TestWatchdogNoticesWhatHangs(t *testing.T) {
	c := listen(t)
	watched(t, 750*time.Millisecond)
	release := make(chan struct{})
	var asked atomic.Int32
	stop := watch(t, systemd.New(quiet()), func(context.Context) error {
		asked.Add(1)
		<-release
		return nil
	})
	if m := next(t, c, 5*time.Second); m != "STATUS=unhealthy: "+systemd.ErrSilent.Error() {
		t.Fatalf("sent %q", m)
	}
	if m := next(t, c, 800*time.Millisecond); m != "" {
		t.Fatalf("petted while stuck: %q", m)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	close(release)
	if m := next(t, c, 5*time.Second); m != "WATCHDOG=1" {
		t.Fatalf("not petted after it came back: %q", m)
	}
	stop()
}
