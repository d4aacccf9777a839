package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// A session that is lost on the way does not keep the others from arriving, or from going
// back, and the record says which it was and why: at whatever step it is lost, and whether it
// was frozen or computed.
func TestSessionThatIsLostOnTheWayIsNamed(t *testing.T) {
	for _, c := range []struct {
		name, far string
		at        string // step before which it is lost
		fails     string // "host call" that fails; empty: it arrives
		state     clusterv1.MigrationState
	}{
		{name: "frozen, in the VM's memory", at: StepMove, state: done},
		{name: "frozen, before it is thawed", at: StepThaw, state: done},
		{name: "frozen, and taken back", at: StepMove, fails: "h2 attach", state: back},
		{name: "thawed, and taken back", at: StepThaw, fails: "h2 thaw", state: back},
		{name: "before it is swapped", far: "h3/f", at: StepSwap, state: done},
		{name: "on the remote GPU, whose host dies", far: "h3/f", at: StepMove, state: done},
		{name: "on the remote GPU, before it comes home", far: "h3/f", at: StepHome, state: done},
		{name: "on the remote GPU, and taken back", far: "h3/f", at: StepMove, fails: "h2 home", state: back},
		{name: "on the remote GPU, which is not had", far: "h3/f", at: StepSwap, fails: "h1 swap", state: done},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.far = c.far
			if c.fails != "" {
				w.fails[c.fails] = errors.New("broken")
			}
			w.lost["s-of-old"] = "lost before the migration"
			r := w.runner()
			r.Before = func(step string, undo bool) error {
				if step == c.at && !undo && w.lost["s1"] == "" && slices.Contains(w.kept.GetMachine().GetSessions(), "s1") {
					w.lose("s1", "its executor has ended")
				}
				if step == c.at && c.at == StepSwap && w.lost["s1"] == "" {
					// it runs when the sessions are listed, and is lost right after
					w.dooms = "s1"
				}
				return nil
			}
			m, err := r.Run(t.Context(), w.migration(to))
			if err != nil || m.GetState() != c.state {
				t.Fatalf("%v, %s: %s", err, m.GetState(), m.GetMessage())
			}
			w.check(m)
			lost := m.GetMachine().GetLost()
			if len(lost) != 1 || lost[0].GetId() != "s1" || lost[0].GetCommand() != "app-s1" || lost[0].GetReason() != "its executor has ended" {
				t.Errorf("lost: %v", lost)
			}
			if !strings.Contains(m.GetMessage(), "1 session was lost on the way: s1 (app-s1): its executor has ended") {
				t.Errorf("it says %q", m.GetMessage())
			}
		})
	}
}

// If nothing is lost, nothing is said.
func TestNothingIsSaidOfLostSessionsIfThereAreNone(t *testing.T) {
	w := newWorld(t)
	w.lost["s-of-old"] = "lost before the migration"
	if m := w.drive(w.migration(to)); m.GetState() != done || len(m.GetMachine().GetLost()) != 0 || m.GetMessage() != "" {
		t.Errorf("%s %q: %v", m.GetState(), m.GetMessage(), m.GetMachine().GetLost())
	}
}

// A host that does not answer is asked again. One that can't say what was lost, as an older
// one, does not have the migration undone, and the record says that it is not known.
func TestLostSessionsThatCannotBeAskedFor(t *testing.T) {
	w := newWorld(t)
	w.fails["h2 lost"] = ErrUnreachable
	if m := w.drive(w.migration(to)); m.GetState() != back || !strings.Contains(m.GetMessage(), "thaw: unreachable") {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	} else {
		w.check(m)
	}
	w = newWorld(t)
	w.fails["h2 lost"] = errors.New("host h2 is too old")
	m := w.drive(w.migration(to))
	if m.GetState() != done || m.GetMessage() != "it is not known whether sessions were lost on the way: host h2 is too old" {
		t.Errorf("%s: %s", m.GetState(), m.GetMessage())
	}
	w.check(m)
}

// A session whose state can't be resumed anywhere holds the migration, which names it.
func TestSessionThatCannotBeResumedIsNamed(t *testing.T) {
	w := newWorld(t)
	broken := errors.New("session s1 (app-s1): the state is damaged")
	w.fails["h2 thaw"], w.fails["h1 thaw"] = broken, broken
	m := w.drive(w.migration(to))
	for _, want := range []string{"the undo of freeze failed: session s1 (app-s1): the state is damaged", "gpuctl migrations resume m-1"} {
		if m.GetState() != held || !strings.Contains(m.GetMessage(), want) {
			t.Errorf("%s: %s", m.GetState(), m.GetMessage())
		}
	}
}

// The record does not grow with what a VM writes.
func TestManyLostSessionsAreNamedInShort(t *testing.T) {
	w := newWorld(t)
	r := &run{Runner: w.runner(), m: w.migration(to)}
	var lost []*gpuctlv1.LostSession
	for i := range MostSessions {
		id := fmt.Sprintf("s-%d", i)
		r.m.Machine.Sessions = append(r.m.Machine.Sessions, id)
		lost = append(lost, &gpuctlv1.LostSession{Id: id, Command: strings.Repeat("c", 1<<10), Reason: "a\nb" + strings.Repeat("r", 1<<20)})
	}
	r.noteLost(lost)
	r.noteLost(lost)
	got := r.m.GetMachine().GetLost()
	if len(got) != MostSessions || got[0].GetReason() == "" || got[MostSessions-1].GetReason() != "" {
		t.Fatalf("%d, %v", len(got), got[0])
	}
	for _, l := range got {
		if len(l.GetReason())+len(l.GetCommand()) > 2*lostText || strings.Contains(l.GetReason(), "\n") {
			t.Fatalf("%d bytes: %q", len(l.GetReason()), l.GetReason())
		}
	}
	if words := LostWords(r.m.GetMachine()); !strings.Contains(words, "2000 sessions were lost") || !strings.Contains(words, "and 1995 more") || len(words) > 4<<10 {
		t.Errorf("%d bytes: %s", len(words), words)
	}
}

// lose loses a session: what its application had on a GPU exists no longer.
func (w *world) lose(id, why string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.losing(id, why)
}

func (w *world) losing(id, why string) {
	delete(w.frozen, id)
	delete(w.runs, id)
	delete(w.waits, id)
	w.lost[id] = why
}

// Lost has sessions that were lost before the migration, too.
func (s *site) Lost(_ context.Context, _ vm.VM, sessions []string) (out []*gpuctlv1.LostSession, _ error) {
	return out, s.do("lost", func() error {
		if err := requested(sessions...); err != nil {
			return err
		}
		if err := s.here(); err != nil {
			return err
		}
		for id, why := range s.lost {
			out = append(out, &gpuctlv1.LostSession{Id: id, Command: "app-" + id, Reason: why})
		}
		return nil
	})
}
