package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
)

// files can only be read.
type files struct{ fstest.MapFS }

func (files) Write(context.Context, string, string) error { return syscall.EROFS }

// fakeKernel has interfaces, and the virtual functions of one card, whose rules
// are those of rtnetlink and of common drivers.
type fakeKernel struct {
	kernel // what is not there panics
	links  []netlink.Link
	dumps  int    // to interrupt
	look   func() // before it answers; may be nil

	addresses map[string][]string // of interfaces

	deaf  string // a setting that the driver takes and forgets
	fails string // one that it refuses
	calls []string
}

func (f *fakeKernel) LinkList() ([]netlink.Link, error) {
	if f.look != nil {
		f.look()
	}
	if f.dumps > 0 {
		f.dumps--
		return f.links[:1], netlink.ErrDumpInterrupted
	}
	return f.links, nil
}

func (f *fakeKernel) AddrList(l netlink.Link, _ int) ([]netlink.Addr, error) {
	var out []netlink.Addr
	for _, text := range f.addresses[l.Attrs().Name] {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			return nil, err
		}
		out = append(out, *a)
	}
	return out, nil
}

func (f *fakeKernel) LinkByName(name string) (netlink.Link, error) {
	if f.look != nil {
		f.look()
	}
	for _, l := range f.links {
		if l.Attrs().Name == name {
			return l, nil
		}
	}
	return nil, netlink.LinkNotFoundError{}
}

func (f *fakeKernel) set(l netlink.Link, vf int, what string, change func(*netlink.VfInfo) error) error {
	f.calls = append(f.calls, what)
	vfs := l.Attrs().Vfs
	switch {
	case vf < 0 || vf >= len(vfs):
		return syscall.EINVAL
	case f.fails == what:
		return syscall.EOPNOTSUPP
	case f.deaf == what:
		return nil
	}
	return change(&vfs[vf])
}

func (f *fakeKernel) LinkSetVfHardwareAddr(l netlink.Link, vf int, mac net.HardwareAddr) error {
	return f.set(l, vf, "MAC", func(v *netlink.VfInfo) error { v.Mac = mac; return nil })
}

func (f *fakeKernel) LinkSetVfVlanQos(l netlink.Link, vf, vlan, qos int) error {
	return f.set(l, vf, "VLAN", func(v *netlink.VfInfo) error { v.Vlan, v.Qos = vlan, qos; return nil })
}

func (f *fakeKernel) LinkSetVfRate(l netlink.Link, vf, low, high int) error {
	return f.set(l, vf, "rate", func(v *netlink.VfInfo) error {
		if high != 0 && low > high {
			return syscall.EINVAL
		}
		v.MinTxRate, v.MaxTxRate = uint32(low), uint32(high)
		return nil
	})
}

func (f *fakeKernel) LinkSetVfSpoofchk(l netlink.Link, vf int, check bool) error {
	return f.set(l, vf, "spoof check", func(v *netlink.VfInfo) error { v.Spoofchk = check; return nil })
}

func (f *fakeKernel) LinkSetVfTrust(l netlink.Link, vf int, trust bool) error {
	return f.set(l, vf, "trust", func(v *netlink.VfInfo) error {
		v.Trust = 0
		if trust {
			v.Trust = 1
		}
		return nil
	})
}

func (f *fakeKernel) LinkSetVfState(l netlink.Link, vf int, state uint32) error {
	return f.set(l, vf, "link state", func(v *netlink.VfInfo) error { v.LinkState = state; return nil })
}

func attrs(index int, name string, master, parent int, up bool) netlink.LinkAttrs {
	a := netlink.LinkAttrs{Index: index, Name: name, MasterIndex: master, ParentIndex: parent, MTU: 9000, Flags: net.FlagUp, OperState: netlink.OperUp}
	if !up {
		a.OperState = netlink.OperDown
	}
	return a
}

