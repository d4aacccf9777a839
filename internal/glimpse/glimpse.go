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
	what map[string]bool
	by   map[uint32]int
}

// Do returns what read returns. ok is false if that takes long, or if what is being read already, as
// after an earlier call that has not ended, or if too much of the user's is. A nil r waits.
func Do[T any](r *Reads, user uint32, what string, read func() T) (result T, ok bool) {
	if r == nil {
		return read(), true
	}
	if !r.begin(user, what) {
		return result, false
	}
	got := make(chan T, 1)
	go func() {
		defer r.end(user, what)
		got <- read()
	}()
	limit := time.NewTimer(patience)
	defer limit.Stop()
	select {
	case result = <-got:
		return result, true
	case <-limit.C:
		return result, false
	}
}

func (r *Reads) begin(user uint32, what string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.what[what] || r.by[user] >= mostOfUser || len(r.what) >= mostOfAll {
		return false
	}
	if r.what == nil {
		r.what, r.by = map[string]bool{}, map[uint32]int{}
	}
	r.what[what] = true
	r.by[user]++
	return true
}

func (r *Reads) end(user uint32, what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.what, what)
	if r.by[user]--; r.by[user] == 0 {
		delete(r.by, user)
	}
}
