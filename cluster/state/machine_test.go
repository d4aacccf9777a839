package state

import (
	"bytes"
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Whatever is proposed in whatever order: what must always hold holds, two
// replicas of which one was restored from a snapshot are the same byte by
// byte, and no command is changed by being applied.
func TestInvariantsHoldAndReplicasAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := New(), New()
		index := uint64(0)
		views := []*View{a.View()}
		for _, host := range []string{"h1", "h2", "h3"}[:rapid.IntRange(0, 3).Draw(t, "hosts")] {
			op := testHost(host, 4)
			op.Gpus = op.Gpus[1:] // g1, g2, g3
			index++
			a.Apply(index, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: op}})
			b.Apply(index, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: op}})
		}
		for n := rapid.IntRange(1, 60).Draw(t, "commands"); n > 0; n-- {
			index += rapid.Uint64Range(1, 3).Draw(t, "gap")
			c := drawCommand(t, a.View())
			asked := proto.Clone(c)
			was := a.View()
			x, y := a.Apply(index, c), b.Apply(index, c)
			if !proto.Equal(x, y) {
				t.Fatalf("answers differ: %v, %v", x, y)
			}
			if !proto.Equal(asked, c) {
				t.Fatalf("the command was changed")
			}
			if x.GetOutcome() == 0 || x.GetOutcome() != ok && x.GetMessage() == "" {
				t.Fatalf("%v: no words: %v", c, x)
			}
			if err := a.View().Check(); err != nil {
				t.Fatalf("entry %d %v\nanswered %v:\n%v", index, c, x, err)
			}
			onlyGrown(t, was, a.View(), index)
			views = append(views, a.View())
			checkPast(t, rapid.SampledFrom(views).Draw(t, "older view"), a.View())
			if o := x.GetOutcome(); o != ok && o != stale && o != notFound && x.GetIndex() == index {
				select {
				case <-was.Changed():
					t.Fatalf("%v changed something: %v", c, x)
				default:
				}
			}
			if rapid.IntRange(0, 9).Draw(t, "restart") == 0 {
				fresh := New()
				if err := fresh.Restore(bytes.NewReader(persisted(t, b))); err != nil {
					t.Fatal(err)
				}
				b = fresh
			}
			if again := a.Apply(index, c); again.GetOutcome() != stale {
				t.Fatalf("entry %d applied twice: %v", index, again)
			}
		}
		if x, y := persisted(t, a), persisted(t, b); !bytes.Equal(x, y) {
			t.Fatalf("snapshots differ: %d and %d bytes", len(x), len(y))
		}
	})
}

// onlyGrown checks what a single state cannot show.
func onlyGrown(t *rapid.T, was, is *View, index uint64) {
	if is.Index() != index || is.meta.assignments < was.meta.assignments {
		t.Fatalf("index %d, counter %d after %d", is.Index(), is.meta.assignments, was.meta.assignments)
	}
	for a := range is.Assignments() {
		before := was.Assignment(a.GetId())
		switch {
		case before == nil && (a.GetToken() != index || !usable(is.GPU(a.GetGpu()), was.Host(a.GetHost()))):
			t.Fatalf("assignment %s is new with token %d on %v", a.GetId(), a.GetToken(), is.GPU(a.GetGpu()))
		case before != nil && (before.GetToken() != a.GetToken() || before.GetResidence() > a.GetResidence()):
			t.Fatalf("assignment went from %v to %v", before, a)
		}
	}
	for _, kind := range persistOrder() {
		changed := false
		for o := range is.Objects(kind, "") {
			if Revision(o) == index {
				changed = true
			} else if before := was.Object(kind, Name(o)); !proto.Equal(before, o) {
				t.Fatalf("%s changed without a revision", Name(o))
			}
		}
		for o := range was.Objects(kind, "") {
			changed = changed || is.Object(kind, Name(o)) == nil
		}
		select {
		case <-was.Changed(kind):
			// An object made and deleted in one entry may wake somebody for nothing.
		default:
			if changed {
				t.Fatalf("%s changed and nobody was woken", kind)
			}
		}
	}
}

