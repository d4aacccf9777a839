package migration

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// journal is a node that records migrations, and whose hosts were removed from the cluster.
type journal struct {
	records
	index, taken atomic.Uint64
	recorded     func() // called when a record is there, before its writer knows
}

// newJournal has the record of migration m-1, which this host drives.
func newJournal(t *testing.T, now clusterv1.MigrationState) *journal {
	t.Helper()
	s := state.New()
	j := &journal{records: records{host: "h1", store: s, now: s}, recorded: func() {}}
	m, err := j.PutMigration(t.Context(), &clusterv1.Migration{
		Id: "m-1", Verb: "migrate", Object: "web", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h1", ToHost: "h2"},
	}, false)
	if err == nil {
		m.State = now
		_, err = j.PutMigration(t.Context(), m, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func (j *journal) PutMigration(_ context.Context, m *clusterv1.Migration, takeOver bool) (*clusterv1.Migration, error) {
	if takeOver {
		j.taken.Add(1)
		m = &clusterv1.Migration{Id: m.GetId(), Verb: m.GetVerb(), Object: m.GetObject(), Driver: j.host, Machine: m.GetMachine()}
	}
	res := j.store.Apply(j.index.Add(1), &clusterv1.Command{Version: 1, Op: &clusterv1.Command_PutMigration{
		PutMigration: &clusterv1.PutMigration{Migration: m, TakeOver: takeOver},
	}})
	if res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		return nil, errors.New(res.GetMessage())
	}
	recorded := j.recorded
	j.recorded = func() {} // not of what it records itself
	recorded()
	j.recorded = recorded
	return proto.CloneOf(res.GetMigration()), nil
}

func (j *journal) Site(host string) (gpuctlv1connect.SiteServiceClient, error) {
	return nil, reason.Coded(reason.Errorf(reason.NotFound, "there is no host %q", host).On("host", host))
}

func (j *journal) manager(t *testing.T) *Manager {
	m := New(Config{Node: j, Log: slog.New(slog.DiscardHandler)})
	m.ctx = t.Context()
	t.Cleanup(m.work.Wait)
	return m
}

// What looks for migrations that nobody drives sees the record of one that is
// just being begun, and lets it be.
func TestOneDriver(t *testing.T) {
	j := newJournal(t, clusterv1.MigrationState_MIGRATION_STATE_HELD)
	m := j.manager(t)
	j.recorded = func() { m.adopt(t.Context()) }
	s := &Service{m: m}
	if _, err := s.Resume(t.Context(), connect.NewRequest(&gpuctlv1.MachineResumeRequest{Id: "m-1"})); err != nil {
		t.Fatal(err)
	}
	m.adopt(t.Context())
	if n := j.taken.Load(); n != 1 {
		t.Errorf("it was taken over %d times", n)
	}
}

// A host that was just started may not know yet that a migration's driver is up.
func TestNothingIsTakenOverBecauseOfAnOldState(t *testing.T) {
	j := newJournal(t, clusterv1.MigrationState_MIGRATION_STATE_RUNNING)
	j.host, j.behind = "h2", true
	res := j.store.Apply(j.index.Add(1), &clusterv1.Command{Version: 1, Op: &clusterv1.Command_ReportHost{ // nothing of h1, which drives
		ReportHost: &clusterv1.ReportHost{Host: &clusterv1.Host{Name: "h2", Id: "id-h2", Address: "h2:7650"}},
	}})
	if res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		t.Fatal(res)
	}
	m := j.manager(t)
	m.adopt(t.Context())
	if n := j.taken.Load(); n != 0 {
		t.Errorf("it was taken over %d times", n)
	}
	j.behind = false
	m.adopt(t.Context())
	if n := j.taken.Load(); n != 1 {
		t.Errorf("h1 is not there: it was taken over %d times", n)
	}
}

// A driver that another one of this host has followed does not make it forgotten.
func TestFormerDriver(t *testing.T) {
	j := newJournal(t, clusterv1.MigrationState_MIGRATION_STATE_RUNNING)
	m := j.manager(t)
	drives, broken := make(chan chan error), errors.New("broken")
	m.Before = func(string, bool) error {
		how := make(chan error)
		select {
		case drives <- how:
			return <-how
		case <-t.Context().Done():
			return broken
		}
	}
	r := j.View().Migration("m-1")
	first := m.begin(r)
	over := <-drives
	next, err := j.PutMigration(t.Context(), r, true)
	if err != nil {
		t.Fatal(err)
	}
	second := m.begin(next)
	defer close(<-drives)
	over <- broken
	if err := m.watch(t.Context(), first, func(*gpuctlv1.MachineProgress) error { return nil }); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runs["m-1"] != second {
		t.Error("the second one is forgotten")
	}
}

// A migration with a host that was removed from the cluster ends, as with one that does not
// answer, and is taken over once.
func TestRemovedHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(t, clusterv1.MigrationState_MIGRATION_STATE_RUNNING)
		m := j.manager(t)
		for range 300 {
			m.adopt(t.Context())
			time.Sleep(2 * time.Second)
		}
		m.work.Wait()
		r := j.View().Migration("m-1")
		if r.GetState() != clusterv1.MigrationState_MIGRATION_STATE_HELD || !strings.Contains(r.GetMessage(), `there is no host "h2"`) {
			t.Errorf("%s: %s", r.GetState(), r.GetMessage())
		}
		if n := j.taken.Load(); n != 1 {
			t.Errorf("it was taken over %d times", n)
		}
	})
}

// A migration is held, and this host has not heard of that yet.
func TestTakeOverHeld(t *testing.T) {
	j := newJournal(t, clusterv1.MigrationState_MIGRATION_STATE_HELD)
	m := j.manager(t)
	if err := m.takeOver(t.Context(), j.View().Migration("m-1")); err != nil {
		t.Fatal(err)
	}
	if len(m.runs) != 0 {
		t.Error("a held one is driven")
	}
}
