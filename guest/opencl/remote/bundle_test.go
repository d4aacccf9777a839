package remote

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// bundles returns both ends of a bundle. Its parts come to the far end in another order.
func bundles(t *testing.T) (near, far *bundle) {
	t.Helper()
	var g Gatherer
	near = &bundle{}
	type made struct {
		conn net.Conn
		role Role
		err  error
	}
	came := make(chan made, bundleParts)
	ends := make([]net.Conn, bundleParts)
	for i := range ends {
		a, b := net.Pipe()
		t.Cleanup(func() { a.Close(); b.Close() })
		near.conns, ends[i] = append(near.conns, a), b
	}
	for _, i := range []int{2, 0, 3, 1} {
		go func() {
			conn, role, err := g.Add(ends[i])
			came <- made{conn, role, err}
		}()
		p := part{bundle: [12]byte{7}, role: Export, number: uint8(i), of: bundleParts}
		if _, err := near.conns[i].Write(p.bytes()); err != nil {
			t.Fatal(err)
		}
		m := <-came
		if m.err != nil || (m.conn != nil) != (i == 1) {
			t.Fatal(i, m)
		}
		if m.conn != nil {
			if far, _ = m.conn.(*bundle); m.role != Export {
				t.Errorf("role %v", m.role)
			}
		}
	}
	return near, far
}

// Whatever the pieces in which they are written and read, bytes come in their order, both ways.
func TestBundleIsOneStream(t *testing.T) {
	near, far := bundles(t)
	r := rand.New(rand.NewPCG(1, 2))
	want := make([]byte, 9<<20+17)
	for i := range want {
		want[i] = byte(r.Uint32())
	}
	for name, ends := range map[string][2]net.Conn{"there": {near, far}, "back": {far, near}} {
		wrote := make(chan error, 1)
		go func() {
			for b := want; len(b) > 0; {
				n := min(len(b), 1+r.IntN(3*stripe))
				v := net.Buffers{b[:n/3], b[n/3 : n]}
				w, _ := ends[0].(*bundle)
				if k, err := w.WriteBuffers(&v); err != nil || int(k) != n {
					wrote <- errors.Join(err, io.ErrShortWrite)
					return
				}
				b = b[n:]
			}
			wrote <- nil
		}()
		got := make([]byte, len(want))
		s := rand.New(rand.NewPCG(3, 4))
		for b := got; len(b) > 0; {
			n, err := ends[1].Read(b[:min(len(b), 1+s.IntN(4*stripe))])
			if err != nil {
				t.Fatal(name, err)
			}
			b = b[n:]
		}
		if err := <-wrote; err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v, or other bytes came", name, err)
		}
	}
}

// A connection that breaks ends the whole bundle at both ends, also for who waits on another
// one.
func TestBundleBreaksAsAWhole(t *testing.T) {
	near, far := bundles(t)
	failed := make(chan error, 1)
	go func() {
		_, err := io.ReadFull(far, make([]byte, 4*stripe))
		failed <- err
	}()
	testkit.Parked(t, "remote.(*bundle).do", 1)
	near.conns[2].Close()
	if err := <-failed; err == nil {
		t.Error("bytes were read that nobody has sent")
	}
	if _, err := near.Write(make([]byte, 4*stripe)); err == nil {
		t.Error("it can still be written")
	}
}

func TestPartsThatFitNoBundle(t *testing.T) {
	var g Gatherer
	add := func(p part) error {
		a, b := net.Pipe()
		defer a.Close()
		got := make(chan error, 1)
		go func() { _, _, err := g.Add(b); got <- err }()
		_ = a.SetDeadline(time.Now().Add(time.Minute))
		_, _ = a.Write(p.bytes())
		return <-got
	}
	good := part{bundle: [12]byte{1}, role: Import, number: 0, of: 3}
	if err := add(good); err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]part{
		"twice":             good,
		"another number":    {bundle: good.bundle, role: Import, number: 1, of: 4},
		"another role":      {bundle: good.bundle, role: Export, number: 1, of: 3},
		"a role of streams": {bundle: [12]byte{2}, role: Commands, number: 1, of: 3},
		"too many":          {bundle: [12]byte{2}, role: Import, number: 1, of: bundleParts + 1},
		"one":               {bundle: [12]byte{2}, role: Import, number: 0, of: 1},
		"beyond":            {bundle: [12]byte{2}, role: Import, number: 3, of: 3},
	} {
		if err := add(p); !errors.Is(err, ErrPreamble) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for i := range mostBundles - 1 {
		if err := add(part{bundle: [12]byte{3, byte(i)}, role: Import, of: 2}); err != nil {
			t.Fatal(err)
		}
	}
	if err := add(part{bundle: [12]byte{4}, role: Import, of: 2}); !errors.Is(err, ErrPreamble) {
		t.Errorf("one more bundle that is not complete: %v", err)
	}
}

func FuzzPart(f *testing.F) {
	f.Add(part{bundle: [12]byte{1}, role: Import, number: 1, of: 4}.bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := parsePart(b)
		if err == nil && (!bytes.Equal(p.bytes(), b) || p.number >= p.of || p.of > bundleParts) {
			t.Errorf("%x is %+v", b, p)
		}
	})
}
