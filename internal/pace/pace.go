package pace

import (
	"sync"
	"time"
)

const (
	chunk      = 1 << 10 // bytes that count as another read, because one read may return many frames
	maxClients = 4096    // clients that are counted separately
)

// Pacer is safe for concurrent use.
type Pacer struct {
	each  time.Duration // time that a read costs
	burst time.Duration // how much time may be used in advance

	mu      sync.Mutex
	clients map[string]*client
}

// client is identified by a key. Its clock advances with each read. It may be ahead of
// real time, but at most a burst behind.
type client struct{ clock time.Time }

// New returns a Pacer that permits rate reads a second for each client, and burst reads
// at once.
func New(rate, burst int) *Pacer {
	each := time.Second / time.Duration(rate)
	return &Pacer{each: each, burst: time.Duration(burst) * each, clients: map[string]*client{}}
}

// Flow returns a connection of a client. Clients come from outside: if there are too
// many, all new ones count as one.
func (p *Pacer) Flow(key string) *Flow {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clients[key]
	if c == nil && len(p.clients) >= maxClients {
		p.forget()
		if len(p.clients) >= maxClients {
			key = ""
			c = p.clients[key]
		}
	}
	if c == nil {
		c = &client{}
		p.clients[key] = c
	}
	return &Flow{pacer: p, client: c, ended: make(chan struct{})}
}

// forget removes clients that have all of their burst, because nothing is lost by that.
func (p *Pacer) forget() {
	full := time.Now().Add(-p.burst)
	for key, c := range p.clients {
		if c.clock.Before(full) {
			delete(p.clients, key)
		}
	}
}

// take charges reads to a client, and returns how long to wait.
func (p *Pacer) take(c *client, reads int) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if least := now.Add(-p.burst); c.clock.Before(least) {
		c.clock = least
	}
	c.clock = c.clock.Add(time.Duration(reads) * p.each)
	return c.clock.Sub(now)
}

// Flow is one connection. A nil Flow is not limited.
type Flow struct {
	pacer  *Pacer
	client *client
	ended  chan struct{}
	once   sync.Once

	mu    sync.Mutex
	taken int // number of reads that were charged
	free  bool
}

// Read waits until the client may read, and calls read. It does not wait any more after
// End. A deadline of the connection applies only after read was called.
func (f *Flow) Read(read func([]byte) (int, error), b []byte) (int, error) {
	f.take(1)
	n, err := read(b)
	if more := n / chunk; more > 0 {
		f.take(more)
	}
	return n, err
}

func (f *Flow) take(reads int) {
	if f == nil {
		return
	}
	f.mu.Lock()
	if f.free {
		f.mu.Unlock()
		return
	}
	f.taken += reads
	wait := f.pacer.take(f.client, reads)
	f.mu.Unlock()
	if wait <= 0 {
		return
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-f.ended:
	}
}

// Free removes the limit from the connection, and refunds what was charged for it,
// because its client is known now.
func (f *Flow) Free() {
	if f == nil {
		return
	}
	f.mu.Lock()
	if !f.free {
		f.free = true
		f.pacer.take(f.client, -f.taken)
	}
	f.mu.Unlock()
	f.End()
}

// End ends the waiting of Read. It must be called when the connection is closed.
func (f *Flow) End() {
	if f != nil {
		f.once.Do(func() { close(f.ended) })
	}
}
