package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// request converts a request of the API to one of package placement.
func request(m *clusterv1.PlaceRequest, host string) (placement.Request, error) {
	const most = 1000
	r := placement.Request{
		Claim: m.GetClaim(), Verb: placement.Verb(m.GetVerb()), From: m.GetFromGpus(), Host: host,
		Limit: int(min(m.GetLimit(), most)),
	}
	if r.Claim == nil {
		r.Claim = &clusterv1.Claim{}
	}
	switch r.Verb {
	case placement.New, placement.Upgrade, placement.Downgrade, placement.Migrate, placement.Resume:
		return r, nil
	}
	return r, fmt.Errorf("%w: verb %q is not upgrade, downgrade, migrate or resume", errInvalid, m.GetVerb())
}

// Place returns where a claim would go. It changes nothing.
func (a *API) Place(ctx context.Context, req *connect.Request[clusterv1.PlaceRequest]) (*connect.Response[clusterv1.PlaceResponse], error) {
	v, err := a.read(ctx, req.Msg.GetStale())
	if err != nil {
		return nil, err
	}
	r, err := request(req.Msg, a.member.Self().Host)
	if err == nil {
		err = a.mayLabel(ctx, r.Claim)
	}
	if err != nil {
		return nil, reason.Coded(err)
	}
	bound, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r.Context = bound
	d := a.member.Scheduler().Place(v, r)
	if d.Err != nil {
		return nil, reason.Coded(d.Err)
	}
	return connect.NewResponse(decision(d, req.Msg.GetLimitRejected())), nil
}

func decision(d placement.Decision, limit uint32) *clusterv1.PlaceResponse {
	res := &clusterv1.PlaceResponse{Index: d.Index}
	for _, c := range d.Candidates {
		res.Candidates = append(res.Candidates, c.Proto())
	}
	res.Rejected = rejected(d, limit)
	return res
}

func rejected(d placement.Decision, limit uint32) (out []*clusterv1.Rejection) {
	for r := range d.Rejected() {
		out = append(out, r)
		if limit > 0 && uint32(len(out)) == limit {
			break
		}
	}
	return out
}

// CreateClaim makes a claim on the leader. There, the state that decides is closest to
// the log, so conflicts are rarest.
func (a *API) CreateClaim(ctx context.Context, req *connect.Request[clusterv1.CreateClaimRequest]) (*connect.Response[clusterv1.CreateClaimResponse], error) {
	if _, err := a.replicated(); err != nil {
		return nil, err
	}
	if req.Msg.GetClaim() == nil {
		return nil, reason.Coded(fmt.Errorf("%w: there is no claim in it", errInvalid))
	}
	if err := a.mayLabel(ctx, req.Msg.GetClaim()); err != nil {
		return nil, reason.Coded(err)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c := proto.CloneOf(req.Msg.GetClaim())
	if c.GetId() == "" {
		c.Id = "claim-" + random.Hex(4)
	}
	if c.GetOwner() == "" || !a.fromHost(ctx) {
		c.Owner = a.owner(ctx)
	}
	if c.GetCreatedUnixMs() == 0 {
		c.CreatedUnixMs = a.now().UnixMilli()
	}
	res, err := a.Bind(ctx, c)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(res), nil
}

// mayLabel returns why the caller may not have a claim with such labels: by those of hosts, the
// cluster finds whose a claim is.
func (a *API) mayLabel(ctx context.Context, c *clusterv1.Claim) error {
	if a.fromHost(ctx) {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(c.GetLabels())) {
		if strings.HasPrefix(key, placement.LabelPrefix) {
			return reason.Errorf(reason.Denied, "label %.100q: only hosts give claims labels that begin with %q", key, placement.LabelPrefix).
				On("label", key).Do("choose another name for it")
		}
	}
	return nil
}

// Bind makes a claim that has an id. It does so on the leader if the leader can be
// reached, otherwise on this host.
func (a *API) Bind(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	maybe := false // whether the claim may have been made
	if _, address := l.Leader(); !l.IsLeader() && address != "" && !a.fromHost(ctx) {
		forwarded, cancel := whileLeading(ctx, l, address)
		res, err := a.member.Peer(address).CreateClaim(forwarded, connect.NewRequest(&clusterv1.CreateClaimRequest{Claim: c}))
		lost := forwarded.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil {
			return res.Msg, nil
		}
		if !lost && connect.IsWireError(err) && connect.CodeOf(err) != connect.CodeUnavailable {
			return nil, err // the leader has answered; the connection did not fail
		}
		// The claim's id makes it safe to try again on this host.
		maybe = !reason.Undone(err)
	}
	res, err := a.Create(ctx, c)
	if maybe && errors.Is(err, replica.ErrNoLeader) {
		err = fmt.Errorf("%w: %s", replica.ErrTimeout, err.Error()) // a caller that gets ErrNoLeader may make another claim
	}
	return res, err
}

// forwardFor limits the time that a call waits for one leader.
const forwardFor = 4 * time.Second

func whileLeading(ctx context.Context, l Log, address string) (context.Context, context.CancelFunc) {
	return replica.WhileLeading(ctx, func() string {
		_, now := l.Leader()
		return now
	}, address, forwardFor)
}

// Create makes a claim on this host.
func (a *API) Create(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	o, err := a.member.Scheduler().Create(ctx, c, c.GetOwner(), a.member.Self().Host)
	if err != nil {
		return nil, err
	}
	res := &clusterv1.CreateClaimResponse{Claim: o.Claim, Assignments: o.Assignments}
	if len(o.Assignments) == 0 {
		const most = 1000
		res.Rejected = rejected(o.Decision, most)
	}
	return res, nil
}

// DeleteClaim releases the assignments of a claim. The claim ends when the last one is
// free.
func (a *API) DeleteClaim(ctx context.Context, req *connect.Request[clusterv1.DeleteClaimRequest]) (*connect.Response[clusterv1.DeleteClaimResponse], error) {
	res, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: req.Msg.GetClaim()}}})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.DeleteClaimResponse{Claim: res.GetClaim()}), nil
}

