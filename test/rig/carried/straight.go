package main

import (
	"context"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/lease"
	"github.com/gpuctl/gpuctl/guest/session"
)

// hosts are two lease managers, as of two hosts, and which session computes with which.
type hosts struct {
	managers [2]*lease.Manager

	mu   sync.Mutex
	lent map[string]far // by the hash of the far executor's certificate: leases of targets that are to be launched
	used map[string]far // by session: of the newest carrier
}

// far is a lease that a session uses.
type far struct {
	leases *lease.Manager
	id     string
	peer   []byte // hash of the far executor's certificate
	addr   string
	device *gpuctlv1.VirtualDevice
	proc   session.Process // the carrier
	before *far            // of the session's carrier before that
}

func newHosts(a, b *lease.Manager) *hosts {
	return &hosts{managers: [2]*lease.Manager{a, b}, lent: map[string]far{}, used: map[string]far{}}
}

func sessionOf(spec *session.Spec) string { return filepath.Base(filepath.Dir(spec.Log)) }

// of returns the lease of a target that has one already.
func (h *hosts) of(spec *session.Spec) (*lease.Manager, string) {
	if h == nil {
		return nil, ""
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.lent[string(spec.Runtime.GetRemote().GetPeerCertSha256())]
	return f.leases, f.id
}

// runs notes that a carrier runs.
func (h *hosts) runs(spec *session.Spec, p session.Process, leases *lease.Manager, id string) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := spec.Runtime.GetRemote()
	delete(h.lent, string(r.GetPeerCertSha256()))
	f := far{leases: leases, id: id, peer: r.GetPeerCertSha256(), addr: r.GetAddresses()[0], device: spec.Device, proc: p}
	if old, ok := h.used[sessionOf(spec)]; ok {
		old.before = nil
		f.before = &old
	}
	h.used[sessionOf(spec)] = f
}

// current returns the lease that a session computes with: the newest, or that before it if
// the newest was the target of a swap that has failed.
func (h *hosts) current(session string) (far, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, ok := h.used[session]
	for x := &f; ok && x != nil; x = x.before {
		select {
		case <-x.proc.Done():
		default:
			return *x, true
		}
	}
	return far{}, false
}

// straight is a session manager whose swaps go from one lease manager to the other, with
// contents that go straight.
type straight struct {
	*session.Manager
	l   *launcher
	log *slog.Logger
}

// When a connection is cut.
const (
	cutVariable = "GPUCTL_TEST_CARRIER_CUT"

	never = "never"
	early = "early" // while the application runs
	final = "final" // while it is frozen

	mostEarly = 512 << 10 // bytes
	mostFinal = 16 << 10
)

// cutting returns when the next connection is to be cut.
func (g *straight) cutting() string {
	if c := os.Getenv(cutVariable); c != "" {
		return c
	}
	return []string{never, never, early, final}[rand.N(4)]
}

// Swap implements service.Engine.
func (g *straight) Swap(ctx context.Context, req *gpuctlv1.SwapRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	now, ok := g.l.hosts.current(req.Session)
	if !ok || req.GetTarget().GetRuntime().GetLibrary() == "" {
		return g.Manager.Swap(ctx, req, sink)
	}
	cut, b := g.cutting(), newBreaker()
	if cut == early {
		b.after(rand.Int64N(mostEarly))
	}
	lent, undo, err := g.target(ctx, now, req, b)
	if err != nil {
		return nil, err
	}
	var once sync.Once
	res, err := g.Manager.Swap(ctx, lent, func(p *gpuctlv1.Progress) {
		if cut == final && p.GetStep() == "transfer" {
			once.Do(func() { b.after(rand.Int64N(mostFinal)) })
		}
		sink(p)
	})
	if err != nil || res.GetRefused() || res.GetError() != "" {
		undo()
	}
	if err == nil {
		g.log.Info("swap", "session", req.Session, "straight", res.GetBytesStraight(), "copied", res.GetBytesPrecopied()+res.GetBytesFrozen(), "cut", cut, "detour", res.GetDetour(), "err", res.GetError())
	}
	if err == nil && cut == final && req.GetFailAt() == "" && res.GetRolledBack() {
		// The session went on where it was, and can move by another way.
		return g.Manager.Swap(ctx, req, sink)
	}
	return res, err
}

// target makes a lease on the other manager, connects it with the session's, and returns the
// request for a swap to it.
func (g *straight) target(ctx context.Context, now far, req *gpuctlv1.SwapRequest, b *breaker) (*gpuctlv1.SwapRequest, func(), error) {
	h := g.l.hosts
	to := h.managers[0]
	if now.leases == to {
		to = h.managers[1]
	}
	rt, id, err := g.l.lend(ctx, to, req.Target.Runtime, now.device)
	if err != nil {
		return nil, nil, err
	}
	r := rt.Remote
	h.mu.Lock()
	h.lent[string(r.PeerCertSha256)] = far{leases: to, id: id}
	h.mu.Unlock()
	undo := func() {
		now.leases.EndFetch(now.id)
		h.mu.Lock()
		delete(h.lent, string(r.PeerCertSha256))
		h.mu.Unlock()
		_ = to.EndLease(context.WithoutCancel(ctx), id)
	}
	allowed, err := now.leases.AllowFetch(ctx, &gpuctlv1.AllowFetchRequest{Lease: now.id, PeerCertSha256: r.PeerCertSha256})
	if err == nil {
		var addr string
		if addr, err = b.listen(now.addr); err == nil {
			err = to.Fetch(ctx, &gpuctlv1.FetchRequest{Lease: id, Addresses: []string{addr}, Token: allowed.Token, PeerCertSha256: now.peer})
		}
	}
	if err != nil {
		undo()
		return nil, nil, err
	}
	r.Fetch = allowed.Name
	lent := proto.CloneOf(req)
	lent.Target.Runtime = rt
	return lent, undo, nil
}

// breaker is a proxy for one connection, which can end it after so many bytes more.
type breaker struct {
	mu   sync.Mutex
	left int64 // bytes; below 0: without end
}

func newBreaker() *breaker { return &breaker{left: -1} }

func (b *breaker) after(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = n
}

// take returns how many of n bytes may pass.
func (b *breaker) take(n int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left < 0 {
		return n
	}
	k := min(int64(n), b.left)
	b.left -= k
	return int(k)
}

// listen returns the proxy's address. What comes from to is counted.
func (b *breaker) listen(to string) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	go func() {
		defer l.Close()
		in, err := l.Accept()
		if err != nil {
			return
		}
		defer in.Close()
		out, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		defer out.Close()
		go func() { _, _ = io.Copy(out, in) }()
		buf := make([]byte, 4<<10)
		for {
			n, err := out.Read(buf)
			k := b.take(n)
			if _, werr := in.Write(buf[:k]); err != nil || werr != nil || k < n {
				return
			}
		}
	}()
	return l.Addr().String(), nil
}
