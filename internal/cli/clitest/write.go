package clitest

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// operator begins a call that changes something.
func (c *Cluster) operator() (unlock func(), err error) { return c.begin(clusterv1.Role_ROLE_OPERATOR) }

func (c *Cluster) admin() (unlock func(), err error) { return c.begin(clusterv1.Role_ROLE_ADMIN) }

func (c *Cluster) begin(least clusterv1.Role) (unlock func(), err error) {
	c.mu.Lock()
	if err := c.may(false, least); err != nil {
		c.mu.Unlock()
		return nil, err
	}
	return c.mu.Unlock, nil
}

// SetDrain implements the RPC.
func (c *Cluster) SetDrain(_ context.Context, r *connect.Request[clusterv1.SetDrainRequest]) (*connect.Response[clusterv1.SetDrainResponse], error) {
	unlock, err := c.operator()
	if err != nil {
		return nil, err
	}
	defer unlock()
	h, err := get[*clusterv1.Host](c, clusterv1.Kind_KIND_HOST, r.Msg.GetHost())
	if err != nil {
		return nil, err
	}
	h.Draining, h.Message = r.Msg.GetDraining(), r.Msg.GetMessage()
	what := "Undrained"
	switch {
	case h.GetDown():
	case h.GetDraining():
		h.State = clusterv1.HostState_HOST_STATE_DRAINING
		what = "Drained"
	default:
		h.State = clusterv1.HostState_HOST_STATE_READY
	}
	c.put(h)
	c.note(clusterv1.Kind_KIND_HOST, h.GetName(), what, h.GetMessage())
	c.settle()
	return connect.NewResponse(&clusterv1.SetDrainResponse{Host: h}), nil
}

// SetCordon implements the RPC.
func (c *Cluster) SetCordon(_ context.Context, r *connect.Request[clusterv1.SetCordonRequest]) (*connect.Response[clusterv1.SetCordonResponse], error) {
	unlock, err := c.operator()
	if err != nil {
		return nil, err
	}
	defer unlock()
	g, err := get[*clusterv1.GPU](c, clusterv1.Kind_KIND_GPU, r.Msg.GetGpu())
	if err != nil {
		return nil, err
	}
	g.Cordoned, g.CordonReason = r.Msg.GetCordoned(), r.Msg.GetMessage()
	c.put(g)
	c.note(clusterv1.Kind_KIND_GPU, g.GetId(), map[bool]string{true: "Cordoned", false: "Uncordoned"}[g.GetCordoned()], g.GetCordonReason())
	c.settle()
	return connect.NewResponse(&clusterv1.SetCordonResponse{Gpu: g}), nil
}

// SetLabels implements the RPC.
func (c *Cluster) SetLabels(_ context.Context, r *connect.Request[clusterv1.SetLabelsRequest]) (*connect.Response[clusterv1.SetLabelsResponse], error) {
	unlock, err := c.operator()
	if err != nil {
		return nil, err
	}
	defer unlock()
	h, err := get[*clusterv1.Host](c, clusterv1.Kind_KIND_HOST, r.Msg.GetHost())
	if err != nil {
		return nil, err
	}
	if h.Labels == nil {
		h.Labels = map[string]string{}
	}
	maps.Copy(h.GetLabels(), r.Msg.GetSet())
	for _, key := range r.Msg.GetRemove() {
		delete(h.GetLabels(), key)
	}
	c.put(h)
	return connect.NewResponse(&clusterv1.SetLabelsResponse{Host: h}), nil
}

// SetRank implements the RPC.
func (c *Cluster) SetRank(_ context.Context, r *connect.Request[clusterv1.SetRankRequest]) (*connect.Response[clusterv1.SetRankResponse], error) {
	unlock, err := c.operator()
	if err != nil {
		return nil, err
	}
	defer unlock()
	m, err := get[*clusterv1.Model](c, clusterv1.Kind_KIND_MODEL, r.Msg.GetModel())
	if err != nil {
		return nil, err
	}
	m.Ranked = !r.Msg.GetClear()
	if m.GetRanked() {
		m.Rank = r.Msg.GetRank()
	} else {
		m.Rank = 1
	}
	c.put(m)
	return connect.NewResponse(&clusterv1.SetRankResponse{Model: m}), nil
}

// SetQueue implements the RPC.
func (c *Cluster) SetQueue(_ context.Context, r *connect.Request[clusterv1.SetQueueRequest]) (*connect.Response[clusterv1.SetQueueResponse], error) {
	unlock, err := c.admin()
	if err != nil {
		return nil, err
	}
	defer unlock()
	c.queue = r.Msg.GetPolicy()
	return connect.NewResponse(&clusterv1.SetQueueResponse{Policy: c.queue}), nil
}

// CreateToken implements the RPC.
func (c *Cluster) CreateToken(_ context.Context, r *connect.Request[clusterv1.CreateTokenRequest]) (*connect.Response[clusterv1.CreateTokenResponse], error) {
	unlock, err := c.admin()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if r.Msg.GetRole() == clusterv1.Role_ROLE_UNSPECIFIED {
		return nil, fail(connect.CodeInvalidArgument, "a token needs a role")
	}
	c.next++
	ttl := time.Hour
	if s := r.Msg.GetTtlS(); s > 0 {
		ttl = time.Duration(s) * time.Second
	}
	id := fmt.Sprintf("t%d", c.next)
	t := &clusterv1.JoinToken{Id: id, Role: r.Msg.GetRole(), Name: r.Msg.GetName(), ExpiresUnixMs: time.Now().Add(ttl).UnixMilli(), CreatedBy: "ada"}
	c.tokens[id] = t
	return connect.NewResponse(&clusterv1.CreateTokenResponse{Token: "gpuctl1." + id + ".secret", Id: id, ExpiresUnixMs: t.GetExpiresUnixMs()}), nil
}

