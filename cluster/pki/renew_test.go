package pki

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// office signs renewals, by its own clock.
type office struct {
	ca   *CA
	id   Identity
	fail error
	ask  int
	now  func() time.Time
}

func (o *office) renew(_ context.Context, csr []byte) ([]byte, []byte, error) {
	o.ask++
	if o.fail != nil {
		return nil, nil, o.fail
	}
	cert, err := o.ca.Sign(csr, o.id, o.now())
	return cert, o.ca.Certificate().Raw, err
}

type clock struct{ time.Time }

func (c *clock) now() time.Time          { return c.Time }
func (c *clock) advance(d time.Duration) { c.Time = c.Add(d) }

func newRenewer(dir string) (*Renewer, *office, *clock) {
	c := &clock{time.Now()}
	o := &office{ca: newCAFor("c1"), id: HostIdentity("h-1", "n1", "", ""), now: c.now}
	d := NewDir(dir)
	if err := errors.Join(d.SaveCA(o.ca), d.Save(issue(o.ca, o.id))); err != nil {
		panic(err)
	}
	return must(NewRenewer(RenewerConfig{Dir: d, Renew: o.renew, Log: quietLog(), Now: c.now})), o, c
}

func TestRenewalAtAThird(t *testing.T) {
	r, o, c := newRenewer(t.TempDir())
	first := r.Current().Peer
	for range 18 { // days
		c.advance(24 * time.Hour)
		r.step(t.Context())
	}
	if o.ask != 0 {
		t.Fatalf("renewed after %s", c.Sub(first.NotBefore))
	}
	for range 4 {
		c.advance(24 * time.Hour)
		r.step(t.Context())
	}
	if o.ask != 1 || r.Current().Peer.Serial == first.Serial {
		t.Fatalf("asked %d times", o.ask)
	}
	if m := must(r.Dir.Load()); m.Peer.Serial != r.Current().Peer.Serial {
		t.Error("it is not stored")
	}
	if samePublic(r.Current().Certificate.Leaf.PublicKey, must(NewKey()).Public()) {
		t.Error("keys are all the same")
	}
	if got := must(Trust{Provider: r, Now: c.now}.ServerConfig().GetCertificate(nil)); got.Leaf.SerialNumber.Text(16) != r.Current().Peer.Serial {
		t.Error("TLS has the old one")
	}
}

func TestShortLives(t *testing.T) {
	r, o, c := newRenewer(t.TempDir())
	o.id.Lifetime = 3 * time.Minute
	if err := r.Dir.Save(issueAt(o.ca, o.id, c.Add(Lifetime))); err != nil {
		t.Fatal(err)
	}
	c.advance(Lifetime)
	for range 600 { // ten minutes
		c.advance(time.Second)
		r.step(t.Context())
		if err := r.Current().Peer.Valid(c.Time); err != nil {
			t.Fatal(err)
		}
	}
	if o.ask < 4 || o.ask > 6 {
		t.Errorf("renewed %d times", o.ask)
	}
}

func TestAFailedRenewalKeepsTheOldOneAndTriesAgain(t *testing.T) {
	r, o, c := newRenewer(t.TempDir())
	first := r.Current().Peer.Serial
	o.fail = errors.New("no leader")
	c.advance(25 * 24 * time.Hour)
	for range 3600 { // an hour
		c.advance(time.Second)
		r.step(t.Context())
	}
	if o.ask < 8 || o.ask > 30 {
		t.Errorf("asked %d times in an hour", o.ask)
	}
	if r.Current().Peer.Serial != first {
		t.Fatal("the old one is gone")
	}
	c.advance(10 * 24 * time.Hour) // it expires, and is renewed all the same
	o.fail = nil
	r.step(t.Context())
	if r.Current().Peer.Serial == first {
		t.Error("it does not come back")
	}
}

func TestAnswersThatAreNotTaken(t *testing.T) {
	for name, spoil := range map[string]func(*office){
		"another authority": func(o *office) { o.ca = newCAFor("c1") },
		"another cluster":   func(o *office) { o.ca = newCAFor("c2") },
		"another host":      func(o *office) { o.id = HostIdentity("h-2", "n1", "", "") },
		"a user":            func(o *office) { o.id = Identity{ID: "h-1", Role: admin} },
		"shorter":           func(o *office) { o.id.Lifetime = time.Hour },
	} {
		r, o, c := newRenewer(t.TempDir())
		first := r.Current().Peer.Serial
		spoil(o)
		c.advance(25 * 24 * time.Hour)
		r.step(t.Context())
		if o.ask != 1 || r.Current().Peer.Serial != first {
			t.Errorf("%s: taken", name)
		}
	}
}

