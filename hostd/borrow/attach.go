package borrow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/hostd/cards/steps"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// Names of steps, as operators see them.
const (
	stepClaim    = "claim"
	stepTell     = "tell"
	stepHome     = "home"
	stepWithdraw = "withdraw"
	stepEnd      = "end"
)

const (
	tellFor      = 30 * time.Second // how long a VM may take to have its GPU
	mostReasons  = 16
	mostTried    = 64 // hosts' ports that a VM is asked about, and GPUs that are tried
	undoFor      = 2 * time.Minute
	homeFor      = 20 * time.Minute
	betweenTries = time.Second
)

// Codes of reasons against a GPU or a VM. They are part of the API.
const (
	reasonState     = "host_state"
	reasonLends     = "lends_nothing"
	reasonRuntime   = "no_runtime"
	reasonCordoned  = "cordoned"
	reasonHealth    = "health"
	reasonTaken     = "taken"
	reasonMemory    = "memory"
	reasonExpr      = "expr"
	reasonReached   = "not_reached"
	reasonAgent     = "agent"
	reasonAgentOld  = "agent_old"
	reasonStopped   = "not_running"
	reasonTransient = "transient"
	reasonHas       = "has_remote"
	reasonSessions  = "sessions"
	reasonNoVM      = "no_vm"
	reasonNoGPU     = "no_gpu"
)

// alone marks a VM as being changed until end is called.
func (k *Keeper) alone(m vm.VM) (end func(), err error) {
	end, ok := k.busy.Begin(m.UUID)
	if !ok {
		return nil, reason.Errorf(reason.Busy, "the remote GPU of VM %s is being changed just now", m.Name).On("vm", m.Name)
	}
	return end, nil
}

// Attach lends a GPU of a host to a VM of this host. It goes on if the caller leaves.
func (k *Keeper) Attach(ctx context.Context, r *gpuctlv1.AttachRemoteRequest, report cards.Report) error {
	m, err := k.VMs.Find(ctx, r.GetMachine())
	if err != nil {
		return err
	}
	end, err := k.alone(m.VM)
	if err != nil {
		return err
	}
	defer end()
	v, err := k.Node.Read(ctx)
	if err != nil {
		return err
	}
	c := &steps.Change{Machine: m.Name, Report: report, Reasons: k.against(ctx, v, m, r)}
	fit, through, rejected, err := k.choose(ctx, v, m, r)
	if err != nil {
		return err
	}
	c.GPU = r.GetGpu()
	if len(fit) > 0 {
		c.GPU = fit[0].GetId()
	} else if len(c.Reasons) == 0 {
		c.Reasons = append(c.Reasons, steps.Because(reasonNoGPU, "no GPU of the cluster can be lent to VM %s", m.Name))
		c.Reasons = append(c.Reasons, rejected...)
	}
	c.Steps = []*gpuctlv1.PlannedStep{steps.Planned(stepClaim, fmt.Sprintf("bind a claim of %s to %s of %s", m.Name, amount(r.GetMinMemory()), c.GPU), "the claim is released")}
	if m.Active() {
		c.Steps = append(c.Steps, steps.Planned(stepTell, fmt.Sprintf("tell the gpuguest of %s, whose new sessions begin there if it has no card%s", m.Name, way(through[c.GPU])), "it is told that it has none"))
	}
	if over, err := c.Over(r.GetPlan(), "lend a GPU to vm "+m.Name); over {
		return err
	}
	return k.attach(context.WithoutCancel(ctx), c, m, fit, r)
}

// way returns in words that a VM's network does not reach its GPU.
func way(throughHost bool) string {
	if throughHost {
		return "; its network does not reach the GPU, so that they connect through its host"
	}
	return ""
}

// amount returns in words how much of a GPU a claim has.
func amount(memory uint64) string {
	if memory == 0 {
		return "all"
	}
	return size.Format(memory)
}

