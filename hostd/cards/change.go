package cards

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/bind"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Report receives the updates of a change.
type Report func(*gpuctlv1.DeviceUpdate)

// change is one operation on one card. The card is locked until the end.
type change struct {
	k          *Keeper
	assignment cardAssignment
	card       *pci.Card
	steps      []*gpuctlv1.PlannedStep
	at         int
	report     Report
}

// step executes one named step, with Timing.Step as its time limit.
func (c *change) step(ctx context.Context, name string, do func(ctx context.Context) error) error {
	c.at++
	c.report(c.update(name, 0))
	ctx, cancel := context.WithTimeout(ctx, c.k.Step)
	defer cancel()
	began := time.Now()
	err := do(ctx)
	if c.k.PCI.Changed(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	c.report(c.update(name, time.Since(began)))
	return nil
}

func (c *change) update(name string, took time.Duration) *gpuctlv1.DeviceUpdate {
	return &gpuctlv1.DeviceUpdate{
		Gpu: c.assignment.GPU, Machine: c.assignment.vm(), Step: name, StepIndex: uint32(c.at), Steps: uint32(max(c.at, len(c.steps))), TookNs: int64(took),
	}
}

// enter records a phase before the work of that phase begins.
func (c *change) enter(p phase) error {
	c.assignment.Phase = p
	return c.k.put(c.assignment)
}

// take binds the card to the hypervisor's driver, so that a VM can have it.
func (c *change) take(ctx context.Context) error {
	if !c.assignment.bound() {
		return nil
	}
	if err := c.enter(taking); err != nil {
		return err
	}
	return c.step(ctx, stepTake, func(ctx context.Context) error {
		if err := c.unowned(ctx); err != nil {
			return err
		}
		return c.k.Binder.Take(ctx, c.assignment.Functions, c.k.Hypervisor.Driver())
	})
}

// reset brings the card to a known state. If no method works, the card is quarantined.
func (c *change) reset(ctx context.Context) error {
	if !c.assignment.bound() {
		return nil // the card's own driver resets the slice
	}
	caller := ctx
	return c.step(ctx, stepReset, func(ctx context.Context) error {
		if err := c.unowned(ctx); err != nil {
			return err
		}
		card, err := c.rescan()
		if err == nil && !c.k.taken(card) {
			// Its own driver has it: the host was restarted, or libvirt has returned it. A
			// reset would hit whoever uses it there.
			if err := c.k.Binder.Take(ctx, c.assignment.Functions, c.k.Hypervisor.Driver()); err != nil && !errors.Is(err, bind.ErrDead) {
				c.assignment.Message = "it is not reset, as its own driver has it: " + err.Error()
				return errors.Join(fmt.Errorf("it is not reset, as its own driver has it: %w", err), c.k.put(c.assignment))
			}
			card, err = c.rescan()
		}
		if err == nil {
			var method string
			method, err = c.k.Resetter.Reset(ctx, card)
			c.k.noteReset(c.assignment.Card, method, err)
		}
		// What outlasts the step would do so again. Only a caller that has gone says nothing
		// about the card.
		if err != nil && caller.Err() == nil && !errors.Is(err, errGone) {
			c.assignment.Away = errors.Is(err, errAway)
			return errors.Join(err, c.quarantine(err.Error()))
		}
		return err
	})
}

// unowned returns an error if a VM has a function of the card. Somebody may have given it one
// without gpuctl: while that is on no record, nobody else would notice.
func (c *change) unowned(ctx context.Context) error {
	owners, err := c.k.owners(ctx, &c.assignment)
	if err != nil {
		return fmt.Errorf("who has it is not known: %w", err)
	}
	if said := contradicts(owners, c.assignment.Functions, "", false); said != "" {
		return fmt.Errorf("%w: the hypervisor says that %s", ErrBusy, said)
	}
	return nil
}

// ready takes and resets the card for its VM.
func (c *change) ready(ctx context.Context) error {
	if err := c.take(ctx); err != nil {
		return err
	}
	if err := c.reset(ctx); err != nil {
		return err
	}
	return c.enter(ready)
}

// noteReset remembers how a card was reset. The next save writes it to disk.
func (k *Keeper) noteReset(card pci.Address, method string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if delete(k.resets, card); err == nil {
		k.resets[card] = method
	}
}

// rescan reads the card again, as its driver has changed.
func (c *change) rescan() (*pci.Card, error) {
	cards, err := c.k.PCI.Scan()
	if err != nil {
		return nil, err
	}
	for _, card := range cards {
		if card.Address == c.assignment.Card && c.assignment.Slice == nil {
			return card, nil
		} else if card.Address == c.assignment.Card && len(c.assignment.Functions) > 0 {
			return part(card, c.assignment.Functions[0])
		}
	}
	if c.assignment.Slice != nil {
		return nil, fmt.Errorf("slice %s of card %s: %w", c.assignment.Slice.ID, c.assignment.Card, errGone)
	}
	return nil, fmt.Errorf("card %s: %w", c.assignment.Card, errAway)
}

// errAway means that a card was pulled out, or has fallen off the bus.
var errAway = errors.New("it is not on the bus any more")

var errQuarantined = errors.New("quarantined")

// quarantine withdraws the card from use. Its claim ends. Its health contains the reason.
// The error wraps errQuarantined.
func (c *change) quarantine(why string) error {
	c.assignment.Phase, c.assignment.Message = quarantined, why
	c.assignment.Claim, c.assignment.UUID, c.assignment.Name, c.assignment.Starting = "", "", "", false
	err := c.k.put(c.assignment)
	c.k.Cluster.Kick()
	c.k.Log.Error("card quarantined", "gpu", c.assignment.GPU, "why", why)
	c.k.Event(c.assignment.GPU, "Quarantined", why)
	return errors.Join(fmt.Errorf("card %s: %w; gpuctl reset %s tries again", c.assignment.Card, errQuarantined, c.assignment.GPU), err)
}

// attach attaches the card to its running VM. If libvirt reports an error, the hypervisor
// decides whether the VM has the card.
func (c *change) attach(ctx context.Context) error {
	resumed := c.assignment.Phase == attaching // an earlier attach was interrupted
	if err := c.enter(attaching); err != nil {
		return err
	}
	err := c.step(ctx, stepAttach, func(ctx context.Context) error {
		for _, f := range c.assignment.Functions {
			if resumed {
				if there, err := c.repairOwnership(ctx, f); err != nil {
					return fmt.Errorf("function %s: %w", f, err)
				} else if there {
					continue
				}
			}
			if err := c.attachFunction(ctx, f); err != nil {
				// libvirt refuses a function that is still in its list after an
				// interrupted detach.
				if there, repairErr := c.repairOwnership(ctx, f); repairErr != nil || !there {
					return fmt.Errorf("function %s: %w", f, err)
				}
				c.k.Log.Warn("an attach failed, but the VM has the function", "function", f, "machine", c.assignment.vm(), "err", err)
			}
		}
		return c.verify(ctx, true)
	})
	if err != nil {
		return err
	}
	if err := c.enter(attached); err != nil {
		return err
	}
	c.k.Event(c.assignment.GPU, "Attached", "VM "+c.assignment.vm()+" has "+c.assignment.what())
	return nil
}

// verify waits until the hypervisor confirms that the VM has all functions (want), or
// that nobody has any (not want). It waits Timing.Verify at most.
func (c *change) verify(ctx context.Context, want bool) error {
	ctx, cancel := context.WithTimeout(ctx, c.k.Verify)
	defer cancel()
	for {
		said := "it does not answer"
		owners, err := c.k.owners(ctx, &c.assignment)
		if err == nil {
			if said = contradicts(owners, c.assignment.Functions, c.assignment.UUID, want); said == "" {
				return nil
			}
		} else if ctx.Err() == nil {
			said = err.Error()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the hypervisor does not confirm it: %s", said)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// contradicts returns in words which function the hypervisor assigns otherwise than
// wanted; empty: none.
func contradicts(owners map[pci.Address]vm.VM, functions []pci.Address, uuid string, want bool) string {
	for _, f := range functions {
		d, owned := owners[f]
		switch {
		case owned && d.UUID != uuid:
			return fmt.Sprintf("VM %s has %s", d.Name, f)
		case owned != want && want:
			return fmt.Sprintf("nobody has %s", f)
		case owned != want:
			return fmt.Sprintf("the VM still has %s", f)
		}
	}
	return ""
}

// detach detaches the card from its running VM, the main function last.
func (c *change) detach(ctx context.Context) error {
	resumed := c.assignment.Phase == detaching || c.assignment.Message != "" // an earlier detach may have been interrupted
	if err := c.enter(detaching); err != nil {
		return err
	}
	return c.step(ctx, stepDetach, func(ctx context.Context) error {
		var errs []error
		for i := len(c.assignment.Functions) - 1; i >= 0; i-- {
			f := c.assignment.Functions[i]
			there, err := true, error(nil)
			if resumed {
				there, err = c.repairOwnership(ctx, f)
			}
			if err == nil && there {
				err = c.detachFunction(ctx, f)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("function %s: %w", f, err))
				break
			}
		}
		if err := c.verify(ctx, false); err != nil {
			return errors.Join(append(errs, err)...)
		}
		return nil // the hypervisor decides, whatever libvirt has answered
	})
}

// repairOwnership makes the hypervisor, libvirt and the VM agree on whether the VM has a
// function, and reports whether it has. If libvirtd dies during a detach, the VM may have
// lost the function while the hypervisor or libvirt still lists it. libvirt must not be
// asked to detach it again: that would fail, and then its libxl driver uses memory that
// it has freed. So the VM gets back each function that libvirt lists.
func (c *change) repairOwnership(ctx context.Context, f pci.Address) (there bool, err error) {
	owners, err := c.k.owners(ctx, &c.assignment)
	if err != nil {
		return false, err
	}
	there = owners[f].UUID == c.assignment.UUID
	if c.assignment.mediated() {
		return there, nil
	}
	uuid := c.assignment.UUID
	// Without an agent, only the hypervisor's list counts.
	if there && c.assignment.Phase == detaching && c.guestReleased(ctx, f) {
		c.k.Log.Warn("a detach has ended half-way: the hypervisor still lists a function that the VM has released", "function", f, "machine", c.assignment.vm())
		if err := c.k.Hypervisor.ForceDetach(ctx, uuid, f); err != nil {
			return false, err
		}
		there = false
	}
	if there {
		return true, nil
	}
	listed, err := c.k.VMs.Listed(ctx, uuid, f)
	if err != nil || !listed {
		return false, err
	}
	c.k.Log.Warn("libvirt lists a function that the VM does not have: it is attached again", "function", f, "machine", c.assignment.vm())
	if err := c.k.Hypervisor.ForceAttach(ctx, uuid, f); err != nil || c.assignment.Phase != detaching {
		return true, err
	}
	return true, c.letGo(ctx, f)
}

// guestReleased reports whether the VM's agent answers, and the VM does not have the
// function.
func (c *change) guestReleased(ctx context.Context, f pci.Address) bool {
	if c.k.Guests == nil {
		return false
	}
	has, err := c.k.Guests.Has(ctx, c.assignment.UUID, f)
	return err == nil && !has
}

// letGo makes the VM release a function that it has just got back. First it waits until
// the VM sees the function: until then, the VM's kernel does not answer an unplug.
func (c *change) letGo(ctx context.Context, f pci.Address) error {
	waiting, cancel := context.WithTimeout(ctx, c.k.Verify)
	defer cancel()
	for c.guestReleased(waiting, f) {
		select {
		case <-waiting.Done():
			return fmt.Errorf("the VM does not see what it got back: %w", waiting.Err())
		case <-time.After(c.k.Verify / 50):
		}
	}
	if c.k.Guests == nil || c.k.Guests.Answers(ctx, c.assignment.UUID) != nil {
		return nil // without an agent, nobody can be asked
	}
	return c.k.Guests.LetGo(ctx, c.assignment.UUID, f)
}

// giveBack makes the card free again: it is reset, and its functions are returned to
// their drivers.
func (c *change) giveBack(ctx context.Context) error {
	if c.assignment.Slice != nil && len(c.assignment.Functions) == 0 { // it was never made
		return c.release(ctx)
	}
	if err := c.enter(resetting); err != nil {
		return err
	}
	if err := c.reset(ctx); err != nil && !errors.Is(err, errGone) {
		return err
	}
	return c.release(ctx)
}

// release returns the card and ends its claim. A slice is deleted.
func (c *change) release(ctx context.Context) error {
	if err := c.enter(returning); err != nil {
		return err
	}
	if c.assignment.Slice != nil {
		err := c.step(ctx, stepReturn, c.returnFunction)
		if err == nil {
			err = c.step(ctx, stepUncut, c.deleteSlice)
		}
		if err != nil {
			c.assignment.Message = err.Error()
			return errors.Join(err, c.k.put(c.assignment))
		}
	} else if !c.k.Park {
		if err := c.step(ctx, stepReturn, func(ctx context.Context) error { return c.k.Binder.Return(ctx, c.assignment.Functions) }); err != nil {
			c.assignment.Message = err.Error()
			return errors.Join(err, c.k.put(c.assignment))
		}
	}
	if err := c.k.remove(&c.assignment); err != nil {
		return fmt.Errorf("card %s: %w", c.assignment.Card, err)
	}
	said := ""
	if c.assignment.Slice != nil {
		said = c.assignment.label()
	}
	c.k.Event(c.assignment.GPU, "Released", said)
	c.k.Log.Info("card is free", "gpu", c.assignment.label(), "card", c.assignment.Card)
	return nil
}

// rollBack undoes a change that failed with cause, and returns what is to be reported. If
// the VM has the card nevertheless, it keeps it.
func (c *change) rollBack(ctx context.Context, cause error) error {
	if errors.Is(cause, errQuarantined) {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*c.k.Step)
	defer cancel()
	owners, err := c.k.owners(ctx, &c.assignment)
	if err != nil {
		return fmt.Errorf("%w (not undone yet: the hypervisor does not say who has it: %w)", cause, err)
	}
	if said := contradicts(owners, c.assignment.Functions, c.assignment.UUID, false); said != "" {
		c.assignment.Message = fmt.Sprintf("an attach failed half-way (%v); %s", cause, said)
		return errors.Join(cause, c.enter(attached))
	}
	c.report(&gpuctlv1.DeviceUpdate{Gpu: c.assignment.GPU, Machine: c.assignment.vm(), Message: "undoing: " + cause.Error()})
	undo := c.release
	if c.assignment.Phase == attaching { // the VM may have changed the card's state
		undo = c.giveBack
	}
	if err := undo(ctx); err != nil {
		return fmt.Errorf("%w; and it could not be undone: %w", cause, err)
	}
	return cause
}

// obtain has the cluster assign one of the given GPUs to a new claim for a VM. more is an
// additional condition (an expression, or empty), memory the least memory in bytes. If
// the cluster refuses, the error wraps ErrRefused.
func (k *Keeper) obtain(ctx context.Context, m vm.VM, gpus []string, more string, memory uint64) (claim, gpu string, err error) {
	claim = "vm-" + random.Hex(6)
	gpu, err = k.obtainNamed(ctx, claim, m, gpus, more, memory)
	if err != nil {
		return "", "", err
	}
	return claim, gpu, nil
}

// obtainNamed does the same for a claim that has its name already.
func (k *Keeper) obtainNamed(ctx context.Context, claim string, m vm.VM, gpus []string, more string, memory uint64) (gpu string, err error) {
	return k.obtainFor(ctx, &cardAssignment{Claim: claim, UUID: m.UUID, Name: m.Name}, gpus, more, memory)
}

// Among returns the expression for a claim of one of these GPUs, for which what an operator asks for
// is true, too. That is to be an expression by itself: one as "true) || (true" would be true of others.
func Among(gpus []string, more string) (string, error) {
	quoted := make([]string, len(gpus))
	for i, g := range gpus {
		quoted[i] = fmt.Sprintf("%q", g)
	}
	all := "name in [" + strings.Join(quoted, ", ") + "]"
	if strings.TrimSpace(more) == "" {
		return all, nil
	}
	if _, err := query.Compile(clusterv1.Kind_KIND_GPU, more); err != nil {
		return "", fmt.Errorf("which gpu: %w", err)
	}
	return all + " && (" + more + "\n)", nil // it may end with a comment
}

// obtainFor does the same for the claim of an assignment.
func (k *Keeper) obtainFor(ctx context.Context, a *cardAssignment, gpus []string, more string, memory uint64) (gpu string, err error) {
	c := a.claim()
	c.CreatedUnixMs = k.Now().UnixMilli()
	if c.Expr, err = Among(gpus, more); err != nil {
		return "", err
	}
	if memory > 0 && a.Slice != nil {
		c.MinMemory = memory
	} else if memory > 0 {
		c.Expr += fmt.Sprintf(" && memory >= %d", memory)
	}
	k.mu.Lock()
	k.claiming[c.Id] = true
	k.mu.Unlock()
	defer func() {
		if err != nil {
			k.dropClaim(c.Id)
		}
	}()
	k.Cluster.Settle(ctx)
	res, err := k.Cluster.Claim(ctx, c)
	if err == nil && len(res.GetAssignments()) == 0 && whyNot(res.GetRejected(), k.Cluster.HostName(), gpus) == "" {
		k.Cluster.Known(ctx, gpus) // hostd was just started, and has not reported them yet
		res, err = k.Cluster.Claim(ctx, c)
	}
	if err != nil {
		return "", fmt.Errorf("vm %s: %w", a.Name, err)
	}
	if len(res.GetAssignments()) == 0 {
		why := cmp.Or(whyNot(res.GetRejected(), k.Cluster.HostName(), gpus), "the cluster does not know "+strings.Join(gpus, ", ")+" yet")
		return "", fmt.Errorf("vm %s: %w: %s", a.Name, ErrRefused, why)
	}
	id := res.GetAssignments()[0].GetGpu()
	return strings.TrimPrefix(id, k.Cluster.HostName()+"/"), nil
}

// dropClaim ends the protection of a new claim: if no assignment uses it, the cluster
// takes it back.
func (k *Keeper) dropClaim(claim string) {
	k.mu.Lock()
	delete(k.claiming, claim)
	k.mu.Unlock()
	k.Cluster.Kick()
}

// whyNot returns the cluster's reasons in one line; empty: it does not know the GPUs.
func whyNot(rejected []*clusterv1.Rejection, host string, gpus []string) string {
	var out []string
	for _, r := range rejected {
		if r.GetHost() != host {
			continue
		}
		name := strings.TrimPrefix(r.GetGpu(), host+"/")
		for _, g := range gpus {
			if name != "" && g != name {
				continue
			}
			for _, why := range r.GetReasons() {
				out = append(out, g+": "+why.GetMessage())
			}
		}
	}
	return strings.Join(out, "; ")
}

// outlive runs a change that goes on if its caller leaves.
func (k *Keeper) outlive(ctx context.Context, do func(ctx context.Context) error) error {
	k.mu.Lock()
	base := k.ctx
	k.mu.Unlock()
	done := make(chan error, 1)
	k.work.Go(func() { done <- do(base) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("it goes on without being watched: %w", ctx.Err())
	}
}