// Whatever the clock here does, renewals stay few and a certificate stays.
func TestClockJumps(t *testing.T) {
	root := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(root, "x")
		if err != nil {
			t.Fatal(err)
		}
		r, o, c := newRenewer(dir)
		steady := c.Time // the office's clock goes on by a second a step
		o.now = func() time.Time { return steady }
		steps := rapid.IntRange(1, 25).Draw(t, "steps")
		jumps := 0
		for range steps {
			d := time.Second
			if rapid.IntRange(0, 9).Draw(t, "jump") == 0 {
				d = time.Duration(rapid.Int64Range(-400, 400).Draw(t, "days")) * 24 * time.Hour
				jumps++
			}
			c.advance(d)
			steady = steady.Add(time.Second)
			r.step(t.Context())
			if r.Current() == nil || r.Current().Peer.NotAfter.Before(steady) {
				t.Fatal("no certificate that others take")
			}
		}
		if limit := 6*jumps + 1; o.ask > limit {
			t.Fatalf("%d renewals for %d jumps", o.ask, jumps)
		}
		// The clock is set right again: nothing keeps a renewal away for long.
		c.Time = r.Current().Peer.NotAfter.Add(-time.Hour)
		steady = c.Time
		before := r.Current().Peer.Serial
		for range 12 {
			c.advance(time.Minute)
			steady = c.Time
			r.step(t.Context())
		}
		if r.Current().Peer.Serial == before {
			t.Fatal("not renewed")
		}
	})
}

// TestACertificateFromTheFutureIsReplaced: a host signs its next certificate itself. If its clock was
// ahead then, nobody would take the certificate once the clock is right, until that time.
func TestACertificateFromTheFutureIsReplaced(t *testing.T) {
	for _, ahead := range []time.Duration{25 * 24 * time.Hour, 400 * 24 * time.Hour, -400 * 24 * time.Hour} {
		r, o, c := newRenewer(t.TempDir())
		c.advance(ahead)
		r.step(t.Context())
		c.advance(-ahead)
		for range 20 { // minutes
			c.advance(time.Minute)
			r.step(t.Context())
		}
		if err := r.Current().Peer.Valid(c.Time); err != nil {
			t.Errorf("the clock was ahead by %v: %v", ahead, err)
		}
		if err := must(r.Dir.Load()).Peer.Valid(c.Time); err != nil {
			t.Errorf("the clock was ahead by %v: stored is: %v", ahead, err)
		}
		if o.ask > 4 {
			t.Errorf("the clock was ahead by %v: %d renewals", ahead, o.ask)
		}
	}
}

func TestFilesThatChangeAreTaken(t *testing.T) {
	r, o, _ := newRenewer(t.TempDir())
	first := r.Current().Peer.Serial
	os.WriteFile(r.Dir.file("node.crt"), []byte("half"), 0o600)
	r.step(t.Context())
	if r.Current().Peer.Serial != first {
		t.Fatal("a damaged one is taken")
	}
	if err := r.Reload(); !errors.Is(err, ErrDamaged) {
		t.Error(err)
	}
	m := issue(o.ca, o.id)
	if err := r.Dir.Save(m); err != nil {
		t.Fatal(err)
	}
	r.step(t.Context())
	if r.Current().Peer.Serial != m.Peer.Serial {
		t.Error("the new one is not taken")
	}
	if err := r.Dir.Save(issue(newCAFor("c2"), HostIdentity("h-9", "", "", ""))); err != nil {
		t.Fatal(err)
	}
	if err := r.Reload(); !errors.Is(err, ErrMismatch) {
		t.Error(err)
	}
	if r.Current().Peer.Serial != m.Peer.Serial {
		t.Error("somebody else's is taken")
	}
}

func TestARenewedCertificateIsStoredWhenThatWorksAgain(t *testing.T) {
	r, o, c := newRenewer(filepath.Join(t.TempDir(), "pki"))
	first := r.Current().Peer.Serial
	// Where the next key would be written, there is a folder with something in it.
	block := filepath.Join(r.Dir.path, "node.key.next")
	if err := os.MkdirAll(filepath.Join(block, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	c.advance(25 * 24 * time.Hour)
	r.step(t.Context())
	if r.Current().Peer.Serial == first {
		t.Fatal("not in force")
	}
	if err := os.RemoveAll(block); err != nil {
		t.Fatal(err)
	}
	if must(r.Dir.Load()).Peer.Serial != first {
		t.Fatal("it could be stored")
	}
	c.advance(time.Minute)
	r.step(t.Context())
	if must(r.Dir.Load()).Peer.Serial != r.Current().Peer.Serial || o.ask != 1 {
		t.Errorf("not stored, or asked %d times", o.ask)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	r, _, _ := newRenewer(t.TempDir())
	r.Poll = time.Millisecond
	now, steps := r.Now, make(chan struct{}, 1)
	r.Now = func() time.Time {
		select {
		case steps <- struct{}{}:
		default:
		}
		return now()
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() { r.Run(ctx) })
	for range 3 {
		<-steps
	}
	cancel()
	wait.Wait()
}
