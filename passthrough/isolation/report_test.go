package isolation

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

func addr(s string) pci.Address {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic(err)
	}
	return a
}

func scan(t *testing.T, tree *pcitest.Tree) *pci.Card {
	t.Helper()
	cards, err := pci.Scan(tree.FS())
	if err != nil || len(cards) == 0 {
		t.Fatalf("%d cards, %v", len(cards), err)
	}
	return cards[0]
}

// good is a card behind a port that isolates, in a group of its own (-1: none).
func good(t *testing.T, group int) *pcitest.Tree {
	tree := pcitest.New(t)
	tree.Add(pcitest.Port("0000:00:01.0", "", group, pci.PortRoot, pcitest.FullACS()))
	return tree.Add(pcitest.NVIDIACard("0000:65:00", "0000:00:01.0", group, 0)...)
}

func goodFacts() Facts {
	return Facts{Source: "Xen 4.17.7", Xen: true, IOMMU: xen.On, InterruptRemapping: xen.On}
}

func TestGoodCards(t *testing.T) {
	want := "0000:65:00.0 may be given away (asked: Xen 4.17.7)\n  always together: 0000:65:00.0, 0000:65:00.1, 0000:65:00.2, 0000:65:00.3\n"
	if got := Judge(scan(t, good(t, -1)), goodFacts()).String(); got != want {
		t.Errorf("got %q", got)
	}
	r, err := Examine(t.Context(), scan(t, good(t, 24)), Kernel{good(t, 24).FS()})
	if err != nil || r.Verdict != Yes || len(r.Reasons) != 0 || r.Source != "the kernel's IOMMU groups" {
		t.Errorf("got %v, %v", r, err)
	}
	tree := pcitest.New(t)
	tree.Add(pcitest.Port("0000:00:01.0", "", 1, pci.PortRoot, pcitest.FullACS()))
	tree.Add(pcitest.SRIOVAccelerator("0000:17", "0000:00:01.0", 40, 0, 16, 0)...)
	r, err = Examine(t.Context(), scan(t, tree), Kernel{tree.FS()})
	if err != nil || r.Verdict != Yes || len(r.Reasons) != 0 {
		t.Errorf("got %v, %v", r, err)
	}
}

var nic = pcitest.Function{Address: "0000:00:1f.3", Vendor: 0x8086, Class: 0x020000, IOMMUGroup: 7, NUMANode: -1, Driver: "igb", Reset: "flr"}

func kernel(t *testing.T, tree *pcitest.Tree) (*pci.Card, Facts) {
	card := scan(t, tree)
	f, err := Kernel{tree.FS()}.Facts(t.Context(), card)
	if err != nil {
		t.Fatal(err)
	}
	return card, f
}

func withXen(t *testing.T, change func(*pci.Card, *Facts)) (*pci.Card, Facts) {
	card, f := scan(t, good(t, -1)), goodFacts()
	change(card, &f)
	return card, f
}

