package clitest

import (
	"context"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// AddNIC adds a network interface to a host.
func (m *Machines) AddNIC(host string, n *gpuctlv1.NIC) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nics[host] = append(m.nics[host], n)
}

// ListNICs implements the RPC.
func (m *Machines) ListNICs(_ context.Context, r *connect.Request[gpuctlv1.ListNICsRequest]) (*connect.Response[gpuctlv1.ListNICsResponse], error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	host, err := m.host(r.Msg.GetHost())
	if err != nil {
		return nil, err
	}
	res := &gpuctlv1.ListNICsResponse{Host: host}
	for _, n := range m.nics[host] {
		res.Nics = append(res.Nics, proto.CloneOf(n))
	}
	return connect.NewResponse(res), nil
}
