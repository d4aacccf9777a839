package unixrpc

import (
	"net"
	"sync"
)

// Limit bounds how many connections a listener has: one user's and all users'.
// One too many is closed at once. Root and the server's own user are bounded by
// the whole alone. onRefused, if not nil, is told.
func Limit(l net.Listener, self uint32, each, all int, onRefused func(Peer)) net.Listener {
	return &limited{Listener: l, self: self, each: each, all: all, refused: onRefused, by: map[uint32]int{}}
}

type limited struct {
	net.Listener

	self      uint32
	each, all int
	refused   func(Peer)

	mu    sync.Mutex
	by    map[uint32]int
	total int
}

// Accept waits for the next connection that may be.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer, err := credentials(c)
		if err == nil && l.take(peer.UID) {
			conn, ok := c.(*net.UnixConn)
			if !ok {
				l.give(peer.UID)
				return c, nil
			}
			return &counted{UnixConn: conn, done: func() { l.give(peer.UID) }}, nil
		}
		_ = c.Close()
		if err == nil && l.refused != nil {
			l.refused(peer)
		}
	}
}

func (l *limited) take(uid uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	trusted := uid == 0 || uid == l.self
	// The last quarter is for those who look after the host.
	if !trusted && (l.by[uid] >= l.each || l.total >= l.all-l.all/4) || l.total >= l.all {
		return false
	}
	l.by[uid]++
	l.total++
	return true
}

func (l *limited) give(uid uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total--
	if l.by[uid]--; l.by[uid] == 0 {
		delete(l.by, uid)
	}
}

// counted is a connection that is counted until it is closed.
type counted struct {
	*net.UnixConn

	once sync.Once
	done func()
}

// Close closes the connection.
func (c *counted) Close() error {
	c.once.Do(c.done)
	return c.UnixConn.Close()
}

// Unwrap is the connection itself, for who asks the kernel about it.
func (c *counted) Unwrap() *net.UnixConn { return c.UnixConn }
