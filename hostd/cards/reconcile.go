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

// gone is how long nobody must have had a card that a VM had before it is
// taken back: a VM that is started anew has none for a moment.
const gone = 5 * time.Second

// Reconcile compares the record with what the hypervisor says and finishes or
// undoes what is half-way. Where the hypervisor does not answer nothing is
// touched.
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
	var all []hold
	for h := range k.each() {
		all = append(all, *h)
	}
	k.mu.Unlock()
	var mediated map[string]Domain
	if slices.ContainsFunc(all, func(h hold) bool { return h.mediated() }) {
		if k.Mediated == nil {
			return errors.New("the record has mediated devices, and this hypervisor has none")
		}
		if mediated, err = k.Mediated.Owners(ctx); err != nil {
			return fmt.Errorf("who has which mediated device is not known: %w", err)
		}
	}
	slices.SortFunc(all, func(a, b hold) int { return a.Card.Compare(b.Card) })
	var errs []error
	for i := range all {
		owners := owners
		if all[i].mediated() {
			owners = all[i].view(mediated)
		}
		if err := k.settle(ctx, &all[i], owners); err != nil && !errors.Is(err, ErrBusy) {
			errs = append(errs, err)
		}
	}
	for _, card := range cards {
		if err := k.adoptSlices(ctx, card, owners); err != nil && !errors.Is(err, ErrBusy) {
			errs = append(errs, err)
		}
		if err := k.adopt(ctx, card, owners); err != nil && !errors.Is(err, ErrBusy) {
			errs = append(errs, err)
		}
	}
	k.mu.Lock()
	k.ready = true
	k.mu.Unlock()
	k.Cluster.Kick()
	return errors.Join(errs...)
}

// settle brings one hold together with what is.
func (k *Keeper) settle(ctx context.Context, h *hold, owners map[pci.Address]Domain) error {
	end, err := k.begin(h.Card, "a look after it")
	if err != nil {
		return err
	}
	defer end()
	if now := k.current(h); now == nil || now.rev != h.rev {
		return nil // it has moved on since
	}
	c := &change{k: k, hold: *h, report: func(*gpuctlv1.DeviceUpdate) {}}
	for _, f := range h.Functions {
		if d, owned := owners[f]; owned {
			if d.UUID == h.UUID && h.Phase != attached {
				defer k.complete(ctx, c, owners)
			}
			return k.owned(ctx, c, d)
		}
	}
	switch {
	case h.Phase == quarantined:
		return nil
	case h.Phase == ready && h.Starting && k.starting(h):
		return nil
	case keeps(h.Phase) && k.migrating(ctx, h):
		return nil
	case h.Phase == reserved:
		return k.drop(h.Card)
	case h.Phase == attached && !k.absent(h):
		return nil
	case h.Phase == taking || h.Phase == cutting:
		k.Log.Info("undoing what was begun before", "gpu", h.GPU, "phase", h.Phase)
		return c.release(ctx)
	}
	k.Log.Info("taking a card back", "gpu", h.GPU, "machine", h.machine(), "phase", h.Phase)
	return c.giveBack(ctx)
}

