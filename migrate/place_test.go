package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// resume drives a held migration on, as an operator has it.
func (w *world) resume(m *clusterv1.Migration, absentOn ...string) *clusterv1.Migration {
	w.t.Helper()
	m = proto.CloneOf(m)
	m.State, m.Machine.AbsentOn = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, absentOn
	return w.drive(m)
}

// isHeld checks that nothing has been done that a VM in two places must not have.
func (w *world) isHeld(m *clusterv1.Migration, words ...string) {
	w.t.Helper()
	if m.GetState() != held {
		w.t.Fatalf("it ended as %s: %s", m.GetState(), m.GetMessage())
	}
	for _, text := range words {
		if !strings.Contains(m.GetMessage(), text) {
			w.t.Errorf("it does not say %q: %s", text, m.GetMessage())
		}
	}
	for _, id := range []string{"s1", "s2"} {
		if !w.frozen[id] && w.far == "" {
			w.t.Errorf("session %s goes on", id)
		}
	}
	for _, c := range w.cards {
		if c.plugged != "" {
			w.t.Errorf("%s is plugged in", c.gpu)
		}
	}
}

func TestLostLastAnswerHoldsTheMigrationWhileTheOtherCopyMayRun(t *testing.T) {
	for _, free := range []uint64{gib, little} {
		w := newWorld(t)
		w.free = free
		// The destination is lost in the moment of the answer.
		w.loses, w.cuts = true, "h2"
		m := w.drive(w.migration(to, "h3/e"))
		w.isHeld(m, "host h2: ", "may run there", "gpuctl migrations resume m-1 --absent-on h2")
		if m.GetMachine().GetTwice() {
			t.Error("it is said to run twice, which nobody knows")
		}
		// Somebody tries again before it is back.
		m = w.resume(m)
		w.isHeld(m, "may run there")

		// It is back, and the VM runs there, too.
		w.down["h2"] = false
		m = w.resume(m)
		w.isHeld(m, "the VM runs on two hosts, h1 and h2", "the copy on host h2 is paused", "virsh destroy vm", "gpuctl migrations resume m-1")
		if !m.GetMachine().GetTwice() || !w.paused["h2"] || w.paused["h1"] {
			t.Errorf("twice %v, paused %v", m.GetMachine().GetTwice(), w.paused)
		}
		m = w.resume(m) // nothing was repaired
		w.isHeld(m, "the VM runs on two hosts")

		w.twin, w.paused = "", map[string]bool{} // the copy is destroyed
		m = w.resume(m)
		if m.GetState() != done || m.GetMachine().GetTwice() {
			t.Errorf("%s: %s", m.GetState(), m.GetMessage())
		}
		w.check(m)
	}
}

func TestCopyThatWasPausedGoesOnWhereItIsTheOnlyOne(t *testing.T) {
	w := newWorld(t)
	w.loses = true
	m := w.drive(w.migration(to))
	w.isHeld(m, "the VM runs on two hosts, h1 and h2")
	w.at, w.twin = w.twin, "" // the one at home is destroyed
	m = w.resume(m)
	if m.GetState() != done || len(w.paused) != 0 {
		t.Errorf("%s: %s; paused %v", m.GetState(), m.GetMessage(), w.paused)
	}
	w.check(m)
}

func TestCopyThatCannotBePausedIsToldOf(t *testing.T) {
	w := newWorld(t)
	w.loses, w.fails = true, map[string]error{"h2 pause": errors.New("broken")}
	m := w.drive(w.migration(to))
	w.isHeld(m, "the VM runs on two hosts", "the copy on host h2 could not be paused: broken")
	if w.paused["h1"] || m.GetMachine().GetPaused() {
		t.Errorf("paused: %v", w.paused)
	}
}

// A copy whose host does not say that it has paused it may be paused all the same. Where it is the
// only one left it goes on.
func TestCopyThatWasPausedWithoutAnAnswerGoesOn(t *testing.T) {
	w := newWorld(t)
	w.loses, w.fails = true, map[string]error{"h2 pause": ErrUnreachable}
	m := w.drive(w.migration(to))
	w.isHeld(m, "the VM runs on two hosts", "the copy on host h2 could not be paused: unreachable")
	w.fails, w.paused["h2"] = nil, true                            // its answer was lost
	w.at, w.twin = w.twin, ""                                      // the one at home is destroyed
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // not to wait for a VM that never goes on
	defer cancel()
	m.State = clusterv1.MigrationState_MIGRATION_STATE_RUNNING
	m, err := w.runner().Run(ctx, m)
	if err != nil || m.GetState() != done || len(w.paused) != 0 {
		t.Fatalf("%v, %s: %s; paused %v", err, m.GetState(), m.GetMessage(), w.paused)
	}
	w.check(m)
}

