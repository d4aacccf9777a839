package pci_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

const ids = `# a comment
10de  NVIDIA Corporation
	1eb1  TU104GL [Quadro RTX 4000]
		1028 129f  Quadro RTX 4000 in a Dell
		10de 12a0  Quadro RTX 4000
	10f8  TU104 HD Audio Controller
C 03  Display controller
	00  VGA compatible controller
10de  not a vendor
`

func TestScanReadsACard(t *testing.T) {
	tree := pcitest.New(t)
	tree.Write("usr/share/misc/pci.ids", ids)
	tree.Add(pcitest.Port("0000:64:00.0", "", 3, pci.PortRoot, pcitest.FullACS()))
	functions := pcitest.NVIDIACard("0000:65:00", "0000:64:00.0", 24, 1)
	functions[0].DriverOverride = "vfio-pci"
	functions[0].BootVGA = true
	tree.Add(functions...)
	tree.Add(pcitest.Function{Address: "0000:00:1f.0", Vendor: 0x8086, Device: 1, Class: 0x060100, IOMMUGroup: 1, NUMANode: -1})
	cards := scan(t, tree)
	if len(cards) != 1 || len(cards[0].Functions) != 4 {
		t.Fatalf("got %d cards: %+v", len(cards), cards)
	}
	card := cards[0]
	bridge := pcitest.Port("0000:64:00.0", "", 3, pci.PortRoot, pcitest.FullACS())
	want := &pci.Device{
		Address: addr("0000:65:00.0"), VendorID: 0x10de, DeviceID: 0x1eb1, SubVendorID: 0x1028, SubDeviceID: 0x129f, Class: 0x030000, Revision: 0xa1,
		VendorName: "NVIDIA Corporation", DeviceName: "TU104GL [Quadro RTX 4000]", SubsystemName: "Quadro RTX 4000 in a Dell",
		Driver: "nvidia", DriverOverride: "vfio-pci", IOMMUGroup: 24, NUMANode: 1, LocalCPUs: "0-15",
		BARs: []pci.BAR{
			{Index: 0, Start: 0xb8000000, Size: 16 << 20},
			{Index: 1, Start: 0x2dfe0000000, Size: 256 << 20, Is64: true, Prefetchable: true},
			{Index: 3, Start: 0x2dff0000000, Size: 32 << 20, Is64: true, Prefetchable: true},
			{Index: 5, Start: 0x9000, Size: 128, IO: true},
		},
		ROM: 512 << 10, Link: pci.Link{Speed: 2500, MaxSpeed: 8000, Width: 16, MaxWidth: 16},
		D3cold: true, PowerState: "D0", ResetMethods: []string{"bus"}, Enabled: true, BootVGA: true,
		Config:   pci.ParseConfig(functions[0].Config),
		Upstream: []pci.Bridge{{Address: addr("0000:64:00.0"), Config: pci.ParseConfig(bridge.Config)}},
	}
	if d := cmp.Diff(want, card.Main()); d != "" {
		t.Error(d)
	}
	if card.Functions[2].DeviceName != "1ad8" || card.Functions[1].DeviceName != "TU104 HD Audio Controller" {
		t.Errorf("names: %q, %q", card.Functions[1].DeviceName, card.Functions[2].DeviceName)
	}
	if card.Group != "iommu-24" || len(card.Shared) != 0 {
		t.Errorf("group %q, shared with %v", card.Group, card.Shared)
	}
}

