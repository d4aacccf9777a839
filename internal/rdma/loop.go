package rdma

/*
#include "call.h"
*/
import "C"

import (
	"errors"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// loop does all that is done with connected sockets, in one goroutine. librdmacm (rdma-core 44)
// does not keep threads apart that use one socket: of two that sleep, one takes the other's
// event; a send and a poll change the same counters; and of several threads in rpoll, one that
// has an event keeps the others waiting for seconds. Nor has rpoll a time limit here: after one
// has passed, each later call spins.
type loop struct {
	l    *Library
	wake int // eventfd: something was submitted

	mu      sync.Mutex
	started bool
	ops     []*op
	closing []*Conn
}

// op is a call that is made until it does not ask to wait.
type op struct {
	c      *Conn
	events C.short
	call   func() (int, error)
	n      int
	err    error
	done   chan struct{}
}

func newLoop(l *Library) (*loop, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, err
	}
	return &loop{l: l, wake: fd}, nil
}

// do makes a call when its socket is ready. It fails with net.ErrClosed if that is closed.
func (p *loop) do(c *Conn, events C.short, call func() (int, error)) (int, error) {
	o := &op{c: c, events: events, call: call, done: make(chan struct{})}
	p.mu.Lock()
	if c.closed {
		p.mu.Unlock()
		return 0, net.ErrClosed
	}
	p.ops = append(p.ops, o)
	p.start()
	p.mu.Unlock()
	<-o.done
	return o.n, o.err
}

// leave ends the calls of a socket, and then closes it. It reports whether that is new.
func (p *loop) leave(c *Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.closed {
		return false
	}
	c.closed = true
	p.closing = append(p.closing, c)
	p.start()
	return true
}

// start has the loop look at what was submitted. p.mu is held.
func (p *loop) start() {
	if !p.started {
		p.started = true
		go p.run()
	}
	_, _ = unix.Write(p.wake, []byte{7: 1})
}

// run goes on until the process ends.
func (p *loop) run() {
	var all []*op
	var fds []C.gxPollFd
	for {
		_, _ = unix.Read(p.wake, make([]byte, 8))
		p.mu.Lock()
		fresh, closing := p.ops, p.closing
		p.ops, p.closing = nil, nil
		p.mu.Unlock()
		all = attempt(append(all, fresh...), func(i int) bool { return i >= len(all) || i+1 < len(fds) && fds[i+1].revents != 0 })
		for _, c := range closing {
			all = c.end(all)
		}
		fds = append(fds[:0], C.gxPollFd{fd: C.int(p.wake), events: unix.POLLIN})
		for _, o := range all {
			fds = append(fds, C.gxPollFd{fd: o.c.fd, events: o.events})
		}
		if _, err := result(C.gxRdmaPoll(&p.l.f, &fds[0], C.int(len(fds)))); err != nil {
			for i := range fds {
				fds[i].revents = unix.POLLERR // each call says what is wrong with its socket
			}
			if !errors.Is(err, unix.EINTR) {
				time.Sleep(10 * time.Millisecond)
			}
		}
	}
}

// attempt makes the calls that may be ready, and returns those that wait on.
func attempt(all []*op, may func(i int) bool) []*op {
	left := make([]*op, 0, len(all))
	for i, o := range all {
		if may(i) {
			o.n, o.err = o.call()
			if !errors.Is(o.err, unix.EAGAIN) && !errors.Is(o.err, unix.EINTR) {
				close(o.done)
				continue
			}
		}
		left = append(left, o)
	}
	return left
}

// end ends the socket's calls, and closes it, which may wait for the other end. It returns the
// calls of others.
func (c *Conn) end(all []*op) (others []*op) {
	for _, o := range all {
		if o.c != c {
			others = append(others, o)
			continue
		}
		o.n, o.err = 0, net.ErrClosed
		close(o.done)
	}
	go c.l.end(c.fd)
	return others
}
