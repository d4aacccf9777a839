package state

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Check returns all violations of the invariants, joined. It reads the whole state, so it
// is for tests and for diagnosis.
func (v *View) Check() error {
	c := &checker{View: v}
	c.hosts()
	c.gpus()
	c.models()
	c.claims()
	c.assignments()
	c.rest()
	return errors.Join(c.errs...)
}

type checker struct {
	*View
	errs []error
}

func (c *checker) want(holds bool, format string, args ...any) {
	if !holds {
		c.errs = append(c.errs, fmt.Errorf(format, args...))
	}
}

func (c *checker) hosts() {
	lowest := uint32(0)
	ids, addresses := map[string]string{}, map[string]string{}
	for h := range c.Hosts() {
		c.want(h.GetState() == stateOf(h), "host %s: state %s, want %s", h.GetName(), h.GetState(), stateOf(h))
		c.want(h.GetProtocol() > 0, "host %s: no protocol", h.GetName())
		if lowest == 0 || h.GetProtocol() < lowest {
			lowest = h.GetProtocol()
		}
		c.want(ids[h.GetId()] == "", "hosts %s and %s: one id %s", ids[h.GetId()], h.GetName(), h.GetId())
		ids[h.GetId()] = h.GetName()
		if a := h.GetAddress(); a != "" {
			c.want(addresses[a] == "", "hosts %s and %s: one address %s", addresses[a], h.GetName(), a)
			addresses[a] = h.GetName()
		}
		c.want(c.HostByID(h.GetId()) == h, "host %s: not found by its id", h.GetName())
		c.revision(kindHost, h.GetName(), h.GetRevision())
	}
	c.want(c.meta.protocol == lowest, "protocol %d, want %d", c.meta.protocol, lowest)
}

func (c *checker) revision(kind clusterv1.Kind, name string, revision uint64) {
	c.want(revision > 0 && revision <= c.Index(), "%s: revision %d at index %d", ref(kind, name), revision, c.Index())
}

func (c *checker) gpus() {
	for g := range c.GPUs() {
		host := c.Host(g.GetHost())
		c.want(g.GetId() == g.GetHost()+"/"+g.GetName(), "GPU %s: named %s of host %s", g.GetId(), g.GetName(), g.GetHost())
		c.want(host != nil || !g.GetPresent(), "GPU %s: present, but its host is not there", g.GetId())
		holders, whole, used := 0, 0, uint64(0)
		profiles := map[string]uint32{}
		for v := range c.VGPUsOfGPU(g.GetId()) {
			holders++
			used += v.GetMemory()
			if v.GetKind() == kindWhole {
				whole++
				c.want(v.GetMemory() == capacity(g), "VGPU %s: %d bytes of %d", v.GetId(), v.GetMemory(), capacity(g))
			}
			if profiled(v.GetKind()) {
				profiles[v.GetProfile()]++
			}
		}
		for x := range c.ReservationsOfGPU(g.GetId()) {
			holders++
			used += reserved(x, g)
			if x.GetMemory() == 0 {
				whole++
			}
		}
		c.want(whole == 0 || holders == 1, "GPU %s: %d hold the whole of it, among %d", g.GetId(), whole, holders)
		c.want(used == g.GetUsedMemory(), "GPU %s: %d bytes used, want %d", g.GetId(), g.GetUsedMemory(), used)
		over := used > capacity(g)
		for name, n := range profiles {
			over = over || n > profileOf(g, name).GetMaxInstances()
		}
		c.want(over == c.over[g.GetId()], "GPU %s: %s: more held than there is: %t, by a report: %t", g.GetId(), c.excess(g), over, c.over[g.GetId()])
		c.want(g.GetPresent() || holders > 0, "GPU %s: neither present nor held", g.GetId())
		derived := shallow(g)
		derive(c.reader, derived, host)
		c.want(g.GetFree() == (holders == 0), "GPU %s: free %t with %d holders", g.GetId(), g.GetFree(), holders)
		c.want(g.GetFreeMemory() == derived.GetFreeMemory(), "GPU %s: %d bytes free, want %d", g.GetId(), g.GetFreeMemory(), derived.GetFreeMemory())
		c.want(g.GetFreeMemory()+used <= capacity(g) || g.GetFreeMemory() == 0, "GPU %s: %d free and %d used of %d", g.GetId(), g.GetFreeMemory(), used, capacity(g))
		c.want(c.Model(g.GetModel()) != nil, "GPU %s: model %q is not there", g.GetId(), g.GetModel())
		c.revision(kindGPU, g.GetId(), g.GetRevision())
	}
	for id := range c.over {
		c.want(c.GPU(id) != nil, "GPU %s: held more than there is, and gone", id)
	}
}