// SetDrain starts or ends the drain of a host: while it is drained, it gets nothing new.
func (a *API) SetDrain(ctx context.Context, req *connect.Request[clusterv1.SetDrainRequest]) (*connect.Response[clusterv1.SetDrainResponse], error) {
	m := req.Msg
	res, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_DrainHost{
		DrainHost: &clusterv1.DrainHost{Host: m.GetHost(), Draining: m.GetDraining(), Message: m.GetMessage()},
	}})
	if err != nil {
		return nil, err
	}
	o, err := a.after(ctx, res, clusterv1.Kind_KIND_HOST, m.GetHost())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.SetDrainResponse{Host: o.GetHost()}), nil
}

// SetCordon cordons a GPU or ends that: while it is cordoned, it gets nothing new.
func (a *API) SetCordon(ctx context.Context, req *connect.Request[clusterv1.SetCordonRequest]) (*connect.Response[clusterv1.SetCordonResponse], error) {
	m := req.Msg
	res, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_CordonGpu{
		CordonGpu: &clusterv1.CordonGPU{Gpu: m.GetGpu(), Cordoned: m.GetCordoned(), Message: m.GetMessage()},
	}})
	if err != nil {
		return nil, err
	}
	o, err := a.after(ctx, res, clusterv1.Kind_KIND_GPU, m.GetGpu())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.SetCordonResponse{Gpu: o.GetGpu()}), nil
}

// SetLabels changes a host's labels.
func (a *API) SetLabels(ctx context.Context, req *connect.Request[clusterv1.SetLabelsRequest]) (*connect.Response[clusterv1.SetLabelsResponse], error) {
	m := req.Msg
	res, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_LabelHost{
		LabelHost: &clusterv1.LabelHost{Host: m.GetHost(), Set: m.GetSet(), Remove: m.GetRemove()},
	}})
	if err != nil {
		return nil, err
	}
	o, err := a.after(ctx, res, clusterv1.Kind_KIND_HOST, m.GetHost())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.SetLabelsResponse{Host: o.GetHost()}), nil
}

// SetRank sets the rank of a model in the order of upgrades.
func (a *API) SetRank(ctx context.Context, req *connect.Request[clusterv1.SetRankRequest]) (*connect.Response[clusterv1.SetRankResponse], error) {
	m := req.Msg
	res, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_RankModel{
		RankModel: &clusterv1.RankModel{Model: m.GetModel(), Rank: m.GetRank(), Clear: m.GetClear()},
	}})
	if err != nil {
		return nil, err
	}
	o, err := a.after(ctx, res, clusterv1.Kind_KIND_MODEL, m.GetModel())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.SetRankResponse{Model: o.GetModel()}), nil
}

// after reads an object after a command was applied to it.
func (a *API) after(ctx context.Context, res *clusterv1.Result, kind clusterv1.Kind, name string) (*clusterv1.Object, error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	v := l.State().View()
	if v.Index() < res.GetIndex() { // the leader has applied the command, but this host has not yet
		if v, err = l.Read(ctx, false); err != nil {
			return nil, reason.Coded(err)
		}
	}
	if o := v.Object(kind, name); o != nil {
		return o, nil
	}
	return nil, reason.Coded(fmt.Errorf("%w: %q is gone again", errNotFound, name))
}

