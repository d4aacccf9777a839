package migration

import (
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// A host that has parts of a VM knows from the record whose they are in the end.
func TestOver(t *testing.T) {
	store := state.New()
	put := putter(t, store)
	for id, end := range map[string]clusterv1.MigrationState{
		"m-done": clusterv1.MigrationState_MIGRATION_STATE_DONE, "m-back": clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK,
		"m-lost": clusterv1.MigrationState_MIGRATION_STATE_FAILED, "m-runs": 0, "m-held": clusterv1.MigrationState_MIGRATION_STATE_HELD,
	} {
		r := put(&clusterv1.Migration{Id: id, Verb: "migrate", Object: id, Driver: "h1", Machine: &clusterv1.MachineMove{Uuid: "u-" + id, FromHost: "h1", ToHost: "h2"}})
		if end != 0 {
			r.State = end
			put(r)
		}
	}
	for _, c := range []struct {
		host, id   string
		over, here bool
	}{
		{"h1", "m-done", true, false},
		{"h2", "m-done", true, true},
		{"h1", "m-back", true, true},
		{"h2", "m-back", true, false},
		{"h1", "m-lost", true, false},
		{"h1", "m-runs", false, false},
		{"h1", "m-held", false, false},
		{"h1", "m-unknown", true, true},
	} {
		over, here := New(Config{Node: records{host: c.host, store: store, now: store}}).Over(t.Context(), c.id)
		if id := New(Config{Node: records{host: c.host, store: store, now: store}}).Moving(t.Context(), "u-"+c.id); (id != "") == c.over {
			t.Errorf("%s on %s: over %v, and its VM moves by %q", c.id, c.host, over, id)
		}
		if over != c.over || here != c.here {
			t.Errorf("%s on %s: over %v, here %v", c.id, c.host, over, here)
		}
	}
	if over, _ := New(Config{Node: records{host: "h1", store: state.New()}}).Over(t.Context(), "m-done"); over {
		t.Error("over, and nobody answers")
	}
}
