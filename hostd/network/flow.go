package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// TCP ports that libvirt's drivers send VMs to by default: 49152 to 49215
// (migration_port_min and migration_port_max in libxl.conf and qemu.conf).
const (
	migrationPort  = 49152
	migrationPorts = 64
)

// Flow counts what this host sends to another host while a VM migrates there.
type Flow struct {
	h      *Host
	link   string
	to     netip.Addr
	cap    *Cap   // nil: the counter of the whole interface is used
	before uint64 // value of the counter in bytes when Follow was called
}

// shared is a limit for one destination, used by several flows.
type shared struct {
	cap   Cap
	flows int
}

// Follow begins to count what is sent to a host, until End. rate, in bits per second,
// limits what is sent to libvirt's migration ports there. If rate is 0, there is no
// limit, and the counter includes everything that leaves by the same interface. Flows to
// the same host share the limit of the first one.
func (h *Host) Follow(ctx context.Context, to netip.Addr, rate uint64) (*Flow, error) {
	to = to.Unmap()
	link, err := h.toward(ctx, to)
	if err != nil {
		return nil, fmt.Errorf("way to %s: %w", to, err)
	}
	f := &Flow{h: h, link: link, to: to}
	if rate > 0 {
		if err := f.share(ctx, rate); err != nil {
			return nil, err
		}
	}
	if f.before, err = f.count(ctx); err != nil {
		return nil, errors.Join(err, f.End(context.WithoutCancel(ctx)))
	}
	return f, nil
}

// share makes the flow use the limit for its destination. The first flow sets that limit.
func (f *Flow) share(ctx context.Context, rate uint64) error {
	f.h.flowing.Lock()
	defer f.h.flowing.Unlock()
	s := f.h.flows[f.to]
	if s == nil {
		c, err := f.h.Limit(ctx, Limit{Link: f.link, To: f.to, Port: migrationPort, Ports: migrationPorts, Rate: rate})
		if err != nil {
			return err
		}
		s = &shared{cap: c}
		f.h.flows[f.to] = s
	}
	s.flows++
	f.cap = &s.cap
	return nil
}

// Sent returns how many bytes were sent since Follow.
func (f *Flow) Sent(ctx context.Context) (uint64, error) {
	now, err := f.count(ctx)
	return now - min(now, f.before), err
}

func (f *Flow) count(ctx context.Context) (uint64, error) {
	if f.cap != nil {
		n, _, err := f.h.Sent(ctx, *f.cap)
		return n, err
	}
	l, err := f.h.Link(ctx, f.link)
	return l.Counters.TxBytes, err
}

// End ends the flow. The last flow to a host removes the limit.
func (f *Flow) End(ctx context.Context) error {
	if f.cap == nil {
		return nil
	}
	f.h.flowing.Lock()
	defer f.h.flowing.Unlock()
	s := f.h.flows[f.to]
	f.cap = nil
	if s.flows--; s.flows > 0 {
		return nil
	}
	delete(f.h.flows, f.to)
	return f.h.Remove(ctx, s.cap)
}

// toward returns the name of the interface by which packets to an address leave.
func (h *Host) toward(ctx context.Context, to netip.Addr) (string, error) {
	routes, err := whole(ctx, func() ([]netlink.Route, error) { return h.k.RouteGet(to.AsSlice()) })
	if err != nil {
		return "", err
	}
	links, err := whole(ctx, h.k.LinkList)
	if err != nil {
		return "", err
	}
	for _, r := range routes {
		for _, l := range links {
			if l.Attrs().Index == r.LinkIndex {
				return l.Attrs().Name, nil
			}
		}
	}
	return "", ErrNoLink
}
