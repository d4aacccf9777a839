package vchan

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gpuctl/gpuctl/internal/xenstore"
)

var (
	// ErrDied means that the other side has ended without closing the connection.
	ErrDied = errors.New("the other side of the vchan died")
	// ErrMoved means that the ring is not published any more: its domain was migrated,
	// restored or destroyed, or the path was removed.
	ErrMoved = errors.New("the domain of the vchan has moved or is gone")
)

const (
	idleEvents    = 64                    // events without data that are handled without a delay
	idlePause     = time.Millisecond      // delay for each further one
	watchPause    = 20 * time.Millisecond // pause between two reads of xenstore, because a guest can cause them
	storePatience = 2 * time.Second       // limit for xenstore calls without a caller's context
)

// Addr is an address of a connection. Both ends have the same one.
type Addr struct {
	Domain uint16 // the other domain, as the server or the client names it
	Path   string
}

// Network implements net.Addr.
func (Addr) Network() string { return "vchan" }

func (a Addr) String() string { return fmt.Sprintf("%s@%d", a.Path, a.Domain) }

// Conn is one end of a connection. It must be closed, even if it has ended. It is safe
// for concurrent use. Errors of Read and Write are *net.OpError, except io.EOF. They wrap
// os.ErrDeadlineExceeded, net.ErrClosed, ErrDied, ErrMoved, ErrProtocol or, for Write,
// syscall.EPIPE.
type Conn struct {
	addr   Addr
	server bool
	offer  published

	use     sync.RWMutex // read-locked while the pages are accessed, which is permitted only before the end
	port    Port
	page    Memory
	rings   []Memory
	state   *uint32
	in, out half
	// Bit offsets in the state.
	liveOurs, liveTheirs, wishesOurs, wishesTheirs int

	reading, writing  sync.Mutex // one call of each at a time
	canRead, canWrite chan struct{}
	readBy, writeBy   deadline
	moves             atomic.Uint32 // changes of either index by this side

	stop context.CancelFunc // ends the watch
	mu   sync.Mutex
	err  error         // why the connection has ended
	bye  bool          // tell the other side that it is closed
	over chan struct{} // closed when err is set
	free chan struct{} // closed when everything was released
	once sync.Once
}

func newConn(addr Addr, server bool, port Port, page Memory) *Conn {
	c := &Conn{
		addr: addr, server: server, port: port, page: page,
		state:    word(page.Bytes(), offState),
		liveOurs: shiftClientLive, liveTheirs: shiftServerLive, wishesOurs: shiftClientWishes, wishesTheirs: shiftServerWishes,
		canRead: make(chan struct{}, 1), canWrite: make(chan struct{}, 1),
		stop: func() {}, over: make(chan struct{}), free: make(chan struct{}),
	}
	if server {
		c.liveOurs, c.liveTheirs, c.wishesOurs, c.wishesTheirs = c.liveTheirs, c.liveOurs, c.wishesTheirs, c.wishesOurs
	}
	c.readBy.set(time.Time{})
	c.writeBy.set(time.Time{})
	return c
}

// attach makes the halves of two rings in the memory left and right. If a memory is nil,
// the ring is in the shared page.
func (c *Conn) attach(left, right place, leftMemory, rightMemory Memory) {
	page := c.page.Bytes()
	ring := func(p place, m Memory) []byte {
		if m == nil {
			return page[p.offset:][:p.size:p.size]
		}
		c.rings = append(c.rings, m)
		return m.Bytes()[:p.size:p.size]
	}
	reader := func(r []byte, at int) half {
		return half{ring: r, mine: word(page, at), theirs: word(page, at+4)}
	}
	writer := func(r []byte, at int) half {
		return half{ring: r, mine: word(page, at+4), theirs: word(page, at)}
	}
	l, r := ring(left, leftMemory), ring(right, rightMemory)
	if c.server {
		c.in, c.out = reader(l, offLeft), writer(r, offRight)
	} else {
		c.in, c.out = reader(r, offRight), writer(l, offLeft)
	}
}

