package cards

import (
	"errors"
	"strings"
	"testing"
	"time"
)

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
