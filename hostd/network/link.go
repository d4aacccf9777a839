package network

import (
	"context"
	"fmt"
	"io"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
)

const (
	maxBelow = 8 // most interfaces on top of each other, such as a VLAN on a bond
	maxMbps  = 10_000_000
)

// Link describes an interface, and the physical interfaces below it.
type Link struct {
	Name     string
	Kind     string // kind of the kernel: device, bond, bridge, vlan, …
	MTU      int
	Up       bool // the operator has set it up (IFF_UP)
	Carrier  bool
	Speed    uint64 // in bits per second, the sum of the physical interfaces that carry it; 0: unknown
	Physical []string
	Counters Counters
	Problems []string // in words; empty: no problems
}

// Counters are the kernel's counters since the interface exists. The errors include those
// of the physical interfaces below.
type Counters struct {
	RxBytes, TxBytes     uint64
	RxErrors, TxErrors   uint64
	RxDropped, TxDropped uint64
}

// Link describes an interface. Errors wrap ErrNoLink if it does not exist.
func (h *Host) Link(ctx context.Context, name string) (Link, error) {
	all, err := whole(ctx, h.k.LinkList)
	if err != nil {
		return Link{}, fmt.Errorf("list interfaces: %w", err)
	}
	t := topology{h: h, byIndex: map[int]netlink.Link{}}
	var top netlink.Link
	for _, l := range all {
		t.byIndex[l.Attrs().Index] = l
		if l.Attrs().Name == name {
			top = l
		}
	}
	if top == nil {
		return Link{}, fmt.Errorf("%w: %q", ErrNoLink, name)
	}
	a := top.Attrs()
	out := Link{Name: name, Kind: top.Type(), MTU: a.MTU, Up: a.Flags&net.FlagUp != 0, Carrier: carrier(top)}
	if s := a.Statistics; s != nil {
		out.Counters = Counters{RxBytes: s.RxBytes, TxBytes: s.TxBytes, RxDropped: s.RxDropped, TxDropped: s.TxDropped, RxErrors: s.RxErrors, TxErrors: s.TxErrors}
	}
	below := t.below(top, 0)
	out.Speed = below.speed
	slices.Sort(below.physical)
	out.Physical = slices.Compact(below.physical)
	for _, name := range out.Physical {
		for _, l := range all {
			if s := l.Attrs().Statistics; l.Attrs().Name == name && s != nil && name != out.Name {
				out.Counters.RxErrors += s.RxErrors
				out.Counters.TxErrors += s.TxErrors
			}
		}
	}
	switch {
	case !out.Up:
		out.Problems = append(out.Problems, fmt.Sprintf("%s is down: ip link set %s up", name, name))
	case !out.Carrier:
		out.Problems = append(out.Problems, name+" has no carrier: look at its cable and switch port")
	}
	out.Problems = append(out.Problems, below.problems...)
	return out, nil
}

func carrier(l netlink.Link) bool {
	a := l.Attrs()
	return a.OperState == netlink.OperUp || a.OperState == netlink.OperUnknown && a.Flags&net.FlagUp != 0
}

// stacked reports whether the interface is on top of a parent interface, such as a VLAN.
func stacked(l netlink.Link) bool {
	return slices.Contains([]string{"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"}, l.Type())
}

type topology struct {
	h       *Host
	byIndex map[int]netlink.Link
}

// carriers are the physical interfaces that carry another interface.
type carriers struct {
	speed    uint64
	physical []string
	problems []string
}

