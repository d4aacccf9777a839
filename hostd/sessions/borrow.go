package sessions

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Remote is whether a claim may be served by GPUs of other hosts.
const (
	remoteNever   = "never"
	remoteAllowed = "allowed"
	remoteOnly    = "only"
)

const (
	// outage is how long a connection to a far executor may be broken before the session
	// is lost and the GPU is given back.
	outage = 2 * time.Minute
	// renewEvery is how long a lease is offered before another one replaces it.
	renewEvery = outage * 2 / 3
	// countedElsewhere is the capacity of a GPU of another host in this host's ledger. Its
	// real capacity is counted by the cluster.
	countedElsewhere = 1 << 60
)

// borrowed is a lease from another host: a far executor that serves one session of this
// host, or is the target of one swap.
type borrowed struct {
	ID    string   `json:"id"`
	Claim string   `json:"claim"`
	Host  string   `json:"host"` // that lends
	GPUs  []string `json:"gpus"` // ids in the cluster
	// Own is the hash of the carrier's certificate, and Peer that of the far executor's,
	// in hex. Peer is empty until the lease was granted.
	Own  string `json:"own"`
	Peer string `json:"peer,omitempty"`

	asked  time.Time // when the lease was last asked for
	ending bool      // it is being given back
}

// far reports whether a GPU is one of another host: its name is its id in the cluster.
func far(gpu string) bool { return strings.Contains(gpu, "/") }

func (p placement) far() bool { return len(p) > 0 && far(p[0].GetId()) }

// hostOf returns the host of a GPU of another host.
func hostOf(gpu string) string {
	host, _, _ := strings.Cut(gpu, "/")
	return host
}

func (c *claim) remote() clusterv1.Remote {
	switch c.Remote {
	case remoteAllowed:
		return clusterv1.Remote_REMOTE_ALLOWED
	case remoteOnly:
		return clusterv1.Remote_REMOTE_ONLY
	}
	return clusterv1.Remote_REMOTE_NEVER
}

// nameOf returns the name that this host uses for a GPU of the cluster.
func (h *Host) nameOf(id string) string { return strings.TrimPrefix(id, h.Cluster.HostName()+"/") }

// farGPUs returns the GPUs of other hosts, for a claim that may have them.
func (h *Host) farGPUs(c *claim) (out []*gpuctlv1.GPU) {
	if c.remote() == clusterv1.Remote_REMOTE_NEVER || c.Engine == driverEngine {
		return nil
	}
	for _, g := range h.Cluster.OtherGPUs() {
		if g.GetRuntime() == inventory.CUDA {
			continue // no OpenCL runtime serves it
		}
		out = append(out, inventory.OfCluster(g))
	}
	// Free ones first: a claim may not name all GPUs of a large cluster.
	slices.SortStableFunc(out, func(a, b *gpuctlv1.GPU) int {
		switch {
		case a.GetFree() == b.GetFree():
			return cmp.Compare(a.GetId(), b.GetId())
		case a.GetFree():
			return -1
		}
		return 1
	})
	return out
}

// maxNamed is the most GPUs of other hosts that a claim names, so that its expression is
// not too long.
const maxNamed = 32

// matchingFar returns the ids of GPUs of other hosts for which the expression is true.
func matchingFar(ctx context.Context, gpus []*gpuctlv1.GPU, e *expr.Expr) ([]string, []*gpuctlv1.Candidate, error) {
	ids, out, err := matching(ctx, gpus, e)
	return ids[:min(len(ids), maxNamed)], out, err
}

// tooMany returns why a claim for several GPUs cannot be met by any host. The caller holds
// h.mu.
func (h *Host) tooMany(c *claim) []*gpuctlv1.Candidate {
	most, have := 0, map[string]int{}
	add := func(key string) {
		have[key]++
		most = max(most, have[key])
	}
	for _, g := range h.gpus {
		add(runtimeKey(g))
	}
	if c.remote() != clusterv1.Remote_REMOTE_NEVER {
		for _, g := range h.Cluster.OtherGPUs() {
			add(g.GetHost() + "/" + g.GetRuntimeKey())
		}
	}
	if c.Count <= most {
		return nil
	}
	return []*gpuctlv1.Candidate{{Gpu: "*", Reasons: []*gpuctlv1.Reason{because("count",
		"%d GPUs needed, and no host has more than %d of one runtime: all GPUs of a session are on one host, as one executor serves it", c.Count, most)}}}
}

