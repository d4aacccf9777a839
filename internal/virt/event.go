package virt

import (
	"context"
	"fmt"
	"sync"

	"github.com/digitalocean/go-libvirt"
)

// EventKind is the kind of an event.
type EventKind int

// Kinds of events.
const (
	// Resync means that events may have been missed: at the beginning, after libvirtd was
	// down, or because a subscriber was too slow. Read everything again.
	Resync EventKind = iota
	Defined
	Undefined
	Started
	Suspended
	Resumed
	// Stopped means that the hypervisor does not have the domain any more. Detail
	// contains why.
	Stopped
	// Shutdown means that the guest has shut down. Stopped follows.
	Shutdown
	SuspendedByGuest
	GuestCrashed
	// DeviceAdded, DeviceRemoved and DeviceRemovalFailed have the device's alias. The
	// libxl driver does not send them.
	DeviceAdded
	DeviceRemoved
	DeviceRemovalFailed
	// MigrationIteration means that a pass over the guest's memory begins.
	MigrationIteration
	// JobCompleted has the statistics of a job that has succeeded.
	JobCompleted
)

// String returns libvirt's name of the kind.
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

// Event is an event of a domain.
type Event struct {
	Kind   EventKind
	Domain Domain // empty for Resync
	// Detail is libvirt's detail of a lifecycle event (virDomainEvent…DetailType).
	Detail int
	// Alias is the alias of a device.
	Alias string
	// Iteration is the number of a migration's pass, from one.
	Iteration int
	// Job is set for JobCompleted.
	Job Job
}

// Migrated reports whether a domain has started here by migration, or has stopped here
// because it was migrated to another host.
func (e Event) Migrated() bool {
	return e.Kind == Started && e.Detail == int(libvirt.DomainEventStartedMigrated) ||
		e.Kind == Stopped && e.Detail == int(libvirt.DomainEventStoppedMigrated)
}

// decodeEvent decodes an event. It returns false for unknown or malformed events.
func decodeEvent(proc uint32, payload []byte) (Event, bool) {
	x := &xdr{b: payload}
	x.uint32() // id of our registration
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

// publish passes an event to all subscribers.
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

// mostEvents is how many events are kept for a slow subscriber.
const mostEvents = 1024

// Subscription receives events.
type Subscription struct {
	c    *Client
	mu   sync.Mutex
	wait []Event
	over bool
	more chan struct{} // has room for one; signals events
}

// Subscribe begins to receive events. The first event is a Resync, as soon as libvirtd
// answers.
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

// put appends an event. If the subscriber is too slow, all kept events are replaced by a
// Resync.
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

// Next waits for the next event. It returns ErrClosed after the end of the subscription
// or its client, and an error when ctx ends. Only one goroutine may wait.
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
