package scheduler

import (
	"context"
	"fmt"
	"maps"
	"slices"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// GiveUp gives up what hosts had that are not in the cluster any more, until ctx ends or a
// command fails. A host that was removed by force can't say that its GPUs are free, nor end
// the claims that it has made. Only the leader runs it.
func GiveUp(ctx context.Context, l Lead) error {
	for ctx.Err() == nil {
		v := l.View()
		// Only the removal of a host leaves something behind.
		changed := v.Changed(clusterv1.Kind_KIND_HOST)
		if err := giveUp(ctx, l, v); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
	return nil
}

// giveUp proposes it. If a host has come back under its name meanwhile, the state machine
// refuses, as that host says itself what is free.
func giveUp(ctx context.Context, l Lead, v *state.View) error {
	for c := range v.Claims() {
		if c.GetState() == clusterv1.ClaimState_CLAIM_STATE_RELEASING || !abandoned(v, c) {
			continue
		}
		if _, err := l.Apply(ctx, &clusterv1.Command{Actor: "scheduler", Op: &clusterv1.Command_DeleteClaim{
			DeleteClaim: &clusterv1.DeleteClaim{Claim: c.GetId()},
		}}); err != nil {
			return fmt.Errorf("claim %s of a host that was removed: %w", c.GetId(), err)
		}
	}
	left := map[string][]string{} // assignments by host
	for a := range v.Assignments() {
		if v.Host(a.GetHost()) == nil {
			left[a.GetHost()] = append(left[a.GetHost()], a.GetId())
		}
	}
	for _, host := range slices.Sorted(maps.Keys(left)) {
		if _, err := l.Apply(ctx, &clusterv1.Command{Actor: "scheduler", Op: &clusterv1.Command_CancelAssignments{
			CancelAssignments: &clusterv1.CancelAssignments{Assignments: left[host], Reason: "host " + host + " was removed"},
		}}); err != nil {
			return fmt.Errorf("assignments on host %s, which was removed: %w", host, err)
		}
	}
	return nil
}

// abandoned reports whether the host that has made a claim is not in the cluster any more. One
// that is joining has an identity already.
func abandoned(v *state.View, c *clusterv1.Claim) bool {
	by := c.GetLabels()[placement.LabelManagedBy]
	return by != "" && v.HostByID(by) == nil && v.Identity(by) == nil
}
