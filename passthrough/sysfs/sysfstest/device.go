package sysfstest

import (
	"bytes"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

// device is a function of the machine.
type device struct {
	pcitest.Function
	addr   pci.Address
	at     string // its folder below sys/devices
	dir    *node
	parent *device
	driver *driver

	override string
	nodes    []devNode
	vfio     int // number of its VFIO device; -1: none

	config   []byte
	dead     bool
	heals    []string // resets that bring it back after FallOff
	methods  []string // resets that it supports
	enabled  []string // resets that are enabled
	outcomes map[string]Outcome
	resets   []string // resets that were done

	control   string // power/control of runtime power management
	allowCold bool   // d3cold_allowed
	canCold   bool   // the platform can power it off
	state     string

	pf      *device
	vfs     []*device
	vfIndex int
	vfProbe bool // sriov_drivers_autoprobe

	types []*mdevType
	vgpu  *vgpus
	slice int // id of the vGPU type on a virtual function; 0: none
}

type devNode struct{ driver, dir, dev string }

// Add adds functions that pcitest describes. Parents and physical functions come first.
// If a function's driver is not loaded, it is loaded with the device's ids in its table.
// Then the function is bound to it.
func (m *Machine) Add(functions ...pcitest.Function) *Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range functions {
		m.add(f)
	}
	return m
}

func (m *Machine) add(f pcitest.Function) *device {
	a, err := pci.ParseAddress(f.Address)
	if err != nil || a.String() != f.Address || m.devices[a] != nil {
		panic(fmt.Sprintf("sysfstest: function %s: twice, or %v", f.Address, err))
	}
	d := &device{
		Function: f, addr: a, vfio: -1, config: f.Config, control: "on", allowCold: true, state: "D0", vfProbe: true,
		methods: strings.Fields(f.Reset), outcomes: map[string]Outcome{}, override: f.DriverOverride,
	}
	if d.config == nil {
		d.config = pcitest.ConfigSpace{Vendor: f.Vendor, Device: f.Device, Class: f.Class}.Bytes()
	}
	if f.Parent != "" {
		d.parent = m.must(address(f.Parent))
	}
	if f.PF != "" {
		d.pf = m.must(address(f.PF))
		d.vfIndex = len(d.pf.vfs)
		d.pf.vfs = append(d.pf.vfs, d)
	}
	m.plug(d)
	switch dr := m.driver(f.Driver); {
	case f.Driver == "":
	case dr == nil:
		nd := Driver{Name: f.Driver, IDs: []ID{{f.Vendor, f.Device}}, SRIOV: f.TotalVFs > 0}
		switch f.Driver {
		case pciback:
			nd = Pciback()
		case "vfio-pci":
			nd = VFIOPCI()
		}
		auto := m.autoprobe
		m.autoprobe = false
		dr = m.load(nd)
		m.autoprobe = auto
		fallthrough
	default:
		id := ID{f.Vendor, f.Device}
		if !dr.inTable(dr.IDs, d) {
			dr.IDs = append(dr.IDs, id)
		}
		dr.SRIOV = dr.SRIOV || f.TotalVFs > 0
		if dr.Name == pciback {
			dr.slots = append(dr.slots, a)
		}
		m.bound(dr, d)
	}
	return d
}

func address(s string) pci.Address {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic("sysfstest: " + err.Error())
	}
	return a
}

func (m *Machine) must(a pci.Address) *device {
	d := m.devices[a]
	if d == nil {
		panic("sysfstest: no function " + a.String())
	}
	return d
}

func (m *Machine) sorted() []*device {
	return slices.SortedFunc(maps.Values(m.devices), func(a, b *device) int { return a.addr.Compare(b.addr) })
}