const (
	tokenTTL    = time.Hour
	maxTokenTTL = 30 * 24 * time.Hour
	tokenHosts  = 5 // most addresses in a token
)

// CreateToken makes a join token. It admits one host or user.
func (a *API) CreateToken(ctx context.Context, req *connect.Request[clusterv1.CreateTokenRequest]) (*connect.Response[clusterv1.CreateTokenResponse], error) {
	m := req.Msg
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	cert := a.member.Certificate()
	if cert == nil {
		return nil, reason.Coded(reason.Detail(fmt.Errorf("%w: hostd --dev is a cluster of one in memory that nobody can join", errRefused)).Do("run hostd as a service"))
	}
	ttl := time.Duration(m.GetTtlS()) * time.Second
	switch {
	case ttl == 0:
		ttl = tokenTTL
	case ttl > maxTokenTTL:
		return nil, reason.Coded(fmt.Errorf("%w: a token lasts at most %v", errInvalid, maxTokenTTL))
	}
	role := m.GetRole()
	if role == clusterv1.Role_ROLE_UNSPECIFIED {
		role = clusterv1.Role_ROLE_HOST
	}
	var addresses []string
	for _, member := range l.Status().GetMembers() {
		if member.GetHealthy() && len(addresses) < tokenHosts {
			addresses = append(addresses, member.GetAddress())
		}
	}
	token, stored, err := pki.NewToken(pki.Token{
		Addresses: addresses, Fingerprint: pki.Fingerprint(cert.CA), Name: m.GetName(), Role: role, Expires: a.now().Add(ttl),
	}, a.actor(ctx))
	if err != nil {
		return nil, reason.Coded(fmt.Errorf("%w: %w", errInvalid, err))
	}
	if _, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_PutJoinToken{PutJoinToken: &clusterv1.PutJoinToken{Token: stored}}}); err != nil {
		return nil, err
	}
	text, err := token.Encode()
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.CreateTokenResponse{Token: text, Id: token.ID, ExpiresUnixMs: stored.GetExpiresUnixMs()}), nil
}

// ListTokens lists the tokens that have not been used.
func (a *API) ListTokens(ctx context.Context, _ *connect.Request[clusterv1.ListTokensRequest]) (*connect.Response[clusterv1.ListTokensResponse], error) {
	v, err := a.read(ctx, false)
	if err != nil {
		return nil, err
	}
	res := &clusterv1.ListTokensResponse{}
	for t := range v.JoinTokens() {
		t = proto.CloneOf(t)
		t.SecretHash = nil
		res.Tokens = append(res.Tokens, t)
	}
	return connect.NewResponse(res), nil
}

// DeleteToken makes a token invalid.
func (a *API) DeleteToken(ctx context.Context, req *connect.Request[clusterv1.DeleteTokenRequest]) (*connect.Response[clusterv1.DeleteTokenResponse], error) {
	_, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_DeleteJoinToken{DeleteJoinToken: &clusterv1.DeleteJoinToken{Id: req.Msg.GetId()}}})
	return connect.NewResponse(&clusterv1.DeleteTokenResponse{}), err
}

// RemoveHost removes a host from the cluster.
func (a *API) RemoveHost(ctx context.Context, req *connect.Request[clusterv1.RemoveHostRequest]) (*connect.Response[clusterv1.RemoveHostResponse], error) {
	_, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_RemoveHost{
		RemoveHost: &clusterv1.RemoveHost{Host: req.Msg.GetHost(), Force: req.Msg.GetForce()},
	}})
	return connect.NewResponse(&clusterv1.RemoveHostResponse{}), err
}

// RevokeIdentity revokes the certificates of a host or user.
func (a *API) RevokeIdentity(ctx context.Context, req *connect.Request[clusterv1.RevokeIdentityRequest]) (*connect.Response[clusterv1.RevokeIdentityResponse], error) {
	_, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_DeleteIdentity{DeleteIdentity: &clusterv1.DeleteIdentity{Id: req.Msg.GetId()}}})
	return connect.NewResponse(&clusterv1.RevokeIdentityResponse{}), err
}

// ListIdentities lists the hosts and users whose certificates are valid.
func (a *API) ListIdentities(ctx context.Context, _ *connect.Request[clusterv1.ListIdentitiesRequest]) (*connect.Response[clusterv1.ListIdentitiesResponse], error) {
	v, err := a.read(ctx, false)
	if err != nil {
		return nil, err
	}
	res := &clusterv1.ListIdentitiesResponse{}
	for id := range v.Identities() {
		res.Identities = append(res.Identities, id)
	}
	return connect.NewResponse(res), nil
}
