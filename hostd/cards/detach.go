package cards

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

var errNoAgents = errors.New("this host asks no gpuguest")

// Detach takes a card or slice back from a VM. Errors wrap ErrNotFound, ErrRefused or
// ErrBusy.
func (k *Keeper) Detach(ctx context.Context, r *gpuctlv1.DetachRequest, report Report) error {
	m, err := k.VMs.Find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	a, err := k.ofVM(ctx, m.VM, r.GetGpu())
	if err != nil {
		return err
	}
	steps, reasons := k.planDetach(ctx, m, a, r)
	if r.GetPlan() {
		report(&gpuctlv1.DeviceUpdate{Gpu: a.GPU, Machine: m.Name, Plan: steps, Reasons: reasons, Done: true, Steps: uint32(len(steps))})
		return nil
	}
	what := fmt.Sprintf("detach %s from vm %s", a.GPU, m.Name)
	if len(reasons) > 0 {
		return refusal(what, reasons)
	}
	return k.outlive(ctx, func(ctx context.Context) error {
		end, err := k.lockCard(a.Card, "a detach from vm "+m.Name)
		if err != nil {
			return err
		}
		defer end()
		now := k.current(a)
		if now == nil || now.rev != a.rev {
			return fmt.Errorf("%s: %w: it has changed meanwhile", what, ErrBusy)
		}
		if k.Serving != nil {
			free, err := k.Serving.Hold(m.UUID)
			if err != nil {
				return fmt.Errorf("%s: %w: %w", what, ErrRefused, err)
			}
			defer free()
		}
		c := &change{k: k, steps: steps, report: report, assignment: *now}
		if err := k.detach(ctx, c, r); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		report(&gpuctlv1.DeviceUpdate{Gpu: a.GPU, Machine: m.Name, Done: true, Steps: uint32(len(steps)), StepIndex: uint32(c.at)})
		return nil
	})
}

