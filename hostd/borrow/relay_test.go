package borrow

import (
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/migrate"
)

// relays waits until the VM's carriers may reach this address through the host, and no other;
// empty: none.
func (w *world) relays(k *Keeper, what, want string) {
	w.t.Helper()
	testkit.Until(w.t, what, func() error {
		k.Kick()
		w.mu.Lock()
		may := w.relayed
		w.mu.Unlock()
		got := ""
		for _, a := range []string{"h1:7651", "h2:7651", "h3:7651", "127.0.0.1:22"} {
			if may != nil && may(a) {
				got += a
			}
		}
		return testkit.Want(got == want, got)
	})
}

// A VM's carriers may connect through its host to the GPU that it has, lastingly or while it
// moves, as long as it is there, and its gpuguest can do it.
func TestCarriersMayReachWhatIsLentToTheirVM(t *testing.T) {
	w := newWorld(t)
	w.protocol = endpoint.RelayProtocol
	k := w.run()
	w.relays(k, "nothing is lent", "")
	w.locked(func() { w.bind(web.UUID, web.Name, "h2/low", gib) })
	w.relays(k, "it has a GPU", "h2:7651")
	w.locked(func() { w.where = migrate.Moving })
	for range 3 {
		k.Kick()
	}
	w.relays(k, "it moves", "h2:7651")
	w.locked(func() { w.where = migrate.Absent })
	w.relays(k, "it has left", "")
	w.locked(func() { w.where = migrate.Running })
	w.relays(k, "it is back", "h2:7651")

	// A migration lends it another one.
	move := &clusterv1.Migration{
		Id: "m-1", Verb: "migrate", Driver: "h1", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{Uuid: web.UUID, Name: web.Name, FromHost: "h1", ToHost: "h2", FarGpu: "h3/big", FarClaim: "vm-1"},
	}
	put := func() {
		w.locked(func() {
			res := w.apply(&clusterv1.Command{Op: &clusterv1.Command_PutMigration{PutMigration: &clusterv1.PutMigration{Migration: move}}})
			move.Token = res.GetMigration().GetToken()
		})
	}
	put()
	w.relays(k, "it is about to move", "h2:7651h3:7651")
	move.State = clusterv1.MigrationState_MIGRATION_STATE_DONE
	put()
	w.relays(k, "it has moved", "h2:7651")
}

// A gpuguest that knows nothing of it is not asked.
func TestEarlierGuestsRelayNothing(t *testing.T) {
	w := newWorld(t)
	w.protocol = endpoint.RelayProtocol - 1
	k := w.run()
	w.locked(func() { w.bind(web.UUID, web.Name, "h2/low", gib) })
	w.tells(k, "h2/low 1073741824")
	w.locked(func() {
		if w.relayed != nil {
			t.Error("it was asked")
		}
	})
}
