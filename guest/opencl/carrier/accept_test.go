package carrier

import (
	"net"
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// A carrier that has no descriptor left for a moment takes contents afterwards as before.
func TestCarrierThatCouldNotAcceptTakesContentsLater(t *testing.T) {
	c := newCarrier(t)
	_, end := testkit.OutlastsAccept(t, "contents", func(l *net.UnixListener) { c.serveImports(l) })
	end()
}
