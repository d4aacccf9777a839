package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/unixrpc"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// Near makes programs' connections in a way that only this process has. It is safe for
// concurrent use.
type Near struct {
	// May reports whether a user may connect.
	May func(uid uint32) bool
	// First returns why what comes first may not be sent.
	First func(first []byte) error
	// Dial connects to an address.
	Dial func(ctx context.Context, address string) (io.ReadWriteCloser, error)
	Log  *slog.Logger

	places *unixrpc.Places
}

// mostOfUser is how many connections a user may have who is neither root nor this process's: a
// session's executor has a user of its own, and some connections.
const mostOfUser = 64

func nearPlaces() *unixrpc.Places {
	return &unixrpc.Places{Self: uint32(os.Geteuid()), Each: mostOfUser, All: mostJoined}
}

// Serve accepts programs' connections until ctx ends, and returns when all of them have ended.
func (n *Near) Serve(ctx context.Context, l *net.UnixListener) error {
	n.places = nearPlaces()
	return serve(ctx, l, n.Log, func(conn *net.UnixConn) error { return n.program(ctx, conn) }, func() {})
}

func (n *Near) program(ctx context.Context, conn *net.UnixConn) error {
	peer, err := unixrpc.Credentials(conn)
	if err != nil {
		return err
	}
	if !n.May(peer.UID) { // before it takes a place
		return fmt.Errorf("user %d may not connect so", peer.UID)
	}
	if err := n.places.Take(peer.UID, peer.UID); err != nil {
		return err
	}
	defer n.places.Give(peer.UID)
	_ = conn.SetDeadline(time.Now().Add(headFor))
	w, err := readHead(conn)
	if err == nil {
		err = n.First(w.First)
	}
	if err != nil {
		return err
	}
	_ = conn.SetDeadline(time.Time{})
	out, err := n.dial(ctx, w)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(conn, "ok\n"); err != nil {
		_ = out.Close()
		return err
	}
	both(ctx, conn, out)
	return nil
}

// dial connects to an address, and sends what is first.
func (n *Near) dial(ctx context.Context, w Wish) (io.ReadWriteCloser, error) {
	ctx, cancel := context.WithTimeout(ctx, dialFor)
	defer cancel()
	out, err := n.Dial(ctx, w.Address)
	if err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = out.Close() })()
	if _, err := out.Write(w.First); err != nil {
		_ = out.Close()
		return nil, err
	}
	return out, nil
}

// both is join, which the end of ctx ends, too.
func both(ctx context.Context, a, b io.ReadWriteCloser) {
	defer context.AfterFunc(ctx, func() {
		_ = a.Close()
		_ = b.Close()
	})()
	join(a, b)
}

// Pass passes connections that come in a way of this process on to a port. The port does not
// see where they come from, so their number is limited here.
type Pass struct {
	// Accept returns the next connection, and where it comes from.
	Accept func() (conn io.ReadWriteCloser, from netip.Addr, err error)
	// First reads and returns what comes first, or why that is not for the port.
	First func(io.Reader) ([]byte, error)
	// Dial connects to the port.
	Dial func(ctx context.Context) (net.Conn, error)
	Log  *slog.Logger

	mu       sync.Mutex
	unproven []*stranger // in the order in which they came
	joined   int
}

// stranger is a connection that the port has not answered.
type stranger struct {
	conn io.Closer
	from netip.Addr
	said bool // what comes first
}

// mostStrange is how many connections there may be to which the port has not answered, less
// than hostd's port lets one address have.
const mostStrange = 12

// Serve passes connections on until ctx ends or Accept says net.ErrClosed, and returns when
// all of them have ended.
func (p *Pass) Serve(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		conn, from, err := p.Accept()
		switch {
		case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			if err == nil {
				_ = conn.Close()
			}
			return
		case err != nil:
			p.Log.Warn("accept a connection", "err", err)
			_ = wait.For(ctx, 100*time.Millisecond)
			continue
		}
		s, err := p.admit(conn, from.Unmap())
		if err != nil {
			p.refused(from, err)
			_ = conn.Close()
			continue
		}
		wg.Go(func() {
			defer p.leave(s)
			if err := p.pass(ctx, conn, s); err != nil && ctx.Err() == nil {
				p.refused(from, err)
			}
			_ = conn.Close()
		})
	}
}

func (p *Pass) refused(from netip.Addr, err error) {
	p.Log.Warn("a connection is not passed on", "from", from, "err", err)
}

// admit counts a connection that the port has not answered. It makes room for it: the oldest that
// has said nothing goes, of its address or of the one with most of them. A carrier says at once who
// it is, so who is silent keeps nobody out.
func (p *Pass) admit(conn io.Closer, from netip.Addr) (*stranger, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.joined >= mostJoined {
		return nil, errFull
	}
	count, most := map[netip.Addr]int{}, from
	for _, o := range p.unproven {
		if count[o.from]++; count[o.from] > count[most] {
			most = o.from
		}
	}
	if count[from] >= mostUnproven {
		most = from
	}
	if count[from] >= mostUnproven || len(p.unproven) >= mostStrange {
		i := slices.IndexFunc(p.unproven, func(o *stranger) bool { return o.from == most && !o.said })
		if i < 0 {
			return nil, fmt.Errorf("%d of its connections, %d of all, have no answer", count[from], len(p.unproven))
		}
		_ = p.unproven[i].conn.Close()
		p.unproven = slices.Delete(p.unproven, i, i+1)
	}
	s := &stranger{conn: conn, from: from}
	p.unproven = append(p.unproven, s)
	p.joined++
	return s, nil
}

// proven counts a connection no more as one that the port has not answered.
func (p *Pass) proven(s *stranger) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unproven = slices.DeleteFunc(p.unproven, func(o *stranger) bool { return o == s })
}

func (p *Pass) leave(s *stranger) {
	p.proven(s)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.joined--
}

func (p *Pass) pass(ctx context.Context, conn io.ReadWriteCloser, s *stranger) error {
	out, err := p.begin(ctx, conn, s)
	if err != nil {
		return err
	}
	_ = out.SetReadDeadline(time.Now().Add(provenFor))
	answers := &proving{Conn: out, proven: func() { p.proven(s) }}
	both(ctx, answers, conn)
	if !answers.done && ctx.Err() == nil {
		return errors.New("the port has not answered it")
	}
	return nil
}

// begin connects to the port, and sends it what comes first.
func (p *Pass) begin(ctx context.Context, conn io.ReadWriteCloser, s *stranger) (net.Conn, error) {
	heading, cancel := context.WithTimeout(ctx, headFor)
	defer cancel()
	defer context.AfterFunc(heading, func() { _ = conn.Close() })()
	first, err := p.First(conn)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	s.said = true
	p.mu.Unlock()
	dialing, cancel := context.WithTimeout(ctx, dialFor)
	defer cancel()
	out, err := p.Dial(dialing)
	if err != nil {
		return nil, err
	}
	_ = out.SetWriteDeadline(time.Now().Add(dialFor))
	if _, err := out.Write(first); err != nil {
		_ = out.Close()
		return nil, err
	}
	_ = out.SetWriteDeadline(time.Time{})
	return out, nil
}