// owned notes that a VM has the card.
func (k *Keeper) owned(ctx context.Context, c *change, d Domain) error {
	h := &c.hold
	before := *h
	h.Phase = attached
	k.mu.Lock()
	delete(k.missing, h.key())
	k.mu.Unlock()
	switch {
	case d.UUID != h.UUID:
		h.Message = fmt.Sprintf("VM %s has it, though it was meant for %s", d.Name, before.machine())
		if before.UUID == "" {
			h.Message = fmt.Sprintf("VM %s has it, though nobody was to have it (%s)", d.Name, before.Phase)
		}
		h.UUID, h.Name = d.UUID, d.Name
		k.Event(h.GPU, "Conflict", h.Message)
		k.Log.Error("a card has another owner than the record says", "gpu", h.GPU, "owner", d.Name, "record", before.machine())
	case before.Phase == detaching:
		h.Message = "a detach did not end: the VM still has it"
	case before.Phase == attached:
	default:
		h.Message = ""
	}
	h.Starting = false
	if h.Migration != "" && !k.migrating(ctx, h) {
		h.Migration = ""
	}
	if before.Phase != attached && h.Persistent {
		if err := k.Machines.Store(ctx, h.UUID, h.Functions); err != nil {
			k.Log.Warn("not in the stored definition", "gpu", h.GPU, "machine", h.machine(), "err", err)
			h.Persistent = false
		}
	}
	if h.Claim == "" {
		m := Machine{UUID: h.UUID, Name: h.Name}
		var claim string
		var err error
		if h.Slice != nil {
			claim, _, err = k.obtainSlice(ctx, m, h.Slice.Profile, []string{h.GPU}, "", 0)
		} else {
			claim, _, err = k.obtain(ctx, m, []string{h.GPU}, "", 0)
		}
		if err != nil {
			k.Log.Warn("the cluster has not given a card to the VM that has it", "gpu", h.GPU, "machine", h.machine(), "err", err)
		}
		h.Claim = claim
		defer k.forgo(claim)
	}
	if equal(&before, h) {
		return nil
	}
	return k.put(*h)
}

// complete gives a VM the functions of its card that it does not have: an
// attach or detach has ended half-way.
func (k *Keeper) complete(ctx context.Context, c *change, owners map[pci.Address]Domain) {
	for _, f := range c.hold.Functions {
		if _, owned := owners[f]; owned {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, k.Step)
		err := c.plug(ctx, f)
		cancel()
		if err != nil {
			c.hold.Message = fmt.Sprintf("VM %s has only a part of it: function %s: %v", c.hold.machine(), f, err)
			if err := k.put(c.hold); err != nil {
				k.Log.Error("not recorded", "gpu", c.hold.GPU, "err", err)
			}
			return
		}
	}
}

func equal(a, b *hold) bool {
	return a.Phase == b.Phase && a.UUID == b.UUID && a.Name == b.Name && a.Claim == b.Claim && a.Persistent == b.Persistent &&
		a.Starting == b.Starting && a.Migration == b.Migration && a.Message == b.Message
}

// starting says that a VM which asked for the card may still be on its way.
func (k *Keeper) starting(h *hold) bool {
	return k.Now().Sub(time.UnixMilli(h.Since)) < k.Grace
}

// absent says that nobody has had the card for long enough.
func (k *Keeper) absent(h *hold) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	since, ok := k.missing[h.key()]
	if !ok {
		k.missing[h.key()] = k.Now()
		time.AfterFunc(gone, k.Kick)
		return false
	}
	if k.Now().Sub(since) < gone {
		return false
	}
	delete(k.missing, h.key())
	return true
}

// adopt takes note of a card that somebody gave to a VM without asking.
func (k *Keeper) adopt(ctx context.Context, card *pci.Card, owners map[pci.Address]Domain) error {
	if k.held(card.Address) != nil {
		return nil
	}
	for _, f := range addresses(card) {
		d, owned := owners[f]
		if !owned {
			continue
		}
		end, err := k.begin(card.Address, "a look after it")
		if err != nil {
			return err
		}
		defer end()
		_, name, err := k.find(ctx, card.Address.String())
		if err != nil {
			return err
		}
		k.Log.Warn("a VM has a card that nobody asked this hostd for", "gpu", name, "machine", d.Name)
		k.Event(name, "Adopted", "VM "+d.Name+" has it; it was not given by gpuctl")
		c := &change{k: k, report: func(*gpuctlv1.DeviceUpdate) {}, hold: hold{
			Card: card.Address, Functions: addresses(card), GPU: name, UUID: d.UUID, Name: d.Name,
		}}
		return k.owned(ctx, c, d)
	}
	return nil
}
