package bind

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Names of drivers for Take. Any other driver for VMs may be named as well, such as
// mlx5_vfio_pci.
const (
	// XenPciback is Xen's driver. Its name in sys/bus/pci/drivers is pciback.
	XenPciback = "xen-pciback"
	// VFIOPCI is the kernel's driver for user space.
	VFIOPCI = "vfio-pci"
	// Auto means xen-pciback in a Xen dom0. Elsewhere it means the variant of vfio-pci
	// that the kernel's modules.alias names for the device, or vfio-pci.
	Auto = "auto"
)

const pciback = "pciback"

// kernelName returns a driver's name in sysfs. module returns its name for modprobe.
func kernelName(driver string) string {
	switch driver {
	case XenPciback, "xen_pciback":
		return pciback
	case "vfio_pci":
		return VFIOPCI
	}
	return driver
}

func module(driver string) string {
	if driver == pciback {
		return XenPciback
	}
	return driver
}

// handsOut reports whether a driver is a known driver for VMs.
func handsOut(driver string) bool { return driver == pciback || isVFIO(driver) }

func isVFIO(driver string) bool {
	return driver == VFIOPCI || strings.Contains(driver, "vfio_pci") || strings.Contains(driver, "vfio-pci")
}

// choose returns the driver for a function.
func (b *Binder) choose(driver string, a pci.Address) (string, error) {
	if driver != Auto {
		return kernelName(driver), nil
	}
	if dom0(b.root) {
		return pciback, nil
	}
	name, err := variant(b.root, a)
	if err != nil {
		return "", fmt.Errorf("choose a driver for %s: %w", a, err)
	}
	return name, nil
}

func dom0(root sysfs.Root) bool {
	data, err := root.ReadFile("proc/xen/capabilities")
	return err == nil && bytes.Contains(data, []byte("control_d"))
}

// variant searches the device in the aliases that begin with vfio_pci:. They belong to
// modules with special support for a device, in addition to that of vfio-pci. The alias
// with the fewest wildcards wins.
func variant(root sysfs.Root, a pci.Address) (string, error) {
	alias, err := root.ReadFile(devicePath(a, "modalias"))
	if err != nil {
		return "", err
	}
	rest, ok := strings.CutPrefix(strings.TrimSpace(string(alias)), "pci:")
	if !ok {
		return "", fmt.Errorf("modalias %.80q", alias)
	}
	release, err := root.ReadFile("proc/sys/kernel/osrelease")
	if err != nil {
		return VFIOPCI, nil //nolint:nilerr // a kernel without a name has no modules
	}
	aliases, err := root.ReadFile(path.Join("lib/modules", strings.TrimSpace(string(release)), "modules.alias"))
	if errors.Is(err, fs.ErrNotExist) {
		return VFIOPCI, nil
	} else if err != nil {
		return "", err
	}
	best, wildcards := VFIOPCI, 1<<30
	lines := bufio.NewScanner(bytes.NewReader(aliases))
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 || fields[0] != "alias" || !strings.HasPrefix(fields[1], "vfio_pci:") || !validName(fields[2]) {
			continue
		}
		pattern := strings.TrimPrefix(fields[1], "vfio_pci:")
		if ok, err := path.Match(pattern, rest); err != nil || !ok {
			continue
		}
		if n := strings.Count(pattern, "*"); n < wildcards {
			best, wildcards = fields[2], n
		}
	}
	// The alias of vfio-pci itself matches all devices.
	return kernelName(best), lines.Err()
}
