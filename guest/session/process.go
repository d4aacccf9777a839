package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// Process is a running executor or application. It need not be a child of this process.
type Process interface {
	PID() int
	// Start returns the time when the process started, in clock ticks since boot. With the
	// pid, it identifies a process for ever.
	Start() uint64
	// Done is closed when the process has ended.
	Done() <-chan struct{}
	// Exit returns a text about how the process ended, once Done is closed.
	Exit() string
	// Kill ends the process at once.
	Kill()
	// Owns reports whether the process is the peer of a socket with these credentials.
	Owns(cred *unix.Ucred) bool
}

// ErrGone is returned for a process that has ended, or whose pid belongs to another process
// now.
var ErrGone = errors.New("process has ended")

// process watches a process through a pidfd.
type process struct {
	pid   int
	start uint64
	fd    *os.File
	done  chan struct{}
	once  sync.Once
	exit  string
}

var _ Process = (*process)(nil)

// openProcess watches the process with that pid. A start time other than 0 must match.
// reap, if not nil, is called after the end and returns how the process ended.
func openProcess(pid int, start uint64, reap func() string) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // the last two: a thread has the number
		return nil, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	if err != nil {
		return nil, fmt.Errorf("open pid %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pid "+strconv.Itoa(pid))
	// Read the time after the pidfd is open: then both are of the same process.
	started, err := startTime(pid)
	if engine.Scarce(err) {
		f.Close()
		return nil, fmt.Errorf("look at pid %d: %w", pid, err)
	}
	if err != nil || (start != 0 && started != start) {
		f.Close()
		if reap != nil {
			reap()
		}
		return nil, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	p := &process{pid: pid, start: started, fd: f, done: make(chan struct{})}
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("watch pid %d: %w", pid, err)
	}
	go p.watch(raw, reap)
	return p, nil
}

func (p *process) watch(raw interface {
	Read(func(uintptr) bool) error
}, reap func() string,
) {
	ended := false
	_ = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		ended = err == nil && n > 0
		return ended
	})
	if !ended {
		return // the watch was closed
	}
	p.exit = "ended"
	if reap != nil {
		p.exit = reap()
	}
	close(p.done)
	p.close()
}

func (p *process) PID() int                   { return p.pid }
func (p *process) Start() uint64              { return p.start }
func (p *process) Done() <-chan struct{}      { return p.done }
func (p *process) Owns(cred *unix.Ucred) bool { return int(cred.Pid) == p.pid }

func (p *process) Exit() string {
	select {
	case <-p.done:
		return p.exit
	default:
		return "running"
	}
}

func (p *process) Kill() {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return // closed: the process has ended
	}
	_ = raw.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
}

// close stops watching, and does not affect the process.
func (p *process) close() { p.once.Do(func() { p.fd.Close() }) }

// WaitProcess waits until the process with that pid and start time has ended,
// or ctx is done.
func WaitProcess(ctx context.Context, pid int, start uint64) error {
	p, err := openProcess(pid, start, nil)
	if errors.Is(err, ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.close()
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// mostOfProc bounds how much is read of a file in /proc/PID. The process chooses some of
// these contents.
const mostOfProc = 64 << 10

func readProc(pid int, name string) ([]byte, error) {
	f, err := beneath.OpenFile("/proc", filepath.Join(strconv.Itoa(pid), name), os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, mostOfProc))
}

func writeProc(pid int, name, value string) error {
	f, err := beneath.OpenFile("/proc", filepath.Join(strconv.Itoa(pid), name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}

// startTime returns field 22 of /proc/PID/stat. The name in field 2 may contain any
// character.
func startTime(pid int) (uint64, error) {
	start, ended, _, err := readStat(strconv.Itoa(pid))
	switch {
	case err != nil:
		return 0, err
	case ended:
		return 0, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	return start, nil
}

// readStat reads the stat of a process or thread in /proc. half says that the first thread of a
// process has ended, and the others go on.
func readStat(of string) (start uint64, ended, half bool, err error) {
	f, err := beneath.OpenFile("/proc", of+"/stat", os.O_RDONLY, 0)
	if err != nil {
		return 0, false, false, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, mostOfProc))
	if err != nil {
		return 0, false, false, err
	}
	_, rest, ok := strings.Cut(string(b[max(0, strings.LastIndexByte(string(b), ')')):]), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, false, false, fmt.Errorf("%s: malformed stat", of)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		half = fields[17] != "0" && fields[17] != "1"
		ended = !half
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return start, ended, half, err
}

// livePart returns the folder in /proc that has what a process has open: its own, or that of a
// thread that goes on after the first one.
func livePart(pid int) (string, error) {
	at := strconv.Itoa(pid)
	_, _, half, err := readStat(at)
	if err != nil || !half {
		return at, err
	}
	d, err := beneath.OpenDir("/proc", at+"/task")
	if err != nil {
		return "", err
	}
	names, err := d.Readdirnames(-1)
	d.Close()
	for _, name := range names {
		part := at + "/task/" + name
		if _, ended, half, err := readStat(part); err == nil && !ended && !half {
			return part, nil
		}
	}
	return "", errors.Join(err, fmt.Errorf("pid %d: %w", pid, ErrGone))
}

// commandLine returns the process's command line, short enough for a table.
func commandLine(pid int) string {
	b, err := readProc(pid, "cmdline")
	if err != nil {
		return ""
	}
	const most = 256
	s := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(b[:min(len(b), most)]), ""))
	return strings.TrimSpace(s)
}

// innerPID returns the process's pid in its own pid namespace.
func innerPID(pid int) int {
	b, err := readProc(pid, "status")
	if err != nil {
		return pid
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "NSpid:"); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				if n, err := strconv.Atoi(f[len(f)-1]); err == nil {
					return n
				}
			}
		}
	}
	return pid
}
