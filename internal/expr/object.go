package expr

import (
	"cmp"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// OfGPU returns the values of the fields that GPU declares.
func OfGPU(g *gpuctlv1.GPU) map[string]any {
	l := g.GetLimits()
	extensions := l.GetExtensions()
	if extensions == nil {
		extensions = []string{}
	}
	return map[string]any{
		"id": g.GetId(), "model": g.GetModel(), "vendor": g.GetVendor(), "type": g.GetType(),
		"memory": Int(l.GetGlobalMemory()), "free_memory": Int(g.GetFreeMemory()), "max_alloc": Int(l.GetMaxAlloc()),
		"local_memory": Int(l.GetLocalMemory()), "compute_units": int64(l.GetComputeUnits()), "clock_mhz": int64(l.GetClockMhz()),
		"max_work_group_size": Int(l.GetMaxWorkGroupSize()), "images": l.GetImages(), "fp64": l.GetFp64(), "free": g.GetFree(),
		"runtime": g.GetRuntimeName(), "driver": g.GetDriver(), "version": l.GetVersion(), "rank": int64(g.GetRank()),
		"pci_address": g.GetPciAddress(), "uuid": g.GetUuid(), "engines": Engines(g), "extensions": extensions,
	}
}

// OfSession returns the values of the fields that Session declares.
func OfSession(s *gpuctlv1.Session) map[string]any {
	u := s.GetUsage()
	return map[string]any{
		"id": s.GetId(), "claim": s.GetClaim(), "pid": int64(s.GetPid()), "command": s.GetCommand(), "state": StateName(s.GetState()),
		"gpu": s.GetTarget().GetGpu(), "model": s.GetTarget().GetModel(), "memory": Int(u.GetMemory()),
		"generation": int64(s.GetGeneration()), "calls": Int(u.GetCalls()), "launches": Int(u.GetLaunches()),
		"suspended_to": s.GetSuspendedTo(), "engine": Engine(s),
	}
}

// StateName returns the name of a session's state for people, such as "running".
func StateName(s gpuctlv1.SessionState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "SESSION_STATE_"))
}

// Engines returns the engines of sessions that can use the GPU.
func Engines(g *gpuctlv1.GPU) []string {
	out := []string{}
	if g.GetRuntime() != nil {
		out = append(out, "portable")
	}
	if g.GetDriverGpu() != nil {
		out = append(out, "driver")
	}
	return out
}

// Engine returns the session's engine. A gpuguest that has only one does not name it.
func Engine(s *gpuctlv1.Session) string {
	return cmp.Or(s.GetEngine(), "portable")
}
