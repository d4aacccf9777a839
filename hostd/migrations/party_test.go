package migrations

import (
	"errors"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/migrate"
)

// records is a node that knows migrations.
type records struct {
	Node
	host  string
	store *state.Store
}

func (r records) HostName() string  { return r.host }
func (r records) View() *state.View { return r.store.View() }

// States of a VM are for the two hosts of its migration, while that runs.
func TestParty(t *testing.T) {
	s := state.New()
	index := uint64(0)
	put := func(m *clusterv1.Migration) *clusterv1.Migration {
		t.Helper()
		index++
		res := s.Apply(index, &clusterv1.Command{Version: 1, Op: &clusterv1.Command_PutMigration{PutMigration: &clusterv1.PutMigration{Migration: m}}})
		if res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
			t.Fatal(res)
		}
		return res.GetMigration()
	}
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
}
