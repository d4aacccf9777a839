package executor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
)

// Far is the configuration of a far executor.
type Far struct {
	Acceptor remote.Acceptor
	Outage   time.Duration // how long the carrier may be gone; 0: DefaultOutage

	hello remote.Hello // of the carrier that has come
}

// DefaultOutage is how long a carrier may be gone.
const DefaultOutage = 5 * time.Minute

var errOther = errors.New("this lease belongs to another carrier")

// arrival is a connection that has said who it is.
type arrival struct {
	conn  net.Conn
	role  remote.Role
	hello remote.Hello
}

// farServer takes connections for a far executor.
type farServer struct {
	cfg   Config
	first chan remote.Hello // of the first connection

	mu    sync.Mutex
	hello *remote.Hello // nil until the first has come
	s     *session      // nil until it is made
	wait  []arrival
	fetch net.Conn // by which this executor fetches, until the session is made
	ctrl  *carried
	parts remote.Gatherer
	seen  time.Time // when a stream was served last
	live  int       // streams that are served
}

// mainFar runs a far executor. It waits for a carrier, makes memory like the session's, and
// then serves as any executor.
func mainFar(ctx context.Context, cfg Config) error {
	if cfg.Far.Outage <= 0 {
		cfg.Far.Outage = DefaultOutage
	}
	cfg.Far.Acceptor.Parts = arenaParts
	platform, devs, q, err := openRuntime(cfg.Runtime)
	if err != nil {
		return err
	}
	v := &farServer{cfg: cfg, first: make(chan remote.Hello, 1), ctrl: newCarried(), seen: time.Now()}
	files, err := handover.Listen(cfg.FileSocket)
	if err != nil {
		return err
	}
	defer files.Close()
	go func() { _ = handover.Serve(files, v.take) }()
	var hello remote.Hello
	select {
	case hello = <-v.first:
	case <-ctx.Done():
		return nil
	case <-time.After(cfg.Far.Outage):
		return fmt.Errorf("no carrier has come within %v", cfg.Far.Outage)
	}
	cfg.Far.hello, cfg.Generation = hello, hello.Generation
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mem [3]*shm.Region
	for i, size := range []uint64{wire.RingMem, hello.ArenaSize, 0} {
		if mem[i], err = shm.Create([]string{"ring", "arena", "state"}[i], int64(size)); err != nil {
			return err
		}
	}
	far, err := newFarEnd(ctx, mem[0], mem[1], hello, cfg.Logger)
	if err != nil {
		return err
	}
	far.Init(hello.ArenaSize, hello.ArenaSplit)
	s, err := openOn(cfg, mem[0].FD(), mem[1].FD(), mem[2].FD(), platform, devs, q)
	if err != nil {
		return err
	}
	s.ring, s.far, s.host.freed = far, far, far.free
	if s.out, err = captureOutput(far); err != nil {
		return err
	}
	defer s.out.close()
	defer context.AfterFunc(ctx, func() { far.mu.Lock(); far.changed.Broadcast(); far.mu.Unlock() })()
	v.begin(s)
	noTurns, err := s.takeTurns()
	if err != nil {
		return err
	}
	defer noTurns()
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewExecutorServiceHandler(&controller{s: s}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go s.watchEvents()
	go s.pushCallbacks()
	lost := make(chan error, 1)
	go func() { lost <- v.guard(ctx, s) }()
	done := make(chan error, 1)
	go func() { done <- srv.Serve(v.ctrl) }()
	select {
	case err = <-done:
	case err = <-lost:
	case <-ctx.Done():
	case <-s.stop:
		sctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = srv.Shutdown(sctx) // the reply to Retire is still sent
		// The carrier may not have got all that was said before.
		_ = far.commands.Drain(sctx)
	}
	s.closed.Store(true)
	return err
}

// take gets a connection that gpuguest has accepted.
func (v *farServer) take(name string, f *os.File) {
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		v.cfg.Logger.Warn("connection of a carrier", "err", err)
		return
	}
	as, err := remote.ParseHanded(name)
	if err != nil {
		conn.Close()
		v.cfg.Logger.Warn("connection of a carrier", "err", err)
		return
	}
	go func() {
		peer := conn.RemoteAddr()
		var err error
		if as.Role == remote.Fetch {
			err = v.between(conn, as)
		} else {
			var c net.Conn
			var hello remote.Hello
			if c, hello, err = v.cfg.Far.Acceptor.Accept(conn, as.Role); err == nil {
				err = v.admit(arrival{c, as.Role, hello})
			}
		}
		if err != nil {
			v.cfg.Logger.Warn("connection refused", "from", peer, "role", as.Role, "err", err)
		}
	}()
}

