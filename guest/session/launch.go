package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/user"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// Spec is what an executor is started with.
type Spec struct {
	Dir          string // of the session's executors
	Generation   uint32
	Socket       string // where it serves ExecutorService
	ImportSocket string // where it takes contents in
	Runtime      *gpuctlv1.Runtime
	Device       *gpuctlv1.VirtualDevice
	Memory       [3]*os.File // ring, arena, state
	CacheKey     []byte      // signs the programs that executors for this runtime have built
	AppPID       int         // the application, 0 if it can't be seen from here
	AppStart     uint64
}

// Launcher starts executors and finds those that an earlier gpuguest started.
type Launcher interface {
	// Launch starts an executor. It calls journal with the new process before
	// the executor does anything; an error of journal ends the executor.
	Launch(ctx context.Context, spec Spec, journal func(Process) error) (Process, error)
	// Adopt watches a running executor; ErrGone if it has ended.
	Adopt(pid int, start uint64) (Process, error)
	// Probe starts a short-lived executor that reports a runtime's devices.
	Probe(ctx context.Context, rt *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error)
	// Warm starts ahead what Launch will need for the spec, or Probe for its
	// runtime if it has no Dir: a process that has loaded the runtime's library,
	// without having looked for a device. It returns when that is loaded. What is
	// not used in WarmFor ends.
	Warm(ctx context.Context, spec Spec) error
	// Cool ends what was started ahead for executors of a Dir.
	Cool(dir string)
}

// WarmFor is how long what was started ahead waits to be used.
const WarmFor = 15 * time.Minute

// ExecutorConfig is the configuration that `gpuguest executor` reads as JSON
// from its standard input.
type ExecutorConfig struct {
	Dir          string          `json:"dir"`
	Generation   uint32          `json:"generation"`
	Socket       string          `json:"socket"`
	ImportSocket string          `json:"import_socket"`
	Runtime      json.RawMessage `json:"runtime"`          // gpuctl.v1.Runtime
	Device       json.RawMessage `json:"device,omitempty"` // gpuctl.v1.VirtualDevice
	CacheKey     []byte          `json:"cache_key,omitempty"`
	AppPID       int             `json:"app_pid,omitempty"`
	AppStart     uint64          `json:"app_start,omitempty"`
}

// logTail is how much of an executor's log is looked at for why it ended.
const logTail = 64 << 10 // a crash dump fits

// ExecLauncher starts executors as processes of this program's own binary.
type ExecLauncher struct {
	// Binary is the gpuguest to run, /proc/self/exe if empty.
	Binary string
	// User is whom executors run as if gpuguest is root; nil: root without
	// capabilities.
	User *user.User

	mu   sync.Mutex
	warm map[string]*started // by Dir
}

var _ Launcher = (*ExecLauncher)(nil)

// started is an executor, or a probe, that waits for its input.
type started struct {
	*process
	in    io.WriteCloser
	out   *limitedBuffer // a probe's
	msg   *limitedBuffer
	rt    *gpuctlv1.Runtime
	gen   uint32
	timer *time.Timer // ends it, if it was started ahead
}

// end ends one that is not to run.
func (st *started) end() {
	st.in.Close()
	st.Kill()
	<-st.Done()
}

// Launch implements Launcher.
func (l *ExecLauncher) Launch(ctx context.Context, spec Spec, journal func(Process) error) (Process, error) {
	cfg, err := spec.config()
	if err != nil {
		return nil, err
	}
	st := l.take(&spec)
	if st == nil {
		if st, err = l.start(&spec, nil); err != nil {
			return nil, err
		}
	}
	defer st.in.Close()
	// The executor waits for its configuration, so that none runs that no
	// journal knows.
	if err = journal(st.process); err == nil {
		err = ctx.Err()
	}
	if err == nil {
		_, err = st.in.Write(cfg)
	}
	if err != nil {
		st.end()
		return nil, fmt.Errorf("start executor: %w", err)
	}
	return st.process, nil
}

