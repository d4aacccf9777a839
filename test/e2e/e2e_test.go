package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/test/rig"
)

// onCards reports whether the GPUs are cards, on a machine that may have nothing but these and their driver.
func onCards(t *testing.T) bool {
	t.Helper()
	memory, err := rig.TestMemory()
	if err != nil {
		t.Fatal(err)
	}
	return memory == rig.Cards
}

func start(t *testing.T, env ...string) *rig.Rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "gx") // short: sockets lie in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r, err := rig.Start(t.Context(), rig.Options{Dir: dir, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Close()
		if t.Failed() {
			t.Logf("log of hostd:\n%s\nlog of gpuguest:\n%s", tail(r.Log(), 16<<10), tail(r.GuestLog(), 16<<10))
		}
	})
	return r
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

// app is a running application.
type app struct {
	cmd  *exec.Cmd
	out  testkit.Log
	done chan struct{}
	err  error
}

func (a *app) output() string { return a.out.String() }

func launch(t *testing.T, cmd *exec.Cmd) *app {
	t.Helper()
	a := &app{cmd: cmd, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &a.out, &a.out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { a.err = cmd.Wait(); close(a.done) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-a.done })
	return a
}

// until waits until the application has printed the text.
func (a *app) until(t *testing.T, text string) {
	t.Helper()
	testkit.Until(t, fmt.Sprintf("%q in the output", text), func() error {
		over := false
		select {
		case <-a.done: // looked at first: what it printed last is there then
			over = true
		default:
		}
		out := a.output()
		if over && !strings.Contains(out, text) {
			t.Fatalf("ended (%v) before it printed %q: %s", a.err, text, out)
		}
		return testkit.Want(strings.Contains(out, text), out)
	})
}

func (a *app) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-a.done:
		return a.err
	case <-testkit.Context(t).Done():
		t.Fatalf("does not end: %s", a.output())
		return nil
	}
}

var checksum = regexp.MustCompile(`checksum \d+ [0-9a-f]{16}`)

// native runs stream on a runtime itself and returns the line with its checksum.
func native(t *testing.T, args ...string) string {
	t.Helper()
	root, err := rig.Root()
	if err != nil {
		t.Fatal(err)
	}
	env, err := rig.Native(t.TempDir(), rig.Pthread)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(root, "test/cl/bin/stream"), args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	line := checksum.Find(out)
	if err != nil || line == nil {
		t.Fatalf("native run: %v: %s", err, out)
	}
	return string(line)
}

var variants = map[string][]string{
	"plain":   {"--images"},
	"threads": {"--threads", "2", "--queues", "2"},
	"events":  {"--events", "--queues", "2"},
	"mapped":  {"--mapped"},
}

// TestSwapPairs swaps every variant of stream over every ordered pair of runtimes.
func TestSwapPairs(t *testing.T) {
	r := start(t)
	gpus := []string{rig.Basic, rig.Pthread, rig.Oclgrind}
	for name, variant := range variants {
		for _, from := range gpus {
			for _, to := range gpus {
				if from == to {
					continue
				}
				size := "1024"
				if from == rig.Oclgrind || to == rig.Oclgrind {
					size = "32" // it interprets
				}
				t.Run(fmt.Sprintf("%s/%s-%s", name, from, to), func(t *testing.T) {
					args := append([]string{"--kib", size, "--buffers", "2"}, variant...)
					s := launchStream(t, r, from, args...)
					s.until(t, "iteration 2 ")
					swap(t, r, to)
					s.more(t, 2)
					s.verify(t)
				})
			}
		}
	}
}

// stream is a running stream that ends when it is told to.
type stream struct {
	*app
	args []string
	stop io.Closer
}

func launchStream(t *testing.T, r *rig.Rig, gpu string, args ...string) *stream {
	t.Helper()
	cmd := r.Command(t.Context(), gpu, append([]string{r.Program("stream"), "--verbose", "--stdin"}, args...)...)
	stop, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	return &stream{launch(t, cmd), args, stop}
}

// more waits for n more iterations.
func (s *stream) more(t *testing.T, n int) {
	t.Helper()
	s.until(t, fmt.Sprintf("iteration %d ", strings.Count(s.output(), "iteration ")+n))
}

// verify ends the stream and compares its checksum with that of as many iterations natively.
func (s *stream) verify(t *testing.T) {
	t.Helper()
	_ = s.stop.Close()
	if err := s.wait(t); err != nil {
		t.Fatalf("%v: %s", err, tail(s.output(), 4096))
	}
	got := checksum.FindString(s.output())
	if got == "" {
		t.Fatalf("no checksum: %s", s.output())
	}
	if want := native(t, append([]string{"--iterations", strings.Fields(got)[1]}, s.args...)...); got != want {
		t.Errorf("%s, natively %s", got, want)
	}
}

