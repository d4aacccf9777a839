package libvirthook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

// Event is one call of libvirt's hook.
type Event = wire.Event

// Answer is the reply to an event.
type Answer = wire.Answer

// Handler decides about events. If it returns an error, the operation is refused. The
// error's text is shown to the operator, so it names the device, the owner and what to do
// next, in one line. For operations that cannot be refused, the error is only logged.
//
// Several events may arrive at the same time, even of one domain, and events may be
// repeated.
type Handler interface {
	Hook(ctx context.Context, e Event) (Answer, error)
}

// HandlerFunc makes a Handler of a function.
type HandlerFunc func(ctx context.Context, e Event) (Answer, error)

// Hook calls f.
func (f HandlerFunc) Hook(ctx context.Context, e Event) (Answer, error) { return f(ctx, e) }

// Outcome is the result of one event.
type Outcome struct {
	Driver, Operation string
	Status            wire.Status
	Took              time.Duration // from the request to the answer
	Err               error         // the Handler's error
}

const (
	requestTime = 5 * time.Second // limit for the hook to send its request
	answerTime  = 5 * time.Second // limit for the hook to read the answer
	lastWord    = 200 * time.Millisecond
	// atOnce limits the requests that are served at the same time. libvirtd has about
	// twenty worker threads.
	atOnce = 64
)

// Defaults returns the deadlines of the operations. Binding and resetting devices takes
// seconds. Operations that only notify hostd must not delay libvirtd.
func Defaults() map[string]time.Duration {
	long, brief := 30*time.Second, 10*time.Second
	return map[string]time.Duration{
		wire.Prepare: long, wire.Start: long, wire.Migrate: long, wire.Restore: long,
		wire.Started: brief, wire.Stopped: brief, wire.Release: brief, wire.Reconnect: brief, wire.Attach: brief,
	}
}

// Option is an option of New.
type Option func(*Server)

// WithDeadline sets the deadline of an operation.
func WithDeadline(operation string, d time.Duration) Option {
	return func(s *Server) { s.deadlines[operation] = d }
}

// WithObserver makes the server call f at the end of each event, for metrics. f must not
// block.
func WithObserver(f func(Outcome)) Option { return func(s *Server) { s.observe = f } }

// WithUser permits another user beside root to call: for tests, and for a hostd and a
// libvirtd that run as the same user.
func WithUser(uid int) Option { return func(s *Server) { s.users[uid] = true } }

// WithLog sets the log. Without it, the server logs nothing.
func WithLog(l *slog.Logger) Option { return func(s *Server) { s.log = l } }

// Server answers the requests of hooks.
type Server struct {
	handler   Handler
	deadlines map[string]time.Duration
	users     map[int]bool
	observe   func(Outcome)
	log       *slog.Logger
	slots     chan struct{}
}

// New returns a server that asks h for decisions.
func New(h Handler, options ...Option) *Server {
	s := &Server{
		handler: h, deadlines: maps.Clone(Defaults()), users: map[int]bool{0: true}, observe: func(Outcome) {},
		log: slog.New(slog.DiscardHandler), slots: make(chan struct{}, atOnce),
	}
	for _, o := range options {
		o(s)
	}
	return s
}

// Listen opens the socket in a run folder. Only root may connect.
func Listen(dir string) (*net.UnixListener, error) {
	l, err := rundir.Listen(filepath.Join(dir, wire.SocketName))
	if err != nil {
		return nil, fmt.Errorf("hook: %w", err)
	}
	return l, nil
}

// Serve answers requests until ctx ends. Then it waits for those in progress, whose
// contexts have ended as well. It closes the listener.
func (s *Server) Serve(ctx context.Context, l *net.UnixListener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer l.Close()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		conn, err := l.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("hook: %w", err)
		case err != nil: // out of file descriptors, or the caller has left before it was accepted
			s.log.Warn("a hook could not be accepted", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		wg.Go(func() {
			defer conn.Close()
			s.serve(ctx, conn, &wg)
		})
	}
}

