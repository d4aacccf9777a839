package cards

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// PrepareStart prepares the cards among a VM's devices for the VM's start. An error says
// why the VM must not start. Devices that are not cards of this host are ignored. If the
// VM does not start within Timing.Grace, the preparation is undone.
func (k *Keeper) PrepareStart(ctx context.Context, d vm.VM, devices []pci.Address) error {
	if len(devices) == 0 {
		return nil
	}
	cards, err := k.scan()
	if err != nil {
		return err
	}
	var wanted []*pci.Card
	for _, card := range cards {
		if slices.ContainsFunc(addresses(card), func(a pci.Address) bool { return slices.Contains(devices, a) }) {
			wanted = append(wanted, card)
		}
	}
	if err := k.prepareSlices(ctx, d, cards, devices); err != nil {
		return err
	}
	for i, card := range wanted {
		if err := k.prepare(ctx, d, card, devices); err != nil {
			// Give back the other cards at once, not after Grace.
			for _, before := range wanted[:i] {
				if h := k.assignmentOf(before.Address); h != nil && h.UUID == d.UUID {
					k.background(*h)
				}
			}
			k.forgetStart(d)
			return err
		}
	}
	return nil
}

// prepare prepares one card for a VM that starts.
func (k *Keeper) prepare(ctx context.Context, d vm.VM, card *pci.Card, devices []pci.Address) error {
	end, err := k.await(ctx, card.Address, "the start of vm "+d.Name)
	if err != nil {
		return err
	}
	defer end()
	if a := k.assignmentOf(card.Address); a != nil && a.UUID == d.UUID && (a.Phase == ready || a.Phase == attached) {
		return k.prepareRestart(ctx, d, a)
	}
	_, name, err := k.find(ctx, card.Address.String())
	if err != nil {
		return err
	}
	m := vm.VM{UUID: d.UUID, Name: d.Name}
	reasons, err := k.against(ctx, m, card, true)
	if err != nil {
		return err
	}
	if reasons = append(reasons, k.againstPart(card, devices)...); len(reasons) > 0 {
		return refusal(fmt.Sprintf("vm %s cannot have %s", d.Name, name), reasons)
	}
	claim, _, err := k.obtain(ctx, m, []string{name}, "", 0)
	if err != nil {
		return err
	}
	defer k.dropClaim(claim)
	c := &change{k: k, card: card, report: func(*gpuctlv1.DeviceUpdate) {}, assignment: cardAssignment{
		Card: card.Address, Functions: addresses(card), GPU: name, UUID: d.UUID, Name: d.Name, Claim: claim, Starting: true,
	}}
	if err = c.ready(ctx); err != nil && k.assignmentOf(card.Address) != nil {
		return fmt.Errorf("vm %s cannot have %s: %w", d.Name, name, c.rollBack(ctx, err))
	}
	return err
}

// againstPart returns the reasons why a VM cannot start with only some of a card's functions.
func (k *Keeper) againstPart(card *pci.Card, devices []pci.Address) (out []*gpuctlv1.Reason) {
	if k.Hypervisor.HotplugBlocker(card) == "" {
		return nil
	}
	for _, f := range addresses(card) {
		if !slices.Contains(devices, f) {
			out = append(out, why("missing_function", "the VM has not got function %s of that card, which can only be reset as a whole: add it to its definition (gpuctl attach VM %s --stored adds all)", f, card.Address))
		}
	}
	return out
}

// prepareRestart prepares a card for the VM that had it last: the VM restarts before the card was
// given back.
func (k *Keeper) prepareRestart(ctx context.Context, d vm.VM, a *cardAssignment) error {
	c := &change{k: k, assignment: *a, report: func(*gpuctlv1.DeviceUpdate) {}}
	if err := c.verify(ctx, false); err != nil {
		return fmt.Errorf("vm %s cannot have %s: %w", d.Name, a.GPU, err)
	}
	c.assignment.Starting, c.assignment.Name = true, d.Name
	err := c.enter(ready)
	if err == nil {
		err = c.reset(ctx)
	}
	if err != nil {
		return fmt.Errorf("vm %s cannot have %s: %w", d.Name, a.GPU, err)
	}
	return nil
}

