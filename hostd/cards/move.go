package cards

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// A migration's driver asks for these. Each brings about a state and may be
// repeated. A card that a migration holds is neither given back nor lost by
// the end of its VM on this host until the migration has ended.

// ErrTaken says that somebody else has the card.
var ErrTaken = errors.New("taken")

// quiet reports to nobody.
func quiet(*gpuctlv1.DeviceUpdate) {}

// movable finds a card for a migration and makes it the caller's alone.
func (k *Keeper) movable(ctx context.Context, gpu, what string) (card *pci.Card, name string, end func(), err error) {
	card, name, err = k.find(ctx, gpu)
	if err != nil {
		return nil, "", nil, err
	}
	end, err = k.await(ctx, card.Address, what)
	return card, name, end, err
}

// Lost says that a card is not on the bus any more that is held for a VM, and
// that the VM has nothing of it. It is given back when it is there again.
func (k *Keeper) Lost(ctx context.Context, uuid, gpu string) bool {
	if _, _, err := k.find(ctx, gpu); !errors.Is(err, ErrNotFound) {
		return false
	}
	k.mu.Lock()
	var functions []pci.Address
	for _, h := range k.holds {
		if h.UUID == uuid && h.GPU == gpu {
			functions = h.Functions
		}
	}
	k.mu.Unlock()
	owners, err := k.Hypervisor.Owners(ctx)
	return err == nil && len(functions) > 0 && contradicts(owners, functions, uuid, false) == ""
}

// holding finds a card that is held for a VM, as a quarantined one is not, and
// makes it the caller's alone.
func (k *Keeper) holding(ctx context.Context, m Machine, gpu string) (c *change, name string, end func(), err error) {
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return nil, "", nil, err
	}
	h := k.held(card.Address)
	if h == nil || h.UUID != m.UUID {
		end()
		return nil, "", nil, fmt.Errorf("gpu %s: %w: it is not held for vm %s", name, ErrTaken, m.Name)
	}
	return &change{k: k, card: card, report: quiet, hold: *h}, name, end, nil
}

// Reserve binds a claim to a card for a VM that a migration brings. Its driver
// is not changed yet.
func (k *Keeper) Reserve(ctx context.Context, m Machine, gpu, claim, migration string) error {
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return err
	}
	defer end()
	if h := k.held(card.Address); h != nil {
		if h.UUID == m.UUID && h.Claim == claim {
			return nil
		}
		return fmt.Errorf("gpu %s: %w: it belongs to VM %s (%s)", name, ErrTaken, h.machine(), h.Phase)
	}
	reasons, err := k.against(ctx, m, card, true)
	if err != nil {
		return err
	}
	if reasons = append(reasons, k.oneByOne(card)...); len(reasons) > 0 {
		return fmt.Errorf("%w: %w", ErrTaken, refusal("gpu "+name, reasons))
	}
	if _, err := k.obtainNamed(ctx, claim, m, []string{name}, "", 0); err != nil {
		return fmt.Errorf("%w: %w", ErrTaken, err)
	}
	defer k.forgo(claim)
	return k.put(hold{
		Card: card.Address, Functions: addresses(card), GPU: name, Phase: reserved, UUID: m.UUID, Name: m.Name, Claim: claim, Migration: migration,
	})
}

// Ready takes and resets a reserved card.
func (k *Keeper) Ready(ctx context.Context, m Machine, gpu, claim, migration string) error {
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return err
	}
	defer end()
	h := k.held(card.Address)
	switch {
	case h == nil || h.UUID != m.UUID || h.Claim != claim:
		return fmt.Errorf("gpu %s: %w: it is not reserved for vm %s", name, ErrTaken, m.Name)
	case h.Phase == ready && k.taken(card) || h.Phase == attached:
		return nil
	}
	c := &change{k: k, card: card, report: quiet, hold: *h}
	c.hold.Migration = migration
	if err := c.ready(ctx); err != nil {
		return fmt.Errorf("gpu %s: %w", name, err)
	}
	return nil
}

// taken says that a card is still what was made of it for a VM, which a reboot
// of the host undoes.
func (k *Keeper) taken(card *pci.Card) bool {
	for _, f := range card.Functions {
		if f.Driver != k.Hypervisor.Driver() {
			return false
		}
	}
	return true
}

// Plug gives a ready card to its VM, which runs here, and if stored to its
// stored definition.
func (k *Keeper) Plug(ctx context.Context, m Machine, gpu string, stored bool) error {
	c, name, end, err := k.holding(ctx, m, gpu)
	if err != nil {
		return err
	}
	defer end()
	owners, err := k.Hypervisor.Owners(ctx)
	if err != nil {
		return err
	}
	c.hold.Persistent = stored || c.hold.Persistent
	if contradicts(owners, c.hold.Functions, m.UUID, true) == "" {
		err = c.enter(attached)
	} else {
		if c.hold.Phase == ready && !k.taken(c.card) {
			err = c.ready(ctx)
		}
		if err == nil {
			err = c.attach(ctx)
		}
	}
	if err == nil && c.hold.Persistent {
		err = k.Machines.Store(ctx, m.UUID, c.hold.Functions)
	}
	if err != nil {
		return fmt.Errorf("gpu %s: %w", name, err)
	}
	return nil
}

