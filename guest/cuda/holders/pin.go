package holders

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrGone is returned for a process that has ended, or whose pid belongs to another process
// now.
var ErrGone = errors.New("the process has ended")

// Pinned is a process whose pid is not given to another one as long as it is pinned.
type Pinned struct {
	PID   int
	Start uint64 // time of its start, in clock ticks since boot

	fd   *os.File
	once sync.Once
	done chan struct{}
}

// Pin pins the process with that pid. A start time other than 0 must match.
func Pin(pid int, start uint64) (*Pinned, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // the last two: a thread has the number
		return nil, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	if err != nil {
		return nil, fmt.Errorf("open pid %d: %w", pid, err)
	}
	f := os.NewFile(uintptr(fd), "pid "+strconv.Itoa(pid))
	// Read the time after the pidfd is open: then both are of the same process.
	p, err := readStat("/proc", pid)
	if err != nil && !gone(err) { // for lack of descriptors, or of rights
		f.Close()
		return nil, fmt.Errorf("look at pid %d: %w", pid, err)
	}
	if err != nil || p.zombie || (start != 0 && p.Start != start) {
		f.Close()
		return nil, fmt.Errorf("pid %d: %w", pid, ErrGone)
	}
	return &Pinned{PID: pid, Start: p.Start, fd: f, done: make(chan struct{})}, nil
}

// Ended reports whether the process has ended.
func (p *Pinned) Ended() bool {
	ended := true
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return true
	}
	_ = raw.Control(func(fd uintptr) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		ended = err == nil && n > 0
	})
	return ended
}

// Done returns a channel that is closed when the process has ended, or after Close.
func (p *Pinned) Done() <-chan struct{} {
	p.once.Do(func() {
		raw, err := p.fd.SyscallConn()
		if err != nil {
			close(p.done)
			return
		}
		go func() {
			_ = raw.Read(func(fd uintptr) bool {
				n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
				return err == nil && n > 0
			})
			close(p.done)
		}()
	})
	return p.done
}

// Signal sends a signal to the process, and to no other. One that has ended is no error.
func (p *Pinned) Signal(sig unix.Signal) error {
	err := error(unix.EBADF)
	raw, rerr := p.fd.SyscallConn()
	if rerr == nil {
		rerr = raw.Control(func(fd uintptr) { err = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	}
	if rerr != nil {
		err = rerr
	}
	if err == nil || errors.Is(err, unix.ESRCH) {
		return nil
	}
	return fmt.Errorf("signal pid %d: %w", p.PID, err)
}

// Close gives up the pin. It does not affect the process.
func (p *Pinned) Close() { p.fd.Close() }
