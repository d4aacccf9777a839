package state

import (
	"fmt"
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// gpuEdit is a GPU in an entry that changes it, or the assignments on it.
type gpuEdit struct {
	*clusterv1.GPU // stored at the end of the entry if anything has changed
	old            *clusterv1.GPU
	edited         bool // fields have changed that are not derived
}

// gpu returns a GPU for changing it; nil if there is none.
func (t *tx) gpu(id string) *gpuEdit {
	if e := t.gpus[id]; e != nil {
		return e
	}
	old := t.GPU(id)
	if old == nil {
		return nil
	}
	e := &gpuEdit{GPU: shallow(old), old: old}
	t.gpus[id] = e
	return e
}

func capacity(g *clusterv1.GPU) uint64 { return g.GetLimits().GetGlobalMemory() }

// held returns who has a part of a GPU, and whether it is the whole GPU.
func (r reader) held(gpu string) (who string, whole bool) {
	for v := range r.VGPUsOfGPU(gpu) {
		return "assignment " + v.GetAssignment(), v.GetKind() == clusterv1.VGPUKind_VGPU_KIND_WHOLE
	}
	for x := range r.ReservationsOfGPU(gpu) {
		return "reservation " + x.GetId() + " of " + x.GetOwner(), x.GetMemory() == 0
	}
	return "", false
}

// usable reports whether a GPU may get something new.
func usable(g *clusterv1.GPU, h *clusterv1.Host) bool { return len(obstacles(g, h)) == 0 }

// obstacles returns why a GPU gets nothing new, regardless of its room.
func obstacles(g *clusterv1.GPU, h *clusterv1.Host) []*gpuctlv1.Reason {
	var out []*gpuctlv1.Reason
	switch {
	case h == nil:
		out = append(out, reason("unknown", "GPU %s: its host has been removed", g.GetId()))
	case !g.GetPresent():
		out = append(out, reason("unknown", "GPU %s: its host no longer reports it", g.GetId()))
	}
	if h.GetDown() {
		out = append(out, reason("down", "GPU %s: host %s is down%s", g.GetId(), h.GetName(), because(h.GetMessage())))
	}
	if h.GetDraining() {
		out = append(out, reason("draining", "GPU %s: host %s is draining%s", g.GetId(), h.GetName(), because(h.GetMessage())))
	}
	if g.GetCordoned() {
		out = append(out, reason("cordoned", "GPU %s: cordoned%s", g.GetId(), because(g.GetCordonReason())))
	}
	if g.GetHealth() == clusterv1.Health_HEALTH_FAILED {
		out = append(out, reason("health", "GPU %s: failed%s", g.GetId(), because(g.GetHealthReason())))
	}
	return out
}

func because(s string) string {
	if s == "" {
		return ""
	}
	return ": " + s
}

// derive sets the fields of a GPU that depend on assignments and reservations.
func derive(r reader, g *clusterv1.GPU, h *clusterv1.Host) {
	who, whole := r.held(g.GetId())
	g.Free = who == ""
	g.FreeMemory = 0
	if !whole && g.GetUsedMemory() < capacity(g) && usable(g, h) {
		g.FreeMemory = capacity(g) - g.GetUsedMemory()
	}
}

// room returns why an amount of a GPU cannot be assigned; nil if it can.
func (t *tx) room(g *clusterv1.GPU, kind clusterv1.VGPUKind, profile *clusterv1.Profile, amount uint64) []*gpuctlv1.Reason {
	who, whole := t.held(g.GetId())
	if who != "" && (whole || kind == clusterv1.VGPUKind_VGPU_KIND_WHOLE) {
		return []*gpuctlv1.Reason{reason("busy", "GPU %s: held by %s", g.GetId(), who)}
	}
	var out []*gpuctlv1.Reason
	if kind != clusterv1.VGPUKind_VGPU_KIND_WHOLE {
		left := uint64(0)
		if g.GetUsedMemory() < capacity(g) {
			left = capacity(g) - g.GetUsedMemory()
		}
		if amount > left {
			out = append(out, reason("memory", "GPU %s: %d bytes needed, %d of %d left", g.GetId(), amount, left, capacity(g)))
		}
	}
	if profile != nil {
		if n := t.instances(g.GetId(), profile.GetName()); n >= profile.GetMaxInstances() {
			out = append(out, reason("profile", "GPU %s: %d of %d instances of profile %s are taken", g.GetId(), n, profile.GetMaxInstances(), profile.GetName()))
		}
		if other := t.unlike(g, profile); other != "" {
			out = append(out, reason("profile", "GPU %s: profile %s does not go together with %s, which is taken", g.GetId(), profile.GetName(), other))
		}
	}
	return out
}

// unlike returns a profile in use on a GPU that excludes p; empty: none.
func (r reader) unlike(g *clusterv1.GPU, p *clusterv1.Profile) string {
	if p.GetApart() == "" {
		return ""
	}
	for v := range r.VGPUsOfGPU(g.GetId()) {
		if !profiled(v.GetKind()) {
			continue
		}
		if other := profileOf(g, v.GetProfile()); other.GetApart() != "" && other.GetApart() != p.GetApart() {
			return other.GetName()
		}
	}
	return ""
}

// instances returns how many instances of a profile are in use on a GPU.
func (r reader) instances(gpu, profile string) uint32 {
	n := uint32(0)
	for v := range r.VGPUsOfGPU(gpu) {
		if profiled(v.GetKind()) && v.GetProfile() == profile {
			n++
		}
	}
	return n
}

func profileOf(g *clusterv1.GPU, name string) *clusterv1.Profile {
	for _, p := range g.GetProfiles() {
		if p.GetName() == name {
			return p
		}
	}
	return nil
}

// reserved returns how many bytes of a GPU a reservation takes.
func reserved(x *clusterv1.Reservation, g *clusterv1.GPU) uint64 {
	if x.GetMemory() == 0 {
		return capacity(g)
	}
	return x.GetMemory()
}

// resize updates a GPU whose capacity or profiles have changed in its host's report. A
// claim that has the whole GPU now has its new capacity. Assignments beyond the new
// capacity stay.
func (t *tx) resize(g *gpuEdit) {
	used := uint64(0)
	for v := range t.VGPUsOfGPU(g.GetId()) {
		if v.GetKind() == clusterv1.VGPUKind_VGPU_KIND_WHOLE && v.GetMemory() != capacity(g.GPU) {
			v = shallow(v)
			v.Memory = capacity(g.GPU)
			t.put(v)
		}
		used += v.GetMemory()
	}
	for x := range t.ReservationsOfGPU(g.GetId()) {
		used += reserved(x, g.GPU)
	}
	g.UsedMemory = used
	if excess := t.excess(g.GPU); excess != "" && !t.over[g.GetId()] {
		t.setOver(g.GetId(), true)
		t.event(clusterv1.Kind_KIND_GPU, g.GetId(), "Overcommitted", excess, ref(clusterv1.Kind_KIND_HOST, g.GetHost()))
	}
}

// excess returns in words what is assigned beyond a GPU's capacity; empty: nothing.
func (r reader) excess(g *clusterv1.GPU) string {
	if g.GetUsedMemory() > capacity(g) {
		return fmt.Sprintf("%d bytes are held of %d", g.GetUsedMemory(), capacity(g))
	}
	for v := range r.VGPUsOfGPU(g.GetId()) {
		if !profiled(v.GetKind()) {
			continue
		}
		n, most := r.instances(g.GetId(), v.GetProfile()), profileOf(g, v.GetProfile()).GetMaxInstances()
		if n > most {
			return fmt.Sprintf("%d instances of profile %s are held of %d", n, v.GetProfile(), most)
		}
	}
	return ""
}

func (t *tx) setOver(gpu string, is bool) {
	next := maps.Clone(t.over)
	if is {
		if next == nil {
			next = map[string]bool{}
		}
		next[gpu] = true
	} else {
		delete(next, gpu)
	}
	t.over = next
}

// touchHost updates the derived fields of a host's GPUs at the end of the entry.
func (t *tx) touchHost(host string) {
	for g := range t.GPUsOfHost(host) {
		t.gpu(g.GetId())
	}
}

// flush stores the GPUs that have changed, and updates their models.
func (t *tx) flush() {
	counts := map[string]*modelEdit{}
	for _, id := range slices.Sorted(maps.Keys(t.gpus)) {
		e := t.gpus[id]
		host := t.Host(e.GetHost())
		derive(t.reader, e.GPU, host)
		if t.over[id] && t.excess(e.GPU) == "" {
			t.setOver(id, false)
		}
		if e.old != nil {
			count(counts, e.old, t.was.Host(e.old.GetHost()), -1)
		}
		if !e.GetPresent() && e.GetFree() {
			if e.old != nil {
				t.del(e.old)
			}
			t.gpus[id].GPU = nil
			continue
		}
		count(counts, e.GPU, host, 1)
		old := e.old
		if old == nil || e.edited || old.GetUsedMemory() != e.GetUsedMemory() || old.GetFree() != e.GetFree() || old.GetFreeMemory() != e.GetFreeMemory() {
			t.put(e.GPU)
		}
	}
	for name, edit := range sorted(counts) {
		t.updateModel(name, edit)
	}
}

// modelEdit is what an entry changes of a model.
type modelEdit struct {
	gpus, free int
	seen       *clusterv1.GPU // a GPU of the model that exists now
	memory     uint64
}

func count(counts map[string]*modelEdit, g *clusterv1.GPU, h *clusterv1.Host, by int) {
	e := counts[g.GetModel()]
	if e == nil {
		e = &modelEdit{}
		counts[g.GetModel()] = e
	}
	if by > 0 {
		if e.seen == nil {
			e.seen = g
		}
		e.memory = max(e.memory, capacity(g))
	}
	if g.GetPresent() {
		e.gpus += by
		if g.GetFree() && usable(g, h) {
			e.free += by
		}
	}
}

// updateModel stores a model that has GPUs or an operator's rank. Without an operator's
// rank, the rank is that of the first GPU (by id), so that it does not depend on the
// order of reports.
func (t *tx) updateModel(name string, e *modelEdit) {
	if name == "" {
		return
	}
	old := t.Model(name)
	eldest := first[clusterv1.GPU](t.reader, tableGPUs, byModel, name)
	if eldest == nil && !old.GetRanked() {
		if old != nil {
			t.del(old)
		}
		return
	}
	m := &clusterv1.Model{Name: name}
	if old != nil {
		m = shallow(old)
	} else if e.seen != nil {
		m.Vendor, m.Limits = e.seen.GetVendor(), e.seen.GetLimits()
	}
	m.Memory = max(m.GetMemory(), e.memory)
	m.Gpus = uint32(int(m.GetGpus()) + e.gpus)
	m.Free = uint32(int(m.GetFree()) + e.free)
	if !m.GetRanked() {
		m.Rank = eldest.GetRank()
	}
	if old == nil || old.GetMemory() != m.GetMemory() || old.GetGpus() != m.GetGpus() || old.GetFree() != m.GetFree() || old.GetRank() != m.GetRank() {
		t.put(m)
	}
}

// economize makes a GPU share equal parts with another GPU of its model, so that tens of
// thousands of equal descriptions take the memory of one.
func economize(g, like *clusterv1.GPU) {
	if like == nil || like == g {
		return
	}
	same := func(s *string, other string) {
		if *s == other {
			*s = other
		}
	}
	same(&g.Model, like.GetModel())
	same(&g.Vendor, like.GetVendor())
	same(&g.Type, like.GetType())
	same(&g.Runtime, like.GetRuntime())
	same(&g.Platform, like.GetPlatform())
	same(&g.Driver, like.GetDriver())
	same(&g.RuntimeKey, like.GetRuntimeKey())
	if g.Limits != nil && g.Limits != like.GetLimits() && proto.Equal(g.GetLimits(), like.GetLimits()) {
		g.Limits = like.GetLimits()
	}
	if len(g.Kinds) > 0 && slices.Equal(g.GetKinds(), like.GetKinds()) {
		g.Kinds = like.GetKinds()
	}
	if len(g.Profiles) > 0 && slices.EqualFunc(g.GetProfiles(), like.GetProfiles(), func(a, b *clusterv1.Profile) bool { return proto.Equal(a, b) }) {
		g.Profiles = like.GetProfiles()
	}
}
