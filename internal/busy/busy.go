// Package busy marks objects of which something is being changed, so that a second change
// is refused or left out. Who is to wait instead takes a lock.
package busy

import "sync"

// Set has the names of the objects that are marked. The zero value has none. It is safe for
// concurrent use.
type Set struct {
	mu    sync.Mutex
	names map[string]bool
}

// Begin marks an object until end is called. ok is false, and end nil, if it is marked
// already.
func (s *Set) Begin(name string) (end func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.names[name] {
		return nil, false
	}
	if s.names == nil {
		s.names = map[string]bool{}
	}
	s.names[name] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.names, name)
	}, true
}

// Has reports whether an object is marked.
func (s *Set) Has(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names[name]
}
