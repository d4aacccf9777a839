// Package throttle limits log lines about the same thing. The first of a kind is allowed,
// and then one in each interval, with the number of those that were skipped.
package throttle

import (
	"sync"
	"time"
)

const maxKeys = 1024

// Throttle is safe for concurrent use.
type Throttle struct {
	interval time.Duration
	now      func() time.Time

	mu     sync.Mutex
	seen   map[string]*entry
	purged entry // when expired entries were last removed
}

type entry struct {
	at      time.Time
	skipped uint64
}

// New returns a Throttle that allows one of each kind in an interval.
func New(interval time.Duration, now func() time.Time) *Throttle {
	return &Throttle{interval: interval, now: now, seen: map[string]*entry{}}
}

// Allow reports whether one of this kind is allowed now, and how many were skipped since
// the last allowed one. Kinds come from outside. If there are too many, all new ones
// count as one kind.
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

// passed reports whether the interval has passed. It also does so if the clock was set
// back.
func (t *Throttle) passed(e *entry, now time.Time) bool {
	d := now.Sub(e.at)
	return d >= t.interval || d < 0
}
