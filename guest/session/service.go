package session

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// engineName is the name of this engine in the API.
const engineName = "portable"

// The least and the most time for loading a runtime. In between, the limit follows the
// times measured in this VM or on this host.
const (
	leastLoad = 20 * time.Second
	mostLoad  = 3 * time.Minute
)

// loading runs do, which loads a runtime, within that limit.
func (m *Manager) loading(ctx context.Context, library string, do func(context.Context) error) error {
	limit := m.loads.Limit(library)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err := do(ctx)
	switch {
	case err == nil:
		m.loads.Took(library, time.Since(began))
	case time.Since(began) >= limit:
		m.loads.Missed(library, limit)
	}
	return err
}

// Has reports whether this manager has the session.
func (m *Manager) Has(session string) bool {
	_, err := m.lookup(session)
	return err == nil
}

// List returns the sessions, oldest first, with what they use now.
func (m *Manager) List(ctx context.Context) []*gpuctlv1.Session {
	m.refreshAll(ctx)
	var out []*gpuctlv1.Session
	for _, s := range m.list() {
		out = append(out, s.snapshot())
	}
	return out
}

// Lost returns the sessions that were lost, also those whose applications have ended since.
func (m *Manager) Lost() []*gpuctlv1.LostSession { return m.losses.All() }

// Serves reports whether an executor can use the target.
func (m *Manager) Serves(target *gpuctlv1.Target) bool { return checkTarget(target) == nil }

// Offer sets the target for the applications that connect with the offer's token.
func (m *Manager) Offer(_ context.Context, o *gpuctlv1.OfferRequest) error { return m.offer(o) }

// Withdraw removes the offer. Running sessions stay.
func (m *Manager) Withdraw(_ context.Context, token string) error { return m.withdraw(token) }

// Lender lends GPUs of this host to sessions of others.
type Lender interface {
	// Lend starts a far executor. A lease that is already there, with an equal request, is
	// returned again.
	Lend(ctx context.Context, req *gpuctlv1.LendRequest) (*gpuctlv1.LendResponse, error)
	// EndLease ends a lease and forgets it. It does nothing if there is no such lease.
	EndLease(ctx context.Context, id string) error
	// AllowFetch lets the far executor of another host fetch the contents of a lease's
	// session, once. EndFetch takes that back.
	AllowFetch(ctx context.Context, req *gpuctlv1.AllowFetchRequest) (*gpuctlv1.AllowFetchResponse, error)
	EndFetch(id string)
	// Fetch connects the far executor of a lease to that of another host.
	Fetch(ctx context.Context, req *gpuctlv1.FetchRequest) error
	// Leases returns all leases, oldest first.
	Leases() []*gpuctlv1.Lease
	// Sharers returns the far executors that take turns with sessions on their GPUs.
	Sharers() []Sharer
}

// Lend starts a far executor, if this gpuguest lends GPUs.
func (m *Manager) Lend(ctx context.Context, req *gpuctlv1.LendRequest) (*gpuctlv1.LendResponse, error) {
	if m.cfg.Lender == nil {
		return nil, errNoLender()
	}
	return m.cfg.Lender.Lend(ctx, req)
}

// EndLease ends a lease and forgets it.
func (m *Manager) EndLease(ctx context.Context, id string) error {
	if m.cfg.Lender == nil {
		return errNoLender()
	}
	return m.cfg.Lender.EndLease(ctx, id)
}

// AllowFetch lets the far executor of another host fetch the contents of a lease's session.
func (m *Manager) AllowFetch(ctx context.Context, req *gpuctlv1.AllowFetchRequest) (*gpuctlv1.AllowFetchResponse, error) {
	if m.cfg.Lender == nil {
		return nil, errNoLender()
	}
	return m.cfg.Lender.AllowFetch(ctx, req)
}

// EndFetch takes back what AllowFetch has allowed.
func (m *Manager) EndFetch(id string) error {
	if m.cfg.Lender == nil {
		return errNoLender()
	}
	m.cfg.Lender.EndFetch(id)
	return nil
}

// Fetch connects the far executor of a lease to that of another host.
func (m *Manager) Fetch(ctx context.Context, req *gpuctlv1.FetchRequest) error {
	if m.cfg.Lender == nil {
		return errNoLender()
	}
	return m.cfg.Lender.Fetch(ctx, req)
}

// Leases returns all leases, oldest first.
func (m *Manager) Leases() ([]*gpuctlv1.Lease, error) {
	if m.cfg.Lender == nil {
		return nil, errNoLender()
	}
	return m.cfg.Lender.Leases(), nil
}

func errNoLender() error {
	return connect.NewError(connect.CodeUnimplemented, errors.New("this gpuguest lends no GPUs: start it with --lend"))
}

// Probe starts a short-lived executor and returns the devices that it finds.
func (m *Manager) Probe(ctx context.Context, runtime *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
	var resp *gpuctlv1.ProbeResponse
	err := m.loading(ctx, runtime.GetLibrary(), func(ctx context.Context) (err error) {
		resp, err = m.cfg.Launcher.Probe(ctx, runtime)
		return err
	})
	return resp, err
}

// Warm starts in advance what a probe, and the next executors, will need.
func (m *Manager) Warm(ctx context.Context, runtime *gpuctlv1.Runtime) error {
	return m.loading(ctx, runtime.GetLibrary(), func(ctx context.Context) error { return m.warm(ctx, runtime) })
}
