package state

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

const testCapacity = 100

// rig applies commands one after the other and checks the state each time.
type rig struct {
	testing.TB
	*Store
	at uint64
}

func newRig(t testing.TB) *rig { return &rig{t, New(), 0} }

func (r *rig) do(op any) *clusterv1.Result {
	r.Helper()
	return r.send(command(r, op))
}

func (r *rig) send(c *clusterv1.Command) *clusterv1.Result {
	r.Helper()
	r.at++
	before := r.View()
	res := r.Apply(r.at, c)
	if err := r.View().Check(); err != nil {
		r.Fatalf("after %v: %v", c, err)
	}
	if o := res.GetOutcome(); o == invalid || o == notFound && len(r.View().Events(0, "", 0)) == len(before.Events(0, "", 0)) || o == exists || o == refused {
		for _, kind := range persistOrder() {
			select {
			case <-before.Changed(kind):
				r.Fatalf("%v: %s, but %s changed", c, o, kind)
			default:
			}
		}
	}
	return res
}

func (r *rig) want(o clusterv1.Outcome, words string, op any) *clusterv1.Result {
	r.Helper()
	res := r.do(op)
	if res.GetOutcome() != o || !strings.Contains(res.GetMessage(), words) {
		r.Fatalf("%T: %s %q, want %s %q", op, res.GetOutcome(), res.GetMessage(), o, words)
	}
	return res
}

// command wraps an operation, found among the fields of Command by its type.
func command(t testing.TB, op any) *clusterv1.Command {
	c := &clusterv1.Command{Version: 1, Actor: "ann", UnixMs: 1000}
	m := op.(proto.Message).ProtoReflect()
	fields := c.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if fd.Message() != nil && fd.Message().FullName() == m.Descriptor().FullName() {
			c.ProtoReflect().Set(fd, c.ProtoReflect().NewField(fd))
			proto.Merge(c.ProtoReflect().Get(fd).Message().Interface(), op.(proto.Message))
			return c
		}
	}
	t.Fatalf("%T is no operation", op)
	return nil
}

// testHost reports a host with GPUs g0, g1, … of 100 bytes.
func testHost(name string, gpus int) *clusterv1.ReportHost {
	op := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: name, Id: "id-" + name, Address: name + ":7070", Protocol: 1}}
	for n := range gpus {
		op.Gpus = append(op.Gpus, &clusterv1.GPU{
			Name: fmt.Sprintf("g%d", n), Model: "M", Vendor: "V", Rank: 3, Health: clusterv1.Health_HEALTH_OK,
			Limits:   &gpuctlv1.Limits{GlobalMemory: testCapacity, Extensions: []string{"x"}},
			Profiles: []*clusterv1.Profile{{Name: "p", Memory: 20, MaxInstances: 2}},
		})
	}
	return op
}

func whole(gpu string) *clusterv1.Choice { return &clusterv1.Choice{Gpu: gpu} }
func share(gpu string, memory uint64) *clusterv1.Choice {
	return &clusterv1.Choice{Gpu: gpu, Memory: memory}
}

func slice(gpu string) *clusterv1.Choice {
	return &clusterv1.Choice{Gpu: gpu, Kind: clusterv1.VGPUKind_VGPU_KIND_VF, Profile: "p"}
}

func put(id string, choices ...*clusterv1.Choice) *clusterv1.PutClaim {
	return &clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: id, Count: uint32(len(choices))}, Choices: choices}
}

func (r *rig) confirm(host string, gone bool, as ...*clusterv1.Assignment) *clusterv1.ConfirmAssignments {
	op := &clusterv1.ConfirmAssignments{Host: host}
	for _, a := range as {
		op.Confirmations = append(op.Confirmations, &clusterv1.Confirmation{Assignment: a.GetId(), Token: a.GetToken(), Gone: gone})
	}
	return op
}

func codes(r *clusterv1.Result) string {
	var out []string
	for _, x := range r.GetReasons() {
		out = append(out, x.GetCode())
	}
	return strings.Join(out, " ")
}

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

