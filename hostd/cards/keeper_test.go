package cards

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"go.uber.org/goleak"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func (w *world) attach(machine, gpu string, persistent bool) error {
	return w.keeper.Attach(w.t.Context(), &gpuctlv1.AttachRequest{Machine: machine, Gpu: gpu, Persistent: persistent}, func(*gpuctlv1.DeviceUpdate) {})
}

func (w *world) detach(machine, gpu string) error {
	return w.keeper.Detach(w.t.Context(), &gpuctlv1.DetachRequest{Machine: machine, Gpu: gpu, Persistent: true}, func(*gpuctlv1.DeviceUpdate) {})
}

func (w *world) prepare(uuid string, devices ...pci.Address) error {
	return w.keeper.PrepareStart(w.t.Context(), vm.VM{UUID: uuid, Name: w.machines[uuid].Name}, devices)
}

func TestLife(t *testing.T) {
	w := newWorld(t)
	var steps []string
	err := w.keeper.Attach(t.Context(), &gpuctlv1.AttachRequest{Machine: "one", Gpu: "65:00.1", Persistent: true}, func(u *gpuctlv1.DeviceUpdate) {
		if u.GetTookNs() > 0 {
			steps = append(steps, u.GetStep())
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"claim", "take", "reset", "attach", "store"}; !slices.Equal(steps, want) {
		t.Errorf("steps %v, want %v", steps, want)
	}
	w.settled()
	if w.owner[card4[3]] != uuid1 || len(w.stored[uuid1]) != 4 {
		t.Errorf("%v %v", w.owner, w.stored)
	}
	if err := w.attach("two", "nvidia-0", false); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "nvidia-0 belongs to VM one (attached)") {
		t.Errorf("a second owner: %v", err)
	}
	if err := w.detach("one", ""); err != nil {
		t.Fatal(err)
	}
	w.settled()
	if len(w.keeper.assignments) != 0 || len(w.stored) != 0 {
		t.Errorf("%v %v", w.keeper.assignments, w.stored)
	}
	w.restart()
	cards, err := w.keeper.Cards(t.Context())
	if err != nil || !slices.ContainsFunc(cards, func(c *gpuctlv1.Card) bool { return c.GetGpu() == "nvidia-0" && c.GetResetMethod() == "flr" }) {
		t.Errorf("how it was reset is forgotten: %v, %v", cards, err)
	}
}

// A hostd that was just started has not reported its cards yet: an attach waits for that.
func TestAttachWaitsUntilTheClusterKnowsTheCard(t *testing.T) {
	w := newWorld(t)
	w.unreported = true
	if err := w.attach("one", "nvidia-0", false); err != nil || w.unreported {
		t.Errorf("%v", err)
	}
}

func TestPlanChangesNothing(t *testing.T) {
	w := newWorld(t)
	w.machines[uuid2].Type = "pv"
	for _, c := range []struct {
		machine string
		reasons int
	}{{"one", 0}, {"two", 1}} {
		var got *gpuctlv1.DeviceUpdate
		err := w.keeper.Attach(t.Context(), &gpuctlv1.AttachRequest{Machine: c.machine, Plan: true}, func(u *gpuctlv1.DeviceUpdate) { got = u })
		if err != nil || len(got.GetPlan()) != 4 || len(got.GetReasons()) != c.reasons {
			t.Errorf("%s: %v %v", c.machine, got, err)
		}
	}
	if w.calls != 0 || len(w.claims) != 0 {
		t.Errorf("a plan made %d changes", w.calls)
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name  string
		world func(w *world)
		do    func(w *world) error
		is    error
		says  string
	}{
		{"no vm", nil, func(w *world) error { return w.attach("none", "nvidia-0", false) }, ErrNotFound, "vm none"},
		{"no gpu's class", nil, func(w *world) error { return w.attach("one", "0000:00:01.0", false) }, ErrNotFound, "it is a device of class 0604"},
		{"no gpu", nil, func(w *world) error { return w.attach("one", "nvidia-7", false) }, ErrNotFound, "it has 0000:06:00.0, nvidia-0"},
		{
			"vm is off", func(w *world) { w.machines[uuid1].State = "shutoff" }, func(w *world) error { return w.attach("one", "nvidia-0", false) },
			ErrRefused, "VM one is shutoff: start it, or change only its stored definition (--stored)",
		},
		{"isolation", func(w *world) { w.care = true }, func(w *world) error { return w.attach("one", "nvidia-0", false) }, ErrRefused, "it shares its group with 0000:07:00.0: give that away, too (--accept-care"},
		{"transient", func(w *world) { w.machines[uuid1].Persistent = false }, func(w *world) error { return w.attach("one", "nvidia-0", true) }, ErrRefused, "leave out --persistent"},
		{"claimed", func(w *world) { w.claims["c-1"] = "nvidia-0"; w.keeper.claiming["c-1"] = true }, func(w *world) error { return w.attach("one", "nvidia-0", false) }, ErrRefused, "nvidia-0: it is claimed"},
		{"no quorum", func(w *world) { w.noQuorum = true }, func(w *world) error { return w.attach("one", "nvidia-0", false) }, nil, "no leader"},
		{"nothing to detach", nil, func(w *world) error { return w.detach("one", "") }, ErrNotFound, "it has no gpu of this host"},
		{"not its own", nil, func(w *world) error { return w.detach("one", "nvidia-0") }, ErrNotFound, "it does not have nvidia-0"},
		{"by hand", func(w *world) { w.driver[card1[0]] = "pciback"; _ = w.give(uuid2, card1[0], nil) }, func(w *world) error { return w.attach("one", "06:00.0", false) }, ErrRefused, "the hypervisor says that VM two has 0000:06:00.0"},
		{"paused", func(w *world) { _ = w.attach("one", "nvidia-0", false); w.machines[uuid1].State = "paused" }, func(w *world) error { return w.detach("one", "") }, ErrRefused, "VM one is paused and cannot answer"},
		{"deaf agent", func(w *world) { _ = w.attach("one", "nvidia-0", false); w.deaf[uuid1] = true }, func(w *world) error { return w.detach("one", "") }, nil, "confirm: vm one: its gpuguest does not answer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			if c.world != nil {
				c.world(w)
			}
			before := w.calls
			err := c.do(w)
			if err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
			if w.calls > before+1 { // the claim
				t.Errorf("%d changes", w.calls-before)
			}
		})
	}
}

