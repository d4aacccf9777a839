package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/confine"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// victimEnv is the environment variable that has a victim as JSON.
const victimEnv = "TEST_VICTIM"

// victim is another session's executor, with what an attacker may find out about it.
type victim struct {
	PID                     int
	Dir, Socket, Log, Named string // Named: an abstract socket
	RootOnly, Public        string // files of the host
}

// attacks are what an executor that was taken over may try. None may succeed.
func attacks(v victim) map[string]func() error {
	proc := fmt.Sprintf("/proc/%d/", v.PID)
	read := func(path string) func() error {
		return func() error { _, err := os.ReadFile(path); return err }
	}
	list := func(path string) func() error {
		return func() error { _, err := os.ReadDir(path); return err }
	}
	create := func(path string) func() error {
		return func() error { return os.WriteFile(path, []byte("x"), 0o600) }
	}
	dial := func(name string) func() error {
		return func() error {
			c, err := net.DialTimeout("unix", name, time.Minute)
			if err == nil {
				c.Close()
			}
			return err
		}
	}
	call := func(nr uintptr, args ...uintptr) func() error {
		return func() error {
			var a [6]uintptr
			copy(a[:], args)
			if _, _, e := syscall.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); e != 0 {
				return e
			}
			return nil
		}
	}
	pid := uintptr(v.PID)
	return map[string]func() error{
		"signal":               func() error { return unix.Kill(v.PID, 0) },
		"kill":                 func() error { return unix.Kill(v.PID, unix.SIGKILL) },
		"ptrace":               func() error { return unix.PtraceAttach(v.PID) },
		"read memory":          func() error { _, err := unix.ProcessVMReadv(v.PID, nil, nil, 0); return err },
		"environment":          read(proc + "environ"),
		"maps":                 read(proc + "maps"),
		"memory file":          read(proc + "mem"),
		"descriptors":          list(proc + "fd"),
		"a descriptor":         read(proc + "fd/2"),
		"root of its files":    list(proc + "root/"),
		"control socket":       dial(v.Socket),
		"list its folder":      list(v.Dir),
		"its file":             read(filepath.Join(v.Dir, "secret")),
		"write to its folder":  create(filepath.Join(v.Dir, "planted")),
		"its log":              read(v.Log),
		"write to its log":     create(v.Log),
		"its journal":          create(filepath.Join(filepath.Dir(v.Log), "session.json")),
		"root's file":          read(v.RootOnly),
		"write root's file":    create(v.RootOnly),
		"write a public file":  create(v.Public),
		"become root":          call(unix.SYS_SETUID, 0),
		"user namespace":       call(unix.SYS_UNSHARE, unix.CLONE_NEWUSER),
		"clone a namespace":    call(unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(unix.SIGCHLD)),
		"clone3":               call(unix.SYS_CLONE3),
		"mount":                call(unix.SYS_MOUNT),
		"bpf":                  call(unix.SYS_BPF),
		"io_uring":             call(unix.SYS_IO_URING_SETUP, 1),
		"keys":                 call(unix.SYS_KEYCTL),
		"userfaultfd":          call(unix.SYS_USERFAULTFD),
		"perf events":          call(unix.SYS_PERF_EVENT_OPEN),
		"take a descriptor":    call(unix.SYS_PIDFD_GETFD),
		"process_vm_writev":    call(unix.SYS_PROCESS_VM_WRITEV, pid),
		"open by handle":       call(unix.SYS_OPEN_BY_HANDLE_AT),
		"shared memory":        call(unix.SYS_SHMGET, 0, 4096, 0o1600),
		"network":              call(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM),
		"netlink":              call(unix.SYS_SOCKET, unix.AF_NETLINK, unix.SOCK_RAW),
		"packets":              call(unix.SYS_SOCKET, unix.AF_PACKET, unix.SOCK_RAW),
		"type into a terminal": call(unix.SYS_IOCTL, 0, unix.TIOCSTI, uintptr(unsafe.Pointer(&[1]byte{}))),
		"a clock":              call(unix.SYS_CLOCK_SETTIME, unix.CLOCK_REALTIME),
		"a module":             call(unix.SYS_INIT_MODULE),
		"be dumped": func() error {
			if n, _ := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0); n == 0 {
				return unix.EPERM
			}
			return nil
		},
		"without end of tasks": func() error {
			var r unix.Rlimit
			if unix.Getrlimit(unix.RLIMIT_NPROC, &r) == nil && r.Max != unix.RLIM_INFINITY {
				return unix.EPERM
			}
			return nil
		},
	}
}

