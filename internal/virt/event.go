package virt

import (
	"context"
	"fmt"
	"sync"

	"github.com/digitalocean/go-libvirt"
)

// EventKind says what happened.
type EventKind int

// Kinds of events.
const (
	// Resync says that events may have been missed: at the beginning, after
	// libvirtd was away, and when a subscriber was too slow. Look at everything.
	Resync EventKind = iota
	Defined
	Undefined
	Started
	Suspended
	Resumed
	// Stopped says that the domain is gone from the hypervisor; Detail says why.
	Stopped
	// Shutdown says that the guest has shut down; Stopped follows.
	Shutdown
	SuspendedByGuest
	GuestCrashed
	// DeviceAdded, DeviceRemoved and DeviceRemovalFailed name the device's alias.
	// The libxl driver has none of them.
	DeviceAdded
	DeviceRemoved
	DeviceRemovalFailed
	// MigrationIteration says that a pass over the guest's memory begins.
	MigrationIteration
	// JobCompleted carries the statistics of a job that ended well.
	JobCompleted
)

// String is the kind in libvirt's words.
func (k EventKind) String() string {
	words := [...]string{
		"resync", "defined", "undefined", "started", "suspended", "resumed", "stopped", "shutdown", "pmsuspended", "crashed",
		"device added", "device removed", "device removal failed", "migration iteration", "job completed",
	}
	if k < 0 || int(k) >= len(words) {
		return fmt.Sprintf("event %d", int(k))
	}
	return words[k]
}

// Event is something that happened to a domain.
type Event struct {
	Kind   EventKind
	Domain Domain // empty for Resync
	// Detail is libvirt's reason for a lifecycle event: virDomainEvent…DetailType.
	Detail int
	// Alias is a device's.
	Alias string
	// Iteration counts the passes of a migration from one.
	Iteration int
	// Job is that of JobCompleted.
	Job Job
}

// Migrated says that a domain started here by migration, or stopped here since
// it moved away.
func (e Event) Migrated() bool {
	return e.Kind == Started && e.Detail == int(libvirt.DomainEventStartedMigrated) ||
		e.Kind == Stopped && e.Detail == int(libvirt.DomainEventStoppedMigrated)
}

// decodeEvent makes an event of a message; false for one that is none of ours
// or is not made as it should be.
func decodeEvent(proc uint32, payload []byte) (Event, bool) {
	x := &xdr{b: payload}
	x.uint32() // our registration
	e := Event{Domain: x.domain()}
	switch proc {
	case procLifecycle:
		kind := x.uint32()
		if kind > uint32(libvirt.DomainEventCrashed) {
			return Event{}, false
		}
		e.Kind, e.Detail = Defined+EventKind(kind), int(int32(x.uint32()))
	case procDeviceAdded:
		e.Kind, e.Alias = DeviceAdded, x.string()
	case procDeviceRemoved:
		e.Kind, e.Alias = DeviceRemoved, x.string()
	case procRemovalFailed:
		e.Kind, e.Alias = DeviceRemovalFailed, x.string()
	case procIteration:
		e.Kind, e.Iteration = MigrationIteration, int(int32(x.uint32()))
	case procJobCompleted:
		e.Kind, e.Job = JobCompleted, jobOf(JobIsCompleted, x.params())
	default:
		return Event{}, false
	}
	return e, x.err == nil && len(x.b) == 0
}

// publish hands an event to all subscribers.
func (c *Client) publish(proc uint32, payload []byte) {
	e, ok := decodeEvent(proc, payload)
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for s := range c.subs {
		s.put(e)
	}
}

// mostEvents is how many events wait for a slow subscriber.
const mostEvents = 1024

// Subscription receives events.
type Subscription struct {
	c    *Client
	mu   sync.Mutex
	wait []Event
	over bool
	more chan struct{} // one buffered: there is something to look at
}

// Subscribe begins to receive events. The first one is a Resync, as soon as
// libvirtd answers.
func (c *Client) Subscribe() *Subscription {
	s := &Subscription{c: c, more: make(chan struct{}, 1)}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		s.end()
		return s
	}
	c.subs[s] = struct{}{}
	if c.up {
		s.put(Event{Kind: Resync})
	}
	return s
}

// put appends an event. Of one who doesn't fetch them, all that wait are
// replaced by a Resync.
func (s *Subscription) put(e Event) {
	s.mu.Lock()
	if len(s.wait) >= mostEvents {
		s.wait = append(s.wait[:0], Event{Kind: Resync})
	}
	s.wait = append(s.wait, e)
	s.mu.Unlock()
	s.wake()
}

func (s *Subscription) wake() {
	select {
	case s.more <- struct{}{}:
	default:
	}
}

func (s *Subscription) end() {
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.wake()
}

// Next waits for the next event. It fails with ErrClosed after the end of the
// subscription or its client, and when ctx ends. One goroutine may wait.
func (s *Subscription) Next(ctx context.Context) (Event, error) {
	for {
		s.mu.Lock()
		if len(s.wait) > 0 {
			e := s.wait[0]
			s.wait = s.wait[1:]
			s.mu.Unlock()
			return e, nil
		}
		over := s.over
		s.mu.Unlock()
		if over {
			s.wake()
			return Event{}, fmt.Errorf("libvirt events: %w", ErrClosed)
		}
		select {
		case <-s.more:
		case <-ctx.Done():
			return Event{}, context.Cause(ctx)
		}
	}
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.c.mu.Lock()
	delete(s.c.subs, s)
	s.c.mu.Unlock()
	s.end()
}