// Unplug takes a card out of its VM, which has let go of it, resets it, and
// keeps it for that VM.
func (k *Keeper) Unplug(ctx context.Context, m Machine, gpu, migration string) error {
	if k.Lost(ctx, m.UUID, gpu) {
		return nil
	}
	c, name, end, err := k.holding(ctx, m, gpu)
	if err != nil {
		return err
	}
	defer end()
	c.hold.Migration = migration
	if err := c.detach(ctx); err != nil {
		return errors.Join(fmt.Errorf("gpu %s: %w", name, err), k.stillHas(ctx, c))
	}
	// The definition travels with the VM, the card does not.
	if err := k.Machines.Unstore(ctx, m.UUID, c.hold.Functions); err != nil {
		return fmt.Errorf("gpu %s: %w", name, err)
	}
	if err := c.enter(ready); err != nil {
		return err
	}
	return c.reset(ctx)
}

// Keep has a card stay its VM's when the VM is stopped, which a migration is
// about to do.
func (k *Keeper) Keep(ctx context.Context, m Machine, gpu, migration string) error {
	c, _, end, err := k.holding(ctx, m, gpu)
	if err != nil {
		return err
	}
	defer end()
	if c.hold.Migration == migration {
		return nil
	}
	c.hold.Migration = migration
	return k.put(c.hold)
}

// Ended resets a kept card whose VM has stopped, and goes on keeping it. The
// VM's stored definition does not have it any more.
func (k *Keeper) Ended(ctx context.Context, m Machine, gpu string) error {
	c, name, end, err := k.holding(ctx, m, gpu)
	if err != nil {
		return err
	}
	defer end()
	err = c.verify(ctx, false)
	if err == nil {
		err = k.Machines.Unstore(ctx, m.UUID, c.hold.Functions)
	}
	if err == nil {
		err = c.enter(ready)
	}
	if err == nil {
		err = c.reset(ctx)
	}
	if err != nil {
		return fmt.Errorf("gpu %s: %w", name, err)
	}
	return nil
}

// Drop makes a card free that is held for a VM and that it does not have.
func (k *Keeper) Drop(ctx context.Context, m Machine, gpu string) error {
	if k.Lost(ctx, m.UUID, gpu) {
		return nil
	}
	card, name, end, err := k.movable(ctx, gpu, "a migration of vm "+m.Name)
	if err != nil {
		return err
	}
	defer end()
	h := k.held(card.Address)
	if h == nil || h.UUID != m.UUID {
		return nil // nobody's, or somebody else's by now
	}
	owners, err := k.Hypervisor.Owners(ctx)
	if err != nil {
		return err
	}
	if said := contradicts(owners, h.Functions, h.UUID, false); said != "" {
		return fmt.Errorf("gpu %s: %w: %s", name, ErrBusy, said)
	}
	c := &change{k: k, card: card, report: quiet, hold: *h}
	switch h.Phase {
	case quarantined:
		return nil
	case reserved: // nothing has been done to it
		return k.drop(card.Address)
	default:
	}
	return c.giveBack(ctx)
}

// migrating says that a hold belongs to a migration that has not ended, as far
// as is known.
func (k *Keeper) migrating(ctx context.Context, h *hold) bool {
	if h.Migration == "" {
		return false
	}
	if k.Pending == nil || k.Now().Sub(time.UnixMilli(h.Since)) < k.Grace {
		return true // the record of it may not have come here yet
	}
	return k.Pending(ctx, h.Migration)
}

// Pluggable says why a card, named by its address, cannot be plugged into a running VM; empty: it can.
func (k *Keeper) Pluggable(card string) (string, error) {
	cards, err := k.scan()
	if err != nil {
		return "", err
	}
	for _, c := range cards {
		if c.Address.String() == card {
			return k.Hypervisor.OneByOne(c), nil
		}
	}
	return "", fmt.Errorf("card %s: %w", card, ErrNotFound)
}

// Functions are those of a card.
func (k *Keeper) Functions(ctx context.Context, gpu string) ([]pci.Address, error) {
	card, _, err := k.find(ctx, gpu)
	if err != nil {
		return nil, err
	}
	return addresses(card), nil
}

// Identity of a card's main function, as a VM sees it.
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

// keeps reports whether a phase is one in which a migration may leave a card: its
// driver repeats the step that did not end.
func keeps(p phase) bool {
	return slices.Contains([]phase{reserved, taking, ready, attaching, attached, detaching}, p)
}
