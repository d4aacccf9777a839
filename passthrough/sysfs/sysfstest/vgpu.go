package sysfstest

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

func (d *device) numVFs() int { return len(d.vfs) }

func (m *Machine) sriovFiles(d *device, put func(string, func() string, func(string) error)) {
	put("sriov_totalvfs", func() string { return strconv.Itoa(d.TotalVFs) + "\n" }, nil)
	put("sriov_numvfs", func() string { return strconv.Itoa(d.numVFs()) + "\n" }, func(s string) error { return m.setVFs(d, s) })
	put("sriov_drivers_autoprobe", func() string { return digit(d.vfProbe) + "\n" }, func(s string) error { return parseBool(s, &d.vfProbe) })
}

// setVFs makes or removes virtual functions: from 0 or to 0.
func (m *Machine) setVFs(d *device, s string) error {
	n, err := strconv.ParseUint(trim(s), 0, 16)
	switch {
	case err != nil:
		return syscall.EINVAL
	case int(n) > d.TotalVFs:
		return syscall.ERANGE
	case int(n) == d.numVFs():
		return nil
	case d.driver == nil || !d.driver.SRIOV:
		return syscall.ENOENT
	case n > 0 && d.numVFs() > 0:
		return syscall.EBUSY
	case n == 0:
		for _, vf := range d.vfs {
			if m.owners[vf.addr] != "" || (vf.driver != nil && vf.driver.Name == pciback) {
				return syscall.EPERM // assigned to a guest, as pciback marks them
			}
			if vf.driver != nil && vf.driver.VFIO && slices.ContainsFunc(vf.vfioNodes(), func(name string) bool { return m.holder(name) != nil }) {
				return errWait
			}
		}
		m.removeVFs(d)
		return nil
	}
	return m.makeVFs(d, int(n))
}

func (m *Machine) removeVFs(d *device) {
	for _, vf := range slices.Backward(slices.Clone(d.vfs)) {
		// By force: if a guest has the device, that is a violation.
		if vf.driver != nil && vf.driver.VFIO {
			for pid, p := range m.processes {
				if slices.ContainsFunc(vf.vfioNodes(), func(name string) bool { return slices.Contains(p.fds, name) }) {
					m.violate("%s was removed while %s (%d) had it", vf.addr, p.comm, pid)
					m.exit(pid)
				}
			}
		}
		_ = m.unplug(vf)
	}
	d.vfs = nil
}

func (m *Machine) makeVFs(d *device, n int) error {
	cap := pci.ParseConfig(d.config).SRIOV
	if cap == nil {
		return syscall.ENODEV
	}
	group := m.groups
	for i := range n {
		devfn := int(d.addr.Bus)<<8 + int(d.addr.Device)<<3 + int(d.addr.Function) + int(cap.Offset) + i*int(max(cap.Stride, 1))
		if devfn > 0xffff {
			return syscall.ENOMEM
		}
		a := pci.Address{Domain: d.addr.Domain, Bus: uint8(devfn >> 8), Device: uint8(devfn >> 3 & 0x1f), Function: uint8(devfn & 7)}
		f := pcitest.Function{
			Address: a.String(), Parent: d.Parent, Vendor: d.Vendor, Device: cap.DeviceID, SubVendor: d.SubVendor, SubDevice: d.SubDevice,
			Class: d.Class, Revision: d.Revision, IOMMUGroup: -1, NUMANode: d.NUMANode, Reset: "flr", PF: d.Address,
			Config: pcitest.ConfigSpace{Vendor: Any, Device: Any, Class: d.Class, FLR: true}.Bytes(),
		}
		if d.IOMMUGroup >= 0 {
			f.IOMMUGroup = group + i
		}
		vf := m.add(f)
		if m.autoprobe && d.vfProbe {
			m.probeAny(vf)
		}
	}
	return nil
}

// MdevType is a type of mediated devices that a parent offers.
type MdevType struct {
	ID          string // such as nvidia-22 or i915-GVTg_V5_4
	Name        string
	Description string
	API         string // such as vfio-pci
	Instances   int    // instances of this type if there are none of any type
}

type mdevType struct {
	MdevType
	parent *device
}

type mdev struct {
	uuid string
	of   *mdevType
}

// AddMdevTypes makes a function offer types while it has a driver. As with NVIDIA's
// driver, a parent cannot have devices of two types at the same time.
func (m *Machine) AddMdevTypes(a pci.Address, types ...MdevType) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.must(a)
	for _, t := range types {
		d.types = append(d.types, &mdevType{t, d})
	}
	m.mdevParent(d, d.driver != nil)
}

// Mdevs returns the UUIDs of a function's mediated devices.
func (m *Machine) Mdevs(a pci.Address) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, uuid := range slices.Sorted(maps.Keys(m.mdevs)) {
		if m.mdevs[uuid].of.parent.addr == a {
			out = append(out, uuid)
		}
	}
	return out
}

