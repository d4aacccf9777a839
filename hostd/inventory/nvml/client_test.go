package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// The test binary is its own helper: what it does is in a file, so that it can
// change while the client lives.
const scriptEnv = "GPUCTL_TEST_NVML"

func TestMain(m *testing.M) {
	if script := os.Getenv(scriptEnv); script != "" {
		os.Exit(fakeHelper(script))
	}
	goleak.VerifyTestMain(m)
}

func fakeHelper(script string) int {
	starts, _ := os.OpenFile(script+".starts", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	fmt.Fprintln(starts, os.Getpid())
	for {
		var r Request
		if err := ReadMessage(os.Stdin, &r, MaxRequest); err != nil {
			return 0
		}
		mode, err := os.ReadFile(script)
		if err != nil {
			return 9
		}
		answer := Response{Version: Version, Number: r.Number, Status: OK, Driver: "550.54", GPUs: []GPU{{UUID: "GPU-1", PCIAddress: "0000:65:00.0"}}}
		switch string(mode) {
		case "none":
			answer = Response{Version: Version, Number: r.Number, Status: NoDriver, Message: "libnvidia-ml.so.1 is not installed"}
		case "failed":
			answer = Response{Version: Version, Number: r.Number, Status: Failed, Message: "initialize: driver and library differ"}
		case "crash":
			fmt.Fprintln(os.Stderr, "SIGSEGV: segmentation violation")
			_ = syscall.Kill(os.Getpid(), syscall.SIGABRT)
			time.Sleep(time.Hour) // until it has died of it
		case "hang":
			time.Sleep(time.Hour) // until it is killed
		case "version":
			answer.Version++
		case "number":
			answer.Number++
		case "garbage":
			os.Stdout.WriteString("\x00\x00\x00\x05hello")
			continue
		case "huge":
			os.Stdout.WriteString("\xff\xff\xff\xffhello")
			continue
		case "stay": // does not end when it should
			if r.Op == Release {
				time.Sleep(time.Hour) // until it is killed
			}
		}
		if err := WriteMessage(os.Stdout, answer, MaxResponse); err != nil {
			return 8
		}
		if r.Op == Release {
			return 0
		}
	}
}

type bench struct {
	*Client
	t      *testing.T
	script string
	log    *testkit.Log
}

func newBench(t *testing.T, mode string, change ...func(*Config)) *bench {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, script: filepath.Join(t.TempDir(), "mode"), log: &testkit.Log{}}
	b.does(mode)
	c := Config{
		Path: self, Env: append(os.Environ(), scriptEnv+"="+b.script, "GORACE=atexit_sleep_ms=0"), Log: slog.New(slog.NewTextHandler(b.log, nil)),
		Timeout: 5 * time.Second, EndTimeout: 5 * time.Second, Backoff: time.Millisecond, MaxBackoff: 4 * time.Millisecond, LookAgain: time.Hour,
	}
	for _, f := range change {
		f(&c)
	}
	b.Client = New(c)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return b
}

func (b *bench) does(mode string) {
	b.t.Helper()
	if err := os.WriteFile(b.script+".new", []byte(mode), 0o600); err != nil {
		b.t.Fatal(err)
	}
	if err := os.Rename(b.script+".new", b.script); err != nil {
		b.t.Fatal(err)
	}
}

// started are the process ids of all helpers so far.
func (b *bench) started() []string {
	data, _ := os.ReadFile(b.script + ".starts")
	return strings.Fields(string(data))
}

func (b *bench) want(want error, part string) {
	b.t.Helper()
	_, err := b.List(b.t.Context())
	if !errors.Is(err, want) || want != nil && !strings.Contains(err.Error(), part) {
		b.t.Fatalf("got %v, want %v with %q", err, want, part)
	}
	if b.Available() != (want == nil) {
		b.t.Fatalf("available is %v after %v", b.Available(), err)
	}
}

// later waits until the pause after a failure is over.
func (b *bench) later(want error) {
	b.t.Helper()
	testkit.Until(b.t, fmt.Sprint("an answer: ", want), func() error {
		_, err := b.Facts(b.t.Context())
		return testkit.Want(errors.Is(err, want), err)
	})
}

func TestOneHelperServesAllRequests(t *testing.T) {
	b := newBench(t, "ok")
	if b.Available() || len(b.started()) != 0 {
		t.Error("something happened before the first request")
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if r, err := b.List(t.Context()); err != nil || len(r.GPUs) != 1 || r.Driver != "550.54" {
					t.Errorf("%+v, %v", r, err)
				}
			}
		})
	}
	wg.Wait()
	if n := len(b.started()); n != 1 {
		t.Errorf("%d helpers", n)
	}
}

func TestNoDriverIsQuiet(t *testing.T) {
	b := newBench(t, "none")
	for range 5 {
		b.want(ErrNoDriver, "libnvidia-ml.so.1 is not installed")
	}
	if n := len(b.started()); n != 1 {
		t.Errorf("%d helpers were started to find nothing", n)
	}
	if log := b.log.String(); strings.Count(log, "\n") != 1 || strings.Contains(log, "WARN") {
		t.Errorf("log: %s", log)
	}
	if b.helper != nil {
		t.Error("a helper that has nothing to do stays")
	}
	b.does("ok")
	b.notUntil = time.Now()
	b.want(nil, "")
}

func TestNoHelper(t *testing.T) {
	b := newBench(t, "ok", func(c *Config) { c.Path = "/nonexistent/hostd-nvml" })
	b.want(ErrNoHelper, "/nonexistent")
	b.want(ErrNoHelper, "")
	t.Setenv("PATH", t.TempDir())
	b = newBench(t, "ok", func(c *Config) { c.Path = "" })
	b.want(ErrNoHelper, "not installed")
}