func session(t *testing.T, r *rig.Rig) string {
	t.Helper()
	id, err := r.Session(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func swap(t *testing.T, r *rig.Rig, to string) rig.Swap {
	t.Helper()
	s, err := r.Operate(t.Context(), "migrate", session(t, r), "--to", to)
	if err != nil {
		t.Fatal(err)
	}
	if s.RolledBack || s.Refused {
		t.Fatalf("to %s: %+v", to, s)
	}
	t.Logf("to %s: stood still %v of %v", to, s.Stopped, s.Total)
	return s
}

// TestSwapBackAndForth swaps one run many times.
func TestSwapBackAndForth(t *testing.T) {
	r := start(t)
	args := []string{"--mib", "1", "--events", "--mapped", "--images", "--threads", "2", "--queues", "2"}
	a := launchStream(t, r, rig.Basic, args...)
	a.until(t, "iteration 2 ")
	for _, to := range []string{rig.Pthread, rig.Basic, rig.Pthread, rig.Basic, rig.Pthread} {
		swap(t, r, to)
		a.more(t, 2)
	}
	a.more(t, 3)
	a.verify(t)
}

// TestConform runs the conformance cases natively and through gpuctl, on both GPUs at
// a time. A native run is the same in each kind of memory, so there is only one.
func TestConform(t *testing.T) {
	r := start(t)
	known := filepath.Join(r.Root, "test/cl/known-native-failures.txt")
	memory, err := rig.TestMemory()
	if err != nil {
		t.Fatal(err)
	}
	profiles := map[string]string{rig.Pthread: "pocl-pthread", rig.Basic: "pocl-basic"}
	if memory == rig.Mesa {
		profiles[rig.Pthread] = "rusticl"
	}
	if memory == rig.Cards {
		profiles = map[string]string{rig.Pthread: "nvidia-1", rig.Basic: "nvidia-0"}
	}
	for gpu, profile := range profiles {
		args := append([]string{"--isolate", "--profile", profile, "--known", known}, strings.Fields(os.Getenv("GPUCTL_TEST_CASES"))...)
		run := func(t *testing.T, cmd *exec.Cmd) {
			a := launch(t, cmd)
			select {
			case <-a.done:
			case <-testkit.Context(t).Done():
				_ = cmd.Process.Kill()
				t.Error("it does not end")
			}
			<-a.done
			for line := range strings.Lines(a.output()) {
				if !strings.HasPrefix(line, "ok") {
					t.Log(strings.TrimSpace(line))
				}
			}
			if a.err != nil {
				t.Error(a.err)
			}
		}
		t.Run("native/"+profile, func(t *testing.T) {
			if memory != rig.Unified && memory != rig.Cards {
				t.Skip("runs in unified memory")
			}
			t.Parallel()
			env, err := rig.Native(t.TempDir(), gpu)
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), r.Program("conform"), args...)
			cmd.Env = append(os.Environ(), env...)
			run(t, cmd)
		})
		t.Run("gpuctl/"+profile, func(t *testing.T) {
			t.Parallel()
			run(t, r.Command(t.Context(), gpu, append([]string{r.Program("conform"), "--virtual"}, args...)...))
		})
	}
}

func client(r *rig.Rig) gpuctlv1connect.HostServiceClient {
	return gpuctlv1connect.NewHostServiceClient(unixrpc.Client(filepath.Join(r.Dir, "hostd.sock")), "http://hostd")
}

// TestFaults injects a failure at every step of a swap: the application ends
// with the right result, on the source or on the target.
func TestFaults(t *testing.T) {
	r := start(t, "GPUCTL_FAULTS=1")
	args := []string{"--mib", "1", "--buffers", "4", "--mapped", "--queues", "2"}
	for _, fault := range []string{
		"check", "start", "prepare", "precopy", "freeze", "transfer", "switch", "retire",
		"kill_target@prepare", "kill_target@precopy", "kill_target@freeze", "kill_target@transfer",
	} {
		t.Run(fault, func(t *testing.T) {
			a := launchStream(t, r, rig.Basic, args...)
			a.until(t, "iteration 3 ")
			stream, err := client(r).Swap(t.Context(), connect.NewRequest(&gpuctlv1.HostSwapRequest{
				Session: session(t, r), Verb: gpuctlv1.Verb_VERB_MIGRATE, To: rig.Pthread, FailAt: fault,
			}))
			if err != nil {
				t.Fatal(err)
			}
			var result *gpuctlv1.SwapResult
			for stream.Receive() {
				if p := stream.Msg().GetProgress(); p.GetResult() != nil {
					result = p.GetResult()
				}
			}
			t.Logf("result: rolled back %v, error %q, stream %v", result.GetRolledBack(), result.GetError(), stream.Err())
			failed := result.GetError() != "" || stream.Err() != nil
			if committed := fault == "retire"; failed == committed { // after the commit nothing is taken back
				t.Errorf("failed: %v, committed before the fault: %v", failed, committed)
			}
			a.more(t, 3)
			a.verify(t)
		})
	}
}

