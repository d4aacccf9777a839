package cli

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/size"
)

// column is a column of a kind's table.
type column struct {
	name string
	wide bool // shown only with -o wide
	cell func(proto.Message) string
}

func col[T proto.Message](name string, f func(T) string) column {
	return column{name: name, cell: about(f)}
}

func wide[T proto.Message](name string, f func(T) string) column {
	return column{name: name, wide: true, cell: about(f)}
}

func (a *app) heading(k kind) []string {
	var out []string
	for _, c := range k.columns {
		if !c.wide || a.wide() {
			out = append(out, c.name)
		}
	}
	return out
}

func (a *app) row(k kind, m proto.Message) []string {
	var out []string
	for _, c := range k.columns {
		if !c.wide || a.wide() {
			out = append(out, c.cell(m))
		}
	}
	return out
}

func (a *app) hostColumns() []column {
	type T = *clusterv1.Host
	return []column{
		col("HOST", T.GetName), col("STATE", hostState), col("ADDRESS", T.GetAddress), col("HYPERVISOR", T.GetHypervisor),
		col("CPUS", func(h T) string { return strconv.Itoa(int(h.GetCpus())) }),
		col("MEMORY", func(h T) string { return bytesOr(h.GetMemory(), "") }),
		col("VERSION", T.GetVersion), col("AGE", func(h T) string { return a.age(h.GetJoinedUnixMs()) }),
		wide("PROTOCOL", func(h T) string { return strconv.Itoa(int(h.GetProtocol())) }),
		wide("NUMA", func(h T) string { return strconv.Itoa(int(h.GetNumaNodes())) }),
		wide("NICS", func(h T) string {
			var all []string
			for _, n := range h.GetNics() {
				all = append(all, strings.TrimSpace(n.GetName()+" "+bits(n.GetSpeed())))
			}
			return strings.Join(all, ", ")
		}),
		wide("LABELS", func(h T) string { return labels(h.GetLabels()) }), wide("ID", T.GetId),
	}
}

func hostState(h *clusterv1.Host) string {
	state := view.Word(h.GetState())
	if m := h.GetMessage(); m != "" {
		state += " (" + m + ")"
	}
	return state
}

func (a *app) gpuColumns() []column {
	type T = *clusterv1.GPU
	return []column{
		col("GPU", T.GetId), col("MODEL", func(g T) string { return a.cut(g.GetModel(), 40) }), col("TYPE", T.GetType), col("RUNTIME", T.GetRuntime),
		col("KINDS", func(g T) string { return strings.Join(g.GetKinds(), ",") }),
		col("MEMORY", func(g T) string { return bytesOr(g.GetLimits().GetGlobalMemory(), "") }),
		col("FREE", func(g T) string { return size.Format(g.GetFreeMemory()) }),
		col("RANK", func(g T) string { return strconv.Itoa(int(g.GetRank())) }), col("STATE", clusterGPUState),
		wide("VENDOR", T.GetVendor), wide("DRIVER", T.GetDriver), wide("PCI", T.GetPciAddress),
		wide("NUMA", func(g T) string { return numa(g.GetNumaNode()) }), wide("GROUP", T.GetIsolationGroup),
		wide("PROFILES", func(g T) string {
			var all []string
			for _, p := range g.GetProfiles() {
				all = append(all, p.GetName())
			}
			return strings.Join(all, ",")
		}),
		wide("UUID", T.GetUuid),
	}
}

// clusterGPUState returns in words whether a GPU is available, and why not.
func clusterGPUState(g *clusterv1.GPU) string {
	var all []string
	add := func(is bool, state, reason string) {
		if is && reason != "" {
			state += " (" + reason + ")"
		}
		if is {
			all = append(all, state)
		}
	}
	add(!g.GetPresent(), "gone", "")
	add(g.GetHealth() == clusterv1.Health_HEALTH_FAILED, "failed", g.GetHealthReason())
	add(g.GetHealth() == clusterv1.Health_HEALTH_DEGRADED, "degraded", g.GetHealthReason())
	add(g.GetCordoned(), "cordoned", g.GetCordonReason())
	add(g.GetFree() && len(all) == 0, "free", "")
	add(!g.GetFree(), "in use", "")
	if n := len(g.GetProcesses()); n > 0 {
		all = append(all, plural(n, "process", "processes")+" beside")
	}
	return strings.Join(all, ", ")
}

