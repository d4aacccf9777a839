package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/test/rig"
)

// printed is what print's kernels print, from one line up to another.
func printed(from, to int) string {
	var b strings.Builder
	for i := from; i < to; i++ {
		fmt.Fprintf(&b, "%d text\n", i)
	}
	return b.String()
}

func everyGPU(t *testing.T, f func(t *testing.T, r *rig.Rig, gpu string)) {
	r := start(t)
	for _, gpu := range []string{rig.Basic, rig.Pthread, rig.Oclgrind} {
		t.Run(gpu, func(t *testing.T) { f(t, r, gpu) })
	}
}

// Standard output is the application's to redirect, at any time.
func TestKernelOutputFollowsRedirection(t *testing.T) {
	everyGPU(t, func(t *testing.T, r *rig.Rig, gpu string) {
		a := launch(t, r.Command(t.Context(), gpu, r.Program("print"), "redirect", t.TempDir()))
		if err := a.wait(t); err != nil {
			t.Errorf("%v: %s", err, a.output())
		}
	})
}

// More is printed than fits anywhere, into a pipe that refuses to wait, and that
// the program empties itself. (PoCL's basic device answers nothing while a kernel
// runs, and Oclgrind would take minutes.)
func TestKernelOutputIntoFullPipe(t *testing.T) {
	if onCards(t) {
		t.Skip("NVIDIA's driver keeps the last MiB of what a kernel prints, and no more")
	}
	r := start(t)
	a := launch(t, r.Command(t.Context(), rig.Pthread, r.Program("print"), "full"))
	if err := a.wait(t); err != nil {
		t.Errorf("%v: %s", err, a.output())
	}
}

// speaker is a running `print steps` whose standard output is out.
type speaker struct {
	*app
	in io.WriteCloser
	n  int
}

func launchSpeaker(t *testing.T, r *rig.Rig, gpu string, out *os.File) *speaker {
	t.Helper()
	return launchSpeakerAs(t, r, gpu, out, r.Program("print"))
}

// launchSpeakerAs is launchSpeaker by way of other commands.
func launchSpeakerAs(t *testing.T, r *rig.Rig, gpu string, out *os.File, argv ...string) *speaker {
	t.Helper()
	cmd := r.Command(t.Context(), gpu, append(argv, "steps")...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	s := &speaker{app: &app{cmd: cmd, done: make(chan struct{})}, in: in}
	cmd.Stdout, cmd.Stderr = out, &s.out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { s.err = cmd.Wait(); close(s.done) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-s.done })
	s.until(t, "ready\n")
	return s
}

// ask has a kernel print n lines. The application waits for it, or makes no
// call until it is asked again.
func (s *speaker) ask(t *testing.T, n int, waits bool) {
	t.Helper()
	s.n += n
	if !waits {
		n = -n
	}
	if _, err := fmt.Fprintln(s.in, n); err != nil {
		t.Fatal(err)
	}
}

func (s *speaker) say(t *testing.T, n int, waits bool) {
	t.Helper()
	s.ask(t, n, waits)
	s.until(t, fmt.Sprintf("said %d\n", s.n))
}

