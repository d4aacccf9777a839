package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

const selfEnv = "GPUCTL_TEST_HOSTD_NVML"

func TestMain(m *testing.M) {
	if os.Getenv(selfEnv) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// library compiles the test's NVML. What it does is in the file mode.
func testLibrary(t *testing.T) (env []string, mode func(string)) {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Fatal("needs gcc: make setup")
	}
	dir := t.TempDir()
	out, err := exec.Command(gcc, "-shared", "-fPIC", "-w", "-o", filepath.Join(dir, "libnvidia-ml.so.1"), "testdata/nvml.c").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	file := filepath.Join(dir, "mode")
	mode = func(m string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(m), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	mode("")
	return append(os.Environ(), selfEnv+"=1", "LD_LIBRARY_PATH="+dir, "GPUCTL_TEST_MODE="+file, "GORACE=atexit_sleep_ms=0"), mode
}

func client(t *testing.T, env []string) *nvml.Client {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := nvml.New(nvml.Config{
		Path: self, Env: env, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Timeout: 2 * time.Second, EndTimeout: 2 * time.Second, Backoff: time.Millisecond, MaxBackoff: time.Millisecond, LookAgain: time.Millisecond,
	})
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func ptr[T any](v T) *T { return &v }

func TestListThroughTheLibrary(t *testing.T) {
	env, mode := testLibrary(t)
	c := client(t, env)
	got, err := c.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := &nvml.Response{
		Version: nvml.Version, Number: got.Number, Status: nvml.OK, Driver: "550.54.15", CUDA: "12.4",
		GPUs: []nvml.GPU{
			{
				UUID: "GPU-0", Name: "NVIDIA Test", PCIAddress: "0000:c1:00.0", Memory: ptr(uint64(1000)), UsedMemory: ptr(uint64(10)), Temperature: ptr(int32(40)),
				Processes: []nvml.Process{{PID: 100, Name: "train100", Memory: ptr(uint64(5))}, {PID: 101, Name: "train101"}},
			},
			{UUID: "GPU-1", Name: "NVIDIA Test", PCIAddress: "0000:c2:00.0", Memory: ptr(uint64(1000)), UsedMemory: ptr(uint64(10)), Temperature: ptr(int32(40))},
		},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	mode("xid")
	if got, err = c.Facts(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]nvml.Xid{{Code: 79, Count: 2}}, got.GPUs[0].Xids); d != "" || got.GPUs[1].Xids != nil {
		t.Errorf("Xids: %s", d)
	}
	mode("lost")
	if got, err = c.Facts(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(got.GPUs) != 2 || !got.GPUs[1].Lost || got.GPUs[1].UUID != "GPU-1" || got.GPUs[0].Lost {
		t.Errorf("lost: %+v", got.GPUs)
	}
}

func TestDriverGoesWrong(t *testing.T) {
	for _, c := range []struct {
		mode, part string
		want       error
	}{
		{"abort", "SIGABRT", nvml.ErrUnhealthy},
		{"segv", "SIGSEGV", nvml.ErrUnhealthy},
		{"hang", "no answer in", nvml.ErrUnhealthy},
		{"mismatch", "Driver/library version mismatch", nvml.ErrUnhealthy},
		{"unloaded", "kernel module", nvml.ErrNoDriver},
	} {
		t.Run(c.mode, func(t *testing.T) {
			env, mode := testLibrary(t)
			client := client(t, env)
			mode(c.mode)
			if _, err := client.List(t.Context()); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.part) {
				t.Fatalf("got %v", err)
			}
			mode("")
			testkit.Until(t, "it works again", func() error {
				_, err := client.List(t.Context())
				return err
			})
		})
	}
}

// A driver that does not let go is left by the end of the process.
func TestReleaseOfAHangingDriver(t *testing.T) {
	env, mode := testLibrary(t)
	c := client(t, env)
	if _, err := c.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	mode("stay")
	if err := c.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := c.List(t.Context()); !errors.Is(err, nvml.ErrReleased) {
		t.Errorf("got %v", err)
	}
}

func TestNoLibrary(t *testing.T) {
	if _, status, _ := open(); status == nvml.OK {
		t.Skip("this machine has an NVIDIA driver")
	}
	c := client(t, append(os.Environ(), selfEnv+"=1", "GORACE=atexit_sleep_ms=0"))
	if _, err := c.List(t.Context()); !errors.Is(err, nvml.ErrNoDriver) {
		t.Errorf("got %v", err)
	}
	var out, errs bytes.Buffer
	if err := run([]string{"--once", "list"}, cmdutil.Stdio{Out: &out, Err: &errs}); err != nil {
		t.Error(err)
	}
	var answer nvml.Response
	if err := json.Unmarshal(out.Bytes(), &answer); err != nil || answer.Status != nvml.NoDriver || errs.Len() > 0 {
		t.Errorf("%v: %s%s", err, &out, &errs)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{{"--once", "release"}, {"--twice"}, {"list"}} {
		var out, errs bytes.Buffer
		if err := run(args, cmdutil.Stdio{In: strings.NewReader(""), Out: &out, Err: &errs}); cmdutil.Code(err) != cmdutil.BadUse {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func TestServeEndsWithItsInput(t *testing.T) {
	c := newCollector(func() (library, nvml.Status, string) { return library{}, nvml.NoDriver, "none" })
	var in, out bytes.Buffer
	for n := range uint64(3) {
		if err := nvml.WriteMessage(&in, nvml.Request{Version: nvml.Version, Number: n, Op: nvml.List}, nvml.MaxRequest); err != nil {
			t.Fatal(err)
		}
	}
	if err := serve(c, &in, &out); err != nil {
		t.Fatal(err)
	}
	for n := range uint64(3) {
		var answer nvml.Response
		if err := nvml.ReadMessage(&out, &answer, nvml.MaxResponse); err != nil || answer.Number != n || answer.Status != nvml.NoDriver {
			t.Errorf("%+v, %v", answer, err)
		}
	}
	if err := serve(c, strings.NewReader("\xff\xff\xff\xff"), &out); !errors.Is(err, nvml.ErrProtocol) {
		t.Errorf("got %v", err)
	}
}