// The destination has gone for good: that the VM is not there is the operator's
// to say. Then it goes on where it is.
func TestOperatorSaysThatTheVMIsNotOnALostHost(t *testing.T) {
	w := newWorld(t)
	w.loses, w.cuts = true, "h2"
	m := w.drive(w.migration(to))
	w.isHeld(m, "--absent-on h2")
	w.twin = "" // it has no power
	m = w.resume(m, "h2")
	if m.GetState() != back || !strings.Contains(m.GetMessage(), "host h2 cannot be reached") {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	if w.frozen["s1"] || w.cards[from].plugged != "vm" || w.at != "h1" {
		t.Errorf("frozen %v, on %s", w.frozen, w.at)
	}
}

// The destination hangs before anything of the VM is sent, and the source's libvirt waits for it
// without an end. Nobody's word lets the applications go on while that may still send the VM.
func TestNothingIsThawedWhileTheSourceMaySendTheVM(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.stalls = true
		run := func(m *clusterv1.Migration) *clusterv1.Migration {
			m.State = clusterv1.MigrationState_MIGRATION_STATE_RUNNING
			r := w.runner()
			r.Pause = time.Second
			m, err := r.Run(t.Context(), m)
			if err != nil {
				t.Fatal(err)
			}
			return m
		}
		m := run(w.migration(to))
		w.isHeld(m, "may run there")
		m.Machine.AbsentOn = []string{"h2"}
		m = run(m)
		w.isHeld(m, "the VM is moving on host h1")
		// It is back, and the source's libvirt sees that the migration was aborted.
		w.down["h2"] = false
		delete(w.paused, "h1")
		if m = run(m); m.GetState() != done || w.moves != 1 {
			t.Errorf("%s after %d moves: %s", m.GetState(), w.moves, m.GetMessage())
		}
		w.check(m)
	})
}

// downFrom is a Config.Before with which a host is down from a step on.
func (w *world) downFrom(host, at string) func(string, bool) error {
	return func(step string, _ bool) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.down[host] = w.down[host] || step == at
		return nil
	}
}

// The same of a host that is lost while it has the VM, or while it is to start it: what was
// done there with the VM needs no undo.
func TestOperatorSaysThatTheVMIsNotWhereItWas(t *testing.T) {
	for _, c := range []struct {
		at    string
		cold  bool
		state clusterv1.MigrationState
		says  string
	}{
		{StepAttach, false, failed, "it is gone"},
		{StepAwait, false, failed, "it is gone"},
		{StepThaw, false, failed, "it is gone"},
		{StepDefine, true, back, ""},
		{StepStart, true, back, ""},
	} {
		w := newWorld(t)
		w.cold = c.cold
		r := w.runner()
		r.Before = w.downFrom("h2", c.at)
		m, err := r.Run(t.Context(), w.migration(to))
		if err != nil || m.GetState() != held {
			t.Errorf("%s: %v, %s: %s", c.at, err, m.GetState(), m.GetMessage())
		}
		if m = w.resume(m); m.GetState() != held { // nobody has said anything
			t.Errorf("%s: %s: %s", c.at, m.GetState(), m.GetMessage())
		}
		if m = w.resume(m, "h2"); m.GetState() != c.state || !strings.Contains(m.GetMessage(), c.says) {
			t.Errorf("%s: %s: %s", c.at, m.GetState(), m.GetMessage())
		}
		if c.state == back && !slices.Equal(m.GetMachine().GetDefinedOn(), []string{"h2"}) {
			t.Errorf("%s: its definition on %v, left on %v", c.at, w.defined, m.GetMachine().GetDefinedOn())
		}
		if c.state == back && (w.off || w.at != "h1" || w.cards[from].plugged != "vm") {
			t.Errorf("%s: on %s, off %v, %+v", c.at, w.at, w.off, w.cards[from])
		}
	}
}

