package testkit

import (
	"net"
	"path/filepath"
	"testing"
	"time"
)

// OutlastsAccept runs serve on a listener whose accept fails at first, as without descriptors, and fails the test if serve
// ends by that. Accept works again when OutlastsAccept returns. end closes the listener and waits for serve.
func OutlastsAccept(t testing.TB, what string, serve func(*net.UnixListener)) (l *net.UnixListener, end func()) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s")})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); serve(l) }()
	select {
	case <-ended:
		t.Errorf("%s are not served any more", what)
	case <-time.After(200 * time.Millisecond):
	}
	_ = l.SetDeadline(time.Time{})
	return l, func() {
		l.Close()
		<-ended
	}
}