func TestLifeOfAnAssignment(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	res := r.want(ok, "", put("c", whole("h/g0")))
	a := res.GetAssignments()[0]
	if a.GetToken() != 2 || a.GetMemory() != 0 || a.GetVgpu() != "h/g0/whole" || a.GetId() != "c.1" || res.GetClaim().GetState() != bound {
		t.Fatalf("%v", res)
	}
	if g := r.View().GPU("h/g0"); g.GetFree() || g.GetFreeMemory() != 0 || g.GetUsedMemory() != testCapacity {
		t.Errorf("%v", g)
	}
	if v := r.View().VGPU(a.GetVgpu()); v.GetMemory() != testCapacity || v.GetResidence() != scheduled {
		t.Errorf("%v", v)
	}
	if res := r.want(noCapacity, "held by assignment c.1", put("d", whole("h/g0"))); codes(res) != "busy" {
		t.Errorf("%v", res)
	}
	r.want(noCapacity, "held by", put("d", share("h/g0", 1)))
	r.want(stale, "assignment c.1: its token is 2, not 9", &clusterv1.ConfirmAssignments{Host: "h", Confirmations: []*clusterv1.Confirmation{{Assignment: "c.1", Token: 9}}})
	r.want(ok, "", r.confirm("h", false, a))
	if r.View().Assignment("c.1").GetResidence() != resident || r.View().VGPU(a.GetVgpu()).GetResidence() != resident {
		t.Error("not resident")
	}
	if res := r.want(ok, "", &clusterv1.DeleteClaim{Claim: "c"}); res.GetClaim().GetState() != claimReleasing || res.GetAssignments()[0].GetResidence() != releasing {
		t.Errorf("%v", res)
	}
	r.want(ok, "", &clusterv1.DeleteClaim{Claim: "c"})
	r.want(ok, "", r.confirm("h", false, a)) // it crossed the release
	r.want(refused, "being released", &clusterv1.Assign{Claim: "c", Choices: []*clusterv1.Choice{whole("h/g1")}})
	r.want(noCapacity, "held by", put("d", whole("h/g0")))
	r.want(ok, "", r.confirm("h", true, a))
	r.want(ok, "", r.confirm("h", true, a)) // said twice
	v := r.View()
	if v.Claim("c") != nil || v.Assignment("c.1") != nil || v.VGPU(a.GetVgpu()) != nil || !v.GPU("h/g0").GetFree() {
		t.Error("something is left")
	}
	var types []string
	for _, e := range v.Events(kindClaim, "c", 0) {
		types = append(types, e.GetType())
	}
	if want := []string{"ClaimCreated", "Assigned", "Bound", "Resident", "Releasing", "Releasing", "Released", "Released"}; !slices.Equal(types, want) {
		t.Errorf("events %q, want %q", types, want)
	}
	if b := r.want(ok, "", put("c", whole("h/g0"))).GetAssignments()[0]; b.GetId() == a.GetId() || b.GetToken() <= a.GetToken() {
		t.Errorf("%v after %v", b, a)
	}
}

func TestConfirmationsAreTakenOneByOne(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	r.do(testHost("k", 1))
	a := r.do(put("a", whole("h/g0"))).GetAssignments()[0]
	b := r.do(put("b", whole("k/g0"))).GetAssignments()[0]
	op := r.confirm("h", false, a, b)
	op.Confirmations = append(op.Confirmations, &clusterv1.Confirmation{Assignment: "no.9"})
	r.want(stale, "assignment b.2: is on host k; assignment \"no.9\": there is none", op)
	if r.View().Assignment(a.GetId()).GetResidence() != resident || r.View().Assignment(b.GetId()).GetResidence() != scheduled {
		t.Error("wrong one confirmed")
	}
	r.want(notFound, `host "x"`, r.confirm("x", true, a))
}

func TestSharesAndSlicesFit(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 1))
	r.want(ok, "", put("a", share("h/g0", 60)))
	if res := r.want(noCapacity, "50 bytes needed, 40 of 100 left", put("b", share("h/g0", 50))); codes(res) != "memory" {
		t.Errorf("%v", res)
	}
	r.want(noCapacity, "held by", put("b", whole("h/g0")))
	first := r.want(ok, "", put("b", slice("h/g0"), slice("h/g0"))).GetAssignments()
	if first[0].GetVgpu() != "h/g0/p.0" || first[1].GetVgpu() != "h/g0/p.1" || first[0].GetMemory() != 20 {
		t.Errorf("%v", first)
	}
	if res := r.want(noCapacity, "2 of 2 instances", put("c", slice("h/g0"))); codes(res) != "memory profile" {
		t.Errorf("%v", res)
	}
	r.want(ok, "", r.confirm("h", true, first[0]))
	if a := r.want(ok, "", put("c", slice("h/g0"))).GetAssignments()[0]; a.GetVgpu() != "h/g0/p.0" {
		t.Errorf("%v", a)
	}
	if g := r.View().GPU("h/g0"); g.GetUsedMemory() != 100 || g.GetFreeMemory() != 0 || g.GetFree() {
		t.Errorf("%v", g)
	}
	for name, c := range map[string]*clusterv1.Choice{
		"needs a profile":                 {Gpu: "h/g0", Kind: clusterv1.VGPUKind_VGPU_KIND_MDEV},
		"has no profile, not":             {Gpu: "h/g0", Profile: "p"},
		"needs an amount":                 {Gpu: "h/g0", Kind: clusterv1.VGPUKind_VGPU_KIND_SHARE},
		"is not known":                    {Gpu: "h/g0", Kind: 99},
		"9223372036854775808 bytes: at m": {Gpu: "h/g0", Memory: 1 << 63},
	} {
		r.want(invalid, name, put("x", c))
	}
	if res := r.want(noCapacity, `no profile "q"`, put("x", &clusterv1.Choice{Gpu: "h/g0", Kind: clusterv1.VGPUKind_VGPU_KIND_VF, Profile: "q"})); codes(res) != "profile" {
		t.Errorf("%v", res)
	}
}

