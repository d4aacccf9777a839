package sessions

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

var _ endpoint.Granter = (*Host)(nil)

const (
	lookEvery = 10 * time.Second // at the VM of a lasting claim
	vmGrace   = time.Minute      // how long the VM may be gone before the claim ends
	maxLentVM = 64               // leases of one claim
)

// VMs tells where the VMs of lasting claims are.
type VMs interface {
	// WhereOn returns a VM's state on a host. The error wraps endpoint.ErrNoHost if that is
	// not in the cluster.
	WhereOn(ctx context.Context, host string, m vm.VM) (migrate.Presence, error)
	// Moves reports whether a migration of the VM has not ended, or whether that is unknown.
	Moves(ctx context.Context, uuid string) bool
	// MovedTo returns where the last migration of the VM has taken it; empty: none is known.
	MovedTo(uuid string) (host string)
}

// lasting is what was seen last of a lasting claim's VM. It is not in the journal: after a
// restart, the VM is looked at anew.
type lasting struct {
	looked time.Time
	gone   time.Time // since when the VM is gone; zero: it is there
}

// labels are those of the claim in the cluster, by which the VM's host finds it.
func (f *forVM) labels() map[string]string {
	out := map[string]string{endpoint.LabelVM: f.UUID}
	if f.Name != "" && len(f.Name) <= maxOwner {
		out[endpoint.LabelName] = f.Name
	}
	return out
}

// GrantVM assigns a GPU of this host, or part of its memory, to a lasting claim of a VM.
func (h *Host) GrantVM(ctx context.Context, m vm.VM, g endpoint.Grant) error {
	switch {
	case g.Claim == "" || len(g.Claim) > maxNameLength || m.UUID == "" || len(m.UUID) > maxNameLength || len(m.Name) > maxNameLength || len(g.Host) > maxNameLength:
		return fmt.Errorf("%w: a claim or VM without a name, or with one of more than %d bytes", errInvalid, maxNameLength)
	case !h.Ready():
		return fmt.Errorf("claim %s: %w", g.Claim, errStarting)
	case h.LendAddress == nil || h.LendAddress() == "":
		return fmt.Errorf("gpu %s: %w: this host lends nothing (cluster.lendListen)", g.GPU, errInvalid)
	}
	c := &claim{
		ID: g.Claim, Count: 1, Min: g.MinMemory, GPUs: []string{g.GPU}, Created: time.Now().UnixMilli(),
		VM: &forVM{UUID: m.UUID, Name: m.Name, Host: g.Host, Persistent: g.Persistent},
	}
	c.Owner = c.VM.owner()
	if done, err := h.beginGrant(c); done || err != nil {
		return err
	}
	h.Cluster.Known(ctx, c.GPUs)
	h.Cluster.Settle(ctx)
	res, err := h.Cluster.Claim(ctx, c.forCluster(c.GPUs))
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.Cluster.Kick() // if it has failed, this gives back what the claim was given all the same
	delete(h.claiming, c.ID)
	return h.enterGrant(c, res, err)
}

// beginGrant marks the claim as being made. done means that it exists already.
func (h *Host) beginGrant(c *claim) (done bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p, _, lerr := h.lendable(c.GPUs)
	old := h.claims[c.ID]
	switch {
	case old == nil && lerr != nil:
		return false, fmt.Errorf("%w: %w", migrate.ErrTaken, lerr)
	case p == nil && lerr == nil:
		return false, reason.Detail(fmt.Errorf("%w: this host has no GPU %.300s", errNotFound, c.GPUs[0])).On("gpu", c.GPUs[0])
	case lerr == nil && p[0].GetRuntimeName() == inventory.CUDA:
		return false, fmt.Errorf("gpu %s: %w: no OpenCL runtime serves it", c.GPUs[0], errInvalid)
	case old != nil && (!old.VM.is(c.VM.UUID) || !slices.Equal(old.GPUs, c.GPUs) || old.Min != c.Min || old.VM.Persistent != c.VM.Persistent || old.Released):
		return false, fmt.Errorf("claim %s: %w: it is another one's, has other needs, or is being ended", c.ID, migrate.ErrTaken)
	case old != nil:
		return true, nil
	case h.claiming[c.ID]:
		return false, fmt.Errorf("claim %s: %w: it is being made", c.ID, migrate.ErrUnreachable)
	case len(h.claims) >= maxClaims:
		return false, fmt.Errorf("%w: %d claims exist already", errBusy, maxClaims)
	}
	h.claiming[c.ID] = true
	return false, nil
}

