package capture

import (
	"context"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
)

const (
	pciDevices = "sys/bus/pci/devices"
	pciDrivers = "sys/bus/pci/drivers"
	maxNames   = 16 << 20 // largest size of pci.ids and modules.alias, in bytes
)

func pciAttributes() []string {
	return []string{
		"aer_dev_correctable", "aer_dev_fatal", "aer_dev_nonfatal", "ari_enabled", "boot_vga", "broken_parity_status", "class", "config",
		"consistent_dma_mask_bits", "current_link_speed", "current_link_width", "d3cold_allowed", "device", "dma_mask_bits", "driver_override", "enable",
		"irq", "local_cpulist", "local_cpus", "max_link_speed", "max_link_width", "mem_info_vram_total", "modalias", "msi_bus", "numa_node", "power_state",
		"removable", "reset_method", "resource", "revision", "secondary_bus_number", "sriov_drivers_autoprobe", "sriov_numvfs", "sriov_offset",
		"sriov_stride", "sriov_totalvfs", "sriov_vf_device", "sriov_vf_total_msix", "subordinate_bus_number", "subsystem_device", "subsystem_vendor", "vendor",
		"power/control", "power/runtime_status", "power/runtime_enabled", "power/wakeup",
		"nvidia/creatable_vgpu_types", "nvidia/current_vgpu_type", "nvidia/placement_id", "nvidia/vgpu_params", "nvidia/homogeneous_vgpus", "nvidia/creatable_homogeneous_vgpu_types",
	}
}

func pciLinks() []string { return []string{"driver", "iommu", "iommu_group", "physfn", "subsystem"} }

// host reads all files.
func (c *collector) host(ctx context.Context) {
	for _, part := range []func(){c.facts, c.pci, c.drivers, c.groups, c.mediated, c.classes, c.modules, c.system, c.config, c.names} {
		if ctx.Err() != nil {
			return
		}
		part()
	}
}

// facts reads files about the kernel and the hypervisor.
func (c *collector) facts() {
	for _, name := range []string{
		"cmdline", "version", "modules", "meminfo", "loadavg", "iomem", "swaps", "filesystems", "sys/kernel/osrelease", "sys/kernel/hostname", "xen/capabilities", "xen/balloon",
	} {
		c.file("proc/" + name)
	}
	c.fileUpTo("proc/cpuinfo", maxFile, func(line string) bool { return !strings.HasPrefix(line, "Serial") })
	for _, name := range []string{
		"type", "guest_type", "uuid", "version/major", "version/minor", "version/extra", "properties/capabilities", "properties/changeset", "properties/features",
		"properties/pagesize", "properties/virtual_start", "compilation/compiler",
	} {
		c.file("sys/hypervisor/" + name)
	}
	c.xen = strings.TrimSpace(string(c.files["sys/hypervisor/type"])) == "xen"
}

func (c *collector) pci() {
	c.file("sys/bus/pci/drivers_autoprobe")
	for _, e := range c.list(pciDevices) {
		if !isAddress(e.Name()) {
			continue
		}
		dir := c.link(path.Join(pciDevices, e.Name()))
		if dir == "" || !strings.HasPrefix(dir, "sys/devices/") {
			continue
		}
		for _, name := range pciAttributes() {
			c.file(path.Join(dir, name))
		}
		for _, name := range pciLinks() {
			c.link(path.Join(dir, name))
		}
		class := strings.TrimSpace(string(c.files[path.Join(dir, "class")]))
		if strings.HasPrefix(class, "0x03") || strings.HasPrefix(class, "0x12") {
			c.gpus = append(c.gpus, e.Name())
		}
		for _, name := range []string{"vendor", "subsystem_vendor"} {
			c.wanted[strings.TrimPrefix(strings.TrimSpace(string(c.files[path.Join(dir, name)])), "0x")] = true
		}
		for _, sub := range c.list(dir) {
			name := sub.Name()
			switch {
			case strings.HasPrefix(name, "virtfn"):
				c.link(path.Join(dir, name))
			case name == "mdev_supported_types":
				c.mdevTypes(path.Join(dir, name))
			case strings.HasPrefix(name, "net"), name == "drm", name == "vfio-dev", name == "sound", name == "infiniband":
				// The names of these folders show who uses the device.
				for _, user := range c.list(path.Join(dir, name)) {
					c.file(path.Join(dir, name, user.Name(), "dev"))
					c.link(path.Join(dir, name, user.Name(), "device"))
				}
			}
		}
	}
}

func (c *collector) mdevTypes(dir string) {
	for _, t := range c.list(dir) {
		for _, name := range []string{"name", "available_instances", "device_api", "description"} {
			c.file(path.Join(dir, t.Name(), name))
		}
		for _, d := range c.list(path.Join(dir, t.Name(), "devices")) {
			c.link(path.Join(dir, t.Name(), "devices", d.Name()))
		}
	}
}

func (c *collector) drivers() {
	for _, d := range c.list(pciDrivers) {
		dir := path.Join(pciDrivers, d.Name())
		c.link(path.Join(dir, "module"))
		for _, e := range c.list(dir) {
			if isAddress(e.Name()) {
				c.link(path.Join(dir, e.Name()))
			}
		}
		for _, name := range []string{"slots", "irq_handlers", "permissive", "quirks", "allow_interrupt_control"} { // xen-pciback
			c.file(path.Join(dir, name))
		}
	}
}