func (s *Server) serve(ctx context.Context, conn *net.UnixConn, wg *sync.WaitGroup) {
	uid, err := wire.PeerUID(conn)
	if err != nil || !s.users[int(uid)] {
		s.log.Warn("a hook that is not root's was turned away", "uid", uid, "err", err)
		return
	}
	_ = conn.SetReadDeadline(time.Now().Add(requestTime))
	req, err := wire.ReadRequest(conn)
	if err != nil {
		if !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // without a request, the connection only tested whether hostd listens
			s.log.Warn("a hook's request can't be read", "err", err)
		}
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	res := wire.Response{Status: wire.Done, Version: cmdutil.Version()}
	if !req.Ping {
		res = s.event(ctx, conn, req, wg)
	}
	_ = conn.SetWriteDeadline(time.Now().Add(answerTime))
	if err := wire.WriteResponse(conn, res); err != nil {
		s.log.Warn("a hook did not take its answer", "err", err)
	}
}

type result struct {
	answer Answer
	err    error
}

// event calls the Handler. At the deadline it answers without the Handler's decision.
func (s *Server) event(ctx context.Context, conn net.Conn, req wire.Request, wg *sync.WaitGroup) wire.Response {
	began := time.Now()
	e := req.Event
	log := s.log.With("driver", e.Driver, "vm", e.Domain, "operation", e.Operation)
	end := func(res wire.Response, err error) wire.Response {
		took := time.Since(began)
		operation := e.Operation
		if _, ok := s.deadlines[operation]; !ok {
			operation = "other" // labels of metrics are from a bounded set
		}
		s.observe(Outcome{Driver: e.Driver, Operation: operation, Status: res.Status, Took: took, Err: err})
		level := slog.LevelInfo
		if res.Status != wire.Done {
			level = slog.LevelWarn
		}
		log.Log(ctx, level, "hook", "status", string(res.Status), "took", took, "err", err)
		return res
	}
	if !wire.Known(e.Driver, e.Operation) {
		return end(wire.Response{Status: wire.Done}, nil) // an operation that only newer versions of libvirt have
	}
	limit := s.deadlines[e.Operation]
	if req.Budget > 0 {
		limit = min(limit, req.Budget)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	gone := make(chan struct{})
	wg.Go(func() { // the hook sends nothing after its request, so this returns when it closes the connection
		defer close(gone)
		_, _ = conn.Read(make([]byte, 1))
		cancel()
	})
	defer func() { // ends the read; the connection stays open for the answer
		_ = conn.SetReadDeadline(time.Unix(1, 0))
		<-gone
	}()
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return end(wire.Response{Status: wire.Unready, Message: "it has too many calls of the hook to do"}, ctx.Err())
	}
	done := make(chan result, 1)
	wg.Go(func() {
		defer func() { <-s.slots }()
		answer, err := s.handler.Hook(ctx, e)
		done <- result{answer, err}
	})
	var r result
	select {
	case r = <-done:
	case <-ctx.Done():
		select {
		case r = <-done:
		case <-time.After(lastWord):
			return end(wire.Response{Status: wire.Late, Message: fmt.Sprintf("%s of %s after %v", e.Operation, e.Domain, limit)}, ctx.Err())
		}
	}
	switch {
	case r.err != nil && ctx.Err() != nil && errors.Is(r.err, ctx.Err()):
		return end(wire.Response{Status: wire.Late, Message: r.err.Error()}, r.err)
	case r.err != nil:
		return end(wire.Response{Status: wire.Denied, Message: r.err.Error()}, r.err)
	case len(r.answer.XML) > wire.MaxXML:
		err := fmt.Errorf("the new XML has %d bytes, more than %d", len(r.answer.XML), wire.MaxXML)
		return end(wire.Response{Status: wire.Denied, Message: err.Error()}, err)
	case !e.Filters():
		r.answer.XML = nil
	}
	return end(wire.Response{Status: wire.Done, XML: r.answer.XML}, nil)
}