// A detach that the VM does not answer leaves it the card.
func TestDetachUnanswered(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.deaf[uuid1] = true
	err := w.keeper.Detach(t.Context(), &gpuctlv1.DetachRequest{Machine: "one", Unconfirmed: true}, func(*gpuctlv1.DeviceUpdate) {})
	if err == nil || !strings.Contains(err.Error(), "the VM still has 0000:65:00.0") {
		t.Errorf("%v", err)
	}
	w.settled()
	if a := w.keeper.assignments[card4[0]]; a.Phase != attached || !strings.Contains(a.Message, "still has it") {
		t.Errorf("%+v", a)
	}
}

// sharing says who has parts of a VM's GPUs.
type sharing struct {
	users []string
	late  []string // after the plan
	holds int
}

func (s *sharing) Users(string) []string { return s.users }

func (s *sharing) Hold(string) (func(), error) {
	if len(s.late) > 0 {
		return nil, errors.New("others have parts: " + s.late[0])
	}
	s.holds++
	return func() { s.holds-- }, nil
}

// A card of a service VM is not detached while others have parts of its GPUs, by no flag.
func TestACardThatServesOthersIsNotDetached(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	s := &sharing{users: []string{"vm:web"}}
	w.keeper.Serving = s
	for _, r := range []*gpuctlv1.DetachRequest{{Machine: "one"}, {Machine: "one", Unconfirmed: true}} {
		if err := w.keeper.Detach(t.Context(), r, func(*gpuctlv1.DeviceUpdate) {}); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "vm:web") {
			t.Errorf("%v", err)
		}
	}
	s.users, s.late = nil, []string{"host b"} // who has come after the plan
	if err := w.detach("one", ""); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "host b") {
		t.Errorf("%v", err)
	}
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != attached {
		t.Errorf("%+v", a)
	}
	s.late = nil
	if err := w.detach("one", ""); err != nil || s.holds != 0 {
		t.Errorf("%v, held %d times", err, s.holds)
	}
}

