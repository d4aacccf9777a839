package placement

import (
	"math"
	"slices"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// The order of candidates: bits of hi. The lower value is better.
const (
	spanBit      = uint64(1) << 63
	scantBit     = uint64(1) << 62 // less memory than the claim prefers
	primaryShift = 30              // 32 bits: policy or verb
	degradedBit  = uint64(1) << 29
	linkShift    = 13 // 16 bits
	awayBit      = uint64(1) << 12
	numaShift    = 4 // 8 bits
	nicBit       = uint64(1) << 3
	kindBits     = uint64(1)<<3 - 1
)

// hostBits returns the part of hi that is the same for all GPUs of a host.
func (r *run) hostBits(h *host) uint64 {
	var hi uint64
	r.atOrigin = len(r.fromHosts) > 0 && r.fromHosts[h.name]
	if r.req.Bytes > 0 {
		hi |= r.linkCost(h) << linkShift
	}
	if r.asking != "" && h.name != r.asking {
		hi |= awayBit
	}
	return hi
}

// first returns hi of a single GPU. remains returns lo.
func (r *run) first(m *member, hostBits uint64) uint64 {
	h, g := m.host, m.gpu
	hi := uint64(r.primary(m))<<primaryShift | hostBits
	if r.want > 0 && m.room < r.want {
		hi |= scantBit
	}
	if g.flags&flagDegraded != 0 {
		hi |= degradedBit
	}
	moves := r.req.Bytes > 0 || r.req.Verb == Migrate
	if moves && h.nicNUMA >= 0 && g.numa >= 0 && g.numa != h.nicNUMA {
		hi |= nicBit
	}
	if r.weighsKinds() {
		hi |= uint64(slices.Index(ways(), m.way())) & kindBits
	}
	return hi
}

// linkCost returns the cost of the link to a host: logarithmic in the time for the bytes.
func (r *run) linkCost(h *host) uint64 {
	if h.name == r.asking {
		return 0
	}
	return r.link(r.speed(h)).cost
}

// primary returns the part of hi that depends on the policy or verb.
func (r *run) primary(m *member) uint32 {
	switch r.req.Verb {
	case Migrate, Resume:
		return r.distance(m)
	case New, Upgrade, Downgrade:
	}
	h, g := m.host, m.gpu
	if g.class.mediated { // behind all hardware, whatever the policy
		return math.MaxUint32
	}
	switch r.policy {
	case clusterv1.Policy_POLICY_PACK:
		if m.kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE {
			return uint32(min(h.free, 1<<10))<<10 | h.unheld
		}
		return untouched(g)<<21 | permille(m.room-m.amount, g.total)<<10 | h.unheld
	case clusterv1.Policy_POLICY_SPREAD:
		return h.held<<10 | permille(g.total-min(g.total, m.room), g.total)
	case clusterv1.Policy_POLICY_CHEAPEST:
		// All have less than preferred: take the highest model.
		if r.want > 0 && m.room < r.want {
			return math.MaxUint32 - g.class.rank
		}
		return g.class.rank
	case clusterv1.Policy_POLICY_BEST, clusterv1.Policy_POLICY_UNSPECIFIED:
	}
	return math.MaxUint32 - g.class.rank
}

// distance is smallest for the same GPU, then for the nearest model; of two, for the
// higher one.
func (r *run) distance(m *member) uint32 {
	if r.atOrigin {
		if _, ok := r.fromIndex[m.gpu.object.GetId()]; ok {
			return 0
		}
	}
	d := 2 * (int64(m.gpu.class.rank) - int64(r.rank))
	if d < 0 {
		d = 1 - d
	}
	return uint32(min(1+d, math.MaxUint32))
}

func untouched(g *gpu) uint32 {
	if g.flags&flagFree != 0 {
		return 1
	}
	return 0
}

func permille(part, of uint64) uint32 {
	if of == 0 {
		return 0
	}
	return uint32(min(1000, float64(part)/float64(of)*1000))
}

// remains returns lo, which decides between candidates with equal hi: for pack and spread
// by the model, then by how little is left unused.
func (r *run) remains(m *member) uint64 {
	h, g := m.host, m.gpu
	var lo uint64
	spread := false
	switch r.policy {
	case clusterv1.Policy_POLICY_PACK:
		lo = uint64(g.class.rank) << 32
	case clusterv1.Policy_POLICY_SPREAD:
		lo = uint64(g.class.rank) << 32
		spread = true
	case clusterv1.Policy_POLICY_BEST, clusterv1.Policy_POLICY_CHEAPEST, clusterv1.Policy_POLICY_UNSPECIFIED:
	}
	switch {
	case spread || m.kept:
		return lo
	case r.want > 0 && m.room < r.want:
		return lo | uint64(1000-permille(m.room, g.total))
	}
	lo |= uint64(min(h.free, 1<<10-1))
	if m.kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE && r.want == 0 {
		return lo
	}
	amount := m.amount
	if m.kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE {
		amount = g.total
	}
	return lo | uint64(permille(amount-min(amount, r.want), g.total))<<22 | uint64(untouched(g))<<21 |
		uint64(permille(m.room-min(m.room, amount), g.total))<<10
}

// numaBits counts the NUMA nodes beyond the first.
func numaBits(members []member) uint64 {
	n := uint64(0)
	for i := 1; i < len(members); i++ {
		if !slices.ContainsFunc(members[:i], func(m member) bool { return m.gpu.numa == members[i].gpu.numa }) {
			n++
		}
	}
	return min(n, 255) << numaShift
}
