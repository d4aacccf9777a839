package exact

import (
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Timer calls a function when it ends. It may be set as often as one likes, by several goroutines.
type Timer struct {
	f      func()
	mu     sync.Mutex
	fd     int
	file   *os.File    // of fd; nil: it was never set, or there are no descriptors
	coarse *time.Timer // instead, if there are none
	closed bool
}

// NewTimer returns a timer that is not set. Calls of f don't overlap.
func NewTimer(f func()) *Timer { return &Timer{f: f} }

// Reset has f be called once, after d and not when it was to be before. A call that has begun goes on.
func (t *Timer) Reset(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
	case t.coarse != nil:
		t.coarse.Reset(d)
	case t.file != nil || t.open():
		t.set(max(d, 1)) // 0 would stop it
	default:
		t.coarse = time.AfterFunc(d, t.f)
	}
}

// Close stops the timer for good, and frees what it has. A call of f that has begun goes on.
func (t *Timer) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	if t.coarse != nil {
		t.coarse.Stop()
	}
	if t.file != nil {
		_ = t.file.Close() // again: an error, and nothing else
	}
}

// open makes the descriptor, and reports whether there is one.
func (t *Timer) open() bool {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return false
	}
	t.fd, t.file = fd, os.NewFile(uintptr(fd), "timerfd") // non-blocking, so reads of it wait in epoll_wait
	go t.read(t.file)
	return true
}

func (t *Timer) set(d time.Duration) {
	// It fails only for a descriptor or a time that is none.
	_ = unix.TimerfdSettime(t.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(d.Nanoseconds())}, nil)
}

func (t *Timer) read(file *os.File) {
	var b [8]byte // how often it has ended
	for {
		if _, err := file.Read(b[:]); err != nil {
			return // closed
		}
		t.f()
	}
}

// Sleep waits for d. Its thread waits, so it is for a few goroutines at a time.
func Sleep(d time.Duration) {
	until := unix.NsecToTimespec(d.Nanoseconds())
	for unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &until, &until) == unix.EINTR { // until is what is left
	}
}
