package lend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/cluster/pki/throttle"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

const (
	mostGreeting = 64 // connections that have not shown a token
	mostEach     = 16 // of these, from one address, or one /64 of IPv6
	handFor      = 10 * time.Second
	acceptPause  = 50 * time.Millisecond
	quietFor     = 10 * time.Second
)

// Config has what a Port depends on, and its limits.
type Config struct {
	Listener net.Listener
	// Expects reports whether a lease of this host has this token.
	Expects func(token []byte) bool
	// Socket is where gpuguest takes connections over.
	Socket string
	Log    *slog.Logger

	Most     int // most connections that have not shown a token; 0: 64
	MostEach int // of these, from one address; 0: 16
}

// Port accepts connections of carriers. Make it with New.
type Port struct {
	Config
	quiet *throttle.Throttle
	wg    sync.WaitGroup

	mu       sync.Mutex
	greeting map[net.Conn]greeter // connections that have not shown a token
	admitted uint64
	closed   bool
}

type greeter struct {
	from   string
	number uint64 // in the order in which they came
}

// New returns a port. Serve accepts connections.
func New(c Config) *Port {
	if c.Most == 0 {
		c.Most = mostGreeting
	}
	if c.MostEach == 0 {
		c.MostEach = mostEach
	}
	return &Port{Config: c, quiet: throttle.New(quietFor, time.Now), greeting: map[net.Conn]greeter{}}
}

// Number returns the number of the TCP port at which a listener listens.
func Number(l net.Listener) int {
	if a, ok := l.Addr().(*net.TCPAddr); ok {
		return a.Port
	}
	return 0
}

// Serve accepts connections until ctx ends, and returns when nothing of them is left here.
func (p *Port) Serve(ctx context.Context) {
	defer p.wg.Wait()
	stop := context.AfterFunc(ctx, p.close)
	defer stop()
	for {
		conn, err := p.Listener.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			p.warn("accept", "cannot accept carriers", nil, err) // no descriptors are left; that passes
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
			continue
		}
		if err := p.admit(conn); err != nil {
			p.warn("admit", "connection refused", conn, err)
			_ = conn.Close()
			continue
		}
		p.wg.Go(func() {
			defer p.leave(conn)
			if err := p.pass(ctx, conn); err != nil && ctx.Err() == nil {
				p.warn("pass "+from(conn), "connection of a carrier refused", conn, err)
			}
		})
	}
}

func (p *Port) close() {
	_ = p.Listener.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for c := range p.greeting {
		_ = c.Close()
	}
}

// from returns who is counted together: an address, of IPv6 a /64.
func from(conn net.Conn) string {
	a, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil {
		return conn.RemoteAddr().String()
	}
	ip := a.Addr().Unmap().WithZone("")
	if ip.Is6() {
		if prefix, err := ip.Prefix(64); err == nil {
			return prefix.String()
		}
	}
	return ip.String()
}

// admit takes a connection. It makes room for it: of those that have not said who they are,
// the oldest goes. A carrier says so at once, so who is silent keeps nobody out.
func (p *Port) admit(conn net.Conn) error {
	who := from(conn)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return net.ErrClosed
	}
	count, most := map[string]int{}, who
	for _, other := range p.greeting {
		if count[other.from]++; count[other.from] > count[most] {
			most = other.from
		}
	}
	switch {
	case count[who] >= p.MostEach:
		p.evict(who)
	case len(p.greeting) >= p.Most:
		p.evict(most)
	}
	p.admitted++
	p.greeting[conn] = greeter{who, p.admitted}
	return nil
}

// evict closes the oldest silent connection of an address. The caller holds p.mu.
func (p *Port) evict(who string) {
	var oldest net.Conn
	for c, g := range p.greeting {
		if g.from == who && (oldest == nil || g.number < p.greeting[oldest].number) {
			oldest = c
		}
	}
	if oldest != nil {
		_ = oldest.Close()
		delete(p.greeting, oldest)
	}
}

// greeted is called when a connection has shown the token of a lease: it is not evicted any
// more. It reports whether it was not before.
func (p *Port) greeted(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.greeting[conn]
	delete(p.greeting, conn)
	return ok
}

func (p *Port) leave(conn net.Conn) {
	_ = conn.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.greeting, conn)
}

// pass reads the preamble, and hands the connection over to gpuguest.
func (p *Port) pass(ctx context.Context, conn net.Conn) error {
	preamble, err := remote.ReadPreamble(conn)
	switch {
	case err != nil:
		return err
	case preamble.Plain:
		return errors.New("without TLS, which is for carriers of one host")
	case !p.Expects(preamble.Token[:]):
		return errors.New("no lease has its token")
	case !p.greeted(conn):
		return errors.New("others came before it had said who it is")
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return fmt.Errorf("it is a %T", conn)
	}
	f, err := tcp.File()
	if err != nil {
		return err
	}
	defer f.Close()
	ctx, cancel := context.WithTimeout(ctx, handFor)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", p.Socket)
	if err != nil {
		return fmt.Errorf("gpuguest takes no connections: %w", err)
	}
	unix, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return fmt.Errorf("socket %s: it is a %T", p.Socket, c)
	}
	return handover.Give(ctx, unix, lease.HandName(preamble), f)
}

func (p *Port) warn(key, message string, conn net.Conn, err error) {
	n, ok := p.quiet.Allow(key)
	if !ok {
		return
	}
	where := ""
	if conn != nil {
		where = conn.RemoteAddr().String()
	}
	p.Log.Warn(message, "from", where, "err", err, "skipped", n)
}
