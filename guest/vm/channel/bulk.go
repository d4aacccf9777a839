package channel

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/hashicorp/yamux"
)

// Over returns a client for the server that ServeOver runs at the other end of a reliable
// connection, such as a vchan. Closing the io.Closer closes the connection.
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

// ServeOver answers the host's requests on a reliable connection with handler, until the
// connection ends. Then it closes it.
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
