package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// worldParts is the VM's part of a mediated GPU, as each host has it; nil: it has none.
type worldParts map[string]*worldPart

// worldPart is what a host has of the part.
type worldPart struct {
	serves   bool // accesses and commands
	parked   bool // accesses only
	expects  bool // the VM's domain gets it when it comes
	waits    bool // the VM's domain has it, and its accesses wait
	contents int  // 0: none. Whoever serves makes the next
	given    bool // the contents, to another host
	astray   bool // the VM has run here without it
	told     bool // its operator, that its contents are lost
	reserved bool // for the VM's next start
}

// withPart gives the VM a part on its host.
func (w *world) withPart() *world {
	w.parts = worldParts{}
	for _, h := range []string{"h1", "h2", "h3"} {
		w.parts[h] = &worldPart{}
	}
	w.parts["h1"].serves, w.parts["h1"].contents = true, 1
	return w
}

// newest is the contents that the VM has left.
func (p worldParts) newest() (n int) {
	for _, one := range p {
		n = max(n, one.contents)
	}
	return n
}

// partsMove is what becomes of the part when the VM's domain moves.
func (s *site) partsMove(to string) {
	if s.parts == nil {
		return
	}
	here, there := s.parts[s.host], s.parts[to]
	if here.serves {
		s.t.Errorf("the VM leaves %s while commands of it run there", s.host)
	}
	if !there.expects {
		s.t.Errorf("the VM goes to %s, which does not expect its part: its accesses are answered by nobody", to)
	}
	here.serves, here.parked, here.waits, there.waits, there.expects = false, false, false, true, false
	if s.late == to { // its hostd was dead
		there.waits, there.astray, s.astray = false, true, true
	}
	here.expects = here.contents == 0 // its domain is gone, and another may come
}

func (s *site) ParkParts(context.Context, vm.VM) (out []*gpuctlv1.SitePart, err error) {
	out = []*gpuctlv1.SitePart{{Slot: 31}}
	return out, s.do("park", func() error {
		out[0].Lost, out[0].Anew = s.parts[s.host].astray, s.off
		if p := s.parts[s.host]; p.serves {
			p.serves, p.parked = false, true
			return s.here()
		}
		return nil
	})
}

func (s *site) ExpectParts(_ context.Context, _ vm.VM, parts []*gpuctlv1.SitePart) error {
	return s.do("expectparts", func() error {
		p := s.parts[s.host]
		if len(parts) != 1 || p.serves {
			s.t.Errorf("%s expects %v, and has %+v", s.host, parts, p)
		}
		if parts[0].GetAnew() {
			p.reserved = true
			return nil
		}
		if parts[0].GetLost() {
			*p = worldPart{told: true}
		}
		p.expects = !p.waits && !p.parked
		return nil
	})
}

func (s *site) TakeParts(_ context.Context, _ vm.VM, other string) error {
	return s.do("takeparts", func() error {
		s.alone("parts are taken")
		if err := s.here(); err != nil {
			return err
		}
		p, o := s.parts[s.host], s.parts[other]
		switch {
		case p.serves || p.told:
			return nil
		case p.astray && s.host != "h1":
			return errors.New("it ran here without its part")
		case p.astray:
			*p = worldPart{told: true}
			return nil
		case s.astray:
			s.t.Errorf("%s goes on with contents %d, and the VM ran without them", s.host, p.contents)
		}
		if p.contents == 0 || p.given {
			switch {
			case s.down[other]:
				return fmt.Errorf("host %s: %w", other, ErrUnreachable)
			case o.serves || o.parked || o.given || o.contents == 0:
				s.t.Errorf("%s takes contents from %s, which has %+v", s.host, other, o)
			}
			p.contents, p.given, o.given = o.contents, false, true
		}
		if p.contents != s.parts.newest() {
			s.t.Errorf("%s goes on with contents %d, and the VM had left %d", s.host, p.contents, s.parts.newest())
		}
		for h, one := range s.parts {
			if h != s.host && (one.serves || one.parked) {
				s.t.Errorf("%s and %s have the VM's part: %+v", s.host, h, one)
			}
		}
		p.serves, p.parked, p.waits, p.expects = true, false, false, false
		p.contents++ // the VM uses it
		return nil
	})
}