// Two ports of 25 Gbit/s, one of them without a carrier, and one of 10, in bonds
// of several kinds, below bridges and VLANs.
func TestSpeedAndHealth(t *testing.T) {
	device := func(index int, name string, master int, up bool) netlink.Link {
		return &netlink.Device{LinkAttrs: attrs(index, name, master, 0, up)}
	}
	bond := func(index int, name string, master int, mode netlink.BondMode, active int) netlink.Link {
		b := netlink.NewLinkBond(attrs(index, name, master, 0, true))
		b.Mode, b.ActiveSlave = mode, active
		return b
	}
	root := fstest.MapFS{}
	for name, speed := range map[string]string{"e0": "25000", "e1": "25000", "e2": "25000", "e3": "10000", "e4": "-1", "e5": "100000", "tap0": "10000000"} {
		root["sys/class/net/"+name+"/speed"] = &fstest.MapFile{Data: []byte(speed + "\n")}
		if name != "tap0" {
			root["sys/class/net/"+name+"/device/vendor"] = &fstest.MapFile{}
		}
	}
	e5 := device(6, "e5", 40, true)
	e5.Attrs().Statistics = &netlink.LinkStatistics{RxErrors: 7, TxErrors: 1}
	k := &fakeKernel{dumps: 3, links: []netlink.Link{
		device(1, "e0", 10, true), device(2, "e1", 10, true), device(3, "e2", 11, false), device(4, "e3", 11, true), device(5, "e4", 0, true), e5,
		bond(10, "lacp", 0, netlink.BOND_MODE_802_3AD, 0),
		bond(11, "mixed", 12, netlink.BOND_MODE_ACTIVE_BACKUP, 4),
		&netlink.Bridge{LinkAttrs: attrs(12, "br0", 0, 0, true)},
		&netlink.Vlan{LinkAttrs: attrs(13, "lacp.7", 0, 10, true)},
		&netlink.Vlan{LinkAttrs: attrs(14, "lost.7", 0, 99, true)},
		&netlink.Tuntap{LinkAttrs: attrs(15, "tap0", 12, 0, true)},
		&netlink.Vlan{LinkAttrs: attrs(20, "loop", 0, 21, true)}, &netlink.Vlan{LinkAttrs: attrs(21, "loop2", 0, 20, true)},
		&netlink.Bridge{LinkAttrs: attrs(40, "br1", 0, 0, true)},
		&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 30, Name: "off", OperState: netlink.OperDown}},
	}}
	h := &Host{root: files{root}, k: k}
	for _, c := range []struct {
		name     string
		gbit     uint64
		physical string
		problems string
	}{
		{"e0", 25, "e0", ""},
		{"lacp", 50, "e0 e1", ""},
		{"lacp.7", 50, "e0 e1", ""},
		{"mixed", 10, "e3", "1 of 2 ports of bond mixed have no carrier"},
		{"br0", 10, "e3", "1 of 2 ports of bond mixed have no carrier"},
		{"br1", 100, "e5", ""},
		{"e4", 0, "e4", ""},
		{"lost.7", 0, "", ""},
		{"loop", 0, "", ""},
		{"off", 0, "off", "off is down: ip link set off up"},
		{"e2", 25, "e2", "e2 has no carrier: look at its cable and switch port"},
	} {
		l, err := h.Link(t.Context(), c.name)
		if err != nil || l.Speed != c.gbit*1000*mbit || strings.Join(l.Physical, " ") != c.physical || strings.Join(l.Problems, "; ") != c.problems {
			t.Errorf("%s: %+v, %v", c.name, l, err)
		}
	}
	l, err := h.Link(t.Context(), "br1")
	if err != nil || l.Counters.RxErrors != 7 {
		t.Errorf("a bridge shows its port's errors: %+v, %v", l, err)
	}
	k.dumps = dumpAttempts + 1
	if _, err := h.Link(t.Context(), "e0"); !errors.Is(err, netlink.ErrDumpInterrupted) {
		t.Error(err)
	}
}

func card() (*Host, *fakeKernel) {
	pf := &netlink.Device{LinkAttrs: attrs(1, "pf", 0, 0, true)}
	for i := range 3 {
		pf.Vfs = append(pf.Vfs, netlink.VfInfo{ID: i, Mac: net.HardwareAddr{2, 0, 0, 0, 0, byte(i)}, Spoofchk: true})
	}
	k := &fakeKernel{links: []netlink.Link{pf}}
	return &Host{k: k}, k
}

func wanted() VF {
	return VF{Index: 1, MAC: net.HardwareAddr{2, 0, 0, 0xaa, 0, 1}, VLAN: 7, QoS: 3, MinRate: 100, MaxRate: 1000, Trust: true, LinkState: netlink.VF_LINK_STATE_ENABLE}
}