// reasons are the cases of TestReasons.
var reasons = []struct {
	name  string
	build func(t *testing.T) (*pci.Card, Facts)
	want  Reason
	along string // beside the functions of the card
}{
	{"Xen without IOMMU", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) { f.IOMMU, f.InterruptRemapping = xen.Off, xen.Off })
	}, Reason{
		CodeIOMMUOff, No, "the IOMMU is off in Xen: the card could write to all of the host's memory, and Xen refuses it",
		`switch VT-d or AMD-Vi on in the firmware and take "iommu=off" from Xen's command line; after the next boot "xl info" lists hvm_directio`,
	}, ""},
	{"a kernel without IOMMU", func(t *testing.T) (*pci.Card, Facts) { return kernel(t, good(t, -1)) }, Reason{
		CodeIOMMUOff, No, "the card is in no IOMMU group: it could write to all of the host's memory, and the kernel refuses it",
		`switch VT-d or AMD-Vi on in the firmware and boot the kernel with "intel_iommu=on" (Intel) or without "amd_iommu=off" (AMD)`,
	}, ""},
	{"VFIO's group without IOMMU", func(t *testing.T) (*pci.Card, Facts) {
		tree := good(t, 3)
		tree.Write("sys/kernel/iommu_groups/3/name", "vfio-noiommu\n")
		return kernel(t, tree)
	}, Reason{
		CodeIOMMUOff, No, "the card is in no IOMMU group: it could write to all of the host's memory, and the kernel refuses it",
		`switch VT-d or AMD-Vi on in the firmware and boot the kernel with "intel_iommu=on" (Intel) or without "amd_iommu=off" (AMD)`,
	}, ""},
	{"Xen that does not say", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) { f.IOMMU = xen.Unknown })
	}, Reason{
		CodeIOMMUUnknown, Care, "it is not known whether the IOMMU is on",
		`look for hvm_directio in "xl info"; without it the card cannot be given away`,
	}, ""},
	{"no interrupt remapping", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) { f.InterruptRemapping = xen.Off })
	}, Reason{
		CodeInterruptRemapping, Care, "interrupt remapping is off: a guest with the card can send the host any interrupt",
		`switch it on in the firmware, and take "iommu=no-intremap" from Xen's command line; until then give the card to guests that you trust`,
	}, ""},
	{"a port without ACS", func(t *testing.T) (*pci.Card, Facts) {
		tree := pcitest.New(t)
		for i, slot := range []string{"0000:01:00.0", "0000:02:00.0"} {
			root := "0000:00:01." + string(rune('0'+i))
			p := pcitest.Port(root, "", -1, pci.PortRoot, nil)
			p.Config = pcitest.ConfigSpace{Vendor: 0x8086, Device: 1, Class: p.Class, Port: pci.PortRoot, Multifunction: true}.Bytes()
			tree.Add(p)
			if i == 0 {
				tree.Add(pcitest.NVIDIACard("0000:01:00", root, -1, 0)...)
			} else {
				tree.Add(pcitest.Function{Address: slot, Parent: root, Vendor: 0x8086, Class: 0x020000, Driver: "igb", IOMMUGroup: -1, NUMANode: -1})
			}
		}
		card := scan(t, tree)
		f, err := Xen{tree.FS(), hypervisor{iommu: xen.On}}.Facts(t.Context(), card)
		if err != nil {
			t.Fatal(err)
		}
		return card, f
	}, Reason{
		CodeNoACS, Care, "port 0000:00:01.0 has no ACS: 0000:02:00.0 (network controller, driver igb) can be reached from it past the IOMMU",
		"switch ACS on in the firmware if it offers that, give 0000:02:00.0 to the same guest, or move one of them to another slot",
	}, ""},
	{"a port that is not root's to read", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, f *Facts) {
			c.Shared = []pci.Address{addr("0000:02:00.0")}
			c.Leak = &pci.Leak{Port: addr("0000:00:01.0"), Kind: "port", Why: "has an extended configuration space that cannot be read"}
		})
	}, Reason{
		CodeUnreadable, Care, "port 0000:00:01.0 has an extended configuration space that cannot be read: whether 0000:02:00.0 can be reached from it is not known",
		"run hostd as root: the kernel shows others a quarter of the configuration space",
	}, ""},
	{"a Xen device group", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) {
			f.Group = []pci.Address{addr("0000:65:00.1"), addr("0000:66:00.0")}
			f.Neighbours = map[pci.Address]Neighbour{addr("0000:66:00.0"): {pci.ClassUSB, "xhci_hcd"}}
		})
	}, Reason{
		CodeXenGroup, No, "Xen cannot tell its DMA from that of 0000:66:00.0 (USB controller, driver xhci_hcd): they are in one device group",
		"give 0000:66:00.0 to the same guest, or move one of them to another slot",
	}, "0000:66:00.0"},
	{"a Xen device group with nobody's device", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, f *Facts) {
			f.Group, c.Shared = []pci.Address{addr("0000:66:00.0")}, []pci.Address{addr("0000:66:00.0")}
			f.Neighbours = map[pci.Address]Neighbour{addr("0000:66:00.0"): {pci.ClassUSB, "pciback"}}
		})
	}, Reason{
		CodeXenGroup, Care, "Xen cannot tell its DMA from that of 0000:66:00.0 (USB controller, driver pciback): they are in one device group",
		"give 0000:66:00.0 to the same guest, or move one of them to another slot",
	}, "0000:66:00.0"},
	{"an IOMMU group that the host uses", func(t *testing.T) (*pci.Card, Facts) {
		tree := pcitest.New(t)
		tree.Add(pcitest.Port("0000:00:01.0", "", 7, pci.PortRoot, nil))
		tree.Add(pcitest.NVIDIACard("0000:65:00", "0000:00:01.0", 7, 0)...)
		return kernel(t, tree.Add(nic))
	}, Reason{
		CodeSharedGroup, No, "it shares IOMMU group 7 with 0000:00:1f.3 (network controller, driver igb), as port 0000:00:01.0 has no ACS",
		"unbind 0000:00:1f.3 from igb or bind it to vfio-pci, and the host loses it; or move one of them to another slot",
	}, "0000:00:1f.3"},
	{"an IOMMU group that nobody uses", func(t *testing.T) (*pci.Card, Facts) {
		free := nic
		free.Driver = ""
		return kernel(t, good(t, 7).Add(free))
	}, Reason{
		CodeSharedGroup, Care, "it shares IOMMU group 7 with 0000:00:1f.3 (network controller, no driver)",
		"leave 0000:00:1f.3 unbound or give it to the same guest: no other can have it",
	}, "0000:00:1f.3"},
	{"what Xen has refused", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) {
			f.Refused = []xen.Refused{{Device: addr("0000:65:00.0"), Start: 0xbdf8f000, Domain: "d3"}, {Device: addr("0000:65:00.0"), Start: 0xbdf8f000, Domain: "d4"}}
			f.Reserved = []xen.Reserved{{Devices: []pci.Address{addr("0000:03:00.0"), addr("0000:65:00.0")}}}
		})
	}, Reason{CodeReserved, No, "Xen has refused to give 0000:65:00.0 away: it shares memory that the firmware reserves (RMRR at 0xbdf8f000)", doReserved}, ""},
	{"what Xen calls risky", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) {
			f.Refused = []xen.Refused{{Device: addr("0000:65:00.0"), Start: 0xbdf8f000, Risky: true}}
		})
	}, Reason{CodeReserved, Care, "Xen calls it risky to give 0000:65:00.0 away: it shares memory that the firmware reserves (RMRR at 0xbdf8f000)", doReserved}, ""},
	{"what Xen will refuse", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) {
			f.Reserved = []xen.Reserved{{Start: 0xbdf8f000, End: 0xbdf92fff, Devices: []pci.Address{addr("0000:03:00.0"), addr("0000:65:00.0")}}}
		})
	}, Reason{CodeReserved, No, "Xen will refuse to give 0000:65:00.0 away: the firmware reserves memory at 0xbdf8f000 to 0xbdf92fff (RMRR) for it and 0000:03:00.0", doReserved}, ""},
	{"memory of its own", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) {
			f.Reserved = []xen.Reserved{{Devices: []pci.Address{addr("0000:65:00.0")}}}
		})
	}, Reason{
		CodeReserved, Care, "the firmware reserves memory for 0000:65:00.0 (RMRR): it stays mapped while a guest has the card",
		"nothing, unless the guest does not start: then set rdm_policy=relaxed for the device",
	}, ""},
	{"what the kernel will refuse", func(t *testing.T) (*pci.Card, Facts) {
		tree := good(t, 3)
		tree.Write("sys/kernel/iommu_groups/3/reserved_regions", "0x00000000bdf8f000 0x00000000bdf92fff direct\n0x00000000fee00000 0x00000000feefffff msi\n0x0 0x1 direct-relaxable\n")
		return kernel(t, tree)
	}, Reason{
		CodeReserved, No, "the firmware reserves memory at 0xbdf8f000 to 0xbdf92fff for 0000:65:00.0, 0000:65:00.1, 0000:65:00.2, 0000:65:00.3 (RMRR), and the kernel does not give such devices away",
		"ask the maker of the host for a firmware that does not, or switch off in it what monitors the card",
	}, ""},
	{"on the root bus", func(t *testing.T) (*pci.Card, Facts) {
		tree := pcitest.New(t)
		tree.Add(pcitest.Function{
			Address: "0000:00:10.0", Vendor: 0x1234, Class: 0x038000, IOMMUGroup: -1, NUMANode: -1,
			Config: pcitest.ConfigSpace{Vendor: 0x1234, Device: 1, Class: 0x038000}.Bytes(),
		})
		return scan(t, tree), goodFacts()
	}, Reason{
		CodeRootBus, No, "0000:00:10.0 is on the root bus and has no reset of its own (FLR or power management): libvirt refuses it",
		"move the card to a slot behind a root port; what is part of the chipset stays with the host",
	}, ""},
	{"no reset", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) {
			for _, f := range c.Functions {
				f.ResetMethods = nil
			}
		})
	}, Reason{
		CodeNoReset, Care, "0000:65:00.0 has no reset that the kernel knows: what one guest leaves in it the next one finds",
		"reset it by the bus above or by its power, or switch the host off and on between guests that must not know of each other",
	}, ""},
	{"a function that is missing", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) { c.Functions = c.Functions[:1] })
	}, Reason{
		CodeFunctions, Care, "0000:65:00.0 says that its card has several functions, and it is the only one",
		"rescan the bus if another was removed: functions of one card are given away together",
	}, ""},
	{"function 0 missing", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) {
			c.Functions = c.Functions[1:]
			c.Address = c.Functions[0].Address
			c.Functions[0].Class = pci.ClassVGA << 8
		})
	}, Reason{
		CodeFunctions, Care, "function 0 of 0000:65:00.0 is missing, the card begins with 0000:65:00.1",
		"rescan the bus: functions of one card are given away together",
	}, ""},
	{"the main function missing", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) { c.Functions = c.Functions[1:] })
	}, Reason{
		CodeFunctions, No, "0000:65:00.0, the main function of the card, is not there",
		"rescan the bus; if it stays away, reseat the card",
	}, ""},
	{"dead", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) { c.Functions[1].Config.Dead = true })
	}, Reason{
		CodeDead, No, "0000:65:00.1 does not answer: its configuration space reads all ones",
		"reset the card; if it stays dead, switch the host off and on again",
	}, ""},
	{"the console", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) { c.Functions[0].BootVGA = true })
	}, Reason{
		CodeBootVGA, Care, "0000:65:00.0 is the host's console (boot VGA): the screen goes dark, and a framebuffer of the firmware may hold its memory",
		`use a serial or network console, and boot the kernel with "video=efifb:off" or "nomodeset" if the card cannot be taken`,
	}, ""},
	{"a bridge", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) { c.Functions[0].Class = pci.ClassBridge << 8 })
	}, Reason{
		CodeBridge, No, "0000:65:00.0 is a bridge: the devices below it are not its own",
		"give away the devices below it instead",
	}, ""},
	{"another class", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(c *pci.Card, _ *Facts) { c.Functions[0].Class = 0x020000 })
	}, Reason{
		CodeClass, No, "0000:65:00.0 (network controller) is neither a display controller nor an accelerator",
		"choose another device: only classes 03 and 12 are managed",
	}, ""},
	{"virtual functions", func(t *testing.T) (*pci.Card, Facts) {
		tree := pcitest.New(t)
		tree.Add(pcitest.Port("0000:00:01.0", "", 1, pci.PortRoot, pcitest.FullACS()))
		return kernel(t, tree.Add(pcitest.SRIOVAccelerator("0000:17", "0000:00:01.0", 40, 0, 16, 6)...))
	}, Reason{
		CodeVFs, No, "0000:17:00.0 has 6 virtual functions switched on: who has it rules them",
		"take its virtual functions back and switch them off (sriov_numvfs 0) first, or give virtual functions away instead of the card",
	}, ""},
	{"accesses that were stopped", func(t *testing.T) (*pci.Card, Facts) {
		return withXen(t, func(_ *pci.Card, f *Facts) {
			f.Faults = map[pci.Address]int{addr("0000:65:00.2"): 12, addr("0000:66:00.0"): 1}
		})
	}, Reason{
		CodeFaults, Care, "the IOMMU has stopped 12 accesses of 0000:65:00.2 to memory that is not its own",
		"look at the log of the hypervisor or the kernel: the card, its firmware or a guest's driver may be at fault",
	}, ""},
	{"no answer", func(t *testing.T) (*pci.Card, Facts) {
		card := scan(t, good(t, -1))
		f, err := Xen{good(t, -1).FS(), hypervisor{failed: xen.ErrUnsupported, iommu: xen.On}}.Facts(t.Context(), card)
		if err != nil {
			t.Fatal(err)
		}
		return card, f
	}, Reason{
		CodeUnanswered, Yes, "Xen did not tell the device group of 0000:65:00.0: not told by this Xen",
		"what it would have said is not in this report",
	}, ""},
}