func (a *app) modelColumns() []column {
	type T = *clusterv1.Model
	return []column{
		col("MODEL", T.GetName), col("VENDOR", T.GetVendor), col("RANK", func(m T) string { return strconv.Itoa(int(m.GetRank())) }),
		col("MEMORY", func(m T) string { return bytesOr(m.GetMemory(), "") }), col("GPUS", func(m T) string { return strconv.Itoa(int(m.GetGpus())) }),
		col("FREE", func(m T) string { return strconv.Itoa(int(m.GetFree())) }),
		wide("RANKED BY", func(m T) string {
			if m.GetRanked() {
				return "operator"
			}
			return "hosts"
		}),
		wide("UNITS", func(m T) string { return strconv.Itoa(int(m.GetLimits().GetComputeUnits())) }),
	}
}

func (a *app) vgpuColumns() []column {
	type T = *clusterv1.VGPU
	return []column{
		col("VGPU", T.GetId), col("KIND", func(v T) string { return view.Word(v.GetKind()) }), col("GPU", T.GetGpu),
		col("MEMORY", func(v T) string { return bytesOr(v.GetMemory(), "") }), col("RESIDENCE", func(v T) string { return view.Word(v.GetResidence()) }),
		col("ASSIGNMENT", T.GetAssignment), wide("HOST", T.GetHost), wide("PROFILE", T.GetProfile),
	}
}

func (a *app) claimColumns() []column {
	type T = *clusterv1.Claim
	return []column{
		col("CLAIM", T.GetId), col("STATE", claimState), col("HOLDER", func(c T) string { return a.cut(c.GetHolder(), 32) }),
		col("NEEDS", claimNeeds), col("POLICY", func(c T) string { return view.Word(c.GetPolicy()) }), col("OWNER", T.GetOwner),
		col("AGE", func(c T) string { return a.age(c.GetCreatedUnixMs()) }),
		wide("GPU", T.GetExpr), wide("HOST", T.GetHost), wide("GROUP", T.GetGroup),
		wide("ASSIGNMENTS", func(c T) string { return strings.Join(c.GetAssignments(), ",") }),
		wide("LABELS", func(c T) string { return labels(c.GetLabels()) }),
	}
}

func claimState(c *clusterv1.Claim) string {
	state := view.Word(c.GetState())
	if m := c.GetMessage(); m != "" {
		state += " (" + m + ")"
	}
	return state
}

func claimNeeds(c *clusterv1.Claim) string {
	needs := "whole"
	if n := c.GetMinMemory(); n > 0 {
		needs = size.Format(n)
	}
	if n := c.GetCount(); n > 1 {
		needs = fmt.Sprintf("%d × %s", n, needs)
	}
	return needs
}

func (a *app) assignmentColumns() []column {
	type T = *clusterv1.Assignment
	return []column{
		col("ASSIGNMENT", T.GetId), col("CLAIM", T.GetClaim), col("GPU", T.GetGpu), col("HOST", T.GetHost),
		col("MEMORY", func(s T) string { return bytesOr(s.GetMemory(), "whole") }), col("RESIDENCE", func(s T) string { return view.Word(s.GetResidence()) }),
		col("AGE", func(s T) string { return a.age(s.GetCreatedUnixMs()) }),
		wide("TOKEN", func(s T) string { return strconv.FormatUint(s.GetToken(), 10) }), wide("VGPU", T.GetVgpu),
	}
}

