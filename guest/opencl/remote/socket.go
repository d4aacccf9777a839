package remote

import (
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/shm"
)

// socket is a TCP connection, or a Unix one to a VM's relay, whose reader looks for a while before it sleeps, and whose reader
// and writer sleep in the system call itself. Go's poller knows nothing of it: it would wake
// a thread of its own for each packet, beside the one that reads. One goroutine reads, and one
// writes, at a time.
type socket struct {
	fd            int
	local, remote net.Addr
	use           sync.RWMutex // held for writing to close fd
	closed        atomic.Bool
	until         [2]atomic.Int64 // UnixNano of the deadlines for reading and writing; 0: none

	now    time.Duration // how long the reader looks
	most   time.Duration
	n      uint
	exact  bool // who reads many bytes needs them all
	lowest int  // bytes that wake a reader that sleeps

	pending [][]byte // of the writer
	sent    uint64   // bytes that the kernel has taken
	pace    pace
}

// Limits of looking. The longest time is tried now and then, as it may have become useful.
const (
	mostLook  = 100 * time.Microsecond
	leastLook = 2 * time.Microsecond
	tryEvery  = 16
	lookStep  = 20 // pauses between two looks
)

const (
	// doze is how long a thread sleeps in one system call at most: it looks for a deadline that
	// was set meanwhile.
	doze = 100 * time.Millisecond
	// largeRead is the size in bytes from which a reader that waits for so much is not woken
	// for each packet.
	largeRead = 128 << 10
	mostWake  = 512 << 10
	mostIOV   = 1024 // pieces that one system call takes
)

// newSocket takes the place of conn, if that is a connection of the kernel's. Who expects small messages looks. exact
// says that who reads many bytes waits for all of them.
func newSocket(conn net.Conn, looks, exact bool) net.Conn {
	t, ok := conn.(syscall.Conn)
	if !ok {
		return conn
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return conn
	}
	fd := -1
	cerr := raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) })
	if cerr != nil || err != nil {
		return conn
	}
	s := &socket{fd: fd, local: conn.LocalAddr(), remote: conn.RemoteAddr(), exact: exact, lowest: 1}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetNoDelay(true)
	} else {
		s.exact = false // only TCP wakes a reader later
	}
	_ = conn.Close() // s has the connection, too
	switch {
	case !looks:
	case runtime.NumCPU() <= 2:
		s.most = leastLook // who is waited for needs the processor
	default:
		s.most = mostLook
	}
	s.now = s.most
	return s
}

// LocalAddr implements net.Conn.
func (s *socket) LocalAddr() net.Addr { return s.local }

// RemoteAddr implements net.Conn.
func (s *socket) RemoteAddr() net.Addr { return s.remote }

func (s *socket) failed(op string, err error) error {
	return &net.OpError{Op: op, Net: s.remote.Network(), Source: s.local, Addr: s.remote, Err: err}
}

// wait sleeps until the connection is ready, or for some time. which is 0 for reading and 1
// for writing.
func (s *socket) wait(which int, events int16) error {
	limit := doze
	if t := s.until[which].Load(); t != 0 {
		left := time.Until(time.Unix(0, t))
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		limit = min(limit, left+time.Millisecond)
	}
	if s.closed.Load() {
		return net.ErrClosed
	}
	_, err := unix.Poll([]unix.PollFd{{Fd: int32(s.fd), Events: events}}, int(limit.Milliseconds()))
	if err != nil && err != unix.EINTR && err != unix.EAGAIN {
		return os.NewSyscallError("poll", err)
	}
	return nil
}