func persisted(t interface{ Fatal(...any) }, s *Store) []byte {
	var b bytes.Buffer
	if err := s.View().Persist(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func drawCommand(t *rapid.T, v *View) *clusterv1.Command {
	d := drawer{t, v}
	c := &clusterv1.Command{
		Version: uint32(d.pick("version", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 2)), Actor: d.one("actor", "ann", "bob"),
		UnixMs: rapid.Int64().Draw(t, "now"),
	}
	if d.chance("repeatable", 6) {
		c.Id = fmt.Sprint("c", rapid.IntRange(1, 30).Draw(t, "command"))
	}
	d.op(c)
	return c
}

type drawer struct {
	t *rapid.T
	v *View
}

func (d drawer) one(what string, of ...string) string { return rapid.SampledFrom(of).Draw(d.t, what) }
func (d drawer) pick(what string, of ...uint64) uint64 {
	return rapid.SampledFrom(of).Draw(d.t, what)
}

func (d drawer) chance(what string, of int) bool {
	return rapid.IntRange(1, of).Draw(d.t, what) == of
}

func (d drawer) host() string { return d.one("host", "h1", "h2", "h3", "nowhere") }

// gpu is mostly one that there is.
func (d drawer) gpu() string {
	ids := []string{"nowhere/g1"}
	for g := range d.v.GPUs() {
		ids = append(ids, g.GetId(), g.GetId())
	}
	return d.one("gpu", ids...)
}
func (d drawer) claim() string { return d.one("claim", "a", "b", "c", "a.1", "whole", "p.0") }

func (d drawer) assignment() string {
	ids := []string{"a.1", "none.9"}
	for a := range d.v.Assignments() {
		ids = append(ids, a.GetId())
	}
	return d.one("assignment", ids...)
}

func (d drawer) token(right uint64) uint64 {
	if d.chance("wrong token", 5) {
		return d.pick("token", 0, 1, right+1)
	}
	return right
}

func (d drawer) report() *clusterv1.ReportHost {
	name := d.one("host", "h1", "h2", "h3")
	h := &clusterv1.Host{
		Name: name, Id: "id-" + name, Address: name + ":1", Version: d.one("version", "1", "2"), Protocol: uint32(d.pick("protocol", 1, 1, 2, 0)),
		Labels: map[string]string{"not": "mine"}, Draining: true,
	}
	if d.chance("impostor", 8) {
		h.Id = d.one("id", "id-h1", "id-h2", "new", "")
	}
	if d.chance("address", 8) {
		h.Address = d.one("address", "h1:1", "h2:1", "x", "")
	}
	r := &clusterv1.ReportHost{Host: h}
	for _, g := range rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"g1", "g2", "g3"}), 0, 3, rapid.ID[string]).Draw(d.t, "gpus") {
		r.Gpus = append(r.Gpus, &clusterv1.GPU{
			Name: g, Model: d.one("model", "small", "large"), Rank: uint32(d.pick("rank", 1, 2)),
			Limits:   &gpuctlv1.Limits{GlobalMemory: d.pick("capacity", 100, 100, 100, 40, 0, 1<<60), Extensions: []string{"a", "b"}},
			Health:   clusterv1.Health(d.pick("health", 1, 1, 1, 0, 2, 3)),
			Profiles: []*clusterv1.Profile{{Name: "p", Memory: d.pick("slice", 10, 10, 30), MaxInstances: uint32(d.pick("instances", 2, 2, 1))}},
		})
	}
	return r
}

func (d drawer) choices() []*clusterv1.Choice {
	var out []*clusterv1.Choice
	for n := d.pick("choices", 1, 1, 1, 1, 2, 2, 0); n > 0; n-- {
		c := &clusterv1.Choice{Gpu: d.gpu(), Memory: d.pick("memory", 0, 10, 50, 60, 100)}
		if d.chance("absurd", 20) {
			c.Memory = 1 << d.pick("absurd memory", 60, 61, 63)
		}
		switch d.pick("slice", 0, 0, 1, 2) {
		case 1:
			c.Kind, c.Profile, c.Memory = clusterv1.VGPUKind_VGPU_KIND_VF, "p", 0
		case 2:
			c.Kind = clusterv1.VGPUKind(d.pick("kind", 0, 1, 2, 2, 6, 7, 3, 99))
		}
		if d.chance("reserved", 3) {
			c.Reservation = d.one("reservation", "r1", "r2")
			if x := d.v.Reservation(c.GetReservation()); x != nil {
				c.Gpu, c.Memory = x.GetGpu(), x.GetMemory()
			}
		}
		out = append(out, c)
	}
	return out
}

