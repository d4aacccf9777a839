package inventory

import (
	"fmt"
	"slices"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// CUDA is the runtime's name of a GPU that has no OpenCL runtime, but NVIDIA's driver.
const CUDA = "cuda"

// WithDriver adds what NVIDIA's driver has to the GPUs of OpenCL's runtimes. A card that
// both have is one GPU, found by its PCI address or its UUID. A card that only the driver
// has is a GPU of its own, named by its address, as the cluster names it. A warning is
// returned for each card that the driver can't serve.
func WithDriver(gpus []*gpuctlv1.GPU, answer *nvml.Response, cards []*pci.Card, models []config.Model) ([]*gpuctlv1.GPU, []string) {
	var warnings []string
	ids := map[string]*pci.Device{}
	for _, c := range cards {
		for _, d := range c.Functions {
			ids[d.Address.String()] = d
		}
	}
	added := map[*gpuctlv1.GPU]bool{}
	for i := range answer.GetGPUs() {
		n := &answer.GPUs[i]
		address := canonical(n.PCIAddress)
		switch {
		case address == "" || n.UUID == "" || n.Lost:
			continue // its health is reported elsewhere
		case n.MIG != nil && n.MIG.Enabled:
			warnings = append(warnings, fmt.Sprintf("gpu %s is partitioned (MIG): NVIDIA's driver neither suspends nor restores what runs there", address))
			continue
		}
		at := slices.IndexFunc(gpus, func(g *gpuctlv1.GPU) bool { return sameCard(g, address, n.UUID) })
		if at < 0 {
			g := &gpuctlv1.GPU{
				Id: address, Model: strings.TrimSpace(n.Name), Vendor: "NVIDIA Corporation", Type: "gpu", RuntimeName: CUDA,
				Driver: answer.Driver, Limits: &gpuctlv1.Limits{},
			}
			if n.Memory != nil { // CUDA has no other limit
				g.Limits.GlobalMemory, g.Limits.MaxAlloc = *n.Memory, *n.Memory
			}
			gpus, at = append(gpus, g), len(gpus)
		}
		g := gpus[at]
		if added[g] {
			warnings = append(warnings, fmt.Sprintf("gpu %s: NVIDIA's driver lists it twice, at %s too: left out", g.GetId(), address))
			continue
		}
		added[g] = true
		g.Uuid, g.PciAddress = n.UUID, address
		g.DriverGpu = &gpuctlv1.DriverGPU{Uuid: n.UUID, PciAddress: address, Model: n.Name}
		if d := ids[address]; d != nil {
			g.DriverGpu.PciDevice = uint32(d.DeviceID)<<16 | uint32(d.VendorID)
		}
	}
	tellModelsApart(gpus)
	Rank(gpus, models)
	slices.SortFunc(gpus, func(a, b *gpuctlv1.GPU) int { return strings.Compare(a.Id, b.Id) })
	return gpus, warnings
}

// sameCard reports whether a GPU is the card with this address and UUID. OpenCL and NVML
// write UUIDs differently. A GPU with another address is another card, whatever its UUID.
func sameCard(g *gpuctlv1.GPU, address, uuid string) bool {
	if a := canonical(g.GetPciAddress()); a != "" {
		return a == address
	}
	return digits(g.GetUuid()) != "" && digits(g.GetUuid()) == digits(uuid)
}

// canonical returns an address as sysfs writes it, or "" if it is none.
func canonical(address string) string {
	a, err := pci.ParseAddress(address)
	if err != nil {
		return ""
	}
	return a.String()
}

// digits returns the hexadecimal digits of a UUID, or "" if all are zero.
func digits(uuid string) string {
	d := strings.ReplaceAll(strings.TrimPrefix(strings.ToLower(uuid), "gpu-"), "-", "")
	if strings.Trim(d, "0") == "" {
		return ""
	}
	return d
}
