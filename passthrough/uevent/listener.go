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
	kernelGroup = 1 // group 2 has udev's own events
	bufferSize  = 4 << 20
)

// Listener receives the kernel's events about PCI devices.
type Listener struct {
	file *os.File
	raw  syscall.RawConn
	buf  []byte
}

// Option is an option of Listen.
type Option func(*options)

type options struct{ buffer int }

// WithBuffer sets how many bytes of events the kernel keeps for the listener; default 4
// MiB.
func WithBuffer(bytes int) Option { return func(o *options) { o.buffer = bytes } }

// Listen begins to receive events. Later changes are not missed. The caller must read the
// present state after Listen.
func Listen(opts ...Option) (*Listener, error) {
	o := options{buffer: bufferSize}
	for _, set := range opts {
		set(&o)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("listen to uevents: %w", err)
	}
	// A buffer above the system's limit needs a privilege. Without it, the buffer is
	// smaller.
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

// Close closes the listener, and ends a waiting Next.
func (l *Listener) Close() error { return l.file.Close() }

// Next returns the next event of a PCI device, or Lost. It must be used by one goroutine
// only. If the listener was closed, the error is os.ErrClosed.
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
		// Others with the privilege can send to the group; their messages are not the
		// kernel's.
		if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != 0 {
			continue
		}
		if n > len(l.buf) {
			return Event{Action: Lost}, nil
		}
		e, err := Parse(l.buf[:n])
		if err != nil {
			return Event{Action: Lost}, nil // the caller must find out what has changed
		}
		if e.device() {
			return e, nil
		}
	}
}
