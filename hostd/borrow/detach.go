package borrow

import (
	"context"
	"fmt"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/cards/steps"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// Detach takes a remote GPU back from a VM. Sessions that compute there come home to a card
// of the VM first; without one, it is refused unless they may be lost. It goes on if the
// caller leaves.
func (k *Keeper) Detach(ctx context.Context, r *gpuctlv1.DetachRemoteRequest, report cards.Report) error {
	_, l, err := k.now(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	end, err := k.alone(l.vm)
	if err != nil {
		return err
	}
	defer end()
	// Only from now on nobody exchanges it: all lasting claims of a VM have one name.
	m, l, err := k.now(ctx, l.vm.UUID)
	if err != nil {
		return err
	}
	if g := r.GetGpu(); g != "" && g != l.GPU && k.Node.HostName()+"/"+g != l.GPU {
		return reason.Errorf(reason.NotFound, "VM %s has %s, and not %.300s", l.vm.Name, l.GPU, g).On("gpu", g)
	}
	c := &steps.Change{GPU: l.GPU, Machine: l.vm.Name, Report: report}
	sessions, reasons := k.leaves(ctx, m, l)
	if c.Reasons = reasons; r.GetUnconfirmed() {
		c.Reasons = nil
	}
	comeHome := len(sessions) > 0 && len(reasons) == 0
	if comeHome {
		c.Steps = append(c.Steps, steps.Planned(stepHome, fmt.Sprintf("swap %d sessions of %s to its card", len(sessions), l.vm.Name), ""))
	}
	c.Steps = append(c.Steps,
		steps.Planned(stepWithdraw, "tell the gpuguest of "+l.vm.Name+" that it has none, so that no session begins there", "it is told of it again"),
		steps.Planned(stepEnd, "end what computes for "+l.vm.Name+" on "+l.GPU+", and release the claim", ""))
	if over, err := c.Over(r.GetPlan(), "take "+l.GPU+" back from vm "+l.vm.Name); over {
		return err
	}
	return k.detach(context.WithoutCancel(ctx), c, m, l, sessions, comeHome, r.GetUnconfirmed())
}

// now returns a VM's claim by what is committed.
func (k *Keeper) now(ctx context.Context, ref string) (*vm.Info, lent, error) {
	v, err := k.Node.Read(ctx)
	if err != nil {
		return nil, lent{}, err
	}
	return k.find(ctx, v, ref)
}

// find returns a VM's claim. The VM is nil if this host has none of that name: it has ended,
// or its host does not answer.
func (k *Keeper) find(ctx context.Context, v *state.View, ref string) (*vm.Info, lent, error) {
	m, err := k.VMs.Find(ctx, ref)
	if err == nil {
		l, ok := lentOf(v, v.Claim(endpoint.LastingClaim(m.UUID)))
		if !ok {
			return nil, l, reason.Errorf(reason.NotFound, "VM %s has no remote GPU", m.Name).On("vm", m.Name)
		}
		l.vm = m.VM
		return &m, l, nil
	}
	var found []lent
	for c := range v.Claims() {
		if l, ok := lentOf(v, c); ok && (l.vm.UUID == ref || l.vm.Name == ref) {
			found = append(found, l)
		}
	}
	switch len(found) {
	case 0:
		return nil, lent{}, err
	case 1:
		return nil, found[0], nil
	}
	return nil, lent{}, reason.Errorf(reason.Ambiguous, "%d VMs of that name have remote GPUs: say the UUID", len(found)).On("vm", ref)
}

// leaves returns the sessions that compute on the GPU, and what is against taking it back.
func (k *Keeper) leaves(ctx context.Context, m *vm.Info, l lent) (sessions []string, reasons []*gpuctlv1.Reason) {
	switch {
	case m == nil:
		return nil, []*gpuctlv1.Reason{steps.Because(reasonNoVM, "VM %s is not found, so that nobody says whether it computes there: with --unconfirmed it is taken back all the same", l.vm.Name)}
	case !m.Active():
		return nil, nil
	}
	sessions, err := k.computing(ctx, l)
	if err != nil {
		return nil, []*gpuctlv1.Reason{steps.Because(reasonAgent, "the gpuguest of VM %s does not say whether sessions compute there: %v; with --unconfirmed they are lost", m.Name, err)}
	}
	if len(sessions) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, k.Tell)
	defer cancel()
	if has, err := k.Site.HasCard(ctx, m.UUID); err != nil || !has {
		reasons = append(reasons, steps.Because(reasonSessions, "%d sessions of VM %s compute there, and it has no card that they could go to: end them, give it one with gpuctl attach, or lose them with --unconfirmed", len(sessions), m.Name))
	}
	return sessions, reasons
}

// computing returns the sessions of the VM that compute on the GPU. A VM that does not answer
// must not keep the GPU by that.
func (k *Keeper) computing(ctx context.Context, l lent) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, k.Tell)
	defer cancel()
	return k.Site.Computing(ctx, l.vm.UUID, l.GPU)
}

// detach brings the sessions home, withdraws the GPU from the VM and ends the claim.
func (k *Keeper) detach(ctx context.Context, c *steps.Change, m *vm.Info, l lent, sessions []string, comeHome, lose bool) error {
	if comeHome {
		if err := c.Step(stepHome, func() error { return k.home(ctx, c, l, sessions) }); err != nil {
			return err
		}
	}
	release := k.hold(l.vm.UUID)
	defer release() // after the end there is no claim; after an error, the VM is told again
	err := c.Step(stepWithdraw, func() error {
		k.withdraw(l.vm.UUID)
		if lose || m == nil || !m.Active() {
			return nil
		}
		left, err := k.computing(ctx, l)
		if err == nil && len(left) > 0 && comeHome { // they have begun meanwhile
			if err = k.home(ctx, c, l, left); err == nil {
				left, err = k.computing(ctx, l)
			}
		}
		if err == nil && len(left) > 0 {
			err = reason.Errorf(reason.Busy, "%d sessions of VM %s compute there", len(left), l.vm.Name).On("vm", l.vm.Name)
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := c.Step(stepEnd, func() error { return k.endLend(ctx, l) }); err != nil {
		return err
	}
	k.Log.Info("gpu detached from a vm", "machine", l.vm.Name, "gpu", l.GPU, "claim", l.Claim)
	c.Done()
	return nil
}

// home moves sessions to a card of the VM.
func (k *Keeper) home(ctx context.Context, c *steps.Change, l lent, sessions []string) error {
	ctx, cancel := context.WithTimeout(ctx, homeFor)
	defer cancel()
	return k.Site.BringHome(ctx, l.vm, sessions, func(_, _ uint64, waits string) {
		if waits != "" {
			u := c.Update(stepHome, 0)
			u.Message = waits
			c.Report(u)
		}
	})
}

// hold keeps a VM from being told of its GPU until release is called.
func (k *Keeper) hold(uuid string) (release func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.held[uuid] = true
	return func() {
		k.mu.Lock()
		delete(k.held, uuid)
		k.mu.Unlock()
		k.Kick()
	}
}

// withdraw ends to tell a VM of its GPU, and returns when that is over.
func (k *Keeper) withdraw(uuid string) {
	k.mu.Lock()
	s := k.served[uuid]
	k.mu.Unlock()
	if s != nil {
		s.stop()
		<-s.ended
	}
}
