package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/relay"
)

const (
	maxReach     = 256 // addresses in one request
	maxAddress   = 300 // bytes
	reachAtOnce  = 16
	reachTimeout = 2 * time.Second
)

// Reach connects to addresses over the VM's network. Nothing is sent there.
func (v service) Reach(ctx context.Context, req *connect.Request[gpuctlv1.ReachRequest]) (*connect.Response[gpuctlv1.ReachResponse], error) {
	all := req.Msg.GetAddresses()
	if len(all) > maxReach {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("no more than %d addresses can be tried at once", maxReach))
	}
	for _, a := range all {
		if _, _, err := net.SplitHostPort(a); err != nil || len(a) > maxAddress {
			return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("address %.80q is not HOST:PORT", a))
		}
	}
	out := &gpuctlv1.ReachResponse{Reached: make([]*gpuctlv1.Reached, len(all))}
	places := make(chan struct{}, reachAtOnce)
	var wg sync.WaitGroup
	for i, a := range all {
		wg.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			out.Reached[i] = reach(ctx, a)
		})
	}
	wg.Wait()
	return connect.NewResponse(out), nil
}

// Relay has the connections that the host is to make. relay.Guest implements it.
type Relay interface {
	Watch(ctx context.Context, instance string, tell func([]relay.Wish) error) error
}

// Relay tells the host of the connections of carriers that wait for it.
func (v service) Relay(ctx context.Context, req *connect.Request[gpuctlv1.RelayRequest], st *connect.ServerStream[gpuctlv1.RelayResponse]) error {
	if v.a.cfg.Relay == nil {
		return connect.NewError(connect.CodeUnimplemented, errors.New("this gpuguest has no relay"))
	}
	return v.a.cfg.Relay.Watch(ctx, req.Msg.GetInstance(), func(all []relay.Wish) error {
		out := &gpuctlv1.RelayResponse{}
		for _, w := range all {
			out.Wishes = append(out.Wishes, &gpuctlv1.RelayWish{Id: w.ID, Address: w.Address, Bulk: w.Bulk, First: w.First})
		}
		return st.Send(out)
	})
}

func reach(ctx context.Context, address string) *gpuctlv1.Reached {
	began := time.Now()
	conn, err := (&net.Dialer{Timeout: reachTimeout}).DialContext(ctx, "tcp", address)
	if err != nil {
		return &gpuctlv1.Reached{Error: excerpt.Of(err.Error(), maxMessage)}
	}
	took := time.Since(began)
	_ = conn.Close()
	return &gpuctlv1.Reached{RttNs: took.Nanoseconds()}
}