func TestProfilesApart(t *testing.T) {
	r := newRig(t)
	op := testHost("h", 1)
	op.Gpus[0].Limits.GlobalMemory = 100
	op.Gpus[0].Profiles = []*clusterv1.Profile{
		{Name: "p", Memory: 20, MaxInstances: 4, Apart: "time 20"},
		{Name: "q", Memory: 20, MaxInstances: 4, Apart: "time 20"},
		{Name: "r", Memory: 10, MaxInstances: 8, Apart: "time 10"},
		{Name: "vf", Memory: 10, MaxInstances: 8},
	}
	r.do(op)
	slice := func(profile string) *clusterv1.Choice {
		return &clusterv1.Choice{Gpu: "h/g0", Kind: clusterv1.VGPUKind_VGPU_KIND_VENDOR, Profile: profile}
	}
	r.want(ok, "", put("a", slice("p")))
	r.want(ok, "", put("b", slice("q")))
	r.want(ok, "", put("c", slice("vf")))
	if res := r.want(noCapacity, "profile r does not go together with", put("d", slice("r"))); codes(res) != "profile" {
		t.Errorf("%v", res)
	}
	op.Gpus[0].Profiles[0].Apart = strings.Repeat("x", 1000)
	r.want(invalid, "apart", op)
}

func TestAssignIsAllOrNothing(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 3))
	r.do(put("a", whole("h/g2")))
	r.want(ok, "", put("c", whole("h/g0")))
	r.want(noCapacity, "h/g2", &clusterv1.Assign{Claim: "c", Choices: []*clusterv1.Choice{whole("h/g1"), whole("h/g2")}})
	if v := r.View(); !v.GPU("h/g1").GetFree() || len(v.Claim("c").GetAssignments()) != 1 {
		t.Error("something was assigned")
	}
	res := r.want(ok, "", &clusterv1.Assign{Claim: "c", Choices: []*clusterv1.Choice{whole("h/g1")}})
	if len(res.GetAssignments()) != 1 || len(res.GetClaim().GetAssignments()) != 2 {
		t.Errorf("%v", res)
	}
	old := r.View().Claim("c").GetAssignments()[0]
	r.want(ok, "", &clusterv1.ReleaseAssignments{Assignments: []string{old}})
	r.want(ok, "", r.confirm("h", true, r.View().Assignment(old)))
	if c := r.View().Claim("c"); c.GetState() != bound || len(c.GetAssignments()) != 1 {
		t.Errorf("%v", c)
	}
	r.want(ok, "", &clusterv1.ReleaseAssignments{Claim: "c"})
	for a := range r.View().AssignmentsOfClaim("c") {
		r.want(ok, "", r.confirm("h", true, a))
	}
	if c := r.View().Claim("c"); c.GetState() != pending || !strings.Contains(c.GetMessage(), "released") {
		t.Errorf("%v", c)
	}
	r.want(invalid, "2 choices for 1 GPUs", &clusterv1.Assign{Claim: "c", Choices: []*clusterv1.Choice{whole("h/g0"), whole("h/g1")}})
	r.want(ok, "", &clusterv1.Assign{Claim: "c", Choices: []*clusterv1.Choice{whole("h/g0")}})
	r.want(notFound, `claim "z"`, &clusterv1.Assign{Claim: "z"})
	r.want(invalid, "no choices", &clusterv1.Assign{Claim: "c"})
	r.want(invalid, "is of claim a, not c", &clusterv1.ReleaseAssignments{Claim: "c", Assignments: r.View().Claim("a").GetAssignments()})
	r.want(invalid, "no claim and no assignments", &clusterv1.ReleaseAssignments{})
	r.want(notFound, "no.1", &clusterv1.ReleaseAssignments{Assignments: []string{"no.1", r.View().Claim("a").GetAssignments()[0]}})
	for a := range r.View().AssignmentsOfClaim("a") {
		if a.GetResidence() != releasing {
			t.Error("the one that is there was not released")
		}
	}
}

