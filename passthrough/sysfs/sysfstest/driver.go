package sysfstest

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Any matches each vendor or device in an ID.
const Any = 0xffff

const pciback = "pciback"

// ID is a row of a driver's table.
type ID struct{ Vendor, Device uint16 }

// Driver is a driver of PCI devices.
type Driver struct {
	Name         string // name below sys/bus/pci/drivers
	Module       string // name for modprobe; empty: Name
	IDs          []ID
	OverrideOnly bool // its table applies only to a device whose override names it
	VFIO         bool // a VFIO driver: it needs an IOMMU group, and unbinding waits for processes that have the device open
	SRIOV        bool // it can make virtual functions
}

// Pciback returns Xen's driver in dom0. It matches each device, and refuses those that
// neither the override nor its list of slots names.
func Pciback() Driver {
	return Driver{Name: pciback, Module: "xen-pciback", IDs: []ID{{Any, Any}}}
}

// VFIOPCI returns the kernel's driver for user space.
func VFIOPCI() Driver {
	return Driver{Name: "vfio-pci", IDs: []ID{{Any, Any}}, OverrideOnly: true, VFIO: true, SRIOV: true}
}

// driver is a loaded driver.
type driver struct {
	Driver
	dir     *node
	dynamic []ID
	slots   []pci.Address // pciback's list of slots
}

// Load loads a driver. It binds matching devices without a driver.
func (m *Machine) Load(d Driver) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load(d)
}

func (m *Machine) load(d Driver) *driver {
	if m.driver(d.Name) != nil {
		panic("sysfstest: driver " + d.Name + " is loaded already")
	}
	if d.Module == "" {
		d.Module = d.Name
	}
	dr := &driver{Driver: d}
	dr.dir = m.root.folder(path.Join(pciDrivers, d.Name))
	m.root.folder("sys/module/" + strings.ReplaceAll(d.Module, "-", "_"))
	dr.dir.put("bind", &node{store: func(s string) error { return m.bindStore(dr, s) }})
	dr.dir.put("unbind", &node{store: func(s string) error { return m.unbindStore(dr, s) }})
	dr.dir.put("new_id", &node{store: func(s string) error { return m.newID(dr, s) }})
	dr.dir.put("remove_id", &node{store: func(s string) error { return m.removeID(dr, s) }})
	dr.dir.put("module", &node{link: "../../../../module/" + strings.ReplaceAll(d.Module, "-", "_")})
	if d.Name == pciback {
		dr.dir.put("new_slot", &node{store: dr.newSlot})
		dr.dir.put("remove_slot", &node{store: dr.removeSlot})
		dr.dir.put("slots", shows(dr.showSlots))
	}
	m.drivers = append(m.drivers, dr)
	if m.autoprobe {
		m.attach(dr)
	}
	return dr
}

// Unload unloads a driver. Its devices lose it.
func (m *Machine) Unload(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	dr := m.driver(name)
	if dr == nil {
		panic("sysfstest: no driver " + name)
	}
	for _, d := range m.sorted() {
		if d.driver == dr {
			if m.unbind(d) != nil {
				panic("sysfstest: module of " + name + " is in use")
			}
		}
	}
	m.root.drop(path.Join(pciDrivers, name))
	m.root.drop("sys/module/" + strings.ReplaceAll(dr.Module, "-", "_"))
	m.drivers = slices.DeleteFunc(m.drivers, func(d *driver) bool { return d == dr })
	m.settle()
}

func (m *Machine) driver(name string) *driver {
	for _, d := range m.drivers {
		if d.Name == name {
			return d
		}
	}
	return nil
}

// attach probes all devices without a driver.
func (m *Machine) attach(dr *driver) {
	for _, d := range m.sorted() {
		if d.driver == nil && dr.matches(d) {
			_ = m.probe(dr, d) // errors are ignored, as in the kernel
		}
	}
}

func (dr *driver) inTable(list []ID, d *device) bool {
	return slices.ContainsFunc(list, func(id ID) bool {
		return (id.Vendor == Any || id.Vendor == d.Vendor) && (id.Device == Any || id.Device == d.Device)
	})
}

// matches reports whether a driver matches a device. An override excludes all other
// drivers, and suffices by itself.
func (dr *driver) matches(d *device) bool {
	if d.override != "" {
		return d.override == dr.Name
	}
	return dr.inTable(dr.dynamic, d) || (!dr.OverrideOnly && dr.inTable(dr.IDs, d))
}

// probe binds a matching device, or returns why it cannot.
func (m *Machine) probe(dr *driver, d *device) error {
	switch {
	case d.pf != nil && !d.pf.vfProbe && d.override == "":
		return syscall.ENODEV
	case m.refusals[refusal{dr.Name, d.addr}] != nil:
		return kernel(m.refusals[refusal{dr.Name, d.addr}])
	case dr.Name == pciback && d.override != pciback && !dr.hasSlot(d):
		return syscall.ENODEV
	case dr.VFIO && d.IOMMUGroup < 0:
		return syscall.EINVAL
	case d.dead:
		return syscall.ENXIO
	}
	if guest := m.owners[d.addr]; guest != "" {
		m.violate("%s was bound to %s while %s has it", d.addr, dr.Name, guest)
	}
	if dr.Name == pciback && !slices.Contains(dr.slots, d.addr) {
		dr.slots = append(dr.slots, d.addr) // the slot stays in the list
	}
	m.bound(dr, d)
	return nil
}

