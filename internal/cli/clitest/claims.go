package clitest

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func sortedKeys[T any](m map[string]T) []string { return slices.Sorted(maps.Keys(m)) }

// fits reports whether a claim fits on a GPU now. If not, it returns the reasons.
func (c *Cluster) fits(claim *clusterv1.Claim, match func(proto.Message) (bool, error), g *clusterv1.GPU) ([]*gpuctlv1.Reason, error) {
	var why []*gpuctlv1.Reason
	add := func(is bool, code, format string, args ...any) {
		if is {
			why = append(why, &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)})
		}
	}
	h, _ := c.objects[clusterv1.Kind_KIND_HOST][g.GetHost()].(*clusterv1.Host)
	add(h.GetDown(), "down", "its host is down")
	add(h.GetDraining(), "draining", "its host is draining")
	add(g.GetCordoned(), "cordoned", "it is cordoned")
	add(claim.GetHost() != "" && claim.GetHost() != g.GetHost(), "host", "only host %s will do", claim.GetHost())
	add(slices.Contains(claim.GetHostsNot(), g.GetHost()), "host", "not on host %s", g.GetHost())
	add(claim.GetMinMemory() == 0 && !g.GetFree(), "held", "somebody holds it, and a whole GPU is needed")
	add(claim.GetMinMemory() > g.GetFreeMemory(), "memory", "%d bytes needed, %d free", claim.GetMinMemory(), g.GetFreeMemory())
	ok, err := match(g)
	if err != nil {
		return nil, err
	}
	add(!ok, "expr", "%s is not true of it", claim.GetExpr())
	return why, nil
}

// find chooses the GPUs for a claim, the highest rank first.
func (c *Cluster) find(claim *clusterv1.Claim) (fit []*clusterv1.GPU, rejected []*clusterv1.Rejection, err error) {
	match, err := c.filter(clusterv1.Kind_KIND_GPU, claim.GetExpr())
	if err != nil {
		return nil, nil, err
	}
	for _, g := range all[*clusterv1.GPU](c, clusterv1.Kind_KIND_GPU) {
		why, err := c.fits(claim, match, g)
		if err != nil {
			return nil, nil, err
		}
		if len(why) > 0 {
			rejected = append(rejected, &clusterv1.Rejection{Host: g.GetHost(), Gpu: g.GetId(), Model: g.GetModel(), Reasons: why})
			continue
		}
		fit = append(fit, g)
	}
	slices.SortStableFunc(fit, func(a, b *clusterv1.GPU) int { return int(b.GetRank()) - int(a.GetRank()) })
	return fit, rejected, nil
}

// Place implements the RPC.
func (c *Cluster) Place(_ context.Context, r *connect.Request[clusterv1.PlaceRequest]) (*connect.Response[clusterv1.PlaceResponse], error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.may(r.Msg.GetStale(), clusterv1.Role_ROLE_VIEWER); err != nil {
		return nil, err
	}
	fit, rejected, err := c.find(r.Msg.GetClaim())
	if err != nil {
		return nil, err
	}
	res := &clusterv1.PlaceResponse{Rejected: rejected, Index: c.index}
	for _, g := range fit {
		res.Candidates = append(res.Candidates, &clusterv1.PlaceCandidate{
			Host: g.GetHost(), Model: g.GetModel(), Score: float64(g.GetRank()), Because: []string{fmt.Sprintf("rank %d", g.GetRank())},
			Choices: []*clusterv1.Choice{{Gpu: g.GetId(), Memory: r.Msg.GetClaim().GetMinMemory()}},
		})
	}
	if limit := int(r.Msg.GetLimit()); limit > 0 && len(res.GetCandidates()) > limit {
		res.Candidates = res.GetCandidates()[:limit]
	}
	return connect.NewResponse(res), nil
}

// CreateClaim implements the RPC.
func (c *Cluster) CreateClaim(_ context.Context, r *connect.Request[clusterv1.CreateClaimRequest]) (*connect.Response[clusterv1.CreateClaimResponse], error) {
	unlock, err := c.operator()
	if err != nil {
		return nil, err
	}
	defer unlock()
	claim := proto.CloneOf(r.Msg.GetClaim())
	if claim.GetId() == "" {
		return nil, fail(connect.CodeInvalidArgument, "a claim needs a name")
	}
	old, exists := c.objects[clusterv1.Kind_KIND_CLAIM][claim.GetId()].(*clusterv1.Claim)
	switch {
	case old.GetState() == clusterv1.ClaimState_CLAIM_STATE_RELEASING, old.GetState() == clusterv1.ClaimState_CLAIM_STATE_PENDING && old.GetUnmet() == 0:
		return connect.NewResponse(&clusterv1.CreateClaimResponse{Claim: old}), nil // as it is
	case exists:
		return nil, fail(connect.CodeAlreadyExists, "claim %s exists, with other needs", claim.GetId())
	}
	claim.Owner, claim.CreatedUnixMs = "ada", 1
	bound, rejected, err := c.bind(claim)
	switch {
	case err != nil:
		return nil, err
	case bound == nil && claim.GetUnmet() != clusterv1.Unmet_UNMET_WAIT:
		return connect.NewResponse(&clusterv1.CreateClaimResponse{Rejected: rejected}), nil
	case bound == nil:
		claim.State, claim.Message = clusterv1.ClaimState_CLAIM_STATE_PENDING, "nothing is free"
		c.put(claim)
	}
	return connect.NewResponse(&clusterv1.CreateClaimResponse{Claim: claim, Assignments: bound, Rejected: rejected}), nil
}