func (m *Machine) mdevParent(d *device, present bool) {
	if len(d.types) == 0 {
		return
	}
	if !present || d.driver.VFIO || d.driver.Name == pciback {
		for _, v := range maps.Clone(m.mdevs) {
			if v.of.parent == d {
				m.dropMdev(v)
			}
		}
		d.dir.drop("mdev_supported_types")
		m.root.drop("sys/class/mdev_bus/" + d.addr.String())
		return
	}
	m.root.put("sys/class/mdev_bus/"+d.addr.String(), &node{link: "../../devices/" + d.at})
	for _, t := range d.types {
		dir := d.dir.folder("mdev_supported_types/" + t.ID)
		dir.put("name", text(t.Name+"\n"))
		dir.put("description", text(t.Description+"\n"))
		dir.put("device_api", text(t.API+"\n"))
		dir.put("available_instances", shows(func() string { return strconv.Itoa(m.available(t)) + "\n" }))
		dir.put("create", &node{device: d, store: func(s string) error { return m.createMdev(t, s) }})
		dir.folder("devices")
	}
}

func (m *Machine) available(t *mdevType) int {
	n := t.Instances
	for _, v := range m.mdevs {
		switch {
		case v.of == t:
			n--
		case v.of.parent == t.parent:
			return 0
		}
	}
	return n
}

var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

func (m *Machine) createMdev(t *mdevType, s string) error {
	uuid := strings.ToLower(trim(s))
	switch {
	case !uuidForm.MatchString(uuid):
		return syscall.EINVAL
	case m.mdevs[uuid] != nil:
		return syscall.EEXIST
	case m.available(t) <= 0:
		return syscall.EUSERS
	}
	v := &mdev{uuid, t}
	m.mdevs[uuid] = v
	at := path.Join(t.parent.at, uuid)
	dir := t.parent.dir.folder(uuid)
	dir.put("mdev_type", &node{link: "../mdev_supported_types/" + t.ID})
	dir.put("remove", &node{device: t.parent, store: func(s string) error {
		n, err := strconv.ParseUint(trim(s), 0, 64)
		if err != nil {
			return syscall.EINVAL
		}
		if n != 0 {
			m.dropMdev(v)
		}
		return nil
	}})
	m.root.put("sys/bus/mdev/devices/"+uuid, &node{link: "../../../devices/" + at})
	t.parent.dir.put(path.Join("mdev_supported_types", t.ID, "devices", uuid), &node{link: "../../../" + uuid})
	return nil
}

func (m *Machine) dropMdev(v *mdev) {
	delete(m.mdevs, v.uuid)
	v.of.parent.dir.drop(v.uuid)
	v.of.parent.dir.drop(path.Join("mdev_supported_types", v.of.ID, "devices", v.uuid))
	m.root.drop("sys/bus/mdev/devices/" + v.uuid)
}

// VGPUType is a type of NVIDIA's vendor-specific VFIO framework.
type VGPUType struct {
	ID        int
	Name      string
	Instances int // most instances on one GPU
}

type vgpus struct{ types []VGPUType }

// AddVGPUTypes adds NVIDIA's files to the virtual functions of a physical function:
// nvidia/creatable_vgpu_types, current_vgpu_type and placement_id. A GPU has vGPUs of
// only one type at a time.
func (m *Machine) AddVGPUTypes(pf pci.Address, types ...VGPUType) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.must(pf)
	d.vgpu = &vgpus{types}
	for _, vf := range d.vfs {
		m.nvidiaFiles(vf)
	}
}

func (m *Machine) nvidiaFiles(vf *device) {
	pf := vf.pf
	if pf.vgpu == nil {
		return
	}
	vf.dir.put("nvidia/creatable_vgpu_types", shows(func() string {
		var b strings.Builder
		fmt.Fprintln(&b, "ID    : vGPU Name")
		for _, t := range pf.vgpu.types {
			if vf.slice == 0 && pf.fits(t) {
				fmt.Fprintf(&b, "%-5d : %s\n", t.ID, t.Name)
			}
		}
		return b.String()
	}))
	vf.dir.put("nvidia/current_vgpu_type", &node{
		device: vf,
		show:   func() (string, error) { return strconv.Itoa(vf.slice) + "\n", nil },
		store:  func(s string) error { return m.setVGPU(vf, s) },
	})
	vf.dir.put("nvidia/placement_id", shows(func() string {
		if vf.slice == 0 {
			return "Unset\n"
		}
		return strconv.Itoa(vf.vfIndex) + "\n"
	}))
}

func (d *device) fits(t VGPUType) bool {
	n := 0
	for _, vf := range d.vfs {
		switch vf.slice {
		case 0:
		case t.ID:
			n++
		default:
			return false
		}
	}
	return n < t.Instances
}

func (m *Machine) setVGPU(vf *device, s string) error {
	id, err := strconv.ParseUint(trim(s), 10, 31)
	if err != nil {
		return syscall.EINVAL
	}
	if vf.driver != nil && slices.ContainsFunc(vf.vfioNodes(), func(name string) bool { return m.holder(name) != nil }) {
		return syscall.EBUSY
	}
	if m.owners[vf.addr] != "" {
		return syscall.EBUSY
	}
	if id == 0 {
		vf.slice = 0
		return nil
	}
	i := slices.IndexFunc(vf.pf.vgpu.types, func(t VGPUType) bool { return t.ID == int(id) })
	switch {
	case i < 0:
		return syscall.EINVAL
	case vf.slice == int(id):
		return nil
	case vf.slice != 0:
		return syscall.EBUSY
	case !vf.pf.fits(vf.pf.vgpu.types[i]):
		return syscall.EIO
	}
	vf.slice = int(id)
	return nil
}
