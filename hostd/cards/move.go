package cards

import (
	"context"
	"errors"
	"fmt"
	"slices"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// The driver of a migration calls these functions. Each brings the card to a state, and
// may be repeated. A card that is assigned to a migration stays assigned until the
// migration has ended, even if its VM ends on this host.

// ErrTaken means that the card belongs to somebody else.
var ErrTaken = errors.New("taken")

// quiet is a Report that ignores all updates.
func quiet(*gpuctlv1.DeviceUpdate) {}

// movable finds a card for a migration and locks it until end is called.
func (k *Keeper) movable(ctx context.Context, gpu, what string) (card *pci.Card, name string, end func(), err error) {
	card, name, err = k.find(ctx, gpu)
	if err != nil {
		return nil, "", nil, err
	}
	end, err = k.await(ctx, card.Address, what)
	return card, name, end, err
}

// Lost reports whether a card that is assigned to a VM is not on the bus any more, and
// the VM has none of its functions. The card is given back when it is on the bus again.
func (k *Keeper) Lost(ctx context.Context, uuid, gpu string) bool {
	if _, _, err := k.find(ctx, gpu); !errors.Is(err, ErrNotFound) {
		return false
	}
	k.mu.Lock()
	var functions []pci.Address
	for _, a := range k.assignments {
		if a.UUID == uuid && a.GPU == gpu {
			functions = a.Functions
		}
	}
	k.mu.Unlock()
	owners, err := k.Hypervisor.Owners(ctx)
	return err == nil && len(functions) > 0 && contradicts(owners, functions, uuid, false) == ""
}

// lockAssigned finds a card that is assigned to a VM, and locks it until end is called. A
// quarantined card has no VM. If the VM does not have the card, the error wraps ErrTaken.
func (k *Keeper) lockAssigned(ctx context.Context, m vm.VM, gpu string) (c *change, name string, end func(), err error) {
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return nil, "", nil, err
	}
	a := k.assignmentOf(card.Address)
	if a == nil || a.UUID != m.UUID {
		end()
		if a != nil && a.Phase == quarantined {
			return nil, "", nil, fmt.Errorf("gpu %s: %w: it is quarantined (%s), and not held for vm %s any more: gpuctl reset %s tries to bring it back, and then gpuctl attach gives it to the VM", name, ErrTaken, a.Message, m.Name, name)
		}
		return nil, "", nil, fmt.Errorf("gpu %s: %w: it is not held for vm %s", name, ErrTaken, m.Name)
	}
	return &change{k: k, card: card, report: quiet, assignment: *a}, name, end, nil
}

// parted reports whether a step that takes a card from a VM has nothing to do any more: the card is
// held for nobody, mostly as no reset has brought it back, and the VM does not have it.
func (k *Keeper) parted(ctx context.Context, m vm.VM, gpu string) bool {
	card, _, err := k.find(ctx, gpu)
	if err != nil {
		return false
	}
	if a := k.assignmentOf(card.Address); a != nil && a.Phase != quarantined {
		return false
	}
	owners, err := k.Hypervisor.Owners(ctx)
	return err == nil && !slices.ContainsFunc(card.Functions, func(f *pci.Device) bool { return owners[f.Address].UUID == m.UUID })
}

// afterwards resets a card that a VM has left. One that no reset brings back is quarantined, which
// is told of it and no reason to keep the VM: it has left the card, and may get another.
func (c *change) afterwards(ctx context.Context) error {
	if err := c.reset(ctx); !errors.Is(err, errQuarantined) {
		return err
	}
	return nil
}

// Reserve assigns a card to a claim, for a VM that a migration brings to this host. The
// card's driver is not changed yet. Errors wrap ErrNotFound or ErrTaken.
func (k *Keeper) Reserve(ctx context.Context, m vm.VM, gpu, claim, migration string) error {
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return err
	}
	defer end()
	if a := k.assignmentOf(card.Address); a != nil {
		if a.UUID == m.UUID && a.Claim == claim {
			return nil
		}
		return fmt.Errorf("gpu %s: %w: it belongs to VM %s (%s)", name, ErrTaken, a.vm(), a.Phase)
	}
	reasons, err := k.against(ctx, m, card, true)
	if err != nil {
		return err
	}
	if reasons = append(reasons, k.againstHotplug(card)...); len(reasons) > 0 {
		return fmt.Errorf("%w: %w", ErrTaken, refusal("gpu "+name, reasons))
	}
	if _, err := k.obtainNamed(ctx, claim, m, []string{name}, "", 0); err != nil {
		return fmt.Errorf("%w: %w", ErrTaken, err)
	}
	defer k.dropClaim(claim)
	return k.put(cardAssignment{
		Card: card.Address, Functions: addresses(card), GPU: name, Phase: reserved, UUID: m.UUID, Name: m.Name, Claim: claim, Migration: migration,
	})
}