func TestQuarantine(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.resetFail[card4[0]] = errors.New("its configuration space reads all ones")
	if err := w.detach("one", ""); !errors.Is(err, errQuarantined) {
		t.Errorf("%v", err)
	}
	w.settled()
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != quarantined {
		t.Fatalf("%+v", a)
	}
	if err := w.attach("two", "nvidia-0", false); err == nil || !strings.Contains(err.Error(), "quarantined (its configuration space") {
		t.Errorf("%v", err)
	}
	gpus, _ := w.gpus(t.Context())
	w.keeper.Annotate(gpus)
	if !strings.Contains(gpus[0].GetHealthReason(), "quarantined") {
		t.Errorf("%v", gpus[0])
	}
	w.restart()
	w.settled()
	delete(w.resetFail, card4[0])
	if err := w.keeper.Reset(t.Context(), &gpuctlv1.ResetRequest{Gpu: "nvidia-0"}, func(*gpuctlv1.DeviceUpdate) {}); err != nil {
		t.Fatal(err)
	}
	w.settled()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("%v", w.keeper.assignments)
	}
}

func TestStart(t *testing.T) {
	w := newWorld(t)
	w.stop(uuid1)
	// A network card in the definition is not our business.
	if err := w.prepare(uuid1, card4[0], address("0000:99:00.0")); err != nil {
		t.Fatal(err)
	}
	w.stop(uuid2)
	if err := w.prepare(uuid2, card1[0], card4[1]); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "vm two cannot have nvidia-0") || !strings.Contains(err.Error(), "belongs to VM one (ready)") {
		t.Errorf("%v", err)
	}
	w.keeper.work.Wait()
	if w.keeper.assignments[card1[0]] != nil {
		t.Error("the other card was not given back")
	}
	w.run(uuid1, card4...)
	w.settled()
	w.stop(uuid1)
	w.keeper.Stopped(uuid1)
	w.keeper.Stopped(uuid1) // clean-up events come more than once
	w.keeper.work.Wait()
	w.settled()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("%v", w.keeper.assignments)
	}
}

// A VM that is started anew is not robbed by the word that it had stopped.
func TestRestartOfVM(t *testing.T) {
	for range 20 {
		w := newWorld(t)
		w.stop(uuid1)
		for range 2 {
			if err := w.prepare(uuid1, card4[0]); err != nil {
				t.Fatal(err)
			}
			w.run(uuid1, card4...)
			w.stop(uuid1)
			w.keeper.Stopped(uuid1)
		}
		if err := w.prepare(uuid1, card4[0]); err != nil {
			t.Fatal(err)
		}
		w.keeper.work.Wait()
		w.run(uuid1, card4...)
		w.settled()
	}
}

// A start that was vetoed elsewhere has no end: time tells.
func TestStartThatNeverCame(t *testing.T) {
	w := newWorld(t)
	w.stop(uuid1)
	if err := w.prepare(uuid1, card4[0]); err != nil {
		t.Fatal(err)
	}
	if err := w.keeper.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	if w.keeper.assignments[card4[0]] == nil {
		t.Fatal("taken back while the VM may still be starting")
	}
	w.settled()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("%v", w.keeper.assignments)
	}
}

func TestByHand(t *testing.T) {
	w := newWorld(t)
	w.driver[card1[0]] = "pciback"
	w.run(uuid2, card1[0])
	w.settled()
	a := w.keeper.assignments[card1[0]]
	if a == nil || a.UUID != uuid2 || a.Claim == "" {
		t.Fatalf("%+v", a)
	}
	// And the wrong VM's.
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	for _, f := range card4 {
		w.owner[f] = uuid2
	}
	w.mu.Unlock()
	w.settled()
	if a := w.keeper.assignments[card4[0]]; a.UUID != uuid2 || !strings.Contains(a.Message, "VM two has it, though it was meant for one") {
		t.Errorf("%+v", a)
	}
}

