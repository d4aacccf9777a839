package member

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// TestForeignClaim is a claim that was made from outside: the host takes note,
// and gives the GPU back when nothing uses it any more.
func TestForeignClaim(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	b := ms[1]
	claim := &clusterv1.Claim{Id: "vm", Host: "b"}
	res, err := ms[2].api.CreateClaim(admin(ctx), connect.NewRequest(&clusterv1.CreateClaimRequest{Claim: claim}))
	if err != nil || len(res.Msg.GetAssignments()) != 1 {
		t.Fatalf("%v, %v", res, err)
	}
	as := res.Msg.GetAssignments()[0]
	_, gpu, _ := strings.Cut(as.GetGpu(), "/")
	b.host.do(func() { b.host.uses["vm"] = []string{gpu} })
	residence := func(want clusterv1.Residence) {
		t.Helper()
		testkit.Until(t, want.String(), func() error {
			if got := ms[0].view(ctx).Assignment(as.GetId()).GetResidence(); got != want {
				return fmt.Errorf("it is %v", got)
			}
			return nil
		})
	}
	residence(clusterv1.Residence_RESIDENCE_RESIDENT)
	if _, err := ms[0].api.DeleteClaim(admin(ctx), connect.NewRequest(&clusterv1.DeleteClaimRequest{Claim: "vm"})); err != nil {
		t.Fatal(err)
	}
	residence(clusterv1.Residence_RESIDENCE_RELEASING)
	for range 5 { // as long as it is used
		b.Kick()
		time.Sleep(50 * time.Millisecond) // nothing tells that it stays so
		residence(clusterv1.Residence_RESIDENCE_RELEASING)
	}
	// A host that does not know yet what it has does not say that it is gone.
	b.host.do(func() { b.host.unready, b.host.uses = true, map[string][]string{} })
	b.crash()
	b.start(ctx)
	time.Sleep(300 * time.Millisecond) // nothing tells that it stays so
	residence(clusterv1.Residence_RESIDENCE_RELEASING)
	b.host.do(func() { b.host.unready = false })
	testkit.Until(t, "gone", func() error {
		if v := ms[0].view(ctx); v.Claim("vm") != nil || v.Assignment(as.GetId()) != nil {
			return fmt.Errorf("%v", v.Claim("vm"))
		}
		return nil
	})
}

// A session that leaves a GPU of another host and goes back at once gets it again: the host's
// word that it is free is waited for, and a host that never says so has the GPU taken.
func TestAClaimGetsAgainWhatItHasJustGivenBack(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b")
	a, b := ms[0], ms[1]
	claim := &clusterv1.Claim{Id: "s", Remote: clusterv1.Remote_REMOTE_ALLOWED}
	assigned := func() (out *clusterv1.Assignment) {
		for as := range ms[0].view(ctx).AssignmentsOfClaim("s") {
			if as.GetGpu() == "b/g0" {
				out = as
			}
		}
		return out
	}
	a.host.do(func() { a.host.claims["s"], a.host.uses["s"] = true, []string{"a/g0", "g0", "b/g0"} })
	if err := a.Acquire(ctx, claim, []string{"g0"}, 0); err != nil {
		t.Fatal(err)
	}
	for round, confirms := range []bool{true, true, false} {
		a.host.do(func() { a.host.uses["s"] = []string{"a/g0", "g0", "b/g0"} })
		if err := a.Acquire(ctx, claim, []string{"b/g0"}, 0); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		first := assigned()
		b.host.do(func() { b.host.uses["s"] = []string{"g0"} }) // a lease
		a.host.do(func() { a.host.uses["s"] = []string{"a/g0", "g0"} })
		a.Kick()
		testkit.Until(t, "it is given back", func() error {
			return testkit.Want(assigned().GetResidence() == releasing, assigned())
		})
		a.host.do(func() { a.host.uses["s"] = []string{"a/g0", "g0", "b/g0"} })
		if confirms {
			time.AfterFunc(300*time.Millisecond, func() {
				b.host.do(func() { b.host.uses["s"] = nil })
				b.Kick()
			})
		}
		err := a.Acquire(ctx, claim, []string{"b/g0"}, 0)
		switch second := assigned(); {
		case !confirms && !errors.Is(err, ErrTaken):
			t.Errorf("the lease has not ended: %v, %v", err, second)
		case confirms && (err != nil || second.GetToken() <= first.GetToken() || second.GetResidence() == releasing):
			t.Errorf("round %d: %v: %v, it was %v", round, err, second, first)
		}
		a.host.do(func() { a.host.uses["s"] = []string{"a/g0", "g0"} })
		a.Kick()
		if confirms {
			testkit.Until(t, "it is gone", func() error { return testkit.Want(assigned() == nil, assigned()) })
		}
	}
}

