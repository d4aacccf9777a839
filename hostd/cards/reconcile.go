package cards

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// gone is how long the hypervisor must list no owner for a card that a VM had, before the
// card is taken back. A VM that restarts has no card for a moment.
const gone = 5 * time.Second

// Reconcile compares the record with the hypervisor's list, and finishes or undoes what
// was interrupted. If the hypervisor does not answer, nothing is changed.
func (k *Keeper) Reconcile(ctx context.Context) error {
	owners, err := k.Hypervisor.Owners(ctx)
	if err != nil {
		return fmt.Errorf("who has which device is not known: %w", err)
	}
	cards, err := k.scan()
	if err != nil {
		return err
	}
	k.mu.Lock()
	var all []cardAssignment
	for h := range k.each() {
		all = append(all, *h)
	}
	k.mu.Unlock()
	if slices.ContainsFunc(all, func(h cardAssignment) bool { return h.mediated() }) {
		if k.Mediated == nil {
			return errors.New("the record has mediated devices, and this hypervisor has none")
		}
		if _, err := k.Mediated.Owners(ctx); err != nil {
			return fmt.Errorf("who has which mediated device is not known: %w", err)
		}
	}
	slices.SortFunc(all, func(a, b cardAssignment) int { return a.Card.Compare(b.Card) })
	var errs []error
	look := func(all []cardAssignment) {
		for i := range all {
			if err := k.reconcileCard(ctx, &all[i]); err != nil && !errors.Is(err, ErrBusy) {
				errs = append(errs, err)
			}
		}
	}
	had := func(a cardAssignment) bool {
		return slices.ContainsFunc(a.Functions, func(f pci.Address) bool { return owners[f].UUID != "" })
	}
	look(slices.DeleteFunc(slices.Clone(all), func(a cardAssignment) bool { return !had(a) }))
	for _, card := range cards {
		if err := k.adoptSlices(ctx, card, owners); err != nil && !errors.Is(err, ErrBusy) {
			errs = append(errs, err)
		}
		if err := k.adopt(ctx, card, owners); err != nil && !errors.Is(err, ErrBusy) {
			errs = append(errs, err)
		}
	}
	// It is known who has what. What follows may reset cards, one after the other.
	k.Settled.Store(true)
	k.Cluster.Kick()
	look(slices.DeleteFunc(all, had))
	k.Cluster.Kick()
	return errors.Join(errs...)
}

// reconcileCard makes one assignment and the real state agree.
func (k *Keeper) reconcileCard(ctx context.Context, a *cardAssignment) error {
	end, err := k.lockCard(a.Card, "a look after it")
	if err != nil {
		return err
	}
	defer end()
	if now := k.current(a); now == nil || now.rev != a.rev {
		return nil // it was changed after it was copied
	}
	// Resets of other cards may have taken minutes since Reconcile asked.
	owners, err := k.owners(ctx, a)
	if err != nil {
		return fmt.Errorf("who has %s is not known: %w", a.label(), err)
	}
	c := &change{k: k, assignment: *a, report: func(*gpuctlv1.DeviceUpdate) {}}
	for _, f := range a.Functions {
		if d, owned := owners[f]; owned {
			if d.UUID == a.UUID && a.Phase != attached {
				defer k.complete(ctx, c, owners)
			}
			return k.owned(ctx, c, d)
		}
	}
	switch {
	case a.Phase == quarantined && a.Away:
		return c.comeBack(ctx)
	case a.Phase == quarantined:
		return nil
	case a.Phase == ready && a.Starting:
		if starts, err := k.starting(ctx, a); starts || err != nil {
			return err
		}
	}
	switch {
	case keeps(a.Phase) && k.migrating(ctx, a):
		return nil
	case a.Phase == reserved:
		return k.drop(a.Card)
	case a.Phase == attached && !k.absent(a):
		return nil
	case a.Phase == taking || a.Phase == cutting:
		k.Log.Info("undoing what was begun before", "gpu", a.GPU, "phase", a.Phase)
		return c.release(ctx)
	}
	k.Log.Info("taking a card back", "gpu", a.GPU, "machine", a.vm(), "phase", a.Phase)
	return c.giveBack(ctx)
}

// comeBack resets a card that is on the bus again. One that does not bear it stays in quarantine.
func (c *change) comeBack(ctx context.Context) error {
	card, err := c.rescan()
	if err != nil {
		return nil //nolint:nilerr // it is away
	}
	c.k.Log.Info("a card is on the bus again", "gpu", c.assignment.GPU, "card", c.assignment.Card)
	c.assignment.Functions, c.assignment.Away = addresses(card), false
	return c.resetQuarantined(ctx)
}

