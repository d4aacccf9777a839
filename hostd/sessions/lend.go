package sessions

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/internal/reason"
)

var errDenied = reason.New(reason.Denied, "denied")

const (
	maxLent      = 1024 // leases at a time
	maxLentHost  = 256  // of them, for one host
	maxLeaseName = 32
	maxOutage    = time.Hour
	startTimeout = time.Minute // for a service VM to start a far executor
)

// lent is a lease of this host: a far executor that serves a session of another host.
type lent struct {
	ID       string   `json:"id"`
	Claim    string   `json:"claim"`
	Borrower string   `json:"borrower"` // id of the host that borrows
	Host     string   `json:"host"`     // its name
	GPUs     []string `json:"gpus"`     // names on this host
	Amount   uint64   `json:"amount"`   // of each GPU, bytes; 0: whole GPUs
	Token    uint64   `json:"token"`    // fencing token of the assignments
	Peer     []byte   `json:"peer"`     // hash of the carrier's certificate
	Outage   int64    `json:"outage"`   // ms
	// Secret is the hash of the token that the carrier shows.
	Secret []byte `json:"secret,omitempty"`
	VM     *forVM `json:"vm,omitempty"`     // nil: it is for a session of the host that borrows
	Server string `json:"server,omitempty"` // service VM that has the GPUs, by its UUID; empty: this host
	Ended  bool   `json:"ended,omitempty"`  // its far executor is to be ended, whatever the log says

	// fetch is the hash of the token with which another host's far executor may fetch until
	// then. It is in no journal: after a restart nobody may.
	fetch      []byte
	fetchUntil time.Time
}

var _ clusterapi.Lender = (*Host)(nil)