// A host that lends and is started while nobody leads has an old state, or none. What that
// does not have is not taken for released: sessions of other hosts would lose their GPUs.
func TestNothingIsTakenForReleasedBecauseOfAnOldState(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b")
	a, b := ms[0], ms[1] // a alone votes
	a.host.do(func() { a.host.claims["s"], a.host.uses["s"] = true, []string{"b/g0"} })
	b.host.do(func() { b.host.uses["s"] = []string{"g0"} }) // a lease
	if err := a.Acquire(ctx, &clusterv1.Claim{Id: "s", Remote: clusterv1.Remote_REMOTE_ALLOWED}, []string{"b/g0"}, 0); err != nil {
		t.Fatal(err)
	}
	borrower := a.Self().ID
	token, err := b.TokenOf(ctx, "s")
	if err != nil {
		t.Fatal(err)
	}
	assigned := func() error {
		_, err := b.Assigned(ctx, "s", borrower, []string{"g0"}, token, false)
		return err
	}
	if err := assigned(); err != nil {
		t.Fatal(err)
	}
	b.crash()
	a.crash()
	b.start(ctx)
	if err := assigned(); !errors.Is(err, replica.ErrNoLeader) || errors.Is(err, ErrNotAssigned) {
		t.Errorf("nobody leads: %v", err)
	}
	if b.CaughtUp() {
		t.Error("it says that it has caught up")
	}
	a.start(ctx)
	testkit.Until(t, "known", assigned)
	if _, err := b.Assigned(ctx, "s", borrower, []string{"g1"}, token, false); !errors.Is(err, ErrNotAssigned) {
		t.Errorf("another GPU: %v", err)
	}
}

// A claim by which a host lent a VM a GPU ends when that host is removed by force. Its id is
// the VM's, so the VM could not get another one.
func TestAClaimOfAHostThatWasRemovedByForceCanBeMadeByAnother(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	a, b, c := ms[0], ms[1], ms[2]
	claim := &clusterv1.Claim{Id: "vmgpu-1"}
	for _, m := range []*machine{b, c} {
		m.host.do(func() { m.host.claims["vmgpu-1"], m.host.uses["vmgpu-1"] = true, []string{"g0", "g1"} })
	}
	if res, err := b.Claim(ctx, claim); err != nil || len(res.GetAssignments()) != 1 {
		t.Fatalf("%v, %v", res, err)
	}
	b.crash()
	if _, err := a.api.RemoveHost(admin(ctx), connect.NewRequest(&clusterv1.RemoveHostRequest{Host: "b", Force: true})); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "given up", func() error {
		v := a.view(ctx)
		return testkit.Want(v.Claim("vmgpu-1") == nil && len(slices.Collect(v.AssignmentsOfHost("b"))) == 0, v.Claim("vmgpu-1"))
	})
	if res, err := c.Claim(ctx, claim); err != nil || len(res.GetAssignments()) != 1 {
		t.Errorf("%v, %v", res, err)
	}
}