// What kernels print comes once, in order, over swaps and a suspend, whether or
// not the application makes a call meanwhile.
func TestKernelOutputOverSwaps(t *testing.T) {
	r := start(t)
	out, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	s := launchSpeaker(t, r, rig.Basic, out)
	check := func(when string) {
		t.Helper()
		got, err := os.ReadFile(out.Name())
		if want := printed(0, s.n); err != nil || string(got) != want {
			t.Fatalf("%s: %d bytes and not %d (%v); they end: %q", when, len(got), len(want), err, tail(string(got), 200))
		}
	}
	s.say(t, 5, true)
	check("at first")
	for i, to := range []string{rig.Pthread, rig.Oclgrind, rig.Basic, rig.Pthread} {
		s.say(t, 100, false)
		swap(t, r, to)
		s.say(t, 7, i%2 == 0)
		s.say(t, 1, true)
		check("swapped to " + to)
	}
	s.say(t, 100, false)
	id := session(t, r)
	for _, args := range [][]string{{"suspend", id}, {"resume", id, "--to", rig.Basic}} {
		if _, err := r.Gpuctl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	s.say(t, 1, true)
	check("resumed")
	s.say(t, 3, false)
	s.in.Close()
	if err := s.wait(t); err != nil {
		t.Fatal(err, s.output())
	}
	check("at the end")
}

// A named pipe that nobody reads holds up its application, and nobody else: not
// a swap, and not the next gpuguest.
func TestKernelOutputIntoPipeThatNobodyReads(t *testing.T) {
	r := start(t)
	fifo := t.TempDir() + "/fifo"
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	end, err := os.OpenFile(fifo, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	out, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := launchSpeaker(t, r, rig.Pthread, out)
	out.Close()
	s.ask(t, 20000, true) // some 200 kB, more than the pipe takes
	full := func() error {
		n, err := unix.IoctlGetInt(int(end.Fd()), unix.TIOCINQ)
		return testkit.Want(err == nil && n > 32<<10, n, err)
	}
	testkit.Until(t, "the pipe is full", full)
	swap(t, r, rig.Basic)
	killGpuguest(t, r)
	swapByNext(t, r, rig.Pthread)
	got := make(chan []byte)
	go func() {
		b := make([]byte, len(printed(0, 20010)))
		_, _ = io.ReadFull(end, b)
		got <- b
	}()
	s.until(t, "said 20000\n")
	s.say(t, 10, true)
	select {
	case b := <-got:
		if !bytes.Equal(b, []byte(printed(0, 20010))) {
			t.Errorf("it ends: %q", tail(string(b), 200))
		}
	case <-testkit.Context(t).Done():
		t.Error("some of it is missing")
	}
}

func killGpuguest(t *testing.T, r *rig.Rig) {
	t.Helper()
	victims := children(t, r.Pid(), gpuguest)
	if len(victims) != 1 {
		t.Fatalf("%d gpuguests found", len(victims))
	}
	if err := unix.Kill(victims[0], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// swapByNext swaps as soon as the next gpuguest serves.
func swapByNext(t *testing.T, r *rig.Rig, to string) {
	t.Helper()
	testkit.Until(t, "a swap to "+to, func() error {
		s, err := r.Operate(t.Context(), "migrate", session(t, r), "--to", to)
		return testkit.Want(err == nil && !s.RolledBack && !s.Refused, s, err)
	})
}

// An application without rights chooses as its standard output a file that it
// can't write to. Root's gpuguest and its executors must not do it instead:
// not before a restart, and not after.
func TestApplicationHasNobodyWriteItsOutputForIt(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs another user's rights")
	}
	const uid = "4242"
	r := start(t)
	// All that the other user needs of this machine.
	dir, err := os.MkdirTemp("", "open")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	lib := filepath.Join(r.Root, "lib", "libgpuctl-opencl.so")
	for _, f := range []string{lib, r.Program("print")} {
		b, err := os.ReadFile(f)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(f)), b, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	err = errors.Join(os.Mkdir(filepath.Join(dir, "icd"), 0o755),
		os.WriteFile(filepath.Join(dir, "icd", "gpuctl.icd"), []byte(filepath.Join(dir, filepath.Base(lib))+"\n"), 0o644),
		os.Chmod(dir, 0o755), os.Chmod(r.Dir, 0o711))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		mode  os.FileMode
		flags int
	}{{"opened for reading", 0o644, os.O_RDONLY}, {"not even opened", 0o600, unix.O_PATH}} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "root's")
			const content = "nobody's but root's\n"
			if err := os.WriteFile(file, []byte(content), c.mode); err != nil {
				t.Fatal(err)
			}
			out, err := os.OpenFile(file, c.flags, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			s := launchSpeakerAs(t, r, rig.Basic, out, "env", "OCL_ICD_VENDORS="+filepath.Join(dir, "icd")+"/",
				"setpriv", "--reuid="+uid, "--regid="+uid, "--clear-groups", filepath.Join(dir, "print"))
			untouched := func(when string) {
				t.Helper()
				if b, err := os.ReadFile(file); err != nil || string(b) != content {
					t.Fatalf("%s: %q, %v", when, b, err)
				}
				for _, what := range []string{gpuguest, "gpuguest executor"} {
					pids := children(t, r.Pid(), what)
					if len(pids) == 0 {
						t.Fatalf("%s: no %s", when, what)
					}
					for _, pid := range pids {
						if fds := holds(t, pid, file); len(fds) > 0 {
							t.Errorf("%s: %s has the file as descriptor %v", when, what, fds)
						}
					}
				}
			}
			s.say(t, 3, true)
			untouched("at first")
			killGpuguest(t, r)
			swapByNext(t, r, rig.Pthread)
			s.say(t, 3, true)
			untouched("after a restart and a swap")
			swap(t, r, rig.Basic)
			s.say(t, 3, true)
			untouched("after another swap")
			s.in.Close()
			if err := s.wait(t); err != nil {
				t.Error(err, s.output())
			}
		})
	}
}

// holds are the descriptors that a process has of a file.
func holds(t *testing.T, pid int, file string) (fds []string) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if fi, err := os.Stat(filepath.Join(dir, e.Name())); err == nil && os.SameFile(fi, want) {
			fds = append(fds, e.Name())
		}
	}
	return fds
}
