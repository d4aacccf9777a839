package sessions

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/migrate"
)

var _ endpoint.Lender = (*Host)(nil)

// forVM says for which VM a claim or a lease is, and which migration has made it. Claims for
// VMs are this host's own: wherever the VM is, the host with the GPU decides when it is free.
type forVM struct {
	UUID      string `json:"uuid"`
	Name      string `json:"name"`
	Migration string `json:"migration"` // empty: the claim is a lasting one

	// Of a lasting claim: where the VM is, and whether the claim outlives its stops.
	Host       string `json:"host,omitempty"`
	Persistent bool   `json:"persistent,omitempty"`
	lasting
}

// ofVM reports whether something is for a VM.
func (f *forVM) is(uuid string) bool { return f != nil && f.UUID == uuid }

// owner is the name by which the inventory shows the VM. The VM's name may be any text.
func (f *forVM) owner() string {
	name := f.Name
	if name == "" || len(name) > maxOwner-3 || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || r == ' ' }) {
		name = f.UUID
	}
	return "vm:" + name
}

// LendVM assigns a whole GPU of this host to a claim of a VM, whose sessions then compute on
// it over the network.
func (h *Host) LendVM(ctx context.Context, m vm.VM, gpu, id, migration string) error {
	if id == "" || len(id) > maxNameLength || m.UUID == "" || len(m.UUID) > maxNameLength || len(m.Name) > maxNameLength || len(migration) > maxNameLength {
		return fmt.Errorf("%w: a claim, VM or migration without a name, or with one of more than %d bytes", errInvalid, maxNameLength)
	}
	if !h.Ready() {
		return fmt.Errorf("claim %s: %w", id, reason.New(reason.NotReady, "this host has just been started"))
	}
	if h.LendAddress == nil || h.LendAddress() == "" {
		return fmt.Errorf("gpu %s: %w: this host lends nothing (cluster.lendListen)", gpu, errInvalid)
	}
	h.mu.Lock()
	p := h.placement([]string{gpu}) // a VM that moves borrows no GPU of another VM
	old := h.claims[id]
	switch {
	case p == nil || p.far():
		h.mu.Unlock()
		return reason.Detail(fmt.Errorf("%w: this host has no GPU %.300s", errNotFound, gpu)).On("gpu", gpu)
	case p[0].GetRuntimeName() == inventory.CUDA:
		h.mu.Unlock()
		return fmt.Errorf("gpu %s: %w: no OpenCL runtime serves it", gpu, errInvalid)
	case old != nil && (!old.VM.is(m.UUID) || !slices.Equal(old.GPUs, []string{gpu}) || old.Released):
		h.mu.Unlock()
		return fmt.Errorf("claim %s: %w: it is another one's, or is being ended", id, migrate.ErrTaken)
	case old != nil:
		h.mu.Unlock()
		return nil
	case h.claiming[id]:
		h.mu.Unlock()
		return fmt.Errorf("claim %s: %w: it is being made", id, migrate.ErrUnreachable) // for an earlier driver
	case len(h.claims) >= maxClaims:
		h.mu.Unlock()
		return fmt.Errorf("%w: %d claims exist already", errBusy, maxClaims)
	}
	h.claiming[id] = true
	h.mu.Unlock()
	c := &claim{ID: id, Count: 1, GPUs: []string{gpu}, Created: time.Now().UnixMilli(), VM: &forVM{UUID: m.UUID, Name: m.Name, Migration: migration}}
	c.Owner = c.VM.owner()
	h.Cluster.Known(ctx, c.GPUs)
	h.Cluster.Settle(ctx)
	err := h.Cluster.Acquire(ctx, c.forCluster(nil), c.GPUs, ledger.Whole)
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.Cluster.Kick() // if it has failed, this gives back what the claim was given all the same
	delete(h.claiming, id)
	if err == nil {
		err = h.ledger.Reserve(id, c.GPUs, ledger.Whole)
	}
	switch {
	case errors.Is(err, member.ErrTaken), errors.Is(err, ledger.ErrBusy):
		return fmt.Errorf("gpu %s: %w: %w", gpu, migrate.ErrTaken, err)
	case err != nil:
		return fmt.Errorf("gpu %s: %w", gpu, err)
	}
	h.claims[id] = c
	h.save()
	h.Log.Info("gpu lent to a vm", "claim", id, "gpu", gpu, "machine", m.Name, "migration", migration)
	return nil
}

