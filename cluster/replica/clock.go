package replica

import "time"

// Clock is the time of this host. A test makes it jump.
type Clock interface {
	// Wall is the time of day. It may jump.
	Wall() time.Time
	// Monotonic is the time since some moment. It never goes back.
	Monotonic() time.Duration
}

// SystemClock is the clock of the machine.
func SystemClock() Clock { return systemClock{start: time.Now()} }

type systemClock struct{ start time.Time }

func (c systemClock) Wall() time.Time          { return time.Now() }
func (c systemClock) Monotonic() time.Duration { return time.Since(c.start) }
