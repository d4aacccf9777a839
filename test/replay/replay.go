package replay

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/internal/capture"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
	"github.com/gpuctl/gpuctl/passthrough/sysfs/sysfstest"
)

const (
	devicesDir = "sys/bus/pci/devices"
	driversDir = "sys/bus/pci/drivers"
	maxVFs     = 4096
)

// ErrMachine says that the captured files are those of no machine.
var ErrMachine = errors.New("the captured files make no machine")

// Machine brings a captured host to life.
func Machine(a *capture.Archive) (*sysfstest.Machine, error) {
	host := a.Host()
	m := sysfstest.New()
	functions, err := Functions(host)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMachine, err)
	}
	m.Add(functions...)
	loaded := map[string]bool{}
	for _, f := range functions {
		loaded[f.Driver] = true
	}
	drivers, _ := fs.ReadDir(host, driversDir)
	for _, d := range drivers {
		switch name := d.Name(); {
		case loaded[name]:
		case name == "pciback":
			m.Load(sysfstest.Pciback())
		case name == "vfio-pci":
			m.Load(sysfstest.VFIOPCI())
		default:
			m.Load(sysfstest.Driver{Name: name})
		}
	}
	return m, fs.WalkDir(host, ".", func(name string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case name == "sys/bus/pci", name == "sys/kernel/iommu_groups", strings.HasPrefix(name, "sys/devices/pci"):
			return fs.SkipDir // alive
		case e.IsDir():
			return nil
		case e.Type() == fs.ModeSymlink:
			target, err := host.ReadLink(name)
			if err == nil {
				m.Link(name, target)
			}
			return err
		}
		data, err := host.ReadFile(name)
		if err == nil {
			m.File(name, string(data))
		}
		return err
	})
}

// Functions are the PCI functions of a machine's files, parents and physical
// functions first, as pcitest describes them.
func Functions(root fs.FS) ([]pcitest.Function, error) {
	entries, err := fs.ReadDir(root, devicesDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	all := map[string]pcitest.Function{}
	for _, e := range entries {
		a, err := pci.ParseAddress(e.Name())
		if err != nil || a.String() != e.Name() {
			continue
		}
		f, err := function(root, a)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", a, err)
		}
		all[f.Address] = f
	}
	var out []pcitest.Function
	state := map[string]int{} // 1: begun, 2: done
	var add func(address string) error
	add = func(address string) error {
		f, ok := all[address]
		switch {
		case !ok:
			return fmt.Errorf("there is no %s", address)
		case state[address] == 2:
			return nil
		case state[address] == 1:
			return fmt.Errorf("%s is above itself", address)
		}
		state[address] = 1
		for _, first := range []string{f.Parent, f.PF} {
			if first != "" {
				if err := add(first); err != nil {
					return fmt.Errorf("%s: %w", address, err)
				}
			}
		}
		state[address] = 2
		out = append(out, f)
		return nil
	}
	addresses := make([]string, 0, len(all))
	for _, e := range entries {
		if f, ok := all[e.Name()]; ok && f.PF == "" {
			addresses = append(addresses, e.Name())
		}
	}
	slices.Sort(addresses)
	for _, address := range addresses {
		if err := add(address); err != nil {
			return nil, err
		}
		// In the order of their numbers, which is not always that of places.
		for i := range maxVFs {
			target, err := fs.ReadLink(root, path.Join(devicesDir, address, "virtfn"+strconv.Itoa(i)))
			if err != nil {
				break
			}
			if err := add(path.Base(target)); err != nil {
				return nil, err
			}
		}
	}
	// Virtual functions whose physical one does not name them.
	for _, e := range entries {
		if _, ok := all[e.Name()]; ok {
			if err := add(e.Name()); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

func function(root fs.FS, a pci.Address) (pcitest.Function, error) {
	dir := path.Join(devicesDir, a.String())
	text := func(name string) string {
		data, _ := fs.ReadFile(root, path.Join(dir, name))
		return strings.TrimRight(string(data), "\n")
	}
	hex := func(name string, bits int) uint64 {
		n, _ := strconv.ParseUint(strings.TrimPrefix(text(name), "0x"), 16, bits)
		return n
	}
	number := func(name string) int {
		n, _ := strconv.ParseUint(text(name), 10, 16)
		return int(n)
	}
	link := func(name string) string {
		target, err := fs.ReadLink(root, path.Join(dir, name))
		if err != nil {
			return ""
		}
		return path.Base(target)
	}
	f := pcitest.Function{
		Address: a.String(), Vendor: uint16(hex("vendor", 16)), Device: uint16(hex("device", 16)),
		SubVendor: uint16(hex("subsystem_vendor", 16)), SubDevice: uint16(hex("subsystem_device", 16)),
		Class: uint32(hex("class", 24)), Revision: uint8(hex("revision", 8)), Driver: link("driver"), IOMMUGroup: -1, NUMANode: -1,
		Reset: text("reset_method"), Speed: text("current_link_speed"), MaxSpeed: text("max_link_speed"), Width: number("current_link_width"), MaxWidth: number("max_link_width"),
		TotalVFs: number("sriov_totalvfs"), BootVGA: text("boot_vga") == "1", Files: map[string]string{},
	}
	if text("vendor") == "" {
		return f, errors.New("has no vendor")
	}
	if f.DriverOverride = text("driver_override"); f.DriverOverride == "(null)" {
		f.DriverOverride = ""
	}
	if n, err := strconv.Atoi(text("numa_node")); err == nil {
		f.NUMANode = n
	}
	if n, err := strconv.ParseUint(link("iommu_group"), 10, 16); err == nil {
		f.IOMMUGroup = int(n)
	}
	for line := range strings.Lines(text("resource")) {
		f.Resource = append(f.Resource, strings.TrimSpace(line))
	}
	if data, err := fs.ReadFile(root, path.Join(dir, "config")); err == nil {
		f.Config = data
	}
	if pf, err := pci.ParseAddress(link("physfn")); err == nil {
		f.PF = pf.String()
	}
	target, err := fs.ReadLink(root, dir)
	if err != nil {
		return f, errors.New("is nowhere in the tree of buses")
	}
	if parent, err := pci.ParseAddress(path.Base(path.Dir(target))); err == nil {
		f.Parent = parent.String()
	}
	for _, name := range []string{"local_cpulist", "local_cpus", "removable", "mem_info_vram_total", "irq", "msi_bus"} {
		if data, err := fs.ReadFile(root, path.Join(dir, name)); err == nil {
			f.Files[name] = string(data)
		}
	}
	return f, nil
}
