package placement

import (
	"math"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// cause is a set of reasons why a host or GPU does not fit.
type cause uint32

const (
	causeUnknown cause = 1 << iota
	causeDown
	causeDraining
	causeCordoned
	causeHealth
	causeHost
	causeGroup
	causeLink
	causeRank
	causeLimits
	causeRuntime
	causeMemory
	causeBusy
	causeProfile
	causeIsolation
	causeExpr
	causeHome
	causeLend
	causeCount
	causeKind
	causeService
)

// obstacles returns why a GPU gets nothing new, regardless of its room.
func obstacles(g *clusterv1.GPU, h *clusterv1.Host) cause {
	c := hostObstacles(h)
	if !g.GetPresent() {
		c |= causeUnknown
	}
	if g.GetCordoned() {
		c |= causeCordoned
	}
	if g.GetHealth() == clusterv1.Health_HEALTH_FAILED {
		c |= causeHealth
	}
	return c
}

func hostObstacles(h *clusterv1.Host) cause {
	var c cause
	if h == nil {
		c |= causeUnknown
	}
	if h.GetDown() {
		c |= causeDown
	}
	if h.GetDraining() {
		c |= causeDraining
	}
	return c
}

// judgeHost returns why a host does not fit, regardless of its GPUs.
func (r *run) judgeHost(h *host) cause {
	c := h.causes
	if want := r.claim.GetHost(); want != "" && want != h.name || r.hostsNot[h.name] {
		c |= causeHost
	}
	if home := r.claim.GetHome(); home != "" {
		c |= r.judgeHome(h, home)
	}
	if r.toHost != "" && r.toHost != h.name {
		c |= causeHost
	}
	if len(r.rivals) > 0 {
		if _, ok := r.rivals[h.name]; ok {
			c |= causeGroup
		}
	}
	if r.req.Deadline > 0 && r.transfer(h) > r.req.Deadline {
		c |= causeLink
	}
	return c
}

// judgeHome returns why a host does not fit a claim whose application is on host home.
func (r *run) judgeHome(h *host, home string) cause {
	remote := r.claim.GetRemote()
	if h.name == home {
		if r.req.Where == Elsewhere || remote == clusterv1.Remote_REMOTE_ONLY {
			return causeHome
		}
		return 0
	}
	switch {
	case r.req.Where == AtHome, remote != clusterv1.Remote_REMOTE_ALLOWED && remote != clusterv1.Remote_REMOTE_ONLY:
		return causeHome
	case h.object.GetLendAddress() == "":
		return causeLend
	}
	return 0
}

// speed returns the speed of the link to a host, bits per second; 0: unknown.
func (r *run) speed(h *host) uint64 {
	if r.fromHost == nil {
		return h.speed
	}
	if h.speed == 0 || r.fromHost.speed == 0 {
		return 0
	}
	return min(h.speed, r.fromHost.speed)
}

// transfer returns how long moving the bytes to a host takes; 0: none are moved, or it is
// unknown.
func (r *run) transfer(h *host) time.Duration {
	if r.req.Bytes == 0 || h.name == r.asking {
		return 0
	}
	return r.link(r.speed(h)).time
}

// link returns the cost of a speed. There are few different ones.
func (r *run) link(speed uint64) link {
	for _, l := range r.links {
		if l.speed == speed {
			return l
		}
	}
	// An unknown speed counts as the slowest.
	l := link{speed: speed, cost: 1<<16 - 1}
	if speed > 0 {
		seconds := float64(r.req.Bytes) * 8 / float64(speed)
		l.time = time.Duration(min(seconds*float64(time.Second), math.MaxInt64/2))
		ms := float64(l.time) / float64(time.Millisecond)
		l.cost = min(1<<16-2, uint64(1+2000*math.Log2(1+ms)))
	}
	if len(r.links) < 64 {
		r.links = append(r.links, l)
	}
	return l
}

// judgeClass returns why GPUs of a class do not fit, regardless of their host and room.
func (r *run) judgeClass(c *class) cause {
	if r.judged[c.number] {
		return r.classes[c.number]
	}
	var why cause
	switch {
	case r.req.Verb == Upgrade && c.rank <= r.rank, r.req.Verb == Downgrade && c.rank >= r.rank:
		why |= causeRank
	}
	if len(shortfalls(c.like.GetLimits(), r.claim.GetMinLimits())) > 0 {
		why |= causeLimits
	}
	if r.claim.GetOneRuntime() && c.like.GetRuntimeKey() == "" {
		why |= causeRuntime
	}
	if c.like.GetLimits().GetGlobalMemory() < r.need {
		why |= causeMemory
	}
	if c.mediated && !r.wantsMediated() {
		why |= causeKind
	}
	if r.match != nil && r.perClass && !r.matches(c.like) {
		why |= causeExpr
	}
	r.classes[c.number], r.judged[c.number] = why, true
	return why
}

// borrows reports whether the claim's sessions would reach GPUs of the host over a network:
// those of another host, and of VMs.
func (r *run) borrows(h *host) bool {
	home := r.claim.GetHome()
	return home != "" && home != h.name || r.claim.GetLabels()[LabelVM] != ""
}

// LabelPrefix begins the labels of claims that only hosts set.
const LabelPrefix = "gpuctl."

// LabelVM is the label of a claim by which a VM has a remote GPU: the VM's UUID.
const LabelVM = "gpuctl.vm"

// LabelManagedBy is the label of a claim that a host has made: the host's id.
const LabelManagedBy = "gpuctl.managed-by"

// wantsMediated reports whether the claim may get a part of a mediated GPU: it names a
// profile, or its expression is about kinds. Nobody else gets a software GPU by surprise.
func (r *run) wantsMediated() bool {
	return r.claim.GetProfile() != "" || r.weighsKinds()
}

func (r *run) weighsKinds() bool { return r.query != nil && r.query.Uses("kinds") }

// sliced returns the kind of a part with a profile.
func (c *class) sliced() clusterv1.VGPUKind {
	if c.mediated {
		return clusterv1.VGPUKind_VGPU_KIND_MEDIATED
	}
	return clusterv1.VGPUKind_VGPU_KIND_VENDOR
}

// matches evaluates the expression for a GPU. If it fails, the GPU does not match.
func (r *run) matches(g *clusterv1.GPU) bool {
	r.objectGPU.Gpu = g
	ok, err := r.match(r.object)
	return ok && err == nil
}

// judge returns which part of a GPU the claim would get, or one reason why it does not
// fit. It does not evaluate the expression of single GPUs; suits does, as that takes
// longest. special: the claim has something on the host.
func (r *run) judge(h *host, g *gpu, special bool) (member, cause) {
	m := member{host: h, gpu: g}
	if g.flags&flagBlocked != 0 {
		return m, obstacles(g.object, h.object)
	}
	if why := r.judgeClass(g.class); why != 0 {
		return m, why
	}
	if g.class.service && !r.borrows(h) {
		return m, causeService
	}
	return m, r.judgeRoom(&m, special)
}

// suits reports whether the expression is true for a GPU, the i-th of its host. It
// returns true if the expression was evaluated for the class.
func (r *run) suits(m *member, i int) bool {
	if r.match == nil || r.perClass {
		return true
	}
	if r.rows != nil && r.row >= 0 {
		if ok, known := r.rows.Match(r.row+i, m.gpu.object); known {
			return ok
		}
	}
	return r.matches(m.gpu.object)
}

// judgeRoom finds the part of a GPU that the claim would get.
func (r *run) judgeRoom(m *member, special bool) cause {
	g := m.gpu
	room, free := g.room, g.flags&flagFree != 0
	if special {
		if o := r.own[g.object.GetId()]; o != nil {
			if o.kept != nil && r.keeps(m, o.kept) {
				return 0
			}
			if o.reservation != nil {
				room, free, m.reservation = o.room, o.free, o.reservation.GetId()
			}
		}
	}
	m.room = room
	switch {
	case r.claim.GetProfile() != "":
		for _, p := range g.class.profiles {
			if p.GetName() == r.claim.GetProfile() {
				if p.GetMemory() < r.need {
					return causeMemory
				}
				return r.slice(m, p, room)
			}
		}
		return causeProfile
	case r.need == 0:
		return r.whole(m, free)
	case g.class.like.GetRuntime() != "":
		if room < r.need {
			return causeBusy
		}
		m.kind, m.amount = clusterv1.VGPUKind_VGPU_KIND_SHARE, min(r.want, room)
		return 0
	}
	return r.part(m, room, free)
}

// keeps reports whether the claim's present assignment satisfies its needs, and enters
// it.
func (r *run) keeps(m *member, a *clusterv1.Assignment) bool {
	has := a.GetMemory()
	switch {
	case r.claim.GetProfile() != "" && has == 0, r.need == 0 && r.claim.GetProfile() == "" && has != 0:
		return false
	case has == 0:
		has = m.gpu.total
	}
	if has < r.need {
		return false
	}
	m.kept, m.room, m.amount = true, has, a.GetMemory()
	m.kind = clusterv1.VGPUKind_VGPU_KIND_SHARE
	if a.GetMemory() == 0 {
		m.kind = clusterv1.VGPUKind_VGPU_KIND_WHOLE
	}
	if r.claim.GetProfile() != "" {
		m.kind, m.profile = m.gpu.class.sliced(), r.claim.GetProfile()
	}
	return true
}

func (r *run) whole(m *member, free bool) cause {
	switch {
	case m.gpu.class.mediated:
		return causeKind
	case !free:
		return causeBusy
	case !m.gpu.apart():
		return causeIsolation
	}
	m.kind, m.room = clusterv1.VGPUKind_VGPU_KIND_WHOLE, m.gpu.total
	return 0
}

// unlike returns the name of a profile in use on the GPU that excludes p; empty: none.
func (m *member) unlike(p *clusterv1.Profile) string {
	if p.GetApart() == "" || len(m.host.taken) == 0 {
		return ""
	}
	for _, other := range m.gpu.class.profiles {
		if other.GetApart() != "" && other.GetApart() != p.GetApart() && m.host.taken[instance(m.gpu.object, other.GetName())] > 0 {
			return other.GetName()
		}
	}
	return ""
}

// slice takes a slice of a profile.
func (r *run) slice(m *member, p *clusterv1.Profile, room uint64) cause {
	switch {
	case p.GetMemory() == 0: // without its memory, it cannot be accounted for
		return causeProfile
	case p.GetMemory() > room, m.host.taken[instance(m.gpu.object, p.GetName())] >= p.GetMaxInstances(), m.unlike(p) != "":
		return causeBusy
	}
	m.kind, m.profile, m.amount = m.gpu.class.sliced(), p.GetName(), p.GetMemory()
	return 0
}

// part takes a part of a GPU without a runtime: the smallest slice with all the preferred
// memory, otherwise the largest one that suffices, otherwise the card.
func (r *run) part(m *member, room uint64, free bool) cause {
	var why cause
	var fallback *clusterv1.Profile
	for _, p := range m.gpu.class.profiles {
		if p.GetMemory() < r.need {
			continue
		}
		trial := *m
		if c := r.slice(&trial, p, room); c != 0 {
			why |= c
			continue
		}
		if p.GetMemory() >= r.want {
			*m = trial
			return 0
		}
		fallback = p
	}
	if free && r.whole(m, free) == 0 {
		if fallback == nil || m.gpu.total >= r.want {
			return 0
		}
	}
	if fallback != nil {
		return r.slice(m, fallback, room)
	}
	return r.whole(m, free)
}
