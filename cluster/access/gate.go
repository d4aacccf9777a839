package access

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/pki/throttle"
	"github.com/gpuctl/gpuctl/internal/excerpt"
)

const (
	recheckEvery = time.Second
	quietFor     = 10 * time.Second
)

// Config has what a Gate depends on, and its settings.
type Config struct {
	Trust  pki.Trust
	Lookup Lookup
	// Local is called for each request, so that changes take effect at once.
	Local func() LocalPolicy
	Table map[string]Rule // nil: Table
	Audit *AuditLog       // nil: no audit trail
	Log   *slog.Logger
	Now   func() time.Time // nil: time.Now
	// Recheck is the time between two checks of a stream's caller; 0: 1 s.
	Recheck time.Duration
	// Refused is called for each refusal, for metrics. It may be nil.
	Refused func(procedure string, code connect.Code)
}

// Gate admits callers to handlers, or refuses them.
type Gate struct {
	Config

	self    uint32
	quiet   *throttle.Throttle
	calls   counter
	streams counter

	failures window             // limits failures, in the trail, of calls that anybody may make
	viewers  *throttle.Throttle // limits lines of viewers in the trail
}

var _ connect.Interceptor = (*Gate)(nil)

// NewGate returns a Gate.
func NewGate(c Config) *Gate {
	if c.Table == nil {
		c.Table = Table()
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Recheck == 0 {
		c.Recheck = recheckEvery
	}
	if c.Local == nil {
		c.Local = func() LocalPolicy { return LocalPolicy{} }
	}
	return &Gate{Config: c, self: uint32(os.Geteuid()), quiet: throttle.New(quietFor, c.Now), viewers: throttle.New(quietFor, c.Now)}
}

// connection is stored in the context of each request on a connection.
type connection struct {
	address string
	tls     *tls.Conn
	peer    Peer
	local   bool

	problem error // why the kernel has not reported the peer

	mu       sync.Mutex
	verified bool
	shown    pki.Peer
}

type connectionKey struct{}

// ConnContext is for http.Server.ConnContext: it adds the caller's identity to the
// requests' context.
func (g *Gate) ConnContext(ctx context.Context, c net.Conn) context.Context {
	conn := &connection{address: c.RemoteAddr().String()}
	if counted, ok := c.(interface{ Unwrap() *net.UnixConn }); ok {
		c = counted.Unwrap()
	}
	switch c := c.(type) {
	case *tls.Conn:
		conn.tls = c
	case *net.UnixConn:
		var err error
		if conn.peer, err = PeerOf(c); err != nil {
			conn.problem = err
			break
		}
		conn.local, conn.address = true, "local"
	}
	return context.WithValue(ctx, connectionKey{}, conn)
}

// Caller returns who made a request, with its present role.
func (g *Gate) Caller(ctx context.Context) Caller {
	conn, ok := ctx.Value(connectionKey{}).(*connection)
	if !ok {
		return Caller{Kind: Anonymous, Problem: errors.New("the connection of the request is not known")}
	}
	if conn.local {
		c := FromPeer(conn.peer, g.self, g.Local())
		c.Address = conn.address
		return c
	}
	shown, err := g.shown(conn)
	var c Caller
	if err == nil {
		c, err = FromTLS(shown, g.Lookup)
	}
	if err != nil {
		c = Caller{Kind: Anonymous, Problem: err}
	}
	c.Address = conn.address
	return c
}

// shown returns the owner of a connection's certificate. The signature is verified only
// once. A certificate that is not valid yet may become valid later, for example when a
// clock is set.
func (g *Gate) shown(conn *connection) (pki.Peer, error) {
	switch {
	case conn.problem != nil:
		return pki.Peer{}, conn.problem
	case conn.tls == nil:
		return pki.Peer{}, pki.ErrNoCertificate
	}
	conn.mu.Lock()
	defer conn.mu.Unlock()
	if conn.verified {
		return conn.shown, g.Trust.Check(conn.shown)
	}
	// The handshake is complete when the first request arrives.
	p, err := g.Trust.Verify(conn.tls.ConnectionState().PeerCertificates)
	if err == nil {
		conn.shown, conn.verified = p, true
	}
	return p, err
}

// authorize decides about a call, and logs a refusal.
func (g *Gate) authorize(ctx context.Context, procedure string) (Caller, *connect.Error) {
	c := g.Caller(ctx)
	err := decide(g.Table, c, procedure)
	if err != nil {
		g.refused(c, procedure, err)
	}
	return c, err
}

func (g *Gate) refused(c Caller, procedure string, err *connect.Error) {
	if g.Refused != nil {
		g.Refused(procedure, err.Code())
	}
	from := c.Address
	if host, _, err := net.SplitHostPort(from); err == nil {
		from = host
	}
	about := procedure
	if _, known := g.Table[procedure]; !known {
		about = "" // or each name that somebody makes up would have a line of its own
	}
	skipped, ok := g.quiet.Allow(c.Actor() + " " + from + " " + about)
	if !ok {
		return
	}
	g.Log.Warn("call refused", "caller", c.String(), "role", roleName(c.Role), "from", c.Address, "procedure", excerpt.Of(procedure, maxText),
		"code", err.Code().String(), "err", excerpt.Of(err.Message(), 4*maxText), "skipped", skipped)
	if c.Kind != Anonymous && g.Table[procedure].Audit {
		g.Audit.Append(g.entry(c, procedure, nil, g.Now(), err))
	}
}

// Middleware refuses requests before their body is read, and limits how many calls a
// caller has in progress (see LimitsOf). It refuses all paths that are not a procedure of
// the table.
func (g *Gate) Middleware(next http.Handler) http.Handler {
	writer := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := g.authorize(r.Context(), r.URL.Path)
		limits := LimitsOf(c)
		if err == nil {
			var end func()
			if err = compressed(r); err == nil {
				end, err = g.count(&g.calls, c, "calls", limits.Calls)
			}
			if err == nil {
				defer end()
				restrict(w, r, limits)
				next.ServeHTTP(w, r)
				return
			}
			g.refused(c, r.URL.Path, err)
		}
		if writer.IsSupported(r) {
			_ = writer.Write(w, r, err)
			return
		}
		status := http.StatusForbidden
		if err.Code() == connect.CodeUnauthenticated {
			status = http.StatusUnauthorized
		}
		http.Error(w, err.Message(), status)
	})
}

