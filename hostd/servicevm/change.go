package servicevm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/cards/steps"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
)

// Names of steps, as operators see them.
const (
	stepDeclare  = "declare"
	stepOffer    = "offer"
	stepWithdraw = "withdraw"
	stepEnd      = "end"
)

// Codes of reasons against a VM. They are part of the API.
const (
	reasonServes  = "serves"
	reasonStopped = "not_running"
	reasonAgent   = "agent"
	reasonOffer   = "offer"
	reasonUsed    = "in_use"
	reasonMany    = "too_many"
)

const betweenLooks = 200 * time.Millisecond

// alone marks a VM as being changed until end is called.
func (k *Keeper) alone(m vm.VM) (end func(), err error) {
	end, ok := k.busy.Begin(m.UUID)
	if !ok {
		return nil, reason.Errorf(reason.Busy, "whether VM %s serves others is being changed just now", m.Name).On("vm", m.Name)
	}
	return end, nil
}

// Serve declares a VM a service VM. With a GPU, it gets that card first. It goes on if the
// caller leaves.
func (k *Keeper) Serve(ctx context.Context, r *gpuctlv1.ServeRequest, report cards.Report) error {
	m, err := k.VMs.Find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	end, err := k.alone(m.VM)
	if err != nil {
		return err
	}
	defer end()
	c := &steps.Change{Machine: m.Name, GPU: r.GetGpu(), Report: report, Reasons: k.against(ctx, m)}
	c.Steps = []*gpuctlv1.PlannedStep{steps.Planned(stepDeclare, "record that the cards of "+m.Name+" serve other VMs and hosts", "it is not recorded any more")}
	attach := &gpuctlv1.AttachRequest{Machine: m.UUID, Gpu: r.GetGpu(), Persistent: r.GetPersistent(), AcceptCare: r.GetAcceptCare()}
	if r.GetGpu() != "" {
		plan := &gpuctlv1.AttachRequest{Machine: m.UUID, Gpu: r.GetGpu(), Persistent: r.GetPersistent(), AcceptCare: r.GetAcceptCare(), Plan: true}
		if err := k.Cards.Attach(ctx, plan, func(u *gpuctlv1.DeviceUpdate) {
			c.Steps, c.Reasons = append(c.Steps, u.GetPlan()...), append(c.Reasons, u.GetReasons()...)
		}); err != nil {
			return err
		}
	}
	c.Steps = append(c.Steps, steps.Planned(stepOffer, "wait until gpuguest there lends a card, which the inventory shows then", "what was done before is undone"))
	if done, err := c.Over(r.GetPlan(), "have vm "+m.Name+" serve others"); done {
		return err
	}
	return k.serve(context.WithoutCancel(ctx), c, m.VM, attach)
}

// against returns what is against a VM as a service VM.
func (k *Keeper) against(ctx context.Context, m vm.Info) []*gpuctlv1.Reason {
	k.mu.Lock()
	declared, many := k.servers[m.UUID] != nil, len(k.servers) >= mostVMs
	k.mu.Unlock()
	switch {
	case declared:
		return []*gpuctlv1.Reason{steps.Because(reasonServes, "VM %s is a service VM already, or is just ceasing to be one: gpuctl vms shows it", m.Name)}
	case many:
		return []*gpuctlv1.Reason{steps.Because(reasonMany, "this host has %d service VMs already", mostVMs)}
	case m.State != "running":
		return []*gpuctlv1.Reason{steps.Because(reasonStopped, "VM %s is %s: start it", m.Name, m.State)}
	}
	ctx, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	hello, err := k.Site.Hello(ctx, m.UUID)
	if err != nil {
		return []*gpuctlv1.Reason{steps.Because(reasonAgent, "the gpuguest of VM %s does not answer: %v", m.Name, err)}
	}
	if _, err := check(hello, k.Loopback()); err != nil {
		return []*gpuctlv1.Reason{steps.Because(reasonOffer, "VM %s cannot serve others: %v", m.Name, err)}
	}
	return nil
}

