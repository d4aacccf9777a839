package sessions

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/hostd/servicevm"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/migrate"
)

// serviceRuntime is what the inventory shows as the runtime of GPUs of service VMs.
const serviceRuntime = "service-vm"

// mostServed is how many GPUs of service VMs a host reports: a report has room for so many of
// which much is said.
const mostServed = 64

// mostListed is how many leases a service VM may list. It has fewer: maxLent.
const mostListed = 2 * maxLent

// longestAnswer is how many bytes of a service VM's error are passed on.
const longestAnswer = 200

// Servers are the service VMs of this host. servicevm.Registry implements it. It is asked under
// h.mu. What changes it, servicevm.Keeper, calls the host without a lock.
type Servers interface {
	GPUs() []servicevm.GPU
	// Client returns the way to the gpuguest of a service VM.
	Client(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error)
	// Ended reports whether libvirt says that the VM is not on this host.
	Ended(ctx context.Context, uuid string) bool
}

var _ servicevm.Claims = (*Host)(nil)

// served returns the GPUs of service VMs by name, and enters them into the ledger. One whose
// name a GPU of the host has is left out. The caller holds h.mu.
func (h *Host) served() map[string]servicevm.GPU {
	if h.Servers == nil {
		return nil
	}
	out := map[string]servicevm.GPU{}
	for _, g := range h.Servers.GPUs() {
		if slices.ContainsFunc(h.gpus, func(own *gpuctlv1.GPU) bool { return own.GetId() == g.Name }) {
			h.Log.Warn("a GPU of a service VM is left out: a GPU of this host has its name", "gpu", g.Name, "machine", g.VM.Name)
			continue
		}
		h.ledger.SetGPU(g.Name, g.Target.GetLimits().GetGlobalMemory())
		h.serving[g.Name] = true
		out[g.Name] = g
	}
	return out
}

// counted returns the names of this host's GPUs in the ledger, with those of service VMs.
// The caller holds h.mu.
func (h *Host) counted() []string {
	out := slices.Collect(maps.Keys(h.serving))
	for _, g := range h.gpus {
		out = append(out, g.GetId())
	}
	slices.Sort(out)
	return out
}

// lendable returns GPUs that sessions of other hosts and of VMs may have: those of this host,
// for which server is empty, or those of one service VM. Sessions of this host itself get
// placement only. The caller holds h.mu.
func (h *Host) lendable(ids []string) (p placement, server string, err error) {
	if p = h.placement(ids); p != nil {
		if p.far() {
			p = nil
		}
		return p, "", nil
	}
	all := h.served()
	for _, id := range ids {
		g, ok := all[id]
		switch {
		case !ok:
			return nil, "", nil
		case g.Why != "" || !g.Present:
			return nil, "", notNow(id, cmp.Or(g.Why, "its VM does not run"))
		case server != "" && server != g.VM.UUID:
			return nil, "", fmt.Errorf("gpus %s: %w: they are of several VMs", strings.Join(ids, separator), errInvalid)
		case !h.clean[g.VM.UUID]:
			return nil, "", notNow(id, "what computes in VM "+printable(g.VM)+" is not known yet")
		}
		server = g.VM.UUID
		p = append(p, servedGPU(g))
	}
	return p, server, nil
}

// notNow is returned for a GPU of a service VM that can be had later, perhaps: the sessions of
// VMs wait for it.
func notNow(gpu, why string) error {
	return reason.Detail(fmt.Errorf("gpu %s: %w: %w", gpu, migrate.ErrUnreachable, reason.New(reason.NotReady, why))).On("gpu", gpu)
}

// servedGPU returns a GPU of a service VM in the form of the host's.
func servedGPU(g servicevm.GPU) *gpuctlv1.GPU {
	return &gpuctlv1.GPU{
		Id: g.Name, Model: g.Target.GetModel(), Type: "gpu", RuntimeName: serviceRuntime, Platform: "VM " + printable(g.VM),
		Limits: cloneLimits(g.Target.GetLimits()), Runtime: g.Target.GetRuntime(),
	}
}

// addressesOf returns where carriers reach a GPU of a service VM.
func (h *Host) addressesOf(gpu string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.served()[gpu].Addresses
}

// servedView returns the GPUs of service VMs, with their owners. The caller holds h.mu.
func (h *Host) servedView() []*gpuctlv1.GPU {
	all := h.served()
	var out []*gpuctlv1.GPU
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if all[name].Present {
			out = append(out, servedGPU(all[name]))
		}
	}
	h.rankServed(out)
	return h.viewOf(out)
}

// rankServed ranks GPUs of service VMs among the host's. The caller holds h.mu.
func (h *Host) rankServed(gpus []*gpuctlv1.GPU) {
	all := slices.Clone(gpus)
	for _, g := range h.gpus {
		all = append(all, &gpuctlv1.GPU{Model: g.GetModel(), PciAddress: g.GetPciAddress(), Limits: g.GetLimits()})
	}
	inventory.Rank(all, h.Config.Models)
}

