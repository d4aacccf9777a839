package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/news"
)

// service serves GuestService.
type service struct{ engines []Engine }

var _ gpuctlv1connect.GuestServiceHandler = service{}

// Handler returns the path and the handler of GuestService.
func Handler(engines ...Engine) (string, http.Handler) {
	return gpuctlv1connect.NewGuestServiceHandler(service{engines})
}

// of returns the engine that has the session.
func (v service) of(session string) (Engine, error) {
	for _, e := range v.engines {
		if e.Has(session) {
			return e, nil
		}
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no session %q", session))
}

// with returns the engine that has the session, or the one that has sessions in folders. The
// session of a folder must be one of that engine's, or none.
func (v service) with(session, folder string) (Engine, error) {
	if folder == "" {
		return v.of(session)
	}
	f, err := able[Folders](v, "writes processes to folders")
	if err != nil {
		return nil, err
	}
	if session != "" && !f.Has(session) {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("session %s: its processes can't be written to a folder", session))
	}
	return f, nil
}

// able returns the first engine that is a T as well.
func able[T any](v service, what string) (T, error) {
	for _, e := range v.engines {
		if t, ok := e.(T); ok {
			return t, nil
		}
	}
	var none T
	return none, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("no engine of this gpuguest %s", what))
}

func (v service) Offer(ctx context.Context, req *connect.Request[gpuctlv1.OfferRequest]) (*connect.Response[gpuctlv1.OfferResponse], error) {
	served := false
	for _, e := range v.engines {
		if !e.Serves(req.Msg.GetTarget()) {
			// The token may have had another target, which this engine must not use any more.
			if err := e.Withdraw(ctx, req.Msg.GetToken()); err != nil {
				return nil, err
			}
			continue
		}
		served = true
		if err := e.Offer(ctx, req.Msg); err != nil {
			return nil, err
		}
	}
	if !served {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the target names neither a runtime library nor a GPU of NVIDIA's driver"))
	}
	return connect.NewResponse(&gpuctlv1.OfferResponse{}), nil
}

func (v service) Withdraw(ctx context.Context, req *connect.Request[gpuctlv1.WithdrawRequest]) (*connect.Response[gpuctlv1.WithdrawResponse], error) {
	var errs []error
	for _, e := range v.engines {
		errs = append(errs, e.Withdraw(ctx, req.Msg.GetToken()))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.WithdrawResponse{}), nil
}

func (v service) ListSessions(ctx context.Context, _ *connect.Request[gpuctlv1.ListSessionsRequest]) (*connect.Response[gpuctlv1.ListSessionsResponse], error) {
	lists := make([][]*gpuctlv1.Session, len(v.engines))
	var wg sync.WaitGroup
	for i, e := range v.engines {
		wg.Go(func() { lists[i] = e.List(ctx) })
	}
	wg.Wait()
	all := slices.Concat(lists...)
	slices.SortStableFunc(all, func(a, b *gpuctlv1.Session) int {
		return cmp.Or(cmp.Compare(a.GetStartedUnixMs(), b.GetStartedUnixMs()), strings.Compare(a.GetId(), b.GetId()))
	})
	res := &gpuctlv1.ListSessionsResponse{Sessions: all}
	for _, e := range v.engines {
		res.Lost = append(res.Lost, e.Lost()...)
	}
	return connect.NewResponse(res), nil
}

// WatchSessions ends when one engine's stream ends, so that the client asks again.
func (v service) WatchSessions(ctx context.Context, _ *connect.Request[gpuctlv1.WatchSessionsRequest], st *connect.ServerStream[gpuctlv1.Session]) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var sending sync.Mutex
	send := func(s *gpuctlv1.Session) error {
		sending.Lock()
		defer sending.Unlock()
		return st.Send(s)
	}
	errs := make(chan error, len(v.engines))
	for _, e := range v.engines {
		go func() { errs <- e.Watch(ctx, send) }()
	}
	err := <-errs
	cancel()
	for range len(v.engines) - 1 {
		<-errs // the stream must not be used after this call
	}
	return err
}

