package cards

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Report hears of every moment of a change.
type Report func(*gpuctlv1.DeviceUpdate)

// change is one operation on one card. It owns the card until end.
type change struct {
	k      *Keeper
	hold   hold
	card   *pci.Card
	steps  []*gpuctlv1.PlannedStep
	at     int
	report Report
}

// step does one named step within the time that a step may take.
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
		Gpu: c.hold.GPU, Machine: c.hold.machine(), Step: name, StepIndex: uint32(c.at), Steps: uint32(max(c.at, len(c.steps))), TookNs: int64(took),
	}
}

// enter records a phase before what it stands for is done.
func (c *change) enter(p phase) error {
	c.hold.Phase = p
	return c.k.put(c.hold)
}

// take makes the card one that a VM can get.
func (c *change) take(ctx context.Context) error {
	if !c.hold.bound() {
		return nil
	}
	if err := c.enter(taking); err != nil {
		return err
	}
	return c.step(ctx, stepTake, func(ctx context.Context) error {
		return c.k.Binder.Take(ctx, c.hold.Functions, c.k.Hypervisor.Driver())
	})
}

// reset brings the card to a known state; if nothing does, it is quarantined.
func (c *change) reset(ctx context.Context) error {
	if !c.hold.bound() {
		return nil // the card's driver sees to it
	}
	return c.step(ctx, stepReset, func(ctx context.Context) error {
		card, err := c.rescan()
		if err == nil {
			var method string
			method, err = c.k.Resetter.Reset(ctx, card)
			c.k.noteReset(c.hold.Card, method, err)
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, errGone) {
			return errors.Join(err, c.quarantine(err.Error()))
		}
		return err
	})
}

// ready takes the card, and brings it to a known state, for its VM.
func (c *change) ready(ctx context.Context) error {
	if err := c.take(ctx); err != nil {
		return err
	}
	if err := c.reset(ctx); err != nil {
		return err
	}
	return c.enter(ready)
}

// noteReset remembers how a card was reset; it is recorded with what comes next.
func (k *Keeper) noteReset(card pci.Address, method string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if delete(k.resets, card); err == nil {
		k.resets[card] = method
	}
}

// rescan reads the card as it is now: its driver has changed.
func (c *change) rescan() (*pci.Card, error) {
	cards, err := c.k.PCI.Scan()
	if err != nil {
		return nil, err
	}
	for _, card := range cards {
		if card.Address == c.hold.Card && c.hold.Slice == nil {
			return card, nil
		} else if card.Address == c.hold.Card && len(c.hold.Functions) > 0 {
			return part(card, c.hold.Functions[0])
		}
	}
	if c.hold.Slice != nil {
		return nil, fmt.Errorf("slice %s of card %s: %w", c.hold.Slice.ID, c.hold.Card, errGone)
	}
	return nil, fmt.Errorf("card %s: it is not on the bus any more", c.hold.Card)
}

var errQuarantined = errors.New("quarantined")

// quarantine keeps the card from everybody. Its claim ends, its health tells.
func (c *change) quarantine(why string) error {
	c.hold.Phase, c.hold.Message = quarantined, why
	c.hold.Claim, c.hold.UUID, c.hold.Name, c.hold.Starting = "", "", "", false
	err := c.k.put(c.hold)
	c.k.Cluster.Kick()
	c.k.Log.Error("card quarantined", "gpu", c.hold.GPU, "why", why)
	c.k.Event(c.hold.GPU, "Quarantined", why)
	return errors.Join(fmt.Errorf("card %s: %w; gpuctl reset %s tries again", c.hold.Card, errQuarantined, c.hold.GPU), err)
}

