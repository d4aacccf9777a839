package remote

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/link"
)

// A bundle is several connections that are used as one: stripes of the bytes go on them in
// turns, each way. So several processors read, write, encrypt and decrypt at either end. Each of
// the connections has the role Part. It begins with which bundle it is a part of: a name that
// the carrier chooses at random, the role of the bundle, the connection's number, and how many
// there are.

const (
	stripe      = 512 << 10 // bytes
	bundleParts = 4
	partSize    = 12 + 4
	mostBundles = 8 // that are not complete
)

// part is what a connection of role Part begins with.
type part struct {
	bundle [12]byte
	role   Role
	number uint8
	of     uint8
}

func (p part) bytes() []byte {
	return append(p.bundle[:], byte(p.role), p.number, p.of, 0)
}

func parsePart(b []byte) (part, error) {
	if len(b) != partSize {
		return part{}, fmt.Errorf("part of %d bytes: %w", len(b), ErrPreamble)
	}
	p := part{bundle: [12]byte(b), role: Role(b[12]), number: b[13], of: b[14]}
	if p.role != Import && p.role != Export || p.of < 2 || p.of > bundleParts || p.number >= p.of || b[15] != 0 {
		return part{}, fmt.Errorf("part %d of %d of a bundle with role %v: %w", p.number, p.of, p.role, ErrPreamble)
	}
	return p, nil
}

// DialBundle is Dial for much, with role Import or Export. With a far host that does not know
// bundles it makes one connection.
func (d *Dialer) DialBundle(ctx context.Context, role Role) (net.Conn, error) {
	p := part{role: role, of: bundleParts}
	_, _ = rand.Read(p.bundle[:]) // never fails
	conns := make([]net.Conn, bundleParts)
	errs := make([]error, bundleParts)
	one := func(i int) {
		p := p
		p.number = uint8(i)
		if conns[i], errs[i] = d.Dial(ctx, Part); errs[i] == nil {
			_, errs[i] = conns[i].Write(p.bytes())
		}
	}
	if one(0); errs[0] == nil {
		var wg sync.WaitGroup
		for i := 1; i < bundleParts; i++ {
			wg.Go(func() { one(i) })
		}
		wg.Wait()
	}
	if errors.Join(errs...) == nil {
		return &bundle{conns: conns}, nil
	}
	for _, c := range conns {
		if c != nil {
			c.Close()
		}
	}
	return d.Dial(ctx, role)
}

// Gatherer makes bundles of connections that come one by one. Its zero value is ready.
type Gatherer struct {
	mu  sync.Mutex
	all map[[12]byte]*gathering
}

type gathering struct {
	role  Role
	conns []net.Conn
	left  int
}

// Add takes a connection of role Part, which was greeted. It returns the bundle and its role if
// this was the last part, and nil otherwise. What is not complete within bundleTimeout is
// closed, and so is the connection if Add returns an error.
func (g *Gatherer) Add(conn net.Conn) (net.Conn, Role, error) {
	whole, role, err := g.add(conn)
	if err != nil {
		conn.Close()
	}
	return whole, role, err
}

func (g *Gatherer) add(conn net.Conn) (net.Conn, Role, error) {
	var b [partSize]byte
	_ = conn.SetReadDeadline(time.Now().Add(GreetTimeout))
	if _, err := io.ReadFull(conn, b[:]); err != nil {
		return nil, 0, fmt.Errorf("part of a bundle: %w", err)
	}
	_ = conn.SetReadDeadline(time.Time{})
	p, err := parsePart(b[:])
	if err != nil {
		return nil, 0, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	x := g.all[p.bundle]
	if x == nil {
		if len(g.all) >= mostBundles {
			return nil, 0, fmt.Errorf("%d bundles are not complete: %w", len(g.all), ErrPreamble)
		}
		if g.all == nil {
			g.all = map[[12]byte]*gathering{}
		}
		x = &gathering{role: p.role, conns: make([]net.Conn, p.of), left: int(p.of)}
		g.all[p.bundle] = x
		time.AfterFunc(bundleTimeout, func() { g.drop(p.bundle, x) })
	}
	if x.role != p.role || len(x.conns) != int(p.of) || x.conns[p.number] != nil {
		return nil, 0, fmt.Errorf("part %d of a bundle does not fit the others: %w", p.number, ErrPreamble)
	}
	x.conns[p.number] = conn
	if x.left--; x.left > 0 {
		return nil, 0, nil
	}
	delete(g.all, p.bundle)
	return &bundle{conns: x.conns}, x.role, nil
}

func (g *Gatherer) drop(name [12]byte, x *gathering) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.all[name] != x {
		return // it is complete
	}
	delete(g.all, name)
	for _, c := range x.conns {
		if c != nil {
			c.Close()
		}
	}
}

