package carrier

import (
	"net"
	"path/filepath"
	"testing"
	"time"
)

// A carrier that has no descriptor left for a moment takes contents afterwards as before.
func TestCarrierThatCouldNotAcceptTakesContentsLater(t *testing.T) {
	c := newCarrier(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s")})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.SetDeadline(time.Unix(1, 0)); err != nil { // accept fails, as without descriptors
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); c.serveImports(l) }()
	select {
	case <-ended:
		t.Error("contents are not taken any more")
	case <-time.After(200 * time.Millisecond):
	}
	l.Close()
	<-ended
}