// Prepare binds a reserved card to the hypervisor's driver and resets it. Errors wrap
// ErrNotFound or ErrTaken.
func (k *Keeper) Prepare(ctx context.Context, m vm.VM, gpu, claim, migration string) error {
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return err
	}
	defer end()
	a := k.assignmentOf(card.Address)
	switch {
	case a == nil || a.UUID != m.UUID || a.Claim != claim:
		return fmt.Errorf("gpu %s: %w: it is not reserved for vm %s", name, ErrTaken, m.Name)
	case a.Phase == ready && k.taken(card) || a.Phase == attached:
		return nil
	}
	c := &change{k: k, card: card, report: quiet, assignment: *a}
	c.assignment.Migration = migration
	if err := c.ready(ctx); err != nil {
		return fmt.Errorf("gpu %s: %w", name, err)
	}
	return nil
}

// taken reports whether a card is still bound to the hypervisor's driver. After a reboot
// of the host it is not.
func (k *Keeper) taken(card *pci.Card) bool {
	for _, f := range card.Functions {
		if f.Driver != k.Hypervisor.Driver() {
			return false
		}
	}
	return true
}

// AttachPrepared attaches a prepared card to its VM, which runs on this host. If stored,
// it also adds the card to the VM's stored definition. at is where the VM had its card
// before the migration; nil: what this host knows of that.
func (k *Keeper) AttachPrepared(ctx context.Context, m vm.VM, gpu string, stored bool, at *pci.Address) error {
	c, name, end, err := k.lockAssigned(ctx, m, gpu)
	if err != nil {
		return err
	}
	defer end()
	owners, err := k.Hypervisor.Owners(ctx)
	if err != nil {
		return err
	}
	c.assignment.Persistent = stored || c.assignment.Persistent
	if at != nil {
		c.assignment.Guest = at
	}
	if contradicts(owners, c.assignment.Functions, m.UUID, true) == "" {
		err = c.enter(attached)
	} else {
		if c.assignment.Phase == ready && !k.taken(c.card) {
			err = c.ready(ctx)
		}
		if err == nil {
			err = c.attach(ctx)
		}
	}
	if err == nil && c.assignment.Persistent {
		err = k.VMs.Store(ctx, m.UUID, c.assignment.Functions)
	}
	if err != nil {
		return fmt.Errorf("gpu %s: %w", name, err)
	}
	c.compareGuest(ctx)
	return nil
}

// DetachReleased detaches a card from its VM, which has released it, and resets it. The
// card stays assigned to that VM. It returns where the VM had the main function; nil: that
// is unknown.
func (k *Keeper) DetachReleased(ctx context.Context, m vm.VM, gpu, migration string) (at *pci.Address, err error) {
	if k.Lost(ctx, m.UUID, gpu) {
		return k.guestOf(m.UUID, gpu), nil
	}
	c, name, end, err := k.lockAssigned(ctx, m, gpu)
	if errors.Is(err, ErrTaken) && k.parted(ctx, m, gpu) {
		return nil, nil //nolint:nilnil // where it was is not known any more
	}
	if err != nil {
		return nil, err
	}
	defer end()
	c.assignment.Migration = migration
	c.noteGuest(ctx)
	if err := c.detach(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("gpu %s: %w", name, err), k.stillHas(ctx, c))
	}
	// The stored definition goes to the destination with the VM; the card does not.
	if err := k.VMs.Unstore(ctx, m.UUID, c.assignment.Functions); err != nil {
		return nil, fmt.Errorf("gpu %s: %w", name, err)
	}
	if err := c.enter(ready); err != nil {
		return nil, err
	}
	return c.assignment.Guest, c.afterwards(ctx)
}