func (c *collector) groups() {
	const dir = "sys/kernel/iommu_groups"
	for _, g := range c.list(dir) {
		group := path.Join(dir, g.Name())
		for _, name := range []string{"type", "name", "reserved_regions"} {
			c.file(path.Join(group, name))
		}
		for _, d := range c.list(path.Join(group, "devices")) {
			c.link(path.Join(group, "devices", d.Name()))
		}
	}
}

func (c *collector) mediated() {
	for _, e := range c.list("sys/bus/mdev/devices") {
		if dir := c.link(path.Join("sys/bus/mdev/devices", e.Name())); strings.HasPrefix(dir, "sys/devices/") {
			c.link(path.Join(dir, "mdev_type"))
			c.link(path.Join(dir, "iommu_group"))
			c.link(path.Join(dir, "driver"))
		}
	}
}

// classes reads the links to devices of some classes, with a few files of each.
func (c *collector) classes() {
	for class, names := range map[string][]string{
		"iommu": nil, "mdev_bus": nil, "drm": nil, "vfio": nil, "vfio-dev": nil,
		"graphics":  {"name", "fbcondev"},
		"vtconsole": {"name", "bind"},
		"net":       {"speed", "duplex", "mtu", "operstate", "carrier", "carrier_changes", "flags", "type", "bonding/mode", "bonding/slaves", "bonding/active_slave"},
	} {
		dir := path.Join("sys/class", class)
		for _, e := range c.list(dir) {
			device := c.link(path.Join(dir, e.Name()))
			if !strings.HasPrefix(device, "sys/devices/") {
				continue
			}
			c.link(path.Join(device, "device"))
			for _, name := range names {
				c.file(path.Join(device, name))
			}
			if class != "net" {
				continue
			}
			for _, l := range c.list(device) {
				if strings.HasPrefix(l.Name(), "lower_") || strings.HasPrefix(l.Name(), "upper_") || l.Name() == "master" {
					c.link(path.Join(device, l.Name()))
				}
			}
		}
	}
}

// modules reads the modules that matter for passthrough.
func (c *collector) modules() {
	matters := regexp.MustCompile(`^(vfio|xen|pciback|nvidia|nvgrace|nouveau|amdgpu|radeon|i915|xe$|mgag|ast$|bochs|virtio_gpu|mlx5|kvm|mdev|drm|snd_hda|iommu|intel_iommu|amd_iommu|pci)`)
	for _, e := range c.list("sys/module") {
		dir := path.Join("sys/module", e.Name())
		if !matters.MatchString(e.Name()) {
			continue
		}
		for _, name := range []string{"version", "initstate", "refcnt", "srcversion"} {
			c.file(path.Join(dir, name))
		}
		for _, p := range c.list(path.Join(dir, "parameters")) {
			c.file(path.Join(dir, "parameters", p.Name()))
		}
	}
}

func (c *collector) system() {
	const dir = "sys/devices/system"
	for _, name := range []string{"cpu/online", "cpu/possible", "cpu/present", "node/online", "node/possible"} {
		c.file(path.Join(dir, name))
	}
	for _, e := range c.list(path.Join(dir, "node")) {
		if strings.HasPrefix(e.Name(), "node") {
			for _, name := range []string{"cpulist", "distance", "meminfo"} {
				c.file(path.Join(dir, "node", e.Name(), name))
			}
		}
	}
	c.file("sys/class/dmi/id/sys_vendor")
	c.file("sys/class/dmi/id/product_name")
	c.file("sys/class/dmi/id/board_name")
	c.file("sys/class/dmi/id/bios_version")
}

func (c *collector) config() {
	for _, name := range []string{"etc/gpuctl/hostd.yaml", "etc/gpuctl/hook.yaml", "etc/debian_version", "etc/os-release"} {
		c.file(name)
	}
	for _, dir := range []string{"etc/modprobe.d", "etc/modules-load.d"} {
		for _, e := range c.list(dir) {
			if strings.HasSuffix(e.Name(), ".conf") {
				c.file(path.Join(dir, e.Name()))
			}
		}
	}
	if release := strings.TrimSpace(string(c.files["proc/sys/kernel/osrelease"])); release != "" && fs.ValidPath(release) {
		// The VFIO drivers for each device.
		c.fileUpTo(path.Join("lib/modules", release, "modules.alias"), maxNames, func(line string) bool { return strings.HasPrefix(line, "alias vfio_pci:") })
	}
}

// names reads the names of the vendors that occur.
func (c *collector) names() {
	if len(c.gpus) == 0 {
		return
	}
	for _, name := range []string{"usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids", "var/lib/pciutils/pci.ids", "usr/share/pci.ids"} {
		ours, classes := false, false
		data := c.fileUpTo(name, maxNames, func(line string) bool {
			switch {
			case line[0] == '#' || line[0] == '\n':
				return false
			case strings.HasPrefix(line, "C "): // the list of classes follows that of vendors
				classes = true
			case line[0] != '\t':
				id, _, _ := strings.Cut(line, " ")
				ours = c.wanted[strings.ToLower(id)]
			}
			return ours && !classes
		})
		if len(data) > 0 {
			return
		}
	}
}

// isAddress reports whether a name is a PCI address as sysfs writes it.
func isAddress(s string) bool {
	domain, rest, ok := strings.Cut(s, ":")
	if !ok || len(domain) < 4 || len(domain) > 8 || len(rest) != 7 || rest[2] != ':' || rest[5] != '.' {
		return false
	}
	return !slices.ContainsFunc([]byte(domain+rest[:2]+rest[3:5]+rest[6:]), func(b byte) bool { return !strings.ContainsRune("0123456789abcdef", rune(b)) })
}