// enterGrant enters into the ledger what the cluster has given to the claim. The caller
// holds h.mu.
func (h *Host) enterGrant(c *claim, res *clusterv1.CreateClaimResponse, err error) error {
	gpu := c.GPUs[0]
	switch {
	case reason.Is(err, reason.Exists):
		return fmt.Errorf("claim %s: %w: the VM has another remote GPU, or gives it back just now: %w", c.ID, migrate.ErrTaken, err)
	case err != nil:
		return fmt.Errorf("gpu %s: %w", gpu, err)
	case len(res.GetAssignments()) == 0:
		var why []string
		for _, r := range res.GetRejected() {
			if r.GetGpu() == "" || localName(r.GetGpu()) == gpu {
				for _, x := range r.GetReasons() {
					why = append(why, x.GetMessage())
				}
			}
		}
		return fmt.Errorf("gpu %s: %w: %s", gpu, migrate.ErrTaken, strings.Join(why, "; "))
	case res.GetAssignments()[0].GetResidence() == clusterv1.Residence_RESIDENCE_RELEASING:
		return fmt.Errorf("claim %s: %w: it is being ended", c.ID, migrate.ErrTaken)
	}
	amount := res.GetAssignments()[0].GetMemory()
	if err := h.ledger.Reserve(c.ID, c.GPUs, amount); err != nil {
		return fmt.Errorf("gpu %s: %w: %w", gpu, migrate.ErrTaken, err)
	}
	c.Memory = amount
	h.claims[c.ID] = c
	h.save()
	h.Log.Info("gpu lent to a vm lastingly", "claim", c.ID, "gpu", gpu, "memory", amount, "machine", c.VM.Name, "host", c.VM.Host)
	return nil
}

// errStarting is returned for claims of VMs until this host knows which there are.
var errStarting = fmt.Errorf("%w: this host has just been started", migrate.ErrUnreachable)

// granted returns a lasting claim of the VM. The caller holds h.mu.
func (h *Host) granted(m vm.VM, id string) (*claim, error) {
	if !h.Ready() {
		return nil, fmt.Errorf("claim %.300s: %w", id, errStarting)
	}
	c := h.claims[id]
	if c == nil || !c.VM.is(m.UUID) || c.VM.Migration != "" || c.Released {
		return nil, reason.Detail(fmt.Errorf("claim %.300s: %w: VM %s has no such claim here", id, errNotFound, m.Name)).On("claim", id)
	}
	return c, nil
}

// VMHost returns where the VM of a lasting claim is, as this host knows it.
func (h *Host) VMHost(m vm.VM, id string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c, err := h.granted(m, id)
	if err != nil {
		return "", err
	}
	return c.VM.Host, nil
}

// FollowVM records that the VM of a lasting claim is on another host.
func (h *Host) FollowVM(m vm.VM, id, host string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	c, err := h.granted(m, id)
	if err != nil {
		return err
	}
	f := *c.VM // leases share it
	f.Host, f.Name, f.lasting = host, m.Name, lasting{}
	if len(f.Name) > maxNameLength {
		f.Name = c.VM.Name
	}
	c.VM = &f
	h.save()
	return nil
}

