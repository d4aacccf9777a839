package unixrpc

import (
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// listenAs opens a socket as another user, if this one may, and says who the
// caller is to be for whom the server is foreign.
func listenAs(t *testing.T, socket string, uid int) (l net.Listener, caller uint32) {
	t.Helper()
	caller = uint32(os.Geteuid())
	if caller != 0 {
		uid = int(caller)
		caller++
	}
	runtime.LockOSThread() // the thread alone is another user
	defer runtime.UnlockOSThread()
	keep := ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); errno != 0 {
		t.Fatal(errno)
	}
	l, err := net.Listen("unix", socket)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(os.Getuid()), keep); errno != 0 {
		panic(errno)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, caller
}

func TestNothingIsSentToAServerOfAnotherUser(t *testing.T) {
	dir := t.TempDir()
	for path, mode := range map[string]os.FileMode{dir: 0o777, filepath.Dir(dir): 0o755} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(dir, "s")
	l, caller := listenAs(t, socket, 65534)
	heard := make(chan int, 2)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n, _ := c.Read(make([]byte, 64))
			heard <- n
			c.Close()
		}
	}()
	if _, err := dial(t.Context(), socket, caller); !errors.Is(err, ErrForeign) {
		t.Errorf("dialled: %v", err)
	}
	if n := <-heard; n != 0 {
		t.Errorf("%d bytes were sent", n)
	}
	if os.Geteuid() == 0 {
		c := Client(socket)
		defer c.CloseIdleConnections()
		_, err := c.Post("http://host/", "text/plain", strings.NewReader("gpuctl-join-v1.secret"))
		if !errors.Is(err, ErrForeign) {
			t.Errorf("sent: %v", err)
		}
		if n := <-heard; n != 0 {
			t.Errorf("%d bytes were sent", n)
		}
	}
}

func TestServersOfOneUserAndOfRootAreSpokenTo(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := Server(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), nil)
	defer server.Close()
	go server.Serve(l)
	c := Client(socket)
	defer c.CloseIdleConnections()
	res, err := c.Get("http://host/")
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if os.Geteuid() == 0 { // who is not root trusts root
		conn, err := dial(t.Context(), socket, 4242)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
}