// servedGPUs returns the GPUs of service VMs that run, for the cluster.
func (h *Host) servedGPUs() (out []*clusterv1.GPU) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := h.served()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		s := all[name]
		if !s.Present {
			continue
		}
		if len(out) == mostServed {
			h.Log.Warn("GPUs of service VMs are left out: there are too many", "most", mostServed)
			break
		}
		g := servedGPU(s)
		h.rankServed([]*gpuctlv1.GPU{g})
		one := &clusterv1.GPU{
			Name: name, Model: g.GetModel(), Type: g.GetType(), Limits: g.GetLimits(), Runtime: g.GetRuntimeName(), Platform: g.GetPlatform(), Rank: g.GetRank(),
			RuntimeKey: "vm:" + s.VM.UUID + ":" + runtimeKey(g), Kinds: []string{state.KindRemote}, Engines: []string{portableEngine},
			NumaNode: -1, Present: true, Health: clusterv1.Health_HEALTH_OK, Server: printable(s.VM), LendAddresses: s.Addresses,
		}
		if why := h.notServing(s); why != "" {
			one.Health, one.HealthReason = clusterv1.Health_HEALTH_FAILED, why
		}
		out = append(out, one)
	}
	return out
}

// notKnown is why a service VM gets no new leases.
const notKnown = "what computes in its VM is not known yet"

// notServing returns why a GPU of a service VM gets nothing new now; empty: it may. The caller
// holds h.mu.
func (h *Host) notServing(g servicevm.GPU) string {
	switch {
	case g.Why != "":
		return g.Why
	case !h.clean[g.VM.UUID]:
		return notKnown
	}
	return ""
}

// printable is a VM's name as the inventory shows it. The VM's name may be any text.
func printable(m vm.VM) string {
	return strings.TrimPrefix((&forVM{UUID: m.UUID, Name: m.Name}).owner(), "vm:")
}

// guestOf returns the gpuguest that has the far executors of a server: of a service VM, or of
// the host if it is empty.
func (h *Host) guestOf(ctx context.Context, server string) (gpuctlv1connect.GuestServiceClient, error) {
	if server == "" {
		return h.Guest, nil
	}
	if h.Servers == nil {
		return nil, errors.New("this host has no service VMs")
	}
	return h.Servers.Client(ctx, server)
}

// startFar starts the far executor of a lease. A service VM may answer what it likes.
func (h *Host) startFar(ctx context.Context, l *lent, req *gpuctlv1.LendRequest) (*gpuctlv1.LendResponse, error) {
	guest, err := h.guestOf(ctx, l.Server)
	if err != nil {
		return nil, notNow(l.GPUs[0], err.Error())
	}
	if l.Server != "" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, startTimeout)
		defer cancel()
	}
	res, err := guest.Lend(ctx, connect.NewRequest(req))
	switch {
	case err != nil && l.Server != "": // it may be restarting, or its card not ready yet
		return nil, notNow(l.GPUs[0], excerpt.Of(plain(err).Error(), longestAnswer))
	case err != nil:
		return nil, plain(err)
	case l.Server == "":
		return res.Msg, nil
	}
	if n, m := len(res.Msg.GetToken()), len(res.Msg.GetCertSha256()); n != remote.TokenSize || m != sha256.Size {
		return nil, fmt.Errorf("the service VM answers with a token of %d bytes and a hash of %d", n, m)
	}
	out := &gpuctlv1.LendResponse{Token: res.Msg.GetToken(), CertSha256: res.Msg.GetCertSha256(), Addresses: h.addressesOf(l.GPUs[0])}
	if len(out.Addresses) == 0 {
		return nil, notNow(l.GPUs[0], "the service VM has just ceased to lend")
	}
	return out, nil
}

// endFar ends the far executor of a lease. That of a service VM has ended with the VM, too, if
// libvirt says so.
func (h *Host) endFar(ctx context.Context, l *lent) error {
	guest, err := h.guestOf(ctx, l.Server)
	if err == nil {
		_, err = guest.EndLease(ctx, connect.NewRequest(&gpuctlv1.EndLeaseRequest{Lease: l.ID}))
	}
	if err != nil && l.Server != "" && h.Servers != nil && h.Servers.Ended(context.WithoutCancel(ctx), l.Server) {
		return nil
	}
	return err
}

// watchServers compares the leases in service VMs with what is known, until ctx ends.
func (h *Host) watchServers(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var checked busy.Set
	for wait.For(ctx, holdersEvery) == nil {
		if h.Servers == nil || !h.Ready() {
			continue
		}
		servers := map[string]bool{}
		for _, g := range h.Servers.GPUs() {
			servers[g.VM.UUID] = true
		}
		h.mu.Lock()
		for _, l := range h.lent {
			if l.Server != "" {
				servers[l.Server] = true
			}
		}
		for uuid := range h.clean {
			if !servers[uuid] {
				delete(h.clean, uuid)
			}
		}
		h.mu.Unlock()
		for uuid := range servers { // each by itself: one that is silent does not delay the others, nor their next look
			if end, ok := checked.Begin(uuid); ok {
				wg.Go(func() {
					defer end()
					h.checkServer(ctx, uuid)
				})
			}
		}
	}
}

