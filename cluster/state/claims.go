package state

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const (
	pending        = clusterv1.ClaimState_CLAIM_STATE_PENDING
	bound          = clusterv1.ClaimState_CLAIM_STATE_BOUND
	claimReleasing = clusterv1.ClaimState_CLAIM_STATE_RELEASING

	scheduled = clusterv1.Residence_RESIDENCE_SCHEDULED
	resident  = clusterv1.Residence_RESIDENCE_RESIDENT
	releasing = clusterv1.Residence_RESIDENCE_RELEASING

	kindWhole = clusterv1.VGPUKind_VGPU_KIND_WHOLE

	allReleased = "its assignments have been released" // message of a claim that has lost its last one
)

// WasBound reports whether a pending claim has been bound before. Its message says so: with
// a new field, hosts of different versions would make different states of one log.
func WasBound(c *clusterv1.Claim) bool {
	return c.GetState() == pending && c.GetMessage() == allReleased
}

// needsOf returns a copy of a claim without the fields that the state sets.
func needsOf(c *clusterv1.Claim) *clusterv1.Claim {
	n := shallow(c)
	n.State, n.Message, n.Assignments, n.CreatedUnixMs, n.Revision = 0, "", nil, 0, 0
	return n
}

func (t *tx) putClaim(op *clusterv1.PutClaim) *clusterv1.Result {
	if err := checkClaim(op.GetClaim()); err != nil {
		return result(invalid, "%v", err)
	}
	c := proto.Clone(op.GetClaim()).(*clusterv1.Claim)
	c = needsOf(c)
	if c.GetOwner() == "" {
		c.Owner = t.actor
	}
	if old := t.Claim(c.GetId()); old != nil {
		if !proto.Equal(needsOf(old), c) {
			return result(exists, "claim %s: exists with other needs (%s)", c.GetId(), strings.Join(differences(needsOf(old), c), ", "))
		}
		return t.answer(done(), old)
	}
	c.State, c.CreatedUnixMs = pending, t.now
	if n := len(op.GetChoices()); n > 0 {
		if want := max(int(c.GetCount()), 1); n != want {
			return result(invalid, "claim %s: %d choices for %d GPUs", c.GetId(), n, want)
		}
		t.event(kindClaim, c.GetId(), "ClaimCreated", c.GetHolder())
		reasons, err := t.assign(c, op.GetChoices())
		switch {
		case err != nil:
			return result(invalid, "%v", err)
		case len(reasons) == 0:
			return t.answer(done(), t.Claim(c.GetId()))
		}
		t.rollback()
		c.Message = unmet(reasons)
		return t.wait(c, reasons)
	}
	c.Message = "nothing has been found for it yet"
	return t.wait(c, nil)
}

// wait stores a claim that could not be bound as pending, if it may wait. Otherwise it
// refuses the claim.
func (t *tx) wait(c *clusterv1.Claim, reasons []*gpuctlv1.Reason) *clusterv1.Result {
	r := done()
	r.Reasons = reasons
	if c.GetUnmet() != clusterv1.Unmet_UNMET_WAIT {
		r.Outcome, r.Message = noCapacity, fmt.Sprintf("claim %s: %s", c.GetId(), c.GetMessage())
		return r
	}
	c.State, c.Assignments = pending, nil
	t.put(c)
	t.event(kindClaim, c.GetId(), "ClaimCreated", c.GetHolder())
	t.event(kindClaim, c.GetId(), "ClaimPending", c.GetMessage())
	return t.answer(r, c)
}

func unmet(reasons []*gpuctlv1.Reason) string {
	const most = 4
	var words []string
	for i, r := range reasons {
		if i == most {
			words = append(words, fmt.Sprintf("and %d more reasons", len(reasons)-most))
			break
		}
		words = append(words, r.GetMessage())
	}
	return cut(strings.Join(words, "; "), maxText)
}

// cut shortens a text to at most bytes, without splitting a character.
func cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most-len("…")], "") + "…"
}

// answer adds a claim and its assignments to a result.
func (t *tx) answer(r *clusterv1.Result, c *clusterv1.Claim) *clusterv1.Result {
	r.Claim = c
	for _, id := range c.GetAssignments() {
		if a := t.Assignment(id); a != nil {
			r.Assignments = append(r.Assignments, a)
		}
	}
	return r
}