func TestClaimsAreMadeOnce(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	op := put("c", whole("h/g0"))
	op.Claim.Labels = map[string]string{"a": "1"}
	first := r.want(ok, "", op)
	again := r.want(ok, "", op)
	if diff := cmp.Diff(first.GetAssignments(), again.GetAssignments(), protocmp.Transform()); diff != "" || again.GetClaim().GetOwner() != "ann" {
		t.Error(diff)
	}
	op.Claim.MinMemory = 5
	r.want(exists, "other needs (min_memory)", op)

	refusedOp := put("d", whole("h/g0"))
	r.want(noCapacity, "claim d", refusedOp)
	if r.View().Claim("d") != nil {
		t.Error("refused and kept")
	}
	refusedOp.Claim.Unmet = clusterv1.Unmet_UNMET_WAIT
	res := r.want(ok, "", refusedOp)
	if res.GetClaim().GetState() != pending || codes(res) != "busy" || !strings.Contains(res.GetClaim().GetMessage(), "held by") {
		t.Errorf("%v", res)
	}
	for c := range r.View().PendingClaims() {
		if c.GetId() != "d" {
			t.Errorf("pending: %v", c)
		}
	}
	r.want(noCapacity, "nothing has been found", put("e"))
	r.want(invalid, "1 choices for 3 GPUs", &clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: "e", Count: 3}, Choices: []*clusterv1.Choice{whole("h/g1")}})
	res = r.want(ok, "", &clusterv1.DeleteClaim{Claim: "d"})
	if r.View().Claim("d") != nil || res.GetClaim().GetId() != "d" {
		t.Error("a pending claim stays")
	}
	r.want(notFound, `claim "d"`, &clusterv1.DeleteClaim{Claim: "d"})
	for words, c := range map[string]*clusterv1.Claim{
		"claim: empty":        {},
		`claim "a/b"`:         {Id: "a/b"},
		"65 GPUs: at most 64": {Id: "x", Count: 65},
		"prefers 1 bytes":     {Id: "x", MinMemory: 2, PreferMemory: 1},
		"Policy 8":            {Id: "x", Policy: 8},
		"group":               {Id: "x", Group: "\n"},
		"not on host":         {Id: "x", HostsNot: []string{""}},
		"expr: 5000 bytes":    {Id: "x", Expr: strings.Repeat("x", 5000)},
		"65 labels":           {Id: "x", Labels: manyLabels(65)},
	} {
		r.want(invalid, words, &clusterv1.PutClaim{Claim: c})
	}
}

func manyLabels(n int) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprint("l", i)] = "v"
	}
	return m
}

func TestNothingNewGoesWhereItMustNot(t *testing.T) {
	for code, prepare := range map[string]func(*rig){
		"cordoned": func(r *rig) { r.want(ok, "", &clusterv1.CordonGPU{Gpu: "h/g0", Cordoned: true, Message: "hot"}) },
		"draining": func(r *rig) { r.want(ok, "", &clusterv1.DrainHost{Host: "h", Draining: true, Message: "fans"}) },
		"down":     func(r *rig) { r.want(ok, "", &clusterv1.SetHostDown{Host: "h", Down: true, Message: "silent"}) },
		"health": func(r *rig) {
			op := testHost("h", 2)
			op.Gpus[0].Health = clusterv1.Health_HEALTH_FAILED
			r.want(ok, "", op)
		},
		"unknown": func(r *rig) {
			r.want(ok, "", put("holder", share("h/g0", 1)))
			op := testHost("h", 2)
			op.Gpus = op.Gpus[1:]
			r.want(ok, "", op)
		},
	} {
		t.Run(code, func(t *testing.T) {
			r := newRig(t)
			r.do(testHost("h", 2))
			r.want(ok, "", &clusterv1.PutReservation{Reservation: &clusterv1.Reservation{Id: "r", Owner: "c", Gpu: "h/g0", Memory: 50, TtlMs: 1}})
			prepare(r)
			choice := share("h/g0", 10)
			if res := r.want(noCapacity, "", put("c", choice)); codes(res) != code {
				t.Errorf("%q, want %q", codes(res), code)
			}
			choice.Reservation = "r"
			if res := r.want(noCapacity, "", put("c", choice)); codes(res) != code {
				t.Errorf("with a reservation: %q, want %q", codes(res), code)
			}
			if r.View().GPU("h/g0").GetFreeMemory() != 0 || r.View().Reservation("r") == nil {
				t.Error("memory is free, or the reservation was lost")
			}
			if res := r.want(noCapacity, "", &clusterv1.PutReservation{Reservation: &clusterv1.Reservation{Id: "s", Owner: "c", Gpu: "h/g0", Memory: 5, TtlMs: 1}}); codes(res) != code {
				t.Errorf("reserve: %v", res)
			}
		})
	}
	r := newRig(t)
	if res := r.want(noCapacity, "", put("c", whole("no/g"))); codes(res) != "unknown" {
		t.Errorf("%v", res)
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

func TestGroupsGoToDifferentHosts(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 3))
	r.do(testHost("k", 1))
	claim := func(id string, choices ...*clusterv1.Choice) *clusterv1.PutClaim {
		op := put(id, choices...)
		op.Claim.Group = "db"
		return op
	}
	r.want(ok, "", claim("a", whole("h/g0"), whole("h/g1")))
	if res := r.want(noCapacity, "host h: has claim a of group db", claim("b", whole("h/g2"))); codes(res) != "group" {
		t.Errorf("%v", res)
	}
	r.want(ok, "", put("other", whole("h/g2")))
	r.want(ok, "", claim("b", whole("k/g0")))
	n := 0
	for range r.View().ClaimsOfGroup("db") {
		n++
	}
	if n != 2 {
		t.Errorf("%d claims of the group", n)
	}
}

