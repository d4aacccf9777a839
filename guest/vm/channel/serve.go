package channel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/yamux"
)

const (
	headerTimeout = 30 * time.Second
	// guestPatience is how many times longer than the host a guest waits. If the guest
	// closes too early, the host must connect again.
	guestPatience = 3
	mostReopen    = 5 * time.Second // longest interval of looking for a port that does not exist
)

// Serve answers the host's requests with handler until ctx ends; then it returns nil.
// open opens the channel's port, as Port.Open does. It is called again whenever the port
// fails or hangs up, as it does when the VM was migrated. Closing the port must end its
// reads and writes.
func Serve(ctx context.Context, open func(context.Context) (io.ReadWriteCloser, error), handler http.Handler, opts ...Option) error {
	o := gather(opts)
	s := &server{
		log: o.log, deadAfter: guestPatience * o.deadAfter, instance: number(),
		http: &http.Server{Handler: handler, ReadHeaderTimeout: headerTimeout},
	}
	defer s.wg.Wait()
	defer func() { _ = s.http.Close() }()
	retry := leastRetry
	said := ""
	for {
		rw, err := open(ctx)
		if err == nil {
			retry, said = leastRetry, ""
			s.log.Info("channel opened")
			err = s.port(ctx, rw)
			if ctx.Err() == nil {
				s.log.Info("channel hung up", "err", err)
				o.hangUp()
			}
		} else if now := err.Error(); now != said && ctx.Err() == nil {
			s.log.Warn("no channel to the host", "err", err)
			said = now
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(retry):
		}
		retry = min(2*retry, mostReopen)
	}
}

type server struct {
	log       *slog.Logger
	deadAfter time.Duration
	instance  uint64
	http      *http.Server
	wg        sync.WaitGroup
}

// port serves one open port, and returns why it has ended.
func (s *server) port(ctx context.Context, rw io.ReadWriteCloser) error {
	p := newPort(rw)
	quiet, wrote := make(chan struct{}), make(chan struct{})
	var failed sync.Once
	var reason error
	fail := func(err error) {
		failed.Do(func() {
			reason = err
			_ = rw.Close()
		})
	}
	s.wg.Go(func() {
		defer close(wrote)
		if err := p.write(fromGuest, quiet); err != nil {
			fail(err)
		}
	})
	stop := context.AfterFunc(ctx, func() {
		if l := p.current(); l != nil {
			_ = l.Close()
		}
		close(quiet)
		select {
		case <-wrote:
		case <-time.After(lastWords):
		}
		fail(ctx.Err())
	})
	fail(p.read(fromGuest, func(f *frame) { s.frame(p, f) }))
	if l := p.current(); l != nil {
		l.fail(errHungUp)
	}
	if stop() {
		close(quiet)
	}
	<-wrote
	return reason
}

func (s *server) frame(p *port, f *frame) {
	l := p.current()
	switch {
	case l != nil && l.conn == f.conn && l.reason() == nil:
		l.handle(time.Now(), f)
	case l != nil && l.conn == f.conn && f.kind == kindOpen:
		// A connection that has ended cannot begin again: the host must choose a new
		// number.
		p.disown(f.conn)
	case f.kind == kindOpen:
		if err := s.begin(p, f.conn); err != nil {
			s.log.Warn("connection of the host", "err", err)
		}
	case f.kind != kindClose:
		p.disown(f.conn)
	}
}

// begin starts a connection, and ends the former one.
func (s *server) begin(p *port, conn uint64) error {
	l := newLink(conn, fromGuest, s.instance, p.poke)
	mux, err := yamux.Server(l, muxConfig())
	if err != nil {
		return fmt.Errorf("streams: %w", err)
	}
	if before := p.use(l); before != nil {
		before.fail(errReplaced)
	}
	p.poke()
	s.log.Debug("the host connects")
	s.wg.Go(func() { watchSilence(l, s.deadAfter) })
	s.wg.Go(func() {
		err := s.http.Serve(fairListener{mux})
		_ = mux.Close()
		if !errors.Is(err, http.ErrServerClosed) {
			s.log.Debug("the host's connection is over", "reason", l.reason())
		}
	})
	return nil
}