// between takes a connection with another far executor.
func (v *farServer) between(conn net.Conn, as remote.Handed) error {
	c, err := v.cfg.Far.Acceptor.Fetch(context.Background(), conn, as)
	if err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case as.Fetching && v.s != nil:
		return v.s.far.fetches.begin(v.s, c)
	case as.Fetching:
		if v.fetch != nil {
			v.fetch.Close()
		}
		v.fetch = c
	case v.s == nil:
		c.Close()
		return fmt.Errorf("no carrier has come, so there is nothing to fetch: %w", ErrState)
	default:
		v.s.far.fetches.out.offer(as.Name, c)
	}
	return nil
}

// admit answers a connection and gives it to what needs it. The carrier that comes first has
// the lease. Its connections wait while the session is made, which may take long.
func (v *farServer) admit(a arrival) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	err := error(nil)
	const most = 16
	switch {
	case v.hello != nil && !v.hello.Same(a.hello):
		err = errOther
	case v.s == nil && len(v.wait) >= most:
		err = fmt.Errorf("%d connections wait already: %w", most, errOther)
	}
	if werr := remote.Answer(a.conn, err); err != nil || werr != nil {
		a.conn.Close()
		return errors.Join(err, werr)
	}
	if v.hello == nil {
		v.hello = &a.hello
		v.first <- a.hello
	}
	if v.s == nil {
		v.wait = append(v.wait, a)
		return nil
	}
	v.serve(a)
	return nil
}

// begin serves the connections that wait, in the order in which they came: a later one takes
// the place of one that was broken meanwhile.
func (v *farServer) begin(s *session) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.s = s
	for _, a := range v.wait {
		v.serve(a)
	}
	v.wait = nil
	if v.fetch != nil {
		if err := s.far.fetches.begin(s, v.fetch); err != nil {
			v.cfg.Logger.Warn("connection refused", "role", remote.Fetch, "err", err)
		}
		v.fetch = nil
	}
}

// serve is called with v.mu.
func (v *farServer) serve(a arrival) {
	far := v.s.far
	if n, ok := a.role.ChunkStream(); ok {
		st := far.chunks[n]
		go v.stream(st, a.conn, func(fr link.Frame) error { return far.chunkFrame(st, fr) })
		return
	}
	switch a.role {
	case remote.Commands:
		go v.stream(far.commands, a.conn, far.command)
	case remote.Bulk:
		go v.stream(far.bulk, a.conn, far.bulkFrame)
	case remote.Part:
		go func() {
			conn, role, err := v.parts.Add(a.conn)
			if err != nil {
				v.cfg.Logger.Warn("connection refused", "role", a.role, "err", err)
			}
			if conn != nil {
				v.mu.Lock()
				defer v.mu.Unlock()
				v.serve(arrival{conn, role, a.hello})
			}
		}()
	case remote.Control:
		v.ctrl.give(a.conn)
	case remote.Import:
		go func() {
			defer a.conn.Close()
			if err := v.s.receive(a.conn, 40); err != nil {
				v.cfg.Logger.Warn("import", "err", err)
			}
		}()
	case remote.State:
		go func() {
			defer a.conn.Close()
			if err := far.state.serve(a.conn, v.s); err != nil {
				v.cfg.Logger.Warn("state", "err", err)
			}
		}()
	case remote.Export:
		far.home.offer(remote.ExportPeer, a.conn)
	}
}

// stream serves one connection of a stream until it breaks.
func (v *farServer) stream(st *link.Stream, conn net.Conn, handle func(link.Frame) error) {
	v.note(1)
	err := st.Serve(v.s.far.ctx, conn, handle)
	v.note(-1)
	if st.Err() != nil {
		v.s.condemn(err)
		v.s.retire()
	}
}

func (v *farServer) note(n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.live += n
	v.seen = time.Now()
}

// guard ends the executor when its carrier is gone for too long.
func (v *farServer) guard(ctx context.Context, s *session) error {
	for ctx.Err() == nil && !s.closed.Load() {
		time.Sleep(100 * time.Millisecond)
		s.mu.Lock()
		if len(s.parked) > 0 && s.active.Load() && !s.gate.Load() {
			s.advance() // a client may have freed a lane that was given up
		}
		s.mu.Unlock()
		v.mu.Lock()
		gone := v.live == 0 && time.Since(v.seen) > v.cfg.Far.Outage
		v.mu.Unlock()
		if gone {
			return fmt.Errorf("the carrier was gone for %v", v.cfg.Far.Outage)
		}
	}
	return nil
}

// carried is a listener for connections that were accepted elsewhere.
type carried struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newCarried() *carried {
	return &carried{conns: make(chan net.Conn, 16), done: make(chan struct{})}
}

func (h *carried) give(c net.Conn) {
	select {
	case h.conns <- c:
	default:
		c.Close()
	}
}

// Accept implements net.Listener.
func (h *carried) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *carried) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

// Addr implements net.Listener.
func (h *carried) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: "carrier"} }
