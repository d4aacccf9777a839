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

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

const (
	pf     = "ens3bs0f0"
	pfAt   = "0000:3b:00.0"
	pciDir = "sys/bus/pci/devices/"
)

// nicMachine has a card of two ports, one with up to 8 virtual functions, and a
// kernel that shows as interfaces what sysfs has.
func nicMachine(t *testing.T, functions int) (*Host, *sysfstest.Machine, *fakeKernel) {
	t.Helper()
	m := sysfstest.New()
	m.Load(sysfstest.Pciback())
	m.Load(sysfstest.Driver{Name: "ixgbe", Net: "ens", IDs: []sysfstest.ID{{Vendor: 0x8086, Device: 0x10fb}}, SRIOV: true})
	m.Load(sysfstest.Driver{Name: "ixgbevf", Net: "vf", IDs: []sysfstest.ID{{Vendor: 0x8086, Device: 0x10ed}}})
	port := func(address string, total int) pcitest.Function {
		f := pcitest.Function{Address: address, Vendor: 0x8086, Device: 0x10fb, Class: 0x020000, Driver: "ixgbe", IOMMUGroup: -1, NUMANode: -1, TotalVFs: total}
		c := pcitest.ConfigSpace{Vendor: f.Vendor, Device: f.Device, Class: f.Class}
		if total > 0 {
			c.SRIOV = &pci.SRIOVCapability{InitialVFs: uint16(total), TotalVFs: uint16(total), Offset: 0x80, Stride: 2, DeviceID: 0x10ed}
		}
		f.Config = c.Bytes()
		return f
	}
	m.Add(port(pfAt, 8), port("0000:3b:00.1", 0))
	k := &fakeKernel{addresses: map[string][]string{}}
	index := map[string]int{}
	kept := map[string]netlink.Link{} // with what was set
	k.look = func() {
		entries, err := m.ReadDir(classNet)
		if err != nil {
			t.Fatal(err)
		}
		k.links = slices.DeleteFunc(k.links, func(l netlink.Link) bool { return kept[l.Attrs().Name] != nil })
		now := map[string]netlink.Link{}
		for _, e := range entries {
			l := kept[e.Name()]
			if l == nil {
				if index[e.Name()] == 0 {
					index[e.Name()] = len(index) + 1
				}
				l = &netlink.Device{LinkAttrs: attrs(index[e.Name()], e.Name(), 0, 0, true)}
			}
			now[e.Name()] = l
			k.links = append(k.links, l)
		}
		kept = now
		n := 0
		if data, err := m.ReadFile(pciDir + pfAt + "/sriov_numvfs"); err == nil {
			_, _ = fmt.Sscan(string(data), &n)
		}
		a := kept[pf].Attrs()
		for len(a.Vfs) > n {
			a.Vfs = a.Vfs[:n]
		}
		for len(a.Vfs) < n {
			a.Vfs = append(a.Vfs, netlink.VfInfo{ID: len(a.Vfs), Mac: make(net.HardwareAddr, 6)})
		}
	}
	h := &Host{root: m, k: k}
	if functions > 0 {
		if err := h.Resize(t.Context(), pf, functions); err != nil {
			t.Fatal(err)
		}
	}
	return h, m, k
}

