package state

import (
	"bytes"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const (
	kindHost        = clusterv1.Kind_KIND_HOST
	kindGPU         = clusterv1.Kind_KIND_GPU
	kindModel       = clusterv1.Kind_KIND_MODEL
	kindClaim       = clusterv1.Kind_KIND_CLAIM
	kindAssignment  = clusterv1.Kind_KIND_ASSIGNMENT
	kindSession     = clusterv1.Kind_KIND_SESSION
	kindMigration   = clusterv1.Kind_KIND_MIGRATION
	kindReservation = clusterv1.Kind_KIND_RESERVATION
)

func (t *tx) initCluster(op *clusterv1.InitCluster) *clusterv1.Result {
	if err := identifier("cluster id", op.GetClusterId()); err != nil {
		return result(invalid, "%v", err)
	}
	if t.clusterID == op.GetClusterId() && bytes.Equal(t.ca, op.GetCaCertificate()) {
		return done()
	}
	if t.clusterID != "" {
		return result(exists, "cluster %s: exists already", t.clusterID)
	}
	t.clusterID, t.ca = op.GetClusterId(), bytes.Clone(op.GetCaCertificate())
	t.event(0, "", "Initialized", "cluster "+t.clusterID)
	return done()
}

func stateOf(h *clusterv1.Host) clusterv1.HostState {
	switch {
	case h.GetDown():
		return clusterv1.HostState_HOST_STATE_DOWN
	case h.GetDraining():
		return clusterv1.HostState_HOST_STATE_DRAINING
	default:
		return clusterv1.HostState_HOST_STATE_READY
	}
}

// putHost stores a host and updates the cluster's protocol. It reads all hosts only if
// the host's protocol has changed, which is rare.
func (t *tx) putHost(old, h *clusterv1.Host) {
	t.put(h)
	switch {
	case t.protocol == 0 || h.GetProtocol() < t.protocol:
		t.protocol = h.GetProtocol()
	case old != nil && old.GetProtocol() == t.protocol && h.GetProtocol() > t.protocol:
		t.findProtocol()
	}
}

func (t *tx) findProtocol() {
	lowest := uint32(0)
	for h := range t.Hosts() {
		if lowest == 0 || h.GetProtocol() < lowest {
			lowest = h.GetProtocol()
		}
	}
	t.protocol = lowest
}

func (t *tx) reportHost(op *clusterv1.ReportHost) *clusterv1.Result {
	name := op.GetHost().GetName()
	if err := firstOf(checkHost(op.GetHost()), checkGPUs(name, op.GetGpus())); err != nil {
		return result(invalid, "%v", err)
	}
	old := t.Host(name)
	if old != nil && old.GetId() != op.GetHost().GetId() {
		return result(exists, "host %s: the name belongs to the host with id %s, not %s", name, old.GetId(), op.GetHost().GetId())
	}
	if other := t.HostByID(op.GetHost().GetId()); other != nil && other.GetName() != name {
		return result(exists, "host %s: its id %s belongs to host %s", name, other.GetId(), other.GetName())
	}
	if a := op.GetHost().GetAddress(); a != "" {
		if other := t.HostByAddress(a); other != nil && other.GetName() != name {
			return result(refused, "host %s: its address %s belongs to host %s", name, a, other.GetName())
		}
	}
	h := proto.Clone(op.GetHost()).(*clusterv1.Host)
	h.Labels, h.Draining, h.Down, h.Message = old.GetLabels(), old.GetDraining(), old.GetDown(), old.GetMessage()
	h.State, h.JoinedUnixMs, h.Revision = stateOf(h), t.now, old.GetRevision()
	h.Protocol = max(h.GetProtocol(), 1) // a host that does not report it has version 1
	if old != nil {
		h.JoinedUnixMs = old.GetJoinedUnixMs()
	}
	var changes []string
	if old != nil {
		changes = differences(old, h)
	}
	if old == nil || len(changes) > 0 {
		t.putHost(old, h)
	}
	if old == nil {
		about := make([]string, 0, len(op.GetGpus()))
		for _, g := range op.GetGpus() {
			about = append(about, ref(kindGPU, name+"/"+g.GetName()))
		}
		t.event(kindHost, name, "Joined", fmt.Sprintf("%s, with %d GPUs", h.GetAddress(), len(op.GetGpus())), about...)
	} else if len(changes) > 0 {
		t.event(kindHost, name, "Changed", strings.Join(changes, ", "))
	}
	t.reportGPUs(name, op.GetGpus(), old == nil)
	return done()
}

func (t *tx) reportGPUs(host string, gpus []*clusterv1.GPU, joins bool) {
	reported := make(map[string]bool, len(gpus))
	for _, g := range gpus {
		reported[host+"/"+g.GetName()] = true
		t.reportGPU(host, g, joins)
	}
	for g := range t.GPUsOfHost(host) {
		if !reported[g.GetId()] && g.GetPresent() {
			t.loseGPU(g.GetId(), "its host no longer reports it")
		}
	}
}

func (t *tx) reportGPU(host string, said *clusterv1.GPU, joins bool) {
	id := host + "/" + said.GetName()
	old := t.GPU(id)
	g := proto.Clone(said).(*clusterv1.GPU)
	g.Id, g.Host, g.Present = id, host, true
	g.Cordoned, g.CordonReason = old.GetCordoned(), old.GetCordonReason()
	g.UsedMemory, g.FreeMemory, g.Free, g.Revision = old.GetUsedMemory(), old.GetFreeMemory(), old.GetFree(), old.GetRevision()
	if g.GetLimits() == nil {
		g.Limits = &gpuctlv1.Limits{}
	}
	if g.GetHealth() == clusterv1.Health_HEALTH_UNSPECIFIED {
		g.Health = clusterv1.Health_HEALTH_OK
	}
	if old == nil {
		economize(g, first[clusterv1.GPU](t.reader, tableGPUs, byModel, g.GetModel()))
		for _, e := range t.gpus { // GPUs of the same report; any of them will do
			if e.GetModel() == g.GetModel() {
				economize(g, e.GPU)
				break
			}
		}
		t.gpus[id] = &gpuEdit{GPU: g, edited: true}
		if !joins {
			t.event(kindGPU, id, "Joined", g.GetModel(), ref(kindHost, host))
		}
		return
	}
	changes := differences(old, g)
	if len(changes) == 0 {
		return
	}
	economize(g, old)
	economize(g, first[clusterv1.GPU](t.reader, tableGPUs, byModel, g.GetModel()))
	e := &gpuEdit{GPU: g, old: old, edited: true}
	t.gpus[id] = e
	switch {
	case !old.GetPresent():
		t.event(kindGPU, id, "Joined", "it is back: "+g.GetModel(), ref(kindHost, host))
	case old.GetHealth() != g.GetHealth() || old.GetHealthReason() != g.GetHealthReason():
		t.event(kindGPU, id, "Health", word(g.GetHealth(), "HEALTH_")+because(g.GetHealthReason()), ref(kindHost, host))
	default:
		t.event(kindGPU, id, "Changed", strings.Join(changes, ", "), ref(kindHost, host))
	}
	t.resize(e)
}

// loseGPU removes a GPU. If a claim has a part of it, it stays as not present until the
// last assignment is gone.
func (t *tx) loseGPU(id, why string) {
	e := t.gpu(id)
	e.Present, e.edited = false, true
	if who, _ := t.held(id); who != "" {
		why += "; held by " + who
	}
	t.event(kindGPU, id, "Left", why, ref(kindHost, e.GetHost()))
}

func (t *tx) setHostDown(op *clusterv1.SetHostDown) *clusterv1.Result {
	old := t.Host(op.GetHost())
	switch {
	case old == nil:
		return result(notFound, "host %.300q: there is none", op.GetHost())
	case old.GetDown() == op.GetDown():
		return done()
	}
	h := shallow(old)
	h.Down = op.GetDown()
	typ := "Up"
	if h.GetDown() {
		typ = "Down"
	}
	// An operator's message about draining stays during an outage.
	if !h.GetDraining() {
		h.Message = ""
	}
	if h.GetDown() && h.GetMessage() == "" {
		h.Message = op.GetMessage()
	}
	t.setHost(old, h, typ, op.GetMessage())
	return done()
}

func (t *tx) drainHost(op *clusterv1.DrainHost) *clusterv1.Result {
	old := t.Host(op.GetHost())
	switch {
	case old == nil:
		return result(notFound, "host %.300q: there is none", op.GetHost())
	case old.GetDraining() == op.GetDraining() && (!op.GetDraining() || op.GetMessage() == old.GetMessage()):
		return done()
	}
	h := shallow(old)
	h.Draining, h.Message = op.GetDraining(), op.GetMessage()
	typ := "Undrained"
	if h.GetDraining() {
		typ = "Draining"
	} else if !h.GetDown() {
		h.Message = ""
	}
	t.setHost(old, h, typ, op.GetMessage())
	return done()
}

func (t *tx) setHost(old, h *clusterv1.Host, typ, message string) {
	h.State = stateOf(h)
	t.putHost(old, h)
	t.touchHost(h.GetName())
	t.event(kindHost, h.GetName(), typ, message)
}

func (t *tx) labelHost(op *clusterv1.LabelHost) *clusterv1.Result {
	old := t.Host(op.GetHost())
	if old == nil {
		return result(notFound, "host %.300q: there is none", op.GetHost())
	}
	next := map[string]string{}
	for k, v := range old.GetLabels() {
		next[k] = v
	}
	for _, k := range op.GetRemove() {
		delete(next, k)
	}
	var words []string
	for k := range sorted(old.GetLabels()) {
		if _, stays := next[k]; !stays {
			words = append(words, "-"+k)
		}
	}
	for k, v := range sorted(op.GetSet()) {
		next[k] = v
		if was, had := old.GetLabels()[k]; !had || was != v {
			words = append(words, k+"="+v)
		}
	}
	if err := labels("host "+old.GetName(), next); err != nil {
		return result(invalid, "%v", err)
	}
	h := shallow(old)
	h.Labels = next
	if len(next) == 0 {
		h.Labels = nil
	}
	if !proto.Equal(old, h) {
		t.put(h)
		t.event(kindHost, h.GetName(), "Labeled", strings.Join(words, ", "))
	}
	return done()
}

func (t *tx) removeHost(op *clusterv1.RemoveHost) *clusterv1.Result {
	h := t.Host(op.GetHost())
	if h == nil {
		return result(notFound, "host %.300q: there is none", op.GetHost())
	}
	var held []*clusterv1.Assignment
	for a := range t.AssignmentsOfHost(h.GetName()) {
		held = append(held, a)
	}
	if len(held) > 0 && !op.GetForce() {
		return result(refused, "host %s: it has %d assignments, the first is %s: drain it, or remove it by force", h.GetName(), len(held), held[0].GetId())
	}
	borrowed := t.homeless(h.GetName())
	if len(borrowed) > 0 && !op.GetForce() {
		return result(refused, "host %s: %d claims of it have GPUs of other hosts, the first is %s: end its sessions, or remove it by force", h.GetName(), len(borrowed), borrowed[0].GetId())
	}
	for _, a := range held {
		t.release(a, "host "+h.GetName()+" was removed by force")
	}
	for _, c := range borrowed {
		t.deleteClaim(&clusterv1.DeleteClaim{Claim: c.GetId()})
	}
	t.unlink(h.GetName())
	for g := range t.GPUsOfHost(h.GetName()) {
		for x := range t.ReservationsOfGPU(g.GetId()) {
			t.unreserve(x, "Unreserved", "host "+h.GetName()+" was removed")
		}
		if g.GetPresent() {
			t.loseGPU(g.GetId(), "its host was removed")
		}
	}
	for s := range t.SessionsOfHost(h.GetName()) {
		t.del(s)
		t.event(kindSession, s.GetId(), "SessionEnded", "host "+h.GetName()+" was removed", sessionAbout(s)...)
	}
	for i := range scan[clusterv1.Identity](t.reader, tableIdentities, byObject, h.GetName()) {
		t.del(i)
		t.event(0, i.GetId(), "IdentityRevoked", "host "+h.GetName()+" was removed", ref(kindHost, h.GetName()))
	}
	if i := t.Identity(h.GetId()); i.GetRole() == clusterv1.Role_ROLE_HOST {
		t.del(i)
		t.event(0, i.GetId(), "IdentityRevoked", "host "+h.GetName()+" was removed", ref(kindHost, h.GetName()))
	}
	t.del(h)
	if h.GetProtocol() == t.protocol {
		t.findProtocol()
	}
	why := "removed"
	if op.GetForce() {
		why = fmt.Sprintf("removed by force, with %d assignments", len(held))
	}
	t.event(kindHost, h.GetName(), "Left", why)
	return done()
}

func (t *tx) cordonGPU(op *clusterv1.CordonGPU) *clusterv1.Result {
	old := t.GPU(op.GetGpu())
	why := ""
	if op.GetCordoned() {
		why = op.GetMessage()
	}
	switch {
	case old == nil:
		return result(notFound, "GPU %.300q: there is none", op.GetGpu())
	case old.GetCordoned() == op.GetCordoned() && old.GetCordonReason() == why:
		return done()
	}
	g := t.gpu(op.GetGpu())
	g.Cordoned, g.CordonReason, g.edited = op.GetCordoned(), why, true
	typ := "Uncordoned"
	if g.GetCordoned() {
		typ = "Cordoned"
	}
	t.event(kindGPU, g.GetId(), typ, op.GetMessage(), ref(kindHost, g.GetHost()))
	return done()
}

func (t *tx) rankModel(op *clusterv1.RankModel) *clusterv1.Result {
	old := t.Model(op.GetModel())
	if old == nil {
		return result(notFound, "model %.300q: there is none", op.GetModel())
	}
	m := shallow(old)
	m.Ranked, m.Rank = !op.GetClear(), op.GetRank()
	eldest := first[clusterv1.GPU](t.reader, tableGPUs, byModel, m.GetName())
	if op.GetClear() {
		m.Rank = eldest.GetRank()
	}
	if m.GetRanked() == old.GetRanked() && m.GetRank() == old.GetRank() {
		return done()
	}
	words := fmt.Sprintf("rank %d", m.GetRank())
	switch {
	case m.GetRanked():
		t.put(m)
	case eldest == nil:
		t.del(old)
		words = "rank cleared; it has no GPUs"
	default:
		t.put(m)
		words += ", as hosts say"
	}
	t.event(kindModel, m.GetName(), "Ranked", words)
	return done()
}