// EndLeasesVM ends all far executors of a VM's claim.
func (h *Host) EndLeasesVM(ctx context.Context, m vm.VM, id, why string) error {
	h.mu.Lock()
	leases := h.leases(func(l *lent) bool { return l.Claim == id && l.VM.is(m.UUID) })
	h.mu.Unlock()
	return h.dropLeases(ctx, leases, why)
}

// leases returns the leases for others that are of a kind. The caller holds h.mu.
func (h *Host) leases(of func(*lent) bool) (out []*lent) {
	for _, l := range h.lent {
		if of(l) {
			out = append(out, l)
		}
	}
	return out
}

// dropLeases ends several leases at once: what is silent takes as long as for one. If there is an
// error, some of them may be left.
func (h *Host) dropLeases(ctx context.Context, leases []*lent, why string) error {
	errs := make([]error, len(leases))
	var wg sync.WaitGroup
	for i, l := range leases {
		wg.Go(func() { errs[i] = h.dropLease(ctx, l, why) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// full returns an error if a VM's claim has as many leases as it may. Each of them is a
// process here, and the VM says how many sessions it has. The caller holds h.mu.
func (h *Host) full(l *lent) error {
	n := 0
	for _, x := range h.lent {
		if x.Claim == l.Claim {
			n++
		}
	}
	if n >= maxLentVM {
		return fmt.Errorf("lease %s: %w: %d sessions of VM %s compute by claim %s already", l.ID, errBusy, n, l.VM.Name, l.Claim)
	}
	return nil
}

// leftHost reports whether a VM is not on a host, or whether that host has left the cluster. One
// that does not answer is added to silent.
func (h *Host) leftHost(ctx context.Context, host string, f *forVM, silent map[string]bool) (gone, over bool) {
	if silent[host] {
		return false, false
	}
	p, err := h.VMs.WhereOn(ctx, host, vm.VM{UUID: f.UUID, Name: f.Name})
	over = errors.Is(err, endpoint.ErrNoHost)
	silent[host] = err != nil && !over
	return err == nil && (p == migrate.Absent || p == migrate.Stopped && !f.Persistent), over
}

// lasts reports whether a lasting claim goes on: the log has it, and its VM exists, or that
// is unknown. A VM that has stopped keeps a claim that is persistent. Hosts in silent are not
// asked, and those that do not answer are added.
func (h *Host) lasts(ctx context.Context, c *claim, silent map[string]bool) bool {
	h.mu.Lock()
	f := c.VM
	m, host, due := vm.VM{UUID: f.UUID, Name: f.Name}, f.Host, time.Since(f.looked) >= lookEvery
	h.mu.Unlock()
	if h.VMs == nil || !due {
		return true
	}
	call, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	if _, err := h.Cluster.TokenOf(call, c.ID); errors.Is(err, member.ErrNotAssigned) {
		h.Log.Info("the cluster has released a VM's claim", "claim", c.ID, "machine", m.Name)
		return false
	}
	gone, over := false, false
	if !silent[host] && !h.VMs.Moves(ctx, m.UUID) {
		gone, over = h.leftHost(ctx, host, f, silent)
		// Where a migration has taken it, nobody may have been able to say so yet.
		if next := h.VMs.MovedTo(f.UUID); (gone || over) && next != "" && next != host {
			host = next
			gone, over = h.leftHost(ctx, host, f, silent)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	f.looked = time.Now()
	switch {
	case c.VM != f: // it has moved meanwhile
		return true
	case over:
		h.Log.Info("the host of a VM with a remote GPU has left the cluster", "claim", c.ID, "machine", m.Name, "host", host)
		return false
	case !gone:
		f.gone = time.Time{}
		return true
	case f.gone.IsZero():
		f.gone = f.looked
		return true
	case f.looked.Sub(f.gone) < vmGrace:
		return true
	}
	h.Log.Info("a VM with a remote GPU has ended", "claim", c.ID, "machine", m.Name, "host", host)
	return false
}