func (t *tx) assignClaim(op *clusterv1.Assign) *clusterv1.Result {
	old := t.Claim(op.GetClaim())
	if old == nil {
		return result(notFound, "claim %.300q: there is none", op.GetClaim())
	}
	n, want := len(op.GetChoices()), max(int(old.GetCount()), 1)
	switch {
	case n == 0:
		return result(invalid, "claim %s: no choices", old.GetId())
	case old.GetState() == claimReleasing:
		return result(refused, "claim %s: is being released", old.GetId())
	case old.GetState() == pending && n != want:
		return result(invalid, "claim %s: %d choices for %d GPUs", old.GetId(), n, want)
	}
	reasons, err := t.assign(shallow(old), op.GetChoices())
	if err != nil {
		return result(invalid, "%v", err)
	}
	if len(reasons) > 0 {
		r := t.answer(result(noCapacity, "claim %s: %s", old.GetId(), unmet(reasons)), old)
		r.Reasons = reasons
		return r
	}
	r := done()
	r.Claim = t.Claim(old.GetId())
	for _, id := range r.GetClaim().GetAssignments()[len(old.GetAssignments()):] {
		r.Assignments = append(r.Assignments, t.Assignment(id))
	}
	return r
}

// assign binds a claim to all choices. The claim must be the entry's own copy. If it
// returns a reason or an error, the entry must be rolled back.
func (t *tx) assign(c *clusterv1.Claim, choices []*clusterv1.Choice) ([]*gpuctlv1.Reason, error) {
	if n := len(c.GetAssignments()) + len(choices); n > maxGPUsPerClaim {
		return nil, fmt.Errorf("claim %s: %d assignments: at most %d", c.GetId(), n, maxGPUsPerClaim)
	}
	var reasons []*gpuctlv1.Reason
	assignments := slices.Clone(c.GetAssignments())
	for _, choice := range choices {
		kind, err := checkChoice(c.GetId(), choice)
		if err != nil {
			return nil, err
		}
		a, why := t.take(c, choice, kind)
		if len(why) > 0 {
			reasons = append(reasons, why...)
			continue
		}
		assignments = append(assignments, a.GetId())
	}
	if len(reasons) > 0 {
		return reasons, nil
	}
	was := c.GetState()
	c.State, c.Message, c.Assignments = bound, "", assignments
	t.put(c)
	if was == pending {
		about := make([]string, 0, len(choices))
		for _, choice := range choices {
			about = append(about, ref(kindGPU, choice.GetGpu()))
		}
		slices.Sort(about)
		t.event(kindClaim, c.GetId(), "Bound", fmt.Sprintf("to %d GPUs", len(choices)), slices.Compact(about)...)
	}
	return nil, nil
}

// take makes one assignment, or returns why it cannot.
func (t *tx) take(c *clusterv1.Claim, choice *clusterv1.Choice, kind clusterv1.VGPUKind) (*clusterv1.Assignment, []*gpuctlv1.Reason) {
	g := t.gpu(choice.GetGpu())
	if g == nil {
		return nil, []*gpuctlv1.Reason{reason("unknown", "GPU %.300q: there is none", choice.GetGpu())}
	}
	why := obstacles(g.GPU, t.Host(g.GetHost()))
	why = append(why, t.rivals(c, g.GetHost())...)
	amount, profile := choice.GetMemory(), (*clusterv1.Profile)(nil)
	if kind == kindWhole {
		amount = capacity(g.GPU)
	}
	if profiled(kind) {
		profile = profileOf(g.GPU, choice.GetProfile())
		if profile == nil {
			return nil, append(why, reason("profile", "GPU %s: has no profile %.300q", g.GetId(), choice.GetProfile()))
		}
		amount = profile.GetMemory()
	}
	if id := choice.GetReservation(); id != "" {
		x := t.Reservation(id)
		if x == nil || x.GetGpu() != g.GetId() || !t.speaksFor(x.GetOwner(), c.GetId()) {
			return nil, append(why, reason("busy", "GPU %s: reservation %.300q of it is gone or another's", g.GetId(), id))
		}
		t.unreserve(x, "", "")
	}
	if why = append(why, t.room(g.GPU, kind, profile, amount)...); len(why) > 0 {
		return nil, why
	}
	t.assignments++
	a := &clusterv1.Assignment{
		Id: c.GetId() + "." + strconv.FormatUint(t.assignments, 10), Claim: c.GetId(), Gpu: g.GetId(), Host: g.GetHost(),
		Memory: amount, Token: t.index, Residence: scheduled, CreatedUnixMs: t.now,
	}
	if kind == kindWhole {
		a.Memory = 0
	}
	a.Vgpu = t.vgpuID(g.GetId(), kind, choice.GetProfile(), a)
	t.put(&clusterv1.VGPU{
		Id: a.GetVgpu(), Gpu: g.GetId(), Host: g.GetHost(), Kind: kind, Profile: choice.GetProfile(),
		Memory: amount, Residence: scheduled, Assignment: a.GetId(),
	})
	t.put(a)
	g.UsedMemory += amount
	t.event(kindAssignment, a.GetId(), "Assigned", "to "+a.GetVgpu(), t.concerns(a)...)
	return a, nil
}

