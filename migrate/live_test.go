package migrate

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// farGPUs are remote GPUs of each host that a migration from h1 to h2 can use.
var farGPUs = []string{"h1/f", "h2/f", "h3/f"}

// A VM moves while its applications compute on a remote GPU, whoever has that, and whatever
// goes wrong. Nothing is frozen.
func TestLive(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		name       string
		to         string
		candidates []string
		fails      map[string]error // FAR stands for the remote GPU's host
		strict     bool
		state      clusterv1.MigrationState
		at, says   string
		frozen     bool // they were frozen after all
	}{
		{name: "other host", to: to, state: done, at: to},
		{name: "same host", to: "h1/d", state: done, at: "h1/d"},
		{name: "taken", to: to, fails: map[string]error{"h2 reserve": ErrTaken}, state: back, at: from, says: "reserve: taken"},
		{name: "cannot be prepared, next", to: to, candidates: []string{other, "h1/d"}, fails: map[string]error{"h2 prepare": broken}, state: done, at: "h1/d"},
		{name: "not lent", to: to, fails: map[string]error{"FAR lend": ErrTaken}, state: done, at: to, frozen: true},
		{name: "not lent, and wanted so", to: to, strict: true, fails: map[string]error{"FAR lend": ErrTaken}, state: back, at: from, says: "borrow: taken"},
		{name: "not swapped", to: to, fails: map[string]error{"h1 swap": broken}, state: done, at: to, frozen: true},
		{name: "not swapped, and wanted so", to: to, strict: true, fails: map[string]error{"h1 swap": broken}, state: back, at: from, says: "swap: broken"},
		{name: "not let go", to: to, candidates: []string{other}, fails: map[string]error{"h1 release": broken}, state: back, at: from, says: "release: broken"},
		{name: "does not move", to: to, fails: map[string]error{"h1 move": broken}, state: back, at: from, says: "move: broken"},
		{name: "does not move, next", to: to, candidates: []string{"h1/d"}, fails: map[string]error{"h1 move": broken}, state: done, at: "h1/d"},
		{name: "not attached", to: to, fails: map[string]error{"h2 attach": broken}, state: back, at: from, says: "attach: broken"},
		{name: "not found inside", to: to, fails: map[string]error{"h2 await": broken}, state: back, at: from, says: "await: broken"},
		{name: "not found inside, next host", to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 await": broken}, state: done, at: "h3/e"},
		{name: "do not come home", to: to, fails: map[string]error{"h2 home": broken}, state: back, at: from, says: "home: broken"},
		{name: "no way home at all", to: to, fails: map[string]error{"h2 home": broken, "h1 home": broken}, state: held, says: "the VM is kept, and FAR/f for its applications"},
		{name: "held", to: to, fails: map[string]error{"h2 home": broken, "h2 move": broken}, state: held, says: "gpuctl migrations resume m-1"},
		{name: "lease not ended", to: to, fails: map[string]error{"FAR endlend": broken}, state: done, at: to},
		{name: "neither lent nor given back", to: to, strict: true, fails: map[string]error{"h1 swap": broken, "FAR endlend": broken}, state: back, at: from, says: "FAR/f is not given back yet"},
	} {
		for _, gpu := range farGPUs {
			t.Run(c.name+", on "+gpu, func(t *testing.T) {
				w := newWorld(t)
				w.far, w.strict, w.free = gpu, c.strict, little
				w.fails = map[string]error{}
				for what, err := range c.fails {
					w.fails[strings.Replace(what, "FAR", HostOf(gpu), 1)] = err
				}
				m := w.drive(w.migration(c.to, c.candidates...))
				if m.GetState() != c.state || !strings.Contains(m.GetMessage(), strings.Replace(c.says, "FAR", HostOf(gpu), 1)) {
					t.Fatalf("%s: %s", m.GetState(), m.GetMessage())
				}
				w.check(m)
				if c.at != "" && w.onGPU != c.at {
					t.Errorf("on %s", w.onGPU)
				}
				if froze := slices.ContainsFunc(m.GetSteps(), func(s *clusterv1.MigrationStep) bool { return s.GetName() == StepFreeze }); froze != c.frozen {
					t.Errorf("frozen: %v", froze)
				}
			})
		}
	}
}

