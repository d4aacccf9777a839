package node

import (
	"fmt"
	"slices"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/clusterapi"
)

// OtherHosts names the hosts that are up, without this one.
func (n *Node) OtherHosts() []string {
	v := n.View()
	if v == nil {
		return nil
	}
	var out []string
	for h := range v.Hosts() {
		if h.GetName() != n.HostName() && h.GetState() != clusterv1.HostState_HOST_STATE_DOWN {
			out = append(out, h.GetName())
		}
	}
	slices.Sort(out)
	return out
}

// Devices reaches the cards of another host.
func (n *Node) Devices(host string) (gpuctlv1connect.DeviceServiceClient, error) {
	v := n.View()
	if v == nil {
		return nil, clusterapi.ErrNotJoined
	}
	h := v.Host(host)
	switch {
	case h == nil:
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("there is no host %q; gpuctl get hosts lists them", host))
	case h.GetState() == clusterv1.HostState_HOST_STATE_DOWN:
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("host %s is down: %s", host, h.GetMessage()))
	}
	return gpuctlv1connect.NewDeviceServiceClient(n.http, "https://"+h.GetAddress()), nil
}