// checkServer compares the leases of one service VM. It gets no new ones until what it
// computes for nobody has ended.
func (h *Host) checkServer(ctx context.Context, uuid string) {
	h.mu.Lock()
	known := map[string]*lent{}
	for id, l := range h.lent {
		if l.Server == uuid && h.lending[l.Claim] == 0 { // one that is being made may come after the list
			known[id] = l
		}
	}
	h.mu.Unlock()
	alive, err := h.listFar(ctx, uuid)
	if err != nil {
		h.setClean(ctx, uuid, false)
		if len(known) > 0 && h.Servers.Ended(ctx, uuid) {
			over := map[*lent]string{}
			for _, l := range known {
				over[l] = "the service VM has ended"
			}
			h.dropAside(over)
		}
		return
	}
	h.checkLeases(ctx, known, alive)
	var strays []string
	h.mu.Lock()
	for id := range alive {
		if l := h.lent[id]; known[id] == nil && (l == nil || l.Server != uuid) {
			strays = append(strays, id)
		}
	}
	h.mu.Unlock()
	clean := true
	call, cancel := context.WithTimeout(ctx, callTimeout) // for all: the VM says how many there are
	defer cancel()
	for _, id := range strays {
		guest, err := h.guestOf(call, uuid)
		if err == nil {
			_, err = guest.EndLease(call, connect.NewRequest(&gpuctlv1.EndLeaseRequest{Lease: id}))
		}
		clean = clean && err == nil
		h.Log.Warn("a far executor without a lease ends", "lease", id, "server", uuid, "err", err)
	}
	h.setClean(ctx, uuid, clean)
}

// listFar returns the leases that a service VM has, by id.
func (h *Host) listFar(ctx context.Context, uuid string) (map[string]*gpuctlv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	guest, err := h.guestOf(ctx, uuid)
	if err != nil {
		return nil, err
	}
	res, err := guest.ListLeases(ctx, connect.NewRequest(&gpuctlv1.ListLeasesRequest{}))
	if err != nil {
		return nil, err
	}
	if n := len(res.Msg.GetLeases()); n > mostListed {
		return nil, fmt.Errorf("service VM %s lists %d leases, more than %d", uuid, n, mostListed)
	}
	out := map[string]*gpuctlv1.Lease{}
	for _, l := range res.Msg.GetLeases() {
		if id := l.GetId(); id != "" && len(id) <= maxLeaseName {
			out[id] = l
		}
	}
	return out, nil
}

// setClean records whether nothing computes in a service VM that no lease is for, and tells the
// cluster of a change.
func (h *Host) setClean(ctx context.Context, uuid string, clean bool) {
	h.mu.Lock()
	was := h.clean[uuid]
	h.clean[uuid] = clean
	h.mu.Unlock()
	if was != clean {
		h.ServersChanged(ctx)
	}
}

// NotServing implements servicevm.Claims.
func (h *Host) NotServing(ctx context.Context, server string) string {
	clean := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.clean[server]
	}
	if !clean() {
		h.checkServer(ctx, server)
	}
	if !clean() {
		return notKnown
	}
	return ""
}

// GPUUsers implements servicevm.Claims.
func (h *Host) GPUUsers(gpus []string) (out []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, gpu := range gpus {
		for id := range h.ledger.Owners(gpu) {
			who := "claim " + id
			if c := h.claims[id]; c != nil && c.Owner != "" {
				who = c.Owner
			} else if host := h.lentTo(id); host != "" {
				who = "host " + host
			}
			out = append(out, who)
		}
	}
	for _, l := range h.lent { // one that the ledger has not, because it was restored before the GPU was known
		if slices.ContainsFunc(l.GPUs, func(g string) bool { return slices.Contains(gpus, g) }) && l.VM == nil {
			out = append(out, "host "+l.Host)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// EndUsers implements servicevm.Claims.
func (h *Host) EndUsers(ctx context.Context, server string, gpus []string, why string) error {
	h.mu.Lock()
	leases := h.leases(func(l *lent) bool { return l.Server == server })
	var claims []*claim
	for _, c := range h.claims {
		if c.VM != nil && slices.ContainsFunc(c.GPUs, func(g string) bool { return slices.Contains(gpus, g) }) {
			claims = append(claims, c)
		}
	}
	h.mu.Unlock()
	errs := []error{h.dropLeases(ctx, leases, why)}
	for _, c := range claims {
		errs = append(errs, h.EndLendVM(ctx, vm.VM{UUID: c.VM.UUID, Name: c.VM.Name}, c.ID))
	}
	return errors.Join(errs...)
}

// ServersChanged implements servicevm.Claims.
func (h *Host) ServersChanged(ctx context.Context) {
	h.mu.Lock()
	h.served()
	h.mu.Unlock()
	select {
	case <-h.discovered:
	default:
		return // Start reports
	}
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	if err := h.Cluster.Announce(ctx); err != nil {
		h.Log.Debug("service VMs not reported yet", "err", err)
	}
}