// ahead has a process load the runtime's library before it reads its input, and
// write a byte to loaded then; nil: it does not.
func ahead(cmd *exec.Cmd, rt *gpuctlv1.Runtime, loaded *os.File) {
	if loaded == nil {
		return
	}
	cmd.Args = append(cmd.Args, "--load", rt.GetLibrary(), "--loaded-fd", strconv.Itoa(3+len(cmd.ExtraFiles)))
	cmd.ExtraFiles = append(cmd.ExtraFiles, loaded)
}

// start starts an executor that waits for its configuration; loaded as in ahead.
func (l *ExecLauncher) start(spec *Spec, loaded *os.File) (*started, error) {
	if err := l.own(spec.Dir); err != nil {
		return nil, err
	}
	logName := fmt.Sprintf("executor-%d.log", spec.Generation)
	log, err := beneath.OpenFile(spec.Dir, logName, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("executor log: %w", err)
	}
	defer log.Close()

	// Not CommandContext: the executor outlives the operation that starts it.
	cmd := l.command("executor", "--config", "-")
	cmd.ExtraFiles = slices.Clone(spec.Memory[:])
	ahead(cmd, spec.Runtime, loaded)
	cmd.Env = l.environ(spec.Runtime.GetEnv(), spec.Dir)
	cmd.Stderr = log
	st, err := l.run(cmd, func() string { return exitReason(cmd.ProcessState, spec.Dir, logName) })
	if err != nil {
		return nil, fmt.Errorf("start executor: %w", err)
	}
	st.rt, st.gen = spec.Runtime, spec.Generation
	// Only what belongs to the process as a whole is set from here.
	none := unix.Rlimit{}
	_ = unix.Prlimit(st.pid, unix.RLIMIT_CORE, &none, nil)
	_ = writeProc(st.pid, "oom_score_adj", "300")
	return st, nil
}

// run starts a process that reads its standard input; exit says how it ended.
func (l *ExecLauncher) run(cmd *exec.Cmd, exit func() string) (*started, error) {
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := startConfined(cmd); err != nil {
		in.Close()
		return nil, err
	}
	p, err := openProcess(cmd.Process.Pid, 0, func() string {
		_ = cmd.Wait()
		return exit()
	})
	if err != nil {
		in.Close()
		_ = cmd.Process.Kill()
		return nil, err
	}
	return &started{process: p, in: in}, nil
}

// Warm implements Launcher.
func (l *ExecLauncher) Warm(ctx context.Context, spec Spec) error {
	l.Cool(spec.Dir)
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	defer w.Close()
	var st *started
	if spec.Dir == "" {
		st, err = l.startProbe(spec.Runtime, w)
	} else {
		st, err = l.start(&spec, w)
	}
	if err != nil {
		return err
	}
	w.Close()
	stop := context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(time.Now()) })
	defer stop()
	// The end of the pipe says no more than the process's: only the byte before.
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		if ctx.Err() == nil {
			<-st.Done() // it has closed the pipe by ending
			return fmt.Errorf("load %s: %s", spec.Runtime.GetLibrary(), st.Exit())
		}
		st.end()
		return fmt.Errorf("load %s: %w", spec.Runtime.GetLibrary(), ctx.Err())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.warm == nil {
		l.warm = map[string]*started{}
	}
	if other := l.warm[spec.Dir]; other != nil {
		go other.end()
	}
	l.warm[spec.Dir] = st
	st.timer = time.AfterFunc(WarmFor, func() {
		l.mu.Lock()
		ours := l.warm[spec.Dir] == st
		if ours {
			delete(l.warm, spec.Dir)
		}
		l.mu.Unlock()
		if ours {
			st.end()
		}
	})
	return nil
}

// Cool implements Launcher.
func (l *ExecLauncher) Cool(dir string) {
	if st := l.remove(dir); st != nil {
		st.end()
	}
}

