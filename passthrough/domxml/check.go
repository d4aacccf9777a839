package domxml

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// ProblemKind is the kind of a problem.
type ProblemKind string

// Problems of a domain that has host devices or is to get some.
const (
	// NotHVM: Xen gives no devices to guests of this type, or none that can be detached.
	NotHVM ProblemKind = "not-hvm"
	// NoPassthrough: Xen gives a device to a running domain only if the domain was
	// created with the passthrough flag.
	NoPassthrough ProblemKind = "no-passthrough-flag"
	// NoACPI: without ACPI, the guest does not notice a device that is plugged in.
	NoACPI ProblemKind = "no-acpi"
	// PopulateOnDemand: Xen gives no device to a domain that has not got all its memory.
	PopulateOnDemand ProblemKind = "populate-on-demand"
	// MDevOnXen: the libxl driver supports only PCI and USB host devices.
	MDevOnXen ProblemKind = "mdev-on-xen"
	// Managed: libvirt would bind the device without gpuctl's knowledge.
	Managed ProblemKind = "managed"
	// BadDevice: a host device's address cannot be parsed.
	BadDevice ProblemKind = "bad-device"
	// Duplicate: the domain has a device twice.
	Duplicate ProblemKind = "duplicate-device"
	// Elsewhere: a device is also used as something other than a host device.
	Elsewhere ProblemKind = "device-elsewhere"
	// Machine: the machine type has no PCI Express.
	Machine ProblemKind = "machine-type"
	// NoPorts: there are too few free PCI Express ports.
	NoPorts ProblemKind = "no-free-ports"
	// MemoryLimit: the limit leaves no room for what VFIO locks.
	MemoryLimit ProblemKind = "memory-limit"
)

// Problem is a reason why a domain cannot have its host devices, or should not have them
// in this way.
type Problem struct {
	Kind ProblemKind
	// Fatal problems make a start or an attach fail, or cause failures later. The others
	// are advice.
	Fatal bool
	// Device is the device with the problem; nil: it is a problem of the domain.
	Device *Source
	// Message contains what is wrong and what to do.
	Message string
}

// Use is the purpose of a check.
type Use struct {
	// HotPlug is set if the running domain is to get devices.
	HotPlug bool
	// Add are the devices that the domain is to get, in addition to those in its XML.
	Add []Source
}

// Check returns the problems with a domain's host devices: those in its XML and those
// that it is to get. A domain without any has no problems.
func (d *Document) Check(use Use) []Problem {
	c := &checker{d: d, use: use, devices: d.hostdevs()}
	if len(c.devices) == 0 && len(use.Add) == 0 && !use.HotPlug {
		return nil
	}
	c.sources()
	if d.Xen() {
		c.xen()
	} else {
		c.qemu()
	}
	return c.problems
}

type checker struct {
	d        *Document
	use      Use
	devices  []hostdev
	problems []Problem
}

func (c *checker) add(kind ProblemKind, fatal bool, device *Source, format string, args ...any) {
	message := "domain " + c.d.Name() + ": "
	if device != nil {
		message += "device " + device.String() + ": "
	}
	c.problems = append(c.problems, Problem{kind, fatal, device, message + fmt.Sprintf(format, args...)})
}

// sources checks the host's side of the devices.
func (c *checker) sources() {
	elsewhere := c.elsewhere()
	seen := map[Source]bool{}
	each := func(s Source, new bool) {
		if seen[s] {
			if new {
				c.add(Duplicate, true, &s, "the domain has it already; detach it first, or choose another")
			} else {
				c.add(Duplicate, true, &s, "it is there twice; remove one of the two <hostdev>")
			}
			return
		}
		seen[s] = true
		if where := elsewhere[s.PCI]; s.MDev == "" && where != "" {
			c.add(Elsewhere, true, &s, "the domain also uses it as %s; remove that, or choose another device", where)
		}
		if s.MDev != "" && c.d.Xen() {
			c.add(MDevOnXen, true, &s, "libvirt's Xen driver has no mediated devices; give it a PCI function, for a share of a card a virtual function")
		}
	}
	for i, h := range c.devices {
		if h.err != nil {
			c.add(BadDevice, true, nil, "host device number %d: %v; write its source as <address domain='0x0000' bus='0x65' slot='0x00' function='0x0'/>", i+1, h.err)
			continue
		}
		each(h.Source, false)
		if h.Managed {
			c.add(Managed, false, &h.Source, "managed='yes' has libvirt bind it and give it back by itself; set managed='no', gpuctl does that and knows how to undo it")
		}
	}
	for _, s := range c.use.Add {
		n, err := s.normal()
		if err != nil {
			c.add(BadDevice, true, &s, "%v", err)
			continue
		}
		each(n, true)
	}
}

// elsewhere finds PCI functions that the domain uses as something else.
func (c *checker) elsewhere() map[pci.Address]string {
	found := map[pci.Address]string{}
	note := func(n *node, where string) {
		if n == nil {
			return
		}
		if a, err := parseAddress(n); err == nil {
			found[a] = where
		}
	}
	devices := c.d.root.child("devices")
	for _, n := range devices.all("interface") {
		if n.attr("type") == "hostdev" {
			note(n.child("source", "address"), "a network <interface type='hostdev'>")
		}
	}
	for _, n := range devices.all("disk") {
		if n.attr("type") == "nvme" {
			note(n.child("source", "address"), "a <disk type='nvme'>")
		}
	}
	// vfio-pci,host=0000:65:00.0 on qemu's command line, with any prefix.
	host := regexp.MustCompile(`(?:host|"host")\s*[=:]\s*"?((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])`)
	for _, line := range c.d.root.children {
		if _, name, _ := strings.Cut(line.name, ":"); name != "commandline" {
			continue
		}
		for _, arg := range line.children {
			for _, m := range host.FindAllStringSubmatch(arg.attr("value"), 64) {
				if a, err := pci.ParseAddress(m[1]); err == nil {
					found[a] = "an argument of qemu's command line"
				}
			}
		}
	}
	return found
}

