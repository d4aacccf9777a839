package rdma

/*
#include "call.h"
*/
import "C"

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// keepIdle is after how many silent seconds the other end is asked for a sign of life: one
	// that only reads would not know that the network is gone.
	keepIdle  = 10
	buffer    = 1 << 20 // bytes, registered with the device, of each direction
	backlog   = 64
	mostAtOne = 1 << 20 // bytes of one call
)

// Conn is a connected rsocket. One goroutine may read and one write at a time. There are no
// deadlines; Close ends who waits.
type Conn struct {
	l             *Library
	fd            C.int
	local, remote Addr
	closed        bool // the loop's
}

// Dial connects to an address, HOST:PORT.
func (l *Library) Dial(ctx context.Context, address string) (*Conn, error) {
	to, err := resolve(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	made := make(chan error, 1)
	var c *Conn
	go func() { // the library gives up by itself
		var err error
		if c, err = l.connect(to); err == nil && ctx.Err() != nil {
			_ = c.Close()
			err = ctx.Err()
		}
		made <- err
	}()
	select {
	case err = <-made:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	return c, nil
}

func (l *Library) connect(to netip.AddrPort) (*Conn, error) {
	r, n, family := rawOf(to)
	fd, err := l.socket(family)
	if err != nil {
		return nil, err
	}
	c := l.newConn(fd)
	if _, err := result(C.gxRdmaConnect(&l.f, fd, unsafe.Pointer(&r), n)); err != nil {
		l.end(fd)
		return nil, err
	}
	if err := c.named(); err != nil {
		l.end(fd)
		return nil, err
	}
	return c, nil
}

func resolve(ctx context.Context, address string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(address); err == nil {
		return a, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return netip.AddrPort{}, err
	}
	n, err := net.DefaultResolver.LookupPort(ctx, "tcp", port)
	if err != nil {
		return netip.AddrPort{}, err
	}
	if host == "" {
		return netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(n)), nil
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.AddrPortFrom(all[0].Unmap(), uint16(n)), nil
}

func (l *Library) newConn(fd C.int) *Conn {
	for _, o := range []struct{ level, name, value C.int }{
		{unix.SOL_SOCKET, unix.SO_SNDBUF, buffer}, {unix.SOL_SOCKET, unix.SO_RCVBUF, buffer}, {unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepIdle},
	} {
		C.gxRdmaSet(&l.f, fd, o.level, o.name, o.value) // what it cannot do it does in its own way
	}
	return &Conn{l: l, fd: fd}
}

// named has a connection that is made not block any more.
func (c *Conn) named() error {
	c.local, c.remote = c.l.nameOf(c.fd, false), c.l.nameOf(c.fd, true)
	_, err := result(C.gxRdmaBlock(&c.l.f, c.fd, 0))
	return err
}

func (c *Conn) do(op string, events C.short, f func() (int, error)) (int, error) {
	n, err := c.l.loop.do(c, events, f)
	if err != nil {
		return 0, c.failed(op, err)
	}
	return n, nil
}

func (c *Conn) failed(op string, err error) error {
	return &net.OpError{Op: op, Net: Addr{}.Network(), Source: c.local, Addr: c.remote, Err: err}
}

// Read implements io.Reader. After a connection that is broken it may return io.EOF.
func (c *Conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	n, err := c.do("read", unix.POLLIN, func() (int, error) {
		return result(C.gxRdmaRecv(&c.l.f, c.fd, unsafe.Pointer(&b[0]), C.size_t(min(len(b), mostAtOne))))
	})
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// Write implements io.Writer.
func (c *Conn) Write(b []byte) (n int, err error) {
	for n < len(b) {
		rest := b[n:min(len(b), n+mostAtOne)]
		k, err := c.do("write", unix.POLLOUT, func() (int, error) {
			return result(C.gxRdmaSend(&c.l.f, c.fd, unsafe.Pointer(&rest[0]), C.size_t(len(rest))))
		})
		if k == 0 && err == nil { // the library knows of no reason
			err = c.failed("write", unix.EPIPE)
		}
		n += k
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// Close ends the connection. What was written arrives, if the other end still takes it; that
// is not waited for.
func (c *Conn) Close() error {
	if !c.l.loop.leave(c) {
		return c.failed("close", net.ErrClosed)
	}
	return nil
}

// RemoteAddr is the address of the other end.
func (c *Conn) RemoteAddr() Addr { return c.remote }

// Listener is a listening rsocket.
type Listener struct{ c *Conn }

// Listen listens at an address, HOST:PORT; without a host, at those of all devices.
func (l *Library) Listen(ctx context.Context, address string) (*Listener, error) {
	at, err := resolve(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	r, n, family := rawOf(at)
	fd, err := l.socket(family)
	if err != nil {
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	C.gxRdmaSet(&l.f, fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if _, err = result(C.gxRdmaBind(&l.f, fd, unsafe.Pointer(&r), n)); err == nil {
		_, err = result(C.gxRdmaListen(&l.f, fd, backlog))
	}
	if err == nil {
		_, err = result(C.gxRdmaBlock(&l.f, fd, 0))
	}
	if err != nil {
		l.end(fd)
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	return &Listener{&Conn{l: l, fd: fd, local: l.nameOf(fd, false)}}, nil
}

// Accept returns the next connection. One goroutine may call it at a time.
func (s *Listener) Accept() (*Conn, error) {
	n, err := s.c.do("accept", unix.POLLIN, func() (int, error) { return result(C.gxRdmaAccept(&s.c.l.f, s.c.fd)) })
	if err != nil {
		return nil, err
	}
	c := s.c.l.newConn(C.int(n))
	if err := c.named(); err != nil {
		c.l.end(c.fd)
		return nil, s.c.failed("accept", err)
	}
	return c, nil
}

// Close ends Accept.
func (s *Listener) Close() error { return s.c.Close() }

// Addr is where it listens.
func (s *Listener) Addr() Addr { return s.c.local }