// withLandlock returns the attacks that only Landlock prevents, for its version.
func withLandlock(v victim, version int) map[string]func() error {
	if version < 1 {
		return nil
	}
	all := map[string]func() error{
		"a public file":     func() error { _, err := os.ReadFile(v.Public); return err },
		"temporary files":   func() error { return os.WriteFile(filepath.Join(os.TempDir(), "../planted"), nil, 0o600) },
		"the host's /tmp":   func() error { return os.WriteFile(fmt.Sprintf("/tmp/planted-%d", os.Getpid()), nil, 0o600) },
		"shared memory fs":  func() error { return os.WriteFile(fmt.Sprintf("/dev/shm/planted-%d", os.Getpid()), nil, 0o600) },
		"list the host's /": func() error { _, err := os.ReadDir("/"); return err },
	}
	if version >= 6 {
		all["abstract socket"] = func() error { _, err := net.DialTimeout("unix", v.Named, time.Minute); return err }
	}
	return all
}

// beVictim serves its socket and waits until it is killed.
func beVictim(c ExecutorConfig, report string) int {
	fmt.Fprintln(os.Stderr, "a secret of the victim's")
	l, err := net.Listen("unix", c.Socket)
	if err != nil {
		return 1
	}
	if _, err := net.Listen("unix", namedSocket(os.Getpid())); err != nil {
		return 1
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "secret"), []byte("secret"), 0o666); err != nil {
		return 1
	}
	if tell(report, "ready") != nil {
		return 1
	}
	for {
		if c, err := l.Accept(); err == nil {
			c.Close()
		}
	}
}

func namedSocket(pid int) string { return fmt.Sprintf("@gpuctl-test-victim-%d", pid) }

// beHostile tries all attacks and reports their results.
func beHostile(text, report string) int {
	var v victim
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		return 1
	}
	results := map[string]string{}
	try := func(all map[string]func() error) {
		for name, f := range all {
			results[name] = ""
			if err := f(); err != nil {
				results[name] = err.Error()
			}
		}
	}
	try(attacks(v))
	try(withLandlock(v, confine.Landlock()))
	// What the executor needs still works.
	for name, f := range map[string]func() error{
		"own file":   func() error { return os.WriteFile(filepath.Join(os.Getenv("HOME"), "f"), nil, 0o600) },
		"temporary":  func() error { f, err := os.CreateTemp("", "t"); f.Close(); return err },
		"a library":  func() error { _, err := os.ReadDir("/usr/lib"); return err },
		"/dev/null":  func() error { return os.WriteFile("/dev/null", []byte("x"), 0) },
		"/proc/self": func() error { _, err := os.ReadFile("/proc/self/maps"); return err },
		"a thread":   func() error { go func() {}(); return nil },
		"a child":    func() error { _, err := os.StartProcess("/bin/true", []string{"true"}, &os.ProcAttr{}); return err },
	} {
		if err := f(); err != nil {
			results["needs "+name] = "broken: " + err.Error()
		}
	}
	if tell(report, results) != nil {
		return 1
	}
	time.Sleep(time.Minute) // until it is killed
	return 0
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to give sessions users of their own")
	}
}

func hostileSpec(t *testing.T, library string) (Spec, *os.File) {
	t.Helper()
	spec, _, report := launchSpec(t)
	spec.Runtime.Library = library
	return spec, report
}

func start(t *testing.T, l *ExecLauncher, spec Spec) Process {
	t.Helper()
	p, err := l.Launch(t.Context(), spec, func(Process) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		<-p.Done()
		if err := l.Forget(spec.Dir); err != nil {
			t.Error(err)
		}
	})
	return p
}

