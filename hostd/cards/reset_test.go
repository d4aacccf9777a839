package cards

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/vgpu"
)

func (w *world) reset(gpu string) error {
	return w.keeper.Reset(w.t.Context(), &gpuctlv1.ResetRequest{Gpu: gpu}, quiet)
}

// quarantinedCard returns a world in which no reset has brought back nvidia-0 after a VM
// had it.
func quarantinedCard(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.resetFail[card4[0]] = errors.New("it does not answer")
	if err := w.detach("one", ""); !errors.Is(err, errQuarantined) {
		t.Fatal(err)
	}
	return w
}

// After a restart of the host, the card's own driver has it, and perhaps a program.
func TestCardThatItsOwnDriverHasIsTakenBeforeItsReset(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.stop(uuid1)
	for _, f := range card4 {
		w.bind(f, w.native[f])
		w.dirty[f] = "the host's driver"
	}
	w.restart()
	w.takeFail = errors.New("in use by Xorg")
	for range 2 {
		_ = w.keeper.Reconcile(t.Context())
		w.pass(time.Minute)
	}
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != resetting || !strings.Contains(a.Message, "in use by Xorg") {
		t.Errorf("%+v", a)
	}
	w.takeFail = nil
	w.settled()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("%v", w.keeper.assignments)
	}
}

// A VM that the host starts by itself, as soon as it is up, may be faster than Reconcile.
func TestCardOfAVMThatTheHostStartsIsTakenAgain(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", true); err != nil {
		t.Fatal(err)
	}
	w.stop(uuid1)
	for _, f := range card4 {
		w.bind(f, w.native[f])
	}
	w.restart()
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	w.run(uuid1, card4...)
	w.settled()
}

// A reset that can't even begin, as a program of the host uses the card, says nothing about
// the card.
func TestCardStaysInQuarantineIfItCannotBeTakenForItsReset(t *testing.T) {
	w := quarantinedCard(t)
	for _, f := range card4 { // the host was restarted
		w.bind(f, w.native[f])
	}
	w.takeFail = errors.New("in use by Xorg")
	w.resets = func(context.Context, *pci.Card) { t.Error("it was reset under its own driver") }
	if err := w.reset("nvidia-0"); !errors.Is(err, w.takeFail) {
		t.Errorf("%v", err)
	}
	w.settled()
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != quarantined || a.Message != "it does not answer" {
		t.Errorf("%+v", a)
	}
	s := newSliced(t, vgpu.SRIOV, 0)
	if err := s.attachSlice("one", slicedGPU, "vf"); err != nil {
		t.Fatal(err)
	}
	s.resetFail[vf(0)] = errors.New("it does not answer")
	if err := s.detach("one", ""); !errors.Is(err, errQuarantined) {
		t.Fatal(err)
	}
	s.bind(vf(0), "nvidia")
	s.takeFail = errors.New("in use by a program")
	if err := s.reset(vf(0).String()); !errors.Is(err, s.takeFail) {
		t.Errorf("%v", err)
	}
	s.settled()
	if a := s.keeper.sliceAt(vf(0)); a == nil || a.Phase != quarantined {
		t.Errorf("%+v", a)
	}
}

// Neither does one in which hostd ends.
func TestQuarantineOutlivesAResetInWhichHostdEnds(t *testing.T) {
	for _, after := range []bool{false, true} {
		for n := 1; ; n++ {
			w := quarantinedCard(t)
			w.resets = func(context.Context, *pci.Card) {
				gpus, _ := w.gpus(t.Context())
				if w.keeper.Annotate(gpus); gpus[0].GetHealth() != clusterv1.Health_HEALTH_FAILED {
					t.Errorf("anybody can get it while it is reset: %v", gpus[0])
				}
			}
			w.calls, w.crashAt, w.after = 0, n, after
			_ = w.reset("nvidia-0")
			w.keeper.work.Wait()
			ended := w.crashed
			w.restart()
			_ = w.keeper.Reconcile(t.Context()) // it may say that the reset has failed again
			w.settled()
			if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != quarantined {
				t.Fatalf("ended at call %d (effect: %v): %+v", n, after, a)
			}
			if !ended {
				break
			}
		}
	}
}

// A reset of one card takes long enough for other cards to get other owners meanwhile.
func TestReconcileAsksAnewWhoHasACardAfterALongReset(t *testing.T) {
	ctx := t.Context()
	w := newWorld(t)
	if err := w.attach("two", card1[0].String(), false); err != nil {
		t.Fatal(err)
	}
	w.stop(uuid2)
	w.stop(uuid1)
	if err := w.keeper.Reconcile(ctx); err != nil {
		t.Fatal(err)
	}
	w.pass(gone)
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	w.resets = func(context.Context, *pci.Card) {
		w.resets = nil
		w.run(uuid1, card4...)
		w.pass(2 * time.Minute)
	}
	if err := w.keeper.Reconcile(ctx); err != nil || w.resets != nil {
		t.Fatalf("%v, no reset", err)
	}
	w.settled() // and the card was not reset while its VM has it
	if a := w.keeper.assignments[card4[0]]; a == nil || a.UUID != uuid1 {
		t.Errorf("%+v", a)
	}

	w = newWorld(t)
	for vm, gpu := range map[string]string{"one": "nvidia-0", "two": card1[0].String()} {
		if err := w.attach(vm, gpu, false); err != nil {
			t.Fatal(err)
		}
	}
	w.stop(uuid2)
	if err := w.keeper.Reconcile(ctx); err != nil {
		t.Fatal(err)
	}
	w.pass(gone)
	w.resets = func(context.Context, *pci.Card) {
		w.resets = nil
		if err := w.detach("one", ""); err != nil {
			t.Error(err)
		}
	}
	if err := w.keeper.Reconcile(ctx); err != nil || w.resets != nil {
		t.Fatalf("%v, no reset", err)
	}
	if a := w.keeper.assignments[card4[0]]; a != nil {
		t.Errorf("a card that is free by now was taken for the VM's that had it: %+v", a)
	}
	w.settled()
}