func TestScanKeepsVirtualFunctionsWithTheirCard(t *testing.T) {
	tree := pcitest.New(t)
	tree.Add(pcitest.Port("0000:00:01.0", "", 1, pci.PortRoot, pcitest.FullACS()))
	tree.Add(pcitest.SRIOVAccelerator("0000:17", "0000:00:01.0", 40, 0, 16, 6)...)
	cards := scan(t, tree)
	if len(cards) != 1 {
		t.Fatalf("got %d cards", len(cards))
	}
	c := cards[0]
	var vfs []string
	for _, v := range c.VFs {
		vfs = append(vfs, v.Address.String())
		if *v.PF != c.Address {
			t.Errorf("%v belongs to %v", v.Address, v.PF)
		}
	}
	want := []string{"0000:17:00.4", "0000:17:00.5", "0000:17:00.6", "0000:17:00.7", "0000:17:01.0", "0000:17:01.1"}
	if d := cmp.Diff(want, vfs); d != "" {
		t.Error(d)
	}
	if s := c.Main().SRIOV; s.TotalVFs != 16 || s.NumVFs != 6 || len(s.VFs) != 6 || s.VFs[4] != addr("0000:17:01.0") {
		t.Errorf("SR-IOV: %+v", s)
	}
	if c.Group != "iommu-40" || len(c.Functions) != 1 {
		t.Errorf("group %s, %d functions", c.Group, len(c.Functions))
	}
	if v := c.Main().Config.SRIOV; v == nil || v.NumVFs != 6 {
		t.Errorf("configuration space: %+v", v)
	}
}

// A virtual function whose physical one is not of a class that gpuctl manages
// is a card of its own.
func TestScanVirtualFunctionOfSomethingElse(t *testing.T) {
	tree := pcitest.New(t)
	f := pcitest.SRIOVAccelerator("0000:17", "", 40, 0, 16, 1)
	f[0].Class = 0x0b4000
	tree.Add(f...)
	cards := scan(t, tree)
	if len(cards) != 1 || cards[0].Address != addr("0000:17:00.4") || cards[0].Group != "iommu-41" {
		t.Fatalf("got %+v", cards)
	}
}

// What somebody has named is a card whatever its class, with its virtual
// functions; a scan goes by class again when nobody does.
func TestScannerAlsoFindsWhatIsNamed(t *testing.T) {
	tree := pcitest.New(t)
	f := pcitest.SRIOVAccelerator("0000:17", "", 40, 0, 16, 2)
	for i := range f {
		f[i].Class = 0xff0000
	}
	tree.Add(f...)
	s := pci.NewScanner(tree.FS())
	s.Hears(true)
	for _, also := range []func(*pci.Device) bool{
		nil,
		func(d *pci.Device) bool { return d.DeviceID == f[0].Device && d.VendorID == f[0].Vendor },
		func(*pci.Device) bool { return false },
	} {
		s.Also(also)
		cards, err := s.Cards()
		if err != nil {
			t.Fatal(err)
		}
		if also == nil || !also(&pci.Device{VendorID: f[0].Vendor, DeviceID: f[0].Device}) {
			if len(cards) != 0 {
				t.Errorf("cards: %+v", cards)
			}
			continue
		}
		if len(cards) != 1 || len(cards[0].VFs) != 2 || !cards[0].Main().Managed() {
			t.Errorf("cards: %+v", cards)
		}
	}
	if c, there := s.Class(addr("0000:17:00.0")); c != 0xff00 || !there {
		t.Errorf("class %04x, %v", c, there)
	}
	if _, there := s.Class(addr("0000:18:00.0")); there {
		t.Error("it finds what is not there")
	}
}

type group struct {
	group, why string
	shared     []string
}

var acs, none = pcitest.FullACS(), (*pci.ACS)(nil)

func two(tree *pcitest.Tree, root, down *pci.ACS) {
	tree.Add(pcitest.Port("0000:00:01.0", "", -1, pci.PortRoot, root), pcitest.Port("0000:01:00.0", "0000:00:01.0", -1, pci.PortUpstream, nil))
	for i, slot := range []string{"0000:03:00", "0000:04:00"} {
		p := pcitest.Port("0000:02:0"+string(rune('0'+i))+".0", "0000:01:00.0", -1, pci.PortDownstream, down)
		tree.Add(p)
		tree.Add(pcitest.NVIDIACard(slot, p.Address, -1, 0)[:2]...)
	}
}