// statusOf returns a line of /proc/PID/status.
func statusOf(t *testing.T, pid int, key string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(l, key+":"); ok {
			return strings.Join(strings.Fields(rest), " ")
		}
	}
	return ""
}

func TestHostileExecutorReachesNoOtherSessionAndNotTheHost(t *testing.T) {
	needRoot(t)
	l := newExecLauncher(t)
	target, r := hostileSpec(t, "/victim.so")
	prey := start(t, l, target)
	ready := ""
	if err := json.NewDecoder(r).Decode(&ready); err != nil || ready != "ready" {
		t.Fatal(ready, err, prey.Exit())
	}
	v := victim{PID: prey.PID(), Dir: target.Dir, Socket: target.Socket, Log: target.Log, Named: namedSocket(prey.PID())}
	public := passable(t)
	v.RootOnly, v.Public = filepath.Join(public, "root"), filepath.Join(public, "public")
	if err := errors.Join(os.WriteFile(v.RootOnly, []byte("root's"), 0o600), os.WriteFile(v.Public, []byte("all's"), 0o600), os.Chmod(v.Public, 0o666)); err != nil {
		t.Fatal(err)
	}
	if confine.Landlock() == 0 {
		v.Public = v.RootOnly
	}
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	spec, r := hostileSpec(t, "/hostile.so")
	spec.Runtime.Env = map[string]string{victimEnv: string(text)}
	attacker := start(t, l, spec)
	var results map[string]string
	if err := json.NewDecoder(r).Decode(&results); err != nil {
		t.Fatal(err, attacker.Exit())
	}
	for name, got := range results {
		if got == "" || strings.HasPrefix(name, "needs ") {
			t.Errorf("%s: %q", name, got)
		}
	}
	if want := len(attacks(v)) + len(withLandlock(v, confine.Landlock())); len(results) < want {
		t.Errorf("%d attacks of %d", len(results), want)
	}
	for _, p := range []Process{prey, attacker} {
		for key, want := range map[string]string{
			"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapBnd": "0000000000000000", "CapAmb": "0000000000000000",
			"NoNewPrivs": "1", "Seccomp": "2",
		} {
			if got := statusOf(t, p.PID(), key); got != want {
				t.Errorf("%s of %d is %s", key, p.PID(), got)
			}
		}
		var groups []string
		for _, g := range deviceGroups() {
			groups = append(groups, fmt.Sprint(g))
		}
		if got := strings.Fields(statusOf(t, p.PID(), "Groups")); len(got) != len(groups) {
			t.Errorf("groups %v, not %v", got, groups)
		}
	}
	if a, b := statusOf(t, prey.PID(), "Uid"), statusOf(t, attacker.PID(), "Uid"); a == b || strings.HasPrefix(a, "0 ") {
		t.Errorf("users %s and %s", a, b)
	}
	select {
	case <-prey.Done():
		t.Error("the victim has ended: ", prey.Exit())
	default:
	}
}

// Both executors of a swap belong to one session, and can reach each other.
func TestExecutorsOfOneSessionShareItsUser(t *testing.T) {
	needRoot(t)
	l := newExecLauncher(t)
	spec, _ := hostileSpec(t, "/l.so")
	first := start(t, l, spec)
	spec.Generation, spec.Log = 3, filepath.Join(filepath.Dir(spec.Dir), "executor-3.log")
	second := start(t, l, spec)
	if a, b := statusOf(t, first.PID(), "Uid"), statusOf(t, second.PID(), "Uid"); a != b {
		t.Errorf("%s and %s", a, b)
	}
}

