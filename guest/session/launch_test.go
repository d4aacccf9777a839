package session

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/confine"
)

// surroundings is the environment that an executor runs in.
type surroundings struct {
	Config ExecutorConfig
	Env    []string
	Status map[string]string // /proc/self/status
	Leader bool              // of a session of its own
	Core   uint64            // rlimit
	Inodes [3]inode
	UID    int
}

// reportSurroundings is this test's binary as an executor. It writes its surroundings to a
// named pipe in its folder, and waits until it is killed.
func reportSurroundings() int {
	s := surroundings{Env: os.Environ(), Status: map[string]string{}, UID: os.Getuid()}
	var tasks uint64
	if i := slices.Index(os.Args, "--"+TasksFlag); i >= 0 {
		tasks, _ = strconv.ParseUint(os.Args[i+1], 10, 64)
	}
	if err := confine.Settle(tasks); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if i := slices.Index(os.Args, "--loaded-fd"); i >= 0 {
		fd, err := strconv.Atoi(os.Args[i+1])
		if err != nil || s.load(os.NewFile(uintptr(fd), "loaded")) != nil {
			return 4
		}
	}
	if slices.Contains(os.Args, "probe") {
		in, err := io.ReadAll(os.Stdin)
		if err != nil || len(in) == 0 {
			return 3
		}
		fmt.Fprintf(os.Stdout, "{\"platform\": \"%d\"}\n", os.Getpid())
		return 0
	}
	if err := json.NewDecoder(os.Stdin).Decode(&s.Config); err != nil {
		fmt.Fprintln(os.Stderr, "no configuration")
		return 3
	}
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 1
	}
	for sc := bufio.NewScanner(f); sc.Scan(); {
		k, v, _ := strings.Cut(sc.Text(), ":")
		s.Status[k] = strings.TrimSpace(v)
	}
	sid, _ := unix.Getsid(0)
	s.Leader = sid == os.Getpid()
	var r unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_CORE, &r)
	s.Core = r.Max
	for i := range s.Inodes {
		if s.Inodes[i], err = statInode(3+i, i); err != nil {
			return 1
		}
	}
	report := filepath.Join(s.Config.Dir, reportName)
	switch rt := (&gpuctlv1.Runtime{}); {
	case protojson.Unmarshal(s.Config.Runtime, rt) != nil:
		return 1
	case rt.GetLibrary() == "/victim.so":
		return beVictim(s.Config, report)
	case rt.GetLibrary() == "/hostile.so":
		return beHostile(rt.GetEnv()[victimEnv], report)
	case rt.GetLibrary() == "/chatty.so":
		return beChatty()
	}
	if err := tell(report, s); err != nil {
		return 1
	}
	if s.Config.Generation == 2 {
		fmt.Fprintln(os.Stderr, "the last word")
		return 5
	}
	time.Sleep(time.Minute) // until it is killed
	return 0
}

