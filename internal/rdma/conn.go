package rdma

/*
#include "verbs.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	stepFor = 8 * time.Second // of each step of connecting: address, route, connection
	endFor  = 5 * time.Second // for what was sent to arrive, before a connection is closed
)

// Conn is a connection. One goroutine may read and one write at a time. There are no
// deadlines; Close ends who waits.
type Conn struct {
	local, remote Addr

	mu     sync.Mutex
	turned *sync.Cond // something has come, has arrived, or has ended
	c      *C.rxConn
	closed bool
	wrote  bool
	late   bool // it is not waited for what was sent
	files  []*os.File
	work   sync.WaitGroup
}

// Dial connects to an address, HOST:PORT.
func (l Library) Dial(ctx context.Context, address string) (*Conn, error) {
	to, err := resolve(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	type made struct {
		c   *Conn
		err error
	}
	result := make(chan made)
	go func() { // it gives up by itself
		conn, err := connect(to)
		select {
		case result <- made{conn, err}:
		case <-ctx.Done():
			if err == nil {
				_ = conn.Close()
			}
		}
	}()
	select {
	case m := <-result:
		if m.err != nil {
			return nil, fmt.Errorf("rdma %s: %w", address, m.err)
		}
		return m.c, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("rdma %s: %w", address, ctx.Err())
	}
}

func connect(to netip.AddrPort) (*Conn, error) {
	r := rawOf(to)
	var c *C.rxConn
	if err := failed(C.rxDial(unsafe.Pointer(&r), C.int(stepFor.Milliseconds()), &c)); err != nil {
		return nil, err
	}
	return newConn(c)
}

// newConn serves a connection that is established.
func newConn(c *C.rxConn) (*Conn, error) {
	conn := &Conn{c: c}
	conn.turned = sync.NewCond(&conn.mu)
	var r raw
	C.rxName(c, 0, unsafe.Pointer(&r))
	conn.local = r.addr()
	C.rxName(c, 1, unsafe.Pointer(&r))
	conn.remote = r.addr()
	turn, err := watch(C.rxFd(c))
	if err == nil {
		conn.files = append(conn.files, turn)
		turn, err = watch(C.rxCmFd(c))
	}
	if err != nil {
		for _, f := range conn.files {
			f.Close()
		}
		C.rxFree(c)
		return nil, err
	}
	conn.files = append(conn.files, turn)
	conn.serve(conn.files[0], func() { C.rxTurn(c) })
	conn.serve(conn.files[1], func() { C.rxEvents(c) })
	return conn, nil
}

// watch has Go's poller know of a descriptor that does not block and is C's.
func watch(fd C.int) (*os.File, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(dup), "rdma"), nil
}

// serve calls f whenever a descriptor is readable, until it is closed.
func (c *Conn) serve(file *os.File, f func()) {
	c.work.Go(func() {
		raw, err := file.SyscallConn()
		if err != nil {
			return
		}
		_ = raw.Read(func(uintptr) bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			f()
			c.turned.Broadcast()
			return false
		})
	})
}

func (c *Conn) failed(op string, err error) error {
	return &net.OpError{Op: op, Net: Addr{}.Network(), Source: c.local, Addr: c.remote, Err: err}
}

// do makes a call until it does not ask to wait. c.mu is held.
func (c *Conn) do(op string, call func() C.int64_t) (int, error) {
	for {
		if c.closed {
			return 0, c.failed(op, net.ErrClosed)
		}
		n := call()
		err := failed(n)
		switch {
		case err == nil:
			return int(n), nil
		case !errors.Is(err, syscall.EAGAIN):
			return 0, c.failed(op, err)
		}
		c.turned.Wait()
	}
}

// Read implements io.Reader. It returns io.EOF after all that the other end has written before it
// closed the connection.
func (c *Conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n, err := c.do("read", func() C.int64_t { return C.rxRecv(c.c, unsafe.Pointer(&b[0]), C.size_t(len(b))) })
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// Write implements io.Writer.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n < len(b) {
		k, err := c.do("write", func() C.int64_t { return C.rxSend(c.c, unsafe.Pointer(&b[n]), C.size_t(len(b)-n)) })
		n += k
		c.wrote = c.wrote || k > 0
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// Close ends the connection. What was written arrives, if the other end still takes it: that is
// waited for, so that who counts connections counts those that are left over.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.failed("close", net.ErrClosed)
	}
	c.closed, c.late = true, !c.wrote
	c.turned.Broadcast()
	c.mu.Unlock()
	c.end()
	return nil
}

// end says that nothing follows, waits for what was sent, and frees the connection.
func (c *Conn) end() {
	timer := time.AfterFunc(endFor, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.late = true
		c.turned.Broadcast()
	})
	defer timer.Stop()
	c.mu.Lock()
	for (C.rxEnd(c.c) == -C.int(syscall.EAGAIN) || C.rxIdle(c.c) == 0) && !c.late {
		c.turned.Wait()
	}
	c.mu.Unlock()
	for _, f := range c.files {
		_ = f.Close()
	}
	c.work.Wait()
	C.rxFree(c.c)
}

// RemoteAddr is the address of the other end.
func (c *Conn) RemoteAddr() Addr { return c.remote }
