// Package unixrpc transports Connect, gRPC and plain JSON over Unix sockets, and gives
// servers the identity of their callers.
package unixrpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrForeign means that the server of a socket belongs to another user, who must not be
// sent anything.
var ErrForeign = errors.New("its server is another user's")

// Client returns an HTTP client for a socket; the host in URLs is ignored. It connects
// only to servers of its own user and of root. The kernel reports the server's user
// before the first byte is sent. Otherwise calls fail with ErrForeign.
func Client(socket string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, socket, uint32(os.Geteuid()))
		},
		MaxIdleConns:       4,
		IdleConnTimeout:    time.Minute,
		DisableCompression: true,
	}}
}

func dial(ctx context.Context, socket string, self uint32) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	peer, err := Credentials(c)
	if err == nil && peer.UID != 0 && peer.UID != self {
		err = fmt.Errorf("%w: uid %d, not %d or root; nothing was sent to it", ErrForeign, peer.UID, self)
	}
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("socket %s: %w", socket, err)
	}
	return c, nil
}

// Peer is the process at the other end of a socket, as the kernel reports it.
type Peer struct {
	PID int32
	UID uint32
	GID uint32
}

type peerKey struct{}

// PeerFrom returns the caller of the request that ctx belongs to.
func PeerFrom(ctx context.Context) (Peer, bool) {
	p, ok := ctx.Value(peerKey{}).(Peer)
	return p, ok
}

// Server returns an HTTP server, for HTTP/1.1 and for HTTP/2 without TLS, whose requests
// contain their caller. onConnect, if not nil, is called for each new connection.
func Server(handler http.Handler, onConnect func(Peer)) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           handler,
		Protocols:         protocols,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			peer, err := Credentials(c)
			if err != nil {
				return ctx
			}
			if onConnect != nil {
				onConnect(peer)
			}
			return context.WithValue(ctx, peerKey{}, peer)
		},
	}
}

// Credentials returns the process at the other end of a connection over a Unix socket.
func Credentials(c net.Conn) (Peer, error) {
	conn, ok := c.(syscall.Conn)
	if !ok {
		return Peer{}, net.ErrClosed
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *unix.Ucred
	var inner error
	if err := raw.Control(func(fd uintptr) {
		cred, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Peer{}, err
	}
	if inner != nil {
		return Peer{}, inner
	}
	return Peer{cred.Pid, cred.Uid, cred.Gid}, nil
}

// peerTimeout is for a process that is busy, or a machine that is.
const peerTimeout = 10 * time.Second

// PeerOf returns the process that listens on a socket.
func PeerOf(socket string) (Peer, error) {
	c, err := net.DialTimeout("unix", socket, peerTimeout)
	if err != nil {
		return Peer{}, fmt.Errorf("socket %s: %w", socket, err)
	}
	defer c.Close()
	return Credentials(c)
}