// The driver dies at every call, before and after the call has its effect, and another one
// goes on.
func TestDriverDiesAnywhereWhileTheApplicationsCompute(t *testing.T) {
	broken := errors.New("broken")
	kills := 0
	for name, c := range map[string]struct {
		to         string
		candidates []string
		strict     bool
		fails      map[string]error
	}{
		"other host":             {to: to},
		"same host":              {to: "h1/d"},
		"not lent":               {to: to, fails: map[string]error{"h3 lend": broken}},
		"not swapped":            {to: to, fails: map[string]error{"h1 swap": broken}},
		"not swapped, strict":    {to: to, strict: true, fails: map[string]error{"h1 swap": broken}},
		"not moved":              {to: to, fails: map[string]error{"h1 move": broken}},
		"not moved, next":        {to: to, candidates: []string{"h1/d"}, fails: map[string]error{"h1 move": broken}},
		"not attached, next":     {to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 attach": broken}},
		"not home":               {to: to, fails: map[string]error{"h2 home": broken}},
		"not home, and no way":   {to: to, fails: map[string]error{"h2 home": broken, "h2 move": broken}},
		"lease not ended":        {to: to, fails: map[string]error{"h3 endlend": broken}},
		"not prepared, and next": {to: to, candidates: []string{"h3/e"}, fails: map[string]error{"h2 prepare": broken}},
	} {
		kills += dieAnywhere(t, name, func(w *world) {
			w.far, w.strict, w.fails = "h3/f", c.strict, c.fails
			w.check(w.drive(w.migration(c.to, c.candidates...)))
		})
	}
	t.Logf("%d ends of a driver", kills)
}

func TestAbortWhileTheApplicationsCompute(t *testing.T) {
	for _, at := range []string{StepBorrow, StepSwap, StepRelease, StepDetach, StepMove, StepAttach, StepHome, StepClean} {
		w := newWorld(t)
		w.far = "h3/f"
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

// The destination does not answer after the VM was sent: nothing goes on, and the remote GPU
// stays the VM's.
func TestLostAnswerKeepsTheRemoteGPU(t *testing.T) {
	w := newWorld(t)
	w.far, w.loses, w.cuts = "h3/f", true, "h2"
	m := w.drive(w.migration(to))
	if m.GetState() != held || w.lent["h3/f"] == "" || w.runs["s1"] != "h3/f" {
		t.Fatalf("%s %s: %v, %v", m.GetState(), m.GetMessage(), w.lent, w.runs)
	}
}

// A VM that runs twice has computed twice with the same far executors: those are ended, and
// its applications are lost rather than wrong. The VM itself is repaired as ever.
func TestAVMThatRunsTwiceLosesWhatItsCopiesHaveUsed(t *testing.T) {
	w := newWorld(t)
	w.far, w.loses = "h3/f", true
	m := w.drive(w.migration(to))
	w.isHeld(m, "the VM runs on two hosts, h1 and h2", "what computed for it on h3/f was ended, as both copies have used it")
	if len(w.lent) > 0 || len(w.runs) > 0 {
		t.Fatalf("%v is lent, and %v compute", w.lent, w.runs)
	}
	w.twin, w.paused = "", map[string]bool{} // the copy is destroyed
	m = w.resume(m)
	if m.GetState() != done {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)

	w = newWorld(t)
	w.far, w.loses, w.fails = "h3/f", true, map[string]error{"h3 endlend": ErrUnreachable}
	w.isHeld(w.drive(w.migration(to)), "the VM runs on two hosts", "could not be ended: unreachable")
}

// The downtime is that of the swaps alone, and the record says how long each was.
func TestDowntimeOfSwaps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.far = "h3/f"
		r := w.runner()
		r.Before = func(step string, _ bool) error {
			if step == StepMove || step == StepSwap || step == StepHome { // none of them takes less than what is reported
				time.Sleep(20 * time.Millisecond)
			}
			return nil
		}
		m, err := r.Run(t.Context(), w.migration(to))
		if err != nil || m.GetStoppedNs() != int64(5*time.Millisecond) {
			t.Errorf("%v, downtime %v", err, time.Duration(m.GetStoppedNs()))
		}
		var names []string
		for _, s := range m.GetSteps() {
			names = append(names, s.GetName())
		}
		if want := "reserve prepare borrow swap release detach move attach await home commit clean"; strings.Join(names, " ") != want {
			t.Errorf("%v", names)
		}
		if got := m.GetMachine().GetSessions(); len(got) != 2 || slices.Contains(got, "user") {
			t.Errorf("sessions %v: one that somebody had suspended is not swapped", got)
		}
	})
}