// target describes a placement to gpuguest. If it is on another host, it also makes a
// lease, whose id it returns. The caller gives that back by forgetting it: see
// giveBack.
func (h *Host) target(ctx context.Context, c *claim, p placement, amount uint64) (*gpuctlv1.Target, string, error) {
	if !p.far() {
		return p.target(amount), "", nil
	}
	id := "l-" + random.Hex(12)
	own, err := remote.NewIdentity(id)
	if err != nil {
		return nil, "", err
	}
	b := &borrowed{ID: id, Claim: c.ID, Host: hostOf(p[0].GetId()), GPUs: p.ids(), Own: hex.EncodeToString(own.Hash()), asked: time.Now()}
	h.mu.Lock()
	h.borrowed[id] = b
	h.asking[id] = true // it is needed, although nothing names it yet
	h.save()            // before the call: a lease that nobody knows would not be given back
	h.mu.Unlock()
	res, err := h.Cluster.Borrow(ctx, b.Host, h.request(b, c))
	if reason.Is(err, reason.Stale) {
		// The others took this host for down, and the log has lost what the claim had there.
		if err = h.Cluster.Acquire(ctx, c.forCluster(nil), p.ids(), amount); err == nil {
			res, err = h.Cluster.Borrow(ctx, b.Host, h.request(b, c))
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		delete(h.asking, id)
		return nil, "", err
	}
	b.Peer = hex.EncodeToString(res.GetCertificateSha256())
	h.save()
	h.work.Go(func() { h.calibrate(h.ctx, b.Host) })
	h.Log.Info("gpu borrowed", "claim", c.ID, "gpu", p.String(), "host", b.Host, "lease", id)
	return &gpuctlv1.Target{
		Gpu: p.String(), Model: res.GetModel(), Limits: res.GetLimits(),
		Runtime: &gpuctlv1.Runtime{Remote: &gpuctlv1.Remote{
			Addresses: res.GetAddresses(), Token: res.GetToken(), PeerCertSha256: res.GetCertificateSha256(),
			Certificate: own.Certificate, PrivateKey: own.Key, OutageMs: outage.Milliseconds(), Memory: p.target(amount).GetLimits().GetGlobalMemory(),
		}},
	}, id, nil
}

func (h *Host) request(b *borrowed, c *claim) *clusterv1.LendRequest {
	own, _ := hex.DecodeString(b.Own) // this process has encoded it
	return &clusterv1.LendRequest{
		Lease: b.ID, Claim: c.ID, Gpus: b.GPUs, CertificateSha256: own, OutageMs: outage.Milliseconds(), Device: c.device(),
	}
}

// named reports that something names the lease from now on, or that nothing will.
func (h *Host) named(lease string) {
	if lease == "" {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.asking, lease)
}

// peerOf returns the hash of the far executor's certificate, in hex, of a session on a GPU
// of another host. It identifies the lease.
func peerOf(s *gpuctlv1.Session) string {
	return hex.EncodeToString(s.GetTarget().GetRuntime().GetRemote().GetPeerCertSha256())
}

// hide returns the session without the secrets of its connection to a far executor.
func hide(s *gpuctlv1.Session) *gpuctlv1.Session {
	r := s.GetTarget().GetRuntime().GetRemote()
	if r == nil || len(r.GetToken()) == 0 && len(r.GetPrivateKey()) == 0 {
		return s
	}
	s = proto.CloneOf(s)
	s.Target.Runtime.Remote = &gpuctlv1.Remote{Addresses: r.GetAddresses(), PeerCertSha256: r.GetPeerCertSha256()}
	return s
}

// leaseOf returns the lease that a session uses; nil: none. The caller holds h.mu.
func (h *Host) leaseOf(s *gpuctlv1.Session) *borrowed {
	peer := peerOf(s)
	if peer == "" {
		return nil
	}
	for _, b := range h.borrowed {
		if b.Peer == peer {
			return b
		}
	}
	return nil
}

// needed returns the ids of the leases that something names: an offer, a session or an
// operation. The caller holds h.mu.
func (h *Host) needed() map[string]bool {
	need := maps.Clone(h.asking)
	for _, c := range h.claims {
		if !c.Released {
			need[c.Lease] = true
		}
	}
	for _, op := range h.ops {
		need[op.Lease] = true
	}
	for _, s := range h.sessions {
		if b := h.leaseOf(s.Session); b != nil && onGPU(s.GetState()) {
			need[b.ID] = true
		}
	}
	return need
}

// watchLeases looks after leases in both directions, and brings sessions home, until ctx
// ends. It may wait for a leader, so it does not do so in Watch.
func (h *Host) watchLeases(ctx context.Context) {
	tick := time.NewTicker(holdersEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.unnamed:
			h.giveBack(ctx)
			continue
		case <-tick.C:
		}
		h.checkLent(ctx)
		h.giveBack(ctx)
		h.renew(ctx)
		h.bringHome(ctx)
	}
}

