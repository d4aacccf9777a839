// Package patience says how long to wait for something by how long it took
// before on this machine: a fixed time is too long for a fast one that hangs and
// too short for a slow one that works.
package patience

import (
	"sync"
	"time"
)

// slack is how much longer than before a thing may take.
const slack = 4

// Patience learns for each kind of thing. It is safe for concurrent use.
type Patience struct {
	least, most time.Duration

	mu   sync.Mutex
	took map[string]time.Duration // the longest lately
}

// New returns a Patience that waits for least at first, and never for longer
// than most.
func New(least, most time.Duration) *Patience {
	return &Patience{least: least, most: most, took: map[string]time.Duration{}}
}

// Limit is how long to wait for a thing.
func (p *Patience) Limit(kind string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(max(p.least, slack*p.took[kind]), p.most)
}

// Took takes in how long one took. A shorter time is forgotten slowly.
func (p *Patience) Took(kind string, d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took[kind] = max(d, p.took[kind]-p.took[kind]/4)
}

// Missed takes in that one was not there when the time was up: the next one gets
// twice as long.
func (p *Patience) Missed(kind string, waited time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took[kind] = max(p.took[kind], 2*waited/slack)
}
