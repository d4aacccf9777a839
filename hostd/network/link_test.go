package network

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/vishvananda/netlink"
)

// fakeKernel has interfaces.
type fakeKernel struct {
	kernel // what is not there panics
	links  []netlink.Link
	dumps  int // to interrupt
}

func (f *fakeKernel) LinkList() ([]netlink.Link, error) {
	if f.dumps > 0 {
		f.dumps--
		return f.links[:1], netlink.ErrDumpInterrupted
	}
	return f.links, nil
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
	h := &Host{root: root, k: k}
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

func TestNamesThatAreNoFiles(t *testing.T) {
	h := &Host{root: fstest.MapFS{"sys/class/speed": &fstest.MapFile{Data: []byte("1\n")}}}
	for _, name := range []string{"", ".", "..", "a/../.."} {
		if s := h.speed(name); s != 0 {
			t.Error(fmt.Sprint(name, s))
		}
	}
}
