package servicevm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	reasonMoves   = "migration_running"
)

const (
	betweenLooks = 200 * time.Millisecond
	offerFor     = time.Minute // how long a VM may take to lend its first card
)

// VMs finds VMs of this host by name or UUID.
type VMs interface {
	Find(ctx context.Context, ref string) (vm.Info, error)
}

// Cards gives cards to VMs, and takes them back.
type Cards interface {
	Attach(ctx context.Context, r *gpuctlv1.AttachRequest, report cards.Report) error
	Detach(ctx context.Context, r *gpuctlv1.DetachRequest, report cards.Report) error
}

// ServiceConfig has what a Service depends on.
type ServiceConfig struct {
	*Keeper
	VMs   VMs
	Cards Cards
	Offer time.Duration // how long a VM may take to lend its first card; 0: a minute
	// Leaving returns the migration of a VM that has not ended; empty: none. If one is just being begun,
	// there is an error.
	Leaving func(ctx context.Context, uuid string) (migration string, err error)
}

// Service does what operators ask: it has VMs of this host serve others, and ends that. It is
// safe for concurrent use.
type Service struct{ ServiceConfig }

// NewService returns a Service.
func NewService(c ServiceConfig) *Service {
	c.Offer = cmp.Or(c.Offer, offerFor)
	return &Service{c}
}

// alone marks a VM as being changed until end is called.
func (sv *Service) alone(m vm.VM) (end func(), err error) {
	end, ok := sv.busy.Begin(m.UUID)
	if !ok {
		return nil, reason.Errorf(reason.Busy, "whether VM %s serves others is being changed just now", m.Name).On("vm", m.Name)
	}
	return end, nil
}

// Serve declares a VM a service VM. With a GPU, it gets that card first. It goes on if the
// caller leaves.
func (sv *Service) Serve(ctx context.Context, r *gpuctlv1.ServeRequest, report cards.Report) error {
	m, err := sv.VMs.Find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	end, err := sv.alone(m.VM)
	if err != nil {
		return err
	}
	defer end()
	c := &steps.Change{Machine: m.Name, GPU: r.GetGpu(), Report: report, Reasons: sv.against(ctx, m)}
	c.Steps = []*gpuctlv1.PlannedStep{steps.Planned(stepDeclare, "record that the cards of "+m.Name+" serve other VMs and hosts", "it is not recorded any more")}
	attach := &gpuctlv1.AttachRequest{Machine: m.UUID, Gpu: r.GetGpu(), Persistent: r.GetPersistent(), AcceptCare: r.GetAcceptCare()}
	if r.GetGpu() != "" {
		plan := &gpuctlv1.AttachRequest{Machine: m.UUID, Gpu: r.GetGpu(), Persistent: r.GetPersistent(), AcceptCare: r.GetAcceptCare(), Plan: true}
		if err := sv.Cards.Attach(ctx, plan, func(u *gpuctlv1.DeviceUpdate) {
			c.Steps, c.Reasons = append(c.Steps, u.GetPlan()...), append(c.Reasons, u.GetReasons()...)
		}); err != nil {
			return err
		}
	}
	c.Steps = append(c.Steps, steps.Planned(stepOffer, "wait until gpuguest there lends a card, which the inventory shows then", "what was done before is undone"))
	if done, err := c.Over(r.GetPlan(), "have vm "+m.Name+" serve others"); done {
		return err
	}
	return sv.serve(context.WithoutCancel(ctx), c, m.VM, attach)
}

// against returns what is against a VM as a service VM.
func (sv *Service) against(ctx context.Context, m vm.Info) []*gpuctlv1.Reason {
	sv.mu.Lock()
	declared, many := sv.servers[m.UUID] != nil, len(sv.servers) >= mostVMs
	sv.mu.Unlock()
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
	hello, err := sv.site.Hello(ctx, m.UUID)
	if err != nil {
		return []*gpuctlv1.Reason{steps.Because(reasonAgent, "the gpuguest of VM %s does not answer: %v", m.Name, err)}
	}
	if _, err := check(hello, sv.Loopback()); err != nil {
		return []*gpuctlv1.Reason{steps.Because(reasonOffer, "VM %s cannot serve others: %v", m.Name, err)}
	}
	if err := sv.stays(ctx, m.VM); err != nil {
		return []*gpuctlv1.Reason{steps.Because(reasonMoves, "%v", err)}
	}
	return nil
}

