package cards

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

// libvirt's event that a VM has stopped may come when the VM is being started again.
func TestLateWordOfAStopTakesNothingFromTheNextStart(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", true); err != nil {
		t.Fatal(err)
	}
	w.stop(uuid1)
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	w.keeper.Ended(uuid1)
	w.keeper.work.Wait()
	w.run(uuid1, card4...)
	w.settled()

	w.stop(uuid1)
	w.keeper.Ended(uuid1) // of a VM that runs, it is the first word of its end
	w.keeper.work.Wait()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("%v", w.keeper.assignments)
	}
}

// A host whose clock was wrong, and is not any more after its restart.
func TestCardIsGivenBackThoughTheRecordIsOfTheFuture(t *testing.T) {
	w := newWorld(t)
	w.stop(uuid1)
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	if err := w.keeper.Reserve(t.Context(), w.machines[uuid2].VM, card1[0].String(), "vm-x", "m-1"); err != nil {
		t.Fatal(err)
	}
	w.pass(-365 * 24 * time.Hour)
	w.restart()
	w.settled()
	if len(w.keeper.assignments) != 0 {
		t.Errorf("%v", w.keeper.assignments)
	}
}

// While a VM migrates, its frozen applications keep no gpuguest from letting go of its card. A
// detach would give the card away that the migration needs to go on or back.
func TestCardOfAVMThatMigratesIsNotDetached(t *testing.T) {
	w := newWorld(t)
	if err := w.attach("one", "nvidia-0", true); err != nil {
		t.Fatal(err)
	}
	w.pending = true
	w.keeper.Moving = func(_ context.Context, uuid string) string {
		if w.pending && uuid == uuid1 {
			return "m-1"
		}
		return ""
	}
	if err := w.detach("one", ""); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "m-1") {
		t.Errorf("%v", err)
	}
	// The migration goes on, and back.
	one := w.machines[uuid1].VM
	if err := w.detachReleased(t.Context(), one); err != nil {
		t.Errorf("%v", err)
	}
	if err := w.keeper.AttachPrepared(t.Context(), one, "nvidia-0", true, nil); err != nil {
		t.Errorf("%v", err)
	}
	w.pending = false
	if err := w.detach("one", ""); err != nil {
		t.Errorf("%v", err)
	}
}

// A VM with much memory gets its devices minutes after the hook was asked.
func TestASlowStartKeepsItsCard(t *testing.T) {
	w := newWorld(t)
	w.stop(uuid1)
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	w.building = uuid1
	w.pass(10 * time.Minute)
	if err := w.keeper.Reconcile(t.Context()); err != nil {
		t.Error(err)
	}
	w.building = ""
	w.run(uuid1, card4...) // it fails if the card is not ready
	w.settled()
	if len(w.keeper.assignments) != 1 {
		t.Errorf("%v", w.keeper.assignments)
	}
}

// A start that has failed keeps nothing.
func TestAStartThatFailedGivesItsCardBack(t *testing.T) {
	w := newWorld(t)
	w.stop(uuid1)
	if err := w.prepare(uuid1, card4...); err != nil {
		t.Fatal(err)
	}
	w.pass(10 * time.Minute)
	if err := w.keeper.Reconcile(t.Context()); err != nil || len(w.keeper.assignments) != 0 {
		t.Errorf("%v, %v", err, w.keeper.assignments)
	}
}
