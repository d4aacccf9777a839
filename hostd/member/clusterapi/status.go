package clusterapi

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Status returns the state of the cluster as this host sees it. It works without a
// leader, too.
func (a *API) Status(ctx context.Context, _ *connect.Request[clusterv1.StatusRequest]) (*connect.Response[clusterv1.StatusResponse], error) {
	return connect.NewResponse(a.Report()), nil
}

// Report returns the answer of Status.
func (a *API) Report() *clusterv1.StatusResponse {
	self := a.member.Self()
	l := a.member.Log()
	if l == nil {
		return &clusterv1.StatusResponse{Host: self.Host, HostId: self.ID, Message: ErrNotJoined.Error()}
	}
	res := l.Status()
	if m := a.member.Certificate(); m != nil {
		fingerprint := pki.Fingerprint(m.CA)
		res.CaFingerprint = hex.EncodeToString(fingerprint[:])
		res.CertificateExpiresUnixMs = m.Peer.NotAfter.UnixMilli()
	}
	if err := a.member.Problem(); err != nil {
		res.Message = err.Error()
	}
	res.Queue = l.State().View().Queue()
	for m := range l.State().View().Migrations() {
		move := m.GetMachine()
		if (move.GetTwice() || move.GetKeptOn() != "") && m.GetState() == clusterv1.MigrationState_MIGRATION_STATE_HELD {
			res.Alarms = append(res.Alarms, "migration "+m.GetId()+": "+m.GetMessage())
		}
	}
	return res
}

// Init makes a cluster of this host.
func (a *API) Init(ctx context.Context, req *connect.Request[clusterv1.InitRequest]) (*connect.Response[clusterv1.InitResponse], error) {
	if err := a.member.Init(ctx, req.Msg); err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.InitResponse{Status: a.Report()}), nil
}

// Join makes this host a member of a cluster.
func (a *API) Join(ctx context.Context, req *connect.Request[clusterv1.JoinRequest]) (*connect.Response[clusterv1.JoinResponse], error) {
	if err := a.member.Join(ctx, req.Msg); err != nil {
		return nil, reason.Coded(err)
	}
	return connect.NewResponse(&clusterv1.JoinResponse{Status: a.Report()}), nil
}

const (
	leastInterval = 100 * time.Millisecond
	askAtOnce     = 64 // most hosts at a time
)

// Top streams what changes often. It asks the hosts themselves for it.
func (a *API) Top(ctx context.Context, req *connect.Request[clusterv1.TopRequest], stream *connect.ServerStream[clusterv1.TopResponse]) error {
	interval := time.Duration(cmp.Or(req.Msg.GetIntervalMs(), 1000)) * time.Millisecond
	interval = max(interval, leastInterval)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		res, err := a.top(ctx, req.Msg.GetHost(), max(interval, time.Second))
		if err != nil {
			return err
		}
		if err := stream.Send(res); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (a *API) top(ctx context.Context, only string, patience time.Duration) (*clusterv1.TopResponse, error) {
	v, err := a.read(ctx, true)
	if err != nil {
		return nil, err
	}
	if only != "" && v.Host(only) == nil {
		if _, err := a.one(v, clusterv1.Kind_KIND_HOST, only); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	res := &clusterv1.TopResponse{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	slots := make(chan struct{}, askAtOnce)
	for h := range v.Hosts() {
		if only != "" && h.GetName() != only {
			continue
		}
		if h.GetDown() {
			res.Missing = append(res.Missing, h.GetName())
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			facts, err := a.facts(ctx, h)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				a.log.Debug("host says nothing", "host", h.GetName(), "err", err)
				res.Missing = append(res.Missing, h.GetName())
				return
			}
			res.Hosts = append(res.Hosts, facts)
		})
	}
	wg.Wait()
	slices.Sort(res.Missing)
	slices.SortFunc(res.Hosts, func(x, y *clusterv1.HostFacts) int { return cmp.Compare(x.GetHost(), y.GetHost()) })
	return res, nil
}

func (a *API) facts(ctx context.Context, h *clusterv1.Host) (*clusterv1.HostFacts, error) {
	if h.GetId() == a.member.Self().ID {
		return a.member.Facts(ctx)
	}
	res, err := a.member.Peer(h.GetAddress()).Facts(ctx, connect.NewRequest(&clusterv1.FactsRequest{}))
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", h.GetName(), err)
	}
	return res.Msg.GetFacts(), nil
}