// tell writes to the pipe that the test reads.
func tell(report string, what any) error {
	to, err := os.OpenFile(report, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(json.NewEncoder(to).Encode(what), to.Close())
}

// load stands for the loading of a library: /crashes.so crashes, and /hangs.so does not
// return.
func (s *surroundings) load(tell *os.File) error {
	switch library := os.Args[slices.Index(os.Args, "--load")+1]; library {
	case "/crashes.so":
		fmt.Fprintln(os.Stderr, "panic: it crashes")
		return errors.New("crashed")
	case "/hangs.so":
		time.Sleep(time.Minute) // until it is killed
	}
	_, err := tell.Write([]byte{1})
	return errors.Join(err, tell.Close())
}

// A process that was started in advance becomes the next executor of its folder, if it is
// for the same runtime, and no other executor.
func TestExecutorsStartedAhead(t *testing.T) {
	spec, _, r := launchSpec(t)
	l := newExecLauncher(t)
	ahead := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		if st := l.warm[spec.Dir]; st != nil {
			return st.pid
		}
		return 0
	}
	for _, c := range []struct {
		name   string
		change func(s *Spec)
		is     bool
	}{
		{"the same", func(*Spec) {}, true},
		{"other devices", func(s *Spec) { s.Runtime.Devices = []uint32{1} }, true},
		{"another library", func(s *Spec) { s.Runtime.Library = "/other.so" }, false},
		{"another environment", func(s *Spec) { s.Runtime.Env = map[string]string{"A": "b"} }, false},
		{"another generation", func(s *Spec) { s.Generation = 3 }, false},
		{"another folder", func(s *Spec) { s.Dir = executorsFolder(t) }, false},
	} {
		if err := l.Warm(t.Context(), spec); err != nil {
			t.Fatal(c.name, err)
		}
		pid := ahead()
		other := spec
		other.Runtime = proto.CloneOf(spec.Runtime)
		c.change(&other)
		p, err := l.Launch(t.Context(), other, func(Process) error { return nil })
		if err != nil {
			t.Fatal(c.name, err)
		}
		var s surroundings
		report := r
		if other.Dir != spec.Dir {
			report = openReport(t, other.Dir)
		}
		if err := json.NewDecoder(report).Decode(&s); err != nil || s.Config.Generation != other.Generation {
			t.Error(c.name, s.Config, err)
		}
		if pid == 0 || (p.PID() == pid) != c.is {
			t.Errorf("%s: pid %d, started ahead was %d", c.name, p.PID(), pid)
		}
		if still := ahead(); (still != 0) != (c.name == "another folder") {
			t.Errorf("%s: ahead is still %d", c.name, still)
		}
		p.Kill()
		<-p.Done()
	}
	pid := ahead()
	l.Cool(spec.Dir)
	if err := WaitProcess(t.Context(), pid, 0); err != nil && !errors.Is(err, ErrGone) || ahead() != 0 { // it may have ended before
		t.Error(err, ahead())
	}

	spec.Runtime.Library = "/crashes.so"
	if err := l.Warm(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "it crashes") {
		t.Error(err)
	}
	spec.Runtime.Library = "/hangs.so"
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := l.Warm(ctx, spec); !errors.Is(err, context.DeadlineExceeded) || ahead() != 0 {
		t.Error(err, ahead())
	}
}

func TestProbeStartedAhead(t *testing.T) {
	l := newExecLauncher(t)
	rt := &gpuctlv1.Runtime{Library: "/l.so"}
	if err := l.Warm(t.Context(), Spec{Runtime: rt}); err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	pid := l.warm[""].pid
	l.mu.Unlock()
	for i := range 2 {
		res, err := l.Probe(t.Context(), rt)
		if err != nil {
			t.Fatal(err)
		}
		if (res.GetPlatform() == strconv.Itoa(pid)) != (i == 0) {
			t.Errorf("probe %d was process %s, started ahead was %d", i, res.GetPlatform(), pid)
		}
	}
}

// newExecLauncher returns a launcher that runs this test's binary. As root, it has a range
// of users of its own.
func newExecLauncher(t *testing.T) *ExecLauncher {
	t.Helper()
	l := &ExecLauncher{Dir: passable(t)}
	if os.Getuid() == 0 {
		l.Users = &confine.Users{Range: confine.Range{First: 0x7f100000, Last: 0x7f10ffff}, Dir: filepath.Join(t.TempDir(), "users")}
	}
	return l
}

// passable returns a folder that all users may pass through.
func passable(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != filepath.Clean(os.TempDir()) && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// executorsFolder returns an executors' folder in a session's, with a named pipe for a
// report.
func executorsFolder(t *testing.T) string {
	t.Helper()
	session, err := os.MkdirTemp("", "gh") // short, because a socket's path must be
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(session) })
	dir := filepath.Join(session, executorsName)
	report := filepath.Join(dir, reportName)
	if err := errors.Join(os.Chmod(session, 0o711), os.Mkdir(dir, 0o700), unix.Mkfifo(report, 0o600), os.Chmod(report, 0o666)); err != nil {
		t.Fatal(err)
	}
	return dir
}

