package state

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

func TestReportedHostIsKnown(t *testing.T) {
	r := newRig(t)
	r.want(ok, "", testHost("h", 2))
	v := r.View()
	h := v.HostByID("id-h")
	if h != v.Host("h") || h.GetState() != clusterv1.HostState_HOST_STATE_READY || h.GetJoinedUnixMs() != 1000 || h.GetRevision() != 1 {
		t.Errorf("host %v", h)
	}
	g := v.GPU("h/g1")
	if !g.GetPresent() || !g.GetFree() || g.GetFreeMemory() != testCapacity || g.GetUsedMemory() != 0 {
		t.Errorf("GPU %v", g)
	}
	if v.GPU("h/g0").GetLimits() != g.GetLimits() {
		t.Error("equal limits are kept twice")
	}
	m := v.Model("M")
	if m.GetGpus() != 2 || m.GetFree() != 2 || m.GetRank() != 3 || m.GetMemory() != testCapacity || m.GetVendor() != "V" {
		t.Errorf("model %v", m)
	}
	if e := v.Events(kindGPU, "h/g1", 0); len(e) != 1 || e[0].GetType() != "Joined" || e[0].GetActor() != "ann" {
		t.Errorf("events of a GPU: %v", e)
	}

	changed := v.Changed()
	r.want(ok, "", testHost("h", 2))
	select {
	case <-changed:
		t.Error("the same report changed something")
	default:
	}
	if r.View().Host("h").GetRevision() != 1 || r.View().Index() != 2 {
		t.Error("the same report gave the host a revision")
	}

	next := testHost("h", 1)
	next.Host.Version = "2"
	next.Gpus[0].Health, next.Gpus[0].HealthReason = clusterv1.Health_HEALTH_FAILED, "fell off the bus"
	r.want(ok, "", next)
	v = r.View()
	if v.GPU("h/g1") != nil || v.Model("M").GetGpus() != 1 || v.Model("M").GetFree() != 0 || v.GPU("h/g0").GetFreeMemory() != 0 {
		t.Errorf("after: %v, %v", v.Model("M"), v.GPU("h/g0"))
	}
	var types []string
	for _, e := range v.Events(0, "", 0) {
		types = append(types, e.GetType()+" "+e.GetMessage())
	}
	want := []string{"Joined h:7070, with 2 GPUs", "Changed version", "Health failed: fell off the bus", "Left its host no longer reports it"}
	if diff := cmp.Diff(want, types); diff != "" {
		t.Error(diff)
	}
}

func TestHostsAreNotTakenForOthers(t *testing.T) {
	r := newRig(t)
	r.want(ok, "", testHost("h", 1))
	for name, c := range map[string]struct {
		change  func(*clusterv1.ReportHost)
		outcome clusterv1.Outcome
		words   string
	}{
		"two with one name":    {func(op *clusterv1.ReportHost) { op.Host.Id = "other" }, exists, "belongs to the host with id id-h, not other"},
		"one with two names":   {func(op *clusterv1.ReportHost) { op.Host.Name = "h2" }, exists, "its id id-h belongs to host h"},
		"two with one address": {func(op *clusterv1.ReportHost) { op.Host.Name, op.Host.Id = "h2", "id-h2" }, refused, "its address h:7070 belongs to host h"},
		"no name":              {func(op *clusterv1.ReportHost) { op.Host.Name = "" }, invalid, "host: empty"},
		"a slash":              {func(op *clusterv1.ReportHost) { op.Host.Name = "h/g0" }, invalid, `host "h/g0"`},
		"no id":                {func(op *clusterv1.ReportHost) { op.Host.Id = "" }, invalid, "host h: id: empty"},
		"long name":            {func(op *clusterv1.ReportHost) { op.Host.Name = strings.Repeat("n", 256) }, invalid, "at most 255"},
		"address":              {func(op *clusterv1.ReportHost) { op.Host.Address = "h:0" }, invalid, "port"},
		"address without port": {func(op *clusterv1.ReportHost) { op.Host.Address = "h" }, invalid, "not host:port"},
		"too many GPUs":        {func(op *clusterv1.ReportHost) { op.Gpus = testHost("h", 257).Gpus }, invalid, "257 GPUs: at most 256"},
		"a GPU twice":          {func(op *clusterv1.ReportHost) { op.Gpus = append(op.Gpus, op.Gpus[0]) }, invalid, "GPU h/g0: reported twice"},
		"a GPU of another":     {func(op *clusterv1.ReportHost) { op.Gpus[0].Host = "h3" }, invalid, `of host "h3"`},
		"absurd memory":        {func(op *clusterv1.ReportHost) { op.Gpus[0].Limits.GlobalMemory = 1 << 61 }, invalid, "GPU h/g0"},
		"unknown health":       {func(op *clusterv1.ReportHost) { op.Gpus[0].Health = 9 }, invalid, "Health 9 is not known"},
		"no model":             {func(op *clusterv1.ReportHost) { op.Gpus[0].Model = "" }, invalid, "GPU h/g0: model: empty"},
		"a profile twice": {func(op *clusterv1.ReportHost) {
			op.Gpus[0].Profiles = append(op.Gpus[0].Profiles, op.Gpus[0].Profiles[0])
		}, invalid, "profile p: listed twice"},
		"absurd profile":        {func(op *clusterv1.ReportHost) { op.Gpus[0].Profiles[0].MaxInstances = 1 << 30 }, invalid, "instances"},
		"a nil GPU":             {func(op *clusterv1.ReportHost) { op.Gpus = []*clusterv1.GPU{{}} }, invalid, "GPU: empty"},
		"text that is not UTF8": {func(op *clusterv1.ReportHost) { op.Host.Version = "a\x00b" }, invalid, "version: holds a zero byte"},
		"no host":               {func(op *clusterv1.ReportHost) { op.Host = nil }, invalid, "host: empty"},
	} {
		t.Run(name, func(t *testing.T) {
			r.TB = t
			op := testHost("h", 1)
			c.change(op)
			r.want(c.outcome, c.words, op)
			if r.View().GPU("h/g0") == nil || r.View().Host("h").GetAddress() != "h:7070" {
				t.Error("the first host lost something")
			}
		})
	}
}

