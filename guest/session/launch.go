package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
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
	Stdout       *os.File    // the application's
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
}

// ExecutorConfig is the configuration that `gpuguest executor` reads as JSON
// from its standard input.
type ExecutorConfig struct {
	Dir          string          `json:"dir"`
	Generation   uint32          `json:"generation"`
	Socket       string          `json:"socket"`
	ImportSocket string          `json:"import_socket"`
	Runtime      json.RawMessage `json:"runtime"`          // gpuctl.v1.Runtime
	Device       json.RawMessage `json:"device,omitempty"` // gpuctl.v1.VirtualDevice
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
}

var _ Launcher = (*ExecLauncher)(nil)

// Launch implements Launcher.
func (l *ExecLauncher) Launch(ctx context.Context, spec Spec, journal func(Process) error) (Process, error) {
	cfg, err := spec.config()
	if err != nil {
		return nil, err
	}
	if err := l.own(spec.Dir); err != nil {
		return nil, err
	}
	logPath := filepath.Join(spec.Dir, fmt.Sprintf("executor-%d.log", spec.Generation))
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("executor log: %w", err)
	}
	defer log.Close()

	// Not CommandContext: the executor outlives the operation that starts it.
	cmd := l.command("executor", "--config", "-")
	cmd.Env = l.environ(spec.Runtime.GetEnv(), spec.Dir)
	cmd.Stdout = spec.Stdout
	cmd.Stderr = log
	cmd.ExtraFiles = append(slices.Clone(spec.Memory[:]), spec.Stdout)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("executor's input: %w", err)
	}
	defer stdin.Close()
	if err := startConfined(cmd); err != nil {
		return nil, fmt.Errorf("start executor: %w", err)
	}
	p, err := openProcess(cmd.Process.Pid, 0, func() string {
		_ = cmd.Wait()
		return exitReason(cmd.ProcessState, logPath)
	})
	if err != nil {
		_ = cmd.Process.Kill()
		return nil, fmt.Errorf("executor: %w", err)
	}
	// Only what belongs to the process as a whole is set from here.
	none := unix.Rlimit{}
	_ = unix.Prlimit(p.pid, unix.RLIMIT_CORE, &none, nil)
	_ = os.WriteFile("/proc/"+strconv.Itoa(p.pid)+"/oom_score_adj", []byte("300"), 0)

	// The executor waits for its configuration, so that none runs that no
	// journal knows.
	if err = journal(p); err == nil {
		err = ctx.Err()
	}
	if err == nil {
		_, err = stdin.Write(cfg)
	}
	if err != nil {
		p.Kill()
		<-p.Done()
		return nil, fmt.Errorf("start executor: %w", err)
	}
	return p, nil
}

func (spec *Spec) config() ([]byte, error) {
	rt, err := protojson.Marshal(spec.Runtime)
	if err != nil {
		return nil, fmt.Errorf("encode runtime: %w", err)
	}
	c := ExecutorConfig{
		Dir: spec.Dir, Generation: spec.Generation, Socket: spec.Socket, ImportSocket: spec.ImportSocket,
		Runtime: rt, AppPID: spec.AppPID, AppStart: spec.AppStart,
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
	args := []string{"probe", "--library", rt.GetLibrary()}
	for _, d := range rt.GetDevices() {
		args = append(args, "--device", strconv.FormatUint(uint64(d), 10))
	}
	cmd := l.command(args...)
	cmd.Env = l.environ(rt.GetEnv(), os.TempDir())
	var out, msg limitedBuffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	cmd.WaitDelay = time.Second // for what the runtime may have started
	if err := startConfined(cmd); err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) })
	defer stop()
	err := cmd.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("probe %s: %w", rt.GetLibrary(), ctx.Err())
	}
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w: %s", rt.GetLibrary(), err, lastLine(msg.b))
	}
	resp := &gpuctlv1.ProbeResponse{}
	// A runtime may print to standard output too; ours is the last line.
	if err := protojson.Unmarshal([]byte(lastLine(out.b)), resp); err != nil {
		return nil, fmt.Errorf("probe %s: %w", rt.GetLibrary(), err)
	}
	return resp, nil
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

func exitReason(st *os.ProcessState, logPath string) string {
	how := "ended"
	if st != nil {
		how = st.String()
	}
	f, err := os.Open(logPath)
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
