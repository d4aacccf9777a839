package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// major number of our queueing discipline's handle: "GP" in ASCII
	major = 0x4750

	maxLimits = 256
	minRate   = 64_000          // bit/s
	maxRate   = 800_000_000_000 // bit/s
	minBurst  = 64 << 10        // bytes; the largest packet that the kernel passes to a device at once
	quantum   = 60_000
	queue     = 1000 // length of the queue for packets that are in no class
)

// Limit describes which packets are limited, and to what rate.
type Limit struct {
	Link string     // the interface that the packets leave by
	To   netip.Addr // the destination
	Port uint16     // TCP port there; 0: all traffic to it
	// Ports is the number of ports from Port on. It must be a power of two, and Port a
	// multiple of it. 0: one port.
	Ports uint16
	Rate  uint64 // in bits per second
}

// Cap identifies a limit that is in force. It contains data only: a caller may store it,
// and use it after a restart.
type Cap struct {
	Link  string `json:"link"`
	Class uint16 `json:"class"`
}

func (l Limit) check() error {
	var failures []error
	if !l.To.IsValid() || l.To.IsUnspecified() || l.To.IsMulticast() {
		failures = append(failures, fmt.Errorf("limit on %s: %q is not the address of a host", l.Link, l.To))
	}
	if l.Ports&(l.Ports-1) != 0 || l.Ports > 0 && l.Port%l.Ports != 0 {
		failures = append(failures, fmt.Errorf("limit on %s: %d ports from %d on are not one block of a power of two", l.Link, l.Ports, l.Port))
	}
	if l.Rate < minRate || l.Rate > maxRate {
		failures = append(failures, fmt.Errorf("limit on %s: %d bit/s is not within %d to %d", l.Link, l.Rate, minRate, uint64(maxRate)))
	}
	return errors.Join(failures...)
}

