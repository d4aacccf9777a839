package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// flaky is a listener whose accepts fail at first.
type flaky struct {
	net.Listener
	fails int
	after func()
}

func (f *flaky) Accept() (net.Conn, error) {
	if f.fails--; f.fails >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "unix", Err: unix.EMFILE}
	}
	f.after()
	return nil, net.ErrClosed
}

// The process has the contents of a GPU: it does not end because descriptors are scarce for
// a moment.
func TestAcceptThatFailsIsRepeated(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l := &flaky{fails: 2, after: cancel}
	s := &Server{Name: "gpu", Log: slog.New(slog.DiscardHandler)}
	s.accept(ctx, l, &sync.WaitGroup{})
	if l.fails != -1 {
		t.Errorf("it ended with %d failures left", l.fails+1)
	}
}

// The daemon asks while it holds its lock: a process that does not answer must not keep it.
func TestProcessThatDoesNotAnswerIsNotWaitedForWithoutEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path) // nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	over := make(chan error, 1)
	go func() {
		_, err := Client{Socket: path, Within: 50 * time.Millisecond}.List(context.Background())
		over <- err
	}()
	select {
	case err := <-over:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits")
	}
}