// against returns what is against the VM itself.
func (k *Keeper) against(ctx context.Context, v *state.View, m vm.Info, r *gpuctlv1.AttachRemoteRequest) (out []*gpuctlv1.Reason) {
	if c := v.Claim(endpoint.LastingClaim(m.UUID)); c != nil {
		if l, ok := lentOf(v, c); ok {
			out = append(out, steps.Because(reasonHas, "VM %s has %s already: gpuctl detach %s --remote gives it back", m.Name, l.GPU, m.Name))
		} else {
			out = append(out, steps.Because(reasonHas, "VM %s is just giving back a remote GPU: try again in a moment", m.Name))
		}
	}
	if r.GetPersistent() && !m.Persistent {
		out = append(out, steps.Because(reasonTransient, "VM %s has no stored definition: leave out --persistent", m.Name))
	}
	if !m.Active() {
		if !r.GetPersistent() {
			out = append(out, steps.Because(reasonStopped, "VM %s is %s: start it, or lend it a GPU for all of its starts (--persistent)", m.Name, m.State))
		}
		return out
	}
	protocol, err := k.Site.AgentProtocol(ctx, m.UUID)
	switch {
	case err != nil:
		out = append(out, steps.Because(reasonAgent, "the gpuguest of VM %s does not answer: %v", m.Name, err))
	case protocol < endpoint.BorrowProtocol:
		out = append(out, steps.Because(reasonAgentOld, "gpuguest in VM %s speaks protocol %d, and a remote GPU takes %d: install a newer one there", m.Name, protocol, endpoint.BorrowProtocol))
	}
	return out
}

// choose returns the GPUs that can be lent to the VM, best first, which of them it reaches
// through its host only, and why others cannot be lent.
func (k *Keeper) choose(ctx context.Context, v *state.View, m vm.Info, r *gpuctlv1.AttachRemoteRequest) (fit []*clusterv1.GPU, through map[string]bool, rejected []*gpuctlv1.Reason, err error) {
	e, err := expr.Compile(r.GetExpr(), expr.GPU())
	if err != nil {
		return nil, nil, nil, reason.Errorf(reason.Invalid, "%w", err)
	}
	named := r.GetGpu()
	if named != "" && !strings.Contains(named, "/") {
		named = k.Node.HostName() + "/" + named
	}
	if named != "" && v.GPU(named) == nil {
		return nil, nil, nil, reason.Errorf(reason.NotFound, "there is no GPU %.300q", named).On("gpu", named).Do("gpuctl get gpus lists them")
	}
	say := func(reasons ...*gpuctlv1.Reason) {
		rejected = append(rejected, reasons[:min(len(reasons), max(0, mostReasons-len(rejected)))]...)
	}
	for h := range v.Hosts() {
		for g := range v.GPUsOfHost(h.GetName()) {
			if named != "" && g.GetId() != named {
				continue
			}
			if why := unfit(h, g, r.GetMinMemory()); len(why) > 0 {
				say(why...)
				continue
			}
			ok, err := e.Match(ctx, expr.OfGPU(inventory.OfCluster(g)))
			switch {
			case ctx.Err() != nil:
				return nil, nil, nil, ctx.Err()
			case err != nil:
				say(steps.Because(reasonExpr, "%s: %v", g.GetId(), err))
			case !ok:
				say(steps.Because(reasonExpr, "%s: %s is not true of it", g.GetId(), e))
			default:
				fit = append(fit, g)
			}
		}
	}
	sortFit(fit, r.GetMinMemory(), k.Node.HostName())
	if m.Active() {
		fit, through = k.reached(ctx, v, m, fit, say)
	}
	return fit[:min(len(fit), mostTried)], through, rejected, nil
}