// children returns the processes below pid whose command line matches a pattern.
func children(t *testing.T, pid int, pattern string) []int {
	t.Helper()
	like := regexp.MustCompile(pattern)
	parent := make(map[int]int)
	dirs, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range dirs {
		b, err := os.ReadFile(d)
		if err != nil {
			continue
		}
		s := string(b)
		f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
		id, _ := strconv.Atoi(strings.Fields(s)[0])
		parent[id], _ = strconv.Atoi(f[1])
	}
	var found []int
	for id := range parent {
		for p := id; p > 1; p = parent[p] {
			if p != pid || id == pid {
				continue
			}
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", id)); err == nil && like.MatchString(strings.ReplaceAll(string(b), "\x00", " ")) {
				found = append(found, id)
			}
			break
		}
	}
	return found
}

// gpuguest is the pattern of its processes, also of the one with carriers.
const gpuguest = "gpuguest(-carried)? serve"

// TestExecutorKilled expects errors of OpenCL in the application, not a crash.
func TestExecutorKilled(t *testing.T) { executorKilled(t) }

// A profiler's or a timer's signals, more often than the application's library
// looks whether its executor lives, keep it from nothing.
func TestExecutorKilledUnderAnApplicationThatGetsSignals(t *testing.T) { executorKilled(t, "--ticks") }

func executorKilled(t *testing.T, args ...string) {
	t.Helper()
	r := start(t)
	a := launch(t, r.Command(t.Context(), rig.Pthread, append([]string{r.Program("stream"), "--verbose", "--seconds", "60"}, args...)...))
	a.until(t, "iteration 3 ")
	victims := children(t, r.Pid(), "executor --config")
	if len(victims) == 0 {
		t.Fatal("no executor found")
	}
	for _, pid := range victims {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	err := a.wait(t)
	exit := (*exec.ExitError)(nil)
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the application ends with %v, not 1: %s", err, a.output())
	}
	if !strings.Contains(a.output(), "OpenCL error") {
		t.Errorf("no OpenCL error in: %s", a.output())
	}
}

