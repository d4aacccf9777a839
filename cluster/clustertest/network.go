package clustertest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// ErrUnreachable means that a message or its answer was lost.
var ErrUnreachable = errors.New("unreachable")

// Link describes what happens to messages in one direction.
type Link struct {
	Cut   bool          // all messages are lost
	Loss  float64       // part of the messages that is lost, together with the connection
	Delay time.Duration // each message is delayed by up to twice that time
}

// Network connects nodes by their addresses.
type Network struct {
	mu        sync.Mutex
	links     map[[2]string]Link
	listeners map[string]*layer
	timeout   time.Duration
}

// NewNetwork returns a network without faults. A call whose answer is lost fails after
// the time-out.
func NewNetwork(timeout time.Duration) *Network {
	return &Network{links: map[[2]string]Link{}, listeners: map[string]*layer{}, timeout: timeout}
}

// Set sets what happens to messages from one address to another.
func (n *Network) Set(from, to string, l Link) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.links[[2]string{from, to}] = l
}

// Heal ends the faults of all links.
func (n *Network) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.links)
}

// pass delays a message and reports whether it arrives.
func (n *Network) pass(from, to string) bool {
	n.mu.Lock()
	l := n.links[[2]string{from, to}]
	n.mu.Unlock()
	if l.Delay > 0 {
		time.Sleep(time.Duration(rand.Int64N(int64(2 * l.Delay)))) //nolint:gosec // a test's dice
	}
	return !l.Cut && (l.Loss == 0 || rand.Float64() >= l.Loss) //nolint:gosec // a test's dice
}

// Call makes a call between hosts. Its request or its answer may be lost.
func (n *Network) Call(ctx context.Context, from, to string, call func() error) error {
	lost := func() error {
		select {
		case <-ctx.Done():
		case <-time.After(n.timeout):
		}
		return fmt.Errorf("%s to %s: %w", from, to, ErrUnreachable)
	}
	if !n.pass(from, to) {
		return lost()
	}
	err := call()
	if !n.pass(to, from) {
		return lost()
	}
	return err
}

// layer is the network layer of Raft for one run of a node.
type layer struct {
	net.Listener
	network *Network
	address string

	mu    sync.Mutex
	conns map[net.Conn]bool
	down  bool
}

var _ raft.StreamLayer = (*layer)(nil)

type name string

func (a name) Network() string { return "test" }
func (a name) String() string  { return string(a) }

func (n *Network) listen(address string) (*layer, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &layer{Listener: l, network: n, address: address, conns: map[net.Conn]bool{}}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.listeners[address] = s
	return s, nil
}

// Addr implements net.Listener. It returns the name in the network.
func (s *layer) Addr() net.Addr { return name(s.address) }

// Accept implements net.Listener.
func (s *layer) Accept() (net.Conn, error) {
	c, err := s.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return c, s.keep(c)
}

func (s *layer) keep(c net.Conn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down {
		c.Close()
		return net.ErrClosed
	}
	s.conns[c] = true
	return nil
}

// Dial implements raft.StreamLayer.
func (s *layer) Dial(to raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	n := s.network
	n.mu.Lock()
	peer, cut := n.listeners[string(to)], n.links[[2]string{s.address, string(to)}].Cut
	n.mu.Unlock()
	if peer == nil || cut {
		time.Sleep(min(timeout, 10*time.Millisecond))
		return nil, fmt.Errorf("%s to %s: %w", s.address, to, ErrUnreachable)
	}
	d := net.Dialer{Timeout: timeout}
	c, err := d.DialContext(context.Background(), "tcp", peer.Listener.Addr().String())
	if err != nil {
		return nil, err
	}
	if err := s.keep(c); err != nil {
		return nil, err
	}
	return &conn{Conn: c, network: n, from: s.address, to: string(to), layer: s}, nil
}

// kill closes everything at once.
func (s *layer) kill() {
	s.network.mu.Lock()
	if s.network.listeners[s.address] == s {
		delete(s.network.listeners, s.address)
	}
	s.network.mu.Unlock()
	s.Listener.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = true
	for c := range s.conns {
		c.Close()
	}
}

// Close implements net.Listener.
func (s *layer) Close() error {
	s.kill()
	return nil
}

// conn is the dialer's end of a connection. It handles both directions. A stream that has
// lost a message never delivers anything again.
type conn struct {
	net.Conn
	network  *Network
	from, to string
	layer    *layer

	mu   sync.Mutex
	dead bool
}

func (c *conn) lost() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead
}

func (c *conn) lose() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = true
}

func (c *conn) Write(p []byte) (int, error) {
	if !c.lost() && !c.network.pass(c.from, c.to) {
		c.lose()
	}
	if c.lost() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *conn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil {
			return n, err
		}
		if !c.lost() && !c.network.pass(c.to, c.from) {
			c.lose()
		}
		if !c.lost() {
			return n, nil
		}
	}
}

func (c *conn) Close() error {
	c.layer.mu.Lock()
	delete(c.layer.conns, c.Conn)
	c.layer.mu.Unlock()
	return c.Conn.Close()
}
