package uevent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	kernelGroup = 1 // udev's own events are in group 2
	bufferSize  = 4 << 20
)

// Listener hears the kernel's events of PCI devices.
type Listener struct {
	file *os.File
	raw  syscall.RawConn
	buf  []byte
}

// Option changes how a listener is made.
type Option func(*options)

type options struct{ buffer int }

// WithBuffer sets how many bytes of events the kernel keeps for the listener; 4
// MiB if not said.
func WithBuffer(bytes int) Option { return func(o *options) { o.buffer = bytes } }

// Listen begins to hear events. What happens from now on is not missed; what has
// happened before is for the caller to look up, after Listen.
func Listen(opts ...Option) (*Listener, error) {
	o := options{buffer: bufferSize}
	for _, set := range opts {
		set(&o)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	// More than the system's limit takes a privilege; without it there is less.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, o.buffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, o.buffer)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	return newListener(fd)
}

func newListener(fd int) (*Listener, error) {
	l := &Listener{file: os.NewFile(uintptr(fd), "uevents"), buf: make([]byte, maxMessage)}
	var err error
	if l.raw, err = l.file.SyscallConn(); err != nil {
		_ = l.file.Close()
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	return l, nil
}

// Close ends the listener and a Next that waits.
func (l *Listener) Close() error { return l.file.Close() }

// Next waits for the next event of a PCI device, or Lost. It is for one
// goroutine. A listener that was closed is os.ErrClosed.
func (l *Listener) Next(ctx context.Context) (Event, error) {
	if err := l.file.SetReadDeadline(time.Time{}); err != nil {
		return Event{}, fmt.Errorf("uevents: %w", os.ErrClosed)
	}
	stop := context.AfterFunc(ctx, func() { _ = l.file.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		if err := ctx.Err(); err != nil {
			return Event{}, fmt.Errorf("uevents: %w", err)
		}
		var n int
		var from unix.Sockaddr
		var err error
		waiting := l.raw.Read(func(fd uintptr) bool {
			n, from, err = unix.Recvfrom(int(fd), l.buf, unix.MSG_DONTWAIT|unix.MSG_TRUNC)
			return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
		})
		switch {
		case errors.Is(waiting, os.ErrDeadlineExceeded):
			continue // ctx has ended
		case waiting != nil:
			return Event{}, fmt.Errorf("uevents: %w", os.ErrClosed)
		case errors.Is(err, unix.ENOBUFS):
			return Event{Action: Lost}, nil
		case err != nil:
			return Event{}, fmt.Errorf("uevents: %w", err)
		}
		// Anybody with the privilege can send to the group, and would not be the
		// kernel.
		if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != 0 {
			continue
		}
		if n > len(l.buf) {
			return Event{Action: Lost}, nil
		}
		e, err := Parse(l.buf[:n])
		if err != nil {
			return Event{Action: Lost}, nil // what it was about has to be looked for
		}
		if e.device() {
			return e, nil
		}
	}
}
