package sessions

import (
	"context"
	"fmt"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// releaseOrphans releases the claims of processes that have ended, and withdraws what is still
// offered to claims that are released.
func (h *Host) releaseOrphans(ctx context.Context) {
	h.mu.Lock()
	var gone []*claim
	for _, c := range h.claims {
		switch {
		case c.Released && len(c.Offered) > 0: // gpuguest could not be told yet
			gone = append(gone, c)
		case !c.Released && c.Holder.PID != 0 && c.Holder.gone(h.proc):
			gone = append(gone, c)
			h.Log.Info("claim's process is gone", "claim", c.ID, "pid", c.Holder.PID)
		}
	}
	h.mu.Unlock()
	less := false
	for _, c := range gone {
		less = h.endOffer(ctx, c) || less
	}
	if !less {
		return
	}
	if err := h.Resync(ctx); err != nil && ctx.Err() == nil { // one for all; without it, all is repeated
		h.Log.Debug("sessions not listed", "err", err)
	}
}

// release has no new session use a claim. It ends at once if no session does.
func (h *Host) release(ctx context.Context, c *claim) {
	if h.endOffer(ctx, c) {
		h.relist(ctx, c)
	}
}

// endOffer is release, without the list of sessions. It reports whether that is needed.
func (h *Host) endOffer(ctx context.Context, c *claim) (less bool) {
	c.offering.Lock() // until it is released, so that nothing is offered again between
	defer c.offering.Unlock()
	less = h.withdraw(ctx, c)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.claims[c.ID] == c {
		c.Released = true
		h.settle(c)
	}
	return less
}

// awaitEnd returns when a released claim has ended, but after releaseWait at the latest:
// a process that the application has left behind may use the claim for long.
func (h *Host) awaitEnd(ctx context.Context, c *claim) {
	ctx, cancel := context.WithTimeout(ctx, releaseWait)
	defer cancel()
	for {
		h.mu.Lock()
		over := h.claims[c.ID] != c
		h.mu.Unlock()
		if over || ctx.Err() != nil {
			return
		}
		if err := h.Resync(ctx); err != nil && ctx.Err() == nil {
			h.Log.Debug("sessions not listed", "err", err)
		}
		_ = wait.For(ctx, 10*time.Millisecond)
	}
}

// createClaim asks the cluster to choose among the GPUs for which the claim's expression
// is true. If it refuses, the placement is nil.
func (h *Host) createClaim(ctx context.Context, c *claim) (placement, []*gpuctlv1.Candidate, error) {
	e, err := expr.Compile(c.Expr, expr.GPU())
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errInvalid, err)
	}
	h.mu.Lock()
	if len(h.claims) >= maxClaims {
		h.mu.Unlock()
		return nil, nil, fmt.Errorf("%w: %d claims exist already", errBusy, maxClaims)
	}
	gpus := h.view() // copies
	h.mu.Unlock()
	// Not under the lock: an expression may be expensive, as its user writes it, and the
	// watchdog needs the lock.
	names, out, err := matching(ctx, gpus, e)
	if err != nil {
		return nil, out, err
	}
	names, unfit := c.forEngine(names, gpus)
	out = append(out, unfit...)
	ids, others, err := matchingFar(ctx, h.farGPUs(c), e)
	if err != nil || len(names)+len(ids) == 0 {
		return nil, append(out, others...), err
	}
	if c.Remote == remoteOnly || len(names) == 0 {
		out = append(out, others...)
	}
	h.mu.Lock()
	h.claiming[c.ID] = true
	h.mu.Unlock()
	h.Cluster.Known(ctx, names)
	h.Cluster.Settle(ctx)
	res, err := h.Cluster.Claim(ctx, c.named(h.Cluster.HostName(), names, ids))
	if err == nil && c.Wait && len(res.GetAssignments()) == 0 && res.GetClaim() != nil {
		h.Log.Info("claim waits for a gpu", "claim", c.ID)
		res.Assignments, err = h.Cluster.AwaitBound(ctx, c.ID)
	}
	h.mu.Lock()
	p, amount, err := h.admit(c, res, err)
	placed := c.placed
	delete(h.claiming, c.ID)
	if p == nil {
		out = append(out, h.candidates(res.GetRejected(), names)...)
		out = append(out, h.farCandidates(res.GetRejected(), ids)...)
		out = append(out, h.tooMany(c)...)
	}
	h.mu.Unlock()
	if p == nil {
		h.Cluster.Kick() // gives back what the claim was given all the same
		return nil, out, err
	}
	h.Log.Info("claim made", "claim", c.ID, "gpu", p.String(), "memory", amount)
	if err := h.offer(ctx, c, p, amount, placed); err != nil {
		h.mu.Lock()
		c.Released = true
		h.settle(c)
		h.mu.Unlock()
		return nil, nil, err
	}
	return p, out, nil
}

// admit enters into the ledger what the cluster has given to a new claim. The caller
// holds h.mu.
func (h *Host) admit(c *claim, res *clusterv1.CreateClaimResponse, err error) (placement, uint64, error) {
	if err != nil {
		return nil, 0, fmt.Errorf("claim %s: %w", c.ID, err)
	}
	if len(res.GetAssignments()) == 0 {
		return nil, 0, nil
	}
	amount := res.GetAssignments()[0].GetMemory()
	var ids []string
	for _, as := range res.GetAssignments() {
		amount = min(amount, as.GetMemory())
		ids = append(ids, h.nameOf(as.GetGpu()))
		h.count(h.nameOf(as.GetGpu()))
	}
	p := h.placement(ids)
	if p == nil {
		return nil, 0, fmt.Errorf("claim %s: %w: the GPUs %s have gone", c.ID, errNotFound, strings.Join(ids, separator))
	}
	if err := h.ledger.Reserve(c.ID, ids, amount); err != nil {
		return nil, 0, fmt.Errorf("claim %s: %w", c.ID, err)
	}
	c.GPUs, c.Memory = ids, amount
	h.claims[c.ID] = c
	h.settle(c)
	return p, amount, nil
}