// await locks a card as lockCard does, but waits while the card is locked by another
// change.
func (k *Keeper) await(ctx context.Context, card pci.Address, what string) (end func(), err error) {
	for {
		end, err = k.lockCard(card, what)
		if err == nil || !errors.Is(err, ErrBusy) {
			return end, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stopped takes back what a VM had that has ended or did not start. It does not wait,
// because libvirt waits for it. Cards of a migration are left to Reconcile, which can ask
// the cluster about the migration.
func (k *Keeper) Stopped(uuid string) {
	k.over(uuid, func(*cardAssignment) bool { return false })
}

// Ended does the same for word that may come late, when the VM is being started again. What
// is prepared for a start stays then: if the VM does not start, Stopped or time tells.
func (k *Keeper) Ended(uuid string) {
	k.over(uuid, func(a *cardAssignment) bool { return a.Phase == ready && a.Starting })
}

// over takes back what a VM had, but for what is to stay.
func (k *Keeper) over(uuid string, stays func(*cardAssignment) bool) {
	k.mu.Lock()
	var had []cardAssignment
	moved := false
	for a := range k.each() {
		switch {
		case a.UUID != uuid || a.Phase == quarantined || stays(a):
		case a.Migration != "" && keeps(a.Phase):
			moved = true
		default:
			had = append(had, *a)
		}
	}
	k.mu.Unlock()
	if moved {
		k.Kick()
	}
	for _, a := range had {
		k.background(a)
	}
}

// background gives a card back as soon as no VM has it. It does nothing if the assignment
// has changed until then.
func (k *Keeper) background(was cardAssignment) {
	k.mu.Lock()
	base := k.ctx
	k.mu.Unlock()
	k.work.Go(func() {
		if err := k.afterEnd(base, was); err != nil && base.Err() == nil {
			k.Log.Warn("card not given back yet", "gpu", was.GPU, "err", err)
			k.Kick()
		}
	})
}

func (k *Keeper) afterEnd(ctx context.Context, was cardAssignment) error {
	ctx, cancel := context.WithTimeout(ctx, 3*k.Step)
	defer cancel()
	end, err := k.await(ctx, was.Card, "its return")
	if err != nil {
		return err
	}
	defer end()
	if a := k.current(&was); a == nil || a.rev != was.rev {
		return nil
	}
	c := &change{k: k, assignment: was, report: func(*gpuctlv1.DeviceUpdate) {}}
	if err := c.verify(ctx, false); err != nil {
		return err // the VM runs again, or the hypervisor does not answer: Reconcile decides later
	}
	return c.giveBack(ctx)
}

// List returns the VMs of the host, with the cards that they have.
func (k *Keeper) List(ctx context.Context) ([]*gpuctlv1.Machine, error) {
	all, err := k.VMs.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]*gpuctlv1.Machine, 0, len(all))
	for _, m := range all {
		d := &gpuctlv1.Machine{
			Uuid: m.UUID, Name: m.Name, Host: k.Cluster.HostName(), State: m.State, Type: m.Type, Memory: m.Memory, Cpus: m.CPUs, Persistent: m.Persistent,
		}
		k.mu.Lock()
		for h := range k.each() {
			if h.UUID == m.UUID {
				d.Gpus = append(d.Gpus, h.label())
			}
		}
		k.mu.Unlock()
		slices.Sort(d.Gpus)
		if k.Guests != nil && m.Active() {
			d.Agent = k.Guests.About(m.UUID)
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b *gpuctlv1.Machine) int { return strings.Compare(a.GetName(), b.GetName()) })
	return out, nil
}