// A card that is dead makes one method after the other wait, for longer than the step may take.
func TestResetThatOutlastsItsStepEndsInQuarantine(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.keeper.Step = 50 * time.Millisecond
	w.resetFail[card4[0]] = errors.New("it does not answer")
	w.resets = func(ctx context.Context, _ *pci.Card) { <-ctx.Done() }
	if err := w.detach("one", ""); !errors.Is(err, errQuarantined) {
		t.Errorf("%v", err)
	}
	w.resets = nil
	w.settled()
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != quarantined {
		t.Errorf("%+v", a)
	}
}

// What somebody plugs into a VM without gpuctl is on no record until hostd looks again.
func TestNothingIsResetThatAVMHasGotByHandJustNow(t *testing.T) {
	w := newWorld(t)
	w.bind(card1[0], "pciback")
	w.run(uuid2, card1[0])
	if err := w.reset(card1[0].String()); err == nil || !strings.Contains(err.Error(), "VM two has 0000:06:00.0") {
		t.Errorf("%v", err)
	}
	w.settled()
	if a := w.keeper.assignments[card1[0]]; a == nil || a.UUID != uuid2 {
		t.Errorf("%+v", a)
	}

	w = newSliced(t, vgpu.SRIOV, 2)
	w.bind(vf(0), "pciback")
	w.run(uuid2, vf(0))
	if err := w.attachSlice("one", slicedGPU, "vf"); err != nil || w.owner[vf(0)] != uuid2 || w.owner[vf(1)] != uuid1 {
		t.Errorf("%v, %v", err, w.owner)
	}
	w.settled()

	w = newSliced(t, vgpu.SRIOV, 2)
	w.bind(vf(0), "pciback")
	w.run(uuid2, vf(0))
	w.stop(uuid1)
	if err := w.prepare(uuid1, vf(0)); err == nil || !strings.Contains(err.Error(), "VM two has 0000:07:00.4") {
		t.Errorf("%v", err)
	}
	w.settled()
	if a := w.keeper.sliceAt(vf(0)); a == nil || a.UUID != uuid2 {
		t.Errorf("%+v", a)
	}
}

// TestCardThatIsOnTheBusAgainIsFree has a migration end while the card that it had prepared is away.
func TestCardThatIsOnTheBusAgainIsFree(t *testing.T) {
	for name, broken := range map[string]error{"healthy": nil, "dead": errors.New("it does not answer")} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			m := w.machines[uuid1].VM
			if err := errors.Join(w.keeper.Reserve(t.Context(), m, "nvidia-0", "vm-x", "m-1"), w.keeper.Prepare(t.Context(), m, "nvidia-0", "vm-x", "m-1")); err != nil {
				t.Fatal(err)
			}
			back := w.root
			w.root = fstest.MapFS{}
			w.restart()
			w.pass(time.Hour)
			_ = w.keeper.Reconcile(t.Context()) // it says that the card is away
			a := w.keeper.assignmentOf(card4[0])
			if a == nil || a.Phase != quarantined || a.Claim != "" {
				t.Fatalf("away: %+v", a)
			}
			w.root, w.resetFail[card4[0]] = back, broken
			w.restart()
			_ = w.keeper.Reconcile(t.Context())
			switch a = w.keeper.assignmentOf(card4[0]); {
			case broken == nil && (a != nil || w.driver[card4[0]] != "nvidia"):
				t.Errorf("on the bus again: %+v, driver %q", a, w.driver[card4[0]])
			case broken != nil && (a == nil || a.Phase != quarantined || !strings.Contains(a.Message, "answer")):
				t.Errorf("on the bus again, and dead: %+v", a)
			}
		})
	}
}

// After a restart of hostd nothing is lent or given, and no lease ends, before it is known who has what. A reset,
// which takes a minute and more, tells nothing about that.
func TestResetThatARestartHasInterruptedKeepsNobodyWaiting(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", false); err != nil {
		t.Fatal(err)
	}
	w.stop(uuid1)
	w.resetFail[card4[0]] = context.Canceled
	ctx, cancel := context.WithCancel(t.Context())
	w.resets = func(context.Context, *pci.Card) { cancel() } // hostd ends
	for range 2 {
		_ = w.keeper.Reconcile(ctx)
		w.pass(time.Minute)
	}
	if a := w.keeper.assignments[card4[0]]; a == nil || a.Phase != resetting {
		t.Fatalf("%+v", a)
	}
	delete(w.resetFail, card4[0])
	for _, f := range card1 { // it is given to a VM without gpuctl
		w.bind(f, "pciback")
	}
	w.run(uuid2, card1...)
	w.restart()
	resets := 0
	w.resets = func(context.Context, *pci.Card) {
		if resets++; !w.keeper.Settled.Load() || w.keeper.assignmentOf(card1[0]) == nil || w.keeper.assignmentOf(card4[0]) == nil {
			t.Errorf("who has what is known: %v, and %v", w.keeper.Settled.Load(), w.keeper.assignments)
		}
	}
	w.settled()
	if resets != 1 {
		t.Errorf("%d resets", resets)
	}
}