func TestReservationGivesItsRoom(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	reserve := func(id, owner, gpu string, memory uint64) *clusterv1.PutReservation {
		return &clusterv1.PutReservation{Reservation: &clusterv1.Reservation{Id: id, Owner: owner, Gpu: gpu, Memory: memory, TtlMs: 1000}}
	}
	first := r.want(ok, "", reserve("r", "c", "h/g0", 0)).GetReservation()
	if first.GetToken() != 2 || first.GetHost() != "h" || r.View().GPU("h/g0").GetFree() {
		t.Errorf("%v", first)
	}
	r.want(noCapacity, "held by reservation r of c", put("d", share("h/g0", 1)))
	r.want(noCapacity, "gone or another's", put("d", &clusterv1.Choice{Gpu: "h/g0", Reservation: "r"}))
	r.want(exists, "belongs to c", reserve("r", "d", "h/g0", 0))
	again := r.want(ok, "", reserve("r", "c", "h/g0", 0)).GetReservation()
	if again.GetToken() == first.GetToken() || len(r.View().Events(kindReservation, "r", 0)) != 1 {
		t.Errorf("%v", again)
	}
	r.want(stale, "its token is", &clusterv1.DeleteReservation{Id: "r", Token: first.GetToken()})
	r.want(ok, "", put("c", &clusterv1.Choice{Gpu: "h/g0", Memory: 30, Reservation: "r"}))
	if g := r.View().GPU("h/g0"); g.GetUsedMemory() != 30 || r.View().Reservation("r") != nil {
		t.Errorf("%v", g)
	}
	r.want(ok, "", &clusterv1.PutMigration{Migration: &clusterv1.Migration{Id: "m", Claim: "c", Driver: "h"}})
	r.want(ok, "", reserve("s", "m", "h/g1", 50))
	r.want(ok, "", reserve("s", "m", "h/g1", 80)) // more, of which it has some
	r.want(noCapacity, "", reserve("s", "m", "h/g1", 101))
	if r.View().Reservation("s").GetMemory() != 80 {
		t.Error("a refusal lost the reservation")
	}
	r.want(ok, "", &clusterv1.Assign{Claim: "c", Choices: []*clusterv1.Choice{{Gpu: "h/g1", Memory: 80, Reservation: "s"}}})
	r.want(notFound, `"s"`, &clusterv1.DeleteReservation{Id: "s"})
	x := r.want(ok, "", reserve("t", "c", "h/g1", 10)).GetReservation()
	r.want(ok, "", &clusterv1.DeleteReservation{Id: "t", Token: x.GetToken(), Expired: true})
	if e := r.View().Events(kindReservation, "t", 1); e[0].GetType() != "ReservationExpired" {
		t.Errorf("%v", e)
	}
	r.want(invalid, "must expire", &clusterv1.PutReservation{Reservation: &clusterv1.Reservation{Id: "t", Owner: "c", Gpu: "h/g1"}})
	r.want(noCapacity, "there is none", reserve("t", "c", "nowhere", 1))
	r.want(ok, "", reserve("t", "w", "h/g1", 10))
	r.do(&clusterv1.PutClaim{Claim: &clusterv1.Claim{Id: "w", Unmet: clusterv1.Unmet_UNMET_WAIT}})
	r.want(ok, "", &clusterv1.DeleteClaim{Claim: "w"})
	if r.View().Reservation("t") != nil {
		t.Error("a reservation outlives the claim that owned it")
	}
}

func TestRanks(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 1))
	r.want(ok, "", &clusterv1.RankModel{Model: "M", Rank: 9})
	r.do(testHost("k", 1))
	if m := r.View().Model("M"); m.GetRank() != 9 || !m.GetRanked() || m.GetGpus() != 2 {
		t.Errorf("%v", m)
	}
	r.do(&clusterv1.RemoveHost{Host: "h"})
	r.do(&clusterv1.RemoveHost{Host: "k"})
	if m := r.View().Model("M"); m.GetRank() != 9 || m.GetGpus() != 0 {
		t.Errorf("an operator's rank is lost: %v", m)
	}
	r.do(testHost("h", 1))
	r.want(ok, "", &clusterv1.RankModel{Model: "M", Clear: true})
	if m := r.View().Model("M"); m.GetRank() != 3 || m.GetRanked() {
		t.Errorf("%v", m)
	}
	r.want(notFound, `model "N"`, &clusterv1.RankModel{Model: "N"})
}

