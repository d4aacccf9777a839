package migration

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/migrate"
)

// records is a node that knows migrations.
type records struct {
	Node
	host   string
	store  *state.Store // what is applied here
	now    *state.Store // what is committed; nil: nobody answers
	behind bool         // it was just started, and has an old state
}

func (r records) HostName() string { return r.host }
func (r records) CaughtUp() bool   { return !r.behind }

func (r records) View() *state.View {
	if r.store == nil {
		return nil // in no cluster
	}
	return r.store.View()
}

func (r records) Read(context.Context) (*state.View, error) {
	if r.now == nil {
		return nil, errors.New("no leader")
	}
	return r.now.View(), nil
}

// A host that has not caught up takes no migration for ended.
func TestPending(t *testing.T) {
	empty, full := state.New(), state.New()
	put := putter(t, full)
	put(&clusterv1.Migration{Id: "m-runs", Verb: "migrate", Object: "web", Driver: "h1"})
	over := put(&clusterv1.Migration{Id: "m-over", Verb: "migrate", Object: "db", Driver: "h1"})
	over.State = clusterv1.MigrationState_MIGRATION_STATE_DONE
	put(over)
	for _, c := range []struct {
		name      string
		here, now *state.Store
		id        string
		want      bool
	}{
		{"runs", full, full, "m-runs", true},
		{"over", full, full, "m-over", false},
		{"nobody knows it", full, full, "m-other", false},
		{"not applied here yet, runs", empty, full, "m-runs", true},
		{"not applied here yet, over", empty, full, "m-over", false},
		{"not applied here yet, and nobody answers", empty, nil, "m-over", true},
		{"over, and nobody answers", full, nil, "m-over", false},
	} {
		if got := New(Config{Node: records{host: "h1", store: c.here, now: c.now}}).Pending(t.Context(), c.id); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// A migration whose end has not arrived here yet does not keep the VM from its next one.
func TestMoving(t *testing.T) {
	runs, over := state.New(), state.New()
	for _, s := range []*state.Store{runs, over} {
		put := putter(t, s)
		m := put(&clusterv1.Migration{Id: "m-1", Verb: "migrate", Object: "web", Driver: "h1", Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h1", ToHost: "h2"}})
		if s == over {
			m.State = clusterv1.MigrationState_MIGRATION_STATE_DONE
			put(m)
		}
	}
	for _, c := range []struct {
		name       string
		here, now  *state.Store
		uuid, want string
	}{
		{"runs", runs, runs, "u1", "m-1"},
		{"over", over, over, "u1", ""},
		{"over, not applied here yet", runs, over, "u1", ""},
		{"nobody answers", runs, nil, "u1", "m-1"},
		{"of another VM", runs, nil, "u2", ""},
	} {
		if got := New(Config{Node: records{host: "h2", store: c.here, now: c.now}}).moving(t.Context(), c.here.View(), c.uuid); got != c.want {
			t.Errorf("%s: %q; want %q", c.name, got, c.want)
		}
	}
}

// sending is a host whose VM could be migrated.
type sending struct {
	records
	gpuctlv1connect.SiteServiceClient
}

func (s sending) Site(string) (gpuctlv1connect.SiteServiceClient, error) { return s, nil }

func (s sending) MachineFacts(_ context.Context, req *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteMachineFacts], error) {
	return connect.NewResponse(&gpuctlv1.SiteMachineFacts{Uuid: req.Msg.GetUuid(), Name: "web"}), nil
}

// A start right after another one is refused, though the record of that is not applied here
// yet. A plan is made by what is applied here, also without a leader.
func TestStartTwice(t *testing.T) {
	here, now := state.New(), state.New()
	putter(t, now)(&clusterv1.Migration{Id: "m-1", Verb: "migrate", Object: "web", Driver: "h1", Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h1", ToHost: "h2"}})
	for _, c := range []struct {
		name string
		now  *state.Store
		says string
	}{
		{"not applied here yet", now, "migration m-1 of VM web runs already"},
		{"nobody answers", nil, "vm web: whether it is migrated already is not known: no leader"},
	} {
		m := New(Config{
			Node: sending{records: records{host: "h1", store: here, now: c.now}},
			VMs: func(context.Context) ([]*gpuctlv1.Machine, []string) {
				return []*gpuctlv1.Machine{{Uuid: "u1", Name: "web", Host: "h1"}}, nil
			},
		})
		mux := http.NewServeMux()
		m.Handle(mux)
		server := httptest.NewServer(mux)
		client := gpuctlv1connect.NewMigrationServiceClient(server.Client(), server.URL)
		plan := &gpuctlv1.MachinePlanRequest{Machine: "web", Verb: "migrate"}
		if _, err := client.Plan(t.Context(), connect.NewRequest(plan)); err != nil {
			t.Errorf("%s: plan: %v", c.name, err)
		}
		stream, err := client.Start(t.Context(), connect.NewRequest(&gpuctlv1.MachineStartRequest{Plan: plan, NoWait: true}))
		if err != nil {
			t.Fatal(err)
		}
		stream.Receive()
		if got := fmt.Sprint(stream.Msg().GetRefused().GetReasons(), stream.Err()); !strings.Contains(got, c.says) {
			t.Errorf("%s: %s", c.name, got)
		}
		if err := stream.Close(); err != nil {
			t.Error(err)
		}
		server.Close()
	}
}

// The CUDA programs of a VM are not touched for a rehearsal while a migration may run whose record
// is not applied here yet. A host without a cluster has none.
func TestRehearsalWhileAMigrationRuns(t *testing.T) {
	here, now := state.New(), state.New()
	putter(t, now)(&clusterv1.Migration{Id: "m-1", Verb: "migrate", Object: "web", Driver: "h1", Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "h1", ToHost: "h2"}})
	for _, c := range []struct {
		name      string
		here, now *state.Store
		says      string // empty: it is rehearsed
	}{
		{"none runs", here, here, ""},
		{"not applied here yet", here, now, "migration m-1 of vm web runs"},
		{"nobody answers", here, nil, "vm web: whether it is migrated already is not known: no leader"},
		{"no cluster", nil, nil, ""},
	} {
		rehearsed := false
		m := New(Config{
			Node: sending{records: records{host: "h1", store: c.here, now: c.now}},
			VMs: func(context.Context) ([]*gpuctlv1.Machine, []string) {
				return []*gpuctlv1.Machine{{Uuid: "u1", Name: "web", Host: "h1"}}, nil
			},
			Rehearse: func(context.Context, string, string, time.Duration, func(*gpuctlv1.OperationUpdate) error) error {
				rehearsed = true
				return nil
			},
		})
		mux := http.NewServeMux()
		m.Handle(mux)
		server := httptest.NewServer(mux)
		client := gpuctlv1connect.NewMigrationServiceClient(server.Client(), server.URL)
		stream, err := client.Rehearse(t.Context(), connect.NewRequest(&gpuctlv1.MachineRehearseRequest{Machine: "web"}))
		if err != nil {
			t.Fatal(err)
		}
		stream.Receive()
		if err := stream.Err(); rehearsed != (c.says == "") || err == nil != rehearsed || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: rehearsed %v, %v", c.name, rehearsed, err)
		}
		if err := stream.Close(); err != nil {
			t.Error(err)
		}
		server.Close()
	}
}

// putter puts records of migrations into a store.
func putter(t *testing.T, s *state.Store) func(*clusterv1.Migration) *clusterv1.Migration {
	index := uint64(0)
	return func(m *clusterv1.Migration) *clusterv1.Migration {
		t.Helper()
		index++
		res := s.Apply(index, &clusterv1.Command{Version: state.ProtocolLive, Op: &clusterv1.Command_PutMigration{PutMigration: &clusterv1.PutMigration{Migration: m}}})
		if res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
			t.Fatal(res)
		}
		return res.GetMigration()
	}
}

// States of a VM are for the two hosts of its migration, while that runs.
func TestParty(t *testing.T) {
	s := state.New()
	put := putter(t, s)
	move := func(id, from, to string) *clusterv1.Migration {
		return &clusterv1.Migration{
			Id: id, Verb: "migrate", Object: "web", Driver: "h1",
			Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: from, ToHost: to},
		}
	}
	over := put(move("m-over", "h1", "h2"))
	over.State = clusterv1.MigrationState_MIGRATION_STATE_DONE
	put(over)
	put(move("m-runs", "h1", "h2"))
	put(move("m-same", "h1", "h1"))

	for _, c := range []struct {
		self, other, uuid, migration string
		ok, later                    bool // later: it may be so in a moment
	}{
		{"h1", "h2", "u1", "m-runs", true, false},
		{"h2", "h1", "u1", "m-runs", true, false},
		{"h1", "h3", "u1", "m-runs", false, true},
		{"h3", "h1", "u1", "m-runs", false, true},
		{"h1", "h1", "u1", "m-runs", false, true},
		{"h1", "", "u1", "m-runs", false, true},
		{"h1", "h2", "u2", "m-runs", false, false},
		{"h1", "h2", "u1", "m-over", false, false},
		{"h1", "h2", "u1", "m-none", false, true},
		{"h1", "h2", "u1", "", false, true},
		{"h1", "h2", "u1", "m-same", false, true},
	} {
		m := New(Config{Node: records{host: c.self, store: s}})
		err := m.Party(&gpuctlv1.SiteMachine{Uuid: c.uuid, Name: "web", Migration: c.migration}, c.other)
		if (err == nil) != c.ok || errors.Is(err, migrate.ErrUnreachable) != c.later {
			t.Errorf("%+v: %v", c, err)
		}
	}
	m := New(Config{Node: records{host: "h1", store: s}})
	for id, want := range map[string][2]bool{"m-over": {true, true}, "m-runs": {false, true}, "m-none": {false, false}} {
		if ended, known := m.Ended(id); [2]bool{ended, known} != want {
			t.Errorf("%s: ended %v, known %v", id, ended, known)
		}
	}
	// Until it has caught up, a migration that this host does not know is none that is forgotten.
	m = New(Config{Node: records{host: "h1", store: state.New(), behind: true}})
	if ended, known := m.Ended("m-runs"); ended || !known {
		t.Errorf("a host that was just started: ended %v, known %v", ended, known)
	}
}

// What a VM's last migration has left is looked for where it is not at home.
func TestAway(t *testing.T) {
	s := state.New()
	record := putter(t, s)
	put := func(uuid, from, to string, started int64, end clusterv1.MigrationState) {
		t.Helper()
		r := record(&clusterv1.Migration{
			Id: fmt.Sprint("m-", started), Verb: "migrate", Object: uuid, Driver: "h1", StartedUnixMs: started,
			Machine: &clusterv1.MachineMove{Uuid: uuid, Name: uuid, FromHost: from, ToHost: to},
		})
		if end != clusterv1.MigrationState_MIGRATION_STATE_RUNNING {
			r.State = end
			record(r)
		}
	}
	const (
		done, back, running = clusterv1.MigrationState_MIGRATION_STATE_DONE, clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, clusterv1.MigrationState_MIGRATION_STATE_RUNNING
		held                = clusterv1.MigrationState_MIGRATION_STATE_HELD
	)
	put("gone", "h1", "h2", 1, done)
	put("returned", "h1", "h2", 2, done)
	put("returned", "h2", "h1", 3, done)
	put("undone", "h2", "h1", 4, back)
	put("stayed", "h1", "h2", 5, back)
	put("goes", "h1", "h2", 6, done)
	put("goes", "h2", "h1", 7, running)
	put("held", "h2", "h1", 8, held)
	put("same", "h1", "h1", 9, done)
	put("others", "h2", "h3", 10, done)
	put("clocks", "h1", "h2", 101, done) // of a host whose clock is ahead
	put("clocks", "h2", "h1", 11, done)
	put("clocks2", "h3", "h1", 102, done)
	put("clocks2", "h1", "h3", 12, done)
	m := New(Config{Node: records{host: "h1", store: state.New(), now: s}})
	away, _ := m.Left(t.Context())
	if d := cmp.Diff(map[string]string{"gone": "h2", "undone": "h2", "clocks2": "h3"}, away); d != "" {
		t.Error(d)
	}
}

// A definition that a VM's last migration has left is looked for where that is said, and not at
// the VM's home.
func TestRemnants(t *testing.T) {
	s := state.New()
	record := putter(t, s)
	const done, back, failed, running = clusterv1.MigrationState_MIGRATION_STATE_DONE, clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK,
		clusterv1.MigrationState_MIGRATION_STATE_FAILED, clusterv1.MigrationState_MIGRATION_STATE_RUNNING
	for i, c := range []struct {
		uuid, from, to string
		left           []string
		end            clusterv1.MigrationState
	}{
		{"undone", "h2", "h1", []string{"h1"}, back},
		{"elsewhere", "h2", "h3", []string{"h4", "h1"}, done},
		{"gone", "h1", "h2", []string{"h1"}, done},
		{"removed", "h1", "h2", nil, done},
		{"others", "h2", "h3", []string{"h3"}, back},
		{"home", "h2", "h1", []string{"h1"}, done},
		{"failed", "h2", "h1", []string{"h1"}, failed},
		{"runs", "h2", "h1", []string{"h1"}, running},
		{"again", "h2", "h1", []string{"h1"}, back},
		{"again", "h2", "h3", nil, done},
	} {
		r := record(&clusterv1.Migration{
			Id: fmt.Sprint("m-", i), Verb: "migrate", Object: c.uuid, Driver: "h2",
			Machine: &clusterv1.MachineMove{Uuid: c.uuid, Name: c.uuid, FromHost: c.from, ToHost: c.to, DefinedOn: c.left},
		})
		if c.end != running {
			r.State = c.end
			record(r)
		}
	}
	got := map[string]string{}
	_, defined := New(Config{Node: records{host: "h1", store: state.New(), now: s}}).Left(t.Context())
	for _, r := range defined {
		got[r.UUID] = r.Home
		if r.Token == 0 {
			t.Errorf("%v has no token", r)
		}
	}
	if d := cmp.Diff(map[string]string{"undone": "h2", "elsewhere": "h3", "gone": "h2"}, got); d != "" {
		t.Error(d)
	}
}