func (d drawer) op(c *clusterv1.Command) {
	switch d.pick("op", 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 10, 10, 10, 11, 11, 12, 12, 12, 12, 13, 14, 14, 15, 16, 16, 17, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 26) {
	case 1:
		c.Op = &clusterv1.Command_ReportHost{ReportHost: d.report()}
	case 2:
		c.Op = &clusterv1.Command_SetHostDown{SetHostDown: &clusterv1.SetHostDown{Host: d.host(), Down: d.chance("down", 2), Message: "silent"}}
	case 3:
		c.Op = &clusterv1.Command_DrainHost{DrainHost: &clusterv1.DrainHost{Host: d.host(), Draining: d.chance("drain", 2), Message: "repair"}}
	case 4:
		c.Op = &clusterv1.Command_LabelHost{LabelHost: &clusterv1.LabelHost{Host: d.host(), Set: map[string]string{d.one("label", "rack", "zone", "/", ""): "1"}, Remove: []string{"rack"}}}
	case 5:
		c.Op = &clusterv1.Command_RemoveHost{RemoveHost: &clusterv1.RemoveHost{Host: d.host(), Force: d.chance("force", 2)}}
	case 6:
		c.Op = &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: d.gpu(), Cordoned: d.chance("cordon", 2), Message: "hot"}}
	case 7:
		c.Op = &clusterv1.Command_RankModel{RankModel: &clusterv1.RankModel{Model: d.one("model", "small", "large", "none"), Rank: 7, Clear: d.chance("clear", 2)}}
	case 8:
		choices := d.choices()
		count := uint32(len(choices))
		if d.chance("wrong count", 8) {
			count = 3
		}
		c.Op = &clusterv1.Command_PutClaim{PutClaim: &clusterv1.PutClaim{Choices: choices, Claim: &clusterv1.Claim{
			Id: d.claim(), Count: count, Group: d.one("group", "", "", "x"), Home: d.one("home", "", "h1", "h2"), Remote: clusterv1.Remote(d.pick("remote", 0, 1, 2, 3, 4)), Unmet: clusterv1.Unmet(d.pick("unmet", 0, 1, 2, 2, 2, 9)),
			Labels: map[string]string{"a": "1", "b": "2"}, State: bound, Assignments: []string{"lie"},
		}}}
	case 9:
		c.Op = &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: d.claim()}}
	case 10:
		c.Op = &clusterv1.Command_Assign{Assign: &clusterv1.Assign{Claim: d.claim(), Choices: d.choices()}}
	case 11:
		op := &clusterv1.ReleaseAssignments{}
		if d.chance("of claim", 2) {
			op.Claim = d.claim()
		} else {
			op.Assignments = []string{d.assignment(), d.assignment()}
		}
		c.Op = &clusterv1.Command_ReleaseAssignments{ReleaseAssignments: op}
	case 12:
		c.Op = &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: d.confirmations()}
	case 13:
		c.Op = &clusterv1.Command_CancelAssignments{CancelAssignments: &clusterv1.CancelAssignments{Assignments: []string{d.assignment()}, Reason: "lost"}}
	case 14:
		c.Op = &clusterv1.Command_PutReservation{PutReservation: &clusterv1.PutReservation{Reservation: &clusterv1.Reservation{
			Id: d.one("reservation", "r1", "r2"), Owner: d.one("owner", "a", "b", "m1"), Gpu: d.gpu(), Memory: d.pick("memory", 0, 10, 60, 200), TtlMs: uint32(d.pick("ttl", 1000, 1000, 1000, 0)),
		}}}
	case 15:
		id := d.one("reservation", "r1", "r2")
		c.Op = &clusterv1.Command_DeleteReservation{DeleteReservation: &clusterv1.DeleteReservation{Id: id, Token: d.token(d.v.Reservation(id).GetToken()), Expired: d.chance("expired", 2)}}
	case 16:
		c.Op = &clusterv1.Command_ReportSessions{ReportSessions: d.sessions()}
	case 17:
		id := d.one("migration", "m1", "m2", "a")
		c.Op = &clusterv1.Command_PutMigration{PutMigration: &clusterv1.PutMigration{TakeOver: d.chance("take over", 4), Migration: &clusterv1.Migration{
			Id: id, Verb: "migrate", Claim: "a", Driver: d.one("driver", "h1", "h1", "h2"), State: clusterv1.MigrationState(d.pick("state", 0, 1, 1, 2, 3, 5)), Step: d.one("step", "x", "y"),
			Token: d.token(d.v.Migration(id).GetToken()),
		}}}
	case 18:
		c.Op = &clusterv1.Command_PutJoinToken{PutJoinToken: &clusterv1.PutJoinToken{Token: &clusterv1.JoinToken{Id: d.one("token", "t1", "t2"), SecretHash: make([]byte, d.pick("hash", 32, 32, 31)), Role: clusterv1.Role(d.pick("role", 1, 4, 4, 0)), Name: d.one("name", "", "h1")}}}
	case 19:
		c.Op = &clusterv1.Command_UseJoinToken{UseJoinToken: &clusterv1.UseJoinToken{Id: d.one("token", "t1", "t2"), Identity: d.identity()}}
	case 20:
		c.Op = &clusterv1.Command_DeleteJoinToken{DeleteJoinToken: &clusterv1.DeleteJoinToken{Id: d.one("token", "t1", "t2")}}
	case 21:
		c.Op = &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{Identity: d.identity()}}
	case 22:
		c.Op = &clusterv1.Command_DeleteIdentity{DeleteIdentity: &clusterv1.DeleteIdentity{Id: d.one("identity", "id-h1", "ann", "bob")}}
	case 23:
		c.Op = &clusterv1.Command_Note{Note: &clusterv1.Note{Event: &clusterv1.Event{Kind: clusterv1.Kind(d.pick("kind", 0, 1, 2, 40)), Object: d.host(), Type: d.one("type", "", "Seen", "\x00"), About: []string{"gpu/h1/g1"}}}}
	case 25:
		c.Op = &clusterv1.Command_SetQueue{SetQueue: &clusterv1.SetQueue{Policy: clusterv1.QueuePolicy(d.pick("queue", 0, 1, 2, 3, 4))}}
	case 26:
		op := &clusterv1.ReportLinks{Host: d.host()}
		for n := rapid.IntRange(0, 2).Draw(d.t, "links"); n > 0; n-- {
			op.Links = append(op.Links, &clusterv1.Link{
				From: d.one("from", "", "", "h1"), To: d.host(), RttNs: int64(d.pick("rtt", 0, 1000, 1<<63)), Rate: d.pick("rate", 1000, 2000, 1<<60), FrozenPpm: uint32(d.pick("frozen", 0, 5, 1_000_001)),
			})
		}
		c.Op = &clusterv1.Command_ReportLinks{ReportLinks: op}
	case 24:
		hostile := []*clusterv1.Command{
			{Op: &clusterv1.Command_SetQueue{}},
			{Op: &clusterv1.Command_ReportLinks{ReportLinks: &clusterv1.ReportLinks{Host: "h1", Links: []*clusterv1.Link{nil}}}},
			{},
			{Op: (*clusterv1.Command_PutClaim)(nil)},
			{Op: &clusterv1.Command_PutClaim{}},
			{Op: &clusterv1.Command_ReportHost{}},
			{Op: &clusterv1.Command_ReportHost{ReportHost: &clusterv1.ReportHost{Host: &clusterv1.Host{Name: "h1", Id: "id-h1"}, Gpus: []*clusterv1.GPU{nil}}}},
			{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{Host: "h1", Confirmations: []*clusterv1.Confirmation{nil}}}},
			{Op: &clusterv1.Command_Note{}},
			{Op: &clusterv1.Command_Note{Note: &clusterv1.Note{Event: &clusterv1.Event{Message: "\xff"}}}},
			{Op: &clusterv1.Command_InitCluster{InitCluster: &clusterv1.InitCluster{ClusterId: "k"}}},
			{Op: &clusterv1.Command_Assign{}},
			{Op: &clusterv1.Command_PutMigration{}},
			{Op: &clusterv1.Command_PutReservation{}},
			{Op: &clusterv1.Command_UseJoinToken{}},
			{Op: &clusterv1.Command_PutJoinToken{}},
			{Op: &clusterv1.Command_PutIdentity{}},
			{Op: &clusterv1.Command_ReportSessions{}},
			{Op: &clusterv1.Command_CancelAssignments{}},
			{Op: &clusterv1.Command_ReleaseAssignments{}},
		}
		x := hostile[rapid.IntRange(0, len(hostile)-1).Draw(d.t, "hostile")]
		c.Op = x.Op
	}
}

