package clusterapi

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
)

func (a *API) fromHost(ctx context.Context) bool {
	c, ok := access.From(ctx)
	return ok && c.Kind == access.Host
}

const maxForwarded = 256 // most commands in one request

// Apply proposes commands that another host forwards.
func (a *API) Apply(ctx context.Context, req *connect.Request[clusterv1.ApplyRequest]) (*connect.Response[clusterv1.ApplyResponse], error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	if n := len(req.Msg.GetCommands()); n == 0 || n > maxForwarded {
		return nil, reason.Coded(fmt.Errorf("%w: %d commands at once", errInvalid, n))
	}
	results, err := l.ApplyLocal(ctx, req.Msg.GetCommands())
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.ApplyResponse{Results: results}), nil
}

// ReadIndex returns an index for linearizable reads of other hosts (Raft, section 6.4 of
// Ongaro's thesis).
func (a *API) ReadIndex(ctx context.Context, _ *connect.Request[clusterv1.ReadIndexRequest]) (*connect.Response[clusterv1.ReadIndexResponse], error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	index, err := l.ReadIndex(ctx)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.ReadIndexResponse{Index: index}), nil
}

// Heartbeat records that a host is alive.
func (a *API) Heartbeat(ctx context.Context, req *connect.Request[clusterv1.HeartbeatRequest]) (*connect.Response[clusterv1.HeartbeatResponse], error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	if c, ok := access.From(ctx); ok && c.ID != req.Msg.GetHostId() {
		return nil, reason.Coded(reason.Errorf(reason.Denied, "host %s speaks for host %s", c.ID, req.Msg.GetHostId()).On("host", c.ID))
	}
	res, err := l.HandleHeartbeat(req.Msg)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(res), nil
}

// Facts returns this host's part of Top.
func (a *API) Facts(ctx context.Context, _ *connect.Request[clusterv1.FactsRequest]) (*connect.Response[clusterv1.FactsResponse], error) {
	facts, err := a.member.Facts(ctx)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.FactsResponse{Facts: facts}), nil
}

// Enroll admits a host or user that has a token. The leader does so: its clock decides
// whether the token has expired, and the log that it is used only once.
func (a *API) Enroll(ctx context.Context, req *connect.Request[clusterv1.EnrollRequest]) (*connect.Response[clusterv1.EnrollResponse], error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if !a.fromHost(ctx) {
		res, err := a.enrollElsewhere(ctx, l, req)
		if err != nil || res != nil {
			return res, err
		}
	}
	res, err := a.enroll(ctx, l, req.Msg)
	if err != nil {
		// Anybody can cause this line of the log, so its rate and its length are limited.
		if skipped, ok := a.quiet.Allow("enroll"); ok {
			a.log.Warn("nobody was let in", "token", fmt.Sprintf("%.64s", req.Msg.GetTokenId()), "name", fmt.Sprintf("%.64s", req.Msg.GetHost()), "err", fmt.Sprintf("%.500s", err.Error()), "skipped", skipped)
		}
		return nil, reason.Coded(err)
	}
	a.log.Info("let in", "name", req.Msg.GetHost(), "token", req.Msg.GetTokenId())
	return connect.NewResponse(res), nil
}

// enrollElsewhere forwards the request to the leader, and waits for one if there is none.
// It returns nil if this host is the leader. If an answer was lost, the request may be
// repeated.
func (a *API) enrollElsewhere(ctx context.Context, l Log, req *connect.Request[clusterv1.EnrollRequest]) (*connect.Response[clusterv1.EnrollResponse], error) {
	const pause = 20 * time.Millisecond
	fate := replica.ErrNoLeader
	for {
		if l.IsLeader() {
			return nil, nil
		}
		err := errors.New("an election is under way")
		if _, address := l.Leader(); address != "" {
			forwarded, cancel := whileLeading(ctx, l, address)
			var res *connect.Response[clusterv1.EnrollResponse]
			res, err = a.member.Peer(address).Enroll(forwarded, connect.NewRequest(req.Msg))
			lost := forwarded.Err() != nil && ctx.Err() == nil
			cancel()
			if err == nil || !lost && connect.IsWireError(err) && connect.CodeOf(err) != connect.CodeUnavailable {
				return res, err
			}
			if !reason.Undone(err) {
				fate = replica.ErrTimeout
			}
		}
		select {
		case <-ctx.Done():
			return nil, reason.Coded(fmt.Errorf("%w: %s", fate, err.Error()))
		case <-time.After(pause):
		}
	}
}