const reportName = "report"

func openReport(t *testing.T, dir string) *os.File {
	t.Helper()
	r, err := os.OpenFile(filepath.Join(dir, reportName), os.O_RDWR, 0) // opened for writing, too: so there is no end of file between two reports
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// launchSpec returns a spec whose executor's report can be read.
func launchSpec(t *testing.T) (Spec, *memory, *os.File) {
	t.Helper()
	dir := executorsFolder(t)
	r := openReport(t, dir)
	mem, err := createMemory("s-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(mem.close)
	return Spec{
		Dir: dir, Log: filepath.Join(filepath.Dir(dir), "executor-1.log"), Generation: 1, Socket: filepath.Join(dir, "c1"), ImportSocket: "/i",
		Runtime: &gpuctlv1.Runtime{Library: "/l.so", Env: map[string]string{"POCL_DEVICES": "basic"}},
		Memory:  mem.files(), AppPID: 7, AppStart: 8,
	}, mem, r
}

func TestExecutorIsConfined(t *testing.T) {
	t.Setenv("GPUCTL_SOCKET", "/not/for/executors")
	t.Setenv("OCL_ICD_VENDORS", "/neither")
	spec, mem, r := launchSpec(t)
	l := newExecLauncher(t)
	journalled := 0
	p, err := l.Launch(context.Background(), spec, func(p Process) error {
		journalled = p.PID()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		p.Kill()
		<-p.Done()
		if p.Exit() != "signal: killed" {
			t.Error(p.Exit())
		}
	}()
	var s surroundings
	if err := json.NewDecoder(r).Decode(&s); err != nil {
		t.Fatal(err)
	}
	if journalled != p.PID() || s.Config.Generation != 1 || s.Config.AppPID != 7 || !strings.Contains(string(s.Config.Runtime), "/l.so") {
		t.Fatalf("%+v", s.Config)
	}
	if s.Status["NoNewPrivs"] != "1" || s.Status["CapEff"] != "0000000000000000" || s.Status["CapPrm"] != "0000000000000000" || !s.Leader || s.Core != 0 {
		t.Fatalf("%+v", s)
	}
	if !slices.Contains(s.Env, "POCL_DEVICES=basic") || slices.ContainsFunc(s.Env, func(kv string) bool {
		return strings.HasPrefix(kv, "GPUCTL_") || strings.HasPrefix(kv, "OCL_ICD_")
	}) {
		t.Fatal(s.Env)
	}
	if want, err := mem.inodes(); err != nil || s.Inodes != want {
		t.Fatal(s.Inodes, want, err)
	}
	// The memory is found again through the executor alone.
	again, err := findMemory(s.Inodes, p.PID())
	if err != nil {
		t.Fatal(err)
	}
	again.close()
	if _, err := l.Adopt(p.PID(), p.Start()+1, spec.Log); !errors.Is(err, ErrGone) {
		t.Fatal("another process was taken for the executor")
	}
	adopted, err := l.Adopt(p.PID(), p.Start(), spec.Log)
	if err != nil {
		t.Fatal(err)
	}
	adopted.Kill()
	<-adopted.Done()
}

func TestExecutorWithoutJournalDoesNotRun(t *testing.T) {
	spec, _, _ := launchSpec(t)
	var p Process
	_, err := newExecLauncher(t).Launch(context.Background(), spec, func(q Process) error {
		p = q
		return io.ErrShortWrite
	})
	if !errors.Is(err, io.ErrShortWrite) {
		t.Fatal(err)
	}
	<-p.Done()
}

func TestExitTellsTheLastWord(t *testing.T) {
	spec, _, _ := launchSpec(t)
	spec.Generation = 2
	p, err := newExecLauncher(t).Launch(context.Background(), spec, func(Process) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if got := p.Exit(); got != "exit status 5: the last word" {
		t.Fatal(got)
	}
}
