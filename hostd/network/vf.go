package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
)

const (
	maxVLAN = 4094
	maxQoS  = 7
)

// VF has the settings of a virtual function of a network card.
type VF struct {
	Index      int
	MAC        net.HardwareAddr
	VLAN       int // 0: no VLAN
	QoS        int // priority of the VLAN's frames (IEEE 802.1p), 0 to 7
	MinRate    int // in Mbit/s; 0: no guaranteed rate
	MaxRate    int // in Mbit/s; 0: no limit
	SpoofCheck bool
	Trust      bool
	LinkState  uint32 // netlink.VF_LINK_STATE_AUTO, _ENABLE or _DISABLE
}

// Change has the settings of a virtual function that are to be changed. The others stay.
type Change struct {
	MAC        string `yaml:"mac,omitempty"` // empty: unchanged
	VLAN       *int   `yaml:"vlan,omitempty"`
	QoS        *int   `yaml:"qos,omitempty"`
	MinRate    *int   `yaml:"minRate,omitempty"` // in Mbit/s, as in VF
	MaxRate    *int   `yaml:"maxRate,omitempty"`
	SpoofCheck *bool  `yaml:"spoofCheck,omitempty"`
	Trust      *bool  `yaml:"trust,omitempty"`
	LinkState  string `yaml:"linkState,omitempty"` // one of LinkStates; empty: unchanged
}

// LinkStates returns the names of link states. The index is the kernel's number.
func LinkStates() []string { return []string{"auto", "enable", "disable"} }

// Of returns the settings v with the change applied. pf is the interface, for errors.
// Errors wrap ErrInvalid.
func (c Change) Of(pf string, v VF) (VF, error) {
	if c.MAC != "" {
		mac, err := net.ParseMAC(c.MAC)
		if err != nil {
			return VF{}, fmt.Errorf("%w: virtual function %d of %s: MAC %q is not as 02:00:00:00:00:01", ErrInvalid, v.Index, pf, c.MAC)
		}
		v.MAC = mac
	}
	if c.VLAN != nil && *c.VLAN == 0 && c.QoS == nil {
		v.QoS = 0 // the priority is a part of the VLAN tag
	}
	set(&v.VLAN, c.VLAN)
	set(&v.QoS, c.QoS)
	set(&v.MinRate, c.MinRate)
	set(&v.MaxRate, c.MaxRate)
	set(&v.SpoofCheck, c.SpoofCheck)
	set(&v.Trust, c.Trust)
	if c.LinkState != "" {
		state := slices.Index(LinkStates(), c.LinkState)
		if state < 0 {
			return VF{}, fmt.Errorf("%w: virtual function %d of %s: link state %q is not one of %s", ErrInvalid, v.Index, pf, c.LinkState, strings.Join(LinkStates(), ", "))
		}
		v.LinkState = uint32(state)
	}
	return v, v.check(pf)
}

func set[T any](to, from *T) {
	if from != nil {
		*to = *from
	}
}

// VFs lists the virtual functions of a card, by the interface of its physical function.
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
	if len(all) == 0 {
		return VF{}, fmt.Errorf("%w: %s has none, or its driver does not tell of them", ErrNoVF, pf)
	}
	return VF{}, fmt.Errorf("%w: %s has %d, and none is number %d", ErrNoVF, pf, len(all), index)
}

