package remote

import (
	"io"
	"net"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/shm"
)

// eager is a connection whose reader looks for a while before it sleeps. The wake-up of a
// goroutine takes several times as long as a small message. Only one goroutine reads.
type eager struct {
	*net.TCPConn
	raw  syscall.RawConn
	now  time.Duration // how long it looks
	most time.Duration
	n    uint
}

// Limits of looking. The longest time is tried now and then, as it may have become useful.
const (
	mostLook  = 100 * time.Microsecond
	leastLook = 2 * time.Microsecond
	tryEvery  = 16
	lookStep  = 20 // pauses between two looks
)

// Eager returns the connection with such a reader, if that is of use here.
func Eager(conn net.Conn) net.Conn {
	t, ok := conn.(*net.TCPConn)
	if !ok {
		return conn
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return conn
	}
	_ = t.SetNoDelay(true)
	most := mostLook
	if runtime.NumCPU() <= 2 {
		most = leastLook // who is waited for needs the processor
	}
	return &eager{TCPConn: t, raw: raw, now: most, most: most}
}

// Read implements net.Conn.
func (e *eager) Read(b []byte) (n int, err error) {
	if len(b) == 0 {
		return 0, nil
	}
	look := e.now
	if e.n++; e.n%tryEvery == 0 {
		look = e.most
	}
	var began time.Time
	slept := false
	cerr := e.raw.Read(func(fd uintptr) bool {
		for {
			n, err = unix.Read(int(fd), b)
			if err != unix.EAGAIN && err != unix.EINTR {
				return true
			}
			switch {
			case began.IsZero():
				began = time.Now()
			case time.Since(began) > look:
				slept = true
				return false
			}
			shm.Spin(lookStep)
		}
	})
	if !began.IsZero() {
		if slept {
			e.now = max(e.now/2, leastLook)
		} else {
			e.now = min(max(2*e.now, leastLook), e.most)
		}
	}
	switch {
	case cerr != nil:
		return 0, cerr
	case err != nil:
		return 0, &net.OpError{Op: "read", Net: "tcp", Addr: e.RemoteAddr(), Err: err}
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
