package network

import (
	"errors"
	"io/fs"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
)

// Of a card with two ports and a virtual function only the ports are listed: the function,
// and the host's end of a VM's interface, lead nowhere by themselves.
func TestNICs(t *testing.T) {
	root := fstest.MapFS{}
	device := func(name, address, driver string) {
		at := "sys/devices/" + address
		root["sys/class/net/"+name+"/device"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../../../devices/" + address)}
		root[at+"/driver"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../../bus/pci/drivers/" + driver)}
		root["sys/bus/pci/drivers/"+driver+"/module"] = &fstest.MapFile{}
	}
	device("e1", "0000:3b:00.1", "ixgbe")
	device("e0", "0000:3b:00.0", "ixgbe")
	device("e0v0", "0000:3b:10.0", "ixgbevf")
	root["sys/devices/0000:3b:10.0/physfn"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../0000:3b:00.0")}
	device("vif1.0", "vif-1-0", "vif")
	root["sys/devices/vif-1-0/subsystem"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("../../bus/xen-backend")}
	bond := netlink.NewLinkBond(attrs(10, "bond0", 0, 0, true))
	bond.Mode = netlink.BOND_MODE_802_3AD
	k := &fakeKernel{links: []netlink.Link{
		&netlink.Device{LinkAttrs: attrs(2, "e1", 10, 0, true)}, &netlink.Device{LinkAttrs: attrs(1, "e0", 10, 0, true)}, &netlink.Device{LinkAttrs: attrs(3, "e0v0", 0, 0, true)},
		&netlink.Device{LinkAttrs: attrs(4, "vif1.0", 0, 0, true)}, &netlink.Tuntap{LinkAttrs: attrs(5, "tap0", 0, 0, true)}, &netlink.Dummy{LinkAttrs: attrs(6, "../x", 0, 0, true)}, bond,
	}}
	h := &Host{root: root, k: k}
	all, err := h.NICs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got [][]string
	for _, n := range all {
		got = append(got, []string{n.Name, n.Address, n.Driver})
	}
	if d := cmp.Diff([][]string{{"e0", "0000:3b:00.0", "ixgbe"}, {"e1", "0000:3b:00.1", "ixgbe"}}, got); d != "" {
		t.Error(d)
	}
	n, err := h.NIC(t.Context(), "bond0")
	if err != nil || n.Address != "" || n.Driver != "" || !slices.Equal(n.Physical, []string{"e0", "e1"}) {
		t.Errorf("%+v, %v", n, err)
	}
	for _, name := range []string{"none", "", "..", "../x", "a/b"} {
		if _, err := h.NIC(t.Context(), name); !errors.Is(err, ErrNoLink) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