func (m *Machine) bound(dr *driver, d *device) {
	d.driver = dr
	d.dir.put("driver", &node{link: up(d.at) + "bus/pci/drivers/" + dr.Name})
	dr.dir.put(d.addr.String(), &node{link: "../../../../devices/" + d.at})
	if dr.VFIO {
		d.vfio = m.opened
		m.opened++
		d.dir.folder("vfio-dev/vfio" + strconv.Itoa(d.vfio))
	}
	for _, n := range d.nodes {
		if n.driver == dr.Name {
			d.dir.put(path.Join(n.dir, "uevent"), text("MAJOR=226\nMINOR=0\nDEVNAME="+n.dev+"\n"))
		}
	}
	m.mdevParent(d, true)
	d.resume(m)
}

// unbind unbinds a device from its driver, or waits for processes that have the device
// open.
func (m *Machine) unbind(d *device) error {
	dr := d.driver
	if dr.VFIO {
		for _, name := range d.vfioNodes() {
			if m.holder(name) != nil {
				return errWait
			}
		}
	} else {
		for _, n := range d.nodes {
			if p := m.holder("/dev/" + n.dev); p != nil && n.driver == dr.Name {
				m.violate("%s was unbound from %s while %s had /dev/%s", d.addr, dr.Name, p.comm, n.dev)
			}
		}
	}
	if guest := m.owners[d.addr]; guest != "" {
		m.violate("%s was unbound from %s while %s had it", d.addr, dr.Name, guest)
		delete(m.owners, d.addr)
	}
	if d.numVFs() > 0 {
		for _, vf := range d.vfs {
			if guest := m.owners[vf.addr]; guest != "" {
				m.violate("%s was unbound from %s while %s had its %s", d.addr, dr.Name, guest, vf.addr)
			}
		}
		m.removeVFs(d)
	}
	m.mdevParent(d, false)
	if dr.VFIO {
		d.dir.drop("vfio-dev")
		d.vfio = -1
	}
	for _, n := range d.nodes {
		d.dir.drop(path.Dir(n.dir))
	}
	d.dir.drop("driver")
	dr.dir.drop(d.addr.String())
	d.driver = nil
	d.suspend(m)
	return nil
}

func (m *Machine) named(s string) *device {
	// The name must be exact, except for a newline.
	for a, d := range m.devices {
		if a.String() == strings.TrimSuffix(s, "\n") {
			return d
		}
	}
	return nil
}

func (m *Machine) bindStore(dr *driver, s string) error {
	d := m.named(s)
	switch {
	case d == nil || !dr.matches(d):
		return syscall.ENODEV
	case d.driver != nil:
		return syscall.EBUSY
	}
	return m.probe(dr, d)
}

func (m *Machine) unbindStore(dr *driver, s string) error {
	d := m.named(s)
	if d == nil || d.driver != dr {
		return syscall.ENODEV
	}
	return m.unbind(d)
}

// driversProbe does not report whether a driver has bound the device.
func (m *Machine) driversProbe(s string) error {
	d := m.named(s)
	if d == nil {
		return syscall.ENODEV
	}
	m.probeAny(d)
	return nil
}

func (m *Machine) probeAny(d *device) {
	for _, dr := range m.drivers {
		if d.driver == nil && dr.matches(d) {
			_ = m.probe(dr, d)
		}
	}
}

func parseID(s string) (id ID, fields int) {
	for _, to := range []*uint16{&id.Vendor, &id.Device} {
		word, rest, _ := strings.Cut(strings.TrimSpace(s), " ")
		v, err := strconv.ParseUint(word, 16, 16)
		if err != nil {
			break
		}
		*to, s = uint16(v), rest
		fields++
	}
	return id, fields
}

func (m *Machine) newID(dr *driver, s string) error {
	id, n := parseID(s)
	if n < 2 {
		return syscall.EINVAL
	}
	if slices.Contains(dr.IDs, id) || slices.Contains(dr.dynamic, id) {
		return syscall.EEXIST
	}
	dr.dynamic = append(dr.dynamic, id)
	m.attach(dr)
	return nil
}

func (m *Machine) removeID(dr *driver, s string) error {
	id, n := parseID(s)
	if n < 2 {
		return syscall.EINVAL
	}
	i := slices.Index(dr.dynamic, id)
	if i < 0 {
		return syscall.ENODEV
	}
	dr.dynamic = slices.Delete(dr.dynamic, i, i+1)
	return nil
}

// hasSlot reports whether pciback's list contains the device or a bridge above it.
func (dr *driver) hasSlot(d *device) bool {
	for ; d != nil; d = d.parent {
		if slices.Contains(dr.slots, d.addr) {
			return true
		}
	}
	return false
}

func (dr *driver) newSlot(s string) error {
	a, err := pci.ParseAddress(trim(s))
	if err != nil {
		return syscall.EINVAL
	}
	if !slices.Contains(dr.slots, a) {
		dr.slots = append(dr.slots, a)
	}
	return nil
}

func (dr *driver) removeSlot(s string) error {
	a, err := pci.ParseAddress(trim(s))
	if err != nil {
		return syscall.EINVAL
	}
	i := slices.Index(dr.slots, a)
	if i < 0 {
		return syscall.ENOENT
	}
	dr.slots = slices.Delete(dr.slots, i, i+1)
	return nil
}

func (dr *driver) showSlots() string {
	var b strings.Builder
	for _, a := range dr.slots {
		fmt.Fprintln(&b, a)
		if b.Len() >= 4096 { // the kernel writes at most a page
			break
		}
	}
	return b.String()[:min(b.Len(), 4096)]
}

func trim(s string) string { return strings.TrimSpace(s) }

func digit(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

func parseBool(s string, to *bool) error {
	switch trim(s) {
	case "1", "y", "Y", "on":
		*to = true
	case "0", "n", "N", "off":
		*to = false
	default:
		return syscall.EINVAL
	}
	return nil
}

// up returns the relative path from a device's folder to sys.
func up(at string) string { return strings.Repeat("../", strings.Count(at, "/")+2) }
