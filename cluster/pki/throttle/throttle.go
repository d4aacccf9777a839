// Package throttle keeps a log readable when the same thing happens very
// often: the first of a kind is let through, and then one every interval with
// the number of those that were not.
package throttle

import (
	"sync"
	"time"
)

const maxKeys = 1024

// Throttle is safe for use by several goroutines.
type Throttle struct {
	interval time.Duration
	now      func() time.Time

	mu     sync.Mutex
	seen   map[string]*entry
	purged entry // when those that have passed were forgotten
}

type entry struct {
	at      time.Time
	skipped uint64
}

// New lets one of a kind through every interval.
func New(interval time.Duration, now func() time.Time) *Throttle {
	return &Throttle{interval: interval, now: now, seen: map[string]*entry{}}
}

// Allow reports whether to let one of this kind through, and how many were not
// since the last that was. Kinds come from outside: when there are too many,
// those that are new count as one.
func (t *Throttle) Allow(key string) (skipped uint64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	e := t.seen[key]
	if e == nil && len(t.seen) >= maxKeys {
		if t.passed(&t.purged, now) {
			t.purged.at = now
			for k, old := range t.seen {
				if t.passed(old, now) {
					delete(t.seen, k)
				}
			}
		}
		if len(t.seen) >= maxKeys {
			key = ""
			e = t.seen[key]
		}
	}
	if e == nil {
		t.seen[key] = &entry{at: now}
		return 0, true
	}
	if !t.passed(e, now) {
		e.skipped++
		return 0, false
	}
	skipped, e.skipped, e.at = e.skipped, 0, now
	return skipped, true
}

// passed is also true when the clock was set back.
func (t *Throttle) passed(e *entry, now time.Time) bool {
	d := now.Sub(e.at)
	return d >= t.interval || d < 0
}
