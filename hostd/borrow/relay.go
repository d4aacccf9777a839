package borrow

import (
	"context"
	"slices"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/migrate"
)

// borrowers returns the VMs that have GPUs of hosts, lastingly or while they move, each with
// the addresses at which carriers reach these.
func borrowers(v *state.View) map[string]*borrower {
	out := map[string]*borrower{}
	if v == nil { // this host is in no cluster
		return out
	}
	add := func(m vm.VM, gpu string) {
		g := v.GPU(gpu)
		if m.UUID == "" || g == nil {
			return
		}
		if out[m.UUID] == nil {
			out[m.UUID] = &borrower{vm: m}
		}
		out[m.UUID].addresses = append(out[m.UUID].addresses, reachedAt(v, g)...)
	}
	for c := range v.Claims() {
		if l, ok := lentOf(v, c); ok {
			add(l.vm, l.GPU)
		}
	}
	for r := range v.Migrations() {
		switch r.GetState() {
		case clusterv1.MigrationState_MIGRATION_STATE_RUNNING, clusterv1.MigrationState_MIGRATION_STATE_HELD:
			add(vm.VM{UUID: r.GetMachine().GetUuid(), Name: r.GetMachine().GetName()}, r.GetMachine().GetFarGpu())
		default:
		}
	}
	return out
}

type borrower struct {
	vm        vm.VM
	addresses []string
}

// lookRelays begins to make connections for the carriers of those borrowers that run here, and
// ends it for those that do not.
func (k *Keeper) lookRelays(ctx context.Context, v *state.View) {
	want := borrowers(v)
	for uuid := range want {
		if !k.here(ctx, uuid) {
			delete(want, uuid)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for uuid, stop := range k.relayed {
		if want[uuid] == nil {
			stop()
			delete(k.relayed, uuid)
		}
	}
	for uuid, b := range want {
		if k.relayed[uuid] != nil {
			continue
		}
		serving, stop := context.WithCancel(ctx) //nolint:gosec // above, when the VM has left; ctx ends it otherwise
		k.relayed[uuid] = stop
		k.work.Go(func() { k.relay(serving, b.vm) })
	}
}

// relay makes connections for a VM's carriers, again and again, until ctx ends.
func (k *Keeper) relay(ctx context.Context, m vm.VM) {
	retry, said := leastRetry, ""
	for ctx.Err() == nil {
		// While the VM moves, nobody opens its channel here again.
		p, err := k.Site.Where(ctx, m.UUID)
		if err == nil && p == migrate.Running {
			var protocol uint32
			if protocol, err = k.Site.AgentProtocol(ctx, m.UUID); err == nil && protocol >= endpoint.RelayProtocol {
				began := time.Now()
				err = k.Site.Relay(ctx, m, func(address string) bool {
					b := borrowers(k.Node.View())[m.UUID]
					return b != nil && slices.Contains(b.addresses, address)
				})
				if time.Since(began) > mostRetry {
					retry = leastRetry
				}
			}
		}
		if err != nil && ctx.Err() == nil {
			if text := err.Error(); text != said { // not at each attempt
				said = text
				k.Log.Info("carriers of a VM cannot connect through this host for now", "machine", m.Name, "err", err)
			}
		}
		if wait.For(ctx, retry) != nil {
			return
		}
		retry = min(2*retry, mostRetry)
	}
}