// bundle implements net.Conn. One goroutine reads, and one writes, at a time. Who reads a
// stripe or more waits for all of it.
type bundle struct {
	conns       []net.Conn
	read, wrote uint64 // bytes
}

// turn returns whose turn it is, and for how many bytes more.
func (b *bundle) turn(at uint64) (conn, room int) {
	return int(at / stripe % uint64(len(b.conns))), int(stripe - at%stripe)
}

// split divides bytes among the connections, and returns what is at after them.
func (b *bundle) split(at uint64, v net.Buffers) ([]net.Buffers, uint64) {
	each := make([]net.Buffers, len(b.conns))
	for _, p := range v {
		for len(p) > 0 {
			i, n := b.turn(at)
			n = min(n, len(p))
			each[i] = append(each[i], p[:n])
			p, at = p[n:], at+uint64(n)
		}
	}
	return each, at
}

// do works on the bytes of all connections at once. If one fails, the others are closed.
func (b *bundle) do(each []net.Buffers, work func(c net.Conn, v net.Buffers) error) error {
	var wg sync.WaitGroup
	errs := make([]error, len(each))
	for i, v := range each {
		if len(v) > 0 {
			wg.Go(func() {
				if errs[i] = work(b.conns[i], v); errs[i] != nil {
					_ = b.Close()
				}
			})
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Read implements net.Conn.
func (b *bundle) Read(p []byte) (int, error) {
	if len(p) < stripe {
		i, n := b.turn(b.read)
		n, err := b.conns[i].Read(p[:min(len(p), n)])
		b.read += uint64(n)
		return n, err
	}
	var each []net.Buffers
	each, b.read = b.split(b.read, net.Buffers{p})
	err := b.do(each, func(c net.Conn, v net.Buffers) error {
		for _, p := range v {
			if _, err := io.ReadFull(c, p); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Write implements net.Conn.
func (b *bundle) Write(p []byte) (int, error) {
	n, err := b.WriteBuffers(&net.Buffers{p})
	return int(n), err
}

// WriteBuffers implements link.BuffersWriter.
func (b *bundle) WriteBuffers(v *net.Buffers) (int64, error) {
	from := b.wrote
	var each []net.Buffers
	each, b.wrote = b.split(b.wrote, *v)
	err := b.do(each, func(c net.Conn, v net.Buffers) error {
		var err error
		if w, ok := c.(link.BuffersWriter); ok {
			_, err = w.WriteBuffers(&v)
		} else {
			_, err = v.WriteTo(c)
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	return int64(b.wrote - from), nil
}

func (b *bundle) all(f func(c net.Conn) error) error {
	var errs []error
	for _, c := range b.conns {
		errs = append(errs, f(c))
	}
	return errors.Join(errs...)
}

// Close implements net.Conn.
func (b *bundle) Close() error { return b.all(net.Conn.Close) }

// LocalAddr implements net.Conn.
func (b *bundle) LocalAddr() net.Addr { return b.conns[0].LocalAddr() }

// RemoteAddr implements net.Conn.
func (b *bundle) RemoteAddr() net.Addr { return b.conns[0].RemoteAddr() }

// SetDeadline implements net.Conn.
func (b *bundle) SetDeadline(t time.Time) error {
	return b.all(func(c net.Conn) error { return c.SetDeadline(t) })
}

// SetReadDeadline implements net.Conn.
func (b *bundle) SetReadDeadline(t time.Time) error {
	return b.all(func(c net.Conn) error { return c.SetReadDeadline(t) })
}

// SetWriteDeadline implements net.Conn.
func (b *bundle) SetWriteDeadline(t time.Time) error {
	return b.all(func(c net.Conn) error { return c.SetWriteDeadline(t) })
}
