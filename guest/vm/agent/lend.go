package agent

import (
	"context"
	"fmt"
	"strings"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Lender has the leases by which the VM's cards serve sessions of other VMs and hosts.
// guest/lease implements it.
type Lender interface {
	Leases() []*gpuctlv1.Lease
	// Addresses returns where carriers reach the VM, as HOST:PORT.
	Addresses() []string
}

// BeginLend is called before a lease of a runtime is made, and end afterwards. It returns an
// error unless a card of the VM that is ready has this runtime and no session of the VM's
// own uses it. Until end, the card is not released.
func (a *Agent) BeginLend(ctx context.Context, rt *gpuctlv1.Runtime) (end func(), err error) {
	at, target, err := a.lendable(rt)
	if err != nil {
		return nil, err
	}
	end = func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.lending[at]--; a.lending[at] <= 0 {
			delete(a.lending, at)
		}
	}
	sessions, err := a.sessions.List(ctx)
	if err == nil {
		err = ownSession(sessions, target, at)
	}
	if err != nil {
		end()
		return nil, fmt.Errorf("lend %s: %w", at, err)
	}
	return end, nil
}

// lendable finds the device of a runtime, and marks it as one on which a lease is being made.
func (a *Agent) lendable(rt *gpuctlv1.Runtime) (pci.Address, *gpuctlv1.Target, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for at, d := range a.devices {
		if d.ready() && sameRuntime(d.target.GetRuntime(), rt) {
			a.lending[at]++
			return at, d.target, nil // a device's target is replaced, not changed
		}
	}
	return pci.Address{}, nil, fmt.Errorf("lend a card with the runtime %.200q: %w that is ready and has it", rt.GetLibrary(), ErrNoDevice)
}

// ownSession returns an error if a session of the VM's own uses the function. One that is
// being started does not: it gets no card of a VM that lends.
func ownSession(sessions []*gpuctlv1.Session, target *gpuctlv1.Target, at pci.Address) error {
	for _, s := range sessions {
		if s.Target != nil && runs(s) && serves(s.Target, target, at) {
			return fmt.Errorf("%w by session %s of the VM itself", ErrInUse, s.Id)
		}
	}
	return nil
}

// markLends marks the devices that may be lent.
func (a *Agent) markLends(ctx context.Context, devices []*gpuctlv1.GuestDevice) {
	sessions, err := a.sessions.List(ctx)
	for _, d := range devices {
		if !d.Ready || d.Target.GetRuntime().GetLibrary() == "" {
			continue
		}
		at, aerr := pci.ParseAddress(d.Address)
		switch {
		case err != nil:
			d.Message = fmt.Sprintf("it is not lent: the VM's sessions are not known: %v", err)
		case aerr != nil:
			d.Message = aerr.Error()
		default:
			if own := ownSession(sessions, d.Target, at); own != nil {
				d.Message = "it is not lent: " + own.Error()
				continue
			}
			d.Lends = true
		}
	}
}

// leasesOn returns in words the leases on a function. A lease whose runtime no device has
// any more may be on any of them.
func (a *Agent) leasesOn(at pci.Address, target *gpuctlv1.Target) (users []string, err error) {
	if a.cfg.Lender == nil {
		return nil, nil
	}
	a.mu.Lock()
	making := a.lending[at] > 0
	var others []*gpuctlv1.Runtime
	for other, d := range a.devices {
		if other != at && d.target != nil {
			others = append(others, d.target.GetRuntime())
		}
	}
	a.mu.Unlock()
	if making {
		return nil, fmt.Errorf("%s: %w: %w; try again", at, ErrInUse, errLending)
	}
	for _, l := range a.cfg.Lender.Leases() {
		if l.State == gpuctlv1.LeaseState_LEASE_STATE_ENDED {
			continue
		}
		elsewhere := false
		for _, rt := range others {
			elsewhere = elsewhere || sameRuntime(l.Runtime, rt)
		}
		if sameRuntime(l.Runtime, target.GetRuntime()) || !elsewhere {
			users = append(users, "lease "+strings.TrimSpace(l.Id)+" of another VM or host")
		}
	}
	return users, nil
}