// owned records that a VM has the card.
func (k *Keeper) owned(ctx context.Context, c *change, d vm.VM) error {
	a := &c.assignment
	before := *a
	a.Phase = attached
	k.mu.Lock()
	delete(k.missing, a.key())
	k.mu.Unlock()
	switch {
	case d.UUID != a.UUID:
		a.Message = fmt.Sprintf("VM %s has it, though it was meant for %s", d.Name, before.vm())
		if before.UUID == "" {
			a.Message = fmt.Sprintf("VM %s has it, though nobody was to have it (%s)", d.Name, before.Phase)
		}
		a.UUID, a.Name = d.UUID, d.Name
		k.Event(a.GPU, "Conflict", a.Message)
		k.Log.Error("a card has another owner than the record says", "gpu", a.GPU, "owner", d.Name, "record", before.vm())
	case before.Phase == detaching:
		a.Message = "a detach did not end: the VM still has it"
	case before.Phase == attached:
	default:
		a.Message = ""
	}
	a.Starting = false
	if a.Migration != "" && !k.migrating(ctx, a) {
		a.Migration = ""
	}
	if before.Phase != attached && a.Persistent {
		if err := k.VMs.Store(ctx, a.UUID, a.Functions); err != nil {
			k.Log.Warn("not in the stored definition", "gpu", a.GPU, "machine", a.vm(), "err", err)
			a.Persistent = false
		}
	}
	if a.Claim == "" {
		m := vm.VM{UUID: a.UUID, Name: a.Name}
		var claim string
		var err error
		if a.Slice != nil {
			claim, _, err = k.obtainSlice(ctx, m, a.Slice.Profile, []string{a.GPU}, "", 0)
		} else {
			claim, _, err = k.obtain(ctx, m, []string{a.GPU}, "", 0)
		}
		if err != nil {
			k.Log.Warn("the cluster has not given a card to the VM that has it", "gpu", a.GPU, "machine", a.vm(), "err", err)
		}
		a.Claim = claim
		defer k.dropClaim(claim)
	}
	if equal(&before, a) {
		return nil
	}
	return k.put(*a)
}

// complete gives a VM the functions of its card that it does not have, because an attach
// or detach was interrupted.
func (k *Keeper) complete(ctx context.Context, c *change, owners map[pci.Address]vm.VM) {
	for _, f := range c.assignment.Functions {
		if _, owned := owners[f]; owned {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, k.Step)
		err := c.attachFunction(ctx, f)
		cancel()
		if err != nil {
			c.assignment.Message = fmt.Sprintf("VM %s has only a part of it: function %s: %v", c.assignment.vm(), f, err)
			if err := k.put(c.assignment); err != nil {
				k.Log.Error("not recorded", "gpu", c.assignment.GPU, "err", err)
			}
			return
		}
	}
}

func equal(a, b *cardAssignment) bool {
	return a.Phase == b.Phase && a.UUID == b.UUID && a.Name == b.Name && a.Claim == b.Claim && a.Persistent == b.Persistent &&
		a.Starting == b.Starting && a.Migration == b.Migration && a.Message == b.Message
}

// starting reports whether a VM that asked for the card may still be starting. The hypervisor may
// take minutes to give it its memory, and only then gives it its devices.
func (k *Keeper) starting(ctx context.Context, a *cardAssignment) (bool, error) {
	if k.Now().Sub(a.at) < k.Grace {
		return true, nil
	}
	building, err := k.Hypervisor.Building(ctx, a.UUID)
	if err != nil {
		return false, fmt.Errorf("whether vm %s, which is to have %s, is starting is not known: %w", a.vm(), a.label(), err)
	}
	return building, nil
}

// absent reports whether the hypervisor has listed no owner for the time gone.
func (k *Keeper) absent(a *cardAssignment) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	since, ok := k.missing[a.key()]
	if !ok {
		k.missing[a.key()] = k.Now()
		time.AfterFunc(gone, k.Kick)
		return false
	}
	if k.Now().Sub(since) < gone {
		return false
	}
	delete(k.missing, a.key())
	return true
}

// adopt records a card that was given to a VM without gpuctl.
func (k *Keeper) adopt(ctx context.Context, card *pci.Card, owners map[pci.Address]vm.VM) error {
	if k.assignmentOf(card.Address) != nil {
		return nil
	}
	for _, f := range addresses(card) {
		if _, owned := owners[f]; !owned {
			continue
		}
		end, err := k.lockCard(card.Address, "a look after it")
		if err != nil {
			return err
		}
		defer end()
		now, err := k.Hypervisor.Owners(ctx)
		if err != nil {
			return err
		}
		d, owned := now[f]
		if !owned || k.assignmentOf(card.Address) != nil {
			return nil // it has changed since Reconcile asked
		}
		_, name, err := k.find(ctx, card.Address.String())
		if err != nil {
			return err
		}
		k.Log.Warn("a VM has a card that nobody asked this hostd for", "gpu", name, "machine", d.Name)
		k.Event(name, "Adopted", "VM "+d.Name+" has it; it was not given by gpuctl")
		c := &change{k: k, report: func(*gpuctlv1.DeviceUpdate) {}, assignment: cardAssignment{
			Card: card.Address, Functions: addresses(card), GPU: name, UUID: d.UUID, Name: d.Name,
		}}
		return k.owned(ctx, c, d)
	}
	return nil
}
