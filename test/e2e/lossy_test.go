package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/test/lossy"
	"github.com/gpuctl/gpuctl/test/rig"
)

// longVariable makes the tests over a bad network long: see make bad-network.
const longVariable = "GPUCTL_TEST_BAD_NETWORK"

// startLossy starts a rig whose carriers reach their GPUs over a bad network: hostd and all
// that it starts are in one namespace, and the far executors' connections end in another.
// carriers is how: see test/rig/carried.
func startLossy(t *testing.T, carriers string, q lossy.Quality, env ...string) (*rig.Rig, *lossy.Link) {
	t.Helper()
	l, err := lossy.New(q)
	if errors.Is(err, lossy.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	dir, err := os.MkdirTemp("", "gx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r, err := rig.StartOver(t.Context(), l, rig.Options{Dir: dir, Carriers: carriers, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.Cut(false)
		r.Close()
		if t.Failed() {
			t.Logf("packets: %+v\nlog of hostd:\n%s\nlog of gpuguest:\n%s", l.Counts(), tail(r.Log(), 16<<10), tail(r.GuestLog(), 16<<10))
		}
	})
	return r, l
}

// cutFor cuts the link for some time while something is under way.
func cutFor(t *testing.T, l *lossy.Link, d time.Duration) {
	t.Helper()
	before := l.Counts().Cut
	l.Cut(true)
	defer l.Cut(false)
	testkit.Until(t, "a packet that the cut has lost", func() error { return testkit.Want(l.Counts().Cut > before, l.Counts()) })
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// TestResultsOverABadNetwork computes, and swaps, over a network that loses, delays and
// reorders packets, and that is cut in between. The results are those of a native run.
func TestResultsOverABadNetwork(t *testing.T) {
	q, cut, kinds := lossy.Quality{Loss: 0.01, Delay: 300 * time.Microsecond, Jitter: 300 * time.Microsecond, Reorder: 0.02}, 2*time.Second, map[string][]string{"mapped": {"--mapped"}}
	if os.Getenv(longVariable) != "" {
		q, cut, kinds = lossy.Quality{Loss: 0.03, Delay: 5 * time.Millisecond, Jitter: 5 * time.Millisecond, Reorder: 0.05}, 30*time.Second, variants
	}
	r, l := startLossy(t, "tls", q)
	for name, args := range kinds {
		t.Run(name, func(t *testing.T) {
			s := launchStream(t, r, rig.Basic, append([]string{"--kib", "256", "--buffers", "2"}, args...)...)
			s.until(t, "iteration 2 ")
			cutFor(t, l, cut)
			s.more(t, 2)
			swap(t, r, rig.Pthread)
			s.more(t, 1)
			s.verify(t)
		})
	}
	if c := l.Counts(); c.Lost == 0 || c.Overtaken == 0 || c.Cut == 0 {
		t.Errorf("the network was too good: %+v", c)
	}
}

// TestCompressedConnectionsCompute computes, and swaps between remote and local GPUs, with
// everything compressed that can be.
func TestCompressedConnectionsCompute(t *testing.T) {
	t.Setenv(rig.CarrierVariable, "zstd")
	r := start(t)
	s := launchStream(t, r, rig.Basic, "--kib", "256", "--buffers", "2", "--mapped")
	s.until(t, "iteration 2 ")
	type traffic struct{ Plain, Compressed, CompressedTo uint64 }
	testkit.Until(t, "both directions are counted", func() error { // gpuguest asks for the counts now and then
		out, err := r.Gpuctl(t.Context(), "-o", "json", "describe", "session")
		if err != nil {
			return err
		}
		var v struct {
			To   traffic `json:"to_far"`
			From traffic `json:"from_far"`
		}
		if err := json.Unmarshal(bytes.ReplaceAll(out, []byte("compressed_to"), []byte("CompressedTo")), &v); err != nil {
			t.Fatal(err)
		}
		counted := func(x traffic) bool {
			return x.Plain > 0 && x.Compressed > 0 && x.CompressedTo > 0 && x.CompressedTo < x.Compressed
		}
		return testkit.Want(counted(v.To) && counted(v.From), string(out))
	})
	for _, gpu := range []string{rig.Pthread, rig.Basic} {
		swap(t, r, gpu)
		s.more(t, 1)
	}
	s.verify(t)
}

// TestSessionEndsWithAReasonWhenTheNetworkIsGone waits until a silent connection counts as
// broken, which takes 15 s.
func TestSessionEndsWithAReasonWhenTheNetworkIsGone(t *testing.T) {
	if os.Getenv(longVariable) == "" {
		t.Skipf("it takes half a minute: set %s", longVariable)
	}
	t.Setenv("GPUCTL_TEST_CARRIER_OUTAGE", "2s")
	r, l := startLossy(t, "tls", lossy.Quality{Delay: time.Millisecond})
	s := launchStream(t, r, rig.Basic, "--kib", "64", "--buffers", "2")
	s.until(t, "iteration 2 ")
	l.Cut(true)
	if err := s.wait(t); err == nil {
		t.Errorf("it ended as if nothing had been: %s", s.output())
	}
	const reason = "no connection to the far host for 2s"
	testkit.Until(t, fmt.Sprintf("%q in gpuguest's log", reason), func() error {
		text := r.GuestLog()
		return testkit.Want(strings.Contains(text, reason), tail(text, 2048))
	})
}