func (c *checker) models() {
	for m := range c.Models() {
		gpus, free, all := uint32(0), uint32(0), 0
		var eldest *clusterv1.GPU
		for g := range c.GPUsOfModel(m.GetName()) {
			all++
			if eldest == nil {
				eldest = g
			}
			if g.GetPresent() {
				gpus++
				if g.GetFree() && usable(g, c.Host(g.GetHost())) {
					free++
				}
			}
			c.want(m.GetMemory() >= capacity(g), "model %s: %d bytes, but GPU %s has %d", m.GetName(), m.GetMemory(), g.GetId(), capacity(g))
		}
		c.want(all > 0 || m.GetRanked(), "model %s: no GPUs and no rank", m.GetName())
		c.want(m.GetGpus() == gpus && m.GetFree() == free, "model %s: %d GPUs, %d free, want %d and %d", m.GetName(), m.GetGpus(), m.GetFree(), gpus, free)
		c.want(m.GetRanked() || m.GetRank() == eldest.GetRank(), "model %s: rank %d, want %d", m.GetName(), m.GetRank(), eldest.GetRank())
		c.revision(kindModel, m.GetName(), m.GetRevision())
	}
}

func (c *checker) claims() {
	for x := range c.Claims() {
		c.revision(kindClaim, x.GetId(), x.GetRevision())
		n := len(x.GetAssignments())
		switch x.GetState() {
		case pending:
			c.want(n == 0, "claim %s: pending with %d assignments", x.GetId(), n)
		case bound:
			c.want(n > 0, "claim %s: bound to nothing", x.GetId())
		case claimReleasing:
			c.want(n > 0, "claim %s: releasing nothing", x.GetId())
		default:
			c.want(false, "claim %s: state %s", x.GetId(), x.GetState())
		}
		c.want(n <= maxGPUsPerClaim, "claim %s: %d assignments", x.GetId(), n)
		seen := map[string]bool{}
		for _, id := range x.GetAssignments() {
			a := c.Assignment(id)
			c.want(!seen[id], "claim %s: assignment %s twice", x.GetId(), id)
			seen[id] = true
			if a == nil {
				c.want(false, "claim %s: assignment %s is not there", x.GetId(), id)
				continue
			}
			c.want(a.GetClaim() == x.GetId(), "claim %s: assignment %s is of claim %s", x.GetId(), id, a.GetClaim())
			c.want(x.GetState() != claimReleasing || a.GetResidence() == releasing, "claim %s: releasing, but assignment %s is %s", x.GetId(), id, a.GetResidence())
		}
	}
}

func (c *checker) assignments() {
	tokens := map[uint64]string{}  // claim by token; all assignments of one entry belong to one claim
	numbers := map[uint64]uint64{} // token by number
	highest := uint64(0)
	groups := map[[2]string]string{} // claim by group and host
	n := 0
	for a := range c.Assignments() {
		n++
		id := a.GetId()
		c.revision(kindAssignment, id, a.GetRevision())
		v, claim, host := c.VGPU(a.GetVgpu()), c.Claim(a.GetClaim()), c.Host(a.GetHost())
		c.want(v.GetAssignment() == id && v.GetGpu() == a.GetGpu() && v.GetHost() == a.GetHost() && v.GetResidence() == a.GetResidence(), "assignment %s and VGPU %s disagree: %v, %v", id, a.GetVgpu(), a, v)
		c.want(v.GetKind() == kindWhole && a.GetMemory() == 0 || v.GetKind() != kindWhole && a.GetMemory() == v.GetMemory(), "assignment %s: %d bytes, its VGPU %d", id, a.GetMemory(), v.GetMemory())
		c.want(c.GPU(a.GetGpu()) != nil, "assignment %s: GPU %s is not there", id, a.GetGpu())
		c.want(host != nil || a.GetResidence() == releasing, "assignment %s: %s on host %s, which is not there", id, a.GetResidence(), a.GetHost())
		listed := 0
		for _, other := range claim.GetAssignments() {
			if other == id {
				listed++
			}
		}
		c.want(listed == 1, "assignment %s: listed %d times by claim %s", id, listed, a.GetClaim())
		c.want(a.GetToken() > 0 && a.GetToken() <= c.Index(), "assignment %s: token %d at index %d", id, a.GetToken(), c.Index())
		if other, is := tokens[a.GetToken()]; is {
			c.want(other == a.GetClaim(), "assignment %s: shares token %d with claim %s", id, a.GetToken(), other)
		}
		tokens[a.GetToken()] = a.GetClaim()
		number, err := strconv.ParseUint(strings.TrimPrefix(id, a.GetClaim()+"."), 10, 64)
		c.want(err == nil && number > 0 && number <= c.meta.assignments, "assignment %s: no number up to %d", id, c.meta.assignments)
		c.want(numbers[number] == 0, "assignment %s: another has its number", id)
		numbers[number] = a.GetToken()
		highest = max(highest, number)
		if group := claim.GetGroup(); group != "" {
			key := [2]string{group, a.GetHost()}
			c.want(groups[key] == "" || groups[key] == claim.GetId(), "claims %s and %s of group %s: both on host %s", groups[key], claim.GetId(), group, a.GetHost())
			groups[key] = claim.GetId()
		}
	}
	last := uint64(0)
	for _, number := range slices.Sorted(maps.Keys(numbers)) {
		c.want(numbers[number] >= last, "assignment number %d: token %d, after %d", number, numbers[number], last)
		last = numbers[number]
	}
	vgpus := 0
	for v := range c.VGPUs() {
		vgpus++
		c.want(c.Assignment(v.GetAssignment()).GetVgpu() == v.GetId(), "VGPU %s: assignment %s is not there or has another", v.GetId(), v.GetAssignment())
		c.want(strings.HasPrefix(v.GetId(), v.GetGpu()+"/"), "VGPU %s: of GPU %s", v.GetId(), v.GetGpu())
		c.revision(clusterv1.Kind_KIND_VGPU, v.GetId(), v.GetRevision())
	}
	c.want(vgpus == n, "%d assignments, %d VGPUs", n, vgpus)
}

