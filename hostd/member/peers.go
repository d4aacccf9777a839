package member

import (
	"context"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"github.com/hashicorp/raft"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/remote"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
)

// forwarder sends the store's requests to other hosts.
type forwarder struct{ http *http.Client }

var _ replica.Forwarder = forwarder{}

// Apply proposes commands on the leader.
func (f forwarder) Apply(ctx context.Context, address string, cmds []*clusterv1.Command) ([]*clusterv1.Result, error) {
	res, err := remote.Peer(f.http, address).Apply(ctx, connect.NewRequest(&clusterv1.ApplyRequest{Commands: cmds}))
	if err != nil {
		return nil, clusterapi.Uncoded(err)
	}
	return res.Msg.GetResults(), nil
}

// ReadIndex asks the leader for a read index.
func (f forwarder) ReadIndex(ctx context.Context, address string) (uint64, error) {
	res, err := remote.Peer(f.http, address).ReadIndex(ctx, connect.NewRequest(&clusterv1.ReadIndexRequest{}))
	if err != nil {
		return 0, clusterapi.Uncoded(err)
	}
	return res.Msg.GetIndex(), nil
}

// Heartbeat tells the leader that this host is alive.
func (f forwarder) Heartbeat(ctx context.Context, address string, r *clusterv1.HeartbeatRequest) (*clusterv1.HeartbeatResponse, error) {
	res, err := remote.Peer(f.http, address).Heartbeat(ctx, connect.NewRequest(r))
	if err != nil {
		return nil, clusterapi.Uncoded(err)
	}
	return res.Msg, nil
}

// stream adapts Raft's connections of the port to raft.StreamLayer.
type stream struct{ *pki.RaftLayer }

var _ raft.StreamLayer = stream{}

// Dial connects to another host.
func (s stream) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	return s.RaftLayer.Dial(string(address), timeout)
}
