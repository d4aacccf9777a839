package sessions

import (
	"cmp"
	"context"
	"slices"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	place "github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
)

// homeTries is how often it is tried to bring a session home.
const homeTries = 3

// bringHome moves a session that is on a GPU of another host to one of this host that is
// free: under the policy MRQ, once, and only if nobody waits for that GPU. The GPU must
// have been free at the last look, too: whoever waits is served before.
func (h *Host) bringHome(ctx context.Context) {
	if h.Cluster.Queue() != clusterv1.QueuePolicy_QUEUE_POLICY_MRQ || !h.Ready() {
		return
	}
	all, free := h.away()
	h.mu.Lock()
	before := h.vacant
	h.vacant = map[string]bool{}
	for _, g := range free {
		h.vacant[g] = true
	}
	h.mu.Unlock()
	if len(all) == 0 || !slices.ContainsFunc(free, func(g string) bool { return before[g] }) || h.Cluster.Waits() {
		return
	}
	for _, x := range all {
		d, err := h.Cluster.Place(ctx, place.Request{Claim: x.claim.forCluster(nil), Where: place.AtHome, Limit: 1})
		if err != nil {
			return
		}
		if d.OK() { // what fits none of them keeps no younger one away
			h.bring(ctx, x, d)
			return
		}
	}
}

// bring moves a session to where the cluster has found a place on this host, or a claim without one.
func (h *Host) bring(ctx context.Context, x absent, d place.Decision) {
	s, c := x.session, x.claim
	var ids []string
	for _, id := range d.Candidates[0].GPUs() {
		ids = append(ids, h.nameOf(id))
	}
	if s == nil {
		h.claimHome(ctx, c, ids, d.Candidates[0].Choices[0].GetMemory())
		return
	}
	h.mu.Lock()
	h.homing[s.GetId()]++
	tries := h.homing[s.GetId()]
	h.mu.Unlock()
	h.Log.Info("session comes home", "session", s.GetId(), "claim", c.ID, "gpu", strings.Join(ids, separator))
	err := h.swapAs("home", &gpuctlv1.HostSwapRequest{Session: s.GetId(), Verb: gpuctlv1.Verb_VERB_MIGRATE, To: strings.Join(ids, separator)}, func(u *gpuctlv1.OperationUpdate) {
		r := u.GetProgress().GetResult()
		if r == nil || r.GetError() == "" && !r.GetRefused() && !r.GetRolledBack() {
			return
		}
		h.Log.Warn("session stays on a GPU of another host", "session", s.GetId(), "tries", tries, "err", r.GetError())
		if tries >= homeTries || r.GetRefused() {
			h.mu.Lock()
			c.Stays = true
			h.save()
			h.mu.Unlock()
		}
	})
	if err != nil {
		h.Log.Debug("session not brought home yet", "session", s.GetId(), "err", err)
	}
}

// absent is a claim whose sessions, or next session, are on a GPU of another host and may come
// home, with one of these sessions (nil: it has none).
type absent struct {
	claim   *claim
	session *gpuctlv1.Session
}

// away returns what may come home, the oldest claim first, and the GPUs of this host of which
// somebody could have something.
func (h *Host) away() (all []absent, free []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, g := range h.gpus {
		if room, whole := h.ledger.Room("", g.GetId()); whole || room > 0 {
			free = append(free, g.GetId())
		}
	}
	if len(free) == 0 {
		return nil, nil
	}
	for _, c := range h.claims {
		if c.Stays || c.Released || c.Remote != remoteAllowed {
			continue
		}
		if s, ok := h.homeless(c); ok {
			all = append(all, absent{c, s})
		}
	}
	slices.SortFunc(all, func(a, b absent) int {
		return cmp.Or(cmp.Compare(a.claim.Created, b.claim.Created), cmp.Compare(a.claim.ID, b.claim.ID))
	})
	return all, free
}

// homeless returns a session of the claim that could come home, and whether the claim has
// something to bring home. The caller holds h.mu.
func (h *Host) homeless(c *claim) (s *gpuctlv1.Session, ok bool) {
	live := false
	for _, x := range h.sessions {
		if x.GetClaim() != c.ID {
			continue
		}
		live = true
		if h.ops[x.GetId()] != nil {
			return nil, false
		}
		if x.GetState() == gpuctlv1.SessionState_SESSION_STATE_RUNNING && far(x.GetTarget().GetGpu()) && h.homing[x.GetId()] < homeTries {
			s = x.Session
		}
	}
	if live {
		return s, s != nil
	}
	return nil, len(c.GPUs) > 0 && far(c.GPUs[0]) && !h.claiming[c.ID]
}

// claimHome makes the next session of a claim without sessions begin on this host.
func (h *Host) claimHome(ctx context.Context, c *claim, ids []string, amount uint64) {
	h.mu.Lock()
	h.claiming[c.ID] = true
	h.mu.Unlock()
	err := h.Cluster.Acquire(ctx, c.forCluster(nil), ids, amount)
	h.mu.Lock()
	if err == nil {
		err = h.ledger.Reserve(c.ID, ids, amount)
	}
	if err == nil {
		c.place(ids) // the lease stays until its offer is replaced
		c.Memory = amount
		if amount == ledger.Whole {
			c.Memory = 0
		}
	}
	delete(h.claiming, c.ID)
	h.settle(c)
	h.mu.Unlock()
	if err != nil {
		h.Log.Debug("claim not brought home yet", "claim", c.ID, "err", err)
		return
	}
	h.Log.Info("claim came home", "claim", c.ID, "gpu", strings.Join(ids, separator))
	h.repeatOffer(ctx, c)
}
