package session

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/news"
)

// The least and the most time for loading a runtime. In between, the limit follows the
// times measured in this VM or on this host.
const (
	leastLoad = 20 * time.Second
	mostLoad  = 3 * time.Minute
)

// loading runs do, which loads a runtime, within that limit.
func (m *Manager) loading(ctx context.Context, library string, do func(context.Context) error) error {
	limit := m.loads.Limit(library)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err := do(ctx)
	switch {
	case err == nil:
		m.loads.Took(library, time.Since(began))
	case time.Since(began) >= limit:
		m.loads.Missed(library, limit)
	}
	return err
}

// service serves GuestService.
type service struct{ m *Manager }

var _ gpuctlv1connect.GuestServiceHandler = service{}

// Handler returns the path and the handler of GuestService.
func (m *Manager) Handler() (string, http.Handler) {
	return gpuctlv1connect.NewGuestServiceHandler(service{m})
}

func (v service) Offer(_ context.Context, req *connect.Request[gpuctlv1.OfferRequest]) (*connect.Response[gpuctlv1.OfferResponse], error) {
	if err := v.m.offer(req.Msg); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.OfferResponse{}), nil
}

func (v service) Withdraw(_ context.Context, req *connect.Request[gpuctlv1.WithdrawRequest]) (*connect.Response[gpuctlv1.WithdrawResponse], error) {
	if err := v.m.withdraw(req.Msg.Token); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.WithdrawResponse{}), nil
}

func (v service) ListSessions(ctx context.Context, _ *connect.Request[gpuctlv1.ListSessionsRequest]) (*connect.Response[gpuctlv1.ListSessionsResponse], error) {
	v.m.refreshAll(ctx)
	resp := &gpuctlv1.ListSessionsResponse{}
	for _, s := range v.m.list() {
		resp.Sessions = append(resp.Sessions, s.snapshot())
	}
	return connect.NewResponse(resp), nil
}

func (v service) WatchSessions(ctx context.Context, _ *connect.Request[gpuctlv1.WatchSessionsRequest], st *connect.ServerStream[gpuctlv1.Session]) error {
	return v.m.watch(ctx, st.Send)
}

func (v service) Plan(ctx context.Context, req *connect.Request[gpuctlv1.PlanRequest]) (*connect.Response[gpuctlv1.PlanResponse], error) {
	resp, err := v.m.plan(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

func (v service) Swap(ctx context.Context, req *connect.Request[gpuctlv1.SwapRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	return report(ctx, st, func(sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
		return v.m.swap(ctx, req.Msg, sink)
	})
}

func (v service) Suspend(ctx context.Context, req *connect.Request[gpuctlv1.SuspendRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	return report(ctx, st, func(sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
		return v.m.suspend(ctx, req.Msg, sink)
	})
}

func (v service) Resume(ctx context.Context, req *connect.Request[gpuctlv1.ResumeRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	return report(ctx, st, func(sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
		return v.m.resume(ctx, req.Msg, sink)
	})
}

func (v service) Probe(ctx context.Context, req *connect.Request[gpuctlv1.ProbeRequest]) (*connect.Response[gpuctlv1.ProbeResponse], error) {
	if req.Msg.GetRuntime().GetLibrary() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no runtime library named"))
	}
	var resp *gpuctlv1.ProbeResponse
	err := v.m.loading(ctx, req.Msg.GetRuntime().GetLibrary(), func(ctx context.Context) (err error) {
		resp, err = v.m.cfg.Launcher.Probe(ctx, req.Msg.Runtime)
		return err
	})
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return connect.NewResponse(resp), nil
}

func (v service) Warm(ctx context.Context, req *connect.Request[gpuctlv1.WarmRequest]) (*connect.Response[gpuctlv1.WarmResponse], error) {
	if req.Msg.GetRuntime().GetLibrary() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no runtime library named"))
	}
	err := v.m.loading(ctx, req.Msg.GetRuntime().GetLibrary(), func(ctx context.Context) error { return v.m.warm(ctx, req.Msg.Runtime) })
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return connect.NewResponse(&gpuctlv1.WarmResponse{}), nil
}

// Lender lends GPUs of this host to sessions of others.
type Lender interface {
	// Lend starts a far executor. A lease that is already there, with an equal request, is
	// returned again.
	Lend(ctx context.Context, req *gpuctlv1.LendRequest) (*gpuctlv1.LendResponse, error)
	// EndLease ends a lease and forgets it. It does nothing if there is no such lease.
	EndLease(ctx context.Context, id string) error
	// Leases returns all leases, oldest first.
	Leases() []*gpuctlv1.Lease
}

func (v service) lender() (Lender, error) {
	if v.m.cfg.Lender == nil {
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("this gpuguest lends no GPUs: start it with --lend"))
	}
	return v.m.cfg.Lender, nil
}

func (v service) Lend(ctx context.Context, req *connect.Request[gpuctlv1.LendRequest]) (*connect.Response[gpuctlv1.LendResponse], error) {
	l, err := v.lender()
	if err != nil {
		return nil, err
	}
	resp, err := l.Lend(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

func (v service) EndLease(ctx context.Context, req *connect.Request[gpuctlv1.EndLeaseRequest]) (*connect.Response[gpuctlv1.EndLeaseResponse], error) {
	l, err := v.lender()
	if err != nil {
		return nil, err
	}
	if err := l.EndLease(ctx, req.Msg.Lease); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.EndLeaseResponse{}), nil
}

func (v service) ListLeases(_ context.Context, _ *connect.Request[gpuctlv1.ListLeasesRequest]) (*connect.Response[gpuctlv1.ListLeasesResponse], error) {
	l, err := v.lender()
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.ListLeasesResponse{Leases: l.Leases()}), nil
}

// report runs an operation and streams its progress. It drops progress messages if the
// listener does not read, because the application must not wait for the listener.
func report(ctx context.Context, st *connect.ServerStream[gpuctlv1.Progress],
	run func(sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error),
) error {
	relay := news.NewRelay[*gpuctlv1.Progress]()
	var wg sync.WaitGroup
	var sent error
	wg.Go(func() { sent = relay.Send(ctx, st.Send) })
	last := &gpuctlv1.Progress{}
	res, err := run(func(p *gpuctlv1.Progress) {
		last = p
		relay.Tell(p)
	})
	if err != nil {
		relay.Close()
		wg.Wait()
		return err
	}
	last = proto.CloneOf(last) // a message that was sent before may still be in use
	last.Result = res
	relay.End(last)
	wg.Wait()
	return sent
}