func TestSessions(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 1))
	report := func(all bool, sessions ...*clusterv1.Session) *clusterv1.ReportSessions {
		return &clusterv1.ReportSessions{Host: "h", Sessions: sessions, All: all}
	}
	session := func(id string, state gpuctlv1.SessionState, gpus ...string) *clusterv1.Session {
		return &clusterv1.Session{Id: id, Claim: "c", State: state, Gpus: gpus}
	}
	running, suspended, ended := gpuctlv1.SessionState_SESSION_STATE_RUNNING, gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, gpuctlv1.SessionState_SESSION_STATE_ENDED
	r.want(ok, "", report(false, session("h/1", running, "h/g0"), session("h/2", running)))
	r.want(ok, "", report(false, session("h/1", running, "h/g0")))
	if s := r.View().Session("h/1"); s.GetRevision() != 2 || s.GetHost() != "h" {
		t.Errorf("%v", s)
	}
	r.want(ok, "", report(false, session("h/1", suspended)))
	r.want(ok, "", report(false, session("h/1", ended), session("h/7", ended)))
	r.want(ok, "", report(true))
	var types []string
	for _, e := range r.View().Events(kindSession, "", 0) {
		types = append(types, e.GetObject()+" "+e.GetType())
	}
	want := []string{"h/1 SessionStarted", "h/2 SessionStarted", "h/1 SessionMoved", "h/1 SessionState", "h/1 SessionEnded", "h/2 SessionEnded"}
	if diff := cmp.Diff(want, types); diff != "" {
		t.Error(diff)
	}
	r.want(notFound, `host "x"`, &clusterv1.ReportSessions{Host: "x"})
	for words, s := range map[string]*clusterv1.Session{
		"not one of host h": session("k/1", running), "no state": session("h/1", 0), "session: empty": session("h/", running), "is not known": session("h/1", 99),
	} {
		r.want(invalid, words, report(false, s))
	}
	r.want(invalid, "listed twice", report(false, session("h/1", running), session("h/1", running)))
}

func TestMigrationsAreFenced(t *testing.T) {
	r := newRig(t)
	m := func(token uint64, change func(*clusterv1.Migration)) *clusterv1.PutMigration {
		x := &clusterv1.Migration{Id: "m", Verb: "migrate", Object: "h/1", Driver: "h", Token: token, Step: "prepare"}
		if change != nil {
			change(x)
		}
		return &clusterv1.PutMigration{Migration: x}
	}
	first := r.want(ok, "", m(0, nil)).GetMigration()
	if first.GetToken() != 1 || first.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING || first.GetStartedUnixMs() != 1000 {
		t.Errorf("%v", first)
	}
	r.want(stale, "its token is 1, not 0", m(0, nil))
	r.want(ok, "", m(1, func(x *clusterv1.Migration) { x.Step = "freeze" }))
	r.want(stale, "drives it, not k", m(1, func(x *clusterv1.Migration) { x.Driver = "k" }))
	r.want(invalid, "another verb", m(1, func(x *clusterv1.Migration) { x.Verb = "upgrade" }))
	take := m(0, func(x *clusterv1.Migration) { x.Driver = "k" })
	take.TakeOver = true
	second := r.want(ok, "", take).GetMigration()
	if second.GetDriver() != "k" || second.GetStep() != "freeze" || second.GetToken() <= first.GetToken() {
		t.Errorf("%v", second)
	}
	r.want(stale, "its token is", m(1, nil))
	over := m(second.GetToken(), func(x *clusterv1.Migration) {
		x.Driver, x.State = "k", clusterv1.MigrationState_MIGRATION_STATE_DONE
	})
	r.want(ok, "", over)
	r.want(ok, "", over)
	r.want(refused, "is over", m(second.GetToken(), func(x *clusterv1.Migration) { x.Driver = "k" }))
	r.want(refused, "is over", take)
	take.Migration.Id = "none"
	r.want(notFound, "none to take over", take)
	r.want(stale, "with token 7", &clusterv1.PutMigration{Migration: &clusterv1.Migration{Id: "n", Driver: "h", Token: 7}})
	var types []string
	for _, e := range r.View().Events(kindMigration, "m", 0) {
		types = append(types, e.GetType())
	}
	if want := []string{"MigrationStarted", "MigrationStep", "MigrationStep", "MigrationTakenOver", "MigrationStep", "MigrationDone"}; !slices.Equal(types, want) {
		t.Errorf("%q", types)
	}
}

