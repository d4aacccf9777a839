package pki

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpuctl/gpuctl/cluster/pki/throttle"
	"github.com/gpuctl/gpuctl/internal/pace"
)

const (
	handshakeTimeout = 10 * time.Second
	maxHandshakes    = 256
	maxAnonymous     = 64
	maxPerAddress    = 16
	maxPerUser       = 512
	anonymousFor     = 2 * time.Minute
	recheckEvery     = time.Second
	acceptPause      = 50 * time.Millisecond
	quietFor         = 10 * time.Second
	readsPerAddress  = 100

	welcome = 1 // first byte of a Raft connection: the dialer's certificate was accepted
)

// MuxConfig has what a Mux depends on, and its limits.
type MuxConfig struct {
	Listener net.Listener
	Trust    Trust
	Log      *slog.Logger

	HandshakeTimeout time.Duration // 0: 10 s
	MaxHandshakes    int           // handshakes at a time; 0: 256
	MaxAnonymous     int           // most connections without a valid certificate; 0: 64
	MaxPerAddress    int           // most of these from one address; 0: 16
	MaxPerUser       int           // most connections of one user; 0: 512
	ReadsPerAddress  int           // reads in a second from one address without a valid certificate, and four times as many in a burst; 0: 100
	AnonymousFor     time.Duration // longest duration of connections without a valid certificate; 0: 2 min
	Recheck          time.Duration // time between two checks of Raft's connections; 0: 1 s

	// DialContext connects to other hosts; nil: TCP.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	// Expect returns the host that is reached at an address. If it is nil or returns "",
	// any host of this cluster is accepted.
	Expect func(address string) (host string)
}

// Mux shares one port between HTTP and Raft. Slow clients block neither of them:
// handshakes have a deadline, and their number is limited.
type Mux struct {
	MuxConfig

	ctx        context.Context
	cancel     context.CancelFunc
	wait       sync.WaitGroup
	http       *subListener
	strangers  atomic.Pointer[subListener]
	raft       *RaftLayer
	handshakes *pool
	anonymous  *pool
	pacer      *pace.Pacer
	quiet      *throttle.Throttle

	mu    sync.Mutex
	conns map[*tracked]Peer // connections of Raft, in both directions
	users map[string]int    // number of HTTP connections by the user's id
}

// NewMux begins to accept connections. The caller serves HTTP and Raft.
func NewMux(c MuxConfig) *Mux {
	set(&c.HandshakeTimeout, handshakeTimeout)
	set(&c.MaxHandshakes, maxHandshakes)
	set(&c.MaxAnonymous, maxAnonymous)
	set(&c.MaxPerAddress, maxPerAddress)
	set(&c.MaxPerUser, maxPerUser)
	set(&c.ReadsPerAddress, readsPerAddress)
	set(&c.AnonymousFor, anonymousFor)
	set(&c.Recheck, recheckEvery)
	if c.DialContext == nil {
		c.DialContext = new(net.Dialer).DialContext
	}
	if c.Expect == nil {
		c.Expect = func(string) string { return "" }
	}
	m := &Mux{MuxConfig: c, conns: map[*tracked]Peer{}, users: map[string]int{}, pacer: pace.New(c.ReadsPerAddress, 4*c.ReadsPerAddress), quiet: throttle.New(quietFor, time.Now)}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.handshakes = newPool(c.MaxHandshakes, c.HandshakeTimeout/10)
	m.anonymous = newPool(c.MaxAnonymous, c.HandshakeTimeout/10)
	m.anonymous.each = c.MaxPerAddress
	m.http = newSubListener(c.Listener.Addr())
	m.raft = &RaftLayer{newSubListener(c.Listener.Addr()), m}
	m.wait.Go(m.accept)
	m.wait.Go(m.recheck)
	return m
}

func set[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}

// HTTP returns a listener whose connections can be served by an http.Server, including
// HTTP/2. The server must set ReadHeaderTimeout.
func (m *Mux) HTTP() net.Listener { return m.http }

// Strangers returns a listener for HTTP connections without a valid certificate. After
// its first call, HTTP does not return those any more. So they can have a server with
// stricter limits.
func (m *Mux) Strangers() net.Listener {
	m.strangers.CompareAndSwap(nil, newSubListener(m.Listener.Addr()))
	return m.strangers.Load()
}