// Limit limits the rate of what this host sends to a destination. Remove undoes it.
func (h *Host) Limit(ctx context.Context, l Limit) (Cap, error) {
	if err := l.check(); err != nil {
		return Cap{}, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	link, err := h.link(ctx, l.Link)
	if err != nil {
		return Cap{}, err
	}
	ours, err := h.ours(ctx, link)
	if err != nil {
		return Cap{}, err
	}
	if !ours {
		if err := h.k.QdiscAdd(qdisc(link)); err != nil {
			return Cap{}, fmt.Errorf("limit on %s: queueing discipline: %w", l.Link, err)
		}
	}
	c := Cap{Link: l.Link}
	if err := h.limit(ctx, link, l, &c); err != nil {
		// Remove what was made of it, and the discipline if this was the first limit.
		return Cap{}, errors.Join(fmt.Errorf("limit on %s: %w", l.Link, err), h.remove(context.WithoutCancel(ctx), link, c.Class))
	}
	return c, nil
}

func (h *Host) limit(ctx context.Context, link netlink.Link, l Limit, c *Cap) error {
	classes, err := h.classes(ctx, link)
	if err != nil {
		return err
	}
	class := uint16(1)
	for ; classes[class] != nil; class++ {
		if class == maxLimits {
			return fmt.Errorf("%d limits are in force already", maxLimits)
		}
	}
	c.Class = class
	if err := h.k.ClassAdd(htb(link, class, l.Rate)); err != nil {
		return fmt.Errorf("class: %w", err)
	}
	if err := h.k.FilterAdd(filter(link, class, l)); err != nil {
		return fmt.Errorf("filter: %w", err)
	}
	return nil
}

// Change sets a new rate, in bits per second.
func (h *Host) Change(ctx context.Context, c Cap, rate uint64) error {
	if rate < minRate || rate > maxRate {
		return fmt.Errorf("limit on %s: %d bit/s is not within %d to %d", c.Link, rate, minRate, uint64(maxRate))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	link, _, err := h.find(ctx, c)
	if err != nil {
		return err
	}
	if err := h.k.ClassChange(htb(link, c.Class, rate)); err != nil {
		return fmt.Errorf("limit on %s: %w", c.Link, err)
	}
	return nil
}

// Sent returns how many bytes were sent to the destination since the limit was set, and
// the limit's rate in bits per second.
func (h *Host) Sent(ctx context.Context, c Cap) (bytes, rate uint64, err error) {
	_, class, err := h.find(ctx, c)
	if err != nil {
		return 0, 0, err
	}
	if s := class.Statistics; s != nil && s.Basic != nil {
		bytes = s.Basic.Bytes
	}
	return bytes, class.Rate * 8, nil
}

// Remove removes a limit. If it does not exist any more, there is no error.
func (h *Host) Remove(ctx context.Context, c Cap) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	link, err := h.link(ctx, c.Link)
	if errors.Is(err, ErrNoLink) {
		return nil
	} else if err != nil {
		return err
	}
	ours, err := h.ours(ctx, link)
	if err != nil || !ours {
		if errors.Is(err, ErrBusy) {
			return nil
		}
		return err
	}
	return h.remove(ctx, link, c.Class)
}

// Limits returns the limits on all interfaces, including those that an earlier hostd has
// left.
func (h *Host) Limits(ctx context.Context) ([]Cap, error) {
	links, err := whole(ctx, h.k.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	var out []Cap
	for _, link := range links {
		ours, err := h.ours(ctx, link)
		if err != nil || !ours {
			continue // the interface has vanished, or the discipline is not ours
		}
		classes, err := h.classes(ctx, link)
		if err != nil {
			return nil, err
		}
		for class := range classes {
			out = append(out, Cap{link.Attrs().Name, class})
		}
	}
	slices.SortFunc(out, func(a, b Cap) int {
		if a.Link != b.Link {
			if a.Link < b.Link {
				return -1
			}
			return 1
		}
		return int(a.Class) - int(b.Class)
	})
	return out, nil
}

// Reconcile removes all limits except those in keep: an earlier hostd that was killed has
// left them. It returns the removed ones.
func (h *Host) Reconcile(ctx context.Context, keep []Cap) ([]Cap, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	links, err := whole(ctx, h.k.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	var lifted []Cap
	var failures []error
	for _, link := range links {
		ours, err := h.ours(ctx, link)
		if err != nil || !ours {
			continue
		}
		classes, err := h.classes(ctx, link)
		if err != nil {
			failures = append(failures, err)
			continue
		}
		for class := range classes {
			c := Cap{link.Attrs().Name, class}
			if slices.Contains(keep, c) {
				continue
			}
			if err := h.remove(ctx, link, class); err != nil {
				failures = append(failures, err)
				continue
			}
			lifted = append(lifted, c)
		}
		if len(classes) == 0 { // hostd was killed after it had made the discipline and before the class
			failures = append(failures, h.remove(ctx, link, 0))
		}
	}
	return lifted, errors.Join(failures...)
}

// remove removes a class with its filters, and after the last class the discipline. Class
// 0 means no class: only the discipline.
func (h *Host) remove(ctx context.Context, link netlink.Link, class uint16) error {
	name := link.Attrs().Name
	var failures []error
	classes, err := h.classes(ctx, link)
	if err != nil {
		return err
	}
	if class != 0 {
		// The kernel does not delete a class while a filter refers to it.
		for _, protocol := range []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6} {
			f := &netlink.U32{FilterAttrs: netlink.FilterAttrs{
				LinkIndex: link.Attrs().Index, Parent: netlink.MakeHandle(major, 0), Priority: class, Protocol: protocol,
			}}
			if err := h.k.FilterDel(f); err != nil && !gone(err) {
				failures = append(failures, fmt.Errorf("limit on %s: filter: %w", name, err))
			}
		}
		if c := classes[class]; c != nil {
			if err := h.k.ClassDel(c); err != nil && !gone(err) {
				failures = append(failures, fmt.Errorf("limit on %s: class: %w", name, err))
			} else {
				delete(classes, class)
			}
		}
	}
	if len(classes) == 0 && len(failures) == 0 {
		if err := h.k.QdiscDel(qdisc(link)); err != nil && !gone(err) {
			failures = append(failures, fmt.Errorf("limit on %s: queueing discipline: %w", name, err))
		}
	}
	return errors.Join(failures...)
}

func gone(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.EINVAL)
}

// ours reports whether the root queueing discipline of the interface is ours. If it is
// somebody else's, the error wraps ErrBusy. The kernel's default discipline, which has no
// handle, counts as none.
func (h *Host) ours(ctx context.Context, link netlink.Link) (bool, error) {
	all, err := whole(ctx, func() ([]netlink.Qdisc, error) { return h.k.QdiscList(link) })
	if err != nil {
		return false, fmt.Errorf("interface %s: queueing disciplines: %w", link.Attrs().Name, err)
	}
	for _, q := range all {
		a := q.Attrs()
		if a.Parent != netlink.HANDLE_ROOT || a.LinkIndex != link.Attrs().Index || a.Handle == 0 {
			continue
		}
		if a.Handle == netlink.MakeHandle(major, 0) && q.Type() == "htb" {
			return true, nil
		}
		return false, fmt.Errorf("%w: %s has %s %s; remove it, or limit the migration there", ErrBusy, link.Attrs().Name, q.Type(), netlink.HandleStr(a.Handle))
	}
	return false, nil
}

// classes returns the classes of our discipline, by minor number.
func (h *Host) classes(ctx context.Context, link netlink.Link) (map[uint16]*netlink.HtbClass, error) {
	all, err := whole(ctx, func() ([]netlink.Class, error) { return h.k.ClassList(link, netlink.HANDLE_NONE) })
	if err != nil {
		return nil, fmt.Errorf("interface %s: classes: %w", link.Attrs().Name, err)
	}
	out := map[uint16]*netlink.HtbClass{}
	for _, c := range all {
		if class, ok := c.(*netlink.HtbClass); ok && class.Handle>>16 == major && class.Handle&0xffff != 0 {
			out[uint16(class.Handle)] = class
		}
	}
	return out, nil
}

func (h *Host) find(ctx context.Context, c Cap) (netlink.Link, *netlink.HtbClass, error) {
	fail := fmt.Errorf("%w: class %d on %s", ErrGone, c.Class, c.Link)
	link, err := h.link(ctx, c.Link)
	if err != nil {
		return nil, nil, err
	}
	ours, err := h.ours(ctx, link)
	switch {
	case errors.Is(err, ErrBusy), err == nil && !ours:
		return nil, nil, fail
	case err != nil:
		return nil, nil, err
	}
	classes, err := h.classes(ctx, link)
	if err != nil {
		return nil, nil, err
	}
	if classes[c.Class] == nil {
		return nil, nil, fail
	}
	return link, classes[c.Class], nil
}

func qdisc(link netlink.Link) *netlink.Htb {
	q := netlink.NewHtb(netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(major, 0), Parent: netlink.HANDLE_ROOT})
	length := uint32(queue) // the interface's own queue length may be 0
	q.DirectQlen = &length
	return q
}