func (l *ExecLauncher) remove(dir string) *started {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := l.warm[dir]
	if st != nil {
		st.timer.Stop()
		delete(l.warm, dir)
	}
	return st
}

// take returns what was started ahead for the spec, if it is of use. Which
// devices it is for the process has not been told yet.
func (l *ExecLauncher) take(spec *Spec) *started {
	st := l.remove(spec.Dir)
	if st == nil {
		return nil
	}
	select {
	case <-st.Done():
		return nil
	default:
	}
	if st.gen != spec.Generation || st.rt.GetLibrary() != spec.Runtime.GetLibrary() || !maps.Equal(st.rt.GetEnv(), spec.Runtime.GetEnv()) {
		st.end()
		return nil
	}
	return st
}

func (spec *Spec) config() ([]byte, error) {
	rt, err := protojson.Marshal(spec.Runtime)
	if err != nil {
		return nil, fmt.Errorf("encode runtime: %w", err)
	}
	c := ExecutorConfig{
		Dir: spec.Dir, Generation: spec.Generation, Socket: spec.Socket, ImportSocket: spec.ImportSocket,
		Runtime: rt, CacheKey: spec.CacheKey, AppPID: spec.AppPID, AppStart: spec.AppStart,
	}
	if spec.Device != nil {
		if c.Device, err = protojson.Marshal(spec.Device); err != nil {
			return nil, fmt.Errorf("encode virtual device: %w", err)
		}
	}
	return json.Marshal(c)
}

// Adopt implements Launcher.
func (l *ExecLauncher) Adopt(pid int, start uint64) (Process, error) {
	p, err := openProcess(pid, start, nil)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Probe implements Launcher: a driver that crashes takes a child with it only.
func (l *ExecLauncher) Probe(ctx context.Context, rt *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
	st := l.take(&Spec{Runtime: rt})
	if st == nil {
		var err error
		if st, err = l.startProbe(rt, nil); err != nil {
			return nil, err
		}
	}
	defer st.in.Close()
	stop := context.AfterFunc(ctx, func() { _ = unix.Kill(-st.pid, unix.SIGKILL) })
	defer stop()
	in, err := protojson.Marshal(rt)
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w", rt.GetLibrary(), err)
	}
	// One that has ended says why below.
	_, _ = st.in.Write(in)
	st.in.Close()
	<-st.Done()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("probe %s: %w", rt.GetLibrary(), ctx.Err())
	}
	if how := st.Exit(); how != exitedWell {
		return nil, fmt.Errorf("probe %s: %s: %s", rt.GetLibrary(), how, lastLine(st.msg.b))
	}
	resp := &gpuctlv1.ProbeResponse{}
	// A runtime may print to standard output too; ours is the last line.
	if err := protojson.Unmarshal([]byte(lastLine(st.out.b)), resp); err != nil {
		return nil, fmt.Errorf("probe %s: %w", rt.GetLibrary(), err)
	}
	return resp, nil
}

// exitedWell is what an os.ProcessState says of a process that did.
const exitedWell = "exit status 0"

// startProbe starts a probe that waits to be told of its runtime; loaded as in
// ahead.
func (l *ExecLauncher) startProbe(rt *gpuctlv1.Runtime, loaded *os.File) (*started, error) {
	cmd := l.command("probe", "--runtime", "-")
	ahead(cmd, rt, loaded)
	cmd.Env = l.environ(rt.GetEnv(), os.TempDir())
	var out, msg limitedBuffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	cmd.WaitDelay = time.Second // for what the runtime may have started
	st, err := l.run(cmd, func() string { return cmd.ProcessState.String() })
	if err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	st.rt, st.out, st.msg = rt, &out, &msg
	return st, nil
}

