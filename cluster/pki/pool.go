package pki

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/pace"
)

// pool limits the number of connections of a kind that costs a client nothing. When it is
// full, an address with many connections loses its oldest one at once. So an address that
// opens many closes its own. Otherwise the oldest connection of all is closed, but not
// before it has lasted a minimum time: if a thousand hosts connect at once, they wait for
// each other.
type pool struct {
	limit int
	each  int // most connections of one address; 0: not limited
	grace time.Duration
	freed chan struct{} // wakes a waiting add

	mu    sync.Mutex
	conns []*tracked // oldest first
}

const poolPoll = 10 * time.Millisecond

func newPool(limit int, grace time.Duration) *pool {
	return &pool{limit: limit, grace: grace, freed: make(chan struct{}, 1)}
}

// add adds a connection. It returns the connection that was closed to make room: c itself
// if ctx ended while add waited.
func (p *pool) add(ctx context.Context, c *tracked) (evicted *tracked) {
	for {
		ok, evicted := p.try(c)
		if evicted != nil {
			_ = evicted.Close()
		}
		if ok {
			return evicted
		}
		timer := time.NewTimer(poolPoll)
		select {
		case <-ctx.Done():
			timer.Stop()
			_ = c.Close()
			return c
		case <-p.freed:
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (p *pool) try(c *tracked) (ok bool, evicted *tracked) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if oldest, n := p.of(c.from); p.each > 0 && n >= p.each {
		evicted = oldest
		p.drop(evicted)
	} else if len(p.conns) >= p.limit {
		heaviest, n := p.heaviest()
		switch oldest := p.conns[0]; {
		case n > max(1, p.limit/4):
			evicted = heaviest
		case time.Since(oldest.since) > p.grace:
			evicted = oldest
		default:
			return false, nil
		}
		p.drop(evicted)
	}
	p.conns = append(p.conns, c)
	return true, evicted
}

func (p *pool) remove(c *tracked) {
	p.mu.Lock()
	p.drop(c)
	p.mu.Unlock()
	select {
	case p.freed <- struct{}{}:
	default:
	}
}

func (p *pool) drop(c *tracked) {
	for i, other := range p.conns {
		if other == c {
			p.conns = append(p.conns[:i], p.conns[i+1:]...)
			return
		}
	}
}

// of returns the oldest connection of an address, and the number of its connections.
func (p *pool) of(from string) (oldest *tracked, n int) {
	for _, c := range p.conns {
		if c.from != from {
			continue
		}
		if n++; oldest == nil {
			oldest = c
		}
	}
	return oldest, n
}

// heaviest returns the oldest connection of the address with the most connections, and
// their number.
func (p *pool) heaviest() (*tracked, int) {
	count := map[string]int{}
	for _, c := range p.conns {
		count[c.from]++
	}
	best := p.conns[0]
	for _, c := range p.conns[1:] {
		if count[c.from] > count[best.from] {
			best = c
		}
	}
	return best, count[best.from]
}

// tracked is a TLS connection that reports when it is closed.
type tracked struct {
	net.Conn
	from  string // address without the port
	since time.Time
	flow  *pace.Flow // used until the peer is known; nil: this host has dialed

	mu      sync.Mutex
	closed  bool
	onClose []func()
}

func track(c net.Conn) *tracked {
	from := c.RemoteAddr().String()
	if host, _, err := net.SplitHostPort(from); err == nil {
		from = host
	}
	return &tracked{Conn: c, from: network(from), since: time.Now()}
}

// network returns what is counted as one address. For IPv6 that is a /64 network, as a
// client usually has all of one.
func network(address string) string {
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return address
	}
	if ip = ip.Unmap().WithZone(""); ip.Is6() {
		if p, err := ip.Prefix(64); err == nil {
			return p.String()
		}
	}
	return ip.String()
}

// whenClosed calls f once when the connection is closed, or now if it is closed already.
func (t *tracked) whenClosed(f func()) {
	t.mu.Lock()
	if !t.closed {
		t.onClose = append(t.onClose, f)
		t.mu.Unlock()
		return
	}
	t.mu.Unlock()
	f()
}

// Close closes the connection and calls the functions of whenClosed.
func (t *tracked) Close() error {
	t.mu.Lock()
	was, todo := t.closed, t.onClose
	t.closed, t.onClose = true, nil
	t.mu.Unlock()
	if was {
		return net.ErrClosed
	}
	t.flow.End()
	err := t.Conn.Close()
	for _, f := range todo {
		f()
	}
	return err
}

// Read waits until the address may read again, and reads.
func (t *tracked) Read(b []byte) (int, error) { return t.flow.Read(t.Conn.Read, b) }

// endAfter closes the connection after a duration.
func (t *tracked) endAfter(d time.Duration) {
	timer := time.AfterFunc(d, func() { _ = t.Close() })
	t.whenClosed(func() { timer.Stop() })
}