// xen checks the requirements of the libxl driver and Xen.
func (c *checker) xen() {
	switch kind := c.d.root.child("os", "type").content(); kind {
	case "hvm":
	case "xenpvh":
		c.add(NotHVM, true, nil, "it is a PVH guest, to which Xen gives no PCI device; make it HVM: <os><type arch='x86_64' machine='xenfv'>hvm</type></os>")
		return
	default:
		c.add(NotHVM, true, nil, "it is a PV guest (type %.20q), which can't be migrated live, and whose kernel may crash when a device is taken away; make it HVM: <os><type arch='x86_64' machine='xenfv'>hvm</type></os>", kind)
		return
	}
	if !c.d.Passthrough() {
		c.add(NoPassthrough, c.use.HotPlug || len(c.use.Add) > 0, nil,
			"Xen can give it no device while it runs; add <features><xen><passthrough state='on'/></xen></features> and start it anew")
	}
	c.acpi()
	memory, ok1 := size(c.d.root.child("memory"))
	current, ok2 := size(c.d.root.child("currentMemory"))
	if ok1 && ok2 && current < memory {
		c.add(PopulateOnDemand, true, nil, "it starts with %d MiB of its %d MiB of memory, which Xen refuses for a domain with devices; set <currentMemory> to <memory>", current>>20, memory>>20)
	}
}

func (c *checker) acpi() {
	if c.d.root.child("features", "acpi") == nil {
		c.add(NoACPI, c.use.HotPlug || len(c.use.Add) > 0, nil, "without ACPI the guest does not notice that a device comes or goes; add <features><acpi/></features> and start it anew")
	}
}

// qemu checks the requirements of qemu and VFIO.
func (c *checker) qemu() {
	machine := c.d.root.child("os", "type").attr("machine")
	switch {
	case strings.HasPrefix(machine, "microvm"):
		c.add(Machine, true, nil, "machine type %.40q has no PCI; use q35", machine)
		return
	case strings.Contains(machine, "q35"), strings.HasPrefix(machine, "virt"):
		c.ports()
	default:
		c.add(Machine, false, nil, "machine type %.40q has no PCI Express, which drivers of GPUs expect; use q35", machine)
	}
	c.acpi()
	memory, ok1 := size(c.d.root.child("memory"))
	limit, ok2 := size(c.d.root.child("memtune", "hard_limit"))
	const besides = 1 << 30 // what libvirt permits a domain with VFIO devices to lock, in addition to its memory
	if ok1 && ok2 && limit < memory+besides {
		c.add(MemoryLimit, true, nil, "VFIO locks all of the guest's memory, %d MiB, and some more, but <hard_limit> is %d MiB; remove <memtune> or raise the limit to %d MiB",
			memory>>20, limit>>20, (memory+besides)>>20)
	}
}

// ports counts free PCI Express root ports.
func (c *checker) ports() {
	devices := c.d.root.child("devices")
	if devices == nil {
		return
	}
	free := map[uint64]bool{}
	unplaced := 0
	for _, n := range devices.all("controller") {
		model := n.attr("model")
		if n.attr("type") != "pci" || model != "pcie-root-port" && model != "pcie-switch-downstream-port" || n.child("target").attr("hotplug") == "off" {
			continue
		}
		if i, err := strconv.ParseUint(n.attr("index"), 0, 32); err == nil {
			free[i] = true
		} else {
			unplaced++ // libvirt will assign an index
		}
	}
	for _, n := range devices.children {
		if a := n.child("address"); a != nil && a.attr("type") == "pci" {
			if bus, err := strconv.ParseUint(a.attr("bus"), 0, 32); err == nil {
				delete(free, bus)
			}
		}
	}
	have := len(free) + unplaced
	want := len(c.use.Add)
	if c.use.HotPlug {
		want = max(want, 1)
	}
	if have < want {
		c.add(NoPorts, true, nil, "%d free PCI Express ports, %d needed; add %d times <controller type='pci' model='pcie-root-port'/> and start it anew", have, want, want-have)
	}
}

// size returns an amount of memory in bytes. Units are libvirt's; without one it is KiB.
func size(n *node) (uint64, bool) {
	if n == nil {
		return 0, false
	}
	v, err := strconv.ParseUint(n.content(), 10, 64)
	if err != nil {
		return 0, false
	}
	factor := map[string]uint64{
		"b": 1, "bytes": 1, "KB": 1e3, "": 1 << 10, "k": 1 << 10, "KiB": 1 << 10, "MB": 1e6, "M": 1 << 20, "MiB": 1 << 20,
		"GB": 1e9, "G": 1 << 30, "GiB": 1 << 30, "TB": 1e12, "T": 1 << 40, "TiB": 1 << 40,
	}[n.attr("unit")]
	if factor == 0 || v > (1<<63)/factor {
		return 0, false
	}
	return v * factor, true
}