// idle returns the leases that nothing names. The caller holds h.mu.
func (h *Host) idle() (out []string) {
	need := h.needed()
	for id, b := range h.borrowed {
		if !need[id] && !b.ending {
			out = append(out, id)
		}
	}
	return out
}

// giveBack ends the leases that nothing names any more. What fails is repeated. The host
// that lends also ends them when the log releases their assignments, or when no carrier
// has been there for the outage.
func (h *Host) giveBack(ctx context.Context) {
	if !h.Ready() {
		return // after a start, sessions are not known yet
	}
	h.mu.Lock()
	idle := h.idle()
	h.mu.Unlock()
	if len(idle) == 0 {
		return
	}
	// A session may have begun with an offer that was replaced since. The list is
	// requested after that, so it has the session.
	if err := h.Resync(ctx); err != nil {
		return
	}
	h.mu.Lock()
	need := h.needed()
	for id := range h.borrowed {
		if !slices.Contains(idle, id) {
			need[id] = true // its offer may have been replaced after the request
		}
	}
	var over []*borrowed
	for id, b := range h.borrowed {
		if !need[id] && !b.ending {
			b.ending = true
			over = append(over, b)
		}
	}
	h.mu.Unlock()
	for _, b := range over {
		h.work.Go(func() {
			err := h.Cluster.GiveBack(ctx, b.Host, b.ID)
			h.mu.Lock()
			defer h.mu.Unlock()
			b.ending = false
			if err != nil && h.claims[b.Claim] != nil { // the next hostd repeats it if this one stops
				h.Log.Debug("lease not given back yet", "lease", b.ID, "host", b.Host, "err", err)
				return
			}
			// Without its claim, the log has told the host that lends.
			delete(h.borrowed, b.ID)
			h.save()
			h.Cluster.Kick()
		})
	}
}

// renew replaces the leases that are offered before they end: a far executor to which no
// carrier comes gives its GPU back after the outage.
func (h *Host) renew(ctx context.Context) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.claims {
		b := h.borrowed[c.Lease]
		if c.Released || b == nil || time.Since(b.asked) < renewEvery {
			continue
		}
		b.asked = b.asked.Add(renewEvery / 4) // if it fails, again after this time
		h.work.Go(func() { h.renewOne(ctx, c, b) })
	}
}

func (h *Host) renewOne(ctx context.Context, c *claim, old *borrowed) {
	h.mu.Lock()
	p, placed := h.placement(c.GPUs), c.placed
	amount, held := uint64(0), false
	if p != nil {
		amount, held = h.ledger.Holds(c.ID, p[0].GetId())
	}
	current := c.Lease == old.ID && !c.Released && p.far() && held
	h.mu.Unlock()
	if !current {
		return
	}
	if err := h.offerTo(ctx, c, p, amount, placed); err != nil && ctx.Err() == nil {
		h.Log.Warn("offered lease not replaced", "claim", c.ID, "lease", old.ID, "host", old.Host, "err", err)
	}
}

// taken reports whether a session has begun with the lease that its claim offers. A lease
// serves one session, so that the claim needs another one for its next session. The
// caller holds h.mu.
func (h *Host) taken(c *claim, s *gpuctlv1.Session) bool {
	b := h.leaseOf(s)
	if b == nil || b.ID != c.Lease {
		return false
	}
	c.Lease = ""
	return !c.Released
}

// pathOf returns the hosts over which a session's state goes. straight is whether that of a
// remote GPU does not pass through this one on its way to another.
func (h *Host) pathOf(from, to []string, straight bool) []string {
	host := func(gpus []string) string {
		if len(gpus) > 0 && far(gpus[0]) {
			return hostOf(gpus[0])
		}
		return h.Cluster.HostName()
	}
	a, b, here := host(from), host(to), h.Cluster.HostName()
	if a != here && b != here && !straight {
		return []string{a, here, b}
	}
	return slices.Compact([]string{a, b})
}

// why adds to a lost session's message where it computed.
func lostMessage(s *gpuctlv1.Session) string {
	gpu := s.GetTarget().GetGpu()
	if !far(gpu) || s.GetState() != gpuctlv1.SessionState_SESSION_STATE_LOST || strings.Contains(s.GetMessage(), gpu) {
		return s.GetMessage()
	}
	return fmt.Sprintf("its GPU %s of host %s is gone: %s", gpu, hostOf(gpu), cmp.Or(s.GetMessage(), "the connection was broken for too long"))
}