func (v service) Plan(ctx context.Context, req *connect.Request[gpuctlv1.PlanRequest]) (*connect.Response[gpuctlv1.PlanResponse], error) {
	e, err := v.with(req.Msg.GetSession(), req.Msg.GetFolder())
	if err != nil {
		return nil, err
	}
	resp, err := e.Plan(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

func (v service) Swap(ctx context.Context, req *connect.Request[gpuctlv1.SwapRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	e, err := v.of(req.Msg.GetSession())
	if err != nil {
		return err
	}
	return report(ctx, st, func(sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) { return e.Swap(ctx, req.Msg, sink) })
}

func (v service) Suspend(ctx context.Context, req *connect.Request[gpuctlv1.SuspendRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	folder := ""
	if req.Msg.GetWithProcess() {
		folder = req.Msg.GetFile()
	}
	e, err := v.with(req.Msg.GetSession(), folder)
	if err != nil {
		return err
	}
	return report(ctx, st, func(sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
		return e.Suspend(ctx, req.Msg, sink)
	})
}

func (v service) Resume(ctx context.Context, req *connect.Request[gpuctlv1.ResumeRequest], st *connect.ServerStream[gpuctlv1.Progress]) error {
	e, err := v.with(req.Msg.GetSession(), req.Msg.GetFolder())
	if err != nil {
		return err
	}
	return report(ctx, st, func(sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) { return e.Resume(ctx, req.Msg, sink) })
}

func (v service) Adopt(ctx context.Context, req *connect.Request[gpuctlv1.AdoptRequest]) (*connect.Response[gpuctlv1.AdoptResponse], error) {
	if (req.Msg.GetPid() == 0) != req.Msg.GetAll() {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("name a process, or all"))
	}
	a, err := able[Adopter](v, "adopts processes")
	if err != nil {
		return nil, err
	}
	resp, err := a.Adopt(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

// sender returns the engine of a session, if its states can leave the VM.
func (v service) sender(session string) (Sender, error) {
	e, err := v.of(session)
	if err != nil {
		return nil, err
	}
	s, ok := e.(Sender)
	if !ok {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("session %s: its state can't leave the VM", session))
	}
	return s, nil
}

func (v service) TakeState(ctx context.Context, req *connect.Request[gpuctlv1.TakeStateRequest], st *connect.ServerStream[gpuctlv1.StateChunk]) error {
	s, err := v.sender(req.Msg.GetSession())
	if err != nil {
		return err
	}
	return s.TakeState(ctx, req, st)
}

func (v service) KeptState(ctx context.Context, req *connect.Request[gpuctlv1.KeptStateRequest]) (*connect.Response[gpuctlv1.KeptStateResponse], error) {
	s, err := v.sender(req.Msg.GetSession())
	if err != nil {
		return nil, err
	}
	return s.KeptState(ctx, req)
}

// GiveState names the session in its first message, which only the engine reads. One engine
// has states to be given back.
func (v service) GiveState(ctx context.Context, in *connect.ClientStream[gpuctlv1.GiveStateRequest]) (*connect.Response[gpuctlv1.GiveStateResponse], error) {
	s, err := able[Sender](v, "keeps states on the host")
	if err != nil {
		return nil, err
	}
	return s.GiveState(ctx, in)
}

func (v service) Probe(ctx context.Context, req *connect.Request[gpuctlv1.ProbeRequest]) (*connect.Response[gpuctlv1.ProbeResponse], error) {
	l, err := v.loader(req.Msg.GetRuntime())
	if err != nil {
		return nil, err
	}
	resp, err := l.Probe(ctx, req.Msg.GetRuntime())
	if err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return connect.NewResponse(resp), nil
}

func (v service) Warm(ctx context.Context, req *connect.Request[gpuctlv1.WarmRequest]) (*connect.Response[gpuctlv1.WarmResponse], error) {
	l, err := v.loader(req.Msg.GetRuntime())
	if err != nil {
		return nil, err
	}
	if err := l.Warm(ctx, req.Msg.GetRuntime()); err != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return connect.NewResponse(&gpuctlv1.WarmResponse{}), nil
}

func (v service) loader(r *gpuctlv1.Runtime) (Loader, error) {
	if r.GetLibrary() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no runtime library named"))
	}
	return able[Loader](v, "loads runtimes")
}

func (v service) Lend(ctx context.Context, req *connect.Request[gpuctlv1.LendRequest]) (*connect.Response[gpuctlv1.LendResponse], error) {
	l, err := able[Lender](v, "lends GPUs")
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
	l, err := able[Lender](v, "lends GPUs")
	if err != nil {
		return nil, err
	}
	if err := l.EndLease(ctx, req.Msg.GetLease()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.EndLeaseResponse{}), nil
}

func (v service) AllowFetch(ctx context.Context, req *connect.Request[gpuctlv1.AllowFetchRequest]) (*connect.Response[gpuctlv1.AllowFetchResponse], error) {
	l, err := able[Lender](v, "lends GPUs")
	if err != nil {
		return nil, err
	}
	resp, err := l.AllowFetch(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
}

func (v service) EndFetch(_ context.Context, req *connect.Request[gpuctlv1.EndFetchOfLeaseRequest]) (*connect.Response[gpuctlv1.EndFetchOfLeaseResponse], error) {
	l, err := able[Lender](v, "lends GPUs")
	if err != nil {
		return nil, err
	}
	if err := l.EndFetch(req.Msg.GetLease()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.EndFetchOfLeaseResponse{}), nil
}

func (v service) Fetch(ctx context.Context, req *connect.Request[gpuctlv1.FetchRequest]) (*connect.Response[gpuctlv1.FetchResponse], error) {
	l, err := able[Lender](v, "lends GPUs")
	if err != nil {
		return nil, err
	}
	if err := l.Fetch(ctx, req.Msg); err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.FetchResponse{}), nil
}

func (v service) ListLeases(_ context.Context, _ *connect.Request[gpuctlv1.ListLeasesRequest]) (*connect.Response[gpuctlv1.ListLeasesResponse], error) {
	l, err := able[Lender](v, "lends GPUs")
	if err != nil {
		return nil, err
	}
	leases, err := l.Leases()
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&gpuctlv1.ListLeasesResponse{Leases: leases}), nil
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
