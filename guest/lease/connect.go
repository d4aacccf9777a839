package lease

import (
	"context"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// errUnknown is returned for a token that no lease has.
var errUnknown = errors.New("no lease has this token")

// HandName returns the name by which hostd hands over a connection whose preamble it has
// read.
func HandName(p remote.Preamble) string { return hex.EncodeToString(p.Append(nil)) }

// listen accepts connections at the addresses, and takes those that are handed over.
func (m *Manager) listen() error {
	for _, addr := range m.cfg.Listen {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return fmt.Errorf("listen for carriers: %w", err)
		}
		m.listeners = append(m.listeners, l)
		m.wg.Go(func() { m.accept(l) })
	}
	path := filepath.Join(m.cfg.Dir, SocketName)
	_ = os.Remove(path)
	var err error
	if m.hand, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		return fmt.Errorf("listen for carriers: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return fmt.Errorf("listen for carriers: %w", err)
	}
	m.wg.Go(func() { _ = handover.Serve(m.hand, m.handed) })
	return nil
}

// accept reads the preambles of connections. A connection gives way to others if it says
// nothing within remote.GreetTimeout.
func (m *Manager) accept(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			if m.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			m.log.Warn("accept a carrier", "err", err)
			time.Sleep(100 * time.Millisecond) // out of descriptors
			continue
		}
		select {
		case m.greeting <- struct{}{}:
		default:
			m.log.Warn("connection refused", "from", conn.RemoteAddr(), "err", "too many connections have not said who they are")
			conn.Close()
			continue
		}
		m.wg.Go(func() {
			p, err := remote.ReadPreamble(conn)
			<-m.greeting
			if err == nil {
				err = m.Take(conn, p)
			}
			if err != nil {
				m.log.Warn("connection refused", "from", conn.RemoteAddr(), "err", err)
			}
			conn.Close()
		})
	}
}

// handed takes a connection that hostd has accepted.
func (m *Manager) handed(name string, f *os.File) {
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		m.log.Warn("connection refused", "err", err)
		return
	}
	m.wg.Go(func() {
		defer conn.Close()
		b, err := hex.DecodeString(name)
		var p remote.Preamble
		if err == nil {
			p, err = remote.ParsePreamble(b)
		}
		if err == nil {
			err = m.Take(conn, p)
		}
		if err != nil {
			m.log.Warn("connection refused", "from", conn.RemoteAddr(), "err", err)
		}
	})
}

// find returns the lease with a token, and the name by which the connection is handed over. A
// token is good for its own role only, and that of a fetch is good once. It takes as long for
// any token.
func (m *Manager) find(p remote.Preamble) (found *lease, name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name = remote.HandedPrefix + p.Role.String()
	for _, l := range m.leases {
		select {
		case <-l.made:
		default:
			continue
		}
		token := l.rec.Token
		if p.Role == remote.Fetch {
			if l.fetch == nil || time.Now().After(l.fetch.until) {
				continue
			}
			token = l.fetch.token[:]
		}
		if subtle.ConstantTimeCompare(token, p.Token[:]) == 1 {
			found = l
		}
	}
	if found != nil && p.Role == remote.Fetch {
		name = remote.HandFetched(found.fetch.peer, remote.FetchName(p.Token))
		found.fetch = nil
	}
	return found, name
}

// Take passes a connection to the far executor of the lease that the preamble names. The
// caller closes its own descriptor.
func (m *Manager) Take(conn net.Conn, p remote.Preamble) error {
	l, name := m.find(p)
	if l == nil {
		return errUnknown
	}
	if n := l.handing.Add(1); n > mostHanding {
		l.handing.Add(-1)
		return fmt.Errorf("lease %s: %d connections are being handed over already", l.req.Lease, mostHanding)
	}
	defer l.handing.Add(-1)
	switch {
	case p.Plain != l.req.Plain:
		return fmt.Errorf("lease %s: with TLS, or without it, against what was agreed on", l.req.Lease)
	case l.ended() && p.Role == remote.Fetch:
		return fmt.Errorf("lease %s: %s", l.req.Lease, l.why())
	case l.ended():
		return m.refuse(conn, l)
	}
	ctx, cancel := context.WithTimeout(m.ctx, handTimeout)
	defer cancel()
	c, err := m.reach(ctx, l)
	if err != nil {
		return fmt.Errorf("lease %s: %w", l.req.Lease, err)
	}
	if err := m.give(ctx, l, c, conn, name); err != nil || p.Role == remote.Fetch {
		return err
	}
	m.mu.Lock()
	l.used = true
	m.mu.Unlock()
	return nil
}

// give hands a connection over to the far executor, which is at the other end of to.
func (m *Manager) give(ctx context.Context, l *lease, to *net.UnixConn, conn net.Conn, name string) error {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		to.Close()
		return fmt.Errorf("lease %s: the connection is a %T", l.req.Lease, conn)
	}
	f, err := tcp.File()
	if err != nil {
		to.Close()
		return fmt.Errorf("lease %s: %w", l.req.Lease, err)
	}
	defer f.Close()
	if err := handover.Give(ctx, to, name, f); err != nil {
		return fmt.Errorf("lease %s: %w", l.req.Lease, err)
	}
	return nil
}

const (
	handTimeout = 60 * time.Second // a runtime may still be loading
	// mostHanding is how many connections of one carrier may wait for its far executor. It
	// needs one for each role, and some to replace broken ones.
	mostHanding = 16
	handPoll    = 5 * time.Millisecond
)

// reach connects to the far executor. The executor chooses what is in its folder, so the
// peer is checked.
func (m *Manager) reach(ctx context.Context, l *lease) (*net.UnixConn, error) {
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", l.socket())
		if err == nil {
			conn, ok := c.(*net.UnixConn)
			if !ok {
				c.Close()
				return nil, fmt.Errorf("socket %s: it is a %T", l.socket(), c)
			}
			cred, err := handover.Peer(conn)
			if err == nil && !l.proc.Owns(cred) {
				err = fmt.Errorf("process %d serves the far executor's socket", cred.Pid)
			}
			if err != nil {
				conn.Close()
				return nil, err
			}
			return conn, nil
		}
		select {
		case <-l.proc.Done():
			return nil, errors.New(l.why())
		case <-ctx.Done():
			return nil, err
		case <-time.After(handPoll): // it is starting
		}
	}
}

// refuse tells the carrier of a lease that has ended so, in a way that only this host can.
func (m *Manager) refuse(conn net.Conn, l *lease) error {
	a := remote.Acceptor{Plain: l.req.Plain, Own: l.rec.Identity, Peer: l.req.PeerCertSha256, Parts: wire.ArenaParts}
	why := errors.New(l.why())
	c, _, err := a.Accept(conn, remote.Control)
	if err != nil {
		return fmt.Errorf("lease %s: %w", l.req.Lease, err)
	}
	defer c.Close()
	if err := remote.Answer(c, why); err != nil {
		return fmt.Errorf("lease %s: %w", l.req.Lease, err)
	}
	return fmt.Errorf("lease %s: %w", l.req.Lease, why)
}
