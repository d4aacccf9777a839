package clusterapi

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Lender lends GPUs of this host to sessions of other hosts.
type Lender interface {
	// Lend starts a lease for the host with this id. Repeating it returns the same.
	Lend(ctx context.Context, borrower Self, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error)
	// EndLease ends a lease of that host.
	EndLease(ctx context.Context, borrower Self, lease string) error
	// AllowFetch lets another host's far executor fetch the contents of a session of that
	// host, and EndFetch takes it back. Fetch makes the far executor of a lease do so.
	AllowFetch(ctx context.Context, borrower Self, r *clusterv1.AllowFetchRequest) (*clusterv1.AllowFetchResponse, error)
	EndFetch(ctx context.Context, borrower Self, lease string) error
	Fetch(ctx context.Context, borrower Self, r *clusterv1.FetchRequest) error
}

func (a *API) borrower(ctx context.Context) (Lender, Self, error) {
	c, ok := access.From(ctx)
	l := a.member.Lender()
	switch {
	case !ok || c.Kind != access.Host:
		return nil, Self{}, reason.Coded(reason.Errorf(reason.HostsOnly, "only hosts borrow GPUs of each other"))
	case l == nil:
		return nil, Self{}, reason.Coded(reason.Errorf(reason.Refused, "host %s lends no GPU", a.member.Self().Host).On("host", a.member.Self().Host))
	}
	return l, Self{Host: c.Host, ID: c.ID}, nil
}

// Lend starts a lease of the calling host.
func (a *API) Lend(ctx context.Context, req *connect.Request[clusterv1.LendRequest]) (*connect.Response[clusterv1.LendResponse], error) {
	l, borrower, err := a.borrower(ctx)
	if err != nil {
		return nil, err
	}
	res, err := l.Lend(ctx, borrower, req.Msg)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(res), nil
}

// EndLease ends a lease of the calling host.
func (a *API) EndLease(ctx context.Context, req *connect.Request[clusterv1.EndLeaseRequest]) (*connect.Response[clusterv1.EndLeaseResponse], error) {
	l, borrower, err := a.borrower(ctx)
	if err != nil {
		return nil, err
	}
	if err := l.EndLease(ctx, borrower, req.Msg.GetLease()); err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.EndLeaseResponse{}), nil
}

// AllowFetch lets another host's far executor fetch contents of a session of the calling host.
func (a *API) AllowFetch(ctx context.Context, req *connect.Request[clusterv1.AllowFetchRequest]) (*connect.Response[clusterv1.AllowFetchResponse], error) {
	l, borrower, err := a.borrower(ctx)
	if err != nil {
		return nil, err
	}
	res, err := l.AllowFetch(ctx, borrower, req.Msg)
	if err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(res), nil
}

// EndFetch takes back what AllowFetch has allowed.
func (a *API) EndFetch(ctx context.Context, req *connect.Request[clusterv1.EndFetchRequest]) (*connect.Response[clusterv1.EndFetchResponse], error) {
	l, borrower, err := a.borrower(ctx)
	if err != nil {
		return nil, err
	}
	if err := l.EndFetch(ctx, borrower, req.Msg.GetLease()); err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.EndFetchResponse{}), nil
}

// Fetch connects the far executor of a lease of the calling host to another host.
func (a *API) Fetch(ctx context.Context, req *connect.Request[clusterv1.FetchRequest]) (*connect.Response[clusterv1.FetchResponse], error) {
	l, borrower, err := a.borrower(ctx)
	if err != nil {
		return nil, err
	}
	if err := l.Fetch(ctx, borrower, req.Msg); err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.FetchResponse{}), nil
}

// MaxEcho is how many bytes one Echo may send or ask for.
const MaxEcho = 4 << 20

// Echo answers with as many bytes as asked for.
func (a *API) Echo(_ context.Context, req *connect.Request[clusterv1.EchoRequest]) (*connect.Response[clusterv1.EchoResponse], error) {
	if n := max(len(req.Msg.GetData()), int(req.Msg.GetAnswer())); n > MaxEcho {
		return nil, reason.Coded(fmt.Errorf("%w: echo of %d bytes: at most %d", errInvalid, n, MaxEcho))
	}
	return connect.NewResponse(&clusterv1.EchoResponse{Data: make([]byte, req.Msg.GetAnswer())}), nil
}

// SetQueue sets how waiting claims are served.
func (a *API) SetQueue(ctx context.Context, req *connect.Request[clusterv1.SetQueueRequest]) (*connect.Response[clusterv1.SetQueueResponse], error) {
	if p := req.Msg.GetPolicy(); p != clusterv1.QueuePolicy_QUEUE_POLICY_UNSPECIFIED {
		if _, err := a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_SetQueue{SetQueue: &clusterv1.SetQueue{Policy: p}}}); err != nil {
			return nil, err
		}
		return connect.NewResponse(&clusterv1.SetQueueResponse{Policy: p}), nil
	}
	v, err := a.read(ctx, false)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.SetQueueResponse{Policy: v.Queue()}), nil
}