func (l *ExecLauncher) command(args ...string) *exec.Cmd {
	bin := l.Binary
	if bin == "" {
		bin = "/proc/self/exe"
	}
	cmd := exec.Command(bin, args...)
	cmd.Args[0] = "gpuguest" // what ps shows
	cmd.Dir = "/"
	// A session of its own: signals to gpuguest's group don't reach it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if l.User != nil && os.Getuid() == 0 {
		uid, gid := l.ids()
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), Groups: l.groups()}
	}
	return cmd
}

func (l *ExecLauncher) ids() (uid, gid int) {
	uid, _ = strconv.Atoi(l.User.Uid)
	gid, _ = strconv.Atoi(l.User.Gid)
	return uid, gid
}

// groups are the user's supplementary ones: render and video open GPUs.
func (l *ExecLauncher) groups() []uint32 {
	ids, err := l.User.GroupIds()
	if err != nil {
		return nil
	}
	var gs []uint32
	for _, s := range ids {
		if n, err := strconv.ParseUint(s, 10, 32); err == nil {
			gs = append(gs, uint32(n))
		}
	}
	return gs
}

// own gives the executors' folder to the user they run as.
func (l *ExecLauncher) own(dir string) error {
	if l.User == nil || os.Getuid() != 0 {
		return nil
	}
	uid, gid := l.ids()
	if err := os.Chown(dir, uid, gid); err != nil {
		return fmt.Errorf("executors' folder: %w", err)
	}
	return nil
}

// environ is a minimal environment with the runtime's on top. Variables that
// would lead a runtime back to gpuctl are not among what is kept. Runtimes want
// a home for their caches: home is that of a user without one.
func (l *ExecLauncher) environ(rt map[string]string, home string) []string {
	env := map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	keep := []string{"PATH", "HOME", "XDG_CACHE_HOME", "POCL_CACHE_DIR"}
	if l.User != nil && os.Getuid() == 0 {
		keep = keep[:1]
		env["HOME"] = l.User.HomeDir
		if fi, err := os.Stat(l.User.HomeDir); err != nil || !fi.IsDir() {
			env["HOME"] = home
		}
	}
	for _, k := range keep {
		if v, ok := os.LookupEnv(k); ok {
			env[k] = v
		}
	}
	for k, v := range rt {
		env[k] = v
	}
	list := make([]string, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	slices.Sort(list)
	return list
}

// startConfined starts cmd without any way to gain privileges. What is set
// here belongs to the thread and is inherited; the thread ends afterwards.
func startConfined(cmd *exec.Cmd) error {
	err := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: Go drops the thread
		if e := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); e != nil {
			err <- fmt.Errorf("no_new_privs: %w", e)
			return
		}
		if os.Getuid() == 0 {
			// An empty bounding set: root keeps no capability through exec.
			for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
				_ = unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
			}
		}
		err <- cmd.Start()
	}()
	return <-err
}

func exitReason(st *os.ProcessState, dir, name string) string {
	how := "ended"
	if st != nil {
		how = st.String()
	}
	f, err := beneath.OpenFile(dir, name, os.O_RDONLY, 0)
	if err != nil {
		return how
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil && fi.Size() > logTail {
		_, _ = f.Seek(-logTail, io.SeekEnd)
	}
	b, _ := io.ReadAll(io.LimitReader(f, logTail))
	for l := range strings.Lines(string(b)) {
		// A dump begins with its cause and ends with registers.
		if strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ") || strings.HasPrefix(l, "SIG") {
			return how + ": " + strings.TrimSpace(strings.ToValidUTF8(l, "?"))
		}
	}
	if l := lastLine(b); l != "" {
		return how + ": " + l
	}
	return how
}

func lastLine(b []byte) string {
	s := strings.TrimSpace(strings.ToValidUTF8(string(b), "?"))
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// limitedBuffer keeps the first megabyte and refuses the rest.
type limitedBuffer struct{ b []byte }

func (l *limitedBuffer) Write(p []byte) (int, error) {
	if len(l.b)+len(p) > 1<<20 {
		return 0, errors.New("output too long")
	}
	l.b = append(l.b, p...)
	return len(p), nil
}
