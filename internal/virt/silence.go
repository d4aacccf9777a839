package virt

import (
	"fmt"
	"time"
)

// silence is for how long a migration has sent nothing. libvirt itself notices a destination
// that does not answer only once its connection to it is open; opening that, it waits without
// a limit.
type silence struct {
	limit   time.Duration
	since   time.Time     // since when nothing was sent, as far as is known
	sent    uint64        // bytes until then
	longest time.Duration // the longest silence that has ended
}

// look is told of the migration's job, and reports whether it has sent nothing for too long.
// What comes after the last byte is no silence: the destination then takes the domain over.
func (s *silence) look(j Job, now time.Time) bool {
	quiet := now.Sub(s.since)
	if j.Processed != s.sent {
		s.longest = max(s.longest, quiet)
	} else if j.Processed == 0 || j.Left > 0 {
		return quiet > s.limit
	}
	s.since, s.sent = now, j.Processed
	return false
}

// unseen is told that a look has failed. Nobody knows what was sent until the next one.
func (s *silence) unseen(now time.Time) { s.since = now }

// failed returns the error of a migration that has sent nothing for too long.
func (s *silence) failed(to string, now time.Time) error {
	return fmt.Errorf("%w for %v: does libvirtd at %s answer, and are the ports for migrations open there?", ErrNothingSent, now.Sub(s.since).Round(time.Second/10), to)
}
