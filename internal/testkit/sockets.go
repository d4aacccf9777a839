package testkit

import (
	"net"
	"path/filepath"
	"testing"
)

// Sockets returns two ends of a connection, which keeps what is written until it is read, as
// net.Pipe does not. The caller closes them.
func Sockets(t testing.TB) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial("unix", l.Addr().String()); err == nil {
		b, err = l.Accept()
	}
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}