func TestFailures(t *testing.T) {
	for mode, part := range map[string]string{
		"crash": "SIGSEGV", "failed": "driver and library differ", "version": "one release", "number": "answer", "garbage": "not a message", "huge": "more than",
	} {
		b := newBench(t, "ok")
		b.want(nil, "")
		b.does(mode)
		b.want(ErrUnhealthy, part)
		b.does("ok")
		b.later(nil)
		if n := len(b.started()); n != 2 {
			t.Errorf("%s: %d helpers", mode, n)
		}
		if !strings.Contains(b.log.String(), "nvml failed") {
			t.Errorf("%s: log: %s", mode, b.log)
		}
	}
}

func TestCrashSaysHow(t *testing.T) {
	b := newBench(t, "crash")
	b.want(ErrUnhealthy, "SIGABRT")
}

func TestHangIsCut(t *testing.T) {
	b := newBench(t, "ok", func(c *Config) { c.Timeout = 2 * time.Second })
	b.later(nil)
	b.does("hang")
	b.want(ErrUnhealthy, "no answer in 2s")
	hung := b.started()
	b.does("ok")
	b.later(nil)
	if !gone(t, hung[len(hung)-1]) {
		t.Error("the helper that hung still runs")
	}
}

// A caller that leaves must not get the next one its answer.
func TestCallerLeaves(t *testing.T) {
	b := newBench(t, "hang")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := b.List(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	b.does("ok")
	b.want(nil, "")
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := b.List(ended); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestCrashLoopIsSlowedDown(t *testing.T) {
	b := newBench(t, "crash", func(c *Config) { c.Backoff, c.MaxBackoff = time.Hour, 3*time.Hour })
	for range 10 {
		b.want(ErrUnhealthy, "")
	}
	if n := len(b.started()); n != 1 {
		t.Errorf("%d helpers", n)
	}
	for i, want := range []time.Duration{2 * time.Hour, 3 * time.Hour, 3 * time.Hour} {
		b.notUntil = time.Now()
		b.want(ErrUnhealthy, "")
		if pause := time.Until(b.notUntil); pause > want || pause < want-time.Minute {
			t.Errorf("pause %d is %v, want %v", i, pause, want)
		}
	}
}

func TestHelperDiesBetweenRequests(t *testing.T) {
	b := newBench(t, "ok")
	b.want(nil, "")
	if err := b.helper.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-b.helper.done
	b.want(ErrUnhealthy, "signal: killed")
	b.later(nil)
}

func TestReleaseEndsTheHelper(t *testing.T) {
	b := newBench(t, "ok")
	if err := b.Release(t.Context()); err != nil { // nothing runs
		t.Fatal(err)
	}
	b.want(ErrReleased, "")
	b.Resume()
	b.want(nil, "")
	for range 2 {
		if err := b.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if !gone(t, b.started()[0]) {
		t.Error("the helper runs after Release")
	}
	b.want(ErrReleased, "")
	b.Resume()
	b.want(ErrReleased, "") // the other one holds
	b.Resume()
	b.want(nil, "")
	b.Resume() // once too often
	b.want(nil, "")
}

func TestReleaseKillsWhatStays(t *testing.T) {
	for _, mode := range []string{"stay", "hang", "crash"} {
		b := newBench(t, "ok", func(c *Config) { c.EndTimeout = 200 * time.Millisecond })
		b.want(nil, "")
		b.does(mode)
		if err := b.Release(t.Context()); err != nil {
			t.Errorf("%s: %v", mode, err)
		}
		if !gone(t, b.started()[0]) {
			t.Errorf("%s: the helper runs after Release", mode)
		}
		b.Resume()
	}
}

func TestReleaseThatIsNotWaitedFor(t *testing.T) {
	b := newBench(t, "hang")
	asked := make(chan struct{})
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	wg.Go(func() {
		close(asked)
		_, _ = b.List(ctx)
	})
	<-asked
	testkit.Until(t, "the helper runs", func() error { return testkit.Want(len(b.started()) > 0) })
	short, cancelShort := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancelShort()
	if err := b.Release(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	cancel()
	wg.Wait()
	b.does("ok")
	b.want(nil, "") // the release that failed holds nothing
}

func TestClosed(t *testing.T) {
	b := newBench(t, "ok")
	b.want(nil, "")
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if !gone(t, b.started()[0]) {
		t.Error("the helper outlives the client")
	}
	b.want(ErrClosed, "")
}

func TestWordsAreBounded(t *testing.T) {
	var w words
	fmt.Fprint(&w, "begin\n\x1b[0m")
	for i := range 1000 {
		fmt.Fprintf(&w, "line %d\n", i)
	}
	fmt.Fprint(&w, strings.Repeat("x", 5000)+"end")
	got := w.String()
	if len(got) > 2*maxWords+10 || !strings.HasPrefix(got, "begin [0mline 0 ") || !strings.HasSuffix(got, "xend") {
		t.Errorf("%d bytes: %q", len(got), got)
	}
	w = words{}
	fmt.Fprint(&w, strings.Repeat("x", maxWords)+"yz")
	if got := w.String(); got != strings.Repeat("x", maxWords)+"yz" {
		t.Errorf("got %q", got)
	}
}

func gone(t *testing.T, pid string) bool {
	t.Helper()
	_, err := os.Stat("/proc/" + pid)
	return errors.Is(err, os.ErrNotExist)
}