func (d drawer) confirmations() *clusterv1.ConfirmAssignments {
	op := &clusterv1.ConfirmAssignments{Host: d.host()}
	for n := rapid.IntRange(0, 3).Draw(d.t, "confirmations"); n > 0; n-- {
		id := d.assignment()
		a := d.v.Assignment(id)
		if a != nil && !d.chance("other host", 6) {
			op.Host = a.GetHost()
		}
		op.Confirmations = append(op.Confirmations, &clusterv1.Confirmation{Assignment: id, Token: d.token(a.GetToken()), Gone: d.chance("gone", 2)})
	}
	return op
}

func (d drawer) sessions() *clusterv1.ReportSessions {
	op := &clusterv1.ReportSessions{Host: d.host(), All: d.chance("all", 3)}
	for n := rapid.IntRange(0, 2).Draw(d.t, "sessions"); n > 0; n-- {
		op.Sessions = append(op.Sessions, &clusterv1.Session{
			Id: op.GetHost() + "/" + d.one("session", "s1", "s2", "s3"), Claim: d.claim(), State: gpuctlv1.SessionState(d.pick("state", 1, 2, 3, 5, 0, 77)), Gpus: []string{d.gpu()},
		})
	}
	return op
}

func (d drawer) identity() *clusterv1.Identity {
	if d.chance("user", 2) {
		return &clusterv1.Identity{Id: d.one("user", "ann", "bob", ""), Role: clusterv1.Role(d.pick("role", 1, 2, 4)), Enrolment: d.one("enrolment", "", "e-1", "e-2", "e 3")}
	}
	name := d.host()
	return &clusterv1.Identity{Id: fmt.Sprintf("id-%s%s", name, d.one("suffix", "", "", "x")), Role: clusterv1.Role_ROLE_HOST, Host: name}
}