func (c *checker) rest() {
	for s := range c.Sessions() {
		c.want(c.Host(s.GetHost()) != nil && strings.HasPrefix(s.GetId(), s.GetHost()+"/"), "session %s: host %s", s.GetId(), s.GetHost())
		c.revision(kindSession, s.GetId(), s.GetRevision())
	}
	for x := range c.Reservations() {
		c.want(c.GPU(x.GetGpu()) != nil, "reservation %s: GPU %s is not there", x.GetId(), x.GetGpu())
		c.want(x.GetToken() > 0 && x.GetToken() == x.GetRevision(), "reservation %s: token %d, revision %d", x.GetId(), x.GetToken(), x.GetRevision())
		c.want(x.GetTtlMs() > 0, "reservation %s: never expires", x.GetId())
		c.revision(kindReservation, x.GetId(), x.GetRevision())
	}
	for l := range c.Links() {
		c.want(l.GetId() == l.GetFrom()+"/"+l.GetTo() && c.Host(l.GetFrom()) != nil && c.Host(l.GetTo()) != nil, "link %s: from %s to %s", l.GetId(), l.GetFrom(), l.GetTo())
		c.revision(kindLink, l.GetId(), l.GetRevision())
	}
	ended := 0
	for m := range c.Migrations() {
		if over(m) {
			ended++
		}
		c.want(m.GetToken() > 0 && m.GetToken() <= c.Index(), "migration %s: token %d", m.GetId(), m.GetToken())
		c.revision(kindMigration, m.GetId(), m.GetRevision())
	}
	c.want(ended == c.ended && ended <= maxEnded, "%d migrations that are over, counted %d", ended, c.ended)
	events, last := 0, ""
	for e := range all[clusterv1.Event](c.reader, tableEvents) {
		events++
		key := eventKey(e.GetIndex(), e.GetPart())
		c.want(key > last && e.GetIndex() <= c.Index(), "event %d.%d: out of order", e.GetIndex(), e.GetPart())
		c.want(e.GetType() != "", "event %d.%d: no type", e.GetIndex(), e.GetPart())
		last = key
	}
	c.want(events == c.events && events <= maxEvents, "%d events, counted %d", events, c.events)
	answers := 0
	for r := range c.recents() {
		answers++
		c.want(proto.Unmarshal(r.GetResult(), &clusterv1.Result{}) == nil, "command %s: its answer cannot be read", r.GetId())
	}
	c.want(answers == c.answers && answers <= maxRecents, "%d answers, counted %d", answers, c.answers)
	for i := range c.Identities() {
		c.want((i.GetRole() == clusterv1.Role_ROLE_HOST) == (i.GetHost() != ""), "identity %s: role %s, host %q", i.GetId(), i.GetRole(), i.GetHost())
	}
}
