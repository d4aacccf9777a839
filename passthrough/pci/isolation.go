package pci

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
)

// isolate sets the group of each card, and the other devices in it.
func (s *scan) isolate(cards []*Card) {
	members := map[string][]Address{} // members of derived groups
	why := map[Address]string{}
	leaks := map[Address]*Leak{}
	if slices.ContainsFunc(cards, func(c *Card) bool { return c.Main().IOMMUGroup < 0 }) {
		for _, n := range slices.SortedFunc(maps.Values(s.all), func(a, b *node) int { return a.address.Compare(b.address) }) {
			if n.class>>8 == ClassBridge {
				continue
			}
			group, leak, reason := s.derive(n)
			members[group] = append(members[group], n.address)
			why[n.address], leaks[n.address] = reason, leak
		}
	}
	for _, c := range cards {
		own := map[Address]bool{}
		for d := range c.all {
			own[d.Address] = true
		}
		groups := c.groups()
		if len(groups) > 0 {
			c.Group = "iommu-" + strconv.Itoa(groups[0])
			c.Why = fmt.Sprintf("IOMMU group %d", groups[0])
			if len(groups) > 1 {
				c.Why = fmt.Sprintf("IOMMU groups %v of one card", groups)
			}
			for _, g := range groups {
				c.Shared = append(c.Shared, s.membersOf(g, own)...)
			}
			if len(c.Shared) > 0 {
				_, c.Leak, _ = s.derive(s.all[c.Address])
			}
		} else {
			c.Group, _, _ = s.derive(s.all[c.Address])
			c.Why, c.Leak = why[c.Address], leaks[c.Address]
			c.Shared = slices.DeleteFunc(slices.Clone(members[c.Group]), func(a Address) bool { return own[a] })
		}
	}
	join(cards)
}

// groups returns the IOMMU groups of the card's physical functions.
func (c *Card) groups() []int {
	var out []int
	for _, f := range c.Functions {
		if f.IOMMUGroup >= 0 {
			out = append(out, f.IOMMUGroup)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// join joins the groups of cards that share a device: a card is given away with all its
// functions, which may be in several IOMMU groups.
func join(cards []*Card) {
	for changed := true; changed; {
		changed = false
		owner := map[Address]*Card{}
		for _, c := range cards {
			for d := range c.all {
				owner[d.Address] = c
			}
		}
		for _, c := range cards {
			for _, a := range c.Shared {
				if o := owner[a]; o != nil && o.Group != c.Group {
					least := min(o.Group, c.Group)
					o.Group, c.Group, changed = least, least, true
				}
			}
		}
	}
	whole := map[string]map[Address]bool{}
	for _, c := range cards {
		if whole[c.Group] == nil {
			whole[c.Group] = map[Address]bool{}
		}
		for d := range c.all {
			whole[c.Group][d.Address] = true
		}
		for _, a := range c.Shared {
			whole[c.Group][a] = true
		}
	}
	for _, c := range cards {
		rest := maps.Clone(whole[c.Group])
		for d := range c.all {
			delete(rest, d.Address)
		}
		c.Shared = slices.SortedFunc(maps.Keys(rest), Address.Compare)
	}
}

func (s *scan) membersOf(group int, without map[Address]bool) []Address {
	entries, err := fs.ReadDir(s.root, path.Join(groupsDir, strconv.Itoa(group), "devices"))
	if err != nil {
		return nil
	}
	var out []Address
	for _, e := range entries {
		a, err := ParseAddress(e.Name())
		if err != nil || without[a] {
			continue
		}
		if n := s.all[a]; n == nil || n.class>>8 == ClassBridge {
			continue
		}
		out = append(out, a)
	}
	return out
}

// derive finds the group by the rules of Linux: everything below a bridge is in one
// group, unless each port from that bridge to the root isolates. In addition, a switch is
// one group if one of its downstream ports does not isolate.
func (s *scan) derive(n *node) (group string, leak *Leak, why string) {
	top, isBridge := n.address, false
	why = "no IOMMU groups; every port above isolates"
	for i := len(n.above) - 1; i >= 0; i-- {
		l := s.leak(n.above[:i+1])
		if l == nil {
			break
		}
		leak = l
		top, isBridge = n.above[i], true
		if i > 0 && s.config(top).Port == PortDownstream && !s.portIsolates(top) {
			i--
			top = n.above[i]
		}
		why = fmt.Sprintf("no IOMMU groups; %v", leak)
	}
	if len(n.above) == 0 {
		why = "no IOMMU groups; on the root bus"
	}
	switch {
	case !isBridge && n.pf != nil: // virtual functions are isolated from each other by the standard
		return "pci-" + top.String(), leak, why
	case !isBridge:
		// The functions of a card are in one group anyway.
		return "pci-" + top.Slot().String(), leak, why
	}
	// A bridge whose sibling functions are not isolated from it.
	if s.config(top.Slot()).Multifunction && !s.slotIsolates(top) {
		return "pci-" + top.Slot().String(), leak, why
	}
	return "pci-" + top.String(), leak, why
}

// leak returns the first port of the path that does not isolate; nil if all do.
func (s *scan) leak(bridges []Address) *Leak {
	for i := len(bridges) - 1; i >= 0; i-- {
		a := bridges[i]
		c := s.config(a)
		switch c.Port {
		case PortRoot:
			if !c.ACS.Isolates() {
				return &Leak{a, "port", acsWhy(c)}
			}
		case PortDownstream:
			for _, peer := range s.portsBeside(a) {
				if c := s.config(peer); !c.ACS.Isolates() {
					return &Leak{peer, "port", acsWhy(c)}
				}
			}
		case PortUpstream:
			if c.Multifunction && !c.ACS.Isolates() {
				return &Leak{a, "switch", acsWhy(c)}
			}
		default:
			return &Leak{a, "bridge", "is not PCI Express on both sides"}
		}
	}
	return nil
}

func (s *scan) portIsolates(a Address) bool {
	return !slices.ContainsFunc(s.portsBeside(a), func(peer Address) bool { return !s.config(peer).ACS.Isolates() })
}

// portsBeside returns all downstream ports of a port's switch.
func (s *scan) portsBeside(a Address) []Address {
	out := []Address{a}
	for other, n := range s.all {
		if other != a && other.Domain == a.Domain && other.Bus == a.Bus && n.class>>8 == ClassBridge && s.config(other).Port == PortDownstream {
			out = append(out, other)
		}
	}
	slices.SortFunc(out, Address.Compare)
	return out
}

func acsWhy(c Config) string {
	switch {
	case !c.Extended:
		return "has an extended configuration space that cannot be read"
	case c.ACS == nil:
		return "has no ACS"
	default:
		return fmt.Sprintf("has not all of its ACS on (%#x of %#x)", c.ACS.Does&acsIsolates, c.ACS.Can&acsIsolates)
	}
}

func (s *scan) slotIsolates(a Address) bool {
	for other, n := range s.all {
		if other.Slot() == a.Slot() && n.pf == nil && !s.config(other).ACS.Isolates() {
			return false
		}
	}
	return true
}