// concerns returns the objects that an event of an assignment concerns.
func (t *tx) concerns(a *clusterv1.Assignment) []string {
	return []string{ref(kindClaim, a.GetClaim()), ref(kindGPU, a.GetGpu()), ref(kindHost, a.GetHost())}
}

// vgpuID returns a unique id. An assignment's id is never used again. The ids of profiles
// and claims cannot be equal to that of another slice.
func (t *tx) vgpuID(gpu string, kind clusterv1.VGPUKind, profile string, a *clusterv1.Assignment) string {
	id := gpu + "/" + a.GetClaim()
	switch {
	case kind == kindWhole:
		return gpu + "/whole"
	case profiled(kind):
		for n := 0; ; n++ {
			if id = gpu + "/" + profile + "." + strconv.Itoa(n); t.VGPU(id) == nil {
				return id
			}
		}
	}
	for t.VGPU(id) != nil {
		id = gpu + "/" + a.GetId() + strings.Repeat("+", max(0, len(id)-len(gpu)-len(a.GetId())))
	}
	return id
}

// speaksFor reports whether the owner of a reservation is the claim, or a migration of
// it.
func (t *tx) speaksFor(owner, claim string) bool {
	return owner == claim || t.Migration(owner) != nil && t.Migration(owner).GetClaim() == claim
}

// rivals returns a reason if the host has a claim of the same group. A claim whose
// assignment is being released counts until the assignment is gone.
func (t *tx) rivals(c *clusterv1.Claim, host string) []*gpuctlv1.Reason {
	if c.GetGroup() == "" {
		return nil
	}
	for a := range t.AssignmentsOfHost(host) {
		if a.GetClaim() != c.GetId() && t.Claim(a.GetClaim()).GetGroup() == c.GetGroup() {
			return []*gpuctlv1.Reason{reason("group", "host %s: has claim %s of group %s", host, a.GetClaim(), c.GetGroup())}
		}
	}
	return nil
}

func (t *tx) deleteClaim(op *clusterv1.DeleteClaim) *clusterv1.Result {
	old := t.Claim(op.GetClaim())
	switch {
	case old == nil:
		return result(notFound, "claim %.300q: there is none", op.GetClaim())
	case old.GetState() == claimReleasing:
		return t.answer(done(), old)
	}
	for _, id := range old.GetAssignments() {
		if a := t.Assignment(id); a != nil {
			t.release(a, "its claim was deleted")
		}
	}
	c := shallow(old)
	c.State, c.Message = claimReleasing, ""
	if len(c.GetAssignments()) == 0 {
		c.Revision = t.index
		t.forget(old)
		return t.answer(done(), c)
	}
	t.put(c)
	t.event(kindClaim, c.GetId(), "Releasing", fmt.Sprintf("%d assignments", len(c.GetAssignments())))
	return t.answer(done(), c)
}

// forget deletes a claim that has no assignments, and its reservations.
func (t *tx) forget(c *clusterv1.Claim) {
	t.del(c)
	t.event(kindClaim, c.GetId(), "Released", "")
	if t.Migration(c.GetId()) != nil {
		return // a migration has the same id: the reservations may belong to it
	}
	for x := range t.ReservationsOfOwner(c.GetId()) {
		t.unreserve(x, "Unreserved", "its owner is gone")
	}
}

