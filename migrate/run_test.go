package migrate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	done   = clusterv1.MigrationState_MIGRATION_STATE_DONE
	back   = clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK
	held   = clusterv1.MigrationState_MIGRATION_STATE_HELD
	failed = clusterv1.MigrationState_MIGRATION_STATE_FAILED
)

func TestRun(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		name       string
		to         string
		candidates []string
		free       uint64 // of the VM's memory; 0: both much and little
		fails      map[string]error
		state      clusterv1.MigrationState
		at         string
		says       string
	}{
		{name: "other host", to: to, state: done, at: to},
		{name: "same host", to: "h1/d", state: done, at: "h1/d"},
		{name: "taken", to: to, fails: map[string]error{"h2 reserve": ErrTaken}, state: back, at: from, says: "reserve: taken"},
		{name: "taken, next", to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 reserve": ErrTaken}, state: done, at: "h3/e"},
		{name: "cannot be prepared", to: to, fails: map[string]error{"h2 prepare": broken}, state: back, at: from, says: "prepare: broken"},
		{name: "cannot be prepared, next", to: to, candidates: []string{other, "h1/d"}, fails: map[string]error{"h2 prepare": broken}, state: done, at: "h1/d"},
		{name: "does not freeze", to: to, candidates: []string{other}, fails: map[string]error{"h1 freeze": broken}, state: back, at: from, says: "freeze: broken"},
		{name: "does not freeze, and says so with what no record may have", to: to, fails: map[string]error{"h1 freeze": errors.New("broken\x00")}, state: back, at: from, says: "freeze: broken?"},
		{name: "not let go", to: to, candidates: []string{other}, fails: map[string]error{"h1 release": broken}, state: back, at: from, says: "release: broken"},
		{name: "does not move", to: to, fails: map[string]error{"h1 move": broken}, state: back, at: from, says: "move: broken"},
		{name: "does not move, next", to: to, candidates: []string{"h1/d"}, fails: map[string]error{"h1 move": broken}, state: done, at: "h1/d"},
		{name: "not attached", to: to, fails: map[string]error{"h2 attach": broken}, state: back, at: from, says: "attach: broken"},
		{name: "not found inside", to: to, fails: map[string]error{"h2 await": broken}, state: back, at: from, says: "await: broken"},
		{name: "not found inside, next host", to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 await": broken}, state: done, at: "h3/e"},
		{name: "not thawed", to: to, fails: map[string]error{"h2 thaw": broken}, state: back, at: from, says: "thaw: broken"},
		{name: "same host, not thawed", to: "h1/d", fails: map[string]error{"h1 thaw": broken}, state: held, says: "the undo of freeze failed: broken"},
		{name: "held, with what no record may have", to: "h1/d", fails: map[string]error{"h1 thaw": errors.New("broken\x00" + strings.Repeat("x", longestText))}, state: held, says: "gpuctl migrations resume m-1"},
		{name: "held", to: to, fails: map[string]error{"h2 thaw": broken, "h2 move": broken}, state: held, says: "gpuctl migrations resume m-1"},
		{name: "not cleaned up", to: to, fails: map[string]error{"h1 giveback": broken}, state: done},
		{name: "not kept there", to: to, free: little, fails: map[string]error{"h2 keep": broken}, state: back, at: from, says: "freeze: broken"},
		{name: "not kept here", to: to, free: little, fails: map[string]error{"h1 keep": broken}, state: back, at: from, says: "freeze: broken"},
		{name: "not kept at the next", to: to, free: little, candidates: []string{"h3/e"}, fails: map[string]error{"h2 await": broken, "h3 keep": broken}, state: back, at: from, says: "move: broken"},
		{name: "not forgotten", to: to, free: little, fails: map[string]error{"h2 thaw": broken, "h2 forget": broken}, state: back, at: from, says: "thaw: broken"},
		{name: "not forgotten at the end", to: to, free: little, fails: map[string]error{"h2 forget": broken}, state: done},
	} {
		run := func(t *testing.T, free uint64) {
			w := newWorld(t)
			w.fails, w.free = c.fails, free
			m := w.drive(w.migration(c.to, c.candidates...))
			if m.GetState() != c.state || !strings.Contains(m.GetMessage(), c.says) {
				t.Fatalf("%s: %s", m.GetState(), m.GetMessage())
			}
			if c.at != "" {
				w.check(m)
				if w.onGPU != c.at {
					t.Errorf("on %s", w.onGPU)
				}
			}
			if frozen := slices.Contains(m.GetDone(), StepFreeze); frozen && free == little != (len(m.GetMachine().GetAway()) == 1 && w.states > 0) {
				t.Errorf("away: %v", m.GetMachine().GetAway())
			}
		}
		if c.free == 0 {
			t.Run(c.name, func(t *testing.T) { run(t, gib) })
		}
		t.Run(c.name+", away", func(t *testing.T) { run(t, little) })
	}
}

// little is memory of a VM that has room for one of its sessions' states.
const little = headroom + 16*mib

// After the move a failed candidate is followed by another one of that host.
func TestNextCandidateThere(t *testing.T) {
	for _, at := range []string{"attach", "await", "thaw"} {
		w := newWorld(t)
		r := w.runner()
		n := 0
		r.Before = func(step string, undo bool) error {
			if step == at && !undo {
				if n++; n == 1 {
					return errors.New("its GPU died")
				}
			}
			return nil
		}
		m, err := r.Run(t.Context(), w.migration(to, "h3/e", other))
		if err != nil || m.GetState() != done || w.onGPU != other || w.moves != 1 {
			t.Errorf("%s: %v %s %s on %s, %d moves", at, err, m.GetState(), m.GetMessage(), w.onGPU, w.moves)
		}
		w.check(m)
	}
}

// TestDriverDiesAnywhere ends the driver at every call, before and after the
// call has its effect, and has another one go on, for good and bad ends.
func TestDriverDiesAnywhere(t *testing.T) {
	broken := errors.New("broken")
	kills := 0
	for name, c := range map[string]struct {
		to         string
		candidates []string
		fails      map[string]error
	}{
		"other host":             {to: to},
		"same host":              {to: "h1/d"},
		"not prepared, next":     {to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 prepare": broken}},
		"not moved":              {to: to, fails: map[string]error{"h1 move": broken}},
		"not attached":           {to: to, fails: map[string]error{"h2 attach": broken}},
		"not thawed":             {to: to, fails: map[string]error{"h2 thaw": broken}},
		"not thawed, and no way": {to: to, fails: map[string]error{"h2 thaw": broken, "h2 move": broken}},
		"not moved, next":        {to: to, candidates: []string{"h1/d"}, fails: map[string]error{"h1 move": broken}},
		"not attached, next":     {to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 attach": broken}},
		"not kept":               {to: to, fails: map[string]error{"h2 keep": broken}},
	} {
		for _, free := range []uint64{gib, little} {
			kills += dieAnywhere(t, fmt.Sprintf("%s, with %d bytes of room", name, free), func(w *world) {
				w.fails, w.free = c.fails, free
				w.check(w.drive(w.migration(c.to, c.candidates...)))
			})
		}
	}
	t.Logf("%d ends of a driver", kills)
}

// A VM that cannot be moved alive is stopped and started with another card,
// whoever dies meanwhile.
func TestCold(t *testing.T) {
	broken := errors.New("broken")
	kills := 0
	for name, c := range map[string]struct {
		to         string
		candidates []string
		fails      map[string]error
		state      clusterv1.MigrationState
		at         string
	}{
		"other host":        {to: to, state: done, at: to},
		"same host":         {to: "h1/d", state: done, at: "h1/d"},
		"not stopped":       {to: to, candidates: []string{other}, fails: map[string]error{"h1 stop": broken}, state: back, at: from},
		"not defined":       {to: to, fails: map[string]error{"h2 define": broken}, state: back, at: from},
		"not started":       {to: to, fails: map[string]error{"h2 start": broken}, state: back, at: from},
		"not started, next": {to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 start": broken}, state: done, at: "h3/e"},
		"no way":            {to: to, fails: map[string]error{"h2 start": broken, "h1 start": broken}, state: held},
	} {
		run := func(w *world) *clusterv1.Migration {
			w.cold, w.fails = true, c.fails
			m := w.drive(w.migration(c.to, c.candidates...))
			w.check(m)
			return m
		}
		w := newWorld(t) // nobody dies
		if m := run(w); m.GetState() != c.state || c.at != "" && w.onGPU != c.at {
			t.Errorf("%s: %s on %s: %s", name, m.GetState(), w.onGPU, m.GetMessage())
		}
		kills += dieAnywhere(t, name, func(w *world) { run(w) })
	}
	t.Logf("%d ends of a driver", kills)
}

// checkDefined checks where the VM is defined. What is left elsewhere and not recorded stays there
// for ever.
func (w *world) checkDefined(m *clusterv1.Migration) {
	w.t.Helper()
	if !w.defined[w.at] {
		w.t.Errorf("%s on %s: defined on %v", m.GetState(), w.at, w.defined)
	}
	for host := range w.defined {
		if host != w.at && !slices.Contains(m.GetMachine().GetDefinedOn(), host) {
			w.t.Errorf("%s on %s: defined on %s, which is not said: %v", m.GetState(), w.at, host, m.GetMachine().GetDefinedOn())
		}
	}
}

// A source that is lost when the VM runs elsewhere keeps its definition, and the record says so. Where
// the VM goes then, its definition is to stay.
func TestDefinitionThatALostHostKeepsIsRecorded(t *testing.T) {
	w := newWorld(t)
	w.cold = true
	r := w.runner()
	r.Before = w.downFrom("h1", StepClean)
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != done || !w.defined["h1"] || !slices.Equal(m.GetMachine().GetDefinedOn(), []string{"h1"}) {
		t.Errorf("%v, %s: defined on %v, left on %v", err, m.GetState(), w.defined, m.GetMachine().GetDefinedOn())
	}
	w = newWorld(t)
	w.cold = true
	m = w.migration(to)
	m.Machine.DefinedOn = []string{"h2", "h4"} // of candidates before
	if m = w.drive(m); m.GetState() != done || !slices.Equal(m.GetMachine().GetDefinedOn(), []string{"h4"}) {
		t.Errorf("%s: left on %v", m.GetState(), m.GetMachine().GetDefinedOn())
	}
	w.check(m)
}

// A driver that was replaced does nothing more.
func TestReplaced(t *testing.T) {
	w := newWorld(t)
	r := w.runner()
	r.Before = func(step string, _ bool) error {
		if step == StepDetach {
			w.mu.Lock()
			w.token = 8
			w.kept.Token = 8 // taken over
			w.mu.Unlock()
		}
		return nil
	}
	_, err := r.Run(t.Context(), w.migration(to))
	if !errors.Is(err, ErrStale) {
		t.Fatalf("%v", err)
	}
	if w.at != "h1" {
		t.Error("the replaced driver has moved the VM")
	}
	m := w.drive(proto.CloneOf(w.kept))
	w.check(m)
}

func TestAbort(t *testing.T) {
	for i, at := range []string{StepPrepare, StepFreeze, StepDetach, StepMove, StepAttach, StepThaw, StepClean, StepFreeze, StepDetach, StepMove, StepAttach, StepThaw, StepClean} {
		w := newWorld(t)
		if i > 6 {
			w.free = little
		}
		r := w.runner()
		aborting := false
		r.Aborting = func(string) bool { return aborting }
		r.Before = func(step string, _ bool) error { aborting = aborting || step == at; return nil }
		m, err := r.Run(t.Context(), w.migration(to, other))
		want := back
		if at == StepClean {
			want = done
		}
		if err != nil || m.GetState() != want {
			t.Errorf("%s: %v, %s %s", at, err, m.GetState(), m.GetMessage())
		}
		w.check(m)
	}
}

// quick is a journal in which an operator aborts a migration while its driver writes that it is
// about to be committed.
type quick struct{ *world }

func (q quick) Put(ctx context.Context, m *clusterv1.Migration) (*clusterv1.Migration, error) {
	m.Machine.Aborting = m.GetMachine().GetAborting() || m.GetStep() == StepCommit
	return q.world.Put(ctx, m)
}

// What an operator was told is undone is not committed.
func TestAbortJustBeforeTheCommit(t *testing.T) {
	w := newWorld(t)
	r := w.runner()
	r.Journal = quick{w}
	m, err := r.Run(t.Context(), w.migration(to, other))
	if err != nil || m.GetState() != back {
		t.Errorf("%v, %s %s", err, m.GetState(), m.GetMessage())
	}
	w.check(m)
}

// A host that does not answer for a moment does not matter; one that does not
// come back does.
func TestUnreachable(t *testing.T) {
	w := newWorld(t)
	r := w.runner()
	cut := false
	r.Before = func(step string, _ bool) error {
		if step == StepMove {
			w.mu.Lock()
			defer w.mu.Unlock()
			if !cut {
				cut, w.down["h2"] = true, true
				time.AfterFunc(5*time.Millisecond, func() { w.mu.Lock(); w.down["h2"] = false; w.mu.Unlock() })
			}
		}
		return nil
	}
	r.Patience = 10 * time.Second
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != done {
		t.Errorf("%v %s %s", err, m.GetState(), m.GetMessage())
	}
	w.check(m)

	for _, free := range []uint64{gib, little} {
		gone(t, free, 20*time.Millisecond)
	}
	// The applications stand still for a part of that time only.
	if stood := gone(t, gib, time.Second); stood > 800*time.Millisecond {
		t.Errorf("they stood still for %v", stood)
	}
}

// A host that is lost for a moment in a step that has taken longer than a driver waits for
// hosts is waited for all the same.
func TestLongStepBearsALostConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		r := w.runner()
		r.Patience = time.Minute
		lost := false
		r.Before = func(step string, undo bool) error {
			if step != StepFreeze || undo || lost {
				return nil
			}
			lost = true
			time.Sleep(7 * time.Minute)
			return fmt.Errorf("%w: connection lost", ErrUnreachable)
		}
		m, err := r.Run(t.Context(), w.migration(to))
		if err != nil || m.GetState() != done || !lost {
			t.Errorf("%v %s %s", err, m.GetState(), m.GetMessage())
		}
		w.check(m)
	})
}

// gone is the end of the destination before the move: the VM goes on where it
// was, without waiting for that host, with states that were to go there.
func gone(t *testing.T, free uint64, patience time.Duration) time.Duration {
	t.Helper()
	w := newWorld(t)
	w.free = free
	r := w.runner()
	r.Patience = patience
	r.Before = func(step string, _ bool) error {
		if step == StepMove {
			w.mu.Lock()
			w.down["h2"] = true
			w.mu.Unlock()
		}
		return nil
	}
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != back || !strings.Contains(m.GetMessage(), "h2/b is not given back yet") || w.frozen["s1"] || w.onGPU != from || w.cards[from].plugged != "vm" {
		t.Errorf("%v %s %s; %+v", err, m.GetState(), m.GetMessage(), w.frozen)
	}
	return time.Duration(m.GetStoppedNs())
}

// The destination dies before the VM is sent, or before it has reserved its card: the VM goes to
// the next candidate, or on where it is. Nobody waits for the dead host to take its card back,
// which it does by itself when it sees the end.
func TestDestinationDiesBeforeTheVMIsSent(t *testing.T) {
	for _, c := range []struct {
		at         string
		candidates []string
		state      clusterv1.MigrationState
		on         string
	}{
		{StepReserve, nil, back, from},
		{StepReserve, []string{"h3/e"}, done, "h3/e"},
		{StepPrepare, []string{"h3/e"}, done, "h3/e"},
		{StepMove, nil, back, from},
		{StepMove, []string{"h3/e"}, done, "h3/e"},
		{StepMove, []string{"h1/d"}, done, "h1/d"},
	} {
		t.Run(fmt.Sprint(c.at, c.candidates), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				r := w.runner()
				r.Patience = 2 * time.Minute
				r.Before = w.downFrom("h2", c.at)
				m, err := r.Run(t.Context(), w.migration(to, c.candidates...))
				if err != nil || m.GetState() != c.state || w.onGPU != c.on || w.frozen["s1"] || w.cards[c.on].plugged != "vm" {
					t.Errorf("%v %s on %s: %s", err, m.GetState(), w.onGPU, m.GetMessage())
				}
				if stood := time.Duration(m.GetStoppedNs()); stood > 70*time.Second {
					t.Errorf("they stood still for %v", stood)
				}
			})
		})
	}
}