// unfit returns why a GPU cannot be lent.
func unfit(h *clusterv1.Host, g *clusterv1.GPU, memory uint64) (out []*gpuctlv1.Reason) {
	add := func(when bool, code, format string, args ...any) {
		if when {
			out = append(out, steps.Because(code, format, args...))
		}
	}
	add(h.GetState() != clusterv1.HostState_HOST_STATE_READY, reasonState, "host %s is down, or is being drained", h.GetName())
	add(h.GetLendAddress() == "", reasonLends, "host %s lends nothing (cluster.lendListen)", h.GetName())
	add(!g.GetPresent() || g.GetRuntimeKey() == "" || g.GetRuntime() == inventory.CUDA, reasonRuntime, "no OpenCL runtime of its host serves %s", g.GetId())
	add(g.GetCordoned(), reasonCordoned, "%s is cordoned", g.GetId())
	add(g.GetHealth() == clusterv1.Health_HEALTH_FAILED, reasonHealth, "%s is not fit: %s", g.GetId(), g.GetHealthReason())
	if memory == 0 {
		add(!g.GetFree(), reasonTaken, "%s is in use, and is lent whole without --min-memory", g.GetId())
	} else {
		add(g.GetFreeMemory() < memory, reasonMemory, "%s has %s free, and %s are needed", g.GetId(), size.Format(g.GetFreeMemory()), size.Format(memory))
	}
	return out
}