func TestHostStates(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 1))
	state := func(want clusterv1.HostState, message string) {
		t.Helper()
		if h := r.View().Host("h"); h.GetState() != want || h.GetMessage() != message {
			t.Errorf("%s %q, want %s %q", h.GetState(), h.GetMessage(), want, message)
		}
	}
	r.do(&clusterv1.DrainHost{Host: "h", Draining: true, Message: "fans"})
	state(clusterv1.HostState_HOST_STATE_DRAINING, "fans")
	r.do(&clusterv1.SetHostDown{Host: "h", Down: true, Message: "silent"})
	state(clusterv1.HostState_HOST_STATE_DOWN, "fans")
	r.do(testHost("h", 1))
	state(clusterv1.HostState_HOST_STATE_DOWN, "fans")
	r.do(&clusterv1.SetHostDown{Host: "h"})
	state(clusterv1.HostState_HOST_STATE_DRAINING, "fans")
	r.do(&clusterv1.DrainHost{Host: "h"})
	state(clusterv1.HostState_HOST_STATE_READY, "")
	r.do(&clusterv1.SetHostDown{Host: "h", Down: true, Message: "silent"})
	state(clusterv1.HostState_HOST_STATE_DOWN, "silent")
	r.do(&clusterv1.SetHostDown{Host: "h"})
	state(clusterv1.HostState_HOST_STATE_READY, "")
	var types []string
	for _, e := range r.View().Events(kindHost, "h", 6) {
		types = append(types, e.GetType())
	}
	if want := []string{"Draining", "Down", "Up", "Undrained", "Down", "Up"}; !slices.Equal(types, want) {
		t.Errorf("%q", types)
	}
	r.want(ok, "", &clusterv1.LabelHost{Host: "h", Set: map[string]string{"rack": "1", "example.org/zone": "a"}})
	r.want(ok, "", &clusterv1.LabelHost{Host: "h", Remove: []string{"rack"}})
	r.do(testHost("h", 1))
	if l := r.View().Host("h").GetLabels(); len(l) != 1 || l["example.org/zone"] != "a" {
		t.Errorf("labels %v", l)
	}
	r.want(invalid, "70 labels", &clusterv1.LabelHost{Host: "h", Set: manyLabels(69)})
	for _, op := range []any{&clusterv1.LabelHost{Host: "x"}, &clusterv1.DrainHost{Host: "x"}, &clusterv1.SetHostDown{Host: "x"}, &clusterv1.RemoveHost{Host: "x"}} {
		r.want(notFound, `host "x"`, op)
	}
	r.want(notFound, `GPU "x"`, &clusterv1.CordonGPU{Gpu: "x"})
}