func (a *API) enroll(ctx context.Context, l Log, m *clusterv1.EnrollRequest) (*clusterv1.EnrollResponse, error) {
	v, err := l.Read(ctx, false)
	if err != nil {
		return nil, err
	}
	token := v.JoinToken(m.GetTokenId())
	if token == nil {
		return a.again(v, m)
	}
	if err := pki.VerifyToken(m.GetSecret(), token, m.GetHost(), a.now()); err != nil {
		return nil, err
	}
	ca, err := a.member.Authority()
	if err != nil {
		return nil, err
	}
	identity, who, err := a.newcomer(v, token, m)
	if err != nil {
		return nil, err
	}
	// Check everything in the request first, so that a wrong one does not use up the
	// token.
	res, err := a.welcome(v, ca, who, m)
	if err != nil {
		return nil, err
	}
	joins := identity.GetRole() == clusterv1.Role_ROLE_HOST // a user's token is good for no host's identity
	if joins && v.Identity(identity.GetId()).GetRole() == clusterv1.Role_ROLE_HOST && v.HostByID(identity.GetId()) == nil {
		// It was admitted before, and crashed before it was a member.
		_, err := scheduler.Check(l.Apply(ctx, &clusterv1.Command{Actor: token.GetCreatedBy(), Op: &clusterv1.Command_DeleteIdentity{
			DeleteIdentity: &clusterv1.DeleteIdentity{Id: identity.GetId()},
		}}))
		if err != nil {
			return nil, err
		}
	}
	_, err = scheduler.Check(l.Apply(ctx, &clusterv1.Command{Actor: token.GetCreatedBy(), Op: &clusterv1.Command_UseJoinToken{
		UseJoinToken: &clusterv1.UseJoinToken{Id: token.GetId(), Identity: identity},
	}}))
	if err != nil {
		return nil, err
	}
	if identity.GetRole() == clusterv1.Role_ROLE_HOST {
		if err := l.AddServer(ctx, m.GetHostId(), m.GetAddress()); err != nil {
			// It is admitted nevertheless: the leader adds hosts that send heartbeats.
			a.log.Warn("host not added yet", "host", m.GetHost(), "err", err)
		}
	}
	return res, nil
}

// welcome makes the answer for a host or user that is admitted.
func (a *API) welcome(v *state.View, ca *pki.CA, who pki.Identity, m *clusterv1.EnrollRequest) (*clusterv1.EnrollResponse, error) {
	cert, err := ca.Sign(m.GetCsr(), who, a.now())
	if err != nil {
		return nil, err
	}
	res := &clusterv1.EnrollResponse{Certificate: cert, Ca: ca.Certificate().Raw, ClusterId: ca.ClusterID()}
	if who.Role == clusterv1.Role_ROLE_HOST {
		key, err := ca.KeyDER()
		if err != nil {
			return nil, err
		}
		if res.CaKey, err = pki.Seal(m.GetSecret(), key); err != nil {
			return nil, err
		}
	}
	for h := range v.Hosts() {
		res.Addresses = append(res.Addresses, h.GetAddress())
	}
	return res, nil
}

