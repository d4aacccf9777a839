package state

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

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

func TestMigrationsThatAreOverAreForgotten(t *testing.T) {
	s := New()
	for n := range uint64(maxEnded + 10) {
		s.Apply(n+1, command(t, &clusterv1.PutMigration{Migration: &clusterv1.Migration{Id: fmt.Sprint("m", n), Driver: "h", State: clusterv1.MigrationState_MIGRATION_STATE_FAILED}}))
	}
	if err := s.View().Check(); err != nil || s.View().ended != maxEnded || s.View().Migration("m9") != nil || s.View().Migration("m10") == nil {
		t.Errorf("%d kept: %v", s.View().ended, err)
	}
}

// Of two starts of one VM's migration, the first of which was written late, one is begun.
func TestTwoStartsOfOneMigrationBeginOne(t *testing.T) {
	r := newRig(t)
	hosts := testHost("h", 0)
	hosts.Host.Protocol = Protocol
	r.want(ok, "", hosts)
	start := func(id, uuid string) *clusterv1.Command {
		c := command(t, &clusterv1.PutMigration{Migration: &clusterv1.Migration{
			Id: id, Verb: "migrate", Object: "web", Driver: "h", Machine: &clusterv1.MachineMove{Uuid: uuid, Name: "web", FromHost: "h", ToHost: "k"},
		}})
		c.Version = ProtocolMoves
		return c
	}
	first := r.send(start("m-2", "u1"))
	late := r.send(start("m-1", "u1"))
	if first.GetOutcome() != ok || late.GetOutcome() != refused || r.View().Migration("m-1") != nil || late.GetMessage() != "migration m-2 of VM web is not over" {
		t.Errorf("%v; then %v", first, late)
	}
	if other := r.send(start("m-3", "u2")); other.GetOutcome() != ok {
		t.Errorf("another VM's: %v", other)
	}
	over := first.GetMigration()
	next := command(t, &clusterv1.PutMigration{Migration: &clusterv1.Migration{
		Id: "m-2", Verb: "migrate", Object: "web", Driver: "h", Token: over.GetToken(), State: clusterv1.MigrationState_MIGRATION_STATE_DONE, Machine: over.GetMachine(),
	}})
	if done, again := r.send(next), r.send(start("m-4", "u1")); done.GetOutcome() != ok || again.GetOutcome() != ok {
		t.Errorf("after its end: %v; then %v", done, again)
	}
	// What hosts of older versions write is applied alike everywhere.
	older := start("m-5", "u1")
	older.Version = 1
	if res := r.send(older); res.GetOutcome() != ok {
		t.Errorf("of an older host: %v", res)
	}
}

// A record that was given up, sent again and written late replaces none that was written since.
func TestLateRecordReplacesNoLaterOne(t *testing.T) {
	r := newRig(t)
	hosts := testHost("h", 0)
	hosts.Host.Protocol = Protocol
	r.want(ok, "", hosts)
	write := func(m *clusterv1.Migration) *clusterv1.Result {
		c := command(t, &clusterv1.PutMigration{Migration: m})
		c.Version = ProtocolMoves
		return r.send(c)
	}
	first := write(&clusterv1.Migration{Id: "m", Verb: "migrate", Object: "web", Driver: "h", Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h", ToHost: "k"}})
	given := proto.CloneOf(first.GetMigration())
	given.Step = "move"
	again := proto.CloneOf(given)
	res := write(given)
	if twice := write(again); res.GetOutcome() != ok || twice.GetOutcome() != ok || !proto.Equal(res.GetMigration(), twice.GetMigration()) {
		t.Errorf("sent again at once: %v; then %v", res, twice)
	}
	sent := proto.CloneOf(res.GetMigration())
	sent.Machine.SentTo = "k"
	if res := write(sent); res.GetOutcome() != ok {
		t.Fatal(res)
	}
	late := write(again)
	if now := r.View().Migration("m"); late.GetOutcome() != stale || now.GetMachine().GetSentTo() != "k" {
		t.Errorf("%v; the VM was sent to %q", late, now.GetMachine().GetSentTo())
	}
}