// bind assigns GPUs to a claim if that is possible now.
func (c *Cluster) bind(claim *clusterv1.Claim) ([]*clusterv1.Assignment, []*clusterv1.Rejection, error) {
	fit, rejected, err := c.find(claim)
	if err != nil || len(fit) < int(max(1, claim.GetCount())) {
		return nil, rejected, err
	}
	var bound []*clusterv1.Assignment
	claim.State, claim.Message, claim.Assignments = clusterv1.ClaimState_CLAIM_STATE_BOUND, "", nil
	for _, g := range fit[:max(1, claim.GetCount())] {
		c.next++
		g = proto.CloneOf(g)
		memory := claim.GetMinMemory()
		taken := memory
		if taken == 0 {
			taken = g.GetFreeMemory()
		}
		g.Free, g.UsedMemory, g.FreeMemory = false, g.GetUsedMemory()+taken, g.GetFreeMemory()-taken
		a := &clusterv1.Assignment{
			Id: fmt.Sprintf("%s.%d", claim.GetId(), c.next), Claim: claim.GetId(), Gpu: g.GetId(), Host: g.GetHost(), Memory: memory, Vgpu: g.GetId() + "/" + claim.GetId(),
			Residence: clusterv1.Residence_RESIDENCE_RESIDENT, CreatedUnixMs: 1, Token: c.index,
		}
		claim.Assignments = append(claim.Assignments, a.GetId())
		bound = append(bound, a)
		c.put(g)
		c.put(a)
	}
	c.put(claim)
	c.note(clusterv1.Kind_KIND_CLAIM, claim.GetId(), "Bound", bound[0].GetGpu(), "gpu/"+bound[0].GetGpu())
	return bound, nil, nil
}

// DeleteClaim implements the RPC. Hosts give GPUs back at once, unless they are down.
func (c *Cluster) DeleteClaim(_ context.Context, r *connect.Request[clusterv1.DeleteClaimRequest]) (*connect.Response[clusterv1.DeleteClaimResponse], error) {
	unlock, err := c.operator()
	if err != nil {
		return nil, err
	}
	defer unlock()
	claim, err := get[*clusterv1.Claim](c, clusterv1.Kind_KIND_CLAIM, r.Msg.GetClaim())
	if err != nil {
		return nil, err
	}
	claim.State = clusterv1.ClaimState_CLAIM_STATE_UNSPECIFIED
	for _, id := range claim.GetAssignments() {
		a, err := get[*clusterv1.Assignment](c, clusterv1.Kind_KIND_ASSIGNMENT, id)
		if err != nil {
			return nil, err
		}
		if h, err := get[*clusterv1.Host](c, clusterv1.Kind_KIND_HOST, a.GetHost()); err != nil || h.GetDown() {
			a.Residence = clusterv1.Residence_RESIDENCE_RELEASING
			claim.State = clusterv1.ClaimState_CLAIM_STATE_RELEASING
			c.put(a)
			continue
		}
		g, err := get[*clusterv1.GPU](c, clusterv1.Kind_KIND_GPU, a.GetGpu())
		if err != nil {
			return nil, err
		}
		taken := a.GetMemory()
		if taken == 0 {
			taken = g.GetUsedMemory()
		}
		g.UsedMemory, g.FreeMemory = g.GetUsedMemory()-taken, g.GetFreeMemory()+taken
		g.Free = g.GetUsedMemory() == 0
		c.delete(clusterv1.Kind_KIND_ASSIGNMENT, id)
		c.put(g)
	}
	if claim.GetState() == clusterv1.ClaimState_CLAIM_STATE_RELEASING {
		c.put(claim)
	} else {
		c.delete(clusterv1.Kind_KIND_CLAIM, claim.GetId())
	}
	c.settle()
	return connect.NewResponse(&clusterv1.DeleteClaimResponse{Claim: claim}), nil
}

// settle binds pending claims.
func (c *Cluster) settle() {
	for _, claim := range all[*clusterv1.Claim](c, clusterv1.Kind_KIND_CLAIM) {
		if claim.GetState() == clusterv1.ClaimState_CLAIM_STATE_PENDING {
			_, _, _ = c.bind(proto.CloneOf(claim)) // a claim that does not fit stays pending
		}
	}
}
