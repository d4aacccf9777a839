package isolation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

// Kernel is the source on a host whose kernel controls the IOMMU. It reads files below
// Root.
type Kernel struct{ Root fs.FS }

// Xen is the source in a control domain. It reads files below Root.
type Xen struct {
	Root       fs.FS
	Hypervisor xen.Hypervisor
}

var _, _ Source = Kernel{}, Xen{}

const groupsDir = "sys/kernel/iommu_groups"

// Facts returns the card's IOMMU groups.
func (k Kernel) Facts(_ context.Context, card *pci.Card) (Facts, error) {
	f := Facts{Source: "the kernel's IOMMU groups", IOMMU: xen.On, Neighbours: neighbours(k.Root, card.Shared)}
	groups := map[int][]pci.Address{}
	for _, d := range card.Functions {
		if d.IOMMUGroup < 0 {
			f.IOMMU = xen.Off
			continue
		}
		groups[d.IOMMUGroup] = append(groups[d.IOMMUGroup], d.Address)
	}
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		dir := path.Join(groupsDir, strconv.Itoa(group))
		// A group without an IOMMU, which the kernel makes for VFIO's no-IOMMU mode.
		if name, err := fs.ReadFile(k.Root, path.Join(dir, "name")); err == nil && strings.TrimSpace(string(name)) == "vfio-noiommu" {
			f.IOMMU = xen.Off
		}
		if regions, err := fs.ReadFile(k.Root, path.Join(dir, "reserved_regions")); err == nil {
			f.Reserved = append(f.Reserved, parseRegions(regions, groups[group])...)
		}
	}
	return f, nil
}

// parseRegions parses lines of start, end and kind. The kind "direct" is an RMRR that the
// devices need permanently.
func parseRegions(data []byte, devices []pci.Address) []xen.Reserved {
	var out []xen.Reserved
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) != 3 || fields[2] != "direct" {
			continue
		}
		start, err1 := strconv.ParseUint(strings.TrimPrefix(fields[0], "0x"), 16, 64)
		end, err2 := strconv.ParseUint(strings.TrimPrefix(fields[1], "0x"), 16, 64)
		if err1 == nil && err2 == nil && start <= end {
			out = append(out, xen.Reserved{Start: start, End: end, Devices: devices})
		}
	}
	return out
}

// Facts asks the hypervisor. The report contains what it does not answer.
func (x Xen) Facts(ctx context.Context, card *pci.Card) (Facts, error) {
	f := Facts{Source: "Xen", Xen: true, Faults: map[pci.Address]int{}}
	if v, err := xen.ReadVersion(x.Root); err == nil {
		f.Source += " " + v.String()
	}
	var err error
	if f.IOMMU, err = x.Hypervisor.IOMMU(ctx); err != nil {
		f.Unanswered = append(f.Unanswered, fmt.Sprintf("Xen did not say whether it has an IOMMU: %v", err))
	}
	own := func(a pci.Address) bool {
		return slices.ContainsFunc(card.Functions, func(d *pci.Device) bool { return d.Address == a })
	}
	for _, d := range card.Functions {
		group, err := x.Hypervisor.Group(ctx, d.Address)
		if err != nil {
			f.Unanswered = append(f.Unanswered, fmt.Sprintf("Xen did not tell the device group of %s: %v", d.Address, err))
			if errors.Is(err, xen.ErrUnsupported) {
				break // it will not answer for the other functions either
			}
			continue
		}
		for _, a := range group {
			if !own(a) && !slices.Contains(f.Group, a) {
				f.Group = append(f.Group, a)
			}
		}
	}
	f.Neighbours = neighbours(x.Root, append(slices.Clone(card.Shared), f.Group...))
	// Bridges above the card are not given to VMs.
	f.Group = slices.DeleteFunc(f.Group, func(a pci.Address) bool { return f.Neighbours[a].Class == pci.ClassBridge })
	text, err := x.Hypervisor.Log(ctx)
	if err != nil {
		f.Unanswered = append(f.Unanswered, fmt.Sprintf("the hypervisor's log could not be read: %v", err))
	}
	log := xen.ParseLog(text)
	f.InterruptRemapping = log.InterruptRemapping
	if f.IOMMU == xen.Unknown {
		f.IOMMU = log.IOMMU
	}
	for _, region := range log.Reserved {
		if slices.ContainsFunc(region.Devices, own) {
			f.Reserved = append(f.Reserved, region)
		}
	}
	for _, refused := range log.Refused {
		if own(refused.Device) {
			f.Refused = append(f.Refused, refused)
		}
	}
	for a, n := range log.Faults {
		if own(a) {
			f.Faults[a] = n
		}
	}
	return f, ctx.Err()
}

// neighbours reads the classes and the drivers of devices.
func neighbours(root fs.FS, devices []pci.Address) map[pci.Address]Neighbour {
	out := map[pci.Address]Neighbour{}
	for _, a := range devices {
		dir := path.Join("sys/bus/pci/devices", a.String())
		var n Neighbour
		if b, err := fs.ReadFile(root, path.Join(dir, "class")); err == nil {
			c, err := strconv.ParseUint(strings.TrimPrefix(strings.TrimSpace(string(b)), "0x"), 16, 32)
			if err == nil {
				n.Class = uint16(c >> 8)
			}
		}
		if link, err := fs.ReadLink(root, path.Join(dir, "driver")); err == nil {
			n.Driver = path.Base(link)
		}
		out[a] = n
	}
	return out
}
