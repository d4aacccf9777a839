package lease

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// A session that goes from one lease to a lease of another host takes its contents along
// straight: the far executor of the second fetches them from that of the first. Here the
// first is told whom to expect, and the second is connected.

// allowed is a far executor of another host that may connect once. It is kept in memory only:
// after a restart nobody may, and contents go through the application's host.
type allowed struct {
	token remote.Token
	peer  []byte // hash of its certificate
	until time.Time
}

// allowedFor is how long a far executor of another host may take to come.
const allowedFor = 10 * time.Minute

func noLease(id string) error {
	return connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no lease %.40q with a far executor", id))
}

// running returns a lease whose far executor runs.
func (m *Manager) running(ctx context.Context, id string) (*lease, error) {
	m.mu.Lock()
	l := m.leases[id]
	m.mu.Unlock()
	if l == nil {
		return nil, noLease(id)
	}
	select {
	case <-l.made:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	switch {
	case l.err != nil || l.ended():
		return nil, noLease(id)
	case l.req.Plain: // nothing would say who is at the other end
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("lease %s is without TLS", id))
	}
	return l, nil
}

// AllowFetch implements session.Lender.
func (m *Manager) AllowFetch(ctx context.Context, req *gpuctlv1.AllowFetchRequest) (*gpuctlv1.AllowFetchResponse, error) {
	if len(req.PeerCertSha256) != sha256.Size {
		return nil, invalid("lease %.40q: the hash of the other far executor's certificate has %d bytes, not %d", req.Lease, len(req.PeerCertSha256), sha256.Size)
	}
	l, err := m.running(ctx, req.Lease)
	if err != nil {
		return nil, err
	}
	a := &allowed{peer: append([]byte(nil), req.PeerCertSha256...), until: time.Now().Add(allowedFor)}
	_, _ = rand.Read(a.token[:]) // never fails
	m.mu.Lock()
	defer m.mu.Unlock()
	l.fetch = a
	return &gpuctlv1.AllowFetchResponse{Token: a.token[:], Name: remote.FetchName(a.token)}, nil
}

// EndFetch implements session.Lender.
func (m *Manager) EndFetch(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.leases[id]; l != nil {
		l.fetch = nil
	}
}

// Fetch implements session.Lender. The far executor is there before the other host is dialed:
// that one waits for a few seconds only.
func (m *Manager) Fetch(ctx context.Context, req *gpuctlv1.FetchRequest) error {
	switch {
	case len(req.Token) != remote.TokenSize:
		return invalid("lease %.40q: a token of %d bytes", req.Lease, len(req.Token))
	case len(req.PeerCertSha256) != sha256.Size:
		return invalid("lease %.40q: the hash of the other far executor's certificate has %d bytes, not %d", req.Lease, len(req.PeerCertSha256), sha256.Size)
	case len(req.Addresses) == 0 || len(req.Addresses) > mostAddresses:
		return invalid("lease %.40q: %d addresses", req.Lease, len(req.Addresses))
	}
	l, err := m.running(ctx, req.Lease)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, handTimeout)
	defer cancel()
	to, err := m.reach(ctx, l)
	if err != nil {
		return fmt.Errorf("lease %s: %w", req.Lease, err)
	}
	to.Close() // it takes one after the other: a carrier's are not to wait for the other host
	conn, err := dialFetch(ctx, req)
	if err != nil {
		return connect.NewError(connect.CodeUnavailable, fmt.Errorf("lease %s: reach the other far executor: %w", req.Lease, err))
	}
	defer conn.Close()
	if to, err = m.reach(ctx, l); err != nil {
		return fmt.Errorf("lease %s: %w", req.Lease, err)
	}
	return m.give(ctx, l, to, conn, remote.HandFetching(req.PeerCertSha256))
}

const fetchDial = 5 * time.Second // of one address

// dialFetch connects to another host, and says what for.
func dialFetch(ctx context.Context, req *gpuctlv1.FetchRequest) (net.Conn, error) {
	var errs []error
	for _, addr := range req.Addresses {
		conn, err := (&net.Dialer{Timeout: fetchDial}).DialContext(ctx, "tcp", addr)
		if err == nil {
			_ = conn.SetWriteDeadline(time.Now().Add(fetchDial))
			if _, err = conn.Write(remote.Preamble{Role: remote.Fetch, Token: remote.Token(req.Token)}.Append(nil)); err == nil {
				_ = conn.SetWriteDeadline(time.Time{})
				return conn, nil
			}
			conn.Close()
		}
		errs = append(errs, fmt.Errorf("%s: %w", addr, err))
	}
	return nil, errors.Join(errs...)
}