// Every reason, by itself, in the words that an operator reads.
func TestReasons(t *testing.T) {
	for _, c := range reasons {
		t.Run(c.name, func(t *testing.T) {
			card, facts := c.build(t)
			r := Judge(card, facts)
			if d := cmp.Diff([]Reason{c.want}, r.Reasons); d != "" {
				t.Error(d)
			}
			if r.Verdict != c.want.Verdict || !strings.Contains(r.String(), c.want.Text) || !strings.Contains(r.String(), c.want.Do) {
				t.Errorf("the verdict is %v:\n%s", r.Verdict, r)
			}
			var want []pci.Address
			for _, f := range card.Functions {
				want = append(want, f.Address)
			}
			if c.along != "" {
				want = append(want, addr(c.along))
			}
			slices.SortFunc(want, pci.Address.Compare)
			if d := cmp.Diff(want, r.Together); d != "" {
				t.Error(d)
			}
		})
	}
}

// hypervisor answers as a test says.
type hypervisor struct {
	iommu   xen.State
	groups  map[pci.Address][]pci.Address
	log     string
	failed  error // of device groups
	silent  error // of everything else
	running []xen.Running
}

func (h hypervisor) Running(context.Context) ([]xen.Running, error) { return h.running, h.silent }
func (h hypervisor) IOMMU(context.Context) (xen.State, error)       { return h.iommu, h.silent }
func (h hypervisor) Log(context.Context) (string, error)            { return h.log, h.silent }
func (h hypervisor) Close() error                                   { return nil }
func (h hypervisor) Group(_ context.Context, a pci.Address) ([]pci.Address, error) {
	return h.groups[a], errors.Join(h.failed, h.silent)
}