// Raft returns the connections between hosts.
func (m *Mux) Raft() *RaftLayer { return m.raft }

// Close closes the port, all handshakes and all connections of Raft. The HTTP server
// closes the connections that it has accepted.
func (m *Mux) Close() error {
	m.cancel()
	err := m.Listener.Close()
	_ = m.http.Close()
	if s := m.strangers.Load(); s != nil {
		_ = s.Close()
	}
	_ = m.raft.Close()
	m.closeRaft(func(Peer) error { return net.ErrClosed })
	m.wait.Wait()
	return err
}

func (m *Mux) accept() {
	config := m.Trust.ServerConfig()
	for {
		conn, err := m.Listener.Accept()
		if err != nil {
			if m.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Usually there are no file descriptors left. That passes.
			if n, ok := m.quiet.Allow("accept"); ok {
				m.Log.Error("cannot accept connections", "err", err, "skipped", n)
			}
			select {
			case <-time.After(acceptPause):
			case <-m.ctx.Done():
			}
			continue
		}
		c := track(conn)
		c.flow = m.pacer.Flow(c.from)
		if evicted := m.handshakes.add(m.ctx, c); evicted != nil {
			m.warn(evicted, "handshake given up: too many at a time", nil)
		}
		m.wait.Go(func() {
			defer m.handshakes.remove(c)
			m.handshake(c, config)
		})
	}
}

func (m *Mux) handshake(c *tracked, config *tls.Config) {
	ctx, cancel := context.WithTimeout(m.ctx, m.HandshakeTimeout)
	defer cancel()
	conn := tls.Server(c, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = c.Close()
		if !errors.Is(err, io.EOF) && m.ctx.Err() == nil { // EOF: a client only tested whether the port is open
			m.warn(c, "connection refused in its handshake", err)
		}
		return
	}
	state := conn.ConnectionState()
	if state.NegotiatedProtocol == ProtoRaft {
		m.acceptRaft(ctx, c, conn, state)
		return
	}
	peer, err := m.Trust.Verify(state.PeerCertificates)
	if err == nil {
		c.flow.Free()
	}
	switch {
	case err == nil && peer.Kind == KindUser:
		if !m.takeUser(peer.ID) {
			_ = c.Close()
			m.warn(c, "connection closed: "+peer.String()+" has too many", nil)
			return
		}
		c.whenClosed(func() { m.giveUser(peer.ID) })
	case err != nil:
		c.endAfter(m.AnonymousFor)
		if evicted := m.anonymous.add(ctx, c); evicted != nil {
			m.warn(evicted, "connection without a valid certificate closed: too many at a time", nil)
		}
		c.whenClosed(func() { m.anonymous.remove(c) })
		if s := m.strangers.Load(); s != nil {
			s.deliver(ctx, conn)
			return
		}
	}
	m.http.deliver(ctx, conn)
}

func (m *Mux) takeUser(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users[id] >= m.MaxPerUser {
		return false
	}
	m.users[id]++
	return true
}

func (m *Mux) giveUser(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.users[id]--; m.users[id] == 0 {
		delete(m.users, id)
	}
}

func (m *Mux) acceptRaft(ctx context.Context, c *tracked, conn *tls.Conn, state tls.ConnectionState) {
	peer, err := m.Trust.raftPeer(state)
	if err == nil {
		deadline, _ := ctx.Deadline()
		_ = conn.SetDeadline(deadline)
		_, err = conn.Write([]byte{welcome})
		_ = conn.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		m.warn(c, "raft connection refused", err)
		return
	}
	c.flow.Free()
	m.watch(c, peer)
	m.raft.deliver(ctx, conn)
}

func (m *Mux) warn(c *tracked, message string, err error) {
	if n, ok := m.quiet.Allow(c.from + " " + message); ok {
		m.Log.Warn(message, "from", c.RemoteAddr().String(), "err", err, "skipped", n)
	}
}

// watch closes the connection when the peer's certificate is not valid any more.
func (m *Mux) watch(c *tracked, peer Peer) {
	m.mu.Lock()
	m.conns[c] = peer
	m.mu.Unlock()
	c.whenClosed(func() {
		m.mu.Lock()
		delete(m.conns, c)
		m.mu.Unlock()
	})
	if m.ctx.Err() != nil {
		_ = c.Close()
	}
}

