package executor

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"
)

// outlet is where contents of a far executor leave: a connection that another host has made,
// for as many exports as there are.
type outlet struct {
	mu   sync.Mutex
	name string        // what it is for
	conn net.Conn      // nil: none has come, or it has ended
	sink *peerSink     // over conn, when it has greeted
	came chan struct{} // something has changed
}

func newOutlet() *outlet { return &outlet{came: make(chan struct{}, 1)} }

// offer gives an outlet a connection. It takes the place of an earlier one.
func (o *outlet) offer(name string, conn net.Conn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end()
	o.name, o.conn = name, conn
	select {
	case o.came <- struct{}{}:
	default:
	}
}

// end is called with o.mu.
func (o *outlet) end() {
	if o.conn != nil {
		o.conn.Close()
	}
	o.name, o.conn, o.sink = "", nil, nil
}

// drop ends what is sent.
func (o *outlet) drop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end()
}

// outletUse says which connection an export needs.
type outletUse struct {
	name     string
	patience time.Duration // for a connection that may still be on its way; 0: it must be there
	anew     bool          // one that was not used yet
	greet    func(conn net.Conn) (*peerSink, error)
}

// await returns the connection that fits, and what sends over it if it was used before.
func (o *outlet) await(ctx context.Context, u outletUse) (net.Conn, *peerSink, error) {
	late := time.NewTimer(u.patience)
	defer late.Stop()
	for {
		o.mu.Lock()
		conn, sink, is := o.conn, o.sink, o.name
		o.mu.Unlock()
		if conn != nil && is == u.name && (sink == nil || !u.anew) {
			return conn, sink, nil
		}
		select {
		case <-o.came:
		case <-late.C:
			return nil, nil, fmt.Errorf("no connection for contents has come within %v: %w", u.patience, ErrState)
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// use gives send what sends over the connection. After an error, and if it does not stay, the
// connection is of no more use.
func (o *outlet) use(ctx context.Context, u outletUse, send func(p *peerSink) error) error {
	conn, p, err := o.await(ctx, u)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if p == nil {
		if p, err = u.greet(conn); err != nil {
			o.settle(conn, nil)
			return err
		}
	}
	if err = send(p); err != nil || !p.stays {
		p = nil
	}
	o.settle(conn, p)
	return err
}

// settle keeps what sends over a connection for the next export; nil: the connection is of no
// use any more. Another one may have taken its place.
func (o *outlet) settle(conn net.Conn, p *peerSink) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.conn != conn:
		conn.Close()
	case p == nil:
		o.end()
	default:
		o.sink = p
	}
}