func TestNICs(t *testing.T) {
	h, _, k := nicMachine(t, 3)
	k.links = append(k.links, &netlink.Tuntap{LinkAttrs: attrs(90, "tap0", 0, 0, true)}, &netlink.Dummy{LinkAttrs: attrs(91, "../x", 0, 0, true)})
	if err := h.ChangeVF(t.Context(), pf, 1, Change{MAC: "02:00:00:00:00:01", VLAN: new(7), QoS: new(2), MaxRate: new(500), LinkState: "enable"}); err != nil {
		t.Fatal(err)
	}
	all, err := h.NICs(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	n := all[0]
	if n.Name != pf || n.Address != pfAt || n.Driver != "ixgbe" || !n.SRIOV || n.Most != 8 || len(n.Functions) != 3 || len(n.Problems) > 0 {
		t.Errorf("%+v", n)
	}
	want := Function{
		VF:      VF{Index: 1, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, VLAN: 7, QoS: 2, MaxRate: 500, LinkState: netlink.VF_LINK_STATE_ENABLE},
		Address: "0000:3b:10.2", Driver: "ixgbevf", Interface: "vf3bs10f2",
	}
	if d := cmp.Diff(want, n.Functions[1]); d != "" {
		t.Error(d)
	}
	if n := all[1]; n.SRIOV || n.Name != "ens3bs0f1" || n.Functions != nil {
		t.Errorf("%+v", n)
	}
	for _, name := range []string{"none", "", "..", "../x", "a/b"} {
		if _, err := h.NIC(t.Context(), name); !errors.Is(err, ErrNoLink) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func count(t *testing.T, h *Host) int {
	t.Helper()
	n, err := h.NIC(t.Context(), pf)
	if err != nil {
		t.Fatal(err)
	}
	return len(n.Functions)
}

func TestResizeNIC(t *testing.T) {
	h, m, _ := nicMachine(t, 0)
	for _, n := range []int{4, 4, 8, 1, 0, 0} {
		before := len(m.Writes())
		same := count(t, h) == n
		if err := h.Resize(t.Context(), pf, n); err != nil || count(t, h) != n {
			t.Errorf("%d: there are %d, %v", n, count(t, h), err)
		}
		if same && len(m.Writes()) != before {
			t.Errorf("%d again: %v", n, m.Writes()[before:])
		}
	}
	for name, n := range map[string]int{pf: 9, "ens3bs0f1": 1} {
		var r *Refusal
		if err := h.Resize(t.Context(), name, n); !errors.Is(err, ErrInvalid) || !errors.As(err, &r) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := h.Resize(t.Context(), pf, -1); !errors.Is(err, ErrInvalid) {
		t.Error(err)
	}
	if err := h.Resize(t.Context(), "none", 1); !errors.Is(err, ErrNoLink) {
		t.Error(err)
	}
}

// Whoever uses a function, none of them goes.
func TestResizeIsRefused(t *testing.T) {
	const vf, at = "vf3bs10f2", "0000:3b:10.2"
	write := func(t *testing.T, m *sysfstest.Machine, name, data string) {
		t.Helper()
		if err := m.Write(t.Context(), name, data); err != nil {
			t.Fatal(err)
		}
	}
	unbind := func(t *testing.T, m *sysfstest.Machine) {
		t.Helper()
		write(t, m, "sys/bus/pci/drivers/ixgbevf/unbind", at)
	}
	index := func(k *fakeKernel) *netlink.LinkAttrs {
		k.look()
		for _, l := range k.links {
			if l.Attrs().Name == vf {
				return l.Attrs()
			}
		}
		panic("no " + vf)
	}
	for _, c := range []struct {
		name string
		use  func(t *testing.T, m *sysfstest.Machine, k *fakeKernel)
		want string // empty: it may go
	}{
		{"nobody", func(*testing.T, *sysfstest.Machine, *fakeKernel) {}, ""},
		{"no driver", func(t *testing.T, m *sysfstest.Machine, _ *fakeKernel) { unbind(t, m) }, ""},
		{"a VM", func(t *testing.T, m *sysfstest.Machine, _ *fakeKernel) {
			unbind(t, m)
			write(t, m, pciDir+at+"/driver_override", "pciback")
			write(t, m, "sys/bus/pci/drivers_probe", at)
		}, "driver pciback has it without an interface"},
		{"a bridge", func(_ *testing.T, _ *sysfstest.Machine, k *fakeKernel) {
			k.links = append(k.links, &netlink.Bridge{LinkAttrs: attrs(95, "br0", 0, 0, true)})
			index(k).MasterIndex = 95
		}, "its interface vf3bs10f2 is below br0"},
		{"a VLAN", func(_ *testing.T, _ *sysfstest.Machine, k *fakeKernel) {
			k.links = append(k.links, &netlink.Vlan{LinkAttrs: attrs(95, "v.7", 0, index(k).Index, true)})
		}, "is below v.7"},
		{"a veth with a like index elsewhere", func(_ *testing.T, _ *sysfstest.Machine, k *fakeKernel) {
			k.links = append(k.links, &netlink.Veth{LinkAttrs: attrs(95, "veth0", 0, index(k).Index, true)})
		}, ""},
		{"an address", func(_ *testing.T, _ *sysfstest.Machine, k *fakeKernel) {
			k.addresses[vf] = []string{"fe80::1/64", "192.0.2.7/24"}
		}, "has the address 192.0.2.7"},
		{"no address to speak of", func(_ *testing.T, _ *sysfstest.Machine, k *fakeKernel) { k.addresses[vf] = []string{"fe80::1/64"} }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			h, m, k := nicMachine(t, 4)
			c.use(t, m, k)
			err := h.Resize(t.Context(), pf, 2)
			switch {
			case c.want == "" && (err != nil || count(t, h) != 2):
				t.Errorf("there are %d, %v", count(t, h), err)
			case c.want != "" && (!errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "number 1 of "+pf) || count(t, h) != 4):
				t.Errorf("there are %d, %v", count(t, h), err)
			}
			if err := h.Resize(t.Context(), pf, count(t, h)); err != nil {
				t.Errorf("as many as there are: %v", err)
			}
		})
	}
}

func TestResizeIsUndone(t *testing.T) {
	for _, c := range []struct {
		fail []int // writes
		want int
	}{
		{[]int{1}, 4}, {[]int{2}, 4}, {[]int{2, 3}, 0},
	} {
		h, m, _ := nicMachine(t, 4)
		for _, n := range c.fail {
			m.FailWrite(n, syscall.ENOMEM)
		}
		err := h.Resize(t.Context(), pf, 2)
		if !errors.Is(err, syscall.ENOMEM) || !strings.HasPrefix(err.Error(), pf+": ") || count(t, h) != c.want {
			t.Errorf("writes %v fail: there are %d, %v", c.fail, count(t, h), err)
		}
	}
	h, _, _ := nicMachine(t, 4)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Resize(ctx, pf, 2); !errors.Is(err, context.Canceled) || count(t, h) != 4 {
		t.Errorf("there are %d, %v", count(t, h), err)
	}
}

// A driver that resets its card has no link for a while.
func TestResizeAwaitsTheLink(t *testing.T) {
	h, _, k := nicMachine(t, 0)
	look, looks := k.look, 0
	k.look = func() {
		look()
		a := k.links[slices.IndexFunc(k.links, func(l netlink.Link) bool { return l.Attrs().Name == pf })].Attrs()
		if a.OperState = netlink.OperUp; len(a.Vfs) > 0 && looks < 3 {
			a.OperState = netlink.OperDown
			looks++
		}
	}
	if err := h.Resize(t.Context(), pf, 2); err != nil || looks != 3 {
		t.Errorf("%d looks, %v", looks, err)
	}
}

func TestChanges(t *testing.T) {
	h, k := card()
	all, err := h.VFs(t.Context(), "pf")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change Change
		want   func(v *VF)
		words  string
	}{
		{Change{}, func(*VF) {}, ""},
		{Change{VLAN: new(7), QoS: new(3)}, func(v *VF) { v.VLAN, v.QoS = 7, 3 }, "VLAN from none to 7 with priority 3"},
		{Change{QoS: new(1)}, func(v *VF) { v.QoS = 1 }, "VLAN from 7 with priority 3 to 7 with priority 1"},
		{Change{MaxRate: new(100)}, func(v *VF) { v.MaxRate = 100 }, "rate from 0 Mbit/s and more to 0 to 100 Mbit/s"},
		{Change{VLAN: new(0)}, func(v *VF) { v.VLAN, v.QoS = 0, 0 }, "VLAN from 7 with priority 1 to none"},
		{Change{SpoofCheck: new(false), Trust: new(true), LinkState: "disable"}, func(v *VF) { v.SpoofCheck, v.Trust, v.LinkState = false, true, 2 }, "trust from off to on, spoof check from on to off, link state from auto to disable"},
		{Change{MAC: "02-00-00-00-00-0A"}, func(v *VF) { v.MAC = net.HardwareAddr{2, 0, 0, 0, 0, 10} }, "MAC from 02:00:00:00:00:01 to 02:00:00:00:00:0a"},
	} {
		want := all[1]
		c.want(&want)
		planned, err := c.change.Of("pf", all[1])
		if d := cmp.Diff(want, planned); d != "" || err != nil {
			t.Errorf("%v\n%s", err, d)
		}
		var words []string
		for _, d := range all[1].Differences(planned) {
			words = append(words, fmt.Sprintf("%s from %s to %s", d.Name, d.From, d.To))
		}
		if got := strings.Join(words, ", "); got != c.words {
			t.Errorf("%s, want %s", got, c.words)
		}
		if err := h.ChangeVF(t.Context(), "pf", 1, c.change); err != nil {
			t.Fatal(err)
		}
		if all, err = h.VFs(t.Context(), "pf"); err != nil || !cmp.Equal(all[1], want) {
			t.Errorf("%v\n%s", err, cmp.Diff(want, all[1]))
		}
	}
	k.calls = nil
	for _, c := range []Change{{MAC: "x"}, {MAC: "02:00:00:00:00:00:00:01"}, {VLAN: new(4095)}, {MaxRate: new(1 << 40)}, {MinRate: new(-1)}, {QoS: new(8)}, {LinkState: "up"}} {
		if err := h.ChangeVF(t.Context(), "pf", 1, c); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "virtual function 1 of pf") {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if err := h.ChangeVF(t.Context(), "pf", 3, Change{}); !errors.Is(err, ErrNoVF) || len(k.calls) > 0 {
		t.Error(k.calls, err)
	}
}
