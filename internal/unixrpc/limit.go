package unixrpc

import (
	"net"
	"strconv"
	"sync"

	"github.com/gpuctl/gpuctl/internal/pace"
)

// Limits for reading the connections of one user. A call takes two or three reads.
const (
	readsPerSecond = 1000
	readsAtOnce    = 4 * readsPerSecond
)

// Limit limits the number of a listener's connections, for each user and in total, and
// how often those of one user are read. Connections beyond the limit are closed at once.
// A user who sends too much waits. Root and the server's own user are limited only by the
// total number. whose returns the user for whom the connections of a user count; nil: each is its own.
// onRefused, if not nil, is called for refused connections.
func Limit(l net.Listener, self uint32, each, all int, whose func(uint32) uint32, onRefused func(Peer)) net.Listener {
	if whose == nil {
		whose = func(uid uint32) uint32 { return uid }
	}
	return &limited{Listener: l, self: self, each: each, all: all, whose: whose, refused: onRefused, by: map[uint32]int{}, pacer: pace.New(readsPerSecond, readsAtOnce)}
}

type limited struct {
	net.Listener

	self      uint32
	each, all int
	whose     func(uint32) uint32
	refused   func(Peer)
	pacer     *pace.Pacer

	mu    sync.Mutex
	by    map[uint32]int
	total int
}

// Accept waits for the next connection within the limits.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer, err := Credentials(c)
		if err == nil {
			if by, ok := l.take(peer.UID); ok {
				return l.count(c, peer.UID, by), nil
			}
		}
		_ = c.Close()
		if err == nil && l.refused != nil {
			l.refused(peer)
		}
	}
}

// count counts a connection until it is closed.
func (l *limited) count(c net.Conn, uid, by uint32) net.Conn {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		l.give(by)
		return c
	}
	return &counted{UnixConn: conn, flow: l.flow(uid, by), done: func() { l.give(by) }}
}

func (l *limited) trusts(uid uint32) bool { return uid == 0 || uid == l.self }

// flow returns the limit for reading a user's connections; nil: none.
func (l *limited) flow(uid, by uint32) *pace.Flow {
	if l.trusts(uid) {
		return nil
	}
	return l.pacer.Flow(strconv.FormatUint(uint64(by), 10))
}

// take counts a connection of a user. It returns for whom, if it is within the limits.
func (l *limited) take(uid uint32) (by uint32, ok bool) {
	by = l.whose(uid)
	l.mu.Lock()
	defer l.mu.Unlock()
	// The last quarter is reserved for root and the server's own user.
	if !l.trusts(uid) && (l.by[by] >= l.each || l.total >= l.all-l.all/4) || l.total >= l.all {
		return by, false
	}
	l.by[by]++
	l.total++
	return by, true
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

	flow *pace.Flow
	once sync.Once
	done func()
}

// Read waits until the user may read, and reads.
func (c *counted) Read(b []byte) (int, error) { return c.flow.Read(c.UnixConn.Read, b) }

// Close closes the connection.
func (c *counted) Close() error {
	c.once.Do(c.done)
	c.flow.End()
	return c.UnixConn.Close()
}

// Unwrap returns the connection itself, for asking the kernel about its peer.
func (c *counted) Unwrap() *net.UnixConn { return c.UnixConn }