func htb(link netlink.Link, class uint16, rate uint64) *netlink.HtbClass {
	bytes := rate / 8
	if bytes >= 1<<32 && bytes&0xffffffff == 0 {
		bytes++ // the older 32-bit field must not be zero
	}
	// the burst is what is sent in 10 ms at that rate
	burst := uint32(min(max(bytes/100, minBurst), 1<<30))
	return netlink.NewHtbClass(
		netlink.ClassAttrs{LinkIndex: link.Attrs().Index, Parent: netlink.MakeHandle(major, 0), Handle: netlink.MakeHandle(major, class)},
		netlink.HtbClassAttrs{Rate: bytes * 8, Ceil: bytes * 8, Buffer: burst, Cbuffer: burst, Quantum: quantum},
	)
}

// filter returns a u32 filter (tc-u32(8)) that puts packets to a destination into a
// class. Its priority is the class's minor number; so it is found again. Offsets are
// those of the headers of IPv4 (RFC 791), IPv6 (RFC 8200) and TCP (RFC 9293). Masks are
// for 32-bit words in network byte order.
func filter(link netlink.Link, class uint16, l Limit) *netlink.U32 {
	f := &netlink.U32{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: link.Attrs().Index, Parent: netlink.MakeHandle(major, 0), Priority: class, Protocol: unix.ETH_P_IP,
		},
		ClassId: netlink.MakeHandle(major, class),
		Sel:     &nl.TcU32Sel{Flags: nl.TC_U32_TERMINAL},
	}
	match := func(offset int32, mask, value uint32) {
		f.Sel.Keys = append(f.Sel.Keys, nl.TcU32Key{Mask: mask, Val: value, Off: offset})
	}
	to, port := l.To.Unmap(), l.Port
	ports := uint32(0xffff &^ (max(l.Ports, 1) - 1)) // mask for the port
	address := to.AsSlice()
	if to.Is4() {
		match(16, 0xffffffff, binary.BigEndian.Uint32(address))
		if port != 0 {
			match(0, 0x0f000000, 0x05000000)           // IPv4 header without options: TCP begins at byte 20
			match(8, 0x00ff0000, unix.IPPROTO_TCP<<16) // protocol is TCP
			match(4, 0x00001fff, 0)                    // not a later fragment: fragment offset 0
			match(20, ports, uint32(port))             // destination port
		}
	} else {
		f.Protocol = unix.ETH_P_IPV6
		for i := range 4 {
			match(int32(24+4*i), 0xffffffff, binary.BigEndian.Uint32(address[4*i:]))
		}
		if port != 0 {
			match(4, 0x0000ff00, unix.IPPROTO_TCP<<8)
			match(40, ports, uint32(port))
		}
	}
	f.Sel.Nkeys = uint8(len(f.Sel.Keys))
	return f
}