// start begins to handle events and changes of xenstore.
func (c *Conn) start(watch *xenstore.Watch) {
	ctx, cancel := context.WithCancel(context.Background())
	c.stop = cancel
	go c.events()
	go c.watch(ctx, watch)
}

// events wakes readers and writers.
func (c *Conn) events() {
	var last uint32
	idle := 0
	for {
		if err := c.port.Wait(); err != nil {
			c.end(fmt.Errorf("events: %w", err), false)
			return
		}
		c.wake()
		if now := c.moves.Load(); now != last {
			last, idle = now, 0
			continue
		}
		if idle++; idle > idleEvents {
			select {
			case <-time.After(idlePause):
			case <-c.over:
			}
		}
	}
}

func (c *Conn) wake() {
	for _, ch := range [...]chan struct{}{c.canRead, c.canWrite} {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// watch ends the connection when the ring is not published any more.
func (c *Conn) watch(ctx context.Context, w *xenstore.Watch) {
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), storePatience)
		defer cancel()
		_ = w.Close(ctx)
	}()
	for {
		if _, err := w.Next(ctx); err != nil {
			if ctx.Err() == nil {
				c.end(fmt.Errorf("a migration would not be noticed: %w", err), false)
			}
			return
		}
		// After an error, the watch fires again with the new connection.
		if is, err := c.offer.holds(ctx); err == nil && !is {
			if !c.peerGone() {
				c.end(ErrMoved, false)
				return
			}
			c.wake() // the other side may have closed it, and its event may be lost
		}
		select {
		case <-time.After(watchPause):
		case <-ctx.Done():
		}
	}
}

// peer returns the liveness byte of the other side, and whether that side has closed the
// connection.
func (c *Conn) peer() (live uint32, bye bool) {
	s := atomic.LoadUint32(c.state)
	return s >> c.liveTheirs & 0xff, s>>c.wishesTheirs&goodbye != 0
}

func (c *Conn) peerGone() bool {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.reason() != nil {
		return true
	}
	live, _ := c.peer()
	return live == gone
}

// arrived reports whether a client has connected to this server, even if it may have left
// since.
func (c *Conn) arrived() bool {
	c.use.RLock()
	defer c.use.RUnlock()
	if c.reason() != nil {
		return false
	}
	live, _ := c.peer()
	return live != expected
}

// wish asks the other side for an event. What is read afterwards is newer than the
// request.
func (c *Conn) wish(what uint32) { atomic.OrUint32(c.state, what<<c.wishesOurs) }

// tell sends an event if the other side has asked for one.
func (c *Conn) tell(what uint32) error {
	what <<= c.wishesTheirs
	if atomic.LoadUint32(c.state)&what == 0 || atomic.AndUint32(c.state, ^what)&what == 0 {
		return nil
	}
	return c.port.Notify()
}

// step tries to move bytes of p. If it returns no bytes and no error, the caller must
// wait.
func (c *Conn) step(h *half, p []byte, room func(*half) (int, error), move func(*half, []byte, int) int, wishFor, tellOf uint32) (int, error) {
	c.use.RLock()
	defer c.use.RUnlock()
	if err := c.reason(); err != nil {
		return 0, err
	}
	n, err := room(h)
	live, bye := uint32(alive), false
	if n == 0 && err == nil {
		c.wish(wishFor)
		live, bye = c.peer() // read before the index, so that what a peer did before its end is seen
		n, err = room(h)
	} else if h == &c.out {
		live, bye = c.peer()
	}
	switch {
	case err != nil:
		return 0, err
	case live == gone && (n == 0 || h == &c.out):
		switch {
		case !bye:
			return 0, ErrDied
		case h == &c.out:
			return 0, syscall.EPIPE
		}
		return 0, io.EOF
	case n == 0:
		return 0, nil
	}
	n = move(h, p, n)
	c.moves.Add(1)
	return n, c.tell(tellOf)
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	for {
		if c.readBy.passed() {
			return 0, c.failed("read", os.ErrDeadlineExceeded)
		}
		if len(p) == 0 {
			return 0, nil
		}
		n, err := c.step(&c.in, p, (*half).ready, (*half).read, wishWritten, wishRead)
		if err != nil {
			return n, c.failed("read", err)
		}
		if n > 0 {
			return n, nil
		}
		c.wait(c.canRead, &c.readBy)
	}
}