// Read implements net.Conn.
func (s *socket) Read(b []byte) (int, error) {
	s.use.RLock()
	defer s.use.RUnlock()
	look := s.now
	if s.n++; s.n%tryEvery == 0 {
		look = s.most
	}
	var began time.Time
	for {
		if s.closed.Load() {
			return 0, s.failed("read", net.ErrClosed)
		}
		n, err := unix.Read(s.fd, b)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
		case err != nil:
			return 0, s.failed("read", os.NewSyscallError("read", err))
		case n == 0 && len(b) > 0:
			return 0, io.EOF
		default:
			if !began.IsZero() {
				s.now = min(max(2*s.now, leastLook), s.most)
			}
			return n, nil
		}
		if look > 0 {
			if began.IsZero() {
				began = time.Now()
			}
			if time.Since(began) <= look {
				shm.Spin(lookStep)
				continue
			}
			// It was of no use.
			s.now = max(s.now/2, leastLook)
			look, began = 0, time.Time{}
		}
		s.wakeAt(len(b))
		if err := s.wait(0, unix.POLLIN); err != nil {
			return 0, s.failed("read", err)
		}
	}
}

// wakeAt makes a reader that waits for n bytes sleep until a good part of them is there.
func (s *socket) wakeAt(n int) {
	want := 1
	if s.exact && n >= largeRead {
		want = min(n, mostWake)
	}
	if want != s.lowest && unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, want) == nil {
		s.lowest = want
	}
}

// Write implements net.Conn.
func (s *socket) Write(b []byte) (int, error) {
	n, err := s.WriteBuffers(&net.Buffers{b})
	return int(n), err
}

// WriteBuffers implements link.BuffersWriter.
func (s *socket) WriteBuffers(v *net.Buffers) (n int64, err error) {
	s.use.RLock()
	defer s.use.RUnlock()
	s.pending = append(s.pending[:0], *v...)
	defer clear(s.pending)
	if s.pace.measures() && s.queued() == 0 {
		s.pace.empty()
	}
	for left := s.pending; ; {
		for len(left) > 0 && len(left[0]) == 0 {
			left = left[1:]
		}
		switch {
		case len(left) == 0:
			return n, nil
		case s.closed.Load():
			return n, s.failed("write", net.ErrClosed)
		}
		var k int
		if len(left) == 1 {
			k, err = unix.SendmsgN(s.fd, left[0], nil, nil, unix.MSG_NOSIGNAL)
		} else {
			k, err = unix.Writev(s.fd, left[:min(len(left), mostIOV)])
		}
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			if q := s.queued(); q <= s.sent {
				s.pace.full(s.sent-q, time.Now())
			}
			if err := s.wait(1, unix.POLLOUT); err != nil {
				return n, s.failed("write", err)
			}
			continue
		case err != nil:
			return n, s.failed("write", os.NewSyscallError("write", err))
		}
		n += int64(k)
		s.sent += uint64(k)
		for k > 0 {
			m := min(k, len(left[0]))
			left[0] = left[0][m:]
			if k -= m; len(left[0]) == 0 {
				left = left[1:]
			}
		}
	}
}

// queued returns how many bytes the other end has not acknowledged.
func (s *socket) queued() uint64 {
	n, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
	if err != nil || n < 0 {
		return 0
	}
	return uint64(n)
}

// Rate implements compress.Meter.
func (s *socket) Rate() float64 { return s.pace.Rate() }

// Forget implements compress.Meter.
func (s *socket) Forget() { s.pace.Forget() }

// Close implements net.Conn. It wakes the reader and the writer.
func (s *socket) Close() error {
	if s.closed.Swap(true) {
		return s.failed("close", net.ErrClosed)
	}
	_ = unix.Shutdown(s.fd, unix.SHUT_RDWR)
	s.use.Lock()
	defer s.use.Unlock()
	return os.NewSyscallError("close", unix.Close(s.fd))
}

// SetDeadline implements net.Conn. Who sleeps already finds a deadline a moment later.
func (s *socket) SetDeadline(t time.Time) error {
	return s.limit(t, true, true)
}

// SetReadDeadline implements net.Conn.
func (s *socket) SetReadDeadline(t time.Time) error { return s.limit(t, true, false) }

// SetWriteDeadline implements net.Conn.
func (s *socket) SetWriteDeadline(t time.Time) error { return s.limit(t, false, true) }

func (s *socket) limit(t time.Time, read, write bool) error {
	n := int64(0)
	if !t.IsZero() {
		n = max(t.UnixNano(), 1)
	}
	if read {
		s.until[0].Store(n)
	}
	if write {
		s.until[1].Store(n)
	}
	return nil
}
