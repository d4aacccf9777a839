package hostinfo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel interrupts a dump if something changes during it.
const dumpAttempts = 20

// Netlink lists interfaces by netlink, in the network namespace of the process.
type Netlink struct{}

var _ Network = Netlink{}

// Interfaces lists all interfaces with their addresses.
func (Netlink) Interfaces(ctx context.Context) ([]Interface, error) {
	links, err := whole(ctx, netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	addrs, err := whole(ctx, func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	byLink := map[int][]netip.Prefix{}
	for _, a := range addrs {
		if p, ok := prefix(a.IPNet); ok && a.Flags&unix.IFA_F_DADFAILED == 0 {
			byLink[a.LinkIndex] = append(byLink[a.LinkIndex], p)
		}
	}
	out := make([]Interface, 0, len(links))
	for _, l := range links {
		a := l.Attrs()
		out = append(out, Interface{
			Name: a.Name, MAC: a.HardwareAddr.String(), MTU: a.MTU,
			Up:        a.Flags&net.FlagUp != 0 && (a.OperState == netlink.OperUp || a.OperState == netlink.OperUnknown),
			Loopback:  a.Flags&net.FlagLoopback != 0,
			Addresses: byLink[a.Index],
		})
	}
	return out, nil
}

// whole repeats a dump that was interrupted, as its result may be inconsistent.
func whole[T any](ctx context.Context, dump func() ([]T, error)) ([]T, error) {
	for attempt := 1; ; attempt++ {
		out, err := dump()
		if err == nil {
			return out, nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) || attempt == dumpAttempts {
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

func prefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	if a = a.Unmap(); a.Is4() && bits == 128 {
		ones -= 96
	}
	p := netip.PrefixFrom(a, ones)
	return p, p.IsValid()
}
