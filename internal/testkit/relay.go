package testkit

import (
	"io"
	"net"
	"sync"
	"testing"
)

// Relay is a network between two programs: a port that passes connections on, and can be
// cut.
type Relay struct {
	listener net.Listener
	to       string

	mu    sync.Mutex
	cut   bool
	conns []net.Conn
	count int
	// refused is how many were not passed on since it was cut.
	refused int
}

// NewRelay listens at an address, and passes connections on to another one until the test
// ends.
func NewRelay(t testing.TB, at, to string) *Relay {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	n := &Relay{listener: l, to: to}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { n.pass(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		n.Cut(true)
		wg.Wait()
	})
	return n
}

// Address is where it listens.
func (n *Relay) Address() string { return n.listener.Addr().String() }

func (n *Relay) pass(conn net.Conn) {
	defer conn.Close()
	far, err := net.Dial("tcp", n.to)
	if err != nil {
		return
	}
	defer far.Close()
	n.mu.Lock()
	if n.cut {
		n.refused++
		n.mu.Unlock()
		return
	}
	n.conns = append(n.conns, conn, far)
	n.count++
	n.mu.Unlock()
	var wg sync.WaitGroup
	half := func(to, from net.Conn) {
		_, _ = io.Copy(to, from)
		_ = to.Close()
		_ = from.Close()
	}
	wg.Go(func() { half(far, conn) })
	wg.Go(func() { half(conn, far) })
	wg.Wait()
}

// Cut ends all connections, and refuses new ones until it is called with false.
func (n *Relay) Cut(cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut, n.refused = cut, 0
	if cut {
		for _, c := range n.conns {
			_ = c.Close()
		}
		n.conns = nil
	}
}

// Passed is how many connections were passed on.
func (n *Relay) Passed() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.count
}

// AwaitRefused waits until somebody whose connection was cut has tried to come again.
func (n *Relay) AwaitRefused(t testing.TB) {
	t.Helper()
	Until(t, "somebody has noticed that the network is cut", func() error {
		n.mu.Lock()
		defer n.mu.Unlock()
		return Want(n.refused > 0, "nobody has")
	})
}
