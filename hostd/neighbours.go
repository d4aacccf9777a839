package hostd

import (
	"context"
	"net"
	"net/netip"

	"github.com/gpuctl/gpuctl/hostd/member"
)

// neighbours tells of the hosts of the cluster what the node knows.
type neighbours struct{ node *member.Node }

// loopback reports whether other hosts reach this one at an address of this machine only, as
// in a test of several on one.
func (n neighbours) loopback() bool {
	address, err := n.node.Address(n.node.HostName())
	if err != nil {
		return false
	}
	at, err := netip.ParseAddr(address)
	return err == nil && at.IsLoopback()
}

// knows reports whether a host is in the cluster, or whether that is unknown.
func (n neighbours) knows(host string) bool {
	known := n.node.CaughtUp()
	v := n.node.View()
	return !known || v == nil || v.Host(host) != nil
}

// others returns the names of the other hosts of the cluster.
func (n neighbours) others() (names []string) {
	v := n.node.View()
	if v == nil {
		return nil
	}
	for h := range v.Hosts() {
		if h.GetName() != n.node.HostName() {
			names = append(names, h.GetName())
		}
	}
	return names
}

// address returns the address to which VMs for that host are sent.
func (n neighbours) address(ctx context.Context, host string) (netip.Addr, error) {
	name, err := n.node.Address(host)
	if err != nil {
		return netip.Addr{}, err
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if err != nil {
		return netip.Addr{}, err
	}
	return all[0], nil
}

// peers returns the known addresses of other hosts.
func (n neighbours) peers(ctx context.Context) map[string]netip.Addr {
	out := map[string]netip.Addr{}
	for _, host := range n.node.OtherHosts() {
		if a, err := n.address(ctx, host); err == nil {
			out[host] = a
		}
	}
	return out
}