func checkLease(r *clusterv1.LendRequest) error {
	id := r.GetLease()
	bad := strings.TrimLeft(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") != ""
	switch {
	case id == "" || len(id) > maxLeaseName || bad:
		return fmt.Errorf("%w: lease %.40q is not 1 to %d letters, digits and dashes", errInvalid, id, maxLeaseName)
	case r.GetClaim() == "" || len(r.GetClaim()) > maxNameLength:
		return fmt.Errorf("%w: lease %s: no claim", errInvalid, id)
	case len(r.GetGpus()) == 0 || len(r.GetGpus()) > maxClaimGPUs:
		return fmt.Errorf("%w: lease %s: %d GPUs, not 1 to %d", errInvalid, id, len(r.GetGpus()), maxClaimGPUs)
	case len(r.GetCertificateSha256()) != sha256.Size:
		return fmt.Errorf("%w: lease %s: hash of %d bytes, not %d", errInvalid, id, len(r.GetCertificateSha256()), sha256.Size)
	case r.GetOutageMs() < 0 || r.GetOutageMs() > maxOutage.Milliseconds():
		return fmt.Errorf("%w: lease %s: an outage of %d ms is not 0 to %d", errInvalid, id, r.GetOutageMs(), maxOutage.Milliseconds())
	case len(r.GetDevice().GetName()) > maxNameLength || strings.ContainsRune(r.GetDevice().GetName(), 0):
		return fmt.Errorf("%w: lease %s: the device's name is longer than %d bytes, or has a NUL", errInvalid, id, maxNameLength)
	case !slices.Contains([]string{"", "gpu", "cpu", "accelerator"}, r.GetDevice().GetType()):
		return fmt.Errorf("%w: lease %s: device type %.20q is not gpu, cpu or accelerator", errInvalid, id, r.GetDevice().GetType())
	}
	return nil
}

// Lend starts a far executor for a session of another host, if the log has assigned the
// GPUs to the session's claim.
func (h *Host) Lend(ctx context.Context, borrower clusterapi.Self, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error) {
	return h.lend(ctx, borrower, r, nil)
}

// lend is Lend, for a session of a host or of a VM. A VM's claim is one of this host, which
// is the borrower then.
func (h *Host) lend(ctx context.Context, borrower clusterapi.Self, r *clusterv1.LendRequest, machine *forVM) (*clusterv1.LendResponse, error) {
	if err := checkLease(r); err != nil {
		return nil, err
	}
	if !h.Ready() {
		return nil, reason.Detail(fmt.Errorf("lease %s: %w", r.GetLease(), reason.New(reason.NotReady, "this host has just been started"))).On("host", h.Cluster.HostName())
	}
	l := &lent{
		ID: r.GetLease(), Claim: r.GetClaim(), Borrower: borrower.ID, Host: borrower.Host, Token: r.GetToken(), Peer: r.GetCertificateSha256(),
		Outage: r.GetOutageMs(), VM: machine,
	}
	if l.Outage == 0 {
		l.Outage = outage.Milliseconds()
	}
	for _, id := range r.GetGpus() {
		l.GPUs = append(l.GPUs, h.nameOf(id))
	}
	p, err := h.beginLending(l)
	if err != nil {
		return nil, err
	}
	defer h.endLending(l)
	// What the log says counts, not what the caller does. It is read after Uses has begun
	// to be true for the claim, so this host does not confirm meanwhile that an
	// assignment is gone.
	if l.Amount, err = h.Cluster.Assigned(ctx, l.Claim, l.Borrower, l.GPUs, l.Token, true); err != nil {
		return nil, fmt.Errorf("lease %s: %w", l.ID, err)
	}
	if l, err = h.enterLease(l); err != nil {
		return nil, err
	}
	target := p.target(l.Amount)
	// A host says whose its claims are, and could make many: it is one owner.
	owner := "host:" + l.Host
	if l.VM != nil {
		owner = l.VM.owner()
	}
	res, err := h.startFar(ctx, l, &gpuctlv1.LendRequest{
		Lease: l.ID, Runtime: target.GetRuntime(), PeerCertSha256: l.Peer, Memory: l.Amount, OutageMs: l.Outage, Device: r.GetDevice(), Claim: l.Claim,
		Gpus: l.GPUs, Owner: owner,
	})
	if err == nil && h.overtaken(l) {
		err = fmt.Errorf("%w: the lease was ended before it began", errNotFound)
	}
	if err != nil {
		if derr := h.dropLease(context.WithoutCancel(ctx), l, "it could not be started"); derr != nil {
			h.Log.Warn("a lease that could not be started holds its GPU until it is looked at again", "lease", l.ID, "err", derr)
		}
		return nil, fmt.Errorf("lease %s: far executor: %w", l.ID, err)
	}
	out := &clusterv1.LendResponse{
		Token: res.GetToken(), CertificateSha256: res.GetCertSha256(), Limits: target.GetLimits(), Model: target.GetModel(), Memory: l.Amount,
	}
	if l.Server == "" { // a service VM's carriers do not come by this host's port
		secret := sha256.Sum256(res.GetToken())
		h.mu.Lock()
		l.Secret = secret[:]
		h.save()
		h.mu.Unlock()
		if h.LendAddress != nil {
			out.Addresses = append(out.Addresses, h.LendAddress())
		}
	}
	out.Addresses = append(out.Addresses, res.GetAddresses()...)
	return out, nil
}

// beginLending makes Uses true for the claim until endLending.
func (h *Host) beginLending(l *lent) (placement, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p, server, err := h.lendable(l.GPUs)
	l.Server = server
	switch {
	case err != nil:
		return nil, fmt.Errorf("lease %s: %w", l.ID, err)
	case p == nil:
		return nil, reason.Detail(fmt.Errorf("lease %s: %w: this host has no GPU %.300s", l.ID, errNotFound, strings.Join(l.GPUs, separator))).On("gpu", l.GPUs[0])
	case slices.ContainsFunc(p, func(g *gpuctlv1.GPU) bool { return runtimeKey(g) != runtimeKey(p[0]) }):
		return nil, fmt.Errorf("lease %s: %w: the GPUs %s are not of one runtime", l.ID, errInvalid, p)
	case l.VM == nil && h.claims[l.Claim] != nil:
		return nil, fmt.Errorf("lease %s: %w: claim %s is one of this host", l.ID, errInvalid, l.Claim)
	}
	if old := h.lent[l.ID]; old != nil {
		if old.Borrower != l.Borrower || old.Server != l.Server || old.Claim != l.Claim || !slices.Equal(old.GPUs, l.GPUs) || !bytes.Equal(old.Peer, l.Peer) || old.Token != l.Token {
			return nil, reason.Errorf(reason.Exists, "lease %s exists with other contents", l.ID)
		}
	} else {
		mine := 0
		for _, x := range h.lent {
			if x.Borrower == l.Borrower && x.VM == nil && l.VM == nil { // VMs have limits of their own
				mine++
			}
		}
		if len(h.lent) >= maxLent || mine >= maxLentHost {
			return nil, fmt.Errorf("lease %s: %w: %d leases exist already, %d of them for host %s", l.ID, errBusy, len(h.lent), mine, l.Host)
		}
	}
	h.lending[l.Claim]++
	return p, nil
}

func (h *Host) endLending(l *lent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lending[l.Claim]--; h.lending[l.Claim] <= 0 {
		delete(h.lending, l.Claim)
	}
	h.settleLent(l.Claim)
}

// enterLease reserves the GPUs and writes the lease to the journal, before its far
// executor is started. It returns the lease as it is known: a call may be repeated.
func (h *Host) enterLease(l *lent) (*lent, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if old := h.lent[l.ID]; old != nil {
		if old.Ended {
			return nil, fmt.Errorf("lease %s: %w: it was ended", l.ID, errNotFound)
		}
		return old, nil // the same one: beginLending has compared them
	}
	if c := h.claims[l.Claim]; l.VM != nil && (c == nil || c.Released) {
		return nil, fmt.Errorf("lease %s: %w: claim %s has ended meanwhile", l.ID, errNotFound, l.Claim)
	}
	if l.VM != nil && l.VM.Migration == "" {
		if err := h.full(l); err != nil {
			return nil, err
		}
	}
	if err := h.ledger.Reserve(l.Claim, l.GPUs, l.Amount); err != nil {
		return nil, fmt.Errorf("lease %s: %w", l.ID, err)
	}
	h.lent[l.ID] = l
	h.save()
	h.Log.Info("gpu lent", "lease", l.ID, "claim", l.Claim, "host", l.Host, "gpu", strings.Join(l.GPUs, separator), "memory", l.Amount)
	return l, nil
}

// overtaken reports whether a lease was ended before gpuguest was asked for its far executor, or is being
// ended, after which nobody would end that. The lease is entered again, so that its GPUs stay reserved until it is.
func (h *Host) overtaken(l *lent) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now := h.lent[l.ID]; now != nil {
		return now == l && l.Ended
	}
	if err := h.ledger.Reserve(l.Claim, l.GPUs, l.Amount); err != nil {
		h.Log.Error("a lent gpu is held by others", "lease", l.ID, "claim", l.Claim, "err", err)
	}
	l.Ended = true
	h.lent[l.ID] = l
	h.save()
	return true
}