// stays returns an error if a migration takes the VM away, and its cards from those that it would serve.
func (sv *Service) stays(ctx context.Context, m vm.VM) error {
	id, err := sv.Leaving(ctx, m.UUID)
	switch {
	case err != nil:
		return fmt.Errorf("VM %s: %w", m.Name, err)
	case id == "":
		return nil
	}
	return fmt.Errorf("migration %s of VM %s has not ended: gpuctl migrations watch %s shows it", id, m.Name, id)
}

// serve does the steps. The declaration is first, so that nobody has the card without it.
func (sv *Service) serve(ctx context.Context, c *steps.Change, m vm.VM, attach *gpuctlv1.AttachRequest) error {
	err := c.Step(stepDeclare, func() error {
		if err := sv.declare(m); err != nil {
			return err
		}
		// One that begins from now on finds the declaration.
		if err := sv.stays(ctx, m); err != nil {
			return errors.Join(err, sv.withdrawn(ctx, m))
		}
		return nil
	})
	if err != nil {
		return err
	}
	got := false
	if attach.GetGpu() != "" {
		err := sv.Cards.Attach(ctx, attach, func(u *gpuctlv1.DeviceUpdate) {
			if got = got || u.GetDone(); u.GetDone() {
				return // more steps follow
			}
			c.At++
			u.StepIndex, u.Steps = u.GetStepIndex()+1, uint32(len(c.Steps))
			c.Report(u)
		})
		if err != nil { // others may have got parts of cards that the VM had before
			return errors.Join(err, sv.withdrawn(ctx, m))
		}
		c.At = len(c.Steps) - 1
	}
	err = c.Step(stepOffer, func() error { return sv.awaitOffer(ctx, m) })
	if err != nil {
		err = errors.Join(err, sv.withdrawn(ctx, m))
		if got {
			err = errors.Join(err, sv.Cards.Detach(ctx, &gpuctlv1.DetachRequest{Machine: m.UUID, Gpu: attach.GetGpu(), Persistent: attach.GetPersistent()}, func(*gpuctlv1.DeviceUpdate) {}))
		}
		return err
	}
	sv.Log.Info("a VM serves others", "machine", m.Name)
	c.Done()
	return nil
}

// declare records a VM as a service VM. forget is its undo.
func (sv *Service) declare(m vm.VM) error {
	sv.mu.Lock()
	defer sv.mu.Unlock()
	sv.servers[m.UUID] = &server{declared: &declared{UUID: m.UUID, Name: m.Name}, why: "VM " + m.Name + " was not asked yet"}
	if err := sv.save(); err != nil {
		delete(sv.servers, m.UUID)
		return fmt.Errorf("VM %s is not recorded: %w", m.Name, err)
	}
	return nil
}

func (sv *Service) forget(m vm.VM) error {
	sv.mu.Lock()
	defer sv.mu.Unlock()
	delete(sv.servers, m.UUID)
	return sv.save()
}

// withdrawn is the undo of an offer that nobody was to have yet: the VM is forgotten, or, if
// somebody has got a part of a GPU of it, when that is over.
func (sv *Service) withdrawn(ctx context.Context, m vm.VM) error {
	if err := sv.setEnding(ctx, m.UUID, true); err != nil {
		return err
	}
	if len(sv.Claims.GPUUsers(sv.namesOf(m.UUID))) > 0 {
		return nil
	}
	err := sv.forget(m)
	sv.Claims.ServersChanged(ctx)
	return err
}