func (v VF) check(pf string) error {
	var wrong []string
	bad := func(is bool, format string, args ...any) {
		if is {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	bad(len(v.MAC) != 6 && len(v.MAC) != 0, "MAC %s has not 6 bytes", v.MAC)
	bad(len(v.MAC) == 6 && v.MAC[0]&1 != 0, "MAC %s is a group's", v.MAC)
	bad(v.VLAN < 0 || v.VLAN > maxVLAN, "VLAN %d is not within 0 to %d", v.VLAN, maxVLAN)
	bad(v.QoS < 0 || v.QoS > maxQoS, "priority %d is not within 0 to %d", v.QoS, maxQoS)
	bad(v.VLAN == 0 && v.QoS != 0, "priority %d needs a VLAN", v.QoS)
	bad(v.MinRate < 0 || v.MaxRate < 0 || v.MaxRate != 0 && v.MinRate > v.MaxRate, "rates from %d to %d Mbit/s", v.MinRate, v.MaxRate)
	bad(v.MaxRate > maxMbps, "rate of %d Mbit/s", v.MaxRate)
	bad(v.LinkState > netlink.VF_LINK_STATE_DISABLE, "link state %d", v.LinkState)
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%w: virtual function %d of %s: %s", ErrInvalid, v.Index, pf, strings.Join(wrong, "; "))
}

// setting is a setting that one netlink message changes.
type setting struct {
	name string
	text func(v VF) string
	same func(a, b VF) bool
	set  func(k kernel, l netlink.Link, v VF) error
}

func settings() []setting {
	return []setting{
		{
			"trust", func(v VF) string { return onOff(v.Trust) },
			func(a, b VF) bool { return a.Trust == b.Trust },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfTrust(l, v.Index, v.Trust) },
		},
		{
			"MAC", func(v VF) string { return v.MAC.String() },
			func(a, b VF) bool { return bytes.Equal(a.MAC, b.MAC) },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfHardwareAddr(l, v.Index, v.MAC) },
		},
		{
			"VLAN", func(v VF) string { return v.vlan() },
			func(a, b VF) bool { return a.VLAN == b.VLAN && a.QoS == b.QoS },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfVlanQos(l, v.Index, v.VLAN, v.QoS) },
		},
		{
			"rate", func(v VF) string { return v.rate() },
			func(a, b VF) bool { return a.MinRate == b.MinRate && a.MaxRate == b.MaxRate },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfRate(l, v.Index, v.MinRate, v.MaxRate) },
		},
		{
			"spoof check", func(v VF) string { return onOff(v.SpoofCheck) },
			func(a, b VF) bool { return a.SpoofCheck == b.SpoofCheck },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfSpoofchk(l, v.Index, v.SpoofCheck) },
		},
		{
			"link state", func(v VF) string { return v.State() },
			func(a, b VF) bool { return a.LinkState == b.LinkState },
			func(k kernel, l netlink.Link, v VF) error { return k.LinkSetVfState(l, v.Index, v.LinkState) },
		},
	}
}

// ChangeVF changes some settings of a virtual function, as SetVF does.
func (h *Host) ChangeVF(ctx context.Context, pf string, index int, c Change) error {
	h.vfs.Lock()
	defer h.vfs.Unlock()
	before, err := h.vf(ctx, pf, index)
	if err != nil {
		return err
	}
	want, err := c.Of(pf, before)
	if err != nil {
		return err
	}
	_, err = h.SetVF(ctx, pf, want)
	return err
}

// Difference is a setting that differs between two states of a virtual function, in
// words.
type Difference struct{ Name, From, To string }

// Differences returns the settings that SetVF would change.
func (v VF) Differences(want VF) []Difference {
	var out []Difference
	for _, s := range settings() {
		if !s.same(v, want) {
			out = append(out, Difference{s.name, s.text(v), s.text(want)})
		}
	}
	return out
}

// State returns the link state, one of LinkStates; empty: an unknown one.
func (v VF) State() string {
	if all := LinkStates(); int(v.LinkState) < len(all) {
		return all[v.LinkState]
	}
	return ""
}

func (v VF) vlan() string {
	if v.VLAN == 0 {
		return "none"
	}
	return fmt.Sprintf("%d with priority %d", v.VLAN, v.QoS)
}

func (v VF) rate() string {
	if v.MaxRate == 0 {
		return fmt.Sprintf("%d Mbit/s and more", v.MinRate)
	}
	return fmt.Sprintf("%d to %d Mbit/s", v.MinRate, v.MaxRate)
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// SetVF changes the settings of a virtual function, reads them back, and returns the
// former settings. SetVF with those is the undo. A caller that must be able to undo after
// a crash first stores them (see VFs). If SetVF fails, it restores the former settings,
// or the error contains that this failed, too. An empty MAC is not set.
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
		now, unknown := h.vf(ctx, pf, want.Index)
		for i := len(done) - 1; i >= 0; i-- {
			if unknown == nil && done[i].same(now, before) {
				continue // the driver refused this change: the setting has its former value
			}
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
		// Added before the call, as a call that fails may have changed something.
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
