package remote

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// pair returns both ends of a connection, as sockets.
func pair(t *testing.T, exact bool) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	a, b = newSocket(c, true, exact), newSocket(d, false, exact)
	if _, ok := a.(*socket); !ok {
		t.Fatalf("%T is no socket", a)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// Pieces of all sizes, more than the kernel takes at once, arrive as they were.
func TestSocketCarriesPieces(t *testing.T) {
	for _, exact := range []bool{false, true} {
		a, b := pair(t, exact)
		var v net.Buffers
		for i := range 3000 {
			v = append(v, bytes.Repeat([]byte{byte(i)}, i*7%5000))
		}
		v = append(v, bytes.Repeat([]byte{9}, 9<<20), nil, []byte("end"))
		want := bytes.Join(v, nil)
		sent := make(chan error, 1)
		go func() {
			n, err := a.(*socket).WriteBuffers(&v)
			if err == nil && n != int64(len(want)) {
				err = io.ErrShortWrite
			}
			sent <- err
		}()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("exact %v: other bytes: %v", exact, err)
		}
		if err := <-sent; err != nil {
			t.Error(err)
		}
	}
}

// A reader that waits for many bytes gets few, too, if no more come.
func TestSocketDoesNotWaitForMore(t *testing.T) {
	a, b := pair(t, true)
	if _, err := a.Write([]byte("few")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<20)
	if n, err := b.Read(buf); err != nil || n != 3 {
		t.Error(n, err)
	}
	got := make(chan error, 1)
	go func() {
		n, err := b.Read(buf)
		if err == nil && n != 4 {
			err = io.ErrUnexpectedEOF
		}
		got <- err
	}()
	testkit.Until(t, "the reader's wish for many bytes", func() error {
		n, err := unix.GetsockoptInt(b.(*socket).fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT)
		return errors.Join(err, testkit.Want(n > 1, n, "bytes"))
	})
	if _, err := a.Write([]byte("more")); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
}

func TestSocketClosesUnderItsReaderAndWriter(t *testing.T) {
	a, b := pair(t, false)
	ended := make(chan error, 2)
	go func() { _, err := a.Read(make([]byte, 1)); ended <- err }()
	go func() { _, err := a.Write(make([]byte, 64<<20)); ended <- err }()
	if _, err := io.ReadFull(b, make([]byte, 1<<16)); err != nil { // the writer is at work
		t.Fatal(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-ended; err == nil {
			t.Error("it goes on after the end")
		}
	}
	if err := a.Close(); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	if _, err := a.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

func TestSocketKeepsDeadlines(t *testing.T) {
	a, _ := pair(t, false)
	if err := a.SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if _, err := a.Write(make([]byte, 64<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if err := a.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { _, err := a.Read(make([]byte, 1)); ended <- err }()
	if err := a.SetReadDeadline(time.Unix(1, 0)); err != nil { // of a reader that may sleep
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}
