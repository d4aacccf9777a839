package channel

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/hashicorp/yamux"
)

// Over is the host's side of a connection that loses nothing, such as a vchan:
// a client of what ServeOver serves at the other end. Closing closes the
// connection.
func Over(conn net.Conn) (*http.Client, io.Closer, error) {
	mux, err := hostMux(conn)
	if err != nil {
		return nil, nil, fmt.Errorf("streams over %s: %w", conn.RemoteAddr(), err)
	}
	t := newTransport(func(context.Context) (net.Conn, error) { return mux.Open() })
	return newHTTP(t), overCloser{t, mux}, nil
}

type overCloser struct {
	t   *http.Transport
	mux *yamux.Session
}

func (c overCloser) Close() error {
	c.t.CloseIdleConnections()
	return c.mux.Close()
}

// ServeOver answers the host's requests with handler until the connection ends.
// It closes it.
func ServeOver(conn net.Conn, handler http.Handler) error {
	mux, err := yamux.Server(conn, muxConfig())
	if err != nil {
		return fmt.Errorf("streams over %s: %w", conn.RemoteAddr(), err)
	}
	defer func() { _ = mux.Close() }()
	s := &http.Server{Handler: handler, ReadHeaderTimeout: headerTimeout}
	defer func() { _ = s.Close() }()
	return s.Serve(mux)
}
