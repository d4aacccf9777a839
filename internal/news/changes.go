package news

import (
	"cmp"
	"maps"
	"slices"
	"sync"
)

// Changes tells readers which things have changed, and to what. The zero value
// has no readers.
type Changes[K cmp.Ordered, V any] struct {
	mu      sync.Mutex
	readers map[*Reader[K, V]]struct{}
}

// Put tells all readers that a thing has changed.
func (c *Changes[K, V]) Put(key K, v V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r := range c.readers {
		r.put(key, v)
	}
}

// Read adds a reader, who is told of all changes from now on until it is closed.
func (c *Changes[K, V]) Read() *Reader[K, V] {
	r := &Reader[K, V]{of: c, bell: make(chan struct{}, 1), pending: map[K]V{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.readers == nil {
		c.readers = map[*Reader[K, V]]struct{}{}
	}
	c.readers[r] = struct{}{}
	return r
}

// Watched reports whether there are readers.
func (c *Changes[K, V]) Watched() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.readers) > 0
}

// Reader holds what has changed since somebody took it: of each thing the newest.
type Reader[K cmp.Ordered, V any] struct {
	of      *Changes[K, V]
	bell    chan struct{}
	pending map[K]V // under of.mu
}

// Put tells this reader alone: how a thing is when it begins to read, say.
func (r *Reader[K, V]) Put(key K, v V) {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	r.put(key, v)
}

func (r *Reader[K, V]) put(key K, v V) {
	r.pending[key] = v
	select {
	case r.bell <- struct{}{}:
	default:
	}
}

// Bell rings once there is something to take. It may ring for what has been
// taken already.
func (r *Reader[K, V]) Bell() <-chan struct{} { return r.bell }

// Take returns what is held, in the order of the keys, and holds it no more.
func (r *Reader[K, V]) Take() []V {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	out := make([]V, 0, len(r.pending))
	for _, key := range slices.Sorted(maps.Keys(r.pending)) {
		out = append(out, r.pending[key])
	}
	clear(r.pending)
	return out
}

// Close ends the reading. Nothing is told to it any more.
func (r *Reader[K, V]) Close() {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	delete(r.of.readers, r)
}