func TestJoinTokensAreUsedOnce(t *testing.T) {
	r := newRig(t)
	hash := make([]byte, 32)
	token := func(id, name string, role clusterv1.Role) *clusterv1.PutJoinToken {
		return &clusterv1.PutJoinToken{Token: &clusterv1.JoinToken{Id: id, SecretHash: hash, Role: role, Name: name}}
	}
	host := func(id, name string) *clusterv1.Identity {
		return &clusterv1.Identity{Id: id, Role: clusterv1.Role_ROLE_HOST, Host: name}
	}
	r.want(ok, "", token("t", "h", clusterv1.Role_ROLE_HOST))
	r.want(ok, "", token("t", "h", clusterv1.Role_ROLE_HOST))
	r.want(exists, "join token t", token("t", "k", clusterv1.Role_ROLE_HOST))
	r.want(refused, "is for h, not k", &clusterv1.UseJoinToken{Id: "t", Identity: host("id", "k")})
	r.want(refused, "is for a host, not a admin", &clusterv1.UseJoinToken{Id: "t", Identity: &clusterv1.Identity{Id: "eve", Role: clusterv1.Role_ROLE_ADMIN}})
	r.want(ok, "", &clusterv1.UseJoinToken{Id: "t", Identity: host("id", "h")})
	r.want(notFound, "it was used or deleted", &clusterv1.UseJoinToken{Id: "t", Identity: host("id2", "k")})
	if i := r.View().Identity("id"); i.GetHost() != "h" || i.GetCreatedUnixMs() != 1000 || r.View().JoinToken("t") != nil {
		t.Errorf("%v", i)
	}
	r.want(ok, "", token("u", "", clusterv1.Role_ROLE_HOST))
	r.want(exists, "host h: the name belongs to identity id", &clusterv1.UseJoinToken{Id: "u", Identity: host("id3", "h")})
	r.want(exists, "revoke it first", &clusterv1.UseJoinToken{Id: "u", Identity: host("id", "h")})
	if r.View().JoinToken("u") == nil {
		t.Error("a refusal used the token up")
	}
	r.want(ok, "", &clusterv1.DeleteJoinToken{Id: "u"})
	r.want(notFound, `"u"`, &clusterv1.DeleteJoinToken{Id: "u"})
	r.want(ok, "", &clusterv1.DeleteIdentity{Id: "id"})
	r.want(notFound, `"id"`, &clusterv1.DeleteIdentity{Id: "id"})
	r.want(ok, "", &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "ann", Role: clusterv1.Role_ROLE_VIEWER}})
	r.want(ok, "", &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "ann", Role: clusterv1.Role_ROLE_ADMIN}})
	r.want(invalid, "only hosts have a host", &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "ann", Role: clusterv1.Role_ROLE_ADMIN, Host: "h"}})
	r.want(invalid, "no role", &clusterv1.PutIdentity{Identity: &clusterv1.Identity{Id: "ann"}})
	r.want(invalid, "hash of 3 bytes", &clusterv1.PutJoinToken{Token: &clusterv1.JoinToken{Id: "t", SecretHash: hash[:3], Role: 1}})
}

func TestInitClusterAndNotes(t *testing.T) {
	r := newRig(t)
	r.want(ok, "", &clusterv1.InitCluster{ClusterId: "c", CaCertificate: []byte{1}})
	r.want(ok, "", &clusterv1.InitCluster{ClusterId: "c", CaCertificate: []byte{1}})
	r.want(exists, "cluster c", &clusterv1.InitCluster{ClusterId: "d"})
	if v := r.View(); v.ClusterID() != "c" || !bytes.Equal(v.CACertificate(), []byte{1}) {
		t.Error("not initialized")
	}
	r.want(ok, "", &clusterv1.Note{Event: &clusterv1.Event{Kind: kindHost, Object: "h", Message: "seen", About: []string{"gpu/h/g"}, Index: 77, Actor: "eve"}})
	e := r.View().Events(kindGPU, "h/g", 0)
	if len(e) != 1 || e[0].GetIndex() != r.at || e[0].GetActor() != "ann" || e[0].GetType() != "Note" {
		t.Errorf("%v", e)
	}
	r.want(invalid, "note: empty", &clusterv1.Note{})
	r.want(invalid, "about", &clusterv1.Note{Event: &clusterv1.Event{About: []string{""}}})
}

func TestCommandWithAnIDIsAppliedOnce(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 2))
	c := command(t, put("a", whole("h/g0")))
	c.Id = "x"
	first := r.send(c)
	other := command(t, put("b", whole("h/g1")))
	other.Id = "x"
	if again := r.send(other); !proto.Equal(first, again) || r.View().Claim("b") != nil {
		t.Errorf("%v, want %v", again, first)
	}
	restored := New()
	if err := restored.Restore(bytes.NewReader(persisted(t, r.Store))); err != nil {
		t.Fatal(err)
	}
	if again := restored.Apply(r.at+1, other); !proto.Equal(first, again) {
		t.Errorf("after a restore: %v", again)
	}
	note := func(id string) *clusterv1.Command {
		n := command(t, &clusterv1.Note{Event: &clusterv1.Event{Message: "n"}})
		n.Id = id
		return n
	}
	for n := range maxEvents + 50 {
		r.at++
		r.Apply(r.at, note(fmt.Sprint("n", n)))
	}
	v := r.View()
	if err := v.Check(); err != nil {
		t.Fatal(err)
	}
	if v.answers != maxRecents || len(v.Events(0, "", 0)) != maxEvents || len(v.Events(0, "", 3)) != 3 {
		t.Errorf("%d answers, %d events", v.answers, v.events)
	}
	if r.send(other).GetOutcome() != ok || r.View().Claim("b") == nil {
		t.Error("a forgotten command is not applied")
	}
}

