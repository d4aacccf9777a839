package clustertest

import (
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/cluster/replica"
)

// Clock is the clock of a node. Its time of day jumps on command. Its monotonic time can
// leap forward, as after a suspend of the computer, but never goes back.
type Clock struct {
	real replica.Clock
	mu   sync.Mutex
	wall time.Duration
	mono time.Duration
}

// NewClock returns a clock with the system's time.
func NewClock() *Clock { return &Clock{real: replica.SystemClock()} }

// Wall implements replica.Clock.
func (c *Clock) Wall() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.real.Wall().Add(c.wall)
}

// Monotonic implements replica.Clock.
func (c *Clock) Monotonic() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.real.Monotonic() + c.mono
}

// Jump moves the time of day.
func (c *Clock) Jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wall += d
}

// Leap moves the monotonic time forward.
func (c *Clock) Leap(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mono += max(d, 0)
}
