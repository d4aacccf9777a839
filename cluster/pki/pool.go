package pki

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/pace"
)

// pool bounds how many connections there are of a kind that costs a client
// nothing. When it is full, an address that has many makes room at once with
// its oldest: one that opens many pushes out its own. Otherwise the oldest of
// all goes, but not before it had its time: when a thousand hosts come at
// once, they wait for each other.
type pool struct {
	limit int
	each  int // of one address; 0: any number
	grace time.Duration
	freed chan struct{} // wakes one that waits

	mu    sync.Mutex
	conns []*tracked // oldest first
}

const poolPoll = 10 * time.Millisecond

func newPool(limit int, grace time.Duration) *pool {
	return &pool{limit: limit, grace: grace, freed: make(chan struct{}, 1)}
}

// add takes a connection in, and returns the one that was closed for it: c
// itself when ctx ended while it waited.
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

// of is the oldest connection of an address, and how many that has.
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

// heaviest is the oldest connection of the address that has most, and how many
// that has.
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

// tracked is a connection under TLS that says when it is closed.
type tracked struct {
	net.Conn
	from  string // the address without its port
	since time.Time
	flow  *pace.Flow // until its peer is known; nil: it was dialed from here

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

// network is what counts as one address: who has one of IPv6 has 2^64 of them.
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

// whenClosed calls f once, now if it is closed already.
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

// Close closes the connection and tells who asked to know.
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

// Read reads when it is the address's turn.
func (t *tracked) Read(b []byte) (int, error) { return t.flow.Read(t.Conn.Read, b) }

// endAfter closes the connection when it has lasted that long.
func (t *tracked) endAfter(d time.Duration) {
	timer := time.AfterFunc(d, func() { _ = t.Close() })
	t.whenClosed(func() { timer.Stop() })
}