// settleLent gives back what no lease of the claim has any more. The caller holds h.mu.
func (h *Host) settleLent(claim string) {
	if c := h.claims[claim]; c != nil {
		if c.VM != nil {
			h.settle(c)
		}
		return
	}
	var keep []string
	for _, l := range h.lent {
		if l.Claim == claim {
			keep = append(keep, l.GPUs...)
		}
	}
	if len(keep) == 0 && h.lending[claim] > 0 {
		return
	}
	h.ledger.Retain(claim, keep)
	h.save()
	h.Cluster.Kick()
}

// EndLease ends a lease of the host that asks for it.
func (h *Host) EndLease(ctx context.Context, borrower clusterapi.Self, lease string) error {
	h.mu.Lock()
	l := h.lent[lease]
	h.mu.Unlock()
	switch {
	case l == nil:
		return nil
	case l.Borrower != borrower.ID:
		return fmt.Errorf("lease %s: %w: it is of host %s", lease, errDenied, l.Host)
	}
	return h.dropLease(ctx, l, "it was given back")
}

// dropLease ends the far executor, and then gives the GPUs back. If gpuguest does not
// confirm the end, the GPUs stay reserved, and it is tried again.
func (h *Host) dropLease(ctx context.Context, l *lent, why string) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	h.mu.Lock()
	l.Ended = true // who asks for it again would begin a far executor that nobody knows
	h.mu.Unlock()
	if err := h.endFar(ctx, l); err != nil {
		return fmt.Errorf("lease %s: its far executor has not ended: %w", l.ID, plain(err))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lent[l.ID] == l {
		delete(h.lent, l.ID)
		h.Log.Info("lease ended", "lease", l.ID, "claim", l.Claim, "host", l.Host, "gpu", strings.Join(l.GPUs, separator), "reason", why)
	}
	h.settleLent(l.Claim)
	return nil
}