// An application that begins between the swap and the release follows the others; so does
// one that begins after that.
func TestAnApplicationThatBeginsMeanwhileIsSwappedToo(t *testing.T) {
	for began, want := range map[int]clusterv1.MigrationState{1: done, 2: done, 9: back} {
		w := newWorld(t)
		w.far = "h3/f"
		for i := range began {
			w.begin = append(w.begin, "new"+string(rune('a'+i)))
		}
		m := w.drive(w.migration(to))
		if m.GetState() != want {
			t.Fatalf("%d begin: %s %s", began, m.GetState(), m.GetMessage())
		}
		w.check(m)
		if want == done && len(m.GetMachine().GetSessions()) != 2+began {
			t.Errorf("%v", m.GetMachine().GetSessions())
		}
	}
}

// A migration waits, with the applications on the remote GPU and the card without the VM,
// until an operator has it go on or put everything back, whoever dies meanwhile.
func TestAMigrationWaitsForItsOperator(t *testing.T) {
	kills := 0
	for name, c := range map[string]struct {
		to    string
		abort bool
		state clusterv1.MigrationState
		at    string
	}{
		"its own card":             {from, false, done, from},
		"its own card, put back":   {from, true, back, from},
		"other host":               {to, false, done, to},
		"other host, put back":     {to, true, back, from},
		"another card, same host":  {"h1/d", false, done, "h1/d"},
		"another card, taken back": {"h1/d", true, back, from},
	} {
		for n := 0; ; n++ { // 0: nobody dies
			w := newWorld(t)
			w.far, w.strict, w.wait, w.crashAt, w.after = "h3/f", true, true, n, n%2 == 0
			m := w.drive(w.migration(c.to))
			if n > 0 && m == nil { // its record was never written
				kills++
				continue
			}
			if m.GetState() != held || !Waiting(m) || w.runs["s1"] != "h3/f" || w.cards[from].plugged != "" || !strings.Contains(m.GetMessage(), "gpuctl migrations abort m-1") {
				t.Fatalf("%s: %s %s: %v", name, m.GetState(), m.GetMessage(), w.runs)
			}
			w.check(m)
			next := proto.CloneOf(w.kept)
			next.State = clusterv1.MigrationState_MIGRATION_STATE_RUNNING
			if next.Machine.Aborting = c.abort; !c.abort {
				next.Machine.Wait = false
			}
			w.kept = proto.CloneOf(next) // hostd records that before anything is done
			m = w.drive(next)
			if m.GetState() != c.state || w.onGPU != c.at || Waiting(m) {
				t.Errorf("%s: %s on %s: %s", name, m.GetState(), w.onGPU, m.GetMessage())
			}
			w.check(m)
			if t.Failed() {
				t.Fatalf("%s: driver ended at call %d", name, n)
			}
			if w.crashAt != 0 { // it was never reached
				break
			}
			if n > 0 {
				kills++
			}
		}
	}
	t.Logf("%d ends of a driver", kills)
}

