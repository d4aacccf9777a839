package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
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
	"github.com/gpuctl/gpuctl/guest/confine"
)

// Spec is what an executor is started with.
type Spec struct {
	Dir          string // folder of the session's executors; they own it
	Log          string // file for the executor's standard error; not in Dir
	Generation   uint32
	Socket       string // where it serves ExecutorService
	ImportSocket string // where it receives contents
	Runtime      *gpuctlv1.Runtime
	Device       *gpuctlv1.VirtualDevice
	Memory       [3]*os.File // ring, arena, state
	CacheKey     []byte      // signs the programs that executors for this runtime have built
	AppPID       int         // the application; 0 if gpuguest can't see it
	AppStart     uint64
	Far          *FarConfig // set: it is a far executor, without memory of a session
	Budget       *os.File   // what the claim's sessions take together; nil: no limit but the device's
	BudgetLine   int        // the session's line in it
}

// Launcher starts executors and finds those that an earlier gpuguest started.
type Launcher interface {
	// Launch starts an executor. It calls journal with the new process before
	// the executor does anything; an error of journal ends the executor.
	Launch(ctx context.Context, spec Spec, journal func(Process) error) (Process, error)
	// Adopt watches a running executor that was started with that log. It returns ErrGone
	// if the executor has ended.
	Adopt(pid int, start uint64, log string) (Process, error)
	// Probe starts a short-lived executor that reports a runtime's devices.
	Probe(ctx context.Context, rt *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error)
	// Warm starts in advance a process that Launch will need for the spec. If the spec has
	// no Dir, it is for a Probe of the spec's runtime. The process has loaded the runtime's
	// library, but has not looked for a device. Warm returns when the library is loaded. A
	// process that is not used within WarmFor ends.
	Warm(ctx context.Context, spec Spec) error
	// Cool ends the processes that were started in advance for executors of a Dir.
	Cool(dir string)
	// Forget ends everything that executors of a Dir have started. The Dir must not be used
	// after that.
	Forget(dir string) error
}

// WarmFor is how long a process that was started in advance waits to be used.
const WarmFor = 15 * time.Minute

// ExecutorConfig is the configuration that `gpuguest executor` reads as JSON
// from its standard input.
type ExecutorConfig struct {
	Dir          string          `json:"dir"`
	Generation   uint32          `json:"generation"`
	Socket       string          `json:"socket"`
	ImportSocket string          `json:"import_socket"`
	FileSocket   string          `json:"file_socket"`
	TurnSocket   string          `json:"turn_socket,omitempty"`
	Relay        string          `json:"relay,omitempty"`  // socket for connections of carriers through the VM's host
	RDMA         string          `json:"rdma,omitempty"`   // socket for connections of carriers over RDMA
	Runtime      json.RawMessage `json:"runtime"`          // gpuctl.v1.Runtime
	Device       json.RawMessage `json:"device,omitempty"` // gpuctl.v1.VirtualDevice
	CacheKey     []byte          `json:"cache_key,omitempty"`
	AppPID       int             `json:"app_pid,omitempty"`
	AppStart     uint64          `json:"app_start,omitempty"`
	Far          *FarConfig      `json:"far,omitempty"`
	BudgetFD     int             `json:"budget_fd,omitempty"` // 0: none
	BudgetLine   int             `json:"budget_line,omitempty"`
}

// FarConfig is what a far executor needs to know of its carrier. It serves a session of
// another host.
type FarConfig struct {
	Certificate []byte        `json:"certificate,omitempty"` // DER
	Key         []byte        `json:"key,omitempty"`         // PKCS #8, DER
	Peer        []byte        `json:"peer,omitempty"`        // SHA-256 of the carrier's certificate
	Plain       bool          `json:"plain,omitempty"`       // without TLS
	Outage      time.Duration `json:"outage,omitempty"`      // how long the carrier may be gone

	CompressAlways bool `json:"compress_always,omitempty"` // for tests
}

// TasksFlag tells an executor that it runs as a user of its own, and how many tasks that
// user may have: see confine.Settle.
const TasksFlag = "tasks"

// ExecLauncher starts executors as processes of this program's own binary.
type ExecLauncher struct {
	// Binary is the gpuguest to run, /proc/self/exe if empty.
	Binary string
	// Dir is the run folder; it contains a folder for probes.
	Dir string
	// Users gives each session's executors a user, and one to probes. If gpuguest is root,
	// it starts nothing without Users. Otherwise everything runs as gpuguest's user.
	Users *confine.Users
	// Limits bounds what a session's executors use; nil: no limits.
	Limits *confine.Limits
	// Relay is the socket at which carriers have the VM's host make connections; empty: this
	// is no VM.
	Relay string
	// RDMA is the socket at which carriers have connections over RDMA made; empty: they have
	// none.
	RDMA string

	mu   sync.Mutex
	warm map[string]*started // processes that were started in advance, by Dir
}

var _ Launcher = (*ExecLauncher)(nil)

