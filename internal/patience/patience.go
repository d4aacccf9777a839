// Package patience decides how long to wait for something, from how long it took before
// on this host. A fixed time is too long for a fast host that hangs, and too short for a
// slow one that works.
package patience

import (
	"sync"
	"time"
)

// slack is by which factor a thing may take longer than before.
const slack = 4

// Patience has a time for each kind of thing. It is safe for concurrent use.
type Patience struct {
	least, most time.Duration

	mu   sync.Mutex
	took map[string]time.Duration // the longest recent time
}

// New returns a Patience that waits for least at first, and never longer than most.
func New(least, most time.Duration) *Patience {
	return &Patience{least: least, most: most, took: map[string]time.Duration{}}
}

// Limit returns how long to wait for a thing.
func (p *Patience) Limit(kind string) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(max(p.least, slack*p.took[kind]), p.most)
}

// Took records how long a thing took. If it was shorter than before, the limit decreases
// slowly.
func (p *Patience) Took(kind string, d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took[kind] = max(d, p.took[kind]-p.took[kind]/4)
}

// Missed records that a thing did not come within its limit. The next limit is twice as
// long.
func (p *Patience) Missed(kind string, waited time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took[kind] = max(p.took[kind], 2*waited/slack)
}
