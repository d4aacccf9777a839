package remote

import (
	"sync"
	"time"
)

// pace is how fast a connection takes bytes while it is what its writer waits for.
type pace struct {
	mu    sync.Mutex
	since time.Time // begin of the stretch that is measured; zero: none
	gone  uint64    // bytes that had left the queue then
	rate  float64   // bytes a second; 0: not known
}

// A stretch is measured when so much has left the queue, or after so long.
const (
	paceBytes = 256 << 10
	paceTime  = 20 * time.Millisecond
)

// full notes that the queue is full when gone bytes have left it.
func (p *pace) full(gone uint64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		p.since, p.gone = now, gone
		return
	}
	n, d := gone-p.gone, now.Sub(p.since)
	if d <= 0 || n < paceBytes && d < paceTime {
		return
	}
	rate := max(float64(n)/d.Seconds(), 1)
	if p.rate != 0 {
		rate = (p.rate + rate) / 2
	}
	p.rate, p.since, p.gone = rate, now, gone
}

// measures reports whether a stretch has begun.
func (p *pace) measures() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.since.IsZero()
}

// empty notes that the queue is empty: nothing was waited for.
func (p *pace) empty() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.since = time.Time{}
}

// Rate implements compress.Meter.
func (p *pace) Rate() float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rate
}

// Forget implements compress.Meter.
func (p *pace) Forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rate, p.since = 0, time.Time{}
}