// plug makes a device's files.
func (m *Machine) plug(d *device) {
	m.devices[d.addr] = d
	above := fmt.Sprintf("pci%04x:%02x", d.addr.Domain, d.addr.Bus)
	if d.parent != nil {
		above = d.parent.at
	}
	d.at = path.Join(above, d.addr.String())
	d.dir = m.root.folder(path.Join(sysDevices, d.at))
	d.dir.device = d
	m.root.put(path.Join(pciDevices, d.addr.String()), &node{link: "../../../devices/" + d.at})
	constant := func(name, format string, args ...any) { d.dir.put(name, text(fmt.Sprintf(format, args...)+"\n")) }
	constant("vendor", "0x%04x", d.Vendor)
	constant("device", "0x%04x", d.Device)
	constant("subsystem_vendor", "0x%04x", d.SubVendor)
	constant("subsystem_device", "0x%04x", d.SubDevice)
	constant("class", "0x%06x", d.Class)
	constant("revision", "0x%02x", d.Revision)
	constant("modalias", "pci:v%08Xd%08Xsv%08Xsd%08Xbc%02Xsc%02Xi%02x", d.Vendor, d.Device, d.SubVendor, d.SubDevice, d.Class>>16&0xff, d.Class>>8&0xff, d.Class&0xff)
	constant("numa_node", "%d", d.NUMANode)
	constant("local_cpulist", "0-15")
	lines := slices.Clone(d.Resource)
	for len(lines) < 13 {
		lines = append(lines, "0x0000000000000000 0x0000000000000000 0x0000000000000000")
	}
	constant("resource", "%s", strings.Join(lines, "\n"))
	if d.MaxSpeed != "" {
		constant("current_link_speed", "%s", d.Speed)
		constant("max_link_speed", "%s", d.MaxSpeed)
		constant("current_link_width", "%d", d.Width)
		constant("max_link_width", "%d", d.MaxWidth)
	}
	if d.Class>>8 == pci.ClassVGA {
		constant("boot_vga", "%s", digit(d.BootVGA))
	}
	for name, content := range d.Files {
		d.dir.put(name, text(content))
	}
	m.attributes(d)
	if d.IOMMUGroup >= 0 {
		m.groups = max(m.groups, d.IOMMUGroup+1)
		n := strconv.Itoa(d.IOMMUGroup)
		d.dir.put("iommu_group", &node{link: up(d.at) + "kernel/iommu_groups/" + n})
		m.root.put(path.Join("sys/kernel/iommu_groups", n, "devices", d.addr.String()), &node{link: "../../../../devices/" + d.at})
	}
	if d.pf != nil {
		d.dir.put("physfn", &node{link: "../" + d.pf.addr.String()})
		d.pf.dir.put("virtfn"+strconv.Itoa(d.vfIndex), &node{link: "../" + d.addr.String()})
		m.nvidiaFiles(d)
	}
}

// attributes makes the files that have behaviour.
func (m *Machine) attributes(d *device) {
	put := func(name string, show func() string, store func(string) error) {
		n := &node{store: store, device: d}
		if show != nil {
			n.show = func() (string, error) { return show(), nil }
		}
		d.dir.put(name, n)
	}
	put("driver_override", func() string {
		if d.override == "" {
			return "(null)\n"
		}
		return d.override + "\n"
	}, func(s string) error {
		if len(s) >= 4095 {
			return syscall.EINVAL
		}
		d.override, _, _ = strings.Cut(s, "\n")
		return nil
	})
	put("enable", func() string { return digit(d.driver != nil) + "\n" }, nil)
	put("config", d.showConfig, nil)
	put("power_state", func() string { return d.state + "\n" }, nil)
	put("d3cold_allowed", func() string { return digit(d.allowCold) + "\n" }, func(s string) error {
		if err := parseBool(s, &d.allowCold); err != nil {
			return err
		}
		d.repower(m)
		return nil
	})
	put("power/control", func() string { return d.control + "\n" }, func(s string) error {
		if s = trim(s); s != "on" && s != "auto" {
			return syscall.EINVAL
		}
		d.control = s
		d.repower(m)
		return nil
	})
	put("power/runtime_status", func() string {
		if d.state == "D0" {
			return "active\n"
		}
		return "suspended\n"
	}, nil)
	put("remove", nil, func(s string) error { return m.removeStore(d, s) })
	put("rescan", nil, m.rescan)
	if len(d.methods) > 0 {
		d.enabled = slices.Clone(d.methods)
		put("reset", nil, func(s string) error { return m.resetStore(d, s) })
		put("reset_method", func() string { return strings.Join(d.enabled, " ") + "\n" }, d.setMethods)
	}
	if d.TotalVFs > 0 {
		m.sriovFiles(d, put)
	}
}

