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
	return &limited{Listener: l, places: placesOf(self, each, all), whose: whose, refused: onRefused, pacer: pace.New(readsPerSecond, readsAtOnce)}
}

// placesOf reserves the last quarter for root and the server's own user.
func placesOf(self uint32, each, all int) *Places {
	return &Places{Self: self, Each: each, All: all, Kept: all / 4}
}

type limited struct {
	net.Listener

	places  *Places
	whose   func(uint32) uint32
	refused func(Peer)
	pacer   *pace.Pacer
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

// take counts a connection of a user. It returns for whom, if it is within the limits.
func (l *limited) take(uid uint32) (by uint32, ok bool) {
	by = l.whose(uid)
	return by, l.places.Take(uid, by) == nil
}

// count counts a connection until it is closed.
func (l *limited) count(c net.Conn, uid, by uint32) net.Conn {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		l.places.Give(by)
		return c
	}
	return &counted{UnixConn: conn, flow: l.flow(uid, by), done: func() { l.places.Give(by) }}
}

// flow returns the limit for reading a user's connections; nil: none.
func (l *limited) flow(uid, by uint32) *pace.Flow {
	if l.places.trusts(uid) {
		return nil
	}
	return l.pacer.Flow(strconv.FormatUint(uint64(by), 10))
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