func (s *site) DropParts(context.Context, vm.VM) error {
	return s.do("dropparts", func() error {
		p := s.parts[s.host]
		if s.at == s.host && s.twin == "" && !s.dead {
			s.t.Errorf("%s drops the part of the VM that it has", s.host)
		}
		if p.contents > 0 && !p.given && p.contents == s.parts.newest() {
			s.t.Errorf("%s drops the only contents, %d", s.host, p.contents)
		}
		*p = worldPart{}
		return nil
	})
}

// checkParts compares what became of the part with the record.
func (w *world) checkParts(m *clusterv1.Migration) {
	w.t.Helper()
	if w.parts == nil {
		return
	}
	for h, p := range w.parts {
		left := w.fails[h+" dropparts"] != nil || w.down[h] // its host drops it later
		switch {
		case h == w.at && w.astray && p.told && !p.serves:
		case h == w.at && w.cold && w.fails[h+" expectparts"] != nil && *p == (worldPart{}): // there was no room
		case h == w.at && !p.serves:
			w.t.Errorf("%s: the VM is on %s, where its part is %+v", m.GetState(), h, p)
		case h != w.at && !left && *p != (worldPart{}):
			w.t.Errorf("%s: the VM is on %s, and %s has %+v", m.GetState(), w.at, h, p)
		}
	}
	if w.parts[w.at].contents != w.parts.newest() {
		w.t.Errorf("%s: contents %d of %d", m.GetState(), w.parts[w.at].contents, w.parts.newest())
	}
}

// withParts is a migration of a VM with a part.
func withParts(m *clusterv1.Migration, card bool) *clusterv1.Migration {
	mm := m.GetMachine()
	mm.Parts = []string{"h1/soft0"}
	if !card {
		mm.FromGpu, mm.ToGpu, mm.FromClaim, mm.ToClaim, mm.Stored = "", "", "", "", false
	}
	return m
}

// bare makes a world whose VM has a part and no card.
func bare(t *testing.T) *world {
	w := newWorld(t).withPart()
	*w.cards[from] = card{gpu: from}
	w.onGPU, w.stored = "", ""
	clear(w.claims)
	clear(w.frozen)
	return w
}

// TestPartMovesWithItsVM in each way that a step of it can fail.
func TestPartMovesWithItsVM(t *testing.T) {
	broken := errors.New("broken")
	for _, c := range []struct {
		name  string
		fails map[string]error
		down  string
		state clusterv1.MigrationState
		says  string
	}{
		{name: "moves", state: done},
		{name: "is not parked", fails: map[string]error{"h1 park": broken}, state: back, says: "park: broken"},
		{name: "has no place", fails: map[string]error{"h2 expectparts": broken}, state: back, says: "park: broken"},
		{name: "does not move", fails: map[string]error{"h1 move": broken}, state: back, says: "move: broken"},
		{name: "is not restored", fails: map[string]error{"h2 takeparts": broken}, state: back, says: "restore: broken"},
		{name: "is not dropped", fails: map[string]error{"h1 dropparts": broken}, state: done, says: "drop: broken"},
		{name: "is not dropped there", fails: map[string]error{"h1 move": broken, "h2 dropparts": broken}, state: back},
		{name: "does not come home", fails: map[string]error{"h2 takeparts": broken, "h2 move": broken}, state: held},
		{name: "is not taken up at home", fails: map[string]error{"h1 move": broken, "h1 takeparts": broken}, state: held, says: "the undo of park failed"},
	} {
		for _, card := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, card %v", c.name, card), func(t *testing.T) {
				w := bare(t)
				if card {
					w = newWorld(t).withPart()
				}
				w.fails = c.fails
				m := w.drive(withParts(w.migration(to), card))
				if m.GetState() != c.state || !strings.Contains(m.GetMessage(), c.says) {
					t.Fatalf("%s: %s", m.GetState(), m.GetMessage())
				}
				if m.GetStoppedNs() <= 0 && m.GetSteps()[0].GetError() == "" { // its commands stood still
					t.Errorf("downtime %d ns", m.GetStoppedNs())
				}
				switch {
				case card && c.state != held:
					w.check(m)
				case c.state != held:
					w.checkParts(m)
				}
			})
		}
	}
}

