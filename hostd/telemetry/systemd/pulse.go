package systemd

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Pulse is the health of one loop that has to come round.
type Pulse struct {
	name  string
	limit time.Duration
	start time.Time
	last  atomic.Int64 // since start; monotonic
}

// NewPulse expects a beat at least every limit, the first one from now.
func NewPulse(name string, limit time.Duration) *Pulse {
	return &Pulse{name: name, limit: limit, start: time.Now()}
}

// Beat says that the loop has come round.
func (p *Pulse) Beat() { p.last.Store(int64(time.Since(p.start))) }

// Health is for Watch.
func (p *Pulse) Health(context.Context) error {
	if silent := time.Since(p.start) - time.Duration(p.last.Load()); silent > p.limit {
		return fmt.Errorf("%s: stuck for %v", p.name, silent.Round(time.Second))
	}
	return nil
}
