package cardapi

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/network"
)

// addresses limits the time for finding the ways to other hosts.
const addresses = 3 * time.Second

// Network is the network of this host, *network.Host.
type Network interface {
	NICs(ctx context.Context) ([]network.NIC, error)
	NIC(ctx context.Context, name string) (network.NIC, error)
	// Toward returns the name of the interface by which packets to an address leave.
	Toward(ctx context.Context, to netip.Addr) (string, error)
}

var _ Network = (*network.Host)(nil)

// NICs lists the network interfaces of this host.
type NICs struct {
	Network Network
	// Peers returns the other hosts, with the addresses that VMs are sent to.
	Peers func(ctx context.Context) map[string]netip.Addr
	Log   *slog.Logger
}

// List returns the interfaces of hardware devices, and those that migrations use.
func (n *NICs) List(ctx context.Context) ([]*gpuctlv1.NIC, error) {
	all, err := n.Network.NICs(ctx)
	if err != nil {
		return nil, err
	}
	carries := n.carries(ctx)
	for name := range carries {
		if slices.ContainsFunc(all, func(n network.NIC) bool { return n.Name == name }) {
			continue
		}
		one, err := n.Network.NIC(ctx, name)
		if errors.Is(err, network.ErrNoLink) {
			continue
		} else if err != nil {
			return nil, err
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b network.NIC) int { return strings.Compare(a.Name, b.Name) })
	out := make([]*gpuctlv1.NIC, len(all))
	for i, l := range all {
		out[i] = &gpuctlv1.NIC{
			Name: l.Name, Kind: l.Kind, Address: l.Address, Driver: l.Driver, Mtu: uint32(max(0, l.MTU)), Speed: l.Speed, Up: l.Up, Carrier: l.Carrier,
			Problems: l.Problems, Physical: l.Physical, Hosts: carries[l.Name],
		}
	}
	return out, nil
}

// carries returns, for each interface, the hosts that VMs are sent to through it. Hosts
// without a known address are left out.
func (n *NICs) carries(ctx context.Context) map[string][]string {
	ctx, cancel := context.WithTimeout(ctx, addresses)
	defer cancel()
	out := map[string][]string{}
	for host, to := range n.Peers(ctx) {
		name, err := n.Network.Toward(ctx, to)
		if err != nil {
			n.Log.Debug("way to a host is not known", "host", host, "err", err)
			continue
		}
		out[name] = append(out[name], host)
	}
	for _, hosts := range out {
		slices.Sort(hosts)
	}
	return out
}