func (a *app) sessionColumns() []column {
	type T = *clusterv1.Session
	return []column{
		col("SESSION", T.GetId), col("PID", func(s T) string { return strconv.Itoa(int(s.GetPid())) }),
		col("COMMAND", func(s T) string { return a.cut(s.GetCommand(), 32) }),
		col("STATE", func(s T) string {
			state := view.Word(s.GetState())
			if to := s.GetSuspendedTo(); to != "" {
				state += " (" + to + ")"
			}
			return state
		}),
		col("GPUS", func(s T) string { return strings.Join(s.GetGpus(), ",") }), col("MODEL", func(s T) string { return a.cut(s.GetModel(), 32) }),
		col("SWAPS", func(s T) string { return strconv.Itoa(max(0, int(s.GetGeneration())-1)) }),
		col("AGE", func(s T) string { return a.age(s.GetStartedUnixMs()) }),
		wide("ENGINE", T.GetEngine), wide("CLAIM", T.GetClaim), wide("HOST", T.GetHost), wide("MESSAGE", T.GetMessage),
	}
}

func (a *app) reservationColumns() []column {
	type T = *clusterv1.Reservation
	return []column{
		col("RESERVATION", T.GetId), col("OWNER", T.GetOwner), col("GPU", T.GetGpu), col("MEMORY", func(r T) string { return bytesOr(r.GetMemory(), "whole") }),
		col("KEPT FOR", func(r T) string { return (time.Duration(r.GetTtlMs()) * time.Millisecond).String() }),
		wide("HOST", T.GetHost), wide("TOKEN", func(r T) string { return strconv.FormatUint(r.GetToken(), 10) }),
	}
}

func (a *app) linkColumns() []column {
	type T = *clusterv1.Link
	last := func(ns func(T) int64) func(T) string {
		return func(l T) string {
			if l.GetMoves()+l.GetBackMoves() == 0 {
				return "-"
			}
			return duration(ns(l))
		}
	}
	return []column{
		col("FROM", T.GetFrom), col("TO", T.GetTo), col("ROUND TRIP", linkRTT), col("RATE", linkRate), col("MOVES", func(l T) string { return strconv.FormatUint(uint64(l.GetMoves()+l.GetBackMoves()), 10) }),
		col("PREDICTED DOWNTIME", last(T.GetPredictedStopNs)), col("DOWNTIME", last(T.GetStoppedNs)),
		wide("MEASURED", func(l T) string { return strconv.FormatUint(uint64(l.GetSamples()), 10) + " times" }),
	}
}

func linkRTT(l *clusterv1.Link) string {
	if l.GetSamples() == 0 {
		return "not measured yet"
	}
	return duration(l.GetRttNs())
}

func linkRate(l *clusterv1.Link) string {
	if l.GetSamples() == 0 {
		return "not measured yet"
	}
	return size.Format(l.GetRate()) + "/s"
}

// cut shortens a text, unless a wide table was requested.
func (a *app) cut(s string, n int) string {
	if a.wide() {
		return s
	}
	return cut(s, n)
}

// age returns the time since a moment, in one unit. It is never negative, although clocks
// may differ.
func (a *app) age(unixMs int64) string {
	if unixMs == 0 {
		return ""
	}
	return span(a.now().Sub(time.UnixMilli(unixMs)))
}

func span(d time.Duration) string {
	switch d = max(0, d); {
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", int(d.Hours()))
	}
	return fmt.Sprintf("%d d", int(d.Hours()/24))
}

func labels(m map[string]string) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		all = append(all, k+"="+m[k])
	}
	return strings.Join(all, ",")
}

// bits formats a link's speed.
func bits(n uint64) string {
	switch {
	case n == 0:
		return ""
	case n >= 1e9:
		return strconv.FormatFloat(float64(n)/1e9, 'f', -1, 64) + " Gb/s"
	}
	return strconv.FormatFloat(float64(n)/1e6, 'f', -1, 64) + " Mb/s"
}

func numa(node int32) string {
	if node < 0 {
		return ""
	}
	return strconv.Itoa(int(node))
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