func TestMigrationsThatAreOverAreForgotten(t *testing.T) {
	s := New()
	for n := range uint64(maxEnded + 10) {
		s.Apply(n+1, command(t, &clusterv1.PutMigration{Migration: &clusterv1.Migration{Id: fmt.Sprint("m", n), Driver: "h", State: clusterv1.MigrationState_MIGRATION_STATE_FAILED}}))
	}
	if err := s.View().Check(); err != nil || s.View().ended != maxEnded || s.View().Migration("m9") != nil || s.View().Migration("m10") == nil {
		t.Errorf("%d kept: %v", s.View().ended, err)
	}
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

func TestWatchersAreWokenByTheirKinds(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 1))
	v := r.View()
	gpus, claims, hosts, both, anything := v.Changed(kindGPU), v.Changed(kindClaim), v.Changed(kindHost), v.Changed(kindHost, kindClaim), v.Changed()
	woken := func(name string, ch <-chan struct{}, want bool) {
		t.Helper()
		select {
		case <-ch:
			if !want {
				t.Errorf("%s: woken", name)
			}
		default:
			if want {
				t.Errorf("%s: not woken", name)
			}
		}
	}
	r.send(nil)
	woken("nothing", anything, false)
	r.do(put("c", whole("h/g0")))
	woken("GPUs", gpus, true)
	woken("claims", claims, true)
	woken("hosts", hosts, false)
	woken("hosts and claims", both, true)
	woken("anything", anything, true)
	woken("GPUs, asked late", v.Changed(kindGPU), true)
	woken("GPUs, of now", r.View().Changed(kindGPU), false)
	now := r.View()
	if err := r.Restore(bytes.NewReader(persisted(t, r.Store))); err != nil {
		t.Fatal(err)
	}
	woken("restored", now.Changed(kindMigration), true)
	if now.GPU("h/g0") == nil {
		t.Error("an old view lost its objects")
	}
}

func TestListingGoesOnAfterAName(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"b", "a", "ab", "c"} {
		r.do(testHost(name, 1))
	}
	var names []string
	for o := range r.View().Objects(kindHost, "a") {
		names = append(names, Name(o))
		if KindOf(o) != kindHost || Revision(o) == 0 {
			t.Errorf("%v", o)
		}
	}
	if want := []string{"ab", "b", "c"}; !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
	n := 0
	for range r.View().GPUsOfHost("a") {
		n++
	}
	if n != 1 || r.View().Object(kindGPU, "ab/g0").GetGpu() == nil || r.View().Object(99, "a") != nil || r.View().Host("") != nil {
		t.Errorf("%d GPUs of a", n)
	}
}

func TestEntries(t *testing.T) {
	c := command(t, testHost("h", 1))
	data, err := Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	back, err := Decode(data)
	if err != nil || !proto.Equal(c, back) {
		t.Errorf("%v, %v", back, err)
	}
	for name, bad := range map[string][]byte{
		"nothing": nil, "a byte": {1}, "format": append([]byte{2}, data[1:]...), "policy": append([]byte{1, 9}, data[2:]...), "cut": data[:len(data)-1],
	} {
		if _, err := Decode(bad); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
	unknown := []byte{1, byte(clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP), 0xfa, 0x1f, 0} // field 511
	var e *ErrUnknownCommand
	if _, err := Decode(unknown); !errors.As(err, &e) || e.Policy != clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP {
		t.Errorf("unknown operation: %v", err)
	}
	c.Version = Protocol + 1
	if data, err = Encode(c); err != nil {
		t.Fatal(err)
	}
	if _, err := Decode(data); !errors.As(err, &e) || e.Policy != clusterv1.UnknownPolicy_UNKNOWN_POLICY_STOP || e.Version != Protocol+1 {
		t.Errorf("newer: %v", err)
	}
	note, _ := Encode(command(t, &clusterv1.Note{Event: &clusterv1.Event{}}))
	if note[1] != byte(clusterv1.UnknownPolicy_UNKNOWN_POLICY_SKIP) {
		t.Error("a note must not stop anybody")
	}
	if _, err := Encode(&clusterv1.Command{Actor: "\xff"}); err == nil {
		t.Error("no text, and no error")
	}
}

// Views are read while entries are applied; each stays what it was.
func TestViewsAreReadWhileEntriesAreApplied(t *testing.T) {
	r := newRig(t)
	r.do(testHost("h", 8))
	var readers sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				v := r.View()
				changed := v.Changed(kindClaim)
				before, err := 0, v.Check()
				for range v.Assignments() {
					before++
				}
				select {
				case <-changed:
				case <-stop:
				}
				after := 0
				for range v.Assignments() {
					after++
				}
				if err != nil || before != after {
					t.Errorf("%d assignments became %d in one view: %v", before, after, err)
					return
				}
			}
		})
	}
	for n := range 200 {
		id := fmt.Sprint("c", n)
		as := r.want(ok, "", put(id, share("h/g3", 5), whole("h/g1"))).GetAssignments()
		r.want(ok, "", r.confirm("h", n%2 == 0, as...))
		r.want(ok, "", &clusterv1.ReleaseAssignments{Claim: id})
		if n%2 == 1 {
			r.want(ok, "", r.confirm("h", true, as...))
		}
		if n%50 == 0 {
			if err := r.Restore(bytes.NewReader(persisted(t, r.Store))); err != nil {
				t.Error(err)
			}
		}
	}
	close(stop)
	readers.Wait()
}