// Keep makes a card stay assigned when its VM stops. A migration calls it before it stops
// the VM.
func (k *Keeper) Keep(ctx context.Context, m vm.VM, gpu, migration string) error {
	c, _, end, err := k.lockAssigned(ctx, m, gpu)
	if errors.Is(err, ErrTaken) && k.parted(ctx, m, gpu) {
		return nil
	}
	if err != nil {
		return err
	}
	defer end()
	if c.assignment.Migration == migration {
		return nil
	}
	c.assignment.Migration = migration
	return k.put(c.assignment)
}

// ResetStopped resets a card after its VM has stopped, and removes it from the VM's
// stored definition. Keep was called before. The card stays assigned.
func (k *Keeper) ResetStopped(ctx context.Context, m vm.VM, gpu string) error {
	c, name, end, err := k.lockAssigned(ctx, m, gpu)
	if errors.Is(err, ErrTaken) && k.parted(ctx, m, gpu) {
		return nil
	}
	if err != nil {
		return err
	}
	defer end()
	err = c.verify(ctx, false)
	if err == nil {
		err = k.VMs.Unstore(ctx, m.UUID, c.assignment.Functions)
	}
	if err == nil {
		err = c.enter(ready)
	}
	if err == nil {
		err = c.afterwards(ctx)
	}
	if err != nil {
		return fmt.Errorf("gpu %s: %w", name, err)
	}
	return nil
}

// GiveBack makes a card free that is assigned to a VM. If the VM still has the card, the
// error wraps ErrBusy.
func (k *Keeper) GiveBack(ctx context.Context, m vm.VM, gpu string) error {
	if k.Lost(ctx, m.UUID, gpu) {
		return nil
	}
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return err
	}
	defer end()
	a := k.assignmentOf(card.Address)
	if a == nil || a.UUID != m.UUID {
		return nil // it is free, or assigned to somebody else by now
	}
	owners, err := k.Hypervisor.Owners(ctx)
	if err != nil {
		return err
	}
	if said := contradicts(owners, a.Functions, a.UUID, false); said != "" {
		return fmt.Errorf("gpu %s: %w: %s", name, ErrBusy, said)
	}
	c := &change{k: k, card: card, report: quiet, assignment: *a}
	switch a.Phase {
	case quarantined:
		return nil
	case reserved: // nothing has been changed on the card
		return k.drop(card.Address)
	default:
	}
	return c.giveBack(ctx)
}

// migrating reports whether the assignment belongs to a migration that has not ended, or
// may not have ended.
func (k *Keeper) migrating(ctx context.Context, a *cardAssignment) bool {
	if a.Migration == "" {
		return false
	}
	if k.Pending == nil || k.Now().Sub(a.at) < k.Grace {
		return true // the migration's entry may not have been replicated to this host yet
	}
	return k.Pending(ctx, a.Migration)
}

// HotplugBlocker returns why the card with this address cannot be attached to a running
// VM; empty: it can.
func (k *Keeper) HotplugBlocker(card string) (string, error) {
	cards, err := k.scan()
	if err != nil {
		return "", err
	}
	for _, c := range cards {
		if c.Address.String() == card {
			return k.Hypervisor.HotplugBlocker(c), nil
		}
	}
	return "", fmt.Errorf("card %s: %w", card, ErrNotFound)
}

// Functions returns the functions of a card, the main one first.
func (k *Keeper) Functions(ctx context.Context, gpu string) ([]pci.Address, error) {
	card, _, err := k.find(ctx, gpu)
	if err != nil {
		return nil, err
	}
	return addresses(card), nil
}

// Identity returns the PCI identity of a card's main function, as a VM sees it.
func (k *Keeper) Identity(ctx context.Context, gpu string) (*gpuctlv1.PCIIdentity, error) {
	card, _, err := k.find(ctx, gpu)
	if err != nil {
		return nil, err
	}
	d := card.Main()
	return &gpuctlv1.PCIIdentity{
		VendorId: uint32(d.VendorID), DeviceId: uint32(d.DeviceID), SubVendorId: uint32(d.SubVendorID), SubDeviceId: uint32(d.SubDeviceID), Class: d.Class,
	}, nil
}

// keeps reports whether a card may stay in this phase during a migration. The driver of
// the migration repeats the step that was interrupted.
func keeps(p phase) bool {
	return slices.Contains([]phase{reserved, taking, ready, attaching, attached, detaching}, p)
}