// release marks an assignment as RELEASING.
func (t *tx) release(a *clusterv1.Assignment, why string) {
	if a.GetResidence() == releasing {
		return
	}
	t.reside(a, releasing)
	t.event(kindAssignment, a.GetId(), "Releasing", why, t.concerns(a)...)
}

func (t *tx) reside(a *clusterv1.Assignment, residence clusterv1.Residence) {
	next := shallow(a)
	next.Residence = residence
	t.put(next)
	if v := t.VGPU(a.GetVgpu()); v != nil {
		v = shallow(v)
		v.Residence = residence
		t.put(v)
	}
}

// end deletes an assignment. If it was the claim's last one, a deleted claim is removed,
// and any other claim is pending again.
func (t *tx) end(a *clusterv1.Assignment, typ, why string) {
	t.del(a)
	if v := t.VGPU(a.GetVgpu()); v != nil {
		t.del(v)
		if g := t.gpu(a.GetGpu()); g != nil {
			g.UsedMemory -= min(v.GetMemory(), g.GetUsedMemory())
		}
	}
	t.event(kindAssignment, a.GetId(), typ, why, t.concerns(a)...)
	old := t.Claim(a.GetClaim())
	if old == nil {
		return
	}
	c := shallow(old)
	c.Assignments = slices.DeleteFunc(slices.Clone(old.GetAssignments()), func(id string) bool { return id == a.GetId() })
	switch {
	case len(c.GetAssignments()) > 0:
		t.put(c)
	case c.GetState() == claimReleasing:
		t.put(c)
		t.forget(c)
	default:
		c.State, c.Message = pending, allReleased
		t.put(c)
		t.event(kindClaim, c.GetId(), "ClaimPending", c.GetMessage())
	}
}

func (t *tx) releaseAssignments(op *clusterv1.ReleaseAssignments) *clusterv1.Result {
	t.keep = true
	c := t.Claim(op.GetClaim())
	ids := op.GetAssignments()
	switch {
	case op.GetClaim() == "" && len(ids) == 0:
		return result(invalid, "release: no claim and no assignments")
	case op.GetClaim() != "" && c == nil:
		return result(notFound, "claim %.300q: there is none", op.GetClaim())
	case len(ids) == 0:
		ids = c.GetAssignments()
	}
	if c != nil {
		for _, id := range ids {
			if a := t.Assignment(id); a != nil && a.GetClaim() != c.GetId() {
				return result(invalid, "assignment %s: is of claim %s, not %s", id, a.GetClaim(), c.GetId())
			}
		}
	}
	r := done()
	var missing []string
	for _, id := range ids {
		a := t.Assignment(id)
		if a == nil {
			missing = append(missing, id)
			continue
		}
		t.release(a, "")
	}
	if c != nil {
		t.answer(r, c)
	}
	return skipped(r, notFound, "assignments that there are not: ", missing)
}

// skipped sets the outcome of a command that could not do everything.
func skipped(r *clusterv1.Result, o clusterv1.Outcome, what string, which []string) *clusterv1.Result {
	if len(which) > 0 {
		r.Outcome, r.Message = o, cut(what+strings.Join(which, "; "), maxText)
	}
	return r
}

func (t *tx) confirmAssignments(op *clusterv1.ConfirmAssignments) *clusterv1.Result {
	if t.Host(op.GetHost()) == nil {
		return result(notFound, "host %.300q: there is none", op.GetHost())
	}
	t.keep = true
	r := done()
	var late []string
	for _, said := range op.GetConfirmations() {
		a := t.Assignment(said.GetAssignment())
		switch {
		case a == nil && said.GetGone():
			// It was confirmed before.
		case a == nil:
			late = append(late, fmt.Sprintf("assignment %.300q: there is none", said.GetAssignment()))
		case a.GetHost() != op.GetHost():
			late = append(late, fmt.Sprintf("assignment %s: is on host %s", a.GetId(), a.GetHost()))
		case a.GetToken() != said.GetToken():
			late = append(late, fmt.Sprintf("assignment %s: its token is %d, not %d", a.GetId(), a.GetToken(), said.GetToken()))
		case said.GetGone():
			t.end(a, "Released", "")
		case a.GetResidence() == scheduled:
			t.reside(a, resident)
			t.event(kindAssignment, a.GetId(), "Resident", "", t.concerns(a)...)
		default:
			// It is RESIDENT already, or it is RELEASING: the confirmation was sent
			// before the release.
		}
	}
	return skipped(r, stale, "", late)
}