func TestCapacityThatShrinksTakesFromNobody(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	a := r.do(put("a", share("h/g0", 60))).GetAssignments()[0]
	b := r.do(put("b", slice("h/g0"), slice("h/g0"))).GetAssignments()
	w := r.do(put("w", whole("h/g1"))).GetAssignments()[0]
	small := testHost("h", 2)
	for _, g := range small.Gpus {
		g.Limits.GlobalMemory, g.Profiles[0].MaxInstances = 30, 1
	}
	r.want(ok, "", small)
	v := r.View()
	if g := v.GPU("h/g0"); g.GetUsedMemory() != 100 || g.GetFreeMemory() != 0 || v.Assignment(a.GetId()) == nil {
		t.Errorf("%v", g)
	}
	if e := v.Events(kindGPU, "h/g0", 1); e[0].GetType() != "Overcommitted" || e[0].GetMessage() != "100 bytes are held of 30" {
		t.Errorf("%v", e)
	}
	if x := v.VGPU(w.GetVgpu()); x.GetMemory() != 30 || v.GPU("h/g1").GetUsedMemory() != 30 {
		t.Errorf("who holds all holds %v", x)
	}
	r.want(noCapacity, "", put("c", share("h/g0", 1)))
	restored := New()
	if err := restored.Restore(bytes.NewReader(persisted(t, r.Store))); err != nil {
		t.Fatal(err)
	}
	if err := restored.View().Check(); err != nil {
		t.Error(err)
	}
	r.want(ok, "", r.confirm("h", true, a))
	r.want(ok, "", r.confirm("h", true, b[0]))
	if g := r.View().GPU("h/g0"); g.GetFreeMemory() != 10 {
		t.Errorf("%v", g)
	}
	r.want(ok, "", put("c", share("h/g0", 10)))
}

func TestGPUStaysWhileItIsHeld(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 1))
	a := r.do(put("a", whole("h/g0"))).GetAssignments()[0]
	r.do(testHost("h", 0))
	if g := r.View().GPU("h/g0"); g == nil || g.GetPresent() || r.View().Model("M").GetGpus() != 0 {
		t.Errorf("%v", g)
	}
	r.do(testHost("h", 1))
	if !r.View().GPU("h/g0").GetPresent() {
		t.Error("it is back and not present")
	}
	r.do(testHost("h", 0))
	r.want(ok, "", r.confirm("h", true, a))
	if r.View().GPU("h/g0") != nil || r.View().Model("M") != nil {
		t.Error("it outlives who held it")
	}
}

func TestRemovedHost(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	r.do(&clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "id-h", Role: clusterv1.Role_ROLE_HOST, Host: "h"}})
	r.do(&clusterv1.ReportSessions{Host: "h", Sessions: []*clusterv1.Session{{Id: "h/1", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING}}})
	r.do(&clusterv1.PutReservation{Reservation: &clusterv1.Reservation{Id: "r", Owner: "m", Gpu: "h/g1", TtlMs: 5}})
	a := r.do(put("a", whole("h/g0"))).GetAssignments()[0]
	r.want(refused, "it has 1 assignments, the first is a.1", &clusterv1.RemoveHost{Host: "h"})
	r.want(refused, "host h is there", &clusterv1.CancelAssignments{Assignments: []string{a.GetId()}})
	r.want(ok, "", &clusterv1.RemoveHost{Host: "h", Force: true})
	v := r.View()
	if v.Host("h") != nil || v.Identity("id-h") != nil || v.Session("h/1") != nil || v.Reservation("r") != nil || v.GPU("h/g1") != nil {
		t.Error("something of it is left")
	}
	if v.Assignment(a.GetId()).GetResidence() != releasing || v.GPU("h/g0").GetPresent() || v.GPU("h/g0").GetFreeMemory() != 0 {
		t.Errorf("%v, %v", v.Assignment(a.GetId()), v.GPU("h/g0"))
	}
	r.want(invalid, "no assignments", &clusterv1.CancelAssignments{})
	r.want(notFound, "none.1", &clusterv1.CancelAssignments{Assignments: []string{"none.1", a.GetId()}, Reason: "burnt"})
	if v := r.View(); v.GPU("h/g0") != nil || v.Claim("a").GetState() != pending || v.Protocol() != Protocol {
		t.Errorf("%v", v.Claim("a"))
	}

	r.do(testHost("k", 1))
	b := r.do(put("b", whole("k/g0"))).GetAssignments()[0]
	r.want(ok, "", &clusterv1.RemoveHost{Host: "k", Force: true})
	back := testHost("k", 1)
	back.Host.Id = "new"
	r.want(ok, "", back)
	r.want(noCapacity, "held by", put("c", whole("k/g0")))
	r.want(ok, "", r.confirm("k", true, b))
	r.want(ok, "", put("c", whole("k/g0")))
}

func TestProtocolIsTheLowestOfAllHosts(t *testing.T) {
	r := newRig(t)
	if r.View().Protocol() != Protocol {
		t.Error("without hosts")
	}
	for name, p := range map[string]uint32{"a": 3, "b": 2, "c": 2} {
		op := testHost(name, 0)
		op.Host.Protocol = p
		r.do(op)
	}
	if p := r.View().Protocol(); p != 2 {
		t.Errorf("%d", p)
	}
	r.do(&clusterv1.RemoveHost{Host: "b"})
	op := testHost("c", 0)
	op.Host.Protocol = 5
	r.do(op)
	if p := r.View().Protocol(); p != 3 {
		t.Errorf("%d", p)
	}
	c := command(t, testHost("z", 0))
	c.Version = 4
	if res := r.send(c); res.GetOutcome() != invalid || !strings.Contains(res.GetMessage(), "protocol 4") {
		t.Errorf("%v", res)
	}
}
