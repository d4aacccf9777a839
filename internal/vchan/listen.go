package vchan

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"strconv"
	"sync/atomic"

	"github.com/gpuctl/gpuctl/internal/xenstore"
)

// DefaultRing is a ring's size in bytes.
const DefaultRing = 256 << 10

// MaxRing is the largest size of a ring in bytes.
const MaxRing = 1 << maxOrder

// Options are the options of Listen and Dial. The zero value has defaults.
type Options struct {
	Devices Devices // nil: Xen{}
	// FromPeer and ToPeer are the rings' sizes in bytes for Listen, rounded up to a power
	// of two; 0: DefaultRing. A connection takes a page for each 4096 bytes, and one
	// more, of what Xen.Grant can allocate. A ring of 1024 or 2048 bytes is in that one
	// page if the other ring has another size.
	FromPeer, ToPeer int
	// Wait makes Dial wait for a server that does not exist yet, until its context ends.
	Wait bool
}

func (o Options) devices() Devices {
	if o.Devices == nil {
		return Xen{}
	}
	return o.Devices
}

func order(size int) (uint32, error) {
	switch {
	case size == 0:
		size = DefaultRing
	case size < 0 || size > MaxRing:
		return 0, fmt.Errorf("a ring of %d bytes: at most %d", size, MaxRing)
	}
	return max(minOrder, uint32(bits.Len(uint(size-1)))), nil
}

// Listener is the server's end of a path, for one client at a time.
type Listener struct {
	store       *xenstore.Client
	addr        Addr
	devices     Devices
	left, right uint32 // sizes of the rings as powers of two

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	turn   chan struct{} // has room for one; taken by the user of the following fields
	cur    *Conn
	given  bool // cur was returned by Accept
	last   published
}

// Listen publishes a ring for one peer, at a path in this domain's home in xenstore; see
// doc.go. ctx limits only this call. The path belongs to the listener. The store must
// stay open as long as the listener and its connections.
func Listen(ctx context.Context, store *xenstore.Client, path string, peer uint16, opts Options) (*Listener, error) {
	l := &Listener{store: store, addr: Addr{peer, path}, devices: opts.devices(), turn: make(chan struct{}, 1)}
	var err error
	if l.left, err = order(opts.FromPeer); err == nil {
		l.right, err = order(opts.ToPeer)
	}
	if err == nil {
		_, _, err = ringsOf(l.left, l.right)
	}
	if err == nil {
		l.cur, err = l.offer(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", l.addr, err)
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l, nil
}

// offer makes a ring and publishes it.
func (l *Listener) offer(ctx context.Context) (c *Conn, err error) {
	var undo []func() error
	defer func() {
		if err != nil {
			for i := len(undo) - 1; i >= 0; i-- {
				err = errors.Join(err, undo[i]())
			}
		}
	}()
	left, right, err := ringsOf(l.left, l.right)
	if err != nil {
		return nil, err
	}
	port, err := l.devices.BindUnbound(l.addr.Domain)
	if err != nil {
		return nil, err
	}
	undo = append(undo, port.Close)
	grant := func(pages int) (Memory, error) {
		if pages == 0 {
			return nil, nil
		}
		m, err := l.devices.Grant(l.addr.Domain, pages)
		if err == nil {
			undo = append(undo, m.Close)
		}
		return m, err
	}
	page, err := grant(1)
	if err != nil {
		return nil, err
	}
	if err := page.NotifyOnUnmap(offState+shiftServerLive/8, port.Number()); err != nil {
		return nil, err
	}
	leftMemory, err := grant(left.pages)
	if err != nil {
		return nil, err
	}
	rightMemory, err := grant(right.pages)
	if err != nil {
		return nil, err
	}
	at := offGrants
	for _, m := range []Memory{leftMemory, rightMemory} {
		if m != nil {
			for _, ref := range m.Refs() {
				atomic.StoreUint32(word(page.Bytes(), at), ref)
				at += 4
			}
		}
	}
	atomic.StoreUint32(word(page.Bytes(), offOrders), l.left|l.right<<16)
	atomic.StoreUint32(word(page.Bytes(), offState), expected<<shiftClientLive|alive<<shiftServerLive|wishWritten<<shiftServerWishes)

	c = newConn(l.addr, true, port, page)
	c.attach(left, right, leftMemory, rightMemory)
	c.offer = published{
		store: l.store, path: l.addr.Path,
		ring: strconv.FormatUint(uint64(page.Refs()[0]), 10), port: strconv.FormatUint(uint64(port.Number()), 10),
	}
	if err := c.offer.publish(ctx, l.addr.Domain); err != nil {
		return nil, err
	}
	l.last = c.offer
	undo = append(undo, func() error { return c.offer.withdraw(context.WithoutCancel(ctx)) })
	watch, err := l.store.Watch(ctx, l.addr.Path)
	if err != nil {
		return nil, err
	}
	c.start(watch)
	return c, nil
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) { return l.AcceptContext(context.Background()) }

// AcceptContext waits for a client until ctx ends. There is one client at a time:
// AcceptContext also waits for the end of the previous connection, and then makes a new
// ring. A ring that has moved with its domain before a client came is replaced. After an
// error other than net.ErrClosed it may be called again.
func (l *Listener) AcceptContext(ctx context.Context) (net.Conn, error) {
	c, err := l.accept(ctx)
	if err == nil {
		return c, nil
	}
	if l.ctx.Err() != nil {
		err = net.ErrClosed
	}
	return nil, &net.OpError{Op: "accept", Net: l.addr.Network(), Addr: l.addr, Err: err}
}

func (l *Listener) accept(ctx context.Context) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if l.cur == nil {
			c, err := l.offer(ctx)
			if err != nil {
				return nil, err
			}
			l.cur, l.given = c, false
		}
		if !l.given && l.cur.arrived() {
			l.given = true
			return l.cur, nil
		}
		news := l.cur.canRead
		if l.given {
			news = nil // the reader closes it
		}
		select {
		case <-news:
		case <-l.cur.free:
			if err := l.cur.reason(); !l.given && !errors.Is(err, ErrMoved) {
				l.cur = nil
				return nil, err
			}
			l.cur = nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Close ends Accept and removes the path. An accepted connection goes on; then the path
// is removed when it ends.
func (l *Listener) Close() error {
	l.cancel()
	l.turn <- struct{}{}
	defer func() { <-l.turn }()
	withdraw := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), storePatience)
		defer cancel()
		return l.last.withdraw(ctx)
	}
	if c := l.cur; c != nil && l.given {
		go func() { // the connection needs the path to detect a migration
			<-c.free
			_ = withdraw()
		}()
		return nil
	} else if c != nil {
		_ = c.Close()
	}
	if err := withdraw(); err != nil {
		return fmt.Errorf("close the listener at %s: %w", l.addr, err)
	}
	return nil
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.addr }