// TestHostdKilled expects that the application does not notice.
func TestHostdKilled(t *testing.T) {
	r := start(t)
	args := []string{"--mib", "1"}
	a := launchStream(t, r, rig.Pthread, args...)
	a.until(t, "iteration 3 ")
	if err := syscall.Kill(r.Pid(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	a.more(t, 3)
	a.verify(t)
}

// TestGpuguestKilled expects that a running session goes on, and that hostd finds it again.
func TestGpuguestKilled(t *testing.T) {
	r := start(t)
	args := []string{"--mib", "1"}
	a := launchStream(t, r, rig.Basic, args...)
	a.until(t, "iteration 3 ")
	victims := children(t, r.Pid(), gpuguest)
	if len(victims) != 1 {
		t.Fatalf("%d gpuguests found", len(victims))
	}
	if err := syscall.Kill(victims[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	a.more(t, 3)
	a.verify(t)
}

// TestHostileKernel has a kernel make system calls, as it can where a kernel is
// native code.
func TestHostileKernel(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to give sessions users of their own")
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("the kernel makes system calls of x86-64")
	}
	if onCards(t) {
		t.Skip("a card's kernels are no native code")
	}
	r := start(t)
	secret := filepath.Join(r.Dir, "secret")
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, gpu := range []string{rig.Basic, rig.Pthread} {
		out, err := r.Command(t.Context(), gpu, r.Program("hostile"), secret, strconv.Itoa(r.Pid())).CombinedOutput()
		if err != nil {
			t.Fatal(err, string(out))
		}
		var uid, read, write, signal, ptrace, network syscall.Errno
		var n [6]int
		if _, err := fmt.Sscanf(string(out), "uid %d read %d write %d signal %d ptrace %d network %d", &n[0], &n[1], &n[2], &n[3], &n[4], &n[5]); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for i, e := range []*syscall.Errno{&uid, &read, &write, &signal, &ptrace, &network} {
			*e = syscall.Errno(max(-n[i], 0))
		}
		if uint32(n[0]) <= confine.DefaultRange().First || uint32(n[0]) > confine.DefaultRange().Last {
			t.Errorf("%s: the kernel runs as user %d", gpu, n[0])
		}
		if read != syscall.EACCES || write != syscall.EACCES || signal != syscall.EPERM || ptrace != syscall.EPERM || network != syscall.EAFNOSUPPORT {
			t.Errorf("%s: %s", gpu, out)
		}
	}
}

// TestSuspendResume suspends to memory and to a file, and resumes on another model.
func TestSuspendResume(t *testing.T) {
	r := start(t)
	args := []string{"--mib", "1", "--mapped", "--images"}
	states, err := r.States()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"", filepath.Join(states, "state"), filepath.Join(t.TempDir(), "of-who-asks")} {
		t.Run("file="+filepath.Base(file), func(t *testing.T) {
			a := launchStream(t, r, rig.Basic, args...)
			a.until(t, "iteration 3 ")
			id := session(t, r)
			suspend := []string{"suspend", id}
			if file != "" {
				suspend = append(suspend, "--file", file)
			}
			if _, err := r.Gpuctl(t.Context(), suspend...); err != nil {
				t.Fatal(err)
			}
			before := a.output()
			time.Sleep(300 * time.Millisecond) // nothing tells that it prints nothing
			if a.output() != before {
				t.Error("the application goes on while it is suspended")
			}
			if n := len(children(t, r.Pid(), "executor --config")); n != 0 {
				t.Errorf("%d executors still hold a GPU", n)
			}
			if _, err := r.Gpuctl(t.Context(), "resume", id, "--to", rig.Pthread); err != nil {
				t.Fatal(err)
			}
			a.more(t, 3)
			a.verify(t)
		})
	}
}

// TestSuspendDiskFull expects that the application goes on where it was.
func TestSuspendDiskFull(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("mount: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	if err := rig.Passable(dir); err != nil {
		t.Fatal(err)
	}
	args := []string{"--mib", "4"}
	a := launchStream(t, r, rig.Pthread, args...)
	a.until(t, "iteration 3 ")
	_, err := r.Gpuctl(t.Context(), "suspend", session(t, r), "--file", filepath.Join(dir, "state"))
	exit := (*rig.ExitError)(nil)
	if !errors.As(err, &exit) || exit.Code != 1 && exit.Code != 3 { // 3: seen beforehand
		t.Errorf("suspend to a full disk: %v", err)
	}
	a.more(t, 3)
	a.verify(t)
}

// TestProgramCache swaps x264 and then lets it load the program binary that it
// had cached on the other runtime.
func TestProgramCache(t *testing.T) {
	if _, err := exec.LookPath("x264"); err != nil {
		if onCards(t) {
			t.Skip(err)
		}
		t.Fatal(err, ": make setup")
	}
	r := start(t)
	dir := t.TempDir()
	clip, bin := filepath.Join(dir, "in.y4m"), filepath.Join(dir, "x264.clbin")
	gen := exec.CommandContext(t.Context(), "ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc2=size=320x180:rate=25", "-frames:v", "30", "-pix_fmt", "yuv420p", clip)
	if out, err := gen.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	encode := func(gpu string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute) // it compiles for 25 s on two cores that nothing else uses
		defer cancel()
		out, err := r.Command(ctx, gpu, "x264", "--opencl", "--opencl-clbin", bin, "--threads", "1", "-o", filepath.Join(dir, "out.264"), clip).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	first := encode(rig.Pthread)
	if !strings.Contains(first, "OpenCL acceleration enabled") {
		t.Fatalf("x264 does not use the GPU: %s", first)
	}
	before, err := os.ReadFile(bin)
	if err != nil {
		t.Fatal(err)
	}
	second := encode(rig.Basic) // another model, the same virtual device
	if strings.Contains(second, "Compiling OpenCL kernels") {
		t.Errorf("the cached binary was not used: %s", second)
	}
	after, err := os.ReadFile(bin) // x264 writes it anew each time
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(before, after) {
		t.Error("the cached binary differs by model")
	}
}

// TestSwapWhileAnUnmapWaits swaps while a request to unmap a region waits for the application,
// which writes the region before and after.
func TestSwapWhileAnUnmapWaits(t *testing.T) {
	r := start(t)
	cmd := r.Command(t.Context(), rig.Basic, r.Program("late"), "--rounds", "4")
	next, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	a := launch(t, cmd)
	for i, to := range []string{rig.Pthread, rig.Basic, rig.Pthread, rig.Basic} {
		a.until(t, fmt.Sprintf("waits %d", i))
		swap(t, r, to)
		if _, err := io.WriteString(next, "\n"); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.wait(t); err != nil || !strings.Contains(a.output(), "ok") {
		t.Errorf("%v: %s", err, a.output())
	}
}