// attach gives the card to its running VM. What libvirt answers is noted, what
// the hypervisor says counts.
func (c *change) attach(ctx context.Context) error {
	cut := c.hold.Phase == attaching // an attach before this one
	if err := c.enter(attaching); err != nil {
		return err
	}
	err := c.step(ctx, stepAttach, func(ctx context.Context) error {
		for _, f := range c.hold.Functions {
			if cut {
				if there, err := c.mend(ctx, f); err != nil {
					return fmt.Errorf("function %s: %w", f, err)
				} else if there {
					continue
				}
			}
			if err := c.plug(ctx, f); err != nil {
				// libvirt refuses what it believes to be there since an earlier detach.
				if there, mending := c.mend(ctx, f); mending != nil || !there {
					return fmt.Errorf("function %s: %w", f, err)
				}
				c.k.Log.Warn("an attach failed, but the VM has the function", "function", f, "machine", c.hold.machine(), "err", err)
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
	c.k.Event(c.hold.GPU, "Attached", "VM "+c.hold.machine()+" has "+c.hold.what())
	return nil
}

// verify waits until the hypervisor says that the VM has all functions, or
// that nobody has any.
func (c *change) verify(ctx context.Context, want bool) error {
	ctx, cancel := context.WithTimeout(ctx, c.k.Verify)
	defer cancel()
	for {
		said := "it does not answer"
		owners, err := c.k.owners(ctx, &c.hold)
		if err == nil {
			if said = contradicts(owners, c.hold.Functions, c.hold.UUID, want); said == "" {
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

// contradicts says what in the hypervisor's list is not as it should be.
func contradicts(owners map[pci.Address]Domain, functions []pci.Address, uuid string, want bool) string {
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

// detach takes the card out of its running VM, the main function last.
func (c *change) detach(ctx context.Context) error {
	cut := c.hold.Phase == detaching || c.hold.Message != "" // a detach before this one, perhaps
	if err := c.enter(detaching); err != nil {
		return err
	}
	return c.step(ctx, stepDetach, func(ctx context.Context) error {
		var errs []error
		for i := len(c.hold.Functions) - 1; i >= 0; i-- {
			f := c.hold.Functions[i]
			there, err := true, error(nil)
			if cut {
				there, err = c.mend(ctx, f)
			}
			if err == nil && there {
				err = c.unplug(ctx, f)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("function %s: %w", f, err))
				break
			}
		}
		if err := c.verify(ctx, false); err != nil {
			return errors.Join(append(errs, err)...)
		}
		return nil // whatever libvirt said
	})
}

// mend brings the hypervisor, libvirt and the VM to agree on whether the VM has
// a function, and reports whether it has. A libvirtd that died in a detach leaves
// the VM without it, and the hypervisor or itself in the belief that it is
// there. Asked for another detach libvirt would fail, and never be right again:
// its libxl driver frees what it goes on using. So the VM gets back what libvirt
// believes it to have.
func (c *change) mend(ctx context.Context, f pci.Address) (there bool, err error) {
	owners, err := c.k.owners(ctx, &c.hold)
	if err != nil {
		return false, err
	}
	there = owners[f].UUID == c.hold.UUID
	if c.hold.mediated() {
		return there, nil
	}
	uuid := c.hold.UUID
	// Without an agent the hypervisor is believed.
	if there && c.hold.Phase == detaching && c.parted(ctx, f) {
		c.k.Log.Warn("a detach has ended half-way: the hypervisor lists what the VM has parted with", "function", f, "machine", c.hold.machine())
		if err := c.k.Hypervisor.Expel(ctx, uuid, f); err != nil {
			return false, err
		}
		there = false
	}
	if there {
		return true, nil
	}
	listed, err := c.k.Machines.Listed(ctx, uuid, f)
	if err != nil || !listed {
		return false, err
	}
	c.k.Log.Warn("libvirt lists what the VM has not got: it gets it back", "function", f, "machine", c.hold.machine())
	if err := c.k.Hypervisor.Readmit(ctx, uuid, f); err != nil || c.hold.Phase != detaching {
		return true, err
	}
	return true, c.letGo(ctx, f)
}

// parted says that the VM's agent answers, and has not got a function.
func (c *change) parted(ctx context.Context, f pci.Address) bool {
	if c.k.Guests == nil {
		return false
	}
	has, err := c.k.Guests.Has(ctx, c.hold.UUID, f)
	return err == nil && !has
}

// letGo has the VM let go of a function that it has just been given. Its kernel
// does not answer an unplug while it is still taking the function up.
func (c *change) letGo(ctx context.Context, f pci.Address) error {
	waiting, cancel := context.WithTimeout(ctx, c.k.Verify)
	defer cancel()
	for c.parted(waiting, f) {
		select {
		case <-waiting.Done():
			return fmt.Errorf("the VM does not see what it got back: %w", waiting.Err())
		case <-time.After(c.k.Verify / 50):
		}
	}
	if c.k.Guests == nil || c.k.Guests.Answers(ctx, c.hold.UUID) != nil {
		return nil // there is nobody to ask, as before the first detach
	}
	return c.k.Guests.LetGo(ctx, c.hold.UUID, f)
}

// giveBack makes the card free again: reset and returned to dom0.
func (c *change) giveBack(ctx context.Context) error {
	if err := c.enter(resetting); err != nil {
		return err
	}
	if err := c.reset(ctx); err != nil && !errors.Is(err, errGone) {
		return err
	}
	return c.release(ctx)
}

// release returns the card and ends its claim.
func (c *change) release(ctx context.Context) error {
	if err := c.enter(returning); err != nil {
		return err
	}
	if c.hold.Slice != nil {
		err := c.step(ctx, stepReturn, c.untake)
		if err == nil {
			err = c.step(ctx, stepUncut, c.uncut)
		}
		if err != nil {
			c.hold.Message = err.Error()
			return errors.Join(err, c.k.put(c.hold))
		}
	} else if !c.k.Park {
		if err := c.step(ctx, stepReturn, func(ctx context.Context) error { return c.k.Binder.Return(ctx, c.hold.Functions) }); err != nil {
			c.hold.Message = err.Error()
			return errors.Join(err, c.k.put(c.hold))
		}
	}
	if err := c.k.remove(&c.hold); err != nil {
		return fmt.Errorf("card %s: %w", c.hold.Card, err)
	}
	said := ""
	if c.hold.Slice != nil {
		said = c.hold.label()
	}
	c.k.Event(c.hold.GPU, "Released", said)
	c.k.Log.Info("card is free", "gpu", c.hold.label(), "card", c.hold.Card)
	return nil
}

// unwind takes back what a failed change has done. Where the VM has got the
// card all the same, it keeps it.
func (c *change) unwind(ctx context.Context, cause error) error {
	if errors.Is(cause, errQuarantined) {
		return cause
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*c.k.Step)
	defer cancel()
	owners, err := c.k.owners(ctx, &c.hold)
	if err != nil {
		return fmt.Errorf("%w (not undone yet: the hypervisor does not say who has it: %w)", cause, err)
	}
	if said := contradicts(owners, c.hold.Functions, c.hold.UUID, false); said != "" {
		c.hold.Message = fmt.Sprintf("an attach failed half-way (%v); %s", cause, said)
		return errors.Join(cause, c.enter(attached))
	}
	c.report(&gpuctlv1.DeviceUpdate{Gpu: c.hold.GPU, Machine: c.hold.machine(), Message: "undoing: " + cause.Error()})
	undo := c.release
	if c.hold.Phase == attaching { // the VM may have touched it
		undo = c.giveBack
	}
	if err := undo(ctx); err != nil {
		return fmt.Errorf("%w; and it could not be undone: %w", cause, err)
	}
	return cause
}

// obtain has the cluster bind a claim for a VM to one of some cards.
func (k *Keeper) obtain(ctx context.Context, m Machine, gpus []string, more string, memory uint64) (claim, gpu string, err error) {
	claim = "vm-" + random.Hex(6)
	gpu, err = k.obtainNamed(ctx, claim, m, gpus, more, memory)
	if err != nil {
		return "", "", err
	}
	return claim, gpu, nil
}

// obtainNamed is obtain for a claim that has its name already.
func (k *Keeper) obtainNamed(ctx context.Context, claim string, m Machine, gpus []string, more string, memory uint64) (gpu string, err error) {
	return k.obtainFor(ctx, &hold{Claim: claim, UUID: m.UUID, Name: m.Name}, gpus, more, memory)
}

// obtainFor has the cluster bind the claim of what is to be held.
func (k *Keeper) obtainFor(ctx context.Context, h *hold, gpus []string, more string, memory uint64) (gpu string, err error) {
	quoted := make([]string, len(gpus))
	for i, g := range gpus {
		quoted[i] = fmt.Sprintf("%q", g)
	}
	c := h.claim()
	c.CreatedUnixMs = k.Now().UnixMilli()
	c.Expr = "name in [" + strings.Join(quoted, ", ") + "]"
	if more != "" {
		c.Expr += " && (" + more + ")"
	}
	if memory > 0 && h.Slice != nil {
		c.MinMemory = memory
	} else if memory > 0 {
		c.Expr += fmt.Sprintf(" && memory >= %d", memory)
	}
	k.mu.Lock()
	k.claiming[c.Id] = true
	k.mu.Unlock()
	defer func() {
		if err != nil {
			k.forgo(c.Id)
		}
	}()
	k.Cluster.Settle(ctx)
	res, err := k.Cluster.Claim(ctx, c)
	if err != nil {
		return "", fmt.Errorf("vm %s: %w", h.Name, err)
	}
	if len(res.GetAssignments()) == 0 {
		return "", fmt.Errorf("vm %s: %w: %s", h.Name, ErrRefused, whyNot(res.GetRejected(), k.Cluster.HostName(), gpus))
	}
	id := res.GetAssignments()[0].GetGpu()
	return strings.TrimPrefix(id, k.Cluster.HostName()+"/"), nil
}

// forgo lets the cluster take a claim back that no hold stands for.
func (k *Keeper) forgo(claim string) {
	k.mu.Lock()
	delete(k.claiming, claim)
	k.mu.Unlock()
	k.Cluster.Kick()
}

// whyNot puts the cluster's reasons into one line.
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
	if len(out) == 0 {
		return "the cluster does not know " + strings.Join(gpus, ", ") + " yet"
	}
	return strings.Join(out, "; ")
}

// outlive runs a change that goes on when its caller leaves.
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
