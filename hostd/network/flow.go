package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Where libvirt's drivers send VMs unless they are told otherwise: TCP 49152 to
// 49215 (migration_port_min and _max of libxl.conf and qemu.conf).
const (
	migrationPort  = 49152
	migrationPorts = 64
)

// Flow is what this host sends to another one while a VM goes there.
type Flow struct {
	h      *Host
	link   string
	to     netip.Addr
	cap    *Cap   // nil: counted for the whole interface
	before uint64 // bytes that its counter had
}

// shared is a limit to a host that several flows use.
type shared struct {
	cap   Cap
	flows int
}

// Follow counts what goes to a host until End, and caps the VMs among it at
// rate bits per second; 0: it caps nothing, and what else leaves by the same
// interface is counted, too. Flows to one host share the rate of the first.
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

// share makes the flow one of those under the limit to its host.
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

// Sent is how many bytes have gone since Follow.
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

// End lifts the cap with the last flow to the host.
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

// toward names the interface by which packets to an address leave.
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
