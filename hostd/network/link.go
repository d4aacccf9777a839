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
	maxBelow = 8 // a VLAN on a bond on …
	maxMbps  = 10_000_000
)

// Link is how an interface is, and what of the machine is below it.
type Link struct {
	Name     string
	Kind     string // as the kernel has it: device, bond, bridge, vlan, …
	MTU      int
	Up       bool // by the operator
	Carrier  bool
	Speed    uint64 // in bits per second, of the physical interfaces that carry it; 0: not known
	Physical []string
	Counters Counters
	Problems []string // in words; none: healthy
}

// Counters are the kernel's since the interface is there, those of the
// physical interfaces below included as far as errors go.
type Counters struct {
	RxBytes, TxBytes     uint64
	RxErrors, TxErrors   uint64
	RxDropped, TxDropped uint64
}

// Link describes an interface.
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

// stacked reports whether an interface is one on top of its parent.
func stacked(l netlink.Link) bool {
	return slices.Contains([]string{"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"}, l.Type())
}

type topology struct {
	h       *Host
	byIndex map[int]netlink.Link
}

// carriers are the physical interfaces that carry one.
type carriers struct {
	speed    uint64
	physical []string
	problems []string
}

// below resolves bonds, bridges and what is stacked on one interface. Links in
// the kernel form no loops; what we read piece by piece might.
func (t topology) below(l netlink.Link, depth int) carriers {
	a := l.Attrs()
	if depth == maxBelow {
		return carriers{}
	}
	if stacked(l) {
		if lower := t.byIndex[a.ParentIndex]; lower != nil && a.ParentIndex != a.Index {
			return t.below(lower, depth+1)
		}
		return carriers{} // it is in another namespace
	}
	switch l.Type() {
	case "bond", "team":
		return t.bond(l, depth)
	case "bridge":
		// Frames to the destination leave by one port.
		var best carriers
		for _, p := range t.ports(a.Index) {
			if !t.real(p, depth+1) {
				continue // guests' ends claim any speed
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

// bond adds up the ports that are in use, or takes the one that is.
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

// real reports whether a device of the machine is behind a port, not a guest.
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

// device reports whether a device of the machine is behind an interface itself.
func (t topology) device(l netlink.Link) bool {
	name := l.Attrs().Name
	return isName(name) && t.h.exists(t.h.dir(name)) && t.h.target(path.Join(t.h.dir(name), "subsystem")) != "xen-backend"
}

// speed is that of one interface in bits per second.
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
		return 0 // it is down
	}
	mbps, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
	if err != nil || mbps <= 0 || mbps > maxMbps { // -1, or the same unsigned: not known
		return 0
	}
	return uint64(mbps) * 1_000_000
}
