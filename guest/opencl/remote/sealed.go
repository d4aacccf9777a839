package remote

import (
	"bufio"
	"context"
	"crypto/tls"
	"net"
	"sync"
)

// sealed is TLS over a connection to which many records go in one system call, and from
// which many come.
type sealed struct {
	*tls.Conn
	under *gathered
}

// Bytes of records that one system call moves at most.
const mostGathered = 256 << 10

// seal does the handshake, with make as tls.Client or tls.Server.
func seal(ctx context.Context, conn net.Conn, cfg *tls.Config, make func(net.Conn, *tls.Config) *tls.Conn) (*sealed, error) {
	g := &gathered{Conn: conn, in: bufio.NewReaderSize(conn, mostGathered)}
	t := make(g, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return &sealed{t, g}, nil
}

// WriteBuffers implements link.BuffersWriter.
func (s *sealed) WriteBuffers(v *net.Buffers) (n int64, err error) {
	if err := s.under.gather(true); err != nil {
		return 0, err
	}
	for _, b := range *v {
		k, werr := s.Write(b)
		n += int64(k)
		if err = werr; err != nil {
			break
		}
	}
	if ferr := s.under.gather(false); err == nil {
		err = ferr
	}
	return n, err
}

// gathered is the connection below TLS.
type gathered struct {
	net.Conn
	in *bufio.Reader

	mu   sync.Mutex
	more bool // what is written waits for more
	out  []byte
}

// Read implements net.Conn.
func (g *gathered) Read(b []byte) (int, error) { return g.in.Read(b) }

// Write implements net.Conn.
func (g *gathered) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.more {
		return g.Conn.Write(b)
	}
	g.out = append(g.out, b...)
	if len(g.out) >= mostGathered {
		if err := g.flush(); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}

// gather says whether what is written waits for more. The rest is written.
func (g *gathered) gather(more bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.more = more
	if more {
		return nil
	}
	return g.flush()
}

// flush is called with g.mu.
func (g *gathered) flush() error {
	if len(g.out) == 0 {
		return nil
	}
	_, err := g.Conn.Write(g.out)
	g.out = g.out[:0]
	return err
}