// below finds the physical interfaces below bonds, bridges and stacked interfaces. The
// kernel permits no loops, but the links are not read at one moment, so the depth is
// limited.
func (t topology) below(l netlink.Link, depth int) carriers {
	a := l.Attrs()
	if depth == maxBelow {
		return carriers{}
	}
	if stacked(l) {
		if lower := t.byIndex[a.ParentIndex]; lower != nil && a.ParentIndex != a.Index {
			return t.below(lower, depth+1)
		}
		return carriers{} // the parent is in another network namespace
	}
	switch l.Type() {
	case "bond", "team":
		return t.bond(l, depth)
	case "bridge":
		// Frames to one destination leave by one port. Which one is unknown, so the
		// fastest counts.
		var best carriers
		for _, p := range t.ports(a.Index) {
			if !t.real(p, depth+1) {
				continue // the host's ends of VMs' interfaces report any speed
			}
			c := t.below(p, depth+1)
			best.problems = append(best.problems, c.problems...)
			best.physical = append(best.physical, c.physical...)
			best.speed = max(best.speed, c.speed)
			if !carrier(p) {
				best.problems = append(best.problems, fmt.Sprintf("port %s of bridge %s has no carrier", p.Attrs().Name, a.Name))
			}
		}
		return best
	}
	return carriers{speed: t.h.speed(a.Name), physical: []string{a.Name}}
}

// bond adds the speeds of the ports in use, or returns that of the active one.
func (t topology) bond(l netlink.Link, depth int) carriers {
	a := l.Attrs()
	one := false
	active := -1
	if b, ok := l.(*netlink.Bond); ok {
		one = b.Mode == netlink.BOND_MODE_ACTIVE_BACKUP || b.Mode == netlink.BOND_MODE_BROADCAST
		active = b.ActiveSlave
	}
	var out carriers
	ports := t.ports(a.Index)
	dead := 0
	speeds := map[uint64]bool{}
	for _, p := range ports {
		if !carrier(p) {
			dead++
			continue
		}
		c := t.below(p, depth+1)
		out.problems = append(out.problems, c.problems...)
		if one && active > 0 && p.Attrs().Index != active {
			continue
		}
		out.physical = append(out.physical, c.physical...)
		speeds[c.speed] = true
		if one {
			out.speed = max(out.speed, c.speed)
		} else {
			out.speed += c.speed
		}
	}
	if dead > 0 {
		out.problems = append(out.problems, fmt.Sprintf("%d of %d ports of bond %s have no carrier", dead, len(ports), a.Name))
	}
	if len(speeds) > 1 {
		out.problems = append(out.problems, fmt.Sprintf("the ports of bond %s have different speeds", a.Name))
	}
	return out
}

func (t topology) ports(master int) []netlink.Link {
	var out []netlink.Link
	for _, l := range t.byIndex {
		if l.Attrs().MasterIndex == master && l.Attrs().Index != master {
			out = append(out, l)
		}
	}
	slices.SortFunc(out, func(a, b netlink.Link) int { return strings.Compare(a.Attrs().Name, b.Attrs().Name) })
	return out
}

// real reports whether a hardware device is below a port. The host's end of a VM's
// interface has none.
func (t topology) real(l netlink.Link, depth int) bool {
	if stacked(l) {
		lower := t.byIndex[l.Attrs().ParentIndex]
		return lower != nil && depth < maxBelow && t.real(lower, depth+1)
	}
	switch l.Type() {
	case "bond", "team":
		return true
	case "device", "generic":
		return t.device(l)
	}
	return false
}

// device reports whether the interface itself is that of a hardware device.
func (t topology) device(l netlink.Link) bool {
	name := l.Attrs().Name
	return isName(name) && t.h.exists(t.h.dir(name)) && t.h.target(path.Join(t.h.dir(name), "subsystem")) != "xen-backend"
}

// speed returns the speed of one interface in bits per second; 0: unknown.
func (h *Host) speed(name string) uint64 {
	if !isName(name) {
		return 0
	}
	f, err := h.root.Open(path.Join(classNet, name, "speed"))
	if err != nil {
		return 0
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return 0 // the interface is down
	}
	mbps, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err != nil || mbps <= 0 || mbps > maxMbps { // the kernel's value for an unknown speed is -1, or the same number unsigned
		return 0
	}
	return uint64(mbps) * 1_000_000
}
