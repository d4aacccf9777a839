package glimpse

import (
	"maps"
	"sync"
	"time"
)

const (
	patience   = time.Second
	mostWaited = 2 * time.Second // for all reads of a user that one after the other take long, in a spell
	spell      = 10 * time.Second
	brief      = 10 * time.Millisecond // what a read may take after that, for mostWaited once more
	usual      = time.Millisecond      // what takes less is not counted
	mostOfUser = 32                    // reads that have not ended
	mostOfAll  = 512                   // each takes a thread
)

// Reads are those that are in progress. The zero value is ready for use.
type Reads struct {
	// Whose returns the user for whom a read of a user's counts. nil: each is its own.
	Whose func(user uint32) uint32

	mu     sync.Mutex
	what   map[string]*read
	by     map[uint32]int
	waited map[uint32]waits
}

// waits are how long a user's reads have been waited for in a spell.
type waits struct {
	began time.Time
	took  time.Duration
	more  time.Duration // of that, for reads that were waited for briefly
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
	if r.Whose != nil {
		user = r.Whose(user)
	}
	wait := r.patience(user)
	if wait == 0 {
		return result, false
	}
	now := r.begin(user, what, func() any { return f() })
	if now == nil {
		return result, false
	}
	began := time.Now()
	limit := time.NewTimer(wait)
	defer limit.Stop()
	defer func() { r.note(user, wait, time.Since(began)) }()
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

// patience returns how long a read of a user's is waited for. Whoever looks at all processes must not
// wait as long for each of the many that one user may have. 0: it is not read.
func (r *Reads) patience(user uint32) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.waited[user]
	switch {
	case time.Since(w.began) > spell:
		return patience
	case w.more >= mostWaited:
		return 0
	}
	return max(brief, min(patience, mostWaited-w.took))
}

func (r *Reads) note(user uint32, wait, took time.Duration) {
	if took <= usual {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.waited, func(_ uint32, w waits) bool { return time.Since(w.began) > spell })
	if r.waited == nil {
		r.waited = map[uint32]waits{}
	}
	w, ok := r.waited[user]
	if !ok {
		w.began = time.Now()
	}
	if w.took += took; wait == brief {
		w.more += took
	}
	r.waited[user] = w
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