func (d *device) showConfig() string {
	if d.dead {
		return string(bytes.Repeat([]byte{0xff}, len(d.config)))
	}
	return string(d.config)
}

// removeStore removes a device and everything below it from the bus.
func (m *Machine) removeStore(d *device, s string) error {
	n, err := strconv.ParseUint(trim(s), 0, 64)
	if err != nil {
		return syscall.EINVAL
	}
	if n == 0 {
		return nil
	}
	return m.unplug(d)
}

func (m *Machine) unplug(d *device) error {
	for _, other := range m.sorted() {
		if other.parent == d && m.devices[other.addr] == other {
			if err := m.unplug(other); err != nil {
				return err
			}
		}
	}
	if d.driver != nil {
		if err := m.unbind(d); err != nil {
			return err
		}
	}
	if guest := m.owners[d.addr]; guest != "" {
		m.violate("%s was removed while %s had it", d.addr, guest)
		delete(m.owners, d.addr)
	}
	if d.pf != nil {
		d.pf.dir.drop("virtfn" + strconv.Itoa(d.vfIndex))
	} else {
		m.gone[d.addr] = d
	}
	if d.IOMMUGroup >= 0 {
		m.root.drop(path.Join("sys/kernel/iommu_groups", strconv.Itoa(d.IOMMUGroup), "devices", d.addr.String()))
	}
	m.root.drop(path.Join(pciDevices, d.addr.String()))
	m.root.drop(path.Join(sysDevices, d.at))
	delete(m.devices, d.addr)
	return nil
}

// rescan finds devices that were removed and still answer.
func (m *Machine) rescan(s string) error {
	n, err := strconv.ParseUint(trim(s), 0, 64)
	if err != nil {
		return syscall.EINVAL
	}
	if n == 0 {
		return nil
	}
	found := slices.SortedFunc(maps.Values(m.gone), func(a, b *device) int { return strings.Compare(a.at, b.at) })
	for _, d := range found {
		if d.dead || (d.parent != nil && m.devices[d.parent.addr] != d.parent) {
			continue
		}
		delete(m.gone, d.addr)
		d.override, d.control, d.allowCold, d.state = "", "on", true, "D0"
		m.plug(d)
		if m.autoprobe {
			m.probeAny(d)
		}
	}
	return nil
}

// Unplug removes a function as if it were pulled out of its slot. A rescan does not find
// it until Plug.
func (m *Machine) Unplug(a pci.Address) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.must(a)
	if m.unplug(d) != nil {
		panic("sysfstest: " + a.String() + " is in use")
	}
	d.dead = true
	m.settle()
}

// Plug puts it back, and the kernel finds it.
func (m *Machine) Plug(a pci.Address) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d := m.gone[a]; d != nil {
		d.dead = false
	}
	_ = m.rescan("1")
}

// Reboot restarts the machine: overrides and pciback's slots are lost, and drivers bind
// what their tables name, in the order in which they were loaded.
func (m *Machine) Reboot() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boot++
	m.crashed = false
	m.pending = nil
	clear(m.faults)
	clear(m.owners)
	for pid := range m.processes {
		m.exit(pid)
	}
	for _, d := range m.sorted() {
		if m.devices[d.addr] != d {
			continue // a virtual function that was removed with its physical function
		}
		if d.driver != nil {
			_ = m.unbind(d)
		}
		d.override, d.dead, d.control, d.allowCold, d.state = "", false, "on", true, "D0"
	}
	for _, dr := range m.drivers {
		dr.slots, dr.dynamic = nil, nil
	}
	_ = m.rescan("1")
	for _, d := range m.sorted() {
		m.probeAny(d)
	}
}

// Driver returns the driver of a function; empty: none.
func (m *Machine) Driver(a pci.Address) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if d := m.devices[a]; d != nil && d.driver != nil {
		return d.driver.Name
	}
	return ""
}

// Override returns a function's driver_override; empty: none.
func (m *Machine) Override(a pci.Address) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.must(a).override
}

// Slots returns pciback's list of slots.
func (m *Machine) Slots() []pci.Address {
	m.mu.Lock()
	defer m.mu.Unlock()
	if dr := m.driver(pciback); dr != nil {
		return slices.Clone(dr.slots)
	}
	return nil
}