// isolations are the cases of TestIsolation.
var isolations = []struct {
	name  string
	build func(*pcitest.Tree)
	want  map[string]group
}{
	{"an IOMMU group with a stranger", func(tree *pcitest.Tree) {
		tree.Add(pcitest.Port("0000:00:01.0", "", 7, pci.PortRoot, none))
		tree.Add(pcitest.NVIDIACard("0000:01:00", "0000:00:01.0", 7, 0)...)
		tree.Add(pcitest.Function{Address: "0000:00:1f.3", Vendor: 0x8086, Class: 0x040300, IOMMUGroup: 7, NUMANode: -1})
	}, map[string]group{"0000:01:00.0": {"iommu-7", "IOMMU group 7", []string{"0000:00:1f.3"}}}},
	{"a card over two IOMMU groups", func(tree *pcitest.Tree) {
		f := pcitest.NVIDIACard("0000:01:00", "", 7, 0)
		f[1].IOMMUGroup = 8
		tree.Add(f...)
		tree.Add(pcitest.NVIDIACard("0000:02:00", "", 8, 0)[:1]...)
	}, map[string]group{
		"0000:01:00.0": {"iommu-7", "IOMMU groups [7 8] of one card", []string{"0000:02:00.0"}},
		"0000:02:00.0": {"iommu-7", "IOMMU group 8", []string{"0000:01:00.0", "0000:01:00.1", "0000:01:00.2", "0000:01:00.3"}},
	}},
	{"a switch that isolates", func(tree *pcitest.Tree) { two(tree, acs, acs) }, map[string]group{
		"0000:03:00.0": {"pci-0000:03:00.0", "no IOMMU groups; every port above isolates", nil},
		"0000:04:00.0": {"pci-0000:04:00.0", "no IOMMU groups; every port above isolates", nil},
	}},
	{"a switch that does not", func(tree *pcitest.Tree) { two(tree, acs, none) }, map[string]group{
		"0000:03:00.0": {"pci-0000:01:00.0", "no IOMMU groups; port 0000:02:00.0 has no ACS", []string{"0000:04:00.0", "0000:04:00.1"}},
		"0000:04:00.0": {"pci-0000:01:00.0", "no IOMMU groups; port 0000:02:00.0 has no ACS", []string{"0000:03:00.0", "0000:03:00.1"}},
	}},
	{"a switch of which one port does not", func(tree *pcitest.Tree) {
		two(tree, acs, acs)
		tree.Add(pcitest.Port("0000:02:02.0", "0000:01:00.0", -1, pci.PortDownstream, none))
	}, map[string]group{
		"0000:03:00.0": {"pci-0000:01:00.0", "no IOMMU groups; port 0000:02:02.0 has no ACS", []string{"0000:04:00.0", "0000:04:00.1"}},
		"0000:04:00.0": {"pci-0000:01:00.0", "no IOMMU groups; port 0000:02:02.0 has no ACS", []string{"0000:03:00.0", "0000:03:00.1"}},
	}},
	{"a root port that does not", func(tree *pcitest.Tree) { two(tree, &pci.ACS{Can: 0x1d}, acs) }, map[string]group{
		"0000:03:00.0": {"pci-0000:00:01.0", "no IOMMU groups; port 0000:00:01.0 has not all of its ACS on (0x0 of 0x1d)", []string{"0000:04:00.0", "0000:04:00.1"}},
		"0000:04:00.0": {"pci-0000:00:01.0", "no IOMMU groups; port 0000:00:01.0 has not all of its ACS on (0x0 of 0x1d)", []string{"0000:03:00.0", "0000:03:00.1"}},
	}},
	{"behind a conventional bridge", func(tree *pcitest.Tree) {
		b := pcitest.Port("0000:00:1e.0", "", -1, 0, none)
		b.Config = pcitest.ConfigSpace{Vendor: 0x8086, Device: 1, Class: b.Class, Conventional: true}.Bytes()
		tree.Add(b, pcitest.Function{Address: "0000:05:01.0", Parent: b.Address, Vendor: 1, Class: 0x030000, IOMMUGroup: -1, NUMANode: -1},
			pcitest.Function{Address: "0000:05:02.0", Parent: b.Address, Vendor: 1, Class: 0x020000, IOMMUGroup: -1, NUMANode: -1})
	}, map[string]group{"0000:05:01.0": {"pci-0000:00:1e.0", "no IOMMU groups; bridge 0000:00:1e.0 is not PCI Express on both sides", []string{"0000:05:02.0"}}}},
	{"root ports that are functions of one device", func(tree *pcitest.Tree) {
		for _, a := range []string{"0000:00:01.0", "0000:00:01.1"} {
			p := pcitest.Port(a, "", -1, pci.PortRoot, none)
			p.Config = pcitest.ConfigSpace{Vendor: 0x8086, Device: 1, Class: p.Class, Port: pci.PortRoot, Multifunction: true}.Bytes()
			tree.Add(p)
		}
		tree.Add(pcitest.NVIDIACard("0000:01:00", "0000:00:01.0", -1, 0)[:1]...)
		tree.Add(pcitest.NVIDIACard("0000:02:00", "0000:00:01.1", -1, 0)[:1]...)
	}, map[string]group{
		"0000:01:00.0": {"pci-0000:00:01.0", "no IOMMU groups; port 0000:00:01.0 has no ACS", []string{"0000:02:00.0"}},
		"0000:02:00.0": {"pci-0000:00:01.0", "no IOMMU groups; port 0000:00:01.1 has no ACS", []string{"0000:01:00.0"}},
	}},
	{"a configuration space that is not root's to read", func(tree *pcitest.Tree) {
		p := pcitest.Port("0000:00:01.0", "", -1, pci.PortRoot, acs)
		p.Config = p.Config[:256]
		tree.Add(p)
		tree.Add(pcitest.NVIDIACard("0000:01:00", p.Address, -1, 0)[:1]...)
	}, map[string]group{"0000:01:00.0": {"pci-0000:00:01.0", "no IOMMU groups; port 0000:00:01.0 has an extended configuration space that cannot be read", nil}}},
	{"an AMD card with a switch of its own", func(tree *pcitest.Tree) {
		tree.Add(pcitest.Port("0000:00:03.1", "", -1, pci.PortRoot, none))
		tree.Add(pcitest.AMDCard("0000:0a", "0000:0b", "0000:0c", "0000:00:03.1", -1, none)...)
	}, map[string]group{"0000:0c:00.0": {"pci-0000:00:03.1", "no IOMMU groups; port 0000:00:03.1 has no ACS", nil}}},
	{"on the root bus", func(tree *pcitest.Tree) {
		tree.Add(pcitest.Function{Address: "0000:00:02.0", Vendor: 0x8086, Class: 0x030000, IOMMUGroup: -1, NUMANode: -1})
	}, map[string]group{"0000:00:02.0": {"pci-0000:00:02.0", "no IOMMU groups; on the root bus", nil}}},
	{"a Xen dom0", func(tree *pcitest.Tree) { pcitest.XenDom0(tree) }, map[string]group{
		"0000:65:00.0": {"pci-0000:65:00.0", "no IOMMU groups; every port above isolates", nil},
		"0000:05:00.0": {"pci-0000:00:02.0", "no IOMMU groups; port 0000:00:02.0 has no ACS", []string{"0000:06:00.0"}},
		"0000:06:00.0": {"pci-0000:00:02.0", "no IOMMU groups; port 0000:00:02.0 has no ACS", []string{"0000:05:00.0"}},
	}},
}