// Without a remote GPU the VM's own card is taken from it and given back while they are frozen.
func TestItsOwnCard(t *testing.T) {
	for far, want := range map[string]string{"": "freeze release detach attach await thaw commit clean", "h3/f": "borrow swap release detach attach await home commit clean"} {
		w := newWorld(t)
		w.far = far
		m := w.drive(w.migration(from))
		if m.GetState() != done || w.onGPU != from {
			t.Errorf("%s: %s", m.GetState(), m.GetMessage())
		}
		w.check(m)
		if got := strings.Join(StepNames(m.GetMachine()), " "); got != want {
			t.Errorf("%s", got)
		}
		w = newWorld(t)
		if w.far, w.fails = far, map[string]error{"h3 lend": ErrTaken}; far == "" {
			continue
		}
		m = w.drive(w.migration(from))
		if m.GetState() != done || m.GetMachine().GetFarGpu() != "" {
			t.Errorf("not lent: %s: %s", m.GetState(), m.GetMessage())
		}
		w.check(m)
	}
	m, hosts := liveFacts()
	hosts[0].GPUs[0].Health = "it hangs" // which a reset may repair
	for _, c := range []struct {
		r    Request
		want bool
	}{
		{Request{Verb: Migrate, To: "h1/a"}, true},
		{Request{Verb: Migrate, To: "h1/a", Live: LiveAlways}, true},
		{Request{Verb: Migrate, To: "h1"}, false},
		{Request{Verb: Upgrade, To: "h1/a"}, false},
	} {
		p := Make(c.r, m, hosts, NewCostModel())
		if p.Possible() != c.want || c.want && (p.Candidates[0].GPU.ID != "h1/a" || strings.Contains(names(p), "prepare")) {
			t.Errorf("%+v: %v %v", c.r, p.Candidates, p.Rejected)
		}
	}
}

// The VM says how long a swap stopped its applications: no more is believed than the step took.
func TestADowntimeThatCannotBeIsNotBelieved(t *testing.T) {
	r := &run{Runner: New(Config{Log: slog.New(slog.DiscardHandler)}), m: &clusterv1.Migration{Steps: []*clusterv1.MigrationStep{{}}}, began: time.Now()}
	for _, said := range []time.Duration{time.Hour, -time.Hour} {
		_ = r.attempt(t.Context(), step{name: StepSwap, limit: time.Minute}, func(_ context.Context, r *run) error { r.stopped = said; return nil }, false)
		if got := time.Duration(r.m.GetSteps()[0].GetStoppedNs()); got < 0 || got > time.Minute {
			t.Errorf("%v is kept as %v", said, got)
		}
	}
}

// A CUDA program that has begun since the plan cannot be swapped, and is frozen.
func TestACUDAProgramThatHasBegunIsFrozen(t *testing.T) {
	w := newWorld(t)
	w.far = "h3/f"
	s := &cudaSite{}
	r := New(Config{Sites: cudaSites{w, s}, Claims: w, Journal: w, Log: slog.New(slog.DiscardHandler), Patience: 20 * time.Millisecond, Pause: time.Millisecond})
	m, err := r.Run(t.Context(), w.migration(to))
	if err != nil || m.GetState() != done || m.GetMachine().GetFarGpu() != "" {
		t.Fatalf("%v %s %s", err, m.GetState(), m.GetMessage())
	}
	w.check(m)
}

// liveFacts are those of a VM that can use two remote GPUs, where libvirt has lock managers.
func liveFacts() (VMFacts, []HostFacts) {
	m, hosts := facts()
	m.Agent.Protocol, m.Type = LiveProtocol, "kvm"
	for i := range hosts {
		hosts[i].Hypervisor, hosts[i].LockManager = "kvm", "lockd"
	}
	gpu := func(id string, rank uint32) FarFacts {
		return FarFacts{
			GPUFacts: GPUFacts{ID: id, Model: "L40", Rank: rank, Memory: 16 * gib, Limits: &gpuctlv1.Limits{GlobalMemory: 16 * gib, MaxAlloc: 4 * gib, MaxWorkGroupSize: 1024, LocalMemory: 48 << 10}},
			Host:     HostOf(id), HostState: "ready", RTT: time.Millisecond, Link: 1 << 30,
		}
	}
	m.Far = []FarFacts{gpu("h3/r", 9), gpu("h2/r", 5)}
	return m, hosts
}

func names(p *Plan) string {
	var out []string
	for _, s := range p.Candidates[0].Steps {
		out = append(out, s.Name)
	}
	return strings.Join(out, " ")
}