// started is an executor, or a probe, that waits for its input.
type started struct {
	*process
	in    io.WriteCloser
	out   *limitedBuffer // standard output, for a probe
	msg   *limitedBuffer
	rt    *gpuctlv1.Runtime
	gen   uint32
	timer *time.Timer // ends the process, if it was started in advance
}

// end ends a process that is not to run.
func (st *started) end() {
	st.in.Close()
	st.Kill()
	<-st.Done()
}

// Launch implements Launcher.
func (l *ExecLauncher) Launch(ctx context.Context, spec Spec, journal func(Process) error) (Process, error) {
	cfg, err := spec.config(l.Relay, l.RDMA)
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
	// The executor waits for its configuration, so that no executor runs without being in
	// the journal.
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

// ahead makes a process load the runtime's library before it reads its input, and then
// write a byte to loaded. If loaded is nil, it does nothing.
func ahead(cmd *exec.Cmd, rt *gpuctlv1.Runtime, loaded *os.File) {
	if loaded == nil {
		return
	}
	cmd.Args = append(cmd.Args, "--load", rt.GetLibrary(), "--loaded-fd", strconv.Itoa(3+len(cmd.ExtraFiles)))
	cmd.ExtraFiles = append(cmd.ExtraFiles, loaded)
}

// start starts an executor that waits for its configuration. For loaded, see ahead.
func (l *ExecLauncher) start(spec *Spec, loaded *os.File) (*started, error) {
	log, out, err := createLog(spec.Log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	if gen := spec.Generation; gen > logsKept {
		dropLog(strings.Replace(spec.Log, fmt.Sprintf("-%d.", gen), fmt.Sprintf("-%d.", gen-logsKept), 1))
	}

	// Not CommandContext: the executor outlives the operation that starts it.
	cmd := l.command("executor", "--config", "-")
	cmd.ExtraFiles = slices.Clone(spec.Memory[:])
	if spec.Budget != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, spec.Budget)
	}
	ahead(cmd, spec.Runtime, loaded)
	cmd.Stderr = out
	st, err := l.run(cmd, spec.Dir, spec.Runtime, func() string { return exitReason(cmd.ProcessState, log.end()) })
	if err != nil {
		log.close()
		return nil, fmt.Errorf("start executor: %w", err)
	}
	st.gen = spec.Generation
	_ = writeProc(st.pid, "oom_score_adj", "300")
	return st, nil
}