// Write implements net.Conn. It returns when all of p is in the ring. It does not wait
// until that was read.
func (c *Conn) Write(p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	for done := 0; ; {
		if c.writeBy.passed() {
			return done, c.failed("write", os.ErrDeadlineExceeded)
		}
		if done == len(p) {
			return done, nil
		}
		n, err := c.step(&c.out, p[done:], (*half).space, (*half).write, wishRead, wishWritten)
		done += n
		if err != nil {
			return done, c.failed("write", err)
		}
		if n == 0 {
			c.wait(c.canWrite, &c.writeBy)
		}
	}
}

// wait waits until it is worth trying again.
func (c *Conn) wait(news chan struct{}, by *deadline) {
	select {
	case <-news:
	case <-by.done():
	case <-c.over:
	}
}

// failed ends the connection if it cannot go on after this error.
func (c *Conn) failed(op string, err error) error {
	switch {
	case err == io.EOF: //nolint:errorlint // it is ours
		return err
	case !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, ErrDied) && !errors.Is(err, syscall.EPIPE):
		c.end(err, false)
	}
	return &net.OpError{Op: op, Net: c.addr.Network(), Source: c.addr, Addr: c.addr, Err: err}
}

func (c *Conn) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close implements net.Conn. The other side can still read what was written. When Close
// returns, nothing of the other domain is mapped.
func (c *Conn) Close() error {
	c.end(net.ErrClosed, true)
	return nil
}

// end releases everything, once. The first reason is kept.
func (c *Conn) end(why error, polite bool) {
	c.mu.Lock()
	if c.err == nil {
		c.err, c.bye = why, polite
		close(c.over)
	}
	c.mu.Unlock()
	c.once.Do(func() {
		c.release()
		close(c.free)
	})
}

func (c *Conn) release() {
	c.stop()
	c.readBy.stop()
	c.writeBy.stop()
	// See doc.go: a port that was bound before a migration must not be closed. If that is
	// unknown, the port is kept.
	moved := false
	if c.server && c.offer.store != nil {
		ctx, cancel := context.WithTimeout(context.Background(), storePatience)
		is, err := c.offer.holds(ctx)
		cancel()
		moved = err != nil || !is
	}
	c.use.Lock()
	defer c.use.Unlock()
	if c.bye {
		c.wish(goodbye)
	}
	atomic.AndUint32(c.state, ^(uint32(0xff) << c.liveOurs))
	for _, m := range c.rings {
		_ = m.Close()
	}
	_ = c.port.Notify()
	if moved {
		c.page.Abandon()
		c.port.Abandon()
		return
	}
	_ = c.page.Close()
	_ = c.port.Close()
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.addr }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.addr }

// SetDeadline implements net.Conn. It also affects calls in progress.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(&c.readBy, t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(&c.writeBy, t) }

func (c *Conn) setDeadline(d *deadline, t time.Time) error {
	if err := c.reason(); err != nil {
		return c.failed("set", err)
	}
	d.set(t)
	return nil
}

// deadline is a context that is replaced when the deadline is set.
type deadline struct {
	mu     sync.Mutex
	ctx    context.Context
	cancel context.CancelFunc
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cancel != nil {
		d.cancel() // wakes waiting calls, which check the new deadline
	}
	if t.IsZero() {
		d.ctx, d.cancel = context.WithCancel(context.Background())
	} else {
		d.ctx, d.cancel = context.WithDeadline(context.Background(), t)
	}
}

func (d *deadline) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.cancel()
}

func (d *deadline) done() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ctx.Done()
}

func (d *deadline) passed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Is(d.ctx.Err(), context.DeadlineExceeded)
}