// awaitOffer waits until a card of the VM can be given to others.
func (sv *Service) awaitOffer(ctx context.Context, m vm.VM) error {
	ctx, cancel := context.WithTimeout(ctx, sv.Offer)
	defer cancel()
	for {
		if sv.ask(ctx, m.UUID) {
			sv.Claims.ServersChanged(ctx)
		}
		why := "it lends no card"
		for _, g := range sv.GPUs() {
			if g.VM.UUID != m.UUID {
				continue
			}
			why = cmp.Or(g.Why, sv.Claims.NotServing(ctx, m.UUID))
			if why == "" {
				return nil
			}
		}
		if wait.For(ctx, betweenLooks) != nil {
			return fmt.Errorf("VM %s has not lent a card within %v: %s", m.Name, sv.Offer, why)
		}
	}
}

// EndServe ends that a VM serves others. It goes on if the caller leaves.
func (sv *Service) EndServe(ctx context.Context, r *gpuctlv1.EndServeRequest, report cards.Report) error {
	m, err := sv.find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	end, err := sv.alone(m)
	if err != nil {
		return err
	}
	defer end()
	names := sv.namesOf(m.UUID)
	users := sv.Claims.GPUUsers(names)
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
	return sv.endServe(context.WithoutCancel(ctx), c, m, names, r.GetUnconfirmed())
}

// find returns a service VM by its name or UUID, also if libvirt has no such VM any more.
func (sv *Service) find(ctx context.Context, ref string) (vm.VM, error) {
	sv.mu.Lock()
	var found []vm.VM
	for _, s := range sv.servers {
		if s.UUID == ref || s.Name == ref {
			found = append(found, vm.VM{UUID: s.UUID, Name: s.Name})
		}
	}
	sv.mu.Unlock()
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		m, err := sv.VMs.Find(ctx, ref)
		if err != nil {
			return vm.VM{}, err
		}
		if sv.Of(m.UUID) != nil { // it has another name now
			return m.VM, nil
		}
		return vm.VM{}, reason.Errorf(reason.NotFound, "VM %s is no service VM", m.Name).On("vm", m.Name)
	}
	return vm.VM{}, reason.Errorf(reason.Ambiguous, "%d service VMs have that name: say the UUID", len(found)).On("vm", ref)
}

func (sv *Service) endServe(ctx context.Context, c *steps.Change, m vm.VM, names []string, lose bool) error {
	err := c.Step(stepWithdraw, func() error {
		if err := sv.setEnding(ctx, m.UUID, true); err != nil {
			return err
		}
		if users := sv.Claims.GPUUsers(names); len(users) > 0 && !lose { // they have come meanwhile
			return errors.Join(reason.Errorf(reason.Busy, "VM %s: %s have got parts of its GPUs just now", m.Name, strings.Join(users, ", ")).On("vm", m.Name), sv.setEnding(ctx, m.UUID, false))
		}
		return nil
	})
	if err != nil {
		return err
	}
	if users := sv.Claims.GPUUsers(names); len(users) > 0 {
		if err := c.Step(stepEnd, func() error { return sv.Claims.EndUsers(ctx, m.UUID, names, "VM "+m.Name+" serves nobody any more") }); err != nil {
			return fmt.Errorf("%w; its GPUs are given to nobody any more, and stay in the inventory until what computes there has ended, or the VM", err)
		}
	}
	if left := sv.Claims.GPUUsers(names); len(left) > 0 {
		sv.Log.Info("a VM that was a service VM is still used", "machine", m.Name, "by", left)
		c.Done() // Run forgets it when they have ended
		return nil
	}
	if err := sv.forget(m); err != nil {
		return err
	}
	sv.Claims.ServersChanged(ctx)
	c.Done()
	return nil
}

// setEnding records whether a VM ceases to be a service VM.
func (sv *Service) setEnding(ctx context.Context, uuid string, ending bool) error {
	sv.mu.Lock()
	s := sv.servers[uuid]
	if s == nil {
		sv.mu.Unlock()
		return nil
	}
	was := s.Ending
	s.Ending = ending
	err := sv.save()
	if err != nil {
		s.Ending = was
	}
	sv.mu.Unlock()
	if err != nil {
		return err
	}
	sv.Claims.ServersChanged(ctx)
	return nil
}