// A session whose claim may wait is suspended, and later resumed. Meanwhile its GPU is free,
// and the leader does not give it to the claim again and again.
func TestAWaitingClaimThatGaveItsGPUBackIsBoundByItsHostAlone(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	bound := func(id string, want ...string) {
		t.Helper()
		testkit.Until(t, fmt.Sprint(id, " has ", want), func() error {
			var got []string
			for as := range a.view(ctx).AssignmentsOfClaim(id) {
				if as.GetResidence() == clusterv1.Residence_RESIDENCE_RESIDENT {
					got = append(got, as.GetGpu())
				}
			}
			return testkit.Want(slices.Equal(got, want), got)
		})
	}
	wait := func(id, expr string) {
		t.Helper()
		a.host.do(func() { a.host.claims[id], a.host.uses[id] = true, []string{"g0", "g1"} })
		if _, err := a.Claim(ctx, &clusterv1.Claim{Id: id, Unmet: clusterv1.Unmet_UNMET_WAIT, Expr: expr}); err != nil {
			t.Fatal(err)
		}
	}
	wait("s", `name == "g0"`)
	bound("s", "a/g0")
	wait("next", `name == "g0"`)
	if !a.Waits() {
		t.Error("nobody waits for g0")
	}
	a.host.do(func() { a.host.uses["s"] = nil }) // the suspend
	a.Kick()
	bound("next", "a/g0") // it was never bound before
	a.host.do(func() { delete(a.host.claims, "next"); delete(a.host.uses, "next") })
	a.Kick()
	testkit.Until(t, "g0 is free", func() error {
		v := a.view(ctx)
		return testkit.Want(v.Claim("next") == nil && v.GPU("a/g0").GetFree(), v.GPU("a/g0"))
	})
	was := a.view(ctx).Index()
	time.Sleep(500 * time.Millisecond) // nothing tells that it stays so
	if v := a.view(ctx); v.Index() != was || !v.GPU("a/g0").GetFree() {
		t.Errorf("%d entries for nothing: %v", v.Index()-was, v.Events(clusterv1.Kind_KIND_UNSPECIFIED, "", 20))
	}
	if a.Waits() {
		t.Error("sessions stay away from home for one that is suspended")
	}
	if _, err := a.AwaitBound(ctx, "s"); !reason.Is(err, reason.Contended) {
		t.Errorf("nobody binds it: %v", err)
	}
	a.host.do(func() { a.host.uses["s"] = []string{"g1"} }) // the resume
	if err := a.Acquire(ctx, &clusterv1.Claim{Id: "s"}, []string{"g1"}, 0); err != nil {
		t.Fatal(err)
	}
	bound("s", "a/g1")
}

// TestOwnClaims are claims of a host's sessions: bound through the cluster,
// moved, released when the host forgets them, and told again when the cluster
// has lost them.
func TestOwnClaims(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	for _, b := range ms { // the leader and others
		h := b.host
		id := "own-" + b.name
		h.do(func() { h.claims[id] = true; h.uses[id] = []string{"g0", "g1"} })
		res, err := b.Claim(ctx, &clusterv1.Claim{Id: id, Expr: `name in ["g0"]`})
		if err != nil || len(res.GetAssignments()) != 1 || res.GetAssignments()[0].GetGpu() != b.name+"/g0" {
			t.Fatalf("%v, %v", res, err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: id}, []string{"g1"}, 0); err != nil {
			t.Fatal(err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: id}, []string{"g1"}, 0); err != nil {
			t.Errorf("again: %v", err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: "late-" + b.name}, []string{"g1"}, 0); !errors.Is(err, ErrTaken) {
			t.Errorf("a GPU that is held: %v", err)
		}
		if err := b.Acquire(ctx, &clusterv1.Claim{Id: "late-" + b.name}, []string{"g9"}, 0); err == nil {
			t.Errorf("a GPU that there is not: %v", err)
		}
		owned := func(want ...string) {
			t.Helper()
			testkit.Until(t, fmt.Sprint("owned: ", want), func() error {
				got := map[string]bool{}
				v := ms[0].view(ctx)
				for as := range v.AssignmentsOfClaim(id) {
					if as.GetResidence() != clusterv1.Residence_RESIDENCE_RESIDENT {
						return fmt.Errorf("%v", as)
					}
					got[as.GetGpu()] = true
				}
				if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, want) {
					return fmt.Errorf("%v, claim %v", names, v.Claim(id))
				}
				return v.Check()
			})
		}
		owned(b.name+"/g0", b.name+"/g1")
		// A swap is over: the session has moved to g1.
		h.do(func() { h.uses[id] = []string{"g1"} })
		b.Kick()
		owned(b.name + "/g1")
		// Somebody deletes the claim that is in use: the GPU stays until it is not.
		if _, err := ms[2].api.DeleteClaim(admin(ctx), connect.NewRequest(&clusterv1.DeleteClaimRequest{Claim: id})); err != nil {
			t.Fatal(err)
		}
		b.Kick()
		time.Sleep(100 * time.Millisecond) // nothing tells that it is not released
		if c := ms[0].view(ctx).Claim(id); c.GetState() != clusterv1.ClaimState_CLAIM_STATE_RELEASING || len(c.GetAssignments()) != 1 {
			t.Errorf("%v", c)
		}
		h.do(func() { delete(h.uses, id); delete(h.claims, id) })
		b.Kick()
		testkit.Until(t, "released", func() error {
			if v := ms[0].view(ctx); v.Claim(id) != nil || !v.GPU(b.name+"/g1").GetFree() {
				return fmt.Errorf("%v", v.Claim(id))
			}
			return nil
		})
		// What it holds and the cluster has never heard of, it is told.
		h.do(func() {
			h.claims[id], h.uses[id] = true, []string{"g0"}
			h.holdings = []Holding{{Claim: &clusterv1.Claim{Id: id}, GPUs: []string{"g0"}, Amount: 1 << 30}}
		})
		b.Kick()
		owned(b.name + "/g0")
		h.do(func() { h.claims, h.uses, h.holdings = map[string]bool{}, map[string][]string{}, nil })
		b.Kick()
		testkit.Until(t, "forgotten", func() error {
			if c := ms[0].view(ctx).Claim(id); c != nil {
				return fmt.Errorf("%v", c)
			}
			return nil
		})
	}
}

