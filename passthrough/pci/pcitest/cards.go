package pcitest

import (
	"fmt"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// FullACS returns ACS with all controls enabled that isolate.
func FullACS() *pci.ACS { return &pci.ACS{Can: 0x5f, Does: 0x1d} }

// Port returns a root port or a port of a switch.
func Port(address, parent string, group int, port pci.PortType, acs *pci.ACS) Function {
	return Function{
		Address: address, Parent: parent, Vendor: 0x8086, Device: 0x347a, Class: pci.ClassBridge << 8, Driver: "pcieport",
		IOMMUGroup: group, NUMANode: -1,
		Config: ConfigSpace{Vendor: 0x8086, Device: 0x347a, Class: pci.ClassBridge << 8, Port: port, ACS: acs}.Bytes(),
	}
}

// NVIDIACard returns a workstation card with four functions in a slot such as
// "0000:65:00": display, audio, USB and the controller of its USB-C port.
func NVIDIACard(slot, parent string, group, node int) []Function {
	function := func(n int, device uint16, class uint32, driver string, resource ...string) Function {
		return Function{
			Address: fmt.Sprintf("%s.%d", slot, n), Parent: parent, Vendor: 0x10de, Device: device, SubVendor: 0x1028, SubDevice: 0x129f,
			Class: class, Revision: 0xa1, Driver: driver, IOMMUGroup: group, NUMANode: node, Resource: resource, Reset: "bus",
			Speed: "2.5 GT/s PCIe", MaxSpeed: "8.0 GT/s PCIe", Width: 16, MaxWidth: 16,
			Config: ConfigSpace{Vendor: 0x10de, Device: device, Class: class, Multifunction: true, Port: pci.PortLegacyEndpoint}.Bytes(),
		}
	}
	return []Function{
		function(0, 0x1eb1, pci.ClassVGA<<8, "nvidia",
			"0x00000000b8000000 0x00000000b8ffffff 0x0000000000040200",
			"0x000002dfe0000000 0x000002dfefffffff 0x000000000014220c",
			"0x0000000000000000 0x0000000000000000 0x0000000000000000",
			"0x000002dff0000000 0x000002dff1ffffff 0x000000000014220c",
			"0x0000000000000000 0x0000000000000000 0x0000000000000000",
			"0x0000000000009000 0x000000000000907f 0x0000000000040101",
			"0x00000000b9000000 0x00000000b907ffff 0x0000000000046200"),
		function(1, 0x10f8, pci.ClassAudio<<8, "snd_hda_intel", "0x00000000b9080000 0x00000000b9083fff 0x0000000000040200"),
		function(2, 0x1ad8, pci.ClassUSB<<8|0x30, "xhci_hcd"),
		function(3, 0x1ad9, pci.ClassSerialOther<<8, "nvidia-gpu"),
	}
}

// SRIOVAccelerator returns a data-center accelerator at bus:00.0. Its virtual functions
// begin at function 4 of device 0, each in a group of its own.
func SRIOVAccelerator(bus, parent string, group, node, total, vfs int) []Function {
	pf := Function{
		Address: bus + ":00.0", Parent: parent, Vendor: 0x10de, Device: 0x2236, SubVendor: 0x10de, SubDevice: 0x1482,
		Class: pci.Class3D << 8, Revision: 0xa1, Driver: "nvidia", IOMMUGroup: group, NUMANode: node, Reset: "flr bus", TotalVFs: total,
		Speed: "16.0 GT/s PCIe", MaxSpeed: "16.0 GT/s PCIe", Width: 16, MaxWidth: 16,
		Resource: []string{
			"0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200",
			"0x0000206000000000 0x0000206fffffffff 0x000000000014220c",
		},
		Config: ConfigSpace{
			Vendor: 0x10de, Device: 0x2236, Class: pci.Class3D << 8, FLR: true, Serial: 0x48b02d0000000042,
			SRIOV: &pci.SRIOVCapability{InitialVFs: uint16(total), TotalVFs: uint16(total), NumVFs: uint16(vfs), Offset: 4, Stride: 1, DeviceID: 0x2236},
		}.Bytes(),
	}
	out := []Function{pf}
	for i := range vfs {
		g := group
		if g >= 0 {
			g += i + 1
		}
		n := 4 + i
		out = append(out, Function{
			Address: fmt.Sprintf("%s:%02x.%d", bus, n/8, n%8), Parent: parent, Vendor: 0x10de, Device: 0x2236, SubVendor: 0x10de, SubDevice: 0x14aa,
			Class: pci.Class3D << 8, Revision: 0xa1, IOMMUGroup: g, NUMANode: node, Reset: "flr", PF: pf.Address,
			Config: ConfigSpace{Vendor: 0xffff, Device: 0xffff}.Bytes(),
		})
	}
	return out
}

// AMDCard returns a card with a switch of its own: the graphics chip and its audio
// function are below two bridges on the card.
func AMDCard(bus, bus2, bus3, parent string, group int, acs *pci.ACS) []Function {
	up := Port(bus+":00.0", parent, group, pci.PortUpstream, nil)
	down := Port(bus2+":00.0", up.Address, group, pci.PortDownstream, acs)
	function := func(n int, device uint16, class uint32, driver string) Function {
		return Function{
			Address: fmt.Sprintf("%s:00.%d", bus3, n), Parent: down.Address, Vendor: 0x1002, Device: device, SubVendor: 0x1002, SubDevice: 0x0e3a,
			Class: class, Revision: 0xc1, Driver: driver, IOMMUGroup: group, NUMANode: 0, Reset: "bus",
			Config: ConfigSpace{Vendor: 0x1002, Device: device, Class: class, Multifunction: true, Port: pci.PortLegacyEndpoint}.Bytes(),
		}
	}
	gpu := function(0, 0x744c, pci.ClassVGA<<8, "amdgpu")
	gpu.Files = map[string]string{"mem_info_vram_total": "25753026560\n"}
	return []Function{up, down, gpu, function(1, 0xab30, pci.ClassAudio<<8, "snd_hda_intel")}
}

// XenDom0 adds what a control domain has: no IOMMU groups, cards bound to pciback, one
// port that isolates and one that does not.
func XenDom0(tree *Tree) *Tree {
	tree.Write("sys/hypervisor/type", "xen\n")
	tree.Write("proc/xen/capabilities", "control_d\n")
	tree.Add(
		Port("0000:00:01.0", "", -1, pci.PortRoot, FullACS()),
		Port("0000:00:02.0", "", -1, pci.PortRoot, nil),
	)
	held := NVIDIACard("0000:65:00", "0000:00:01.0", -1, 0)
	for i := range held {
		held[i].Driver = "pciback"
	}
	tree.Add(held...)
	tree.Add(Port("0000:03:00.0", "0000:00:02.0", -1, pci.PortUpstream, nil))
	for i, bus := range []string{"0000:05", "0000:06"} {
		down := Port(fmt.Sprintf("0000:04:%02x.0", i), "0000:03:00.0", -1, pci.PortDownstream, nil)
		tree.Add(down)
		tree.Add(SRIOVAccelerator(bus, down.Address, -1, 1, 16, 0)...)
	}
	return tree
}