// again repeats the answer for a request that was admitted before, if it is the very same
// request: the first answer may have been lost with the leader. Otherwise a used token is
// refused.
func (a *API) again(v *state.View, m *clusterv1.EnrollRequest) (*clusterv1.EnrollResponse, error) {
	id := m.GetHostId()
	if id == "" {
		id = m.GetHost()
	}
	identity := v.Identity(id)
	if identity == nil || identity.GetEnrolment() != pki.EnrolmentOf(m.GetSecret(), m.GetCsr()) {
		return nil, pki.VerifyToken(m.GetSecret(), nil, m.GetHost(), a.now())
	}
	ca, err := a.member.Authority()
	if err != nil {
		return nil, err
	}
	who := pki.Identity{ID: id, Role: identity.GetRole(), Enrolment: identity.GetEnrolment()}
	if identity.GetRole() == clusterv1.Role_ROLE_HOST {
		who = pki.HostIdentity(id, identity.GetHost(), m.GetAddress(), identity.GetEnrolment())
	}
	return a.welcome(v, ca, who, m)
}

// newcomer returns the identity that a token admits.
func (a *API) newcomer(v *state.View, token *clusterv1.JoinToken, m *clusterv1.EnrollRequest) (*clusterv1.Identity, pki.Identity, error) {
	name := m.GetHost()
	identity := &clusterv1.Identity{Id: name, Role: token.GetRole(), CreatedUnixMs: a.now().UnixMilli()}
	if v.Protocol() >= state.ProtocolEnrolments {
		identity.Enrolment = pki.EnrolmentOf(m.GetSecret(), m.GetCsr())
	}
	if token.GetRole() != clusterv1.Role_ROLE_HOST {
		return identity, pki.Identity{ID: name, Role: token.GetRole(), Enrolment: identity.GetEnrolment()}, nil
	}
	identity.Id, identity.Host = m.GetHostId(), name
	if h := v.Host(name); h != nil && h.GetId() != m.GetHostId() {
		return nil, pki.Identity{}, reason.Detail(fmt.Errorf("%w: there is a host %q already, at %s", errRefused, name, h.GetAddress())).On("host", name).Do("join with another name (--name), or remove that one first")
	}
	for h := range v.Hosts() {
		if h.GetAddress() == m.GetAddress() && h.GetId() != m.GetHostId() {
			return nil, pki.Identity{}, reason.Detail(fmt.Errorf("%w: the address %s is host %s's", errRefused, m.GetAddress(), h.GetName())).On("host", h.GetName()).Do("join with another one (--address), or remove that host first")
		}
	}
	if m.GetProtocol() < v.Protocol() {
		return nil, pki.Identity{}, reason.Errorf(reason.HostTooOld, "%w: host %s speaks protocol %d, the cluster %d", errRefused, name, m.GetProtocol(), v.Protocol()).On("host", name).Do("install a newer gpuctl there")
	}
	return identity, pki.HostIdentity(m.GetHostId(), name, m.GetAddress(), identity.GetEnrolment()), nil
}

// Renew issues the next certificate to a host or user.
func (a *API) Renew(ctx context.Context, req *connect.Request[clusterv1.RenewRequest]) (*connect.Response[clusterv1.RenewResponse], error) {
	ca, err := a.member.Authority()
	if err != nil {
		return nil, reason.Coded(err)
	}
	c, ok := access.From(ctx)
	if !ok {
		return nil, reason.Coded(reason.Errorf(reason.Unauthenticated, "nobody to renew a certificate for"))
	}
	// The new certificate has the enrolment of the caller's. If that was revoked
	// meanwhile, the new one is not valid either.
	who := pki.Identity{ID: c.ID, Role: c.Role, Enrolment: c.Enrolment}
	if c.Kind == access.Host {
		v, err := a.read(ctx, true)
		if err != nil {
			return nil, err
		}
		who = pki.HostIdentity(c.ID, c.Host, v.HostByID(c.ID).GetAddress(), c.Enrolment)
	}
	cert, err := ca.Sign(req.Msg.GetCsr(), who, a.now())
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.RenewResponse{Certificate: cert, Ca: ca.Certificate().Raw}), nil
}
