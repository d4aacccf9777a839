package handover_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/handover"
)

func TestFileIsHandedOver(t *testing.T) {
	dir, err := os.MkdirTemp("", "ho") // short, because a socket's path must be
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "f")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket})
	if err != nil {
		t.Fatal(err)
	}
	type handed struct {
		name string
		f    *os.File
	}
	got := make(chan handed, 1)
	over := make(chan error)
	go func() { over <- handover.Serve(l, func(name string, f *os.File) { got <- handed{name, f} }) }()
	dial := func() *net.UnixConn {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket})
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	f, err := os.Create(filepath.Join(dir, "state"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	name := strings.Repeat("/x", 300)
	for range 2 {
		if err := handover.Give(t.Context(), dial(), name, f); err != nil {
			t.Fatal(err)
		}
		h := <-got
		if _, err := h.f.WriteString("x"); err != nil || h.name != name {
			t.Error(h.name, err)
		}
		h.f.Close()
	}
	if b, err := os.ReadFile(f.Name()); string(b) != "xx" {
		t.Errorf("%q, %v", b, err)
	}
	if handover.Give(t.Context(), dial(), "", f) == nil || handover.Give(t.Context(), dial(), strings.Repeat("x", 5000), f) == nil {
		t.Error("any name will do")
	}
	// A message without a file is refused, and the next one is served.
	conn := dial()
	if _, err := conn.Write([]byte{1, 0, 'x'}); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && err == nil {
		t.Error("a name without a file was taken")
	}
	conn.Close()
	if err := handover.Give(t.Context(), dial(), name, f); err != nil {
		t.Error(err)
	}
	(<-got).f.Close()
	// An accept that fails, as without descriptors, does not end it.
	if err := l.SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-over:
		t.Fatal("it has ended: ", err)
	case <-time.After(100 * time.Millisecond):
	}
	if err := l.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	if err := handover.Give(t.Context(), dial(), name, f); err != nil {
		t.Error(err)
	}
	(<-got).f.Close()
	// The name of a carrier's connection is its token.
	conn = dial()
	conn.Close()
	if err := handover.Give(t.Context(), conn, "secret", f); err == nil || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
	l.Close()
	if err := <-over; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}