// sortFit sorts the best GPU first: with a memory need the lowest model that suffices, and
// of these one that is shared already, otherwise the highest. The VM's own host comes first
// among equals.
func sortFit(all []*clusterv1.GPU, memory uint64, here string) {
	order := func(b bool) int {
		if b {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(all, func(a, b *clusterv1.GPU) int {
		rank := cmp.Compare(b.GetRank(), a.GetRank())
		if memory > 0 {
			rank = cmp.Or(cmp.Compare(a.GetRank(), b.GetRank()), cmp.Compare(order(!a.GetFree()), order(!b.GetFree())))
		}
		return cmp.Or(rank, cmp.Compare(order(a.GetHost() == here), order(b.GetHost() == here)), strings.Compare(a.GetId(), b.GetId()))
	})
}

// reached leaves out the GPUs of hosts whose port for carriers the VM does not reach. through
// has those that it reaches through its host only.
func (k *Keeper) reached(ctx context.Context, v *state.View, m vm.Info, all []*clusterv1.GPU, say func(...*gpuctlv1.Reason)) (out []*clusterv1.GPU, through map[string]bool) {
	var addresses []string
	for _, g := range all {
		for _, a := range reachedAt(v, g) {
			if !slices.Contains(addresses, a) && len(addresses) < mostTried {
				addresses = append(addresses, a)
			}
		}
	}
	if len(addresses) == 0 {
		return nil, nil
	}
	through = map[string]bool{}
	answers, err := k.Site.Reach(ctx, m.UUID, addresses)
	for _, g := range all {
		if err != nil {
			say(steps.Because(reasonReached, "VM %s does not say whether it reaches %s: %v", m.Name, lenderOf(g), err))
			continue
		}
		reached, straight, why := false, false, ""
		for _, a := range reachedAt(v, g) {
			if i := slices.Index(addresses, a); i >= 0 {
				ok := answers[i].GetError() == ""
				reached, straight, why = reached || ok, straight || ok && !answers[i].GetThroughHost(), answers[i].GetError()
			}
		}
		through[g.GetId()] = reached && !straight
		switch {
		case reached:
			out = append(out, g)
		case why != "":
			say(steps.Because(reasonReached, "VM %s does not reach the port for carriers of %s over its network: %s", m.Name, lenderOf(g), why))
		}
	}
	return out, through
}

// reachedAt returns the addresses of which carriers need one: of the service VM that owns the
// GPU, or of its host.
func reachedAt(v *state.View, g *clusterv1.GPU) []string {
	if g.GetServer() != "" {
		return g.GetLendAddresses()
	}
	return []string{v.Host(g.GetHost()).GetLendAddress()}
}

// lenderOf returns in words who has the port for a GPU's carriers.
func lenderOf(g *clusterv1.GPU) string {
	if g.GetServer() != "" {
		return "service VM " + g.GetServer()
	}
	return "host " + g.GetHost()
}

// attach binds the claim and tells the VM.
func (k *Keeper) attach(ctx context.Context, c *steps.Change, m vm.Info, fit []*clusterv1.GPU, r *gpuctlv1.AttachRemoteRequest) error {
	var l lent
	err := c.Step(stepClaim, func() error {
		var errs []error
		for _, g := range fit {
			l = lent{Lent: endpoint.Lent{GPU: g.GetId(), Claim: endpoint.LastingClaim(m.UUID)}, vm: m.VM}
			err := k.lend(ctx, l, r)
			if err == nil {
				c.GPU = g.GetId()
				return nil
			}
			errs = append(errs, err)
			if !errors.Is(err, migrate.ErrTaken) {
				return errors.Join(errors.Join(errs...), k.undo(ctx, l)) // it may have been done
			}
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return err
	}
	k.Log.Info("gpu attached to a vm over the network", "machine", m.Name, "gpu", l.GPU, "claim", l.Claim, "memory", r.GetMinMemory())
	k.Kick()
	if !m.Active() {
		c.Done()
		return nil
	}
	err = c.Step(stepTell, func() error { return k.told(ctx, l) })
	if err != nil {
		return errors.Join(err, k.undo(ctx, l))
	}
	c.Done()
	return nil
}

// lend has the host with the GPU bind the claim.
func (k *Keeper) lend(ctx context.Context, l lent, r *gpuctlv1.AttachRemoteRequest) error {
	ctx, cancel := context.WithTimeout(ctx, callHost)
	defer cancel()
	host := migrate.HostOf(l.GPU)
	site, err := k.Node.Site(host)
	if err != nil {
		return err
	}
	req := l.request()
	req.Msg.MinMemory, req.Msg.Persistent = r.GetMinMemory(), r.GetPersistent()
	if _, err = site.Lend(ctx, req); err == nil {
		return nil
	}
	var c *connect.Error
	if errors.As(err, &c) && connect.IsWireError(err) && reason.Is(err, reason.NoCapacity) {
		return fmt.Errorf("host %s: %w: %s", host, migrate.ErrTaken, c.Message())
	}
	return fmt.Errorf("host %s: %w", host, err)
}

// told waits until the VM has its GPU.
func (k *Keeper) told(ctx context.Context, l lent) error {
	ctx, cancel := context.WithTimeout(ctx, k.Tell)
	defer cancel()
	tick := time.NewTicker(betweenTries)
	defer tick.Stop()
	for {
		k.mu.Lock()
		s := k.served[l.vm.UUID]
		k.mu.Unlock()
		var ready <-chan struct{}
		if v := k.Node.View(); s != nil && v != nil { // it may still be told of a claim that is over
			if now, ok := lentOf(v, v.Claim(l.Claim)); ok && now.GPU == l.GPU && now.same(s.lent) {
				ready = s.ready
			}
		}
		select {
		case <-ready:
			return nil
		case <-tick.C:
			k.Kick()
		case <-ctx.Done():
			err := ctx.Err()
			if s != nil {
				err = errors.Join(err, s.why())
			}
			return fmt.Errorf("VM %s does not have it after %v: %w", l.vm.Name, k.Tell, err)
		}
	}
}

// undo ends a claim that could not be used, and repeats that for a while.
func (k *Keeper) undo(ctx context.Context, l lent) error {
	ctx, cancel := context.WithTimeout(ctx, undoFor)
	defer cancel()
	err := k.endLend(ctx, l)
	for err != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the claim may still be there (gpuctl detach %s --remote ends it): %w", l.vm.Name, err)
		case <-time.After(betweenTries):
			err = k.endLend(ctx, l)
		}
	}
	return nil
}

// endLend ends what computes for the VM, and its claim.
func (k *Keeper) endLend(ctx context.Context, l lent) error {
	ctx, cancel := context.WithTimeout(ctx, callHost)
	defer cancel()
	host := migrate.HostOf(l.GPU)
	site, err := k.Node.Site(host)
	if err != nil {
		return err
	}
	if _, err = site.EndLend(ctx, l.request()); err != nil {
		return fmt.Errorf("host %s: %w", host, err)
	}
	return nil
}