// While the hypervisor does not answer nothing is done, and nothing believed.
func TestHypervisorDown(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.hyperDown = true
	w.restart()
	before := w.calls
	for range 3 {
		if err := w.keeper.Reconcile(t.Context()); err == nil {
			t.Error("no error")
		}
		w.pass(time.Hour)
	}
	if w.calls != before || w.keeper.Settled.Load() {
		t.Errorf("%d changes, ready %v", w.calls-before, w.keeper.Settled.Load())
	}
	w.hyperDown = false
	w.settled()
	if !w.keeper.Settled.Load() {
		t.Error("not ready")
	}
}

// What a migration holds stays its own: while the VM is elsewhere, when its life
// here ends, and across a restart; and goes when the migration has ended.
func TestMigrationHolds(t *testing.T) {
	w := newWorld(t)
	w.pending = true
	m := w.machines[uuid1].VM
	step := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if err := w.keeper.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.pass(time.Hour)
		w.keeper.Stopped(uuid1)
		w.keeper.work.Wait()
		w.restart()
		if err := w.keeper.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // each may be repeated
		step("reserve", w.keeper.Reserve(t.Context(), m, "nvidia-0", "vm-x", "m-1"))
	}
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != reserved || w.driver[card4[0]] != "nvidia" {
		t.Fatalf("%+v %v", a, w.driver)
	}
	if err := w.attach("two", "nvidia-0", false); !errors.Is(err, ErrRefused) {
		t.Errorf("taken by another: %v", err)
	}
	if err := w.keeper.Reserve(t.Context(), w.machines[uuid2].VM, "nvidia-0", "vm-y", "m-2"); !errors.Is(err, ErrTaken) {
		t.Errorf("reserved twice: %v", err)
	}
	for range 2 {
		step("ready", w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1"))
	}
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != ready || w.driver[card4[0]] != "pciback" || w.claims["vm-x"] != "nvidia-0" {
		t.Fatalf("%+v %v %v", a, w.driver, w.claims)
	}
	for range 2 {
		if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", true, nil); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(w.stored[m.UUID], card4) {
			t.Fatalf("stored is %v", w.stored)
		}
		delete(w.stored, m.UUID)
	}
	w.stored[m.UUID] = card4
	if err := w.keeper.GiveBack(t.Context(), m, "nvidia-0"); !errors.Is(err, ErrBusy) {
		t.Errorf("dropped while the VM has it: %v", err)
	}
	for range 2 {
		step("unplug", w.detachReleased(t.Context(), m))
	}
	if len(w.stored) != 0 {
		t.Errorf("still stored: %v", w.stored)
	}
	w.pending = false
	w.settled()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("after its end: %v", w.keeper.assignments)
	}
	if err := w.keeper.GiveBack(t.Context(), m, "nvidia-0"); err != nil {
		t.Error(err)
	}
}

