package sessions

import (
	"context"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Reoffer repeats the offers of all claims to gpuguest, for example after its restart. It does not wait for those of
// GPUs of other hosts: one that does not answer takes half a minute for each.
func (h *Host) Reoffer(ctx context.Context) {
	h.mu.Lock()
	var here, elsewhere []*claim
	for _, c := range h.claims {
		if len(c.GPUs) > 0 && far(c.GPUs[0]) {
			elsewhere = append(elsewhere, c)
		} else {
			here = append(here, c)
		}
	}
	h.mu.Unlock()
	for _, c := range elsewhere {
		h.work.Go(func() { h.repeatOffer(h.ctx, c) })
	}
	for _, c := range here {
		h.repeatOffer(ctx, c)
	}
}

// repeatOffer tells gpuguest on which GPUs the claim's next session starts. If it has
// none, nothing is offered.
func (h *Host) repeatOffer(ctx context.Context, c *claim) {
	h.mu.Lock()
	p, placed, open := h.placement(c.GPUs), c.placed, !c.Released && c.Token != ""
	var amount uint64
	if p != nil {
		amount, _ = h.ledger.Holds(c.ID, p[0].GetId())
	}
	h.mu.Unlock()
	switch {
	case !open:
	case p == nil:
		h.withdrawAt(ctx, c, placed)
	default:
		if err := h.offer(ctx, c, p, amount, placed); err != nil {
			h.Log.Warn("claim not offered", "claim", c.ID, "err", err)
			if p.far() && ctx.Err() == nil { // what was offered before is used up
				h.withdrawAt(ctx, c, placed)
			}
		}
	}
}

// offer offers a placement of the claim, unless gpuguest offers it already. placed is the
// claim's when the placement was chosen.
func (h *Host) offer(ctx context.Context, c *claim, p placement, amount uint64, placed int) error {
	h.mu.Lock()
	offered, current := h.borrowed[c.Lease], slices.Equal(c.Offered, p.ids())
	h.mu.Unlock()
	if p.far() && offered != nil && current {
		return nil // gpuguest keeps its offers, and no session has used this one
	}
	return h.offerTo(ctx, c, p, amount, placed)
}

// offerTo makes an offer, with a new lease if the GPU is on another host. It makes none if
// the claim has another placement by then: whoever has placed it makes the next offer.
func (h *Host) offerTo(ctx context.Context, c *claim, p placement, amount uint64, placed int) error {
	target, lease, err := h.target(ctx, c, p, amount)
	if err != nil {
		return fmt.Errorf("claim %s: %w", c.ID, err)
	}
	defer h.named(lease)
	c.offering.Lock()
	defer c.offering.Unlock()
	h.mu.Lock()
	if c.Released || c.placed != placed {
		h.mu.Unlock()
		return nil // nothing names the lease, so it is given back
	}
	c.next, c.since = nil, time.Time{}
	for _, gpu := range p.ids() { // the answer may get lost
		if !slices.Contains(c.Offered, gpu) {
			c.Offered = append(c.Offered, gpu)
		}
	}
	h.save()
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err = h.Guest.Offer(ctx, connect.NewRequest(&gpuctlv1.OfferRequest{
		Token: c.Token, Claim: c.ID, Target: target, Device: c.device(), Owner: c.Owner, Weight: c.Weight,
	}))
	if err != nil {
		return fmt.Errorf("offer gpu %s to claim %s: %w", p, c.ID, plain(err))
	}
	h.mu.Lock()
	c.Lease = lease
	h.mu.Unlock()
	if h.offered(c, p.ids()) {
		h.relist(ctx, c)
	}
	return nil
}

// offered records which GPUs gpuguest offers to a claim. It reports whether some were offered
// before that are given back only when gpuguest has listed its sessions: one may have begun there
// of which this host has not heard yet. The caller holds c.offering.
func (h *Host) offered(c *claim, gpus []string) (less bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	less = slices.ContainsFunc(c.Offered, func(gpu string) bool { return !slices.Contains(gpus, gpu) })
	c.next, c.since = gpus, time.Now()
	if !less {
		h.replaced(c)
	}
	return less
}

// relist has gpuguest list its sessions, after which a claim gives back what it was offered.
func (h *Host) relist(ctx context.Context, c *claim) {
	if err := h.Resync(ctx); err != nil {
		h.Log.Warn("the GPUs that were offered before stay reserved until gpuguest lists its sessions", "claim", c.ID, "err", err)
	}
}

// replaced is called when all sessions are known that can have begun by the offer before. The
// caller holds h.mu.
func (h *Host) replaced(c *claim) {
	c.Offered, c.next, c.since = c.next, nil, time.Time{}
	if h.claims[c.ID] == c {
		h.settle(c)
	}
}

// withdrawAt withdraws what is offered to a claim, unless it has another placement by then.
func (h *Host) withdrawAt(ctx context.Context, c *claim, placed int) {
	c.offering.Lock()
	defer c.offering.Unlock()
	h.mu.Lock()
	outdated := c.placed != placed
	h.mu.Unlock()
	if !outdated && h.withdraw(ctx, c) {
		h.relist(ctx, c)
	}
}

// withdraw withdraws what is offered to a claim, and reports what offered does. It is repeated
// until gpuguest has answered, and says once what is in the way. The caller holds c.offering.
func (h *Host) withdraw(ctx context.Context, c *claim) (less bool) {
	if c.Token == "" {
		return false
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := h.Guest.Withdraw(call, connect.NewRequest(&gpuctlv1.WithdrawRequest{Token: c.Token}))
	if err != nil {
		if why := plain(err).Error(); ctx.Err() == nil && why != c.stuck {
			c.stuck = why
			h.Log.Warn("offer not withdrawn; its GPUs stay reserved until it is", "claim", c.ID, "err", why)
		}
		return false
	}
	if c.stuck != "" {
		c.stuck = ""
		h.Log.Info("offer withdrawn", "claim", c.ID)
	}
	return h.offered(c, nil)
}
