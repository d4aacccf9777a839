package vgpu

import (
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/catalog"
)

// SliceProfile is a profile of MIG slices, from NVML.
type SliceProfile struct {
	Name   string // such as 1g.10gb
	Memory uint64 // bytes
	Max    uint32 // on an empty GPU
}

// Slices is what NVML reports about a GPU that is partitioned by MIG.
type Slices struct {
	Profiles  []SliceProfile
	Instances []string // names such as "1g.10gb" or "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
}

// MIG returns how many more slices of each profile are possible. Scheduled slices count
// like existing ones. It is an upper bound, because the positions of slices matter, too,
// and only the driver knows them.
func MIG(s Slices, scheduled map[string]uint32) []Profile {
	r := rules{types: map[string]catalog.VGPUType{}}
	for _, p := range s.Profiles {
		r.types[p.Name] = catalog.VGPUType{Name: p.Name, Memory: p.Memory, Max: p.Max, MIG: p.Name}
	}
	existing := map[string]uint32{}
	for _, name := range s.Instances {
		if i := strings.LastIndex(name, "MIG "); i >= 0 {
			name = name[i+len("MIG "):]
		}
		existing[strings.TrimSpace(name)]++
	}
	used := add(existing, scheduled)
	out := make([]Profile, 0, len(s.Profiles))
	for _, p := range s.Profiles {
		v := Profile{Name: p.Name, Kind: Slice, Memory: p.Memory, Max: p.Max, Existing: existing[p.Name], Scheduled: scheduled[p.Name], Apart: "mig"}
		v.Free, v.Why = r.free(r.types[p.Name], used)
		out = append(out, v)
	}
	return out
}

// add adds counts by name.
func add(a, b map[string]uint32) map[string]uint32 {
	out := make(map[string]uint32, len(a)+len(b))
	for name, n := range a {
		out[name] += n
	}
	for name, n := range b {
		if s := out[name] + n; s >= n {
			out[name] = s
		} else {
			out[name] = ^uint32(0)
		}
	}
	return out
}
