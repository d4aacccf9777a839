package sessions

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"slices"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
)

// A session that goes from one remote GPU to another takes its contents along straight, if the
// two hosts that lend reach each other. This host asks both, before the swap begins. Where
// that fails, contents go through this host, and the swap says why.

const (
	// fetchFor is how long a far executor of another host may take to come. gpuguest has the
	// same limit.
	fetchFor = 10 * time.Minute
	// reachFor limits the attempt to reach another host's port for carriers.
	reachFor = 2 * time.Second
)

// straight prepares that contents go straight from the session's GPU to the target, which
// has the operation's lease. It returns why they don't; empty: they do, or the way has
// nothing to do with it.
func (h *Host) straight(ctx context.Context, op *operation, s *gpuctlv1.Session, target *gpuctlv1.Target) string {
	h.mu.Lock()
	from, to := h.leaseOf(s), h.borrowed[op.Lease]
	onGPU := h.onGPU(s)
	h.mu.Unlock()
	r := target.GetRuntime().GetRemote()
	if from == nil || to == nil || r == nil || !onGPU {
		return ""
	}
	source, err := hex.DecodeString(from.Peer) // this process has encoded it
	if err != nil {
		return err.Error()
	}
	allowed, err := h.Cluster.AllowFetch(ctx, from.Host, &clusterv1.AllowFetchRequest{Lease: from.ID, CertificateSha256: r.GetPeerCertSha256()})
	if err == nil {
		err = h.Cluster.Fetch(ctx, to.Host, &clusterv1.FetchRequest{Lease: to.ID, Host: from.Host, Token: allowed.GetToken(), CertificateSha256: source})
	}
	if err == nil {
		r.Fetch = allowed.GetName()
		return ""
	}
	h.Log.Info("contents go through this host", "session", op.Session, "from", from.Host, "to", to.Host, "err", err)
	h.work.Go(func() {
		if err := h.Cluster.EndFetch(h.ctx, from.Host, from.ID); err != nil && h.ctx.Err() == nil {
			h.Log.Debug("a fetch that does not come ends by itself", "lease", from.ID, "host", from.Host, "err", err)
		}
	})
	return plain(err).Error()
}

// goesStraight reports whether contents could go straight from a session's GPU to a
// placement.
func (h *Host) goesStraight(ctx context.Context, s *gpuctlv1.Session, to placement) bool {
	h.mu.Lock()
	from := h.leaseOf(s)
	onGPU := h.onGPU(s)
	h.mu.Unlock()
	if from == nil || !to.far() || !onGPU {
		return false
	}
	if _, err := h.Cluster.AllowFetch(ctx, from.Host, &clusterv1.AllowFetchRequest{Lease: from.ID, Check: true}); err != nil {
		h.Log.Debug("contents would go through this host", "session", s.GetId(), "err", err)
		return false
	}
	if err := h.Cluster.Fetch(ctx, hostOf(to[0].GetId()), &clusterv1.FetchRequest{Host: from.Host, Check: true}); err != nil {
		h.Log.Debug("contents would go through this host", "session", s.GetId(), "err", err)
		return false
	}
	return true
}

// lentBy returns a lease of the host that asks. The log must still have assigned its GPUs.
func (h *Host) lentBy(ctx context.Context, borrower clusterapi.Self, id string) (*lent, error) {
	h.mu.Lock()
	l := h.lent[id]
	h.mu.Unlock()
	switch {
	case l == nil:
		return nil, fmt.Errorf("lease %.40q: %w", id, errNotFound)
	case l.Borrower != borrower.ID:
		return nil, fmt.Errorf("lease %s: %w: it is of host %s", id, errDenied, l.Host)
	case l.VM != nil:
		return nil, fmt.Errorf("lease %s: %w: contents of a VM's session go through the VM", id, errInvalid)
	case l.Server != "":
		return nil, fmt.Errorf("lease %s: %w: a service VM has its GPU: contents go through the application's host", id, errInvalid)
	}
	if _, err := h.Cluster.Assigned(ctx, l.Claim, l.Borrower, l.GPUs, l.Token, true); err != nil {
		return nil, fmt.Errorf("lease %s: %w", id, err)
	}
	return l, nil
}

// AllowFetch implements clusterapi.Lender.
func (h *Host) AllowFetch(ctx context.Context, borrower clusterapi.Self, r *clusterv1.AllowFetchRequest) (*clusterv1.AllowFetchResponse, error) {
	if n := len(r.GetCertificateSha256()); n != sha256.Size && !r.GetCheck() {
		return nil, fmt.Errorf("%w: lease %.40q: hash of %d bytes, not %d", errInvalid, r.GetLease(), n, sha256.Size)
	}
	l, err := h.lentBy(ctx, borrower, r.GetLease())
	if err != nil || r.GetCheck() {
		return &clusterv1.AllowFetchResponse{}, err
	}
	res, err := h.Guest.AllowFetch(ctx, connect.NewRequest(&gpuctlv1.AllowFetchRequest{Lease: l.ID, PeerCertSha256: r.GetCertificateSha256()}))
	if err != nil {
		return nil, fmt.Errorf("lease %s: %w", l.ID, plain(err))
	}
	hash := sha256.Sum256(res.Msg.GetToken())
	h.mu.Lock()
	defer h.mu.Unlock()
	l.fetch, l.fetchUntil = hash[:], time.Now().Add(fetchFor)
	h.Log.Info("contents may be fetched", "lease", l.ID, "claim", l.Claim, "host", l.Host)
	return &clusterv1.AllowFetchResponse{Token: res.Msg.GetToken(), Name: res.Msg.GetName()}, nil
}

// EndFetch implements clusterapi.Lender.
func (h *Host) EndFetch(ctx context.Context, borrower clusterapi.Self, lease string) error {
	h.mu.Lock()
	l := h.lent[lease]
	if l != nil && l.Borrower == borrower.ID {
		l.fetch = nil
	}
	h.mu.Unlock()
	switch {
	case l == nil:
		return nil
	case l.Borrower != borrower.ID:
		return fmt.Errorf("lease %s: %w: it is of host %s", lease, errDenied, l.Host)
	}
	if _, err := h.Guest.EndFetch(ctx, connect.NewRequest(&gpuctlv1.EndFetchOfLeaseRequest{Lease: l.ID})); err != nil {
		return fmt.Errorf("lease %s: %w", l.ID, plain(err))
	}
	return nil
}

// Fetch implements clusterapi.Lender. The host that asks says which host, and the cluster
// where that is: so nobody can make this host connect to any other address.
func (h *Host) Fetch(ctx context.Context, borrower clusterapi.Self, r *clusterv1.FetchRequest) error {
	address, err := h.Cluster.LendsAt(r.GetHost())
	if err != nil {
		return err
	}
	if r.GetCheck() {
		conn, err := (&net.Dialer{Timeout: reachFor}).DialContext(ctx, "tcp", address)
		if err != nil {
			return fmt.Errorf("reach host %s: %w", r.GetHost(), err)
		}
		return conn.Close()
	}
	l, err := h.lentBy(ctx, borrower, r.GetLease())
	if err != nil {
		return err
	}
	if _, err := h.Guest.Fetch(ctx, connect.NewRequest(&gpuctlv1.FetchRequest{
		Lease: l.ID, Addresses: []string{address}, Token: slices.Clone(r.GetToken()), PeerCertSha256: r.GetCertificateSha256(),
	})); err != nil {
		return fmt.Errorf("lease %s: %w", l.ID, plain(err))
	}
	return nil
}