func TestPlanOfALiveMigration(t *testing.T) {
	m, hosts := liveFacts()
	p := Make(Request{Verb: Migrate}, m, hosts, NewCostModel())
	if !p.Possible() || p.Live.Far == nil || p.Live.Far.ID != "h2/r" || len(p.Live.Reasons) != 0 {
		t.Fatalf("%+v %+v", p, p.Live)
	}
	if want := "reserve prepare borrow swap release detach move attach await home commit clean"; names(p) != want {
		t.Error(names(p))
	}
	stop := p.Candidates[0].Cost.Stop
	if stop < time.Second || stop > 3*time.Second || p.Live.Otherwise < 2*stop {
		t.Errorf("downtime %v, otherwise %v", stop, p.Live.Otherwise)
	}
	// A state that has no room anywhere does not keep it from that.
	m.Agent.FreeMemory, hosts[0].Keep, hosts[1].Keep, hosts[0].Keeps = 0, 0, 0, false
	if p := Make(Request{Verb: Migrate}, m, hosts, NewCostModel()); !p.Possible() || p.Live.Far == nil || p.Away != 0 {
		t.Errorf("%+v: %v", p.Live, p.Reasons)
	}
	// What is forbidden is not done.
	m, hosts = liveFacts()
	if p := Make(Request{Verb: Migrate, Live: LiveNever}, m, hosts, NewCostModel()); !p.Possible() || p.Live != nil || !strings.Contains(names(p), "freeze") {
		t.Errorf("%+v", p)
	}
	// A card of the destination that could be lent is left for the VM, and cannot be both.
	m.Far = []FarFacts{{GPUFacts: hosts[1].GPUs[0], Host: "h2", HostState: "ready"}}
	p = Make(Request{Verb: Migrate, Live: LiveAlways}, m, hosts, NewCostModel())
	if !p.Possible() || p.Live.Far.ID != "h2/a" || p.Candidates[0].GPU.ID != "h2/b" {
		t.Errorf("%+v", p)
	}
	if p := Make(Request{Verb: Migrate, Live: LiveAlways, To: "h2/a"}, m, hosts, NewCostModel()); p.Possible() || p.Reasons[0].GetCode() != ReasonNoRemote {
		t.Errorf("%+v", p)
	}
}

