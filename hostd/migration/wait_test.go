package migration

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/migrate"
)

// newWaiting is a node with a migration that waits for its operator.
func newWaiting(t *testing.T) *journal {
	t.Helper()
	s := state.New()
	j := &journal{records: records{host: "h1", store: s, now: s}, recorded: func() {}}
	m := &clusterv1.Migration{
		Id: "m-1", Verb: "migrate", Object: "web", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Done:    []string{migrate.StepBorrow, migrate.StepSwap, migrate.StepRelease, migrate.StepDetach},
		Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h1", ToHost: "h1", FromGpu: "h1/a", ToGpu: "h1/a", FarGpu: "h3/r", FarClaim: "vm-1", Live: true, Wait: true},
	}
	for _, st := range []clusterv1.MigrationState{clusterv1.MigrationState_MIGRATION_STATE_RUNNING, clusterv1.MigrationState_MIGRATION_STATE_HELD} {
		m.State = st
		kept, err := j.PutMigration(t.Context(), m, false)
		if err != nil {
			t.Fatal(err)
		}
		m = proto.CloneOf(kept)
	}
	return j
}

// A migration that waits says so, is pending, goes on when it is resumed, and is put back
// when it is aborted.
func TestAMigrationThatWaits(t *testing.T) {
	for _, abort := range []bool{false, true} {
		j := newWaiting(t)
		m := j.manager(t)
		r := j.View().Migration("m-1")
		if endOf(r) != "waiting" || !m.Pending(t.Context(), "m-1") {
			t.Fatalf("it is %s", endOf(r))
		}
		s := &Service{m: m}
		var err error
		if abort {
			_, err = s.Abort(t.Context(), connect.NewRequest(&gpuctlv1.MachineAbortRequest{Id: "m-1"}))
		} else {
			_, err = s.Resume(t.Context(), connect.NewRequest(&gpuctlv1.MachineResumeRequest{Id: "m-1"}))
		}
		r = j.View().Migration("m-1")
		if err != nil || r.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING || r.GetMachine().GetAborting() != abort || r.GetMachine().GetWait() != abort {
			t.Errorf("abort %v: %v; %v", abort, err, r)
		}
	}
	j := newWaiting(t)
	for _, r := range []*gpuctlv1.MachinePlanRequest{{Machine: "web", Verb: "migrate", Wait: true}, {Machine: "web", Verb: "migrate", Live: "perhaps"}} {
		if _, err := (&Service{m: j.manager(t)}).Plan(t.Context(), connect.NewRequest(r)); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%v: %v", r, err)
		}
	}
}

// A driver that follows one whose host was killed right after an operator had aborted the
// migration knows of that, as does the present one whose own records come after it.
func TestAbortIsKnownToTheNextDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(t, clusterv1.MigrationState_MIGRATION_STATE_RUNNING)
		m := j.manager(t)
		entered, killed := make(chan struct{}), errors.New("killed")
		m.Before = func(string, bool) error {
			close(entered)
			<-t.Context().Done()
			return killed
		}
		m.begin(j.View().Migration("m-1"))
		<-entered
		if _, err := (&Service{m: m}).Abort(t.Context(), connect.NewRequest(&gpuctlv1.MachineAbortRequest{Id: "m-1"})); err != nil {
			t.Fatal(err)
		}
		next := j.manager(t)
		next.Before = func(step string, undo bool) error {
			if !undo {
				t.Errorf("it goes on with %s", step)
			}
			return nil
		}
		r, err := j.PutMigration(t.Context(), j.View().Migration("m-1"), true)
		if err != nil {
			t.Fatal(err)
		}
		next.begin(r)
		next.work.Wait()
		if r := j.View().Migration("m-1"); !r.GetMachine().GetAborting() || !strings.Contains(r.GetMessage(), "aborted by an operator") {
			t.Errorf("%s: %s", r.GetState(), r.GetMessage())
		}
	})
}

// A driver that writes at the same time keeps the abort in its records, and does not commit.
func TestAbortBeforeTheCommitIsKept(t *testing.T) {
	j := newJournal(t, clusterv1.MigrationState_MIGRATION_STATE_RUNNING)
	first := j.View().Migration("m-1")
	w := newRecorder(j, first)
	driver := proto.CloneOf(first)
	if err := w.abort(t.Context()); err != nil {
		t.Fatal(err)
	}
	driver.Step = migrate.StepCommit
	kept, err := w.Put(t.Context(), driver)
	if err != nil || !kept.GetMachine().GetAborting() {
		t.Errorf("%v, %v", kept, err)
	}
	if err := w.abort(t.Context()); !errors.Is(err, errCommitted) {
		t.Errorf("while it is committed: %v", err)
	}
}