func TestIsolation(t *testing.T) {
	for _, c := range isolations {
		t.Run(c.name, func(t *testing.T) {
			tree := pcitest.New(t)
			c.build(tree)
			got := map[string]group{}
			for _, card := range scan(t, tree) {
				g := group{group: card.Group, why: card.Why}
				for _, a := range card.Shared {
					g.shared = append(g.shared, a.String())
				}
				got[card.Address.String()] = g
			}
			if d := cmp.Diff(c.want, got, cmp.AllowUnexported(group{})); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestScanToleratesWhatVanishes(t *testing.T) {
	for _, name := range []string{"vendor", "config", "resource", "numa_node", "iommu_group", "driver", "enable"} {
		tree := pcitest.New(t)
		tree.Add(pcitest.NVIDIACard("0000:01:00", "", 1, 0)...)
		tree.Add(pcitest.NVIDIACard("0000:02:00", "", 2, 0)...)
		if err := os.Remove(filepath.Join(tree.Root, tree.Dir("0000:01:00.0"), name)); err != nil {
			t.Fatal(err)
		}
		want := 2
		if name == "vendor" {
			want = 1 // nothing is there that could be named
		}
		if cards := scan(t, tree); len(cards) != want || cards[len(cards)-1].Group != "iommu-2" {
			t.Errorf("without %s: %d cards", name, len(cards))
		}
	}
	tree := pcitest.New(t)
	tree.Add(pcitest.NVIDIACard("0000:01:00", "", 1, 0)...)
	tree.Add(pcitest.NVIDIACard("0000:02:00", "", 2, 0)...)
	tree.Vanish("0000:01:00.0")
	tree.Vanish("0000:02:00.2")
	cards := scan(t, tree)
	if len(cards) != 1 || len(cards[0].Functions) != 3 {
		t.Errorf("got %+v", cards)
	}
}

func TestScanToleratesNonsense(t *testing.T) {
	tree := pcitest.New(t)
	f := pcitest.NVIDIACard("0000:01:00", "", 1, 0)[0]
	f.Files = map[string]string{
		"numa_node": "many\n", "enable": "", "current_link_speed": "Unknown\n", "max_link_speed": "NaN GT/s\n", "current_link_width": "63\n", "max_link_width": "255\n",
		"sriov_totalvfs": "2147483647\n", "sriov_numvfs": "2147483647\n", "power_state": strings.Repeat("D", 100000), "mem_info_vram_total": "-1",
		"resource": "0x0 0xffffffffffffffff 0x200\n0x10 0xf 0x200\n0x0\n\nx y z\n0x20 0x2f 0xx\n0x0 0x0 0x0\n0x1 0x2 0x200\n",
	}
	tree.Add(f)
	tree.Write("sys/bus/pci/devices/not-an-address/class", "0x030000\n")
	d := scan(t, tree)[0].Main()
	if d.NUMANode != -1 || d.Enabled || d.Link != (pci.Link{}) || len(d.BARs) != 0 || d.ROM != 0 || len(d.PowerState) > 256 || d.VideoMemory != 0 || len(d.SRIOV.VFs) != 0 {
		t.Errorf("got %+v", d)
	}
}

func TestDeadDevice(t *testing.T) {
	tree := pcitest.New(t)
	f := pcitest.NVIDIACard("0000:01:00", "", 1, 0)[:1]
	f[0].Config = []byte(strings.Repeat("\xff", 4096))
	tree.Add(f...)
	if d := scan(t, tree)[0].Main(); !d.Dead() {
		t.Error("a device that reads all ones is alive")
	}
	tree.Write(filepath.Join(tree.Dir("0000:01:00.0"), "power_state"), "D3cold\n")
	if d := scan(t, tree)[0].Main(); d.Dead() {
		t.Error("a device without power is dead")
	}
}

func TestMachineWithoutPCI(t *testing.T) {
	cards, err := pci.Scan(fstest.MapFS{})
	if err != nil || len(cards) != 0 {
		t.Errorf("got %v, %v", cards, err)
	}
	if _, err := pci.Scan(fstest.MapFS{"sys/bus/pci/devices": {Data: []byte("a file")}}); err == nil {
		t.Error("no error")
	}
}

// What this machine has is nobody's to say; it must be read without error, and
// through a root that links cannot lead out of.
func TestScanThisMachine(t *testing.T) {
	root, err := os.OpenRoot("/")
	if err != nil {
		t.Skip(err)
	}
	defer root.Close()
	confined, err := pci.Scan(root.FS())
	if err != nil {
		t.Fatal(err)
	}
	cards, err := pci.Scan(os.DirFS("/"))
	if err != nil || len(cards) != len(confined) {
		t.Fatalf("%d cards, %d in the root (%v)", len(cards), len(confined), err)
	}
	for _, c := range cards {
		if c.Group == "" || c.Main() == nil || !slices.Contains(c.Functions, c.Main()) {
			t.Errorf("card %+v", c)
		}
	}
}

func scan(t *testing.T, tree *pcitest.Tree) []*pci.Card {
	t.Helper()
	cards, err := pci.Scan(tree.FS())
	if err != nil {
		t.Fatal(err)
	}
	return cards
}

func addr(s string) pci.Address {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic(err)
	}
	return a
}

// The port that leaks is told where something is shared, with IOMMU groups, too.
func TestLeak(t *testing.T) {
	for group, want := range map[int]string{-1: "port 0000:00:01.0 has no ACS", 7: "port 0000:00:01.0 has no ACS"} {
		tree := pcitest.New(t)
		tree.Add(pcitest.Port("0000:00:01.0", "", group, pci.PortRoot, nil))
		tree.Add(pcitest.NVIDIACard("0000:01:00", "0000:00:01.0", group, 0)...)
		tree.Add(pcitest.Function{Address: "0000:01:1f.0", Parent: "0000:00:01.0", Vendor: 0x8086, Class: 0x020000, IOMMUGroup: group, NUMANode: -1})
		tree.Add(pcitest.Port("0000:00:02.0", "", group+1, pci.PortRoot, pcitest.FullACS()))
		tree.Add(pcitest.NVIDIACard("0000:02:00", "0000:00:02.0", min(group, group*2), 0)...)
		cards := scan(t, tree)
		if l := cards[0].Leak; l == nil || l.String() != want || l.Port != addr("0000:00:01.0") {
			t.Errorf("group %d: %v", group, l)
		}
	}
	tree := pcitest.XenDom0(pcitest.New(t))
	for _, c := range scan(t, tree) {
		if (c.Leak == nil) != (len(c.Shared) == 0) {
			t.Errorf("%v shares with %v: %v", c.Address, c.Shared, c.Leak)
		}
	}
}

// manyCards is a machine of 64 functions of cards, behind switches.
func manyCards(t testing.TB, group func(i int) int) *pcitest.Tree {
	tree := pcitest.New(t)
	tree.Write("usr/share/misc/pci.ids", ids+strings.Repeat("1234  Somebody\n\t5678  Something that has a long name\n", 15000))
	for i := range 4 {
		root := fmt.Sprintf("%04x:00:01.0", i)
		up := fmt.Sprintf("%04x:01:00.0", i)
		tree.Add(pcitest.Port(root, "", group(100+i), pci.PortRoot, pcitest.FullACS()), pcitest.Port(up, root, group(104+i), pci.PortUpstream, nil))
		for j := range 4 {
			down := fmt.Sprintf("%04x:02:%02x.0", i, j)
			tree.Add(pcitest.Port(down, up, group(108+4*i+j), pci.PortDownstream, pcitest.FullACS()))
			tree.Add(pcitest.NVIDIACard(fmt.Sprintf("%04x:%02x:00", i, 3+j), down, group(4*i+j), i%2)...)
		}
	}
	return tree
}

// BenchmarkScan finds 64 functions, as sysfs would show them, and the whole of
// the names' file. They are to be found in 50 ms.
func BenchmarkScan(b *testing.B) {
	for name, group := range map[string]func(int) int{"kernel": func(i int) int { return i }, "xen": func(int) int { return -1 }} {
		b.Run(name, func(b *testing.B) {
			tree := manyCards(b, group)
			for b.Loop() {
				cards, err := pci.Scan(tree.FS())
				if err != nil || len(cards) != 16 {
					b.Fatalf("%d cards, %v", len(cards), err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/op")
		})
	}
}
