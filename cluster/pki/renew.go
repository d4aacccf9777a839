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

// RenewFunc asks the cluster to sign a request. Request and answers are in DER.
type RenewFunc func(ctx context.Context, csr []byte) (cert, ca []byte, err error)

// RenewerConfig has what a Renewer depends on.
type RenewerConfig struct {
	Dir   Dir
	Renew RenewFunc
	Log   *slog.Logger
	Now   func() time.Time // nil: time.Now
	Poll  time.Duration    // time between two looks at the files and the clock; 0: 3 s
}

// Renewer keeps the certificate of a folder valid. It renews the certificate when a third
// of its lifetime is left, or when its lifetime has not begun, and loads a new one that somebody has put there. It is a
// Provider, so the next handshake uses the new certificate.
type Renewer struct {
	RenewerConfig

	current atomic.Pointer[Material]

	mu      sync.Mutex // held during a step
	stamp   string     // stamp of the files that were read last
	share   float64    // part of the lifetime that is left when the certificate is renewed
	next    time.Time  // no attempt before, after a failure
	set     time.Time  // when next was set
	backoff time.Duration
	unsaved bool // the files of the current material could not be written
}

var _ Provider = (*Renewer)(nil)

// NewRenewer reads the folder. The error wraps fs.ErrNotExist if there is no certificate
// yet.
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

// Current returns the material in use.
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

// Reload reads the folder now, as after SIGHUP. If that fails, the material in use stays.
func (r *Renewer) Reload() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reload()
}

func (r *Renewer) install(m *Material) {
	r.current.Store(m)
	// Random, so that hosts that were set up together do not renew at the same time.
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

// step does what the files and the clock require now.
func (r *Renewer) step(ctx context.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Dir.stamp() != r.stamp {
		if err := r.reload(); err != nil {
			r.Log.Error("changed certificate is not usable; the old one stays in force", "err", err)
		}
	}
	now := r.Now()
	// If the clock was set back, do not wait for next.
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
	if now.Before(p.NotBefore) {
		return true // a clock that was ahead has signed it, as this host's own may have been
	}
	life := p.NotAfter.Sub(p.NotBefore)
	if life > BackDate { // counted from its creation
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
	case !m.Peer.NotAfter.After(was.Peer.NotAfter) && (!now.Before(was.Peer.NotBefore) || m.Peer.Valid(now) != nil):
		return errors.New("the answer does not last longer than what is there")
	}
	// Use it even if this host's clock disagrees, or if it cannot be stored: other hosts
	// check it with their own clocks.
	r.install(m)
	r.next, r.backoff, r.unsaved = time.Time{}, 0, true
	r.Log.Info("certificate is renewed", "identity", m.Peer.ID, "serial", m.Peer.Serial, "expires", m.Peer.NotAfter)
	if err := r.save(); err != nil {
		r.failed(now, "new certificate is in force, but is not stored", err)
	} else if err := m.Peer.Valid(now); err != nil || r.due(now) {
		// Otherwise it would be renewed again at once, and for ever.
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
