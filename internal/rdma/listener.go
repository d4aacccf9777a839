package rdma

/*
#include "verbs.h"
*/
import "C"

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	backlog        = 64
	mostUnfinished = 16              // connections under way at a time: each has memory
	mostWaiting    = 256             // connections that wait to be under way
	patience       = 1 * time.Second // for who keeps others waiting
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

	mu         sync.Mutex
	waiting    []*request // in the order in which they came
	unfinished []*request // in the order in which they were begun
	again      *time.Timer
	closed     bool
}

// request is a connection that the other end has asked for.
type request struct {
	c     *C.rxConn
	from  netip.Addr
	begun time.Time
	stop  int // an eventfd: what is written there ends it
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
	s.again = time.AfterFunc(0, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.next()
	})
	s.work.Go(s.take)
	return s, nil
}

// take takes the connections that come.
func (s *Listener) take() {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(uintptr) bool {
		for {
			var c *C.rxConn
			err := failed(C.rxTake(s.l, &c))
			if errors.Is(err, syscall.EAGAIN) {
				return false
			}
			if err != nil { // it may pass, and is not to be asked without end
				select {
				case <-time.After(patience):
					continue
				case <-s.over:
					return true
				}
			}
			s.admit(c)
		}
	})
}

// admit has a connection wait for its turn. If too many wait, one is refused, of the address that
// has most of them.
func (s *Listener) admit(c *C.rxConn) {
	var from raw
	C.rxName(c, 1, unsafe.Pointer(&from))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = append(s.waiting, &request{c: c, from: from.addr().Addr().Unmap(), stop: -1})
	if len(s.waiting) > mostWaiting {
		i := crowded(s.waiting)
		C.rxFree(s.waiting[i].c)
		s.waiting = slices.Delete(s.waiting, i, i+1)
	}
	s.next()
}

// next begins connections that wait, first of the addresses that have fewest under way. One of an
// address that has more than others is given up for them if it does not get on. The caller holds
// s.mu.
func (s *Listener) next() {
	for !s.closed && len(s.waiting) > 0 {
		count := counted(s.unfinished)
		r := slices.MinFunc(s.waiting, func(a, b *request) int { return cmp.Compare(count[a.from], count[b.from]) })
		if len(s.unfinished) < mostUnfinished {
			s.waiting = slices.DeleteFunc(s.waiting, func(o *request) bool { return o == r })
			s.begin(r)
			continue
		}
		if u := s.unfinished[crowded(s.unfinished)]; count[u.from] > count[r.from]+1 {
			if left := patience - time.Since(u.begun); left > 0 {
				s.again.Reset(left)
			} else {
				u.end()
			}
		}
		return
	}
}

// begin makes a connection, beside others. The caller holds s.mu.
func (s *Listener) begin(r *request) {
	var err error
	if r.stop, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
		C.rxFree(r.c)
		return
	}
	r.begun = time.Now()
	s.unfinished = append(s.unfinished, r)
	s.work.Go(func() {
		s.finish(r)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.unfinished = slices.DeleteFunc(s.unfinished, func(o *request) bool { return o == r })
		_ = unix.Close(r.stop)
		s.next()
	})
}

// end has it given up.
func (r *request) end() { _, _ = unix.Write(r.stop, binary.NativeEndian.AppendUint64(nil, 1)) }

func counted(all []*request) map[netip.Addr]int {
	count := map[netip.Addr]int{}
	for _, r := range all {
		count[r.from]++
	}
	return count
}

// crowded returns which is the oldest of the address that has most of them.
func crowded(all []*request) (oldest int) {
	count := counted(all)
	for i, r := range all {
		if count[r.from] > count[all[oldest].from] {
			oldest = i
		}
	}
	return oldest
}

// finish waits until the other end has finished a connection, and it is accepted.
func (s *Listener) finish(r *request) {
	if C.rxFinish(r.c, C.int(stepFor.Milliseconds()), C.int(r.stop)) != 0 {
		C.rxFree(r.c)
		return
	}
	conn, err := newConn(r.c)
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
		s.mu.Lock()
		s.closed = true
		for _, r := range s.unfinished {
			r.end()
		}
		s.mu.Unlock()
		s.work.Wait()
		s.again.Stop()
		for _, r := range s.waiting {
			C.rxFree(r.c)
		}
		C.rxUnlisten(s.l)
		err = nil
	})
	return err
}

// Addr is where it listens.
func (s *Listener) Addr() Addr { return s.at }
