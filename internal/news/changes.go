package news

import (
	"cmp"
	"maps"
	"slices"
	"sync"
)

// Changes passes changes of things to readers. The zero value has no readers.
type Changes[K cmp.Ordered, V any] struct {
	mu      sync.Mutex
	readers map[*Reader[K, V]]struct{}
}

// Put passes a thing's new state to all readers.
func (c *Changes[K, V]) Put(key K, v V) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r := range c.readers {
		r.put(key, v)
	}
}

// Read adds a reader. It gets all changes from now on, until it is closed.
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

// Reader keeps what has changed since the last Take: the newest state of each thing.
type Reader[K cmp.Ordered, V any] struct {
	of      *Changes[K, V]
	bell    chan struct{}
	pending map[K]V // guarded by of.mu
}

// Put passes a state to this reader only, for example the state at its beginning.
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

// Bell returns a channel that receives when Take may return something. It may also
// receive after that was taken.
func (r *Reader[K, V]) Bell() <-chan struct{} { return r.bell }

// Take returns the kept states, sorted by key, and removes them.
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

// Close removes the reader. It gets no more changes.
func (r *Reader[K, V]) Close() {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	delete(r.of.readers, r)
}