// serve does the steps. The declaration is first, so that nobody has the card without it.
func (k *Keeper) serve(ctx context.Context, c *steps.Change, m vm.VM, attach *gpuctlv1.AttachRequest) error {
	if err := c.Step(stepDeclare, func() error { return k.declare(m) }); err != nil {
		return err
	}
	got := false
	if attach.GetGpu() != "" {
		err := k.Cards.Attach(ctx, attach, func(u *gpuctlv1.DeviceUpdate) {
			if got = got || u.GetDone(); u.GetDone() {
				return // more steps follow
			}
			c.At++
			u.StepIndex, u.Steps = u.GetStepIndex()+1, uint32(len(c.Steps))
			c.Report(u)
		})
		if err != nil {
			return errors.Join(err, k.forget(m))
		}
		c.At = len(c.Steps) - 1
	}
	err := c.Step(stepOffer, func() error { return k.awaitOffer(ctx, m) })
	if err != nil {
		err = errors.Join(err, k.withdrawn(ctx, m))
		if got {
			err = errors.Join(err, k.Cards.Detach(ctx, &gpuctlv1.DetachRequest{Machine: m.UUID, Gpu: attach.GetGpu(), Persistent: attach.GetPersistent()}, func(*gpuctlv1.DeviceUpdate) {}))
		}
		return err
	}
	k.Log.Info("a VM serves others", "machine", m.Name)
	c.Done()
	return nil
}

// declare records a VM as a service VM. forget is its undo.
func (k *Keeper) declare(m vm.VM) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.servers[m.UUID] = &server{declared: &declared{UUID: m.UUID, Name: m.Name}, why: "VM " + m.Name + " was not asked yet"}
	if err := k.save(); err != nil {
		delete(k.servers, m.UUID)
		return fmt.Errorf("VM %s is not recorded: %w", m.Name, err)
	}
	return nil
}

func (k *Keeper) forget(m vm.VM) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.servers, m.UUID)
	return k.save()
}

// withdrawn is the undo of an offer that nobody was to have yet: the VM is forgotten, or, if
// somebody has got a part of a GPU of it, when that is over.
func (k *Keeper) withdrawn(ctx context.Context, m vm.VM) error {
	if err := k.setEnding(ctx, m.UUID, true); err != nil {
		return err
	}
	if len(k.Claims.GPUUsers(k.namesOf(m.UUID))) > 0 {
		return nil
	}
	err := k.forget(m)
	k.Claims.ServersChanged(ctx)
	return err
}

// awaitOffer waits until a card of the VM can be given to others.
func (k *Keeper) awaitOffer(ctx context.Context, m vm.VM) error {
	ctx, cancel := context.WithTimeout(ctx, k.Offer)
	defer cancel()
	for {
		if k.ask(ctx, m.UUID) {
			k.Claims.ServersChanged(ctx)
		}
		why := "it lends no card"
		for _, g := range k.GPUs() {
			if g.VM.UUID != m.UUID {
				continue
			}
			if g.Why == "" {
				return nil
			}
			why = g.Why
		}
		if wait.For(ctx, betweenLooks) != nil {
			return fmt.Errorf("VM %s has not lent a card within %v: %s", m.Name, k.Offer, why)
		}
	}
}

