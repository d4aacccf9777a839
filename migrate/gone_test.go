package migrate

import (
	"errors"
	"strings"
	"testing"
)

// once does something when a step begins for the first time.
func (w *world) once(at string, do func()) func(string, bool) error {
	return func(step string, undo bool) error {
		if step == at && !undo && do != nil {
			w.mu.Lock()
			defer w.mu.Unlock()
			do()
			do = nil
		}
		return nil
	}
}

// A VM that ends for good while its card is exchanged on its host can get neither card. The
// migration ends, too: held, it would keep both cards for ever.
func TestMigrationOfAVMThatEndsOnItsHostEnds(t *testing.T) {
	for _, target := range []string{"h1/d", to} {
		for _, at := range []string{StepFreeze, StepRelease, StepAttach, StepThaw} {
			w := newWorld(t)
			r := w.runner()
			r.Before = w.once(at, func() {
				w.dead = true
				for _, c := range w.cards {
					c.plugged = ""
				}
			})
			m, err := r.Run(t.Context(), w.migration(target))
			if err != nil || m.GetState() != failed || !strings.Contains(m.GetMessage(), "absent on host h1") || !strings.Contains(m.GetMessage(), "it is gone") {
				t.Errorf("to %s, ended at %s: %v, %s: %s", target, at, err, m.GetState(), m.GetMessage())
			}
		}
	}
}

// A VM that is only shut down can be started again, and then gets its card.
func TestMigrationOfAVMThatIsShutDownWaitsForItsStart(t *testing.T) {
	w := newWorld(t)
	r := w.runner()
	r.Before = w.once(StepAttach, func() { w.off = true })
	m, err := r.Run(t.Context(), w.migration("h1/d"))
	if err != nil {
		t.Fatal(err)
	}
	w.isHeld(m, "the VM is stopped on host h1: start it there first", "gpuctl migrations resume m-1")
	w.off = false
	clear(w.frozen)
	clear(w.runs)
	if m = w.resume(m); m.GetState() != back {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)
}

// A VM that somebody has taken to a third host is not gone: its applications are frozen there, and
// wait for their states.
func TestVMThatIsTakenToAThirdHostIsNotGivenUp(t *testing.T) {
	for _, target := range []string{to, "h1/d"} {
		for _, free := range []uint64{gib, little} {
			w := newWorld(t)
			w.free = free
			r := w.runner()
			at := StepMove
			if target != to {
				at = StepAttach
			}
			r.Before = w.once(at, func() { w.at = "h3" })
			m, err := r.Run(t.Context(), w.migration(target))
			if err != nil {
				t.Fatal(err)
			}
			w.isHeld(m, "host h3 has it", "bring it back to host h1", "gpuctl migrations resume m-1")
			w.at = "h1"
			m = w.resume(m)
			if m.GetState() != done && m.GetState() != back {
				t.Errorf("to %s: %s: %s", target, m.GetState(), m.GetMessage())
			}
			w.check(m)
		}
	}
}

// Whoever removes a stopped VM's definition on its host leaves the one that the migration has made:
// it is not removed, too.
func TestLastDefinitionOfAVMStays(t *testing.T) {
	w := newWorld(t)
	w.cold, w.fails = true, map[string]error{"h2 start": errors.New("broken")}
	r := w.runner()
	r.Before = w.once(StepStart, func() { delete(w.defined, "h1") })
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != held || !w.defined["h2"] || !strings.Contains(m.GetMessage(), "define it on host h1 again") {
		t.Fatalf("%v, %s: %s; defined on %v", err, m.GetState(), m.GetMessage(), w.defined)
	}
	w.defined["h1"] = true
	m = w.resume(m)
	if m.GetState() != back {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)
}

// A VM that was stopped and that somebody starts again where it was is not started on the
// destination, too. It gets its card back.
func TestStoppedVMThatIsStartedAgainAtHomeRunsOnce(t *testing.T) {
	for _, at := range []string{StepDefine, StepStart} {
		w := newWorld(t)
		w.cold = true
		r := w.runner()
		r.Before = w.once(at, func() { w.off = false })
		m, err := r.Run(t.Context(), w.migration(to))
		if err != nil || m.GetState() != back || !strings.Contains(m.GetMessage(), "host h1, where somebody has started it again") {
			t.Errorf("%s: %v, %s: %s", at, err, m.GetState(), m.GetMessage())
		}
		w.check(m)
	}
}

// On the way back, the destination is asked.
func TestStoppedVMThatIsStartedAgainElsewhereRunsOnce(t *testing.T) {
	w := newWorld(t)
	w.cold, w.fails = true, map[string]error{"h2 start": errors.New("broken")}
	r := w.runner()
	r.Before = func(step string, undo bool) error {
		if step == StepStop && undo {
			w.at, w.off, w.defined["h2"] = "h2", false, true
		}
		return nil
	}
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != held || !strings.Contains(m.GetMessage(), "host h2, where somebody has started it again") {
		t.Errorf("%v, %s: %s", err, m.GetState(), m.GetMessage())
	}
	w.off, w.at = true, "h1" // it is ended there
	if m = w.resume(m); m.GetState() != back {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
}

// A VM that was started on both hosts after its stop is held, as any VM that runs twice.
func TestStoppedVMThatRunsTwiceIsHeld(t *testing.T) {
	for _, stays := range []string{"h1", "h2"} {
		w := newWorld(t)
		w.cold = true
		r := w.runner()
		r.Before = w.once(StepStart, func() { w.off, w.twin, w.defined["h2"] = false, "h2", true })
		m, err := r.Run(t.Context(), w.migration(to))
		if err != nil {
			t.Fatal(err)
		}
		if text := m.GetMessage(); m.GetState() != held || !m.GetMachine().GetTwice() || !w.paused["h2"] || !strings.Contains(text, "the VM runs on two hosts, h1 and h2: the copy on host h2 is paused") {
			t.Errorf("%s: %s; twice %v, paused %v", m.GetState(), text, m.GetMachine().GetTwice(), w.paused)
		}
		w.down["h1"] = true // nobody knows what is there
		if m = w.resume(m); m.GetState() != held || !m.GetMachine().GetTwice() || !w.paused["h2"] {
			t.Errorf("%s: %s; twice %v, paused %v", m.GetState(), m.GetMessage(), m.GetMachine().GetTwice(), w.paused)
		}
		w.down["h1"] = false
		want := done
		if w.at, w.twin = stays, ""; stays == "h1" {
			want, w.paused = back, map[string]bool{}
		}
		m = w.resume(m)
		if m.GetState() != want || m.GetMachine().GetTwice() || len(w.paused) > 0 {
			t.Errorf("%s stays: %s: %s; paused %v", stays, m.GetState(), m.GetMessage(), w.paused)
		}
		w.check(m)
	}
}

// Somebody removes the VM's definition on the destination before it is started there: it is
// started where it was.
func TestVMThatIsUndefinedOnTheDestinationGoesBack(t *testing.T) {
	w := newWorld(t)
	w.cold = true
	r := w.runner()
	r.Before = w.once(StepStart, func() { delete(w.defined, "h2") })
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != back || !strings.Contains(m.GetMessage(), "host h2 does not know the VM") {
		t.Errorf("%v, %s: %s", err, m.GetState(), m.GetMessage())
	}
	w.check(m)
}