// Processes that an executor leaves behind end with its session. Until they have ended, no
// other session gets the user.
func TestUserIsGivenBackWithoutProcesses(t *testing.T) {
	needRoot(t)
	l := newExecLauncher(t)
	dir := executorsFolder(t)
	uid, err := l.Users.Take(dir)
	if err != nil {
		t.Fatal(err)
	}
	child, err := os.StartProcess("/bin/sleep", []string{"sleep", "1000"}, &os.ProcAttr{
		Sys: &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: uid, Gid: uid}},
	})
	if err != nil {
		t.Fatal(err)
	}
	other := executorsFolder(t)
	if second, err := l.Users.Take(other); err != nil || second == uid {
		t.Fatal(second, uid, err)
	}
	if again, err := l.Users.Take(dir); err != nil || again != uid {
		t.Fatal(again, uid, err)
	}
	if err := l.Forget(dir); err != nil {
		t.Fatal(err)
	}
	st, err := child.Wait()
	if err != nil || st.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Error(st, err)
	}
	if _, err := os.Stat(filepath.Join(l.Users.Dir, fmt.Sprint(uid))); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if err := l.Forget(other); err != nil {
		t.Error(err)
	}
}

func TestRootWithoutUsersStartsNoExecutor(t *testing.T) {
	needRoot(t)
	spec, _ := hostileSpec(t, "/l.so")
	l := newExecLauncher(t)
	l.Users = nil
	if _, err := l.Launch(t.Context(), spec, func(Process) error { return nil }); err == nil || !strings.Contains(err.Error(), "no users") {
		t.Error(err)
	}
	if _, err := l.Probe(t.Context(), spec.Runtime); err == nil || !strings.Contains(err.Error(), "no users") {
		t.Error(err)
	}
	l = newExecLauncher(t)
	if err := os.Chmod(filepath.Dir(spec.Dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Launch(t.Context(), spec, func(Process) error { return nil }); err == nil || !strings.Contains(err.Error(), "chmod o+x") {
		t.Error(err)
	}
}

// beChatty fills its log and ends with one last line.
func beChatty() int {
	line := strings.Repeat("x", 1023) + "\n"
	for range 2 * logHalf / len(line) * 2 {
		if _, err := os.Stderr.WriteString(line); err != nil {
			return 1
		}
	}
	fmt.Fprintln(os.Stderr, "panic: the last word")
	return 5
}

func TestLogOfAnExecutorIsBounded(t *testing.T) {
	l := newExecLauncher(t)
	spec, _ := hostileSpec(t, "/chatty.so")
	p := start(t, l, spec)
	<-p.Done()
	if got := p.Exit(); got != "exit status 5: panic: the last word" {
		t.Error(got)
	}
	var total int64
	for _, f := range []string{spec.Log, spec.Log + ".1"} {
		fi, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		total += fi.Size()
	}
	if total > 2*logHalf || total < logHalf {
		t.Errorf("%d bytes of log", total)
	}
	if _, err := os.Lstat(pipeOf(spec.Log)); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// The reason why an executor ended is read from what it wrote, whatever it does to its
// folder: a link there would make root read any file.
func TestReasonOfAnEndIsNotReadThroughTheExecutorsFolder(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("panic: root's secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "executor-1.log")
	log, w, err := createLog(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("its own words\n"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path), os.Symlink(secret, path), w.Close()); err != nil {
		t.Fatal(err)
	}
	if got := exitReason(nil, log.end()); got != "ended: its own words" {
		t.Error(got)
	}
	// A new log does not go through an existing link either.
	if _, w, err = createLog(path); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if b, _ := os.ReadFile(secret); string(b) != "panic: root's secret\n" {
		t.Errorf("%q", b)
	}
}

// PoCL ends the process with a message and a hint. The hint alone hides what has failed.
func TestReasonOfAnEndIsNotTheNoteBelowIt(t *testing.T) {
	for last, want := range map[string]string{
		"pulse\ndlopen(\"f.so\") failed with 'failed to map segment'.\nnote: missing symbols\nnote: one more\n": `ended: dlopen("f.so") failed with 'failed to map segment'.`,
		"note: alone\n":       "ended: note: alone",
		"note: note: alone\n": "ended: note: note: alone",
		"a\nb note: c\n":      "ended: b note: c",
		"":                    "ended",
	} {
		if got := exitReason(nil, []byte(last)); got != want {
			t.Errorf("%q: %q, want %q", last, got, want)
		}
	}
}

func TestLogGoesOnWithTheNextGpuguest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "executor-1.log")
	first, w, err := createLog(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("before\n"); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "it is in the log", func() error {
		b, err := os.ReadFile(path)
		return testkit.Want(string(b) == "before\n", string(b), err)
	})
	first.pipe.Close() // as when gpuguest dies
	second, err := adoptLog(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("after\n"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if got := exitReason(nil, second.end()); got != "ended: after" {
		t.Error(got)
	}
	if b, err := os.ReadFile(path); string(b) != "before\nafter\n" {
		t.Errorf("%q %v", b, err)
	}
}

// An executor that serves a link to another executor's socket, or answers without end, gets
// nothing.
func TestExecutorCannotPassOffAnothersSocketAsItsOwn(t *testing.T) {
	dir, err := os.MkdirTemp("", "gh")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	other := filepath.Join(dir, "other")
	l, err := net.Listen("unix", other)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	called := make(chan []byte, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, 1)
			n, _ := c.Read(b)
			called <- b[:n]
			c.Close()
		}
	}()
	socket := filepath.Join(dir, "c1")
	if err := os.Symlink(other, socket); err != nil {
		t.Fatal(err)
	}
	e := newExecutor(1, &gpuctlv1.Target{}, strangers{}, socket, "")
	if _, err := e.describe(context.Background()); err == nil || !strings.Contains(err.Error(), "which is not executor 1") {
		t.Error(err)
	}
	if b := <-called; len(b) != 0 {
		t.Error("the other was told something")
	}
}

// strangers is a process that owns no socket.
type strangers struct{ Process }

func (strangers) PID() int                { return 1 }
func (strangers) Done() <-chan struct{}   { return nil }
func (strangers) Owns(c *unix.Ucred) bool { return false }

// endless returns an executor that answers without end.
func endless(t *testing.T, answer func(w http.ResponseWriter)) *executor {
	t.Helper()
	dir, err := os.MkdirTemp("", "gh")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "c1")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { answer(w) })}
	over := make(chan struct{})
	go func() { defer close(over); _ = srv.Serve(l) }()
	e := newExecutor(1, &gpuctlv1.Target{}, ourselves{}, socket, "")
	t.Cleanup(func() {
		e.http.CloseIdleConnections()
		srv.Close()
		<-over
		os.RemoveAll(dir)
	})
	return e
}