// Recheck closes the Raft connections of removed hosts at once.
func (m *Mux) Recheck() { m.closeRaft(m.Trust.Check) }

func (m *Mux) closeRaft(check func(Peer) error) {
	m.mu.Lock()
	all := make(map[*tracked]Peer, len(m.conns))
	for c, p := range m.conns {
		all[c] = p
	}
	m.mu.Unlock()
	for c, p := range all {
		err := check(p)
		if err == nil {
			continue
		}
		_ = c.Close()
		if m.ctx.Err() == nil {
			m.Log.Warn("raft connection closed", "peer", p.String(), "from", c.RemoteAddr().String(), "err", err)
		}
	}
}

func (m *Mux) recheck() {
	tick := time.NewTicker(m.MuxConfig.Recheck)
	defer tick.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-tick.C:
			m.Recheck()
		}
	}
}

// RaftLayer is the network layer of Raft: a listener, and Dial. Both ends of each
// connection are hosts of this cluster.
type RaftLayer struct {
	*subListener

	mux *Mux
}

// Dial connects to the host at an address. It returns when each side has accepted the
// other.
func (l *RaftLayer) Dial(address string, timeout time.Duration) (net.Conn, error) {
	ctx := l.mux.ctx
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	return l.DialContext(ctx, address)
}

// DialContext is Dial with a context. The context is used only until DialContext returns.
func (l *RaftLayer) DialContext(ctx context.Context, address string) (net.Conn, error) {
	if l.mux.ctx.Err() != nil {
		return nil, fmt.Errorf("raft to %s: %w", address, net.ErrClosed)
	}
	raw, err := l.mux.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("raft to %s: %w", address, err)
	}
	c := track(raw)
	config := l.mux.Trust.ClientConfig(l.mux.Expect(address))
	config.NextProtos = []string{ProtoRaft}
	conn := tls.Client(c, config)
	if err := greet(ctx, conn); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("raft to %s: %w", address, err)
	}
	peer, err := PeerOf(conn.ConnectionState().PeerCertificates[0])
	if err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("raft to %s: %w", address, err)
	}
	l.mux.watch(c, peer)
	return conn, nil
}

// greet waits for the server's first byte. In TLS 1.3, a client's handshake is complete
// before the server has verified the client's certificate.
func greet(ctx context.Context, conn *tls.Conn) error {
	if err := conn.HandshakeContext(ctx); err != nil {
		return err
	}
	if p := conn.ConnectionState().NegotiatedProtocol; p != ProtoRaft {
		return fmt.Errorf("the other side speaks %q, not %s", p, ProtoRaft)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	var b [1]byte
	_, err := io.ReadFull(conn, b[:])
	if !stop() && err == nil {
		err = ctx.Err()
	}
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "remote error":
		return fmt.Errorf("the other side does not accept this host's certificate (its log says why): %w", err)
	case err != nil:
		return errors.Join(ctx.Err(), err)
	case b[0] != welcome:
		return fmt.Errorf("the other side greets with %#x, not %#x", b[0], welcome)
	}
	return nil
}

// subListener is a listener for the connections of one protocol.
type subListener struct {
	addr   net.Addr
	conns  chan net.Conn
	done   chan struct{}
	closed sync.Once
}

func newSubListener(addr net.Addr) *subListener {
	return &subListener{addr: addr, conns: make(chan net.Conn), done: make(chan struct{})}
}

// deliver passes a connection to Accept, or closes it if nobody accepts it in time.
func (l *subListener) deliver(ctx context.Context, c net.Conn) {
	select {
	case l.conns <- c:
	case <-l.done:
		_ = c.Close()
	case <-ctx.Done():
		_ = c.Close()
	}
}

// Accept returns the next connection. Its handshake is complete.
func (l *subListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, fmt.Errorf("listener %s: %w", l.addr, net.ErrClosed)
	}
}

// Close closes the listener of this protocol only.
func (l *subListener) Close() error {
	l.closed.Do(func() { close(l.done) })
	return nil
}

// Addr returns the port's address.
func (l *subListener) Addr() net.Addr { return l.addr }