// TestHoldingOfOthers: what others were given meanwhile stays theirs.
func TestHoldingOfOthers(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	if _, err := a.api.CreateClaim(admin(ctx), connect.NewRequest(&clusterv1.CreateClaimRequest{Claim: &clusterv1.Claim{Id: "vm", Expr: `name == "g0"`}})); err != nil {
		t.Fatal(err)
	}
	a.host.do(func() {
		a.host.claims["mine"], a.host.uses["mine"] = true, []string{"g0"}
		a.host.holdings = []Holding{{Claim: &clusterv1.Claim{Id: "mine"}, GPUs: []string{"g0"}}}
	})
	a.Kick()
	testkit.Until(t, "said", func() error {
		if !strings.Contains(a.log.String(), "has not given to it") {
			return errors.New("not yet")
		}
		return nil
	})
	v := a.view(ctx)
	owners := slices.Collect(v.AssignmentsOfGPU("a/g0"))
	if len(owners) != 1 || owners[0].GetClaim() != "vm" {
		t.Errorf("%v", owners)
	}
}

// TestHoldingsOfSlices: what VMs have of a card is told as what it is, not as the whole card.
func TestHoldingsOfSlices(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	a.host.do(func() {
		for i, kind := range []string{state.KindSlice, state.KindMediated} {
			a.host.gpus[i].Kinds = []string{kind}
			a.host.gpus[i].Profiles = []*clusterv1.Profile{{Name: "1of4", Memory: 2 << 30, MaxInstances: 4}}
		}
		for _, gpu := range []string{"g0", "g1"} {
			for i := range 2 {
				id := fmt.Sprintf("vm-%s-%d", gpu, i)
				h := Holding{Claim: &clusterv1.Claim{Id: id, Profile: "1of4"}, GPUs: []string{gpu}}
				if gpu == "g1" {
					h.Amount = 2 << 30 // mediated GPUs say so
				}
				a.host.claims[id], a.host.uses[id] = true, []string{gpu}
				a.host.holdings = append(a.host.holdings, h)
			}
		}
	})
	if err := a.Announce(ctx); err != nil {
		t.Fatal(err)
	}
	a.Kick()
	for gpu, kind := range map[string]clusterv1.VGPUKind{"a/g0": clusterv1.VGPUKind_VGPU_KIND_VENDOR, "a/g1": clusterv1.VGPUKind_VGPU_KIND_MEDIATED} {
		testkit.Until(t, gpu, func() error {
			n := 0
			for p := range a.view(ctx).VGPUsOfGPU(gpu) {
				if p.GetKind() != kind || p.GetProfile() != "1of4" || p.GetMemory() != 2<<30 {
					return fmt.Errorf("%v", p)
				}
				n++
			}
			return testkit.Want(n == 2, n)
		})
	}
}