// One line for each reason: by default the applications are frozen then, and an operator who
// wants them to compute is refused.
func TestReasonsAgainstARemoteGPU(t *testing.T) {
	for _, c := range []struct {
		code string
		with func(m *VMFacts, h []HostFacts)
		at   string // GPU; empty: against any
		says string
		soft bool // it counts by default only
	}{
		{code: ReasonLiveCUDA, with: func(m *VMFacts, _ []HostFacts) { m.Agent.Sessions[0].Driver = true }, says: "CUDA programs run in VM web (1): they cannot compute on a remote GPU"},
		{code: ReasonLiveOld, with: func(m *VMFacts, _ []HostFacts) { m.Agent.Protocol = 2 }, says: "gpuguest 1.0 in VM web speaks protocol 2, and remote GPUs take 3"},
		{code: ReasonNoSessions, with: func(m *VMFacts, _ []HostFacts) { m.Agent.Sessions = nil }, says: "no application of VM web computes"},
		{code: ReasonNoRemote, with: func(m *VMFacts, _ []HostFacts) { m.Far = nil }, says: "no GPU of the cluster can be lent to VM web meanwhile"},
		{code: ReasonUnprotected, with: func(_ *VMFacts, h []HostFacts) { h[1].LockManager = "" }, says: "libvirt has no lock manager on h2", soft: true},
		{code: ReasonUnprotected, with: func(m *VMFacts, h []HostFacts) {
			m.Type = "hvm"
			for i := range h {
				h[i].Hypervisor = "xen"
			}
		}, says: "libvirt has no lock manager on h1 that keeps it from that", soft: true},
		{code: ReasonHostState, with: func(m *VMFacts, _ []HostFacts) { m.Far[0].HostState = "draining" }, at: "h3/r", says: "host h3 is draining"},
		{code: ReasonTaken, with: func(m *VMFacts, _ []HostFacts) { m.Far[0].Holder = "a claim" }, at: "h3/r", says: "h3/r belongs to a claim"},
		{code: ReasonHealth, with: func(m *VMFacts, _ []HostFacts) { m.Far[0].Health = "hot" }, at: "h3/r", says: "h3/r is not fit: hot"},
		{code: ReasonCordoned, with: func(m *VMFacts, _ []HostFacts) { m.Far[0].IsCordoned = true }, at: "h3/r", says: "h3/r is cordoned"},
		{code: ReasonGPUMemory, with: func(m *VMFacts, _ []HostFacts) { m.Far[0].Memory = mib }, at: "h3/r", says: "use 64 MiB and h3/r has 1 MiB"},
		{code: ReasonLimits, with: func(m *VMFacts, _ []HostFacts) { m.Far[0].Limits.MaxAlloc = mib }, at: "h3/r", says: "h3/r has 1048576"},
		{code: ReasonNotReached, with: func(m *VMFacts, _ []HostFacts) { m.Far[0].Error = "no route to host" }, at: "h3/r", says: "VM web does not reach the port for carriers of host h3 over its network: no route to host"},
	} {
		m, hosts := liveFacts()
		c.with(&m, hosts)
		if c.at != "" {
			m.Far = m.Far[:1]
		}
		m.Agent.FreeMemory = 16 * gib
		for live, want := range map[Live]bool{LiveAuto: true, LiveAlways: c.soft} {
			p := Make(Request{Verb: Migrate, Live: live}, m, hosts, NewCostModel())
			if p.Possible() != want || p.Live == nil || c.soft != (live == LiveAlways && p.Live.Far != nil) && live == LiveAlways {
				t.Errorf("%s, %q: possible %v, %+v", c.code, live, p.Possible(), p.Live)
				continue
			}
			reasons := p.Live.Reasons
			if c.at != "" {
				reasons = nil
				for _, r := range p.Live.Rejected {
					if r.GPU == c.at {
						reasons = r.Reasons
					}
				}
			}
			if live == LiveAuto && (len(reasons) != 1 || reasons[0].GetCode() != c.code || !strings.Contains(reasons[0].GetMessage(), c.says)) {
				t.Errorf("%s: %v, want %q", c.code, reasons, c.says)
			}
		}
	}
	// Where it would take longer, they are frozen.
	m, hosts := liveFacts()
	model := NewCostModel()
	model.swaps = rate{fixed: time.Hour, seen: 1}
	if p := Make(Request{Verb: Migrate}, m, hosts, model); p.Live.Far != nil || len(p.Live.Reasons) != 1 || p.Live.Reasons[0].GetCode() != ReasonNotShorter {
		t.Errorf("%+v", p.Live)
	}
	if p := Make(Request{Verb: Migrate, Live: LiveAlways}, m, hosts, model); !p.Possible() || p.Live.Far == nil {
		t.Errorf("%+v", p.Live)
	}
	m.GPUs = nil
	if p := Make(Request{Verb: Migrate, Live: LiveAlways}, m, hosts, model); p.Possible() {
		t.Error("a VM without a GPU is moved with its applications on a remote one")
	}
}

// What a swap's downtime was is what the next one is predicted to be.
func TestDowntimeOfSwapsIsLearned(t *testing.T) {
	m, hosts := liveFacts()
	model := NewCostModel()
	model.Learn(&clusterv1.Migration{State: done, Steps: []*clusterv1.MigrationStep{{Name: StepSwap, TookNs: int64(time.Minute), StoppedNs: int64(10 * time.Millisecond)}}})
	p := Make(Request{Verb: Migrate}, m, hosts, model)
	if stop := p.Candidates[0].Cost.Stop; stop != movePause+20*time.Millisecond {
		t.Errorf("%v", stop)
	}
}

// cudaSites are sites in whose VM a CUDA program has begun.
type cudaSites struct {
	*world
	*cudaSite
}

type cudaSite struct{ Site }

func (c cudaSites) Site(host string) Site { return &cudaSite{c.world.Site(host)} }

func (s *cudaSite) Sessions(ctx context.Context, m vm.VM) (*AgentFacts, error) {
	facts, err := s.Site.Sessions(ctx, m)
	for i := range facts.Sessions {
		facts.Sessions[i].Driver = facts.Sessions[i].ID == "s2"
	}
	return facts, err
}