// checkLent compares the leases with gpuguest's and with the log. A lease ends with its
// far executor, and with the assignments that it is for.
func (h *Host) checkLent(ctx context.Context) {
	if !h.Ready() {
		return
	}
	h.mu.Lock()
	known := maps.Clone(h.lent)
	// watchServers has those of service VMs. One that is being made may come after the list.
	maps.DeleteFunc(known, func(_ string, l *lent) bool { return l.Server != "" || h.lending[l.Claim] > 0 })
	asked := h.swept
	h.mu.Unlock()
	if len(known) == 0 && asked {
		return
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	res, err := h.Guest.ListLeases(call, connect.NewRequest(&gpuctlv1.ListLeasesRequest{}))
	if err != nil {
		if code := connect.CodeOf(err); code == connect.CodeUnimplemented || code == connect.CodeFailedPrecondition {
			h.mu.Lock()
			h.swept = len(known) == 0 // it lends nothing
			h.mu.Unlock()
		}
		return
	}
	alive := map[string]*gpuctlv1.Lease{}
	for _, l := range res.Msg.GetLeases() {
		alive[l.GetId()] = l
	}
	h.checkLeases(ctx, known, alive)
	h.mu.Lock()
	var strays []string
	for id := range alive {
		if h.lent[id] == nil && known[id] == nil && len(h.lending) == 0 {
			strays = append(strays, id)
		}
	}
	h.swept = len(h.lending) == 0 // otherwise a stray was not told from what is being made
	h.mu.Unlock()
	for _, id := range strays { // hostd lost its journal
		h.Log.Warn("a far executor without a lease ends", "lease", id)
		if _, err := h.Guest.EndLease(call, connect.NewRequest(&gpuctlv1.EndLeaseRequest{Lease: id})); err != nil {
			h.Log.Warn("it has not ended, and computes on", "lease", id, "err", plain(err))
			h.mu.Lock()
			h.swept = false
			h.mu.Unlock()
		}
	}
}

// checkLeases ends the leases that are over: of known, and alive has what is said of them. It waits a
// moment for that.
func (h *Host) checkLeases(ctx context.Context, known map[string]*lent, alive map[string]*gpuctlv1.Lease) {
	over := map[*lent]string{}
	for id, l := range known {
		if why := h.whyOver(ctx, l, alive[id]); why != "" {
			over[l] = why
		}
	}
	h.dropAside(over)
}

// whyOver returns why a lease is over; empty: it is not.
func (h *Host) whyOver(ctx context.Context, l *lent, now *gpuctlv1.Lease) string {
	h.mu.Lock()
	busy, ended := h.lending[l.Claim] > 0, l.Ended
	h.mu.Unlock()
	switch {
	case busy:
		return ""
	case ended:
		return "its end was asked for before"
	case now == nil:
		return "its far executor is gone"
	case now.GetState() == gpuctlv1.LeaseState_LEASE_STATE_ENDED:
		return "its far executor has ended: " + now.GetMessage()
	}
	_, err := h.Cluster.Assigned(ctx, l.Claim, l.Borrower, l.GPUs, l.Token, false)
	if !errors.Is(err, member.ErrNotAssigned) {
		return ""
	}
	return err.Error()
}

// dropAside ends leases at once, and waits a moment for that. A driver may not let go of a far
// executor, and a service VM may not answer: nobody else waits for these.
func (h *Host) dropAside(over map[*lent]string) {
	var wg sync.WaitGroup
	for l, why := range over {
		end, ok := h.dropping.Begin(l.ID)
		if !ok {
			continue
		}
		wg.Add(1)
		h.work.Go(func() {
			defer wg.Done()
			defer end()
			if err := h.dropLease(h.ctx, l, why); err != nil && h.ctx.Err() == nil {
				h.Log.Warn("a lease that is over holds its GPU", "lease", l.ID, "err", err)
			}
		})
	}
	dropped := make(chan struct{})
	go func() {
		wg.Wait()
		close(dropped)
	}()
	select {
	case <-dropped:
	case <-time.After(releaseWait):
	}
}

// Expects reports whether a lease of this host has this token. It is asked about each
// connection of a carrier before gpuguest gets it.
func (h *Host) Expects(token []byte) bool {
	hash := sha256.Sum256(token)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.lent {
		if bytes.Equal(l.Secret, hash[:]) || bytes.Equal(l.fetch, hash[:]) && time.Now().Before(l.fetchUntil) {
			return true
		}
	}
	return false
}

// lentTo returns the host to which a claim's share of a GPU is lent; empty: none. The
// caller holds h.mu.
func (h *Host) lentTo(claim string) string {
	for _, l := range h.lent {
		if l.Claim == claim && l.VM == nil {
			return l.Host
		}
	}
	return ""
}

// restoreLent takes over the leases of an earlier hostd. The caller holds h.mu.
func (h *Host) restoreLent(all []*lent) {
	for _, l := range all {
		h.lent[l.ID] = l
		for _, gpu := range l.GPUs { // of several, one may not be found this time
			if err := h.ledger.Reserve(l.Claim, []string{gpu}, l.Amount); err != nil && !errors.Is(err, ledger.ErrUnknownGPU) {
				h.Log.Error("a lent gpu is held by others", "lease", l.ID, "claim", l.Claim, "err", err)
			}
		}
	}
}
