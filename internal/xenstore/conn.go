package xenstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
)

// errUnsent marks requests that xenstored cannot have received.
var errUnsent = errors.New("the request was not sent")

// conn is one connection. Answers are matched by the id of their request, except answers
// to watch requests on the kernel's device, which have id zero: the kernel itself sends
// these, in order.
//
// A request to watch or unwatch is sent only when all requests before it are answered.
// Linux asks xenstored during the write and keeps the file locked, while the thread that
// reads xenstored's answers needs that lock for an earlier answer. That would be a
// deadlock for the whole domain.
type conn struct {
	stream io.ReadWriteCloser

	writing chan struct{} // held while a message is written
	settled chan struct{} // contains a token while all requests are answered

	mu      sync.Mutex
	err     error // why it is closed
	last    uint32
	waiting map[uint32]*waiter
	watches []uint32 // ids of watch and unwatch requests, in order
	dead    chan struct{}
}

type waiter struct {
	op     Op
	answer chan Message // has room for one
}

func newConn(stream io.ReadWriteCloser) *conn {
	return &conn{stream: stream, writing: make(chan struct{}, 1), settled: make(chan struct{}, 1), waiting: map[uint32]*waiter{}, dead: make(chan struct{})}
}

func (cn *conn) close(why error) {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if cn.err != nil {
		return
	}
	cn.err = why
	close(cn.dead)
	go func() { _ = cn.stream.Close() }() // Close waits for a write that is blocked
}

func (cn *conn) reason() error {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	return cn.err
}

// read dispatches messages until the connection ends.
func (cn *conn) read(event func(path, token string)) error {
	for {
		m, err := ReadMessage(cn.stream, MaxReply)
		if err != nil {
			if why := cn.reason(); why != nil {
				return why
			}
			return err
		}
		if m.Op == OpWatchEvent {
			s := Strings(m.Payload)
			if len(s) < 2 {
				return fmt.Errorf("%w: an event of %d texts", ErrProtocol, len(s))
			}
			event(s[0], s[1])
			continue
		}
		if err := cn.route(m); err != nil {
			return err
		}
	}
}

func (cn *conn) route(m Message) error {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	id := m.Request
	if id == 0 && (m.Op == OpWatch || m.Op == OpUnwatch) && len(cn.watches) > 0 {
		id = cn.watches[0]
	}
	w := cn.waiting[id]
	if w == nil {
		return fmt.Errorf("%w: an answer that nobody asked for (%s, request %d)", ErrProtocol, m.Op, m.Request)
	}
	if m.Op != OpError && m.Op != w.op {
		return fmt.Errorf("%w: %q was answered by %q", ErrProtocol, w.op, m.Op)
	}
	cn.forget(id)
	w.answer <- m // has room: there is one answer for a request
	return nil
}

func (cn *conn) forget(id uint32) {
	delete(cn.waiting, id)
	for i, other := range cn.watches {
		if other == id {
			cn.watches = append(cn.watches[:i], cn.watches[i+1:]...)
			break
		}
	}
	if len(cn.waiting) == 0 {
		select {
		case cn.settled <- struct{}{}:
		default:
		}
	}
}

// settle waits until all requests are answered. The caller holds writing.
func (cn *conn) settle(ctx context.Context) error {
	for {
		cn.mu.Lock()
		n := len(cn.waiting)
		cn.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-cn.settled:
		case <-cn.dead:
			return fmt.Errorf("%w: %w", errUnsent, cn.reason())
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// call sends a request and waits for the answer. If ctx ends before, the answer is
// dropped when it comes. If the request would leave a watch or a transaction in
// xenstored, the connection is closed instead, which removes them.
func (cn *conn) call(ctx context.Context, op Op, tx uint32, payload []byte) (Message, error) {
	select {
	case cn.writing <- struct{}{}:
	case <-ctx.Done():
		return Message{}, ctx.Err()
	case <-cn.dead:
		return Message{}, fmt.Errorf("%w: %w", errUnsent, cn.reason())
	}
	if op == OpWatch || op == OpUnwatch {
		if err := cn.settle(ctx); err != nil {
			<-cn.writing
			if op == OpUnwatch { // closing the connection removes the watch, too
				cn.close(fmt.Errorf("%w: it was given up with a request to %s under way", ErrConnection, op))
			}
			return Message{}, err
		}
	}
	id, w, err := cn.expect(op)
	if err != nil {
		<-cn.writing
		return Message{}, err
	}
	// A write that is blocked must not block other callers.
	written := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-written:
		default:
			cn.close(fmt.Errorf("%w: a request could not be written: %w", ErrConnection, context.Cause(ctx)))
		}
	})
	_, err = cn.stream.Write(Message{Op: op, Request: id, TxID: tx, Payload: payload}.Encode())
	close(written)
	stop()
	<-cn.writing
	if err != nil {
		if errno, ok := errors.AsType[syscall.Errno](err); ok && refuses(errno) {
			// The kernel's device reports a refused request as an error of the write.
			cn.mu.Lock()
			cn.forget(id)
			cn.mu.Unlock()
			return Message{Op: OpError, Payload: joined(ErrnoName(errno))}, nil
		}
		cn.close(fmt.Errorf("%w: %w", ErrConnection, err))
		return Message{}, cn.reason()
	}
	select {
	case m := <-w.answer:
		return m, nil
	case <-cn.dead:
		select {
		case m := <-w.answer:
			return m, nil
		default:
			return Message{}, cn.reason()
		}
	case <-ctx.Done():
		switch op {
		case OpWatch, OpUnwatch, OpTransactionStart, OpTransactionEnd:
			cn.close(fmt.Errorf("%w: it was given up with a request to %s under way", ErrConnection, op))
		}
		return Message{}, ctx.Err()
	}
}

func refuses(e syscall.Errno) bool {
	switch e {
	case syscall.EINVAL, syscall.ENOENT, syscall.EEXIST, syscall.E2BIG, syscall.EACCES, syscall.ENOMEM, syscall.ENOSPC:
		return true
	}
	return false
}

func (cn *conn) expect(op Op) (uint32, *waiter, error) {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if cn.err != nil {
		return 0, nil, fmt.Errorf("%w: %w", errUnsent, cn.err)
	}
	// Abandoned requests also wait for their answers. If xenstored never answers, they
	// must not use up the memory.
	if len(cn.waiting) >= 4*maxOutstanding {
		return 0, nil, fmt.Errorf("%w: %d requests were not answered", ErrConnection, len(cn.waiting))
	}
	for {
		cn.last++
		if cn.last != 0 && cn.waiting[cn.last] == nil {
			break
		}
	}
	w := &waiter{op, make(chan Message, 1)}
	cn.waiting[cn.last] = w
	if op == OpWatch || op == OpUnwatch {
		cn.watches = append(cn.watches, cn.last)
	}
	return cn.last, w, nil
}
