package guesttest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// lease is a far executor.
type lease struct {
	req    *gpuctlv1.LendRequest
	answer *gpuctlv1.LendResponse
	state  gpuctlv1.LeaseState

	allowed []byte // token with which another host may fetch
	fetches []*gpuctlv1.FetchRequest
}

// Lend implements GuestService.
func (g *Guest) Lend(_ context.Context, r *connect.Request[gpuctlv1.LendRequest]) (*connect.Response[gpuctlv1.LendResponse], error) {
	m := r.Msg
	if m.GetLease() == "" || len(m.GetLease()) > 32 || m.GetRuntime().GetLibrary() == "" || len(m.GetPeerCertSha256()) != sha256.Size {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("incomplete lease"))
	}
	if g.Step != nil {
		if err := g.Step("lend", "start"); err != nil {
			return nil, connect.NewError(connect.CodeInternal, err)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if l := g.leases[m.GetLease()]; l != nil {
		if !proto.Equal(l.req, m) {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("lease %s exists with another request", m.GetLease()))
		}
		return connect.NewResponse(l.answer), nil
	}
	token, hash := make([]byte, 32), make([]byte, sha256.Size)
	_, _ = rand.Read(token)
	_, _ = rand.Read(hash)
	l := &lease{req: proto.CloneOf(m), answer: &gpuctlv1.LendResponse{Token: token, CertSha256: hash}, state: gpuctlv1.LeaseState_LEASE_STATE_OFFERED}
	if g.leases == nil {
		g.leases = map[string]*lease{}
	}
	g.leases[m.GetLease()] = l
	return connect.NewResponse(l.answer), nil
}

// EndLease implements GuestService.
func (g *Guest) EndLease(_ context.Context, r *connect.Request[gpuctlv1.EndLeaseRequest]) (*connect.Response[gpuctlv1.EndLeaseResponse], error) {
	if g.Step != nil {
		if err := g.Step("lend", "end"); err != nil {
			return nil, connect.NewError(connect.CodeInternal, err)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.leases, r.Msg.GetLease())
	return connect.NewResponse(&gpuctlv1.EndLeaseResponse{}), nil
}

// ListLeases implements GuestService.
func (g *Guest) ListLeases(context.Context, *connect.Request[gpuctlv1.ListLeasesRequest]) (*connect.Response[gpuctlv1.ListLeasesResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	res := &gpuctlv1.ListLeasesResponse{}
	for id, l := range g.leases {
		res.Leases = append(res.Leases, &gpuctlv1.Lease{Id: id, Runtime: l.req.GetRuntime(), State: l.state, Message: "killed"})
	}
	slices.SortFunc(res.Leases, func(a, b *gpuctlv1.Lease) int { return strings.Compare(a.GetId(), b.GetId()) })
	return connect.NewResponse(res), nil
}

// Leases returns the far executors that run, by id, with their requests.
func (g *Guest) Leases() map[string]*gpuctlv1.LendRequest {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := map[string]*gpuctlv1.LendRequest{}
	for id, l := range g.leases {
		if l.state != gpuctlv1.LeaseState_LEASE_STATE_ENDED {
			out[id] = l.req
		}
	}
	return out
}

// KillLease ends a far executor, as a crash does.
func (g *Guest) KillLease(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l := g.leases[id]; l != nil {
		l.state = gpuctlv1.LeaseState_LEASE_STATE_ENDED
	}
}

// AllowFetch implements GuestService.
func (g *Guest) AllowFetch(_ context.Context, r *connect.Request[gpuctlv1.AllowFetchRequest]) (*connect.Response[gpuctlv1.AllowFetchResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.leases[r.Msg.GetLease()]
	if l == nil || len(r.Msg.GetPeerCertSha256()) != sha256.Size {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no lease %s, or nobody is to fetch", r.Msg.GetLease()))
	}
	l.allowed = make([]byte, 32)
	_, _ = rand.Read(l.allowed)
	return connect.NewResponse(&gpuctlv1.AllowFetchResponse{Token: l.allowed, Name: "fetch-" + r.Msg.GetLease()}), nil
}

// EndFetch implements GuestService.
func (g *Guest) EndFetch(_ context.Context, r *connect.Request[gpuctlv1.EndFetchOfLeaseRequest]) (*connect.Response[gpuctlv1.EndFetchOfLeaseResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l := g.leases[r.Msg.GetLease()]; l != nil {
		l.allowed = nil
	}
	return connect.NewResponse(&gpuctlv1.EndFetchOfLeaseResponse{}), nil
}

// Fetch implements GuestService.
func (g *Guest) Fetch(_ context.Context, r *connect.Request[gpuctlv1.FetchRequest]) (*connect.Response[gpuctlv1.FetchResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l := g.leases[r.Msg.GetLease()]
	if l == nil || len(r.Msg.GetToken()) != 32 || len(r.Msg.GetPeerCertSha256()) != sha256.Size {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no lease %s, or nothing to fetch", r.Msg.GetLease()))
	}
	l.fetches = append(l.fetches, proto.CloneOf(r.Msg))
	return connect.NewResponse(&gpuctlv1.FetchResponse{}), nil
}

// Allowed returns the token with which another host may fetch from a far executor; nil: none.
func (g *Guest) Allowed(lease string) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l := g.leases[lease]; l != nil {
		return l.allowed
	}
	return nil
}

// Fetches returns what a far executor was to fetch.
func (g *Guest) Fetches(lease string) []*gpuctlv1.FetchRequest {
	g.mu.Lock()
	defer g.mu.Unlock()
	if l := g.leases[lease]; l != nil {
		return l.fetches
	}
	return nil
}
