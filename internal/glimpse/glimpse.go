package glimpse

import (
	"sync"
	"time"
)

const (
	patience   = time.Second
	mostOfUser = 32  // reads that have not ended
	mostOfAll  = 512 // each takes a thread
)

// Reads are those that are in progress. The zero value is ready for use.
type Reads struct {
	mu   sync.Mutex
	what map[string]*read
	by   map[uint32]int
}

// read is one that is in progress. Its fields are set before done is closed.
type read struct {
	done   chan struct{}
	result any
	late   bool // somebody has given it up; protected by Reads.mu
}

// Do returns what f returns, or what a call with the same what that is in progress will return.
// ok is false if that takes long, or did for an earlier call that has not ended, or if too much of the
// user's is being read. A nil r waits.
func Do[T any](r *Reads, user uint32, what string, f func() T) (result T, ok bool) {
	if r == nil {
		return f(), true
	}
	now := r.begin(user, what, func() any { return f() })
	if now == nil {
		return result, false
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case <-now.done:
		result, ok = now.result.(T)
		return result, ok
	case <-limit.C:
		r.mu.Lock()
		defer r.mu.Unlock()
		now.late = true
		return result, false
	}
}

// begin returns a read that is in progress; nil: it is not to be waited for.
func (r *Reads) begin(user uint32, what string, f func() any) *read {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch now := r.what[what]; {
	case now != nil && now.late, now == nil && (r.by[user] >= mostOfUser || len(r.what) >= mostOfAll):
		return nil
	case now != nil:
		return now
	}
	if r.what == nil {
		r.what, r.by = map[string]*read{}, map[uint32]int{}
	}
	now := &read{done: make(chan struct{})}
	r.what[what] = now
	r.by[user]++
	go func() {
		defer close(now.done)
		defer r.end(user, what)
		now.result = f()
	}()
	return now
}

func (r *Reads) end(user uint32, what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.what, what)
	if r.by[user]--; r.by[user] == 0 {
		delete(r.by, user)
	}
}
