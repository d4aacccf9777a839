package nvml

import (
	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Object returns the GPU in the form of the inventory, without id, host, name, rank and
// isolation group.
func (g *GPU) Object(driver string) *clusterv1.GPU {
	out := &clusterv1.GPU{
		Model: g.Name, Vendor: "NVIDIA Corporation", Type: "gpu", Driver: driver, Uuid: g.UUID, PciAddress: g.PCIAddress, NumaNode: -1,
		Limits: &gpuctlv1.Limits{},
	}
	if g.Memory != nil {
		out.Limits.GlobalMemory = *g.Memory
	}
	if g.NUMANode != nil && *g.NUMANode >= 0 {
		out.NumaNode = int32(*g.NUMANode)
	}
	out.Health, out.HealthReason = g.Health()
	for _, p := range g.Processes {
		out.Processes = append(out.Processes, &clusterv1.Process{Pid: p.PID, Name: p.Name})
	}
	if g.MIG != nil && g.MIG.Enabled {
		for _, p := range g.MIG.Profiles {
			out.Profiles = append(out.Profiles, &clusterv1.Profile{Name: p.Name, Memory: p.Memory, MaxInstances: p.Max})
		}
	}
	return out
}

// Facts returns what changes often of the GPU, under this id.
func (g *GPU) Facts(id string) *clusterv1.GPUFacts {
	out := &clusterv1.GPUFacts{
		Gpu: id, Utilization: g.Utilization, MemoryUtilization: g.MemoryUtilization, UsedMemory: g.UsedMemory,
		Temperature: g.Temperature, Power: g.Power, PowerLimit: g.PowerLimit,
	}
	out.Health, out.HealthReason = g.Health()
	return out
}