func TestVMDies(t *testing.T) {
	w := newWorld(t)
	r := w.runner()
	r.Before = func(step string, _ bool) error {
		if step == StepMove {
			w.dead = true
		}
		return nil
	}
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != failed || !strings.Contains(m.GetMessage(), "the VM is absent on host h1 and absent on host h2: it is gone") {
		t.Errorf("%v %s %s", err, m.GetState(), m.GetMessage())
	}
}

func TestStandstill(t *testing.T) {
	w := newWorld(t)
	r := w.runner()
	r.Before = func(step string, _ bool) error {
		if step == StepMove {
			time.Sleep(20 * time.Millisecond) // what is measured
		}
		return nil
	}
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetStoppedNs() < int64(20*time.Millisecond) || m.GetStoppedNs() > int64(5*time.Second) {
		t.Errorf("%v, stood still for %v", err, time.Duration(m.GetStoppedNs()))
	}
	var names []string
	for _, s := range m.GetSteps() {
		names = append(names, s.GetName())
		if s.GetTookNs() <= 0 {
			t.Errorf("%s took no time", s.GetName())
		}
	}
	if want := "reserve prepare freeze release detach move attach await thaw commit clean"; strings.Join(names, " ") != want {
		t.Errorf("%v", names)
	}
}

func TestStillUntil(t *testing.T) {
	type step = clusterv1.MigrationStep
	for _, tt := range []struct {
		name     string
		steps    []*step
		from, to int64
	}{
		{"nothing was frozen", []*step{{Name: StepReserve}, {Name: StepPrepare}}, 0, 0},
		{"done", []*step{{Name: StepFreeze}, {Name: StepThaw}, {Name: StepClean}}, 10, 29},
		{"undone", []*step{{Name: StepReserve}, {Name: StepFreeze}, {Name: StepMove, Error: "no"}, {Name: StepFreeze, Undo: true}}, 20, 49},
		{"thawed elsewhere", []*step{{Name: StepFreeze}, {Name: StepThaw, Error: "no"}, {Name: StepAttach}, {Name: StepThaw}, {Name: StepCommit}}, 10, 49},
		{"thaw taken back", []*step{{Name: StepFreeze}, {Name: StepThaw}, {Name: StepThaw, Undo: true}, {Name: StepFreeze, Undo: true}}, 10, 49},
		{"held", []*step{{Name: StepFreeze}, {Name: StepThaw, Error: "no"}, {Name: StepAttach, Undo: true, Error: "no"}}, 10, 39},
		{"cold", []*step{{Name: StepPrepare}, {Name: StepStop}, {Name: StepStart}, {Name: StepClean}}, 20, 39},
	} {
		for i, s := range tt.steps {
			s.StartedUnixNs, s.TookNs = int64(10*(i+1)), 9
		}
		if from, to := still(tt.steps); from != tt.from || to != tt.to {
			t.Errorf("%s: from %d to %d", tt.name, from, to)
		}
	}
}