// WrapUnary authorizes a call, and records it in the trail.
func (g *Gate) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if req.Spec().IsClient {
			return next(ctx, req)
		}
		procedure := req.Spec().Procedure
		c, refusal := g.authorize(ctx, procedure)
		if refusal != nil {
			return nil, refusal
		}
		began := g.Now()
		ended := g.audited(c, procedure, began)
		var res connect.AnyResponse
		var err error
		done := false
		defer func() { ended(req.Any(), err, done) }()
		res, err = next(WithCaller(ctx, c), req)
		done = true
		return res, err
	}
}

// audited returns a function to call when a call has ended. done is false if the handler
// panicked.
func (g *Gate) audited(c Caller, procedure string, began time.Time) func(message any, err error, done bool) {
	if !g.Table[procedure].Audit {
		return func(any, error, bool) {}
	}
	return func(message any, err error, done bool) {
		if !done {
			err = connect.NewError(connect.CodeInternal, errors.New("the handler panicked"))
		}
		if !g.kept(c, procedure, err) {
			return
		}
		m, _ := message.(proto.Message)
		g.Audit.Append(g.entry(c, procedure, m, began, err))
	}
}

// kept reports whether a call gets a line in the trail. Some calls are limited, so that
// nobody can push out the oldest lines by many calls: failures of procedures that anybody
// may call have one limit for all callers, because hosts forward them for anonymous
// callers. Calls of viewers get a line only now and then.
func (g *Gate) kept(c Caller, procedure string, err error) bool {
	rule := g.Table[procedure]
	switch {
	case err != nil && rule.Kinds&Anonymous != 0:
		return g.failures.allow(g.Now())
	case c.Kind == User && rule.Role == clusterv1.Role_ROLE_VIEWER:
		_, ok := g.viewers.Allow(c.key() + " " + procedure)
		return ok
	}
	return true
}

// WrapStreamingClient returns next: a Gate is for handlers.
func (g *Gate) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler authorizes a stream, and ends it when its caller loses the right
// to it.
func (g *Gate) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		procedure := conn.Spec().Procedure
		c, refusal := g.authorize(ctx, procedure)
		if refusal != nil {
			return refusal
		}
		end, refusal := g.count(&g.streams, c, "streams", LimitsOf(c).Streams)
		if refusal != nil {
			g.refused(c, procedure, refusal)
			return refusal
		}
		defer end()
		inner, cancel := context.WithCancel(WithCaller(ctx, c))
		s := &stream{StreamingHandlerConn: conn, gate: g, ctx: ctx, procedure: procedure, cancel: cancel}
		var watch sync.WaitGroup
		watch.Go(func() { s.watch(inner) })
		ended := g.audited(c, procedure, g.Now())
		var err error
		done := false
		defer func() {
			cancel()
			watch.Wait()
			ended(s.first.Load(), err, done)
		}()
		err = next(inner, s)
		if refusal := s.refusal.Load(); refusal != nil {
			err = refusal
		}
		done = true
		return err
	}
}

// stream checks its caller at each message, and periodically.
type stream struct {
	connect.StreamingHandlerConn

	gate      *Gate
	ctx       context.Context // context of the request
	procedure string
	cancel    context.CancelFunc
	refusal   atomic.Pointer[connect.Error]
	first     firstMessage
}

// firstMessage is the first message that the caller has sent, for the trail.
type firstMessage struct {
	p atomic.Pointer[any]
}

func (f *firstMessage) Load() any {
	if p := f.p.Load(); p != nil {
		return *p
	}
	return nil
}

func (s *stream) check() error {
	if refusal := s.refusal.Load(); refusal != nil {
		return refusal
	}
	if _, refusal := s.gate.authorize(s.ctx, s.procedure); refusal != nil {
		s.refusal.CompareAndSwap(nil, refusal)
		s.cancel()
		return refusal
	}
	return nil
}

func (s *stream) watch(ctx context.Context) {
	tick := time.NewTicker(s.gate.Recheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if s.check() != nil {
				return
			}
		}
	}
}

// Send checks the caller and sends a message.
func (s *stream) Send(m any) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.StreamingHandlerConn.Send(m)
}

// Receive receives a message and checks the caller.
func (s *stream) Receive(m any) error {
	if err := s.StreamingHandlerConn.Receive(m); err != nil {
		return err
	}
	if s.first.p.Load() == nil {
		s.first.p.CompareAndSwap(nil, &m)
	}
	return s.check()
}