// EndServe ends that a VM serves others. It goes on if the caller leaves.
func (k *Keeper) EndServe(ctx context.Context, r *gpuctlv1.EndServeRequest, report cards.Report) error {
	m, err := k.find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	end, err := k.alone(m)
	if err != nil {
		return err
	}
	defer end()
	names := k.namesOf(m.UUID)
	users := k.Claims.GPUUsers(names)
	c := &steps.Change{Machine: m.Name, GPU: strings.Join(names, ","), Report: report}
	c.Steps = []*gpuctlv1.PlannedStep{steps.Planned(stepWithdraw, "give the GPUs of "+m.Name+" to nobody any more", "they are given to others again")}
	switch {
	case len(users) > 0 && r.GetUnconfirmed():
		c.Steps = append(c.Steps, steps.Planned(stepEnd, fmt.Sprintf("end what computes there for %s; it is lost", strings.Join(users, ", ")), ""))
	case len(users) > 0:
		c.Reasons = append(c.Reasons, steps.Because(reasonUsed, "%s have parts of the GPUs of VM %s: detach or end them, or lose what computes there with --unconfirmed", strings.Join(users, ", "), m.Name))
	}
	if done, err := c.Over(r.GetPlan(), "have vm "+m.Name+" serve others no more"); done {
		return err
	}
	return k.endServe(context.WithoutCancel(ctx), c, m, names, r.GetUnconfirmed())
}

// find returns a service VM by its name or UUID, also if libvirt has no such VM any more.
func (k *Keeper) find(ctx context.Context, ref string) (vm.VM, error) {
	k.mu.Lock()
	var found []vm.VM
	for _, s := range k.servers {
		if s.UUID == ref || s.Name == ref {
			found = append(found, vm.VM{UUID: s.UUID, Name: s.Name})
		}
	}
	k.mu.Unlock()
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		m, err := k.VMs.Find(ctx, ref)
		if err != nil {
			return vm.VM{}, err
		}
		if k.Of(m.UUID) != nil { // it has another name now
			return m.VM, nil
		}
		return vm.VM{}, reason.Errorf(reason.NotFound, "VM %s is no service VM", m.Name).On("vm", m.Name)
	}
	return vm.VM{}, reason.Errorf(reason.Ambiguous, "%d service VMs have that name: say the UUID", len(found)).On("vm", ref)
}

func (k *Keeper) endServe(ctx context.Context, c *steps.Change, m vm.VM, names []string, lose bool) error {
	err := c.Step(stepWithdraw, func() error {
		if err := k.setEnding(ctx, m.UUID, true); err != nil {
			return err
		}
		if users := k.Claims.GPUUsers(names); len(users) > 0 && !lose { // they have come meanwhile
			return errors.Join(reason.Errorf(reason.Busy, "VM %s: %s have got parts of its GPUs just now", m.Name, strings.Join(users, ", ")).On("vm", m.Name), k.setEnding(ctx, m.UUID, false))
		}
		return nil
	})
	if err != nil {
		return err
	}
	if users := k.Claims.GPUUsers(names); len(users) > 0 {
		if err := c.Step(stepEnd, func() error { return k.Claims.EndUsers(ctx, m.UUID, names, "VM "+m.Name+" serves nobody any more") }); err != nil {
			return fmt.Errorf("%w; its GPUs are given to nobody any more, and stay in the inventory until what computes there has ended, or the VM", err)
		}
	}
	if left := k.Claims.GPUUsers(names); len(left) > 0 {
		k.Log.Info("a VM that was a service VM is still used", "machine", m.Name, "by", left)
		c.Done() // Run forgets it when they have ended
		return nil
	}
	if err := k.forget(m); err != nil {
		return err
	}
	k.Claims.ServersChanged(ctx)
	c.Done()
	return nil
}

// setEnding records whether a VM ceases to be a service VM.
func (k *Keeper) setEnding(ctx context.Context, uuid string, ending bool) error {
	k.mu.Lock()
	s := k.servers[uuid]
	if s == nil {
		k.mu.Unlock()
		return nil
	}
	was := s.Ending
	s.Ending = ending
	err := k.save()
	if err != nil {
		s.Ending = was
	}
	k.mu.Unlock()
	if err != nil {
		return err
	}
	k.Claims.ServersChanged(ctx)
	return nil
}

// Users returns who has parts of the GPUs of a VM; none, if it is no service VM.
func (k *Keeper) Users(uuid string) []string {
	return slices.Clip(k.Claims.GPUUsers(k.namesOf(uuid)))
}
