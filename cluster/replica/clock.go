package replica

import "time"

// Clock is the clock of this host. Tests make it jump.
type Clock interface {
	// Wall returns the time of day. It may jump.
	Wall() time.Time
	// Monotonic returns the time since some fixed moment. It never goes back.
	Monotonic() time.Duration
}

// SystemClock returns the system's clock.
func SystemClock() Clock { return systemClock{start: time.Now()} }

type systemClock struct{ start time.Time }

func (c systemClock) Wall() time.Time          { return time.Now() }
func (c systemClock) Monotonic() time.Duration { return time.Since(c.start) }
