package platform

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/mdlayher/vsock"
)

// Over vsock of this machine, which few have: the lab runs it. Who does not answer is not waited
// for longer than the call.
func TestDialVsockOfThisMachine(t *testing.T) {
	l, err := vsock.ListenContextID(vsock.Local, 0, nil)
	if err != nil {
		t.Skipf("no vsock_loopback: %v", err)
	}
	defer l.Close()
	port := l.Addr().(*vsock.Addr).Port
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = conn.Write([]byte("hello"))
			conn.Close()
		}
	}()
	conn, err := dialVsock(t.Context(), vsock.Local, port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if text, err := io.ReadAll(conn); string(text) != "hello" {
		t.Errorf("%q, %v", text, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if conn, err := dialVsock(ended, vsock.Local, port); err == nil {
		conn.Close() // it was quicker
	} else if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