// ListTokens implements the RPC.
func (c *Cluster) ListTokens(context.Context, *connect.Request[clusterv1.ListTokensRequest]) (*connect.Response[clusterv1.ListTokensResponse], error) {
	unlock, err := c.admin()
	if err != nil {
		return nil, err
	}
	defer unlock()
	return connect.NewResponse(&clusterv1.ListTokensResponse{Tokens: byName(c.tokens)}), nil
}

// DeleteToken implements the RPC.
func (c *Cluster) DeleteToken(_ context.Context, r *connect.Request[clusterv1.DeleteTokenRequest]) (*connect.Response[clusterv1.DeleteTokenResponse], error) {
	unlock, err := c.admin()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if c.tokens[r.Msg.GetId()] == nil {
		return nil, fail(connect.CodeNotFound, "there is no token %q", r.Msg.GetId())
	}
	delete(c.tokens, r.Msg.GetId())
	return connect.NewResponse(&clusterv1.DeleteTokenResponse{}), nil
}

// RemoveHost implements the RPC.
func (c *Cluster) RemoveHost(_ context.Context, r *connect.Request[clusterv1.RemoveHostRequest]) (*connect.Response[clusterv1.RemoveHostResponse], error) {
	unlock, err := c.admin()
	if err != nil {
		return nil, err
	}
	defer unlock()
	name := r.Msg.GetHost()
	if _, err := get[*clusterv1.Host](c, clusterv1.Kind_KIND_HOST, name); err != nil {
		return nil, err
	}
	var on []string
	for _, a := range all[*clusterv1.Assignment](c, clusterv1.Kind_KIND_ASSIGNMENT) {
		if a.GetHost() == name {
			on = append(on, a.GetId())
		}
	}
	if len(on) > 0 && !r.Msg.GetForce() {
		return nil, fail(connect.CodeFailedPrecondition, "host %s has assignments: %s", name, strings.Join(on, ", "))
	}
	for _, id := range on {
		c.delete(clusterv1.Kind_KIND_ASSIGNMENT, id)
	}
	for _, g := range all[*clusterv1.GPU](c, clusterv1.Kind_KIND_GPU) {
		if g.GetHost() == name {
			c.delete(clusterv1.Kind_KIND_GPU, g.GetId())
		}
	}
	c.delete(clusterv1.Kind_KIND_HOST, name)
	c.note(clusterv1.Kind_KIND_HOST, name, "Removed", "")
	return connect.NewResponse(&clusterv1.RemoveHostResponse{}), nil
}

// ListIdentities implements the RPC.
func (c *Cluster) ListIdentities(context.Context, *connect.Request[clusterv1.ListIdentitiesRequest]) (*connect.Response[clusterv1.ListIdentitiesResponse], error) {
	unlock, err := c.admin()
	if err != nil {
		return nil, err
	}
	defer unlock()
	return connect.NewResponse(&clusterv1.ListIdentitiesResponse{Identities: byName(c.identities)}), nil
}

// RevokeIdentity implements the RPC.
func (c *Cluster) RevokeIdentity(_ context.Context, r *connect.Request[clusterv1.RevokeIdentityRequest]) (*connect.Response[clusterv1.RevokeIdentityResponse], error) {
	unlock, err := c.admin()
	if err != nil {
		return nil, err
	}
	defer unlock()
	if c.identities[r.Msg.GetId()] == nil {
		return nil, fail(connect.CodeNotFound, "there is no identity %q", r.Msg.GetId())
	}
	delete(c.identities, r.Msg.GetId())
	return connect.NewResponse(&clusterv1.RevokeIdentityResponse{}), nil
}

// Init implements the RPC.
func (c *Cluster) Init(context.Context, *connect.Request[clusterv1.InitRequest]) (*connect.Response[clusterv1.InitResponse], error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.enter(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.InitResponse{Status: c.status()}), nil
}

// Join implements the RPC. It accepts each token of CreateToken once.
func (c *Cluster) Join(_ context.Context, r *connect.Request[clusterv1.JoinRequest]) (*connect.Response[clusterv1.JoinResponse], error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	parts := strings.Split(r.Msg.GetToken(), ".")
	if len(parts) != 3 || parts[0] != "gpuctl1" {
		return nil, fail(connect.CodeInvalidArgument, "that is not a join token")
	}
	if c.tokens[parts[1]] == nil {
		return nil, fail(connect.CodeUnauthenticated, "token %s was used, deleted, or never was", parts[1])
	}
	if err := c.enter(); err != nil {
		return nil, err
	}
	delete(c.tokens, parts[1])
	return connect.NewResponse(&clusterv1.JoinResponse{Status: c.status()}), nil
}

func (c *Cluster) enter() error {
	if c.joined {
		return fail(connect.CodeFailedPrecondition, "host h1 is in cluster c0ffee already")
	}
	c.joined = true
	return nil
}

func byName[T proto.Message](m map[string]T) []T {
	var out []T
	for _, name := range sortedKeys(m) {
		out = append(out, proto.CloneOf(m[name]))
	}
	return out
}
