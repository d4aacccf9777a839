package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
)

const (
	maxVLAN = 4094
	maxQoS  = 7
)

// VF is how a virtual function of a network card is set up.
type VF struct {
	Index      int
	MAC        net.HardwareAddr
	VLAN       int // 0: none
	QoS        int // priority of the VLAN's frames, 0 to 7
	MinRate    int // in Mbit/s; 0: no promise
	MaxRate    int // in Mbit/s; 0: no limit
	SpoofCheck bool
	Trust      bool
	LinkState  uint32 // netlink.VF_LINK_STATE_AUTO, _ENABLE or _DISABLE
}

// VFs lists the virtual functions of a card's physical function.
func (h *Host) VFs(ctx context.Context, pf string) ([]VF, error) {
	l, err := h.link(ctx, pf)
	if err != nil {
		return nil, err
	}
	var out []VF
	for _, v := range l.Attrs().Vfs {
		out = append(out, VF{
			Index: v.ID, MAC: v.Mac, VLAN: v.Vlan, QoS: v.Qos, MinRate: int(v.MinTxRate), MaxRate: int(v.MaxTxRate),
			SpoofCheck: v.Spoofchk, Trust: v.Trust == 1, LinkState: v.LinkState,
		})
	}
	return out, nil
}

func (h *Host) vf(ctx context.Context, pf string, index int) (VF, error) {
	all, err := h.VFs(ctx, pf)
	if err != nil {
		return VF{}, err
	}
	for _, v := range all {
		if v.Index == index {
			return v, nil
		}
	}
	return VF{}, fmt.Errorf("%w: %s has %d, and none is number %d", ErrNoVF, pf, len(all), index)
}

func (v VF) check(pf string) error {
	var failures []error
	bad := func(is bool, format string, args ...any) {
		if is {
			failures = append(failures, fmt.Errorf("virtual function %d of %s: %w", v.Index, pf, fmt.Errorf(format, args...)))
		}
	}
	bad(len(v.MAC) != 6 && len(v.MAC) != 0, "MAC %s has not 6 bytes", v.MAC)
	bad(len(v.MAC) == 6 && v.MAC[0]&1 != 0, "MAC %s is a group's", v.MAC)
	bad(v.VLAN < 0 || v.VLAN > maxVLAN, "VLAN %d is not within 0 to %d", v.VLAN, maxVLAN)
	bad(v.QoS < 0 || v.QoS > maxQoS, "priority %d is not within 0 to %d", v.QoS, maxQoS)
	bad(v.VLAN == 0 && v.QoS != 0, "priority %d needs a VLAN", v.QoS)
	bad(v.MinRate < 0 || v.MaxRate < 0 || v.MaxRate != 0 && v.MinRate > v.MaxRate, "rates from %d to %d Mbit/s", v.MinRate, v.MaxRate)
	bad(v.LinkState > netlink.VF_LINK_STATE_DISABLE, "link state %d", v.LinkState)
	return errors.Join(failures...)
}

// setting is one thing that is set at a time.
type setting struct {
	name string
	same func(a, b VF) bool
	set  func(k kernel, l netlink.Link, v VF) error
}

func settings() []setting {
	return []setting{
		{
			"trust", func(a, b VF) bool { return a.Trust == b.Trust },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfTrust(l, v.Index, v.Trust) },
		},
		{
			"MAC", func(a, b VF) bool { return bytes.Equal(a.MAC, b.MAC) },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfHardwareAddr(l, v.Index, v.MAC) },
		},
		{
			"VLAN", func(a, b VF) bool { return a.VLAN == b.VLAN && a.QoS == b.QoS },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfVlanQos(l, v.Index, v.VLAN, v.QoS) },
		},
		{
			"rate", func(a, b VF) bool { return a.MinRate == b.MinRate && a.MaxRate == b.MaxRate },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfRate(l, v.Index, v.MinRate, v.MaxRate) },
		},
		{
			"spoof check", func(a, b VF) bool { return a.SpoofCheck == b.SpoofCheck },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfSpoofchk(l, v.Index, v.SpoofCheck) },
		},
		{
			"link state", func(a, b VF) bool { return a.LinkState == b.LinkState },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfState(l, v.Index, v.LinkState) },
		},
	}
}

// SetVF sets a virtual function up, reads it back, and returns how it was
// before: setting that again is the undo, which a caller that must survive a
// crash writes down first (VFs). On an error it is as it was, or the error
// says that this failed, too. Empty MACs are left as they are.
func (h *Host) SetVF(ctx context.Context, pf string, want VF) (before VF, err error) {
	if err := want.check(pf); err != nil {
		return VF{}, err
	}
	if before, err = h.vf(ctx, pf, want.Index); err != nil {
		return VF{}, err
	}
	if len(want.MAC) == 0 {
		want.MAC = before.MAC
	}
	l, err := h.link(ctx, pf)
	if err != nil {
		return VF{}, err
	}
	var done []setting
	undo := func(cause error) error {
		for i := len(done) - 1; i >= 0; i-- {
			if err := done[i].set(h.k, l, before); err != nil {
				cause = errors.Join(cause, fmt.Errorf("%s of virtual function %d of %s could not be set back: %w", done[i].name, want.Index, pf, err))
			}
		}
		return cause
	}
	for _, s := range settings() {
		if s.same(before, want) {
			continue
		}
		// Before the call: it may fail half done.
		done = append(done, s)
		if err := s.set(h.k, l, want); err != nil {
			return VF{}, undo(fmt.Errorf("%s of virtual function %d of %s: %w", s.name, want.Index, pf, err))
		}
	}
	now, err := h.vf(ctx, pf, want.Index)
	if err != nil {
		return VF{}, undo(err)
	}
	for _, s := range settings() {
		if !s.same(now, want) {
			return VF{}, undo(fmt.Errorf("%s of virtual function %d of %s: %w: its driver may not know that setting", s.name, want.Index, pf, ErrReadBack))
		}
	}
	return before, nil
}
