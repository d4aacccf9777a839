package lease

import (
	"net"
	"net/netip"
	"slices"
)

// mostAddresses is how many addresses of one machine others are told at most. They try all of
// them.
const mostAddresses = 8

// Addresses returns where carriers reach this machine, as HOST:PORT. For a listener at all
// addresses it returns those that the machine has now, without link-local ones.
func (m *Manager) Addresses() (out []string) {
	for _, l := range m.listeners {
		at, ok := l.Addr().(*net.TCPAddr)
		if !ok {
			continue
		}
		if a := at.AddrPort(); !a.Addr().IsUnspecified() {
			out = append(out, netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String())
			continue
		}
		all, err := net.InterfaceAddrs()
		if err != nil {
			m.log.Warn("the addresses of this machine are not known", "err", err)
			continue
		}
		for _, a := range all {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() {
				out = append(out, netip.AddrPortFrom(p.Addr().Unmap(), at.AddrPort().Port()).String())
			}
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return out[:min(len(out), mostAddresses)]
}