// A step of a migration whose hostd ended in the middle can be repeated after
// all has settled: the card stays the VM's.
func TestMigrationStepsCanBeRepeated(t *testing.T) {
	ended := 0
	for _, after := range []bool{false, true} {
		for at := 1; ; at++ {
			w := newWorld(t)
			w.pending = true
			w.crashAt, w.after = at, after
			m := w.machines[uuid1].VM
			crashed := false
			for _, s := range []struct {
				name string
				do   func() error
			}{
				{"reserve", func() error { return w.keeper.Reserve(t.Context(), m, "nvidia-0", "vm-x", "m-1") }},
				{"ready", func() error { return w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1") }},
				{"plug", func() error { return w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", true, nil) }},
				{"unplug", func() error { return w.detachReleased(t.Context(), m) }},
				{"drop", func() error { return w.keeper.GiveBack(t.Context(), m, "nvidia-0") }},
			} {
				err := s.do()
				if w.crashed {
					crashed = true
					w.restart()
					if err := w.keeper.Reconcile(t.Context()); err != nil {
						t.Fatal(err)
					}
					w.keeper.work.Wait()
					err = s.do()
				}
				if err != nil {
					t.Fatalf("ended at call %d (after it: %v): %s: %v", at, after, s.name, err)
				}
			}
			if len(w.keeper.assignments) != 0 || w.driver[card4[0]] != "nvidia" || w.owner[card4[0]] != "" {
				t.Fatalf("ended at call %d: %v %v %v", at, w.keeper.assignments, w.driver, w.owner)
			}
			if !crashed {
				break
			}
			ended++
		}
	}
	if ended < 20 {
		t.Errorf("hostd was ended %d times only", ended)
	}
}

// A reboot of the host gives a card that waits for its VM back to its driver:
// it is taken and reset again before the VM gets it.
func TestHeldCardIsBoundAnew(t *testing.T) {
	w := newWorld(t)
	w.pending = true
	m := w.machines[uuid1].VM
	reboot := func() {
		for _, f := range card4 {
			w.bind(f, w.native[f])
			w.dirty[f] = "the host's driver"
		}
		w.restart()
		if err := w.keeper.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []struct {
		name string
		do   func() error
	}{
		{"reserve", func() error { return w.keeper.Reserve(t.Context(), m, "nvidia-0", "vm-x", "m-1") }},
		{"ready", func() error { return w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1") }},
		{"ready again", func() error { return w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1") }},
		{"plug", func() error { return w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, nil) }},
	} {
		if err := s.do(); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if s.name != "plug" {
			reboot()
		}
	}
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != attached || w.owner[card4[0]] != uuid1 {
		t.Errorf("%+v, %v", a, w.owner)
	}
}

// A libvirtd that dies in a detach leaves the VM without the card, and itself or
// the hypervisor in the belief that it has it.
func TestLibvirtDiesInADetach(t *testing.T) {
	for _, when := range []string{"early", "late"} {
		w := newWorld(t)
		w.pending = true
		m := w.machines[uuid1].VM
		must := func(what string, err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s: %s: %v", when, what, err)
			}
		}
		must("reserve", w.keeper.Reserve(t.Context(), m, "nvidia-0", "vm-x", "m-1"))
		must("ready", w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1"))
		must("plug", w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, nil))
		w.libvirtDies = when
		if err := w.detachReleased(t.Context(), m); err != nil {
			must("reconcile", w.keeper.Reconcile(t.Context()))
			must("unplug again", w.detachReleased(t.Context(), m))
		}
		if len(w.listed) != 0 || len(w.released) != 0 || w.libvirtDies != "" {
			t.Errorf("%s: listed %v, released %v", when, w.listed, w.released)
		}
		must("plug again", w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, nil))
		must("unplug", w.detachReleased(t.Context(), m))
		must("drop", w.keeper.GiveBack(t.Context(), m, "nvidia-0"))
	}
}

// A card that vanishes while it is held for a VM that has not got it keeps no
// migration from going back, and is free when it is there again.
func TestHeldCardVanishes(t *testing.T) {
	w := newWorld(t)
	w.pending = true
	m := w.machines[uuid1].VM
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	must("reserve", w.keeper.Reserve(t.Context(), m, "nvidia-0", "vm-x", "m-1"))
	must("ready", w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1"))
	if w.keeper.Lost(t.Context(), uuid1, "nvidia-0") {
		t.Error("it is lost while it is there")
	}
	back := w.root
	w.root = fstest.MapFS{}
	w.restart()
	if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", false, nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("plugged: %v", err)
	}
	must("unplug", w.detachReleased(t.Context(), m))
	must("drop", w.keeper.GiveBack(t.Context(), m, "nvidia-0"))
	if w.keeper.Lost(t.Context(), uuid2, "nvidia-0") {
		t.Error("it is lost to a VM that never had it")
	}
	w.root, w.pending = back, false
	w.restart()
	w.pass(time.Hour)
	w.settled()
	if len(w.keeper.assignments) != 0 || w.driver[card4[0]] != "nvidia" {
		t.Errorf("%v %v", w.keeper.assignments, w.driver)
	}
}

// scenarios are what is ended at every call.
var scenarios = map[string]func(w *world){
	"attach":            func(w *world) { _ = w.attach("one", "nvidia-0", false) },
	"attach persistent": func(w *world) { _ = w.attach("one", "nvidia-0", true) },
	"attach any":        func(w *world) { _ = w.attach("one", "", false) },
	"detach":            func(w *world) { _ = w.attach("one", "nvidia-0", true); _ = w.detach("one", "") },
	"reset": func(w *world) {
		_ = w.keeper.Reset(w.t.Context(), &gpuctlv1.ResetRequest{Gpu: "nvidia-0"}, func(*gpuctlv1.DeviceUpdate) {})
	},
	"start and stop": func(w *world) {
		w.stop(uuid1)
		if w.prepare(uuid1, card4[0], card1[0]) != nil {
			return // vetoed
		}
		w.run(uuid1, append(slices.Clone(card4), card1...)...)
		w.stop(uuid1)
		w.keeper.Stopped(uuid1)
		w.keeper.work.Wait()
	},
	"moves in": func(w *world) {
		ctx, m := w.t.Context(), w.machines[uuid1].VM
		_ = w.keeper.Reserve(ctx, m, "nvidia-0", "vm-x", "m-1")
		_ = w.keeper.Prepare(ctx, m, "nvidia-0", "vm-x", "m-1")
		_ = w.keeper.AttachPrepared(ctx, m, "nvidia-0", false, nil)
	},
	"moves out": func(w *world) {
		ctx, m := w.t.Context(), w.machines[uuid1].VM
		_ = w.attach("one", "nvidia-0", true)
		if w.detachReleased(ctx, m) == nil {
			w.stop(uuid1)
			w.keeper.Stopped(uuid1)
		}
		_ = w.keeper.GiveBack(ctx, m, "nvidia-0")
	},
	"is moved back": func(w *world) {
		ctx, m := w.t.Context(), w.machines[uuid1].VM
		_ = w.attach("one", "nvidia-0", false)
		_ = w.detachReleased(ctx, m)
		_ = w.keeper.AttachPrepared(ctx, m, "nvidia-0", false, nil)
	},
	"failed attach": func(w *world) {
		w.driver[card4[3]], w.native[card4[3]] = "snd", "snd"
		w.mu.Lock()
		w.resetFail[card4[0]] = nil
		w.mu.Unlock()
		_ = w.attach("one", "nvidia-0", false)
		w.deaf[uuid1] = true
		_ = w.detach("one", "")
	},
}

// Two at once for one card: one gets it.
func TestTwoAtOnce(t *testing.T) {
	w := newWorld(t)
	errs := make(chan error, 2)
	for _, vm := range []string{"one", "two"} {
		go func() { errs <- w.attach(vm, "nvidia-0", false) }()
	}
	first, second := <-errs, <-errs
	if (first == nil) == (second == nil) {
		t.Errorf("%v, %v", first, second)
	}
	w.settled()
}

// A caller that leaves does not stop a change.
func TestCallerLeaves(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	_ = w.keeper.Attach(ctx, &gpuctlv1.AttachRequest{Machine: "one", Gpu: "nvidia-0"}, func(u *gpuctlv1.DeviceUpdate) {
		if u.GetStep() == stepTake {
			cancel()
		}
	})
	w.keeper.work.Wait()
	w.settled()
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != attached {
		t.Errorf("%+v", a)
	}
}

// A full disk: nothing is done that could not be recorded.
func TestRecordCannotBeWritten(t *testing.T) {
	w := newWorld(t)
	if err := os.RemoveAll(w.dir); err != nil {
		t.Fatal(err)
	}
	if err := w.attach("one", "nvidia-0", false); err == nil || !strings.Contains(err.Error(), "not recorded, so nothing is done to it") {
		t.Errorf("%v", err)
	}
	if w.driver[card4[0]] != "nvidia" {
		t.Errorf("%v", w.driver)
	}
	if err := os.MkdirAll(w.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	w.settled()
}

func TestDamagedRecord(t *testing.T) {
	for _, text := range []string{
		"", "{", `{"version":2}`, `{"version":1,"holds":[{"card":"0000:65:00.0","phase":"attached","functions":["0000:65:00.1"]}]}`,
		`{"version":1,"holds":[null]}`, `{"version":1,"holds":[{"card":"0000:65:00.0","phase":"lost","functions":["0000:65:00.0"]}]}`,
		`{"version":1,"holds":[{"card":"0000:65:00.0","phase":"attached","functions":["0000:65:00.0","0000:65:00.0"]}]}`,
	} {
		if r, err := decodeRecord([]byte(text)); err == nil {
			t.Errorf("%q was read as %v", text, r)
		}
	}
	file := t.TempDir() + "/cards.json"
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{File: file}); err == nil || !strings.Contains(err.Error(), "make sure that no VM has a card and remove it") {
		t.Errorf("%v", err)
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"holds":[{"card":"0000:65:00.0","functions":["0000:65:00.0","0000:65:00.1"],"gpu":"g","phase":"attached","machine":"u","since":1}],"resets":{"0000:65:00.0":"flr"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeRecord(data)
		if err != nil {
			return
		}
		file := t.TempDir() + "/r"
		if err := writeRecord(file, r); err != nil {
			t.Fatal(err)
		}
		again, err := readRecord(file)
		if err != nil || len(again.Assignments) != len(r.Assignments) || !maps.Equal(again.Resets, r.Resets) {
			t.Fatalf("%v, %v", again, err)
		}
	})
}

// A card whose functions cannot be reset alone is a VM's as a whole, from its start.
func TestCardThatCannotBeHotpluggedIsRefused(t *testing.T) {
	w := newWorld(t)
	w.hotplugBlocker = "it resets only as a whole"
	if err := w.attach("one", "nvidia-0", false); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), w.hotplugBlocker) {
		t.Errorf("attach: %v", err)
	}
	if err := w.keeper.Reserve(t.Context(), w.machines[uuid1].VM, "nvidia-0", "vm-x", "m-1"); !errors.Is(err, ErrTaken) {
		t.Errorf("reserved for a migration: %v", err)
	}
	if err := w.prepare(uuid1, card4[:3]...); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "has not got function "+card4[3].String()) {
		t.Errorf("in part: %v", err)
	}
	w.settled()
	err := w.keeper.Attach(t.Context(), &gpuctlv1.AttachRequest{Machine: "one", Gpu: "nvidia-0", StoredOnly: true}, func(*gpuctlv1.DeviceUpdate) {})
	if err != nil || len(w.stored[uuid1]) != 4 {
		t.Errorf("stored: %v %v", err, w.stored)
	}
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Error(err)
	}
}

// A card stays its VM's while a migration stops and starts that, and no longer.
func TestColdMigrationHolds(t *testing.T) {
	w := newWorld(t)
	m := w.machines[uuid1].VM
	if err := w.attach("one", "nvidia-0", true); err != nil {
		t.Fatal(err)
	}
	if err := w.keeper.Keep(t.Context(), w.machines[uuid2].VM, "nvidia-0", "m-1"); !errors.Is(err, ErrTaken) {
		t.Errorf("kept for another: %v", err)
	}
	w.pending = true
	for range 2 {
		if err := w.keeper.Keep(t.Context(), m, "nvidia-0", "m-1"); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.keeper.ResetStopped(t.Context(), m, "nvidia-0"); err == nil {
		t.Error("it has ended while the VM has it")
	}
	w.stop(uuid1)
	w.keeper.Stopped(uuid1)
	for range 3 {
		w.keeper.work.Wait()
		if err := w.keeper.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.pass(2 * time.Minute)
	}
	if a := w.keeper.assignments[card4[0]]; a == nil || a.UUID != uuid1 {
		t.Fatalf("given back: %+v", a)
	}
	for range 2 {
		if err := w.keeper.ResetStopped(t.Context(), m, "nvidia-0"); err != nil {
			t.Fatal(err)
		}
	}
	if a := w.keeper.assignments[card4[0]]; a.Phase != ready || len(w.stored) != 0 || w.dirty[card4[0]] != "" {
		t.Errorf("%+v, stored %v, dirty %v", a, w.stored, w.dirty)
	}
	// It is started again with the same card: the way back.
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	w.run(uuid1, card4...)
	if err := w.keeper.AttachPrepared(t.Context(), m, "nvidia-0", true, nil); err != nil {
		t.Fatal(err)
	}
	w.settled()
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != attached || len(w.stored[uuid1]) != 4 {
		t.Errorf("%+v, stored %v", a, w.stored)
	}
	w.pending = false
	w.stop(uuid1)
	w.keeper.Stopped(uuid1)
	w.settled()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("after its end: %v", w.keeper.assignments)
	}
}