// ourselves is this process, as an executor.
type ourselves struct{ Process }

func (ourselves) PID() int                { return os.Getpid() }
func (ourselves) Done() <-chan struct{}   { return nil }
func (ourselves) Owns(c *unix.Ucred) bool { return int(c.Pid) == os.Getpid() }

func TestAnswersOfAHostileExecutorTakeLittleMemory(t *testing.T) {
	const much = 4 * maxGraph
	flood := func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "application/proto")
		b := make([]byte, 1<<20)
		for range much / len(b) {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := endless(t, flood).describeWithin(t.Context(), time.Minute); connect.CodeOf(errors.Unwrap(err)) != connect.CodeResourceExhausted {
		t.Error(err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > much/4 {
		t.Errorf("an answer of %d bytes takes %d", much, n)
	}
	if _, err := endless(t, flood).snapshot(t.Context()); connect.CodeOf(errors.Unwrap(err)) != connect.CodeResourceExhausted {
		t.Error(err)
	}
	// What is stored of an executor's answer, and passed on, is short.
	long := func(w http.ResponseWriter) {
		b, err := proto.Marshal(&gpuctlv1.DescribeResponse{Usage: &gpuctlv1.Usage{WorkItemSizes: make([]uint64, 2*maxUsage)}})
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "application/proto")
		_, _ = w.Write(b)
	}
	if _, err := endless(t, long).describe(t.Context()); err == nil || !strings.Contains(err.Error(), "its usage has") {
		t.Error(err)
	}
	wordy := func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusBadRequest)
		_, _ = fmt.Fprintf(w, `{"code": "internal", "message": %q}`, strings.Repeat("x", maxMessage/2))
	}
	if _, err := endless(t, wordy).describe(t.Context()); err == nil || len(err.Error()) > 2*maxSaid {
		t.Errorf("%d bytes of error", len(err.Error()))
	}
}
