package unixrpc

import (
	"errors"
	"fmt"
	"sync"
)

// ErrFull means that all places of Places are taken that a user may have.
var ErrFull = errors.New("there are no more connections")

// Places limits the number of connections, for each user and in total. Root and the process's own
// user are limited only by the total number. It is safe for concurrent use.
type Places struct {
	Self      uint32 // the process's own user
	Each, All int
	Kept      int // of All, for root and Self

	mu    sync.Mutex
	by    map[uint32]int
	total int
}

func (p *Places) trusts(uid uint32) bool { return uid == 0 || uid == p.Self }

// Take counts a connection of a user, for the user by. The error says what there is too much of, and
// is ErrFull if that are all connections.
func (p *Places) Take(uid, by uint32) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.total >= p.All, !p.trusts(uid) && p.total >= p.All-p.Kept:
		return ErrFull
	case !p.trusts(uid) && p.by[by] >= p.Each:
		return fmt.Errorf("user %d has %d connections already", by, p.Each)
	}
	if p.by == nil {
		p.by = map[uint32]int{}
	}
	p.by[by]++
	p.total++
	return nil
}

// Give counts a connection of the user by no more.
func (p *Places) Give(by uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total--
	if p.by[by]--; p.by[by] == 0 {
		delete(p.by, by)
	}
}
