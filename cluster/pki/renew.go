package pki

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

const (
	pollEvery  = 3 * time.Second
	minBackoff = 5 * time.Second
	maxBackoff = 10 * time.Minute
	renewLimit = 30 * time.Second
)

// RenewFunc asks the cluster to sign a request; both answers are DER.
type RenewFunc func(ctx context.Context, csr []byte) (cert, ca []byte, err error)

// RenewerConfig is what a Renewer needs.
type RenewerConfig struct {
	Dir   Dir
	Renew RenewFunc
	Log   *slog.Logger
	Now   func() time.Time // nil: time.Now
	Poll  time.Duration    // how often it looks at files and clock; 0: 3 s
}

// Renewer keeps the certificate of a folder in force: it renews it when a third
// of its life is left, and takes a new one that somebody put there. Who uses
// it as Provider gets the new one with the next handshake.
type Renewer struct {
	RenewerConfig

	current atomic.Pointer[Material]

	mu      sync.Mutex // one step at a time
	stamp   string     // of the files that were read last
	share   float64    // of its life that is left when the certificate is renewed
	next    time.Time  // not before, after a failure
	set     time.Time  // when next was set
	backoff time.Duration
	unsaved bool // the files could not be written
}

var _ Provider = (*Renewer)(nil)

// NewRenewer reads the folder. An error that wraps fs.ErrNotExist says that
// there is nothing to renew yet.
func NewRenewer(c RenewerConfig) (*Renewer, error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Poll == 0 {
		c.Poll = pollEvery
	}
	r := &Renewer{RenewerConfig: c}
	r.stamp = c.Dir.stamp()
	m, err := c.Dir.Load()
	if err != nil {
		return nil, err
	}
	r.install(m)
	return r, nil
}

// Current is the material in force.
func (r *Renewer) Current() *Material { return r.current.Load() }

// Run renews and reloads until ctx ends.
func (r *Renewer) Run(ctx context.Context) {
	tick := time.NewTicker(r.Poll)
	defer tick.Stop()
	for {
		r.step(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Reload reads the folder now, as after SIGHUP. When it cannot, the material
// in force stays.
func (r *Renewer) Reload() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reload()
}

func (r *Renewer) install(m *Material) {
	r.current.Store(m)
	// Not all hosts that were set up together at once.
	r.share = (1 + 0.2*(rand.Float64()-0.5)) / 3 //nolint:gosec // only to spread load
}

func (r *Renewer) reload() error {
	r.stamp = r.Dir.stamp()
	m, err := r.Dir.Load()
	if err != nil {
		return err
	}
	was := r.Current()
	switch {
	case m.Peer.Cluster != was.Peer.Cluster || m.Peer.ID != was.Peer.ID || m.Peer.Kind != was.Peer.Kind:
		return fmt.Errorf("folder %s: %w: %s of cluster %s, and this is %s of cluster %s; restart to become another",
			r.Dir.path, ErrMismatch, m.Peer, m.Peer.Cluster, was.Peer, was.Peer.Cluster)
	case !bytes.Equal(m.CA.Raw, was.CA.Raw):
		return fmt.Errorf("folder %s: %w: another authority; restart to take it", r.Dir.path, ErrMismatch)
	case bytes.Equal(m.Certificate.Leaf.Raw, was.Certificate.Leaf.Raw):
		return nil
	}
	r.install(m)
	r.unsaved, r.next, r.backoff = false, time.Time{}, 0
	r.Log.Info("certificate was replaced", "identity", m.Peer.ID, "serial", m.Peer.Serial, "expires", m.Peer.NotAfter)
	return nil
}

// step does what the files and the clock ask for now.
func (r *Renewer) step(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Dir.stamp() != r.stamp {
		if err := r.reload(); err != nil {
			r.Log.Error("changed certificate is not usable; the old one stays in force", "err", err)
		}
	}
	now := r.Now()
	// A clock that was set back must not keep the next attempt away.
	if now.Before(r.next) && !now.Before(r.set) {
		return
	}
	if r.unsaved {
		if err := r.save(); err != nil {
			r.failed(now, "new certificate is in force, but is not stored", err)
			return
		}
	}
	if !r.due(now) {
		return
	}
	if err := r.renew(ctx, now); err != nil && ctx.Err() == nil {
		r.failed(now, "certificate is not renewed; the old one stays in force", err)
	}
}

func (r *Renewer) due(now time.Time) bool {
	p := r.Current().Peer
	life := p.NotAfter.Sub(p.NotBefore)
	if life > BackDate { // from its making on
		life -= BackDate
	}
	return p.NotAfter.Sub(now) < time.Duration(float64(life)*r.share)
}

func (r *Renewer) failed(now time.Time, message string, err error) {
	r.backoff = min(max(2*r.backoff, minBackoff), maxBackoff)
	r.set = now
	r.next = now.Add(time.Duration(float64(r.backoff) * (0.75 + rand.Float64()/2))) //nolint:gosec // only to spread load
	p := r.Current().Peer
	r.Log.Warn(message, "err", err, "identity", p.ID, "expires", p.NotAfter, "retry_in", r.backoff)
}

func (r *Renewer) renew(ctx context.Context, now time.Time) error {
	key, err := NewKey()
	if err != nil {
		return err
	}
	csr, err := NewRequest(key)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	cert, ca, err := r.Renew(ctx, csr)
	if err != nil {
		return err
	}
	m, err := NewMaterial(cert, ca, key)
	if err != nil {
		return err
	}
	was := r.Current()
	switch {
	case !bytes.Equal(m.CA.Raw, was.CA.Raw):
		return fmt.Errorf("%w: the answer comes with another authority", ErrUntrusted)
	case m.Peer.ID != was.Peer.ID || m.Peer.Kind != was.Peer.Kind:
		return fmt.Errorf("%w: the answer is a certificate of %s", ErrMismatch, m.Peer)
	case m.Peer.Enrolment != was.Peer.Enrolment:
		return fmt.Errorf("%w: the answer is of enrolment %q, not %q: others would not accept it", ErrMismatch, m.Peer.Enrolment, was.Peer.Enrolment)
	case !m.Peer.NotAfter.After(was.Peer.NotAfter):
		return errors.New("the answer does not last longer than what is there")
	}
	// In force even if the clock here disagrees or it cannot be stored: others
	// judge it by their clocks.
	r.install(m)
	r.next, r.backoff, r.unsaved = time.Time{}, 0, true
	r.Log.Info("certificate is renewed", "identity", m.Peer.ID, "serial", m.Peer.Serial, "expires", m.Peer.NotAfter)
	if err := r.save(); err != nil {
		r.failed(now, "new certificate is in force, but is not stored", err)
	} else if err := m.Peer.Valid(now); err != nil || r.due(now) {
		// It would be renewed again at once, and forever.
		r.failed(now, "new certificate is not new by the clock here: set the clock", err)
	}
	return nil
}

func (r *Renewer) save() error {
	if err := r.Dir.Save(r.Current()); err != nil {
		return err
	}
	r.unsaved, r.stamp = false, r.Dir.stamp()
	return nil
}
