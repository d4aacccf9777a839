package clitest

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Sessions has the sessions of one host. It implements the part of HostService that lists
// them and plans for them.
type Sessions struct {
	gpuctlv1connect.UnimplementedHostServiceHandler

	mu  sync.Mutex
	all []*gpuctlv1.Session
}

// Add adds a session.
func (s *Sessions) Add(one *gpuctlv1.Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, one)
}

// Handle adds the service to a mux.
func (s *Sessions) Handle(mux *http.ServeMux) {
	mux.Handle(gpuctlv1connect.NewHostServiceHandler(s))
}

// find resolves a reference to a session as the real service does: id, process id, a
// unique prefix of the id, or nothing if there is only one.
func (s *Sessions) find(name string) (*gpuctlv1.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var found []*gpuctlv1.Session
	for _, one := range s.all {
		if name != "" && (one.GetId() == name || strconv.FormatUint(uint64(one.GetPid()), 10) == name) {
			return one, nil
		}
		if strings.HasPrefix(one.GetId(), name) {
			found = append(found, one)
		}
	}
	switch {
	case len(s.all) == 0 && name == "":
		return nil, reason.Coded(reason.Errorf(reason.NotFound, "not found: there is no session").On("session", "").Do("start one with gpuctl run -- COMMAND"))
	case len(found) == 0:
		return nil, reason.Coded(reason.Errorf(reason.NotFound, "not found: no session %q", name).On("session", name).Do("gpuctl sessions lists them"))
	case len(found) > 1:
		return nil, fail(connect.CodeInvalidArgument, "invalid: %q can be %s or %s", name, found[0].GetId(), found[1].GetId())
	}
	return found[0], nil
}

// ListSessions implements the RPC.
func (s *Sessions) ListSessions(context.Context, *connect.Request[gpuctlv1.HostListSessionsRequest]) (*connect.Response[gpuctlv1.HostListSessionsResponse], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return connect.NewResponse(&gpuctlv1.HostListSessionsResponse{Sessions: slices.Clone(s.all)}), nil
}

// DescribeSession implements the RPC.
func (s *Sessions) DescribeSession(_ context.Context, r *connect.Request[gpuctlv1.DescribeSessionRequest]) (*connect.Response[gpuctlv1.DescribeSessionResponse], error) {
	one, err := s.find(r.Msg.GetSession())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.DescribeSessionResponse{Session: one}), nil
}

// Plan implements the RPC. It returns one step and the GPU that was asked for.
func (s *Sessions) Plan(_ context.Context, r *connect.Request[gpuctlv1.HostPlanRequest]) (*connect.Response[gpuctlv1.HostPlanResponse], error) {
	one, err := s.find(r.Msg.GetSession())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.HostPlanResponse{
		Session: one.GetId(), From: []string{one.GetTarget().GetGpu()}, Gpus: []string{r.Msg.GetTo()}, Model: "model", Steps: []string{"swap"},
	}), nil
}