// run starts a process that reads its standard input. The process is confined to the folder
// and to what the runtime needs. exit returns how it ended.
func (l *ExecLauncher) run(cmd *exec.Cmd, dir string, rt *gpuctlv1.Runtime, exit func() string) (*started, error) {
	uid, err := l.user(dir)
	if err != nil {
		return nil, err
	}
	if uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid, Groups: deviceGroups()}
		cmd.Args = append(cmd.Args, "--"+TasksFlag, strconv.FormatUint(mostTasks(), 10))
	}
	cmd.Env = environ(rt.GetEnv(), dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	policy := confine.Policy{Program: cmd.Path, Read: runtimeFiles(rt), Write: []string{dir}, Network: rt.GetRemote() != nil}
	err = confine.OnThread(func() error {
		if err := policy.Enter(); err != nil {
			return err
		}
		return cmd.Start()
	})
	if err != nil {
		in.Close()
		if uid != 0 {
			err = fmt.Errorf("confined, as user %d: %w", uid, err)
		}
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
	st := &started{process: p, in: in, rt: rt}
	if uid != 0 {
		// The process does nothing for anybody yet.
		if err := l.Limits.Add(groupOf(dir), p.pid); err != nil {
			st.end()
			return nil, err
		}
	}
	return st, nil
}

// mostTasks returns how many threads and processes a user of executors may have. Two
// executors with one or two threads per processor are far below it.
func mostTasks() uint64 { return uint64(1024 + 16*runtime.NumCPU()) }

// groupOf returns the name of the control group of a folder's executors: their session's
// id.
func groupOf(dir string) string { return filepath.Base(filepath.Dir(dir)) }

// user returns the user that processes of the folder run as. 0 means gpuguest's own user,
// which is not root.
func (l *ExecLauncher) user(dir string) (uint32, error) {
	if os.Geteuid() != 0 {
		return 0, nil
	}
	if l.Users == nil {
		return 0, errors.New("gpuguest is root and has no users for executors: name a range of them")
	}
	if err := confine.Reachable(dir); err != nil {
		return 0, err
	}
	return l.Users.Take(dir)
}

// Forget implements Launcher.
func (l *ExecLauncher) Forget(dir string) error {
	l.Cool(dir)
	if os.Geteuid() != 0 || l.Users == nil {
		return nil
	}
	err := l.Users.Release(dir)
	return errors.Join(err, l.Limits.Remove(groupOf(dir)))
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
	// The end of the pipe only shows that the process has ended. Only the byte shows that
	// the library is loaded.
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		if ctx.Err() == nil {
			<-st.Done() // the process has closed the pipe by ending
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

// take returns the process that was started in advance for the spec, if it can be used.
// That process does not have its list of devices yet, so the devices need not match.
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

func (spec *Spec) config(relay, rdma string) ([]byte, error) {
	rt, err := protojson.Marshal(spec.Runtime)
	if err != nil {
		return nil, fmt.Errorf("encode runtime: %w", err)
	}
	c := ExecutorConfig{
		Dir: spec.Dir, Generation: spec.Generation, Socket: spec.Socket, ImportSocket: spec.ImportSocket,
		FileSocket: fileSocket(spec.Socket, spec.Generation), TurnSocket: turnSocket(spec.Socket, spec.Generation),
		Runtime: rt, CacheKey: spec.CacheKey, AppPID: spec.AppPID, AppStart: spec.AppStart, Far: spec.Far,
	}
	if spec.Runtime.GetRemote() != nil {
		c.Relay, c.RDMA = relay, rdma
	}
	if spec.Budget != nil {
		c.BudgetFD, c.BudgetLine = 3+len(spec.Memory), spec.BudgetLine
	}
	if spec.Device != nil {
		if c.Device, err = protojson.Marshal(spec.Device); err != nil {
			return nil, fmt.Errorf("encode virtual device: %w", err)
		}
	}
	return json.Marshal(c)
}

// Adopt implements Launcher.
func (l *ExecLauncher) Adopt(pid int, start uint64, log string) (Process, error) {
	var reap func() string
	if log, err := adoptLog(log); err == nil { // otherwise the executor has ended, or an older gpuguest has started it
		reap = func() string { return exitReason(nil, log.end()) }
	}
	p, err := openProcess(pid, start, reap)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Probe implements Launcher. A driver that crashes ends only the child process.
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
	// If the process has ended, the reason is returned below.
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
	// A runtime may print to standard output, too. The response is the last line.
	if err := protojson.Unmarshal([]byte(lastLine(st.out.b)), resp); err != nil {
		return nil, fmt.Errorf("probe %s: %w", rt.GetLibrary(), err)
	}
	return resp, nil
}

// exitedWell is the text of an os.ProcessState of a process that ended without an error.
const exitedWell = "exit status 0"

// startProbe starts a probe that waits for its runtime on standard input. For loaded, see
// ahead.
func (l *ExecLauncher) startProbe(rt *gpuctlv1.Runtime, loaded *os.File) (*started, error) {
	cmd := l.command("probe", "--runtime", "-")
	ahead(cmd, rt, loaded)
	var out, msg limitedBuffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	cmd.WaitDelay = time.Second // for processes that the runtime may have started
	dir := filepath.Join(l.Dir, "probe")
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	st, err := l.run(cmd, dir, rt, func() string { return cmd.ProcessState.String() })
	if err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	st.out, st.msg = &out, &msg
	return st, nil
}

func (l *ExecLauncher) command(args ...string) *exec.Cmd {
	bin := l.Binary
	if bin == "" {
		bin = "/proc/self/exe"
	}
	cmd := exec.Command(bin, args...)
	cmd.Args[0] = "gpuguest" // shown by ps
	cmd.Dir = "/"
	// With a session of its own, it does not get signals to gpuguest's process group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// deviceGroups returns the groups that may open GPUs, as far as this host or VM has them.
func deviceGroups() []uint32 {
	var gids []uint32
	for _, name := range []string{"render", "video"} {
		g, err := user.LookupGroup(name)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseUint(g.Gid, 10, 32); err == nil && n != 0 {
			gids = append(gids, uint32(n))
		}
	}
	return gids
}

// runtimeFiles returns what a runtime reads in addition to the system's files: the folder
// of its library, and the paths in its environment.
func runtimeFiles(rt *gpuctlv1.Runtime) []string {
	var paths []string
	if lib := rt.GetLibrary(); filepath.IsAbs(lib) {
		paths = append(paths, filepath.Dir(lib))
		if real, err := filepath.EvalSymlinks(lib); err == nil {
			paths = append(paths, filepath.Dir(real))
		}
	}
	for _, v := range rt.GetEnv() {
		for _, path := range filepath.SplitList(v) {
			if filepath.IsAbs(path) {
				paths = append(paths, path)
			}
		}
	}
	return slices.DeleteFunc(paths, func(p string) bool { return filepath.Clean(p) == "/" })
}

// environ returns a minimal environment with the runtime's variables added. It omits
// gpuguest's variables that could make a runtime load gpuctl again. What runtimes cache,
// which includes native code, belongs to the session: dir is their home.
func environ(rt map[string]string, dir string) []string {
	env := map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": dir, "TMPDIR": dir}
	if v, ok := os.LookupEnv("PATH"); ok {
		env["PATH"] = v
	}
	maps.Copy(env, rt)
	list := make([]string, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	slices.Sort(list)
	return list
}

// limitedBuffer stores the first megabyte and returns an error for the rest.
type limitedBuffer struct{ b []byte }

func (l *limitedBuffer) Write(p []byte) (int, error) {
	if len(l.b)+len(p) > 1<<20 {
		return 0, errors.New("output too long")
	}
	l.b = append(l.b, p...)
	return len(p), nil
}