// TestRecords notes operations, with nobody to note them at times.
func TestRecords(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b", "c")
	l, others := leader(ctx, t, ms)
	b := others[0]
	r := func(step string, s clusterv1.MigrationState) *clusterv1.Migration {
		return &clusterv1.Migration{Id: "m1", Verb: "upgrade", Object: "s1", Claim: "c1", From: "g0", To: "g1", Step: step, State: s, StartedUnixMs: 1}
	}
	const running, done = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, clusterv1.MigrationState_MIGRATION_STATE_DONE
	b.Record(r("freeze", running))
	b.Record(r("copy", running))
	wait := func(state clusterv1.MigrationState, step string) {
		t.Helper()
		testkit.Until(t, step, func() error {
			v, err := b.member().store.Read(ctx, false)
			if err != nil {
				return err
			}
			o := v.Object(clusterv1.Kind_KIND_MIGRATION, "m1").GetMigration()
			if o.GetState() != state || o.GetStep() != step || o.GetDriver() != b.name || o.GetObject() != b.name+"/s1" {
				return fmt.Errorf("%v", o)
			}
			return nil
		})
	}
	wait(running, "copy")
	// Nobody leads for longer than one try lasts.
	l.crash()
	others[1].crash()
	b.Record(r("thaw", running))
	b.Record(r("end", done))
	time.Sleep(attempt + time.Second) // how long nobody leads is the test's subject
	others[1].start(ctx)
	wait(done, "end")
	l.start(ctx)
	complete(ctx, t, ms)
}

// TestRecordAfterARestart ends a record that an earlier hostd of the host has begun, and none
// that another host has taken over.
func TestRecordAfterARestart(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	a := cluster(ctx, t, "a")[0]
	const running, done, failed = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, clusterv1.MigrationState_MIGRATION_STATE_DONE, clusterv1.MigrationState_MIGRATION_STATE_FAILED
	record := func(id string, s clusterv1.MigrationState) {
		a.Record(&clusterv1.Migration{Id: id, Verb: "upgrade", Object: "s1", Claim: "c1", State: s})
	}
	wait := func(id string, s clusterv1.MigrationState) {
		t.Helper()
		testkit.Until(t, fmt.Sprint(id, s), func() error {
			o := a.view(ctx).Migration(id)
			return testkit.Want(o.GetState() == s && (o.GetEndedUnixMs() > 0) == (s != running), o)
		})
	}
	for _, id := range []string{"m1", "m2", "m3"} {
		record(id, running)
		wait(id, running)
	}
	record("m2", failed)
	wait("m2", failed)
	a.apply(ctx, &clusterv1.Command{Op: &clusterv1.Command_PutMigration{PutMigration: &clusterv1.PutMigration{TakeOver: true, Migration: &clusterv1.Migration{Id: "m3", Driver: "b"}}}})
	a.crash()
	a.start(ctx)
	for _, id := range []string{"m3", "m2", "m1"} { // they are written in order
		record(id, done)
	}
	wait("m1", done)
	wait("m2", failed)
	wait("m3", running)
}

// A host that was taken for down gets back what its claim had elsewhere: its claim is pending, and nobody else binds it.
func TestAClaimThatLostItsGPUElsewhereGetsItAgain(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	ms := cluster(ctx, t, "a", "b")
	a, b := ms[0], ms[1]
	claim := &clusterv1.Claim{Id: "s", Remote: clusterv1.Remote_REMOTE_ALLOWED}
	a.host.do(func() { a.host.claims["s"], a.host.uses["s"] = true, []string{"b/g0"} })
	if err := a.Acquire(ctx, claim, []string{"b/g0"}, 0); err != nil {
		t.Fatal(err)
	}
	first, err := a.TokenOf(ctx, "s")
	if err != nil {
		t.Fatal(err)
	}
	m := b.member()
	var words []*clusterv1.Confirmation
	for as := range a.View().AssignmentsOfClaim("s") {
		words = append(words, &clusterv1.Confirmation{Assignment: as.GetId(), Token: as.GetToken(), Gone: true})
	}
	if _, err := m.propose(ctx, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ // as for an orphan
		ConfirmAssignments: &clusterv1.ConfirmAssignments{Host: m.Host, Confirmations: words},
	}}); err != nil {
		t.Fatal(err)
	}
	if _, err := a.TokenOf(ctx, "s"); !errors.Is(err, ErrNotAssigned) {
		t.Fatalf("it has lost nothing: %v", err)
	}
	if err := a.Acquire(ctx, claim, []string{"b/g0"}, 0); err != nil {
		t.Fatal(err)
	}
	if again, err := a.TokenOf(ctx, "s"); err != nil || again <= first {
		t.Errorf("token %d, it was %d: %v", again, first, err)
	}
}