// ofVM returns the assignment of a VM that gpu names. If gpu is empty, the VM must have
// only one.
func (k *Keeper) ofVM(ctx context.Context, m vm.VM, gpu string) (*cardAssignment, error) {
	k.mu.Lock()
	var has []*cardAssignment
	var names []string
	for a := range k.each() {
		if a.UUID == m.UUID {
			c := *a
			has, names = append(has, &c), append(names, a.label())
		}
	}
	slices.Sort(names)
	k.mu.Unlock()
	if gpu == "" {
		switch len(has) {
		case 0:
			return nil, fmt.Errorf("vm %s: %w: it has no gpu of this host", m.Name, ErrNotFound)
		case 1:
			return has[0], nil
		}
		return nil, fmt.Errorf("vm %s: %w: it has %s; name one of them", m.Name, ErrInvalid, strings.Join(names, ", "))
	}
	for _, a := range has {
		if a.Slice != nil && a.called(gpu) {
			return a, nil
		}
	}
	card, name, err := k.find(ctx, gpu)
	if err != nil {
		return nil, err
	}
	has = slices.DeleteFunc(has, func(a *cardAssignment) bool { return a.Card != card.Address })
	switch len(has) {
	case 0:
	case 1:
		return has[0], nil
	default:
		return nil, fmt.Errorf("vm %s: %w: it has %s; name the function or id of one", m.Name, ErrInvalid, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("vm %s: %w: it does not have %s", m.Name, ErrNotFound, name)
}

func (k *Keeper) planDetach(ctx context.Context, m vm.Info, a *cardAssignment, r *gpuctlv1.DetachRequest) (steps []*gpuctlv1.PlannedStep, reasons []*gpuctlv1.Reason) {
	if m.Active() {
		if r.GetUnconfirmed() {
			steps = append(steps, planned(stepConfirm, "nobody confirms that the VM has let go of it: you said so", ""))
		} else {
			steps = append(steps, planned(stepConfirm, "have the VM's gpuguest release it and confirm that it can be detached", "the VM takes it up again"))
		}
		steps = append(steps, planned(stepDetach, "detach it from "+m.Name+", and have the hypervisor confirm it", "it is attached again"))
	}
	if r.GetPersistent() {
		steps = append(steps, planned(stepUnstore, "take it out of the stored definition of "+m.Name, "the definition as it was"))
	}
	if a.bound() {
		steps = append(steps,
			planned(stepReset, "reset it and read it back; what no reset brings back is quarantined", ""),
			planned(stepReturn, "bind its functions to the drivers that they had", ""))
	}
	if a.Slice != nil && !a.Slice.Kept {
		steps = append(steps, planned(stepUncut, "delete the slice, and with the last one the virtual functions that were made for slices", ""))
	}
	if k.Moving != nil && !r.GetUnconfirmed() {
		// Its applications may be frozen, so that gpuguest lets go of a card that they need.
		if id := k.Moving(ctx, m.UUID); id != "" {
			reasons = append(reasons, why("migration_running", "migration %s of VM %s has not ended, and needs its card to go on or back: gpuctl migrations watch %s shows it; with --unconfirmed the card is taken all the same, and what its applications have may be lost", id, m.Name, id))
		}
	}
	if k.Serving != nil {
		if users := k.Serving.Users(m.UUID); len(users) > 0 {
			reasons = append(reasons, why("serves", "VM %s is a service VM, and %s have parts of its GPUs: detach or end them, or take the GPUs back with gpuctl detach %s --serves", m.Name, strings.Join(users, ", "), m.Name))
		}
	}
	switch {
	case a.Phase != attached:
		reasons = append(reasons, why("phase", "%s is %s, not attached: wait for it to end", a.GPU, a.Phase))
	case m.State != "running" && m.Active():
		// A detach would fail after ten seconds, and libvirt and Xen would disagree from
		// then on.
		reasons = append(reasons, why("not_running", "VM %s is %s and cannot answer: resume it, or stop it", m.Name, m.State))
	case a.mediated() && m.Active() && !r.GetUnconfirmed():
		reasons = append(reasons, why("no_agent", "the VM knows a mediated device by another address than this host, so nobody confirms that it has let go: say --unconfirmed if you know that nothing there uses it"))
	case m.Active() && !r.GetUnconfirmed():
		err := errNoAgents
		if k.Guests != nil {
			err = k.Guests.Answers(ctx, m.UUID)
		}
		if err != nil {
			reasons = append(reasons, why("no_agent", "nobody in VM %s can confirm that it has let go (%v), and a detach that the VM does not answer cannot be undone: install gpuguest there, or say --unconfirmed if you know that nothing there uses it", m.Name, err))
		}
	}
	return steps, reasons
}

func (k *Keeper) detach(ctx context.Context, c *change, r *gpuctlv1.DetachRequest) error {
	confirm := func(ctx context.Context) error {
		if r.GetUnconfirmed() {
			return nil
		}
		for _, f := range c.assignment.Functions {
			if err := k.Guests.LetGo(ctx, c.assignment.UUID, f); err != nil {
				return err
			}
		}
		return nil
	}
	if err := c.step(ctx, stepConfirm, confirm); err != nil {
		return err // nothing has been changed
	}
	if err := c.detach(ctx); err != nil {
		return errors.Join(err, k.stillHas(ctx, c))
	}
	if r.GetPersistent() {
		if err := c.step(ctx, stepUnstore, func(ctx context.Context) error {
			return k.VMs.Unstore(ctx, c.assignment.UUID, c.assignment.Functions)
		}); err != nil {
			// The VM's next start asks for the card again. The detach itself goes on.
			c.report(&gpuctlv1.DeviceUpdate{Gpu: c.assignment.GPU, Machine: c.assignment.vm(), Message: err.Error()})
		}
	}
	return c.giveBack(ctx)
}

// stillHas records after a failed detach what the hypervisor reports.
func (k *Keeper) stillHas(ctx context.Context, c *change) error {
	owners, err := k.owners(ctx, &c.assignment)
	if err != nil {
		return err // the phase stays; Reconcile decides later
	}
	if contradicts(owners, c.assignment.Functions, c.assignment.UUID, false) == "" {
		return nil // the VM has lost it just now; Reconcile resets and returns it
	}
	c.assignment.Message = "a detach failed: the VM still has it"
	return c.enter(attached)
}

// Reset resets a free or quarantined card, or a quarantined slice. Errors wrap
// ErrNotFound, ErrRefused or ErrBusy.
func (k *Keeper) Reset(ctx context.Context, r *gpuctlv1.ResetRequest, report Report) error {
	if a, err := pci.ParseAddress(r.GetGpu()); err == nil {
		if h := k.sliceAt(a); h != nil {
			return k.resetSlice(ctx, h, r.GetPlan(), report)
		}
	}
	card, name, err := k.find(ctx, r.GetGpu())
	if err != nil {
		return err
	}
	steps := []*gpuctlv1.PlannedStep{
		planned(stepTake, "unbind all of its functions from their drivers and bind them to "+k.Hypervisor.Driver(), "they go back to their drivers"),
		planned(stepReset, "reset it and read it back", ""),
		planned(stepReturn, "bind its functions to the drivers that they had", ""),
	}
	var reasons []*gpuctlv1.Reason
	if h := k.assignmentOf(card.Address); h != nil && h.Phase == quarantined {
		steps = steps[1:] // the reset takes it
	} else if h != nil {
		reasons = append(reasons, why("owned", "%s belongs to VM %s (%s)", name, h.vm(), h.Phase))
	} else if owners, err := k.Hypervisor.Owners(ctx); err != nil {
		return err
	} else if said := contradicts(owners, addresses(card), "", false); said != "" {
		reasons = append(reasons, why("owned", "the hypervisor says that %s", said))
	}
	reasons = append(reasons, k.againstWhole(card, name)...)
	if r.GetPlan() {
		report(&gpuctlv1.DeviceUpdate{Gpu: name, Plan: steps, Reasons: reasons, Done: true, Steps: uint32(len(steps))})
		return nil
	}
	if len(reasons) > 0 {
		return refusal("reset "+name, reasons)
	}
	return k.outlive(ctx, func(ctx context.Context) error {
		end, err := k.lockCard(card.Address, "a reset")
		if err != nil {
			return err
		}
		defer end()
		if reasons := k.againstWhole(card, name); len(reasons) > 0 {
			return refusal("reset "+name, reasons) // the card has changed meanwhile
		}
		c := &change{k: k, card: card, steps: steps, report: report, assignment: cardAssignment{Card: card.Address, Functions: addresses(card), GPU: name}}
		switch h := k.assignmentOf(card.Address); {
		case h == nil:
			err = k.resetFree(ctx, c, name)
		case h.Phase == quarantined:
			c.assignment = *h
			c.assignment.Functions = addresses(card)
			err = c.resetQuarantined(ctx)
		default:
			err = fmt.Errorf("%w: VM %s has got it meanwhile", ErrBusy, h.vm())
		}
		if err != nil {
			return fmt.Errorf("reset %s: %w", name, err)
		}
		report(k.last(c))
		return nil
	})
}

func (k *Keeper) resetFree(ctx context.Context, c *change, name string) error {
	// A claim of its own keeps the cluster from assigning the card during the reset.
	claim, _, err := k.obtain(ctx, vm.VM{Name: "(reset)"}, []string{name}, "", 0)
	if err != nil {
		return err
	}
	defer k.dropClaim(claim)
	c.assignment.Claim = claim
	if err := c.take(ctx); err != nil {
		return c.rollBack(ctx, err)
	}
	return c.giveBack(ctx)
}

// resetQuarantined tries to bring back what is in quarantine. It stays there until a reset
// has succeeded: neither an end of hostd nor a card that can't be taken makes it free.
func (c *change) resetQuarantined(ctx context.Context) error {
	why := c.assignment.Message
	err := c.giveBack(ctx)
	if err != nil && c.assignment.Phase == resetting {
		c.assignment.Message = why
		err = errors.Join(err, c.enter(quarantined))
	}
	return err
}