// TestDriverOfAPartDiesAnywhere, before or after each of its calls, on a way that succeeds and on
// those that come back.
func TestDriverOfAPartDiesAnywhere(t *testing.T) {
	broken := errors.New("broken")
	for name, fails := range map[string]map[string]error{
		"moves": nil, "is not restored": {"h2 takeparts": broken}, "does not move": {"h1 move": broken}, "has no place": {"h2 expectparts": broken},
	} {
		t.Run(name, func(t *testing.T) {
			w := bare(t)
			w.fails = fails
			w.drive(withParts(w.migration(to), false))
			for at := range w.calls {
				for _, after := range []bool{false, true} {
					x := bare(t)
					x.fails, x.crashAt, x.after = fails, at+1, after
					m := x.drive(withParts(x.migration(to), false))
					if m == nil { // nothing was recorded, so nothing was done
						if !x.parts["h1"].serves || x.at != "h1" {
							t.Errorf("call %d: %+v", at+1, x.parts["h1"])
						}
						continue
					}
					if want := done; fails == nil && m.GetState() != want || fails != nil && m.GetState() != back {
						t.Errorf("call %d, after %v: %s: %s", at+1, after, m.GetState(), m.GetMessage())
					}
					if x.checkParts(m); t.Failed() {
						t.Fatalf("call %d, after: %v; %+v", at+1, after, m.GetSteps())
					}
				}
			}
		})
	}
}

// TestVMThatRanWithoutItsPart on its way there or back, whenever its driver died: no host goes on
// with contents that the VM has gone past, and its operator is told.
func TestVMThatRanWithoutItsPart(t *testing.T) {
	for host, fails := range map[string]map[string]error{"h2": nil, "h1": {"h2 takeparts": errors.New("broken")}} {
		first := func() *world {
			w := bare(t)
			w.late, w.fails = host, fails
			return w
		}
		w := first()
		w.drive(withParts(w.migration(to), false))
		for at := range w.calls + 1 { // the last one is no death
			x := first()
			x.crashAt = at + 1
			m := x.drive(withParts(x.migration(to), false))
			if m == nil {
				continue
			}
			if x.checkParts(m); m.GetState() != back || !x.parts["h1"].told || t.Failed() {
				t.Fatalf("late on %s, killed at call %d: %s: %s, %+v", host, at+1, m.GetState(), m.GetMessage(), x.parts["h1"])
			}
		}
	}
}

// TestVMThatIsStartedAnew has a new part where it is then, whenever its driver died, and is started
// without one if there is none.
func TestVMThatIsStartedAnew(t *testing.T) {
	broken := errors.New("broken")
	for name, fails := range map[string]map[string]error{
		"starts": nil, "does not start": {"h2 start": broken}, "is not defined": {"h2 define": broken}, "there is no room": {"h2 expectparts": broken},
	} {
		first := func() *world {
			w := newWorld(t).withPart()
			w.cold, w.fails = true, fails
			return w
		}
		w := first()
		w.drive(withParts(w.migration(to), true))
		for at := range w.calls + 1 { // the last one is no death
			x := first()
			x.crashAt = at + 1
			m := x.drive(withParts(x.migration(to), true))
			if m == nil {
				continue
			}
			want := done
			if name == "does not start" || name == "is not defined" {
				want = back
			}
			if m.GetState() != want {
				t.Errorf("%s: %s", m.GetState(), m.GetMessage())
			}
			if x.check(m); t.Failed() {
				t.Fatalf("%s, killed at call %d", name, at+1)
			}
		}
	}
}

// TestAbortOfAPartsMove before any step: the VM has its part, also where nothing had been restored.
func TestAbortOfAPartsMove(t *testing.T) {
	for _, at := range []string{StepPark, StepMove, StepRestore, StepCommit, StepDrop} {
		w := bare(t)
		r := w.runner()
		aborting := false
		r.Aborting = func(string) bool { return aborting }
		r.Before = func(step string, _ bool) error { aborting = aborting || step == at; return nil }
		m, err := r.Run(t.Context(), withParts(w.migration(to), false))
		want := back
		if at == StepCommit || at == StepDrop {
			want = done
		}
		if err != nil || m.GetState() != want {
			t.Errorf("%s: %v, %s %s", at, err, m.GetState(), m.GetMessage())
		}
		w.checkParts(m)
	}
}

