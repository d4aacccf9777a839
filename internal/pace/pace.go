package pace

import (
	"sync"
	"time"
)

const (
	chunk      = 1 << 10 // bytes that cost as much as another read: one may bring many frames
	maxClients = 4096    // that are known apart
)

// Pacer is safe for use by several goroutines.
type Pacer struct {
	each  time.Duration // what a read costs
	burst time.Duration // how much may be taken in advance

	mu      sync.Mutex
	clients map[string]*client
}

// client is who is known by one key. Its clock stands still while it does
// nothing, runs ahead with each read, and is never further behind than a burst.
type client struct{ clock time.Time }

// New lets each client be read so often a second in the long run, and as many
// times as burst says at once.
func New(rate, burst int) *Pacer {
	each := time.Second / time.Duration(rate)
	return &Pacer{each: each, burst: time.Duration(burst) * each, clients: map[string]*client{}}
}

// Flow returns a connection's part of what its client may send. Clients come from
// outside: when there are too many, new ones count as one.
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

// forget drops those who have all of their burst, and so lose nothing.
func (p *Pacer) forget() {
	full := time.Now().Add(-p.burst)
	for key, c := range p.clients {
		if c.clock.Before(full) {
			delete(p.clients, key)
		}
	}
}

// take is what so many reads cost, and returns how long to wait for them.
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

// Flow is one connection. A nil Flow is not paced.
type Flow struct {
	pacer  *Pacer
	client *client
	ended  chan struct{}
	once   sync.Once

	mu    sync.Mutex
	taken int // reads
	free  bool
}

// Read calls read when it is the client's turn. It returns early when the flow
// ends. A deadline of the connection holds once read is called.
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

// Free lets the connection be read at any pace, and gives back what it has
// taken: its client is known now.
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

// End lets a read that waits go on. Who closes the connection calls it.
func (f *Flow) End() {
	if f != nil {
		f.once.Do(func() { close(f.ended) })
	}
}
