package rdma

/*
#include "verbs.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

const (
	backlog = 64
	// mostUnfinished is how many connections may be under way at a time; others wait.
	mostUnfinished = 16
)

// Listener listens for connections.
type Listener struct {
	at    Addr
	l     *C.rxListener
	file  *os.File
	ready chan *Conn
	over  chan struct{}
	once  sync.Once
	work  sync.WaitGroup
}

// Listen listens at an address, HOST:PORT; without a host, at those of all devices.
func (l Library) Listen(ctx context.Context, address string) (*Listener, error) {
	at, err := resolve(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	r := rawOf(at)
	s := &Listener{ready: make(chan *Conn), over: make(chan struct{})}
	if err := failed(C.rxListen(unsafe.Pointer(&r), backlog, &s.l)); err != nil {
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	C.rxListenerName(s.l, unsafe.Pointer(&r))
	s.at = r.addr()
	if s.file, err = watch(C.rxListenerFd(s.l)); err != nil {
		C.rxUnlisten(s.l)
		return nil, fmt.Errorf("rdma %s: %w", address, err)
	}
	s.work.Go(s.take)
	return s, nil
}

// take finishes the connections that come, each beside the others.
func (s *Listener) take() {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return
	}
	places := make(chan struct{}, mostUnfinished)
	_ = raw.Read(func(uintptr) bool {
		for {
			var c *C.rxConn
			err := failed(C.rxTake(s.l, &c))
			if errors.Is(err, syscall.EAGAIN) {
				return false
			}
			if err != nil {
				continue // of that connection
			}
			select {
			case places <- struct{}{}:
			case <-s.over:
				C.rxFree(c)
				return true
			}
			s.work.Go(func() {
				defer func() { <-places }()
				s.finish(c)
			})
		}
	})
}

func (s *Listener) finish(c *C.rxConn) {
	if C.rxFinish(c, C.int(stepFor.Milliseconds())) != 0 {
		C.rxFree(c)
		return
	}
	conn, err := newConn(c)
	if err != nil {
		return
	}
	select {
	case s.ready <- conn:
	case <-s.over:
		_ = conn.Close()
	}
}

// Accept returns the next connection.
func (s *Listener) Accept() (*Conn, error) {
	select {
	case c := <-s.ready:
		return c, nil
	case <-s.over:
		return nil, &net.OpError{Op: "accept", Net: Addr{}.Network(), Addr: s.at, Err: net.ErrClosed}
	}
}

// Close ends Accept, and connections that are under way.
func (s *Listener) Close() error {
	err := net.ErrClosed
	s.once.Do(func() {
		close(s.over)
		_ = s.file.Close()
		s.work.Wait()
		C.rxUnlisten(s.l)
		err = nil
	})
	return err
}

// Addr is where it listens.
func (s *Listener) Addr() Addr { return s.at }
