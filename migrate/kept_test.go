package migrate

import "testing"

// isKept checks that nothing was done while libvirt keeps a copy of the VM.
func (w *world) isKept(words ...string) func() {
	w.t.Helper()
	m := w.drive(w.migration(to))
	w.isHeld(m, append(words, "libvirt keeps a copy of the VM from running", "gpuctl migrations resume m-1")...)
	if m.GetMachine().GetKeptOn() != "h1" || m.GetMachine().GetTwice() {
		w.t.Errorf("kept on %q, twice %v", m.GetMachine().GetKeptOn(), m.GetMachine().GetTwice())
	}
	again := w.resume(m) // nothing was repaired
	w.isHeld(again, "libvirt keeps a copy of the VM from running")
	return func() {
		w.t.Helper()
		m := w.resume(again)
		if m.GetState() != done || m.GetMachine().GetKeptOn() != "" {
			w.t.Errorf("%s: %s; kept on %q", m.GetState(), m.GetMessage(), m.GetMachine().GetKeptOn())
		}
		w.check(m)
	}
}

// The last answer is lost, and libvirt's lock manager keeps the VM at home from going on:
// the operator ends that copy.
func TestCopyThatTheLockManagerKeptIsNamed(t *testing.T) {
	w := newWorld(t)
	w.loses, w.locks = true, true
	resumed := w.isKept("it runs on host h2, and is paused on host h1 (the connection to h2 was lost)", "virsh destroy vm on host h1")
	if w.moves != 1 {
		t.Errorf("it was sent %d times", w.moves)
	}
	w.keptOn = nil
	resumed()
	if w.at != "h2" || w.moves != 1 {
		t.Errorf("it is on %s, after %d moves", w.at, w.moves)
	}
}

// Neither host has let it go on: which of them may is not gpuctl's to say.
func TestVMThatGoesOnNowhereIsNamed(t *testing.T) {
	w := newWorld(t)
	w.keptOn = map[string]bool{"h1": true}
	resumed := w.isKept("it is paused on host h1, where libvirt could not let it go on after the move, and absent on host h2", "virsh resume vm on host h1")
	w.keptOn = nil // the operator has resumed it
	resumed()
}

// On the way home as on the way out.
func TestCopyIsKeptOnTheWayHome(t *testing.T) {
	w := newWorld(t)
	w.fails = map[string]error{"h2 thaw": ErrTaken}
	w.locks = true
	r := w.runner()
	r.Before = func(step string, undo bool) error {
		if step == StepMove && undo {
			w.mu.Lock()
			w.loses = len(w.keptOn) == 0
			w.mu.Unlock()
		}
		return nil
	}
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil {
		t.Fatal(err)
	}
	w.isHeld(m, "it runs on host h1, and is paused on host h2")
	if m.GetMachine().GetKeptOn() != "h2" {
		t.Errorf("kept on %q", m.GetMachine().GetKeptOn())
	}
	w.keptOn = nil
	m = w.resume(m)
	if m.GetState() != back || w.at != "h1" {
		t.Errorf("on %s, %s: %s", w.at, m.GetState(), m.GetMessage())
	}
	w.check(m)
}

// Whoever goes on with it finds the same.
func TestDriverDiesAnywhereWhileACopyIsKept(t *testing.T) {
	dieAnywhere(t, "kept", func(w *world) {
		w.loses, w.locks = true, true
		if m := w.drive(w.migration(to)); m != nil && len(w.keptOn) > 0 {
			w.isHeld(m)
		}
	})
}