// What an operator has said counts for a host that cannot be asked, not against
// its own word.
func TestHostItselfIsBelievedBeforeTheOperator(t *testing.T) {
	w := newWorld(t)
	w.loses, w.cuts = true, "h2"
	m := w.drive(w.migration(to))
	w.isHeld(m)
	w.down["h2"] = false
	m = w.resume(m, "h2")
	w.isHeld(m, "the VM runs on two hosts")
}

// Once a host has said that it has the VM, an earlier word of the operator is over, also when
// the host is lost again.
func TestOperatorsWordIsOverWhenTheHostHasTheVM(t *testing.T) {
	w := newWorld(t)
	w.loses, w.cuts = true, "h2"
	m := w.drive(w.migration(to))
	w.isHeld(m)
	w.down["h2"], w.at, w.twin = false, "h2", "" // it ran there only
	r := w.runner()
	r.Before = w.downFrom("h2", StepAttach)
	m = proto.CloneOf(m)
	m.State, m.Machine.AbsentOn = clusterv1.MigrationState_MIGRATION_STATE_RUNNING, []string{"h2"}
	m, err := r.Run(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	w.isHeld(m, "the undo of attach failed: host h2: unreachable")
}

// It is over, too, when the VM is to be defined and started there once more.
func TestOperatorsWordIsOverWhenTheVMIsStartedThere(t *testing.T) {
	for _, at := range []string{StepDefine, StepStart} {
		w := newWorld(t)
		w.cold = true
		m := w.migration(to)
		m.Machine.AbsentOn = []string{"h2"}
		r := w.runner()
		r.Before = w.downFrom("h2", at)
		m, err := r.Run(t.Context(), m)
		if err != nil || m.GetState() != held {
			t.Errorf("%s: %v, %s: %s", at, err, m.GetState(), m.GetMessage())
		}
	}
}

// The same on the way back: the VM is sent home, and the answer is lost.
func TestLostLastAnswerOnTheWayHome(t *testing.T) {
	w := newWorld(t)
	w.fails = map[string]error{"h2 thaw": ErrTaken}
	r := w.runner()
	r.Before = func(step string, undo bool) error {
		if step == StepMove && undo {
			w.mu.Lock()
			w.loses, w.cuts = w.twin == "", "h2"
			w.mu.Unlock()
		}
		return nil
	}
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil {
		t.Fatal(err)
	}
	w.isHeld(m, "host h2: ", "may run there")
	w.down["h2"] = false
	m = w.resume(m)
	w.isHeld(m, "the VM runs on two hosts, h1 and h2", "the copy on host h2 is paused")
	w.twin, w.at, w.paused = "", "h1", map[string]bool{}
	m = w.resume(m)
	if m.GetState() != back {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)
}

// Whoever goes on with a migration whose driver dies in this finds the same.
func TestDriverDiesAnywhereWhileTheLastAnswerIsLost(t *testing.T) {
	for _, cut := range []string{"", "h2"} {
		dieAnywhere(t, fmt.Sprintf("cut off: %q", cut), func(w *world) {
			w.loses, w.cuts = true, cut
			if m := w.drive(w.migration(to)); m != nil && w.twin != "" {
				w.isHeld(m)
			}
		})
	}
}

func TestVMWithTooManySessionsIsRefusedOnce(t *testing.T) {
	w := newWorld(t)
	w.sessions = 5000
	m := w.drive(w.migration(to, other))
	if m.GetState() != back || !strings.Contains(m.GetMessage(), "VM vm has 5002 sessions, and at most 2000 can be moved") {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)

	// Whatever else the cluster does not keep ends the step that needs it.
	w = newWorld(t)
	w.most = 1
	m = w.drive(w.migration(to))
	if m.GetState() != back || !strings.Contains(m.GetMessage(), "refused by the cluster") {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)
	if slices.Contains(m.GetMachine().GetSessions(), "s1") {
		t.Errorf("the record has what was refused: %v", m.GetMachine().GetSessions())
	}
}

// A VM chooses what its sessions are called: too much for a request would leave
// them frozen, since that which lets them go on names them, too.
func TestVMWhoseSessionsHaveLongNamesIsRefusedOnce(t *testing.T) {
	w := newWorld(t)
	w.sessions, w.long = 1900, strings.Repeat("x", 200)
	m := w.drive(w.migration(to, other))
	if m.GetState() != back || !strings.Contains(m.GetMessage(), "VM vm names a session with 20") {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)
	w = newWorld(t)
	w.sessions, w.long = 1900, strings.Repeat("x", 38)
	if m := w.drive(w.migration(to)); m.GetState() != done {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
}
