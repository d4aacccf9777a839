package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/hostd/clusterapi"
	"github.com/gpuctl/gpuctl/internal/random"
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

// Note tells the cluster's log what happened. It does not wait for the cluster.
func (n *Node) Note(e *clusterv1.Event) {
	select {
	case n.notes <- e:
	default:
		n.Logger.Warn("event not noted: too many wait", "object", e.GetObject(), "type", e.GetType())
	}
}

// keepNotes writes events, in order. While there is no leader they wait.
func (n *Node) keepNotes(ctx context.Context, m *membership) {
	for {
		var e *clusterv1.Event
		select {
		case <-ctx.Done():
			return
		case e = <-n.notes:
		}
		c := &clusterv1.Command{Id: random.Hex(16), Op: &clusterv1.Command_Note{Note: &clusterv1.Note{Event: e}}}
		for ctx.Err() == nil {
			_, err := m.propose(ctx, c)
			var answer *scheduler.Error
			if errors.As(err, &answer) {
				n.Logger.Warn("event not noted", "object", e.GetObject(), "type", e.GetType(), "err", err)
			}
			if err == nil || answer != nil {
				break
			}
			sleep(ctx, retryAfter)
		}
	}
}