func TestSetVF(t *testing.T) {
	h, k := card()
	all, err := h.VFs(t.Context(), "pf")
	if err != nil || len(all) != 3 || !all[1].SpoofCheck {
		t.Fatalf("%+v, %v", all, err)
	}
	before, err := h.SetVF(t.Context(), "pf", wanted())
	if d := cmp.Diff(all[1], before); d != "" || err != nil {
		t.Fatalf("%v\n%s", err, d)
	}
	now, err := h.VFs(t.Context(), "pf")
	if d := cmp.Diff([]VF{all[0], wanted(), all[2]}, now); d != "" || err != nil {
		t.Errorf("%v\n%s", err, d)
	}
	// The same again asks nothing of the card.
	k.calls = nil
	if _, err := h.SetVF(t.Context(), "pf", wanted()); err != nil || len(k.calls) > 0 {
		t.Errorf("%v, %v", k.calls, err)
	}
	// And back.
	if _, err := h.SetVF(t.Context(), "pf", before); err != nil {
		t.Fatal(err)
	}
	if now, err = h.VFs(t.Context(), "pf"); err != nil || !cmp.Equal(all, now) {
		t.Errorf("%v\n%s", err, cmp.Diff(all, now))
	}
	// Who has no wish for a MAC keeps it.
	if _, err := h.SetVF(t.Context(), "pf", VF{Index: 2, SpoofCheck: true, VLAN: 5}); err != nil || k.links[0].Attrs().Vfs[2].Mac.String() != "02:00:00:00:00:02" {
		t.Error(err, k.links[0].Attrs().Vfs[2])
	}
}

// Whatever the driver refuses, or takes and forgets, the function is as it was.
func TestSetVFIsAllOrNothing(t *testing.T) {
	for _, s := range settings() {
		for _, deaf := range []bool{false, true} {
			h, k := card()
			all, err := h.VFs(t.Context(), "pf")
			if err != nil {
				t.Fatal(err)
			}
			want := syscall.EOPNOTSUPP.Error()
			if k.fails = s.name; deaf {
				k.fails, k.deaf, want = "", s.name, ErrReadBack.Error()
			}
			_, err = h.SetVF(t.Context(), "pf", wanted())
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), s.name+" of virtual function 1 of pf") {
				t.Errorf("%s, deaf %v: %v", s.name, deaf, err)
			}
			if now, err := h.VFs(t.Context(), "pf"); err != nil || !cmp.Equal(all, now) {
				t.Errorf("%s, deaf %v: %v\n%s", s.name, deaf, err, cmp.Diff(all, now))
			}
		}
	}
}

func TestVFsThatMakeNoSense(t *testing.T) {
	h, k := card()
	change := func(f func(*VF)) VF { v := wanted(); f(&v); return v }
	for name, v := range map[string]VF{
		"no such function": change(func(v *VF) { v.Index = 3 }),
		"negative":         change(func(v *VF) { v.Index = -1 }),
		"group MAC":        change(func(v *VF) { v.MAC = net.HardwareAddr{1, 0, 0, 0, 0, 1} }),
		"long MAC":         change(func(v *VF) { v.MAC = make(net.HardwareAddr, 8) }),
		"VLAN":             change(func(v *VF) { v.VLAN = 4095 }),
		"priority":         change(func(v *VF) { v.QoS = 8 }),
		"priority alone":   change(func(v *VF) { v.VLAN = 0 }),
		"rates":            change(func(v *VF) { v.MinRate = 2000 }),
		"negative rate":    change(func(v *VF) { v.MinRate = -1 }),
		"link state":       change(func(v *VF) { v.LinkState = 9 }),
	} {
		if _, err := h.SetVF(t.Context(), "pf", v); err == nil {
			t.Error(name)
		}
	}
	if len(k.calls) > 0 {
		t.Errorf("asked for %v", slices.Compact(k.calls))
	}
	if _, err := h.SetVF(t.Context(), "none", wanted()); !errors.Is(err, ErrNoLink) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.VFs(ctx, "pf"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestNamesThatAreNoFiles(t *testing.T) {
	h := &Host{root: files{fstest.MapFS{"sys/class/speed": &fstest.MapFile{Data: []byte("1\n")}}}}
	for _, name := range []string{"", ".", "..", "a/../.."} {
		if s := h.speed(name); s != 0 {
			t.Error(fmt.Sprint(name, s))
		}
	}
}