func (t *tx) cancelAssignments(op *clusterv1.CancelAssignments) *clusterv1.Result {
	if len(op.GetAssignments()) == 0 {
		return result(invalid, "cancel: no assignments")
	}
	var missing []string
	for _, id := range op.GetAssignments() {
		if a := t.Assignment(id); a != nil && t.Host(a.GetHost()) != nil {
			return result(refused, "assignment %s: host %s is there and has to say that it is gone; remove the host by force first", id, a.GetHost())
		}
	}
	t.keep = true
	for _, id := range op.GetAssignments() {
		a := t.Assignment(id)
		if a == nil {
			missing = append(missing, id)
			continue
		}
		t.end(a, "Cancelled", op.GetReason())
	}
	return skipped(done(), notFound, "assignments that there are not: ", missing)
}

func (t *tx) putReservation(op *clusterv1.PutReservation) *clusterv1.Result {
	if err := checkReservation(op.GetReservation()); err != nil {
		return result(invalid, "%v", err)
	}
	x := proto.Clone(op.GetReservation()).(*clusterv1.Reservation)
	old := t.Reservation(x.GetId())
	if old != nil && old.GetOwner() != x.GetOwner() {
		return result(exists, "reservation %s: belongs to %s", x.GetId(), old.GetOwner())
	}
	g := t.gpu(x.GetGpu())
	if g == nil {
		return noRoom(x, reason("unknown", "GPU %.300q: there is none", x.GetGpu()))
	}
	renewal := old.GetGpu() == x.GetGpu() && old.GetMemory() == x.GetMemory()
	if old != nil {
		t.unreserve(old, "", "")
	}
	amount, kind := x.GetMemory(), clusterv1.VGPUKind_VGPU_KIND_SHARE
	if amount == 0 {
		amount, kind = capacity(g.GPU), kindWhole
	}
	if !renewal {
		why := append(obstacles(g.GPU, t.Host(g.GetHost())), t.room(g.GPU, kind, nil, amount)...)
		if len(why) > 0 {
			return noRoom(x, why...)
		}
		t.event(kindReservation, x.GetId(), "Reserved", "for "+x.GetOwner(), reservationAbout(x)...)
	}
	x.Host, x.Token = g.GetHost(), t.index
	t.put(x)
	g.UsedMemory += amount
	r := done()
	r.Reservation = x
	return r
}

func noRoom(x *clusterv1.Reservation, why ...*gpuctlv1.Reason) *clusterv1.Result {
	r := result(noCapacity, "reservation %s: %s", x.GetId(), unmet(why))
	r.Reasons = why
	return r
}

func reservationAbout(x *clusterv1.Reservation) []string {
	return []string{ref(kindGPU, x.GetGpu()), ref(kindClaim, x.GetOwner()), ref(kindMigration, x.GetOwner())}
}

// unreserve deletes a reservation. If typ is empty, there is no event.
func (t *tx) unreserve(x *clusterv1.Reservation, typ, why string) {
	t.del(x)
	if g := t.gpu(x.GetGpu()); g != nil {
		g.UsedMemory -= min(reserved(x, g.GPU), g.GetUsedMemory())
	}
	if typ != "" {
		t.event(kindReservation, x.GetId(), typ, why, reservationAbout(x)...)
	}
}

func (t *tx) deleteReservation(op *clusterv1.DeleteReservation) *clusterv1.Result {
	x := t.Reservation(op.GetId())
	switch {
	case x == nil:
		return result(notFound, "reservation %.300q: there is none", op.GetId())
	case op.GetToken() != 0 && op.GetToken() != x.GetToken():
		r := result(stale, "reservation %s: its token is %d, not %d", x.GetId(), x.GetToken(), op.GetToken())
		r.Reservation = x
		return r
	}
	typ := "Unreserved"
	if op.GetExpired() {
		typ = "ReservationExpired"
	}
	t.unreserve(x, typ, "")
	return done()
}