// The end of hostd ends nothing: the record stays as it is.
func TestCancelled(t *testing.T) {
	w := newWorld(t)
	r := w.runner()
	ctx, cancel := context.WithCancel(t.Context())
	r.Before = func(step string, _ bool) error {
		if step == StepDetach {
			cancel()
		}
		return nil
	}
	if _, err := r.Run(ctx, w.migration(to)); !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
	if w.kept.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING {
		t.Errorf("%s", w.kept.GetState())
	}
	w.check(w.drive(proto.CloneOf(w.kept)))
}

// A VM at home waits a quarter of the patience from when it was first found
// there, however long it was before that.
func TestPatienceAtHome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &run{Runner: New(Config{Log: slog.New(slog.DiscardHandler)}), m: &clusterv1.Migration{Steps: []*clusterv1.MigrationStep{{}}}}
		away := fmt.Errorf("%w: no answer", ErrUnreachable)
		home := fmt.Errorf("%w: %w", errAtHome, ErrUnreachable)
		var found time.Time
		tries := 0
		err := r.attempt(t.Context(), step{name: StepMove, limit: time.Hour}, func(context.Context, *run) error {
			tries++
			switch tries {
			case 1, 3: // found at home in between
				time.Sleep(r.Patience / 8)
				return away
			case 2:
				return home
			case 4:
				time.Sleep(r.Patience / 3)
				found = time.Now()
			}
			return home
		}, false)
		if waited := time.Since(found); !errors.Is(err, errAtHome) || waited < r.Patience/4 || waited > r.Patience/4+time.Second {
			t.Errorf("%v after %v", err, waited)
		}
	})
}

// storable reports whether the cluster's log takes the texts of a record.
func storable(m *clusterv1.Migration) bool {
	texts := []string{m.GetMessage(), m.GetMachine().GetLostUnknown()}
	for _, s := range m.GetSteps() {
		texts = append(texts, s.GetError())
	}
	return !slices.ContainsFunc(texts, func(s string) bool { return len(s) > longestText || strings.ContainsRune(s, 0) })
}

const longestText = 4096 // bytes

// requested is what a host takes in one request.
func requested(names ...string) error {
	if n := len(strings.Join(names, "  ")); n > 256<<10 {
		return fmt.Errorf("a request of %d bytes is too large", n)
	}
	return nil
}