// TestPartGoesOnAtHomeWithoutTheDestination: it has given nothing, so it need not ask.
func TestPartGoesOnAtHomeWithoutTheDestination(t *testing.T) {
	w := bare(t)
	w.fails = map[string]error{"h2 expectparts": ErrUnreachable, "h2 dropparts": ErrUnreachable}
	m := w.drive(withParts(w.migration(to), false))
	if m.GetState() != back {
		t.Fatalf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.checkParts(m)
}

func TestStepsOfAPart(t *testing.T) {
	w := newWorld(t)
	m := withParts(w.migration(to), true).GetMachine()
	want := []string{
		StepReserve, StepPrepare, StepFreeze, StepRelease, StepDetach, StepPark, StepMove, StepRestore, StepAttach, StepAwait, StepThaw, StepCommit, StepClean, StepDrop,
	}
	if got := StepNames(m); !slices.Equal(got, want) {
		t.Errorf("steps %v", got)
	}
	m.Cold = true
	want = []string{StepReserve, StepPrepare, StepStop, StepRenew, StepDefine, StepStart, StepCommit, StepClean, StepDrop}
	if got := StepNames(m); !slices.Equal(got, want) {
		t.Errorf("steps of a VM that is started anew: %v", got)
	}
	for _, cold := range []bool{false, true} {
		m.Cold, m.ToHost = cold, "h1"
		if got := StepNames(m); slices.Contains(got, StepPark) || slices.Contains(got, StepRenew) || slices.Contains(got, StepDrop) {
			t.Errorf("steps of a VM that stays, started anew %v: %v", cold, got)
		}
	}
}

// TestPlanSaysWhatBecomesOfParts, as an operator sees only the plan.
func TestPlanSaysWhatBecomesOfParts(t *testing.T) {
	part := PartFacts{"h1/soft0", 256 << 20, 32}
	m := VMFacts{Host: "h1", Parts: []PartFacts{part}}
	m.Name = "web"
	cost, all := NewCostModel().price(Request{Verb: Migrate}, m, "h2", "", 0)
	var names []string
	var still time.Duration
	for _, s := range all {
		if s.Name == StepPark || s.Name == StepMove || s.Name == StepRestore {
			still += s.Predicted
		}
		if names = append(names, s.Name); s.Predicted == 0 || s.What == "" {
			t.Errorf("step %+v", s)
		}
		if s.Name == StepPark && !strings.Contains(s.What, "h1/soft0") {
			t.Errorf("it does not name the part: %s", s.What)
		}
	}
	if cost.Stop != still {
		t.Errorf("its commands are to stand still for %v, not %v", cost.Stop, still)
	}
	if want := []string{StepPark, StepMove, StepRestore, StepCommit, StepDrop}; !slices.Equal(names, want) || cost.Total == 0 {
		t.Errorf("steps %v, want %v", names, want)
	}
}

func TestPlaceForParts(t *testing.T) {
	big, small := PartFacts{"h1/a", 256 << 20, 32}, PartFacts{"h1/b", 64 << 20, 8}
	for _, c := range []struct {
		parts []PartFacts
		room  []PartRoom
		none  int
	}{
		{nil, nil, 0},
		{[]PartFacts{big}, nil, 1},
		{[]PartFacts{big, big}, []PartRoom{{"h2/a", 256 << 20, 32, 1}}, 1},
		{[]PartFacts{big, big}, []PartRoom{{"h2/a", 256 << 20, 32, 1}, {"h2/b", 256 << 20, 32, 1}}, 0},
		{[]PartFacts{big}, []PartRoom{{"h2/a", 512 << 20, 32, 4}, {"h2/b", 256 << 20, 16, 4}}, 1},
		{[]PartFacts{small, big}, []PartRoom{{"h2/a", 256 << 20, 32, 4}}, 1},
	} {
		m := VMFacts{Parts: c.parts}
		if got := againstParts(Request{Verb: Migrate}, m, HostFacts{Name: "h2", PartRoom: c.room}); len(got) != c.none {
			t.Errorf("%v on %v: %v", c.parts, c.room, got)
		}
		if got := againstParts(Request{Verb: Migrate, Cold: true}, m, HostFacts{}); got != nil {
			t.Errorf("started anew: %v", got)
		}
	}
}