func (h hypervisor) Nodes(context.Context, []pci.Address) (map[pci.Address]int, error) {
	return nil, h.silent
}

// The worst comes first, and the verdict is that of the worst.
func TestXenSource(t *testing.T) {
	tree := pcitest.XenDom0(pcitest.New(t))
	for name, content := range map[string]string{"major": "4\n", "minor": "17\n", "extra": ".7\n"} {
		tree.Write("sys/hypervisor/version/"+name, content)
	}
	tree.Add(pcitest.Function{Address: "0000:07:00.0", Vendor: 1, Class: 0x0c0330, Driver: "xhci_hcd", IOMMUGroup: -1, NUMANode: -1})
	cards, err := pci.Scan(tree.FS())
	if err != nil {
		t.Fatal(err)
	}
	source := Xen{tree.FS(), hypervisor{
		groups: map[pci.Address][]pci.Address{addr("0000:05:00.0"): {addr("0000:05:00.0"), addr("0000:07:00.0"), addr("0000:00:02.0")}},
		log: "(XEN) I/O virtualisation enabled\n(XEN) Interrupt remapping disabled\n" +
			"(XEN) [VT-D] It's disallowed to assign 0000:05:00.0 with shared RMRR at 7ba77000 for d5.\n" +
			"(XEN) [VT-D]DMAR:[DMA Read] Request device [0000:05:00.0] fault addr 0\n(XEN) [VT-D]DMAR:[DMA Read] Request device [0000:06:00.0] fault addr 0\n",
	}}
	r, err := Examine(t.Context(), cards[0], source)
	if err != nil {
		t.Fatal(err)
	}
	var codes []Code
	for _, reason := range r.Reasons {
		codes = append(codes, reason.Code)
	}
	want := []Code{CodeXenGroup, CodeReserved, CodeInterruptRemapping, CodeNoACS, CodeFaults}
	if d := cmp.Diff(want, codes); d != "" || r.Verdict != No || r.Source != "Xen 4.17.7" {
		t.Errorf("%s%s", d, r)
	}
	out, err := json.Marshal(r)
	if err != nil || !strings.HasPrefix(string(out), `{"card":"0000:05:00.0","source":"Xen 4.17.7","verdict":"no","together":["0000:05:00.0","0000:07:00.0"],"reasons":[{"code":"xen-group","verdict":"no",`) {
		t.Errorf("%s, %v", out, err)
	}
	// A hypervisor that does not answer leaves what the topology says, and says so.
	r, err = Examine(t.Context(), cards[0], Xen{tree.FS(), hypervisor{silent: errors.New("it is busy")}})
	if err != nil || r.Verdict != Care || !strings.Contains(r.String(), "the hypervisor's log could not be read: it is busy") {
		t.Errorf("%v: %s", err, r)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Examine(done, cards[0], source); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func FuzzRegions(f *testing.F) {
	f.Add([]byte("0x00000000bdf8f000 0x00000000bdf92fff direct\n0x00000000fee00000 0x00000000feefffff msi\n"))
	f.Add([]byte("2 1 direct\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, r := range parseRegions(data, nil) {
			if r.Start > r.End {
				t.Fatalf("%q: %+v", data, r)
			}
		}
	})
}
