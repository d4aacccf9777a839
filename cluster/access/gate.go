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
)

const (
	recheckEvery = time.Second
	quietFor     = 10 * time.Second
)

// Config is what a Gate needs.
type Config struct {
	Trust  pki.Trust
	Lookup Lookup
	// Local is asked for every request, so that changes act at once.
	Local func() LocalPolicy
	Table map[string]Rule // nil: Table
	Audit *AuditLog       // nil: no trail
	Log   *slog.Logger
	Now   func() time.Time // nil: time.Now
	// Recheck is how often the caller of a stream is looked at; 0: 1 s.
	Recheck time.Duration
	// Refused is told of every refusal, for metrics; it may be nil.
	Refused func(procedure string, code connect.Code)
}

// Gate lets callers through to handlers, or not.
type Gate struct {
	Config

	self    uint32
	quiet   *throttle.Throttle
	calls   counter
	streams counter

	failures window             // of calls that anybody may make, in the trail
	viewers  *throttle.Throttle // their lines in it
}

var _ connect.Interceptor = (*Gate)(nil)

// NewGate makes a Gate.
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

// connection is what a request knows of the connection that it came on.
type connection struct {
	address string
	tls     *tls.Conn
	peer    Peer
	local   bool

	problem error // the kernel did not say who it is

	mu       sync.Mutex
	verified bool
	shown    pki.Peer
}

type connectionKey struct{}

// ConnContext is for an http.Server: requests learn from it who called.
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

// Caller is who made a request, as of now.
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

// shown is whose certificate came with a connection. Its signature is checked
// once; one that does not hold may later, when a clock is set.
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
	// The handshake is over when a request is here.
	p, err := g.Trust.Verify(conn.tls.ConnectionState().PeerCertificates)
	if err == nil {
		conn.shown, conn.verified = p, true
	}
	return p, err
}

// authorize decides on a call, and logs when it is refused.
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
	skipped, ok := g.quiet.Allow(c.Actor() + " " + from + " " + procedure)
	if !ok {
		return
	}
	g.Log.Warn("call refused", "caller", c.String(), "role", roleName(c.Role), "from", c.Address, "procedure", procedure,
		"code", err.Code().String(), "err", err.Message(), "skipped", skipped)
	if c.Kind != Anonymous && g.Table[procedure].Audit {
		g.Audit.Append(g.entry(c, procedure, nil, g.Now(), err))
	}
}

// Middleware refuses before a request's body is read, and bounds what callers
// have under way (LimitsOf). Only procedures may be served behind it: any other
// path is refused, too.
func (g *Gate) Middleware(next http.Handler) http.Handler {
	writer := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := g.authorize(r.Context(), r.URL.Path)
		limits := LimitsOf(c)
		if err == nil {
			var end func()
			if end, err = g.count(&g.calls, c, "calls", limits.Calls); err == nil {
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

// WrapUnary lets a call through.
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

// audited returns what to call when a call has ended; done is false for one
// that panicked.
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

// kept reports whether a call is for the trail, which is not for everybody to fill:
// its oldest lines go. What fails of that which anybody may call counts whoever
// calls, as hosts pass it on for strangers; and who may only look has a line every
// now and then.
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

// WrapStreamingClient changes nothing: a Gate is for handlers.
func (g *Gate) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler lets a stream through, and ends it when its caller may
// no longer have it.
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

// stream looks at its caller with every message, and while there is none.
type stream struct {
	connect.StreamingHandlerConn

	gate      *Gate
	ctx       context.Context // the request's, for as long as it lasts
	procedure string
	cancel    context.CancelFunc
	refusal   atomic.Pointer[connect.Error]
	first     firstMessage
}

// firstMessage is what the caller sent first, for the trail.
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

// Send sends a message to a caller that may still have it.
func (s *stream) Send(m any) error {
	if err := s.check(); err != nil {
		return err
	}
	return s.StreamingHandlerConn.Send(m)
}

// Receive takes a message from a caller that may still send it.
func (s *stream) Receive(m any) error {
	if err := s.StreamingHandlerConn.Receive(m); err != nil {
		return err
	}
	if s.first.p.Load() == nil {
		s.first.p.CompareAndSwap(nil, &m)
	}
	return s.check()
}
