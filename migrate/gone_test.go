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