// LeaseVM starts a far executor for one session of a VM, by a claim that LendVM has made.
func (h *Host) LeaseVM(ctx context.Context, m vm.VM, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error) {
	if !h.Ready() {
		return nil, fmt.Errorf("claim %.300s: %w", r.GetClaim(), errStarting)
	}
	h.mu.Lock()
	c := h.claims[r.GetClaim()]
	ok := c != nil && c.VM.is(m.UUID) && !c.Released
	var of *forVM
	if ok {
		of = c.VM
	}
	h.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("claim %.300s: %w: vm %s has no such claim here", r.GetClaim(), errNotFound, m.Name)
	}
	self := h.Cluster.Self()
	token, err := h.Cluster.TokenOf(ctx, r.GetClaim())
	if err != nil {
		return nil, err
	}
	r.Token = token
	return h.lend(ctx, self, r, of)
}

// EndLendVM ends the far executors of a VM's claim, and then the claim. Until they have
// ended, the GPU stays the claim's.
func (h *Host) EndLendVM(ctx context.Context, m vm.VM, id string) error {
	if !h.Ready() {
		return fmt.Errorf("claim %.300s: %w", id, errStarting)
	}
	h.mu.Lock()
	c := h.claims[id]
	if c != nil && !c.VM.is(m.UUID) {
		h.mu.Unlock()
		return fmt.Errorf("claim %s: %w: it is not one of vm %s", id, errDenied, m.Name)
	}
	if c == nil && h.claiming[id] { // it would be there after it was said to be gone
		h.mu.Unlock()
		return fmt.Errorf("claim %.300s: %w: it is being made", id, migrate.ErrUnreachable)
	}
	if c != nil && !c.Released {
		c.Released = true // no lease begins any more
		h.save()
	}
	leases := h.leases(func(l *lent) bool { return l.Claim == id && l.VM.is(m.UUID) })
	h.mu.Unlock()
	if err := h.dropLeases(ctx, leases, "the VM does not need it any more"); err != nil {
		return err
	}
	if c == nil {
		return nil
	}
	h.mu.Lock()
	if h.claims[id] == c {
		h.settle(c)
	}
	h.mu.Unlock()
	h.Cluster.Settle(ctx)
	return nil
}

// endVMs ends the claims of VMs whose migration has ended, lasting ones of VMs that have
// ended, and repeats what has failed.
func (h *Host) endVMs(ctx context.Context) {
	if h.Pending == nil || !h.Ready() {
		return
	}
	h.mu.Lock()
	var all []*claim
	for _, c := range h.claims {
		if c.VM != nil {
			all = append(all, c)
		}
	}
	h.mu.Unlock()
	silent := map[string]bool{} // hosts that did not answer just now
	for _, c := range all {
		h.mu.Lock()
		released, of := c.Released, c.VM
		h.mu.Unlock()
		switch {
		case released:
		case of.Migration == "" && h.lasts(ctx, c, silent), of.Migration != "" && h.Pending(ctx, of.Migration):
			continue
		}
		// Aside: a far executor that does not end keeps no other VM's claim from ending.
		if end, ok := h.ending.Begin(c.ID); ok {
			h.work.Go(func() {
				defer end()
				if err := h.EndLendVM(ctx, vm.VM{UUID: of.UUID, Name: of.Name}, c.ID); err != nil && ctx.Err() == nil {
					h.Log.Warn("a VM's claim that is over holds its GPU", "claim", c.ID, "machine", of.Name, "err", err)
				}
			})
		}
	}
}

// watchVMs looks after the claims of VMs until ctx ends. It may wait for other hosts.
func (h *Host) watchVMs(ctx context.Context) {
	for wait.For(ctx, holdersEvery) == nil {
		h.endVMs(ctx)
	}
}
