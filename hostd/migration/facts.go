package migration

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// asking limits the time that a host may take for its facts.
const asking = 15 * time.Second

// plan collects the facts from all hosts and makes a plan by a state of the cluster.
func (m *Manager) plan(ctx context.Context, v *state.View, r *gpuctlv1.MachinePlanRequest, uuid string) (*migrate.Plan, *gpuctlv1.SiteMachineFacts, error) {
	if v == nil {
		return nil, nil, fmt.Errorf("this host is in no cluster: gpuctl cluster init, or join")
	}
	self, err := m.Node.Site(m.Node.HostName())
	if err != nil {
		return nil, nil, err
	}
	res, err := self.MachineFacts(ctx, connect.NewRequest(&gpuctlv1.SiteMachine{Uuid: uuid}))
	if err != nil {
		return nil, nil, err
	}
	facts := vmFacts(m.Node.HostName(), res.Msg)
	facts.Migration = m.moving(ctx, v, uuid)
	model := migrate.NewCostModel()
	for _, one := range past(v) {
		model.Learn(one)
	}
	hosts := m.hosts(ctx, v, res.Msg)
	if live := migrate.Live(r.GetLive()); live != migrate.LiveNever && len(facts.GPUs) > 0 {
		m.far(ctx, v, &facts, live)
	}
	want := migrate.Request{Verb: migrate.Verb(r.GetVerb()), To: r.GetTo(), Deadline: time.Duration(r.GetDeadlineMs()) * time.Millisecond, Cold: r.GetForceCold(), Live: migrate.Live(r.GetLive())}
	if r.GetWait() && want.To == "" && want.Verb == migrate.Migrate && len(facts.GPUs) > 0 {
		want.To = facts.GPUs[0]
	}
	return migrate.Make(want, facts, hosts, model), res.Msg, nil
}

// past returns the migrations that were completed, the oldest first.
func past(v *state.View) (out []*clusterv1.Migration) {
	for one := range v.Migrations() {
		if one.GetMachine() != nil && over(one) {
			out = append(out, one)
		}
	}
	slices.SortFunc(out, func(a, b *clusterv1.Migration) int { return int(a.GetEndedUnixMs() - b.GetEndedUnixMs()) })
	return out
}

func vmFacts(host string, f *gpuctlv1.SiteMachineFacts) migrate.VMFacts {
	out := migrate.VMFacts{
		Info: vm.Info{
			VM: vm.VM{UUID: f.GetUuid(), Name: f.GetName()}, State: f.GetState(), Type: f.GetType(), Memory: f.GetMemory(), Persistent: f.GetPersistent(),
		},
		Host: host, Passthrough: f.GetPassthrough(), OtherDevices: f.GetOtherDevices(), GPUs: f.GetGpus(), AgentError: f.GetAgentError(), Unlocked: f.GetUnlocked(), Serves: f.GetServes(),
		Stays: f.GetStays(), Snapshots: f.GetSnapshots(), Checkpoints: f.GetCheckpoints(),
	}
	for _, d := range f.GetDisks() {
		out.Disks = append(out.Disks, migrate.Disk{Path: d.GetPath(), ReadOnly: d.GetReadOnly(), Start: d.GetStart()})
	}
	for _, p := range f.GetParts() {
		out.Parts = append(out.Parts, migrate.PartFacts{GPU: p.GetGpu(), Memory: p.GetMemory(), Channels: p.GetChannels()})
	}
	if !f.GetAgent() {
		return out
	}
	out.Agent = endpoint.AgentFacts(f.GetHello(), f.GetSessions(), f.GetRefused())
	return out
}

// hosts asks all hosts at once for their facts.
func (m *Manager) hosts(ctx context.Context, v *state.View, f *gpuctlv1.SiteMachineFacts) []migrate.HostFacts {
	ctx, cancel := context.WithTimeout(ctx, asking)
	defer cancel()
	var all []migrate.HostFacts
	for h := range v.Hosts() {
		one := migrate.HostFacts{Name: h.GetName(), State: hostState(h), Message: h.GetMessage(), Most: m.Most}
		for r := range v.Migrations() {
			if r.GetMachine() != nil && !over(r) && (r.GetMachine().GetFromHost() == h.GetName() || r.GetMachine().GetToHost() == h.GetName()) {
				one.Migrations++
			}
		}
		all = append(all, one)
	}
	ids := make([][]*gpuctlv1.PCIIdentity, len(all))
	var wg sync.WaitGroup
	for i := range all {
		h := &all[i]
		if h.State == "down" {
			continue // the reason is known, and the host would not answer
		}
		wg.Go(func() {
			var err error
			if ids[i], err = m.host(ctx, v, h, f); err != nil {
				h.Error = err.Error()
			}
		})
	}
	wg.Wait()
	if f.GetAgent() {
		m.serves(ctx, f.GetUuid(), all, slices.Concat(ids...))
	}
	return all
}

// identity is a gpuctlv1.PCIIdentity that can be a map's key.
type identity struct{ vendor, device, subVendor, subDevice, class uint32 }

func identityOf(id *gpuctlv1.PCIIdentity) identity {
	return identity{id.GetVendorId(), id.GetDeviceId(), id.GetSubVendorId(), id.GetSubDeviceId(), id.GetClass()}
}

// serves asks the VM which of the cards it can use. ids are the cards' identities, in the
// same order. Each kind is asked about only once, because a cluster has many cards of few
// kinds.
func (m *Manager) serves(ctx context.Context, uuid string, hosts []migrate.HostFacts, ids []*gpuctlv1.PCIIdentity) {
	var kinds []*gpuctlv1.PCIIdentity
	kind := map[identity]int{}
	for _, id := range ids {
		if _, known := kind[identityOf(id)]; !known {
			kind[identityOf(id)] = len(kinds)
			kinds = append(kinds, id)
		}
	}
	var missing []string
	c, err := m.Node.Site(m.Node.HostName())
	if err == nil {
		var res *connect.Response[gpuctlv1.ServesResponse]
		res, err = c.Serves(ctx, connect.NewRequest(&gpuctlv1.SiteServesRequest{Uuid: uuid, Functions: kinds}))
		if err == nil {
			missing = res.Msg.GetMissing()
		}
	}
	if err == nil && len(missing) != len(kinds) {
		err = fmt.Errorf("it was asked of %d and answers of %d", len(kinds), len(missing))
	}
	at := 0
	for _, h := range hosts {
		for i := range h.GPUs {
			if err != nil {
				h.GPUs[i].GuestLacks = "its gpuguest does not say what is installed: " + err.Error()
				continue
			}
			h.GPUs[i].GuestLacks = missing[kind[identityOf(ids[at])]]
			at++
		}
	}
}

func hostState(h *clusterv1.Host) string {
	switch h.GetState() {
	case clusterv1.HostState_HOST_STATE_READY:
		return "ready"
	case clusterv1.HostState_HOST_STATE_DRAINING:
		return "draining"
	default:
		return "down"
	}
}

// host adds the facts of one host, and what the inventory knows about its cards. It
// returns the cards' identities.
func (m *Manager) host(ctx context.Context, v *state.View, h *migrate.HostFacts, f *gpuctlv1.SiteMachineFacts) (ids []*gpuctlv1.PCIIdentity, err error) {
	c, err := m.Node.Site(h.Name)
	if err != nil {
		return nil, err
	}
	res, err := c.HostFacts(ctx, connect.NewRequest(&gpuctlv1.SiteHostFactsRequest{Disks: f.GetDisks(), From: m.Node.HostName(), Cpu: f.GetCpu()}))
	if err != nil {
		return nil, err
	}
	h.Hypervisor, h.FreeMemory, h.Missing, h.Link, h.CPU = res.Msg.GetHypervisor(), res.Msg.GetFreeMemory(), res.Msg.GetMissing(), res.Msg.GetLink(), res.Msg.GetCpu()
	h.LockManager, h.LockManagerError = res.Msg.GetLockManager(), res.Msg.GetLockManagerError()
	for _, p := range res.Msg.GetPartRoom() {
		h.PartRoom = append(h.PartRoom, migrate.PartRoom{GPU: p.GetGpu(), Memory: p.GetMemory(), Channels: p.GetChannels(), Free: p.GetFree()})
	}
	h.Keep, h.Keeps = res.Msg.GetKeep(), res.Msg.GetKeeps()
	for _, card := range res.Msg.GetCards() {
		g := v.GPU(card.GetGpu())
		if g == nil {
			continue // the inventory does not have it yet
		}
		one := migrate.GPUFacts{
			ID: g.GetId(), Model: g.GetModel(), Rank: g.GetRank(), Memory: g.GetLimits().GetGlobalMemory(), Limits: g.GetLimits(),
			Holder: card.GetHolder(), Health: card.GetHealth(), Cordoned: g.GetCordonReason(), IsCordoned: g.GetCordoned(), Isolation: card.GetIsolation(),
		}
		if id := card.GetId(); id != nil {
			one.Chip = fmt.Sprintf("%04x:%04x", id.GetVendorId(), id.GetDeviceId())
		}
		if !g.GetFree() && one.Holder == "" {
			one.Holder = "a claim: gpuctl describe gpu " + g.GetId()
		}
		if one.Health == "" && (g.GetHealth() == clusterv1.Health_HEALTH_FAILED || !g.GetPresent()) {
			one.Health = g.GetHealthReason()
		}
		if g.GetRuntime() == "" {
			// Only a runtime in the VM knows these.
			one.Limits, one.Memory = nil, 0
		}
		h.GPUs, ids = append(h.GPUs, one), append(ids, card.GetId())
	}
	return ids, nil
}

func prediction(r migrate.Range) *gpuctlv1.Prediction {
	return &gpuctlv1.Prediction{LowNs: int64(r.Low), HighNs: int64(r.High), Measured: r.Measured}
}

// planProto converts a plan to the API's form.
func planProto(p *migrate.Plan) *gpuctlv1.MachinePlanResponse {
	out := &gpuctlv1.MachinePlanResponse{Machine: p.VM.Name, Host: p.VM.Host, Gpus: p.VM.GPUs, Reasons: p.Reasons}
	out.Away, out.Notes = p.Away, p.Notes
	if a := p.VM.Agent; a != nil {
		out.Sessions = uint32(len(a.Sessions))
		for _, s := range a.Sessions {
			out.GpuState += s.Memory
		}
	}
	if out.Cold = p.Cold; p.Cold {
		out.WarmReasons = p.Warm.Reasons
	}
	out.Live = liveProto(p.Live)
	for _, c := range p.Candidates {
		one := &gpuctlv1.MachineCandidate{
			Host: c.Host, Gpu: c.GPU.ID, Model: c.GPU.Model, PredictedNs: int64(c.Cost.Total), PredictedStopNs: int64(c.Cost.Stop), Bytes: c.Cost.Bytes,
			Total: prediction(c.Cost.TotalRange), Stop: prediction(c.Cost.StopRange),
		}
		for _, s := range c.Steps {
			one.Steps = append(one.Steps, &gpuctlv1.MachineStep{Name: s.Name, What: s.What, Undo: s.Undo, PredictedNs: int64(s.Predicted), Prediction: prediction(s.Range), Bytes: s.Bytes})
		}
		out.Candidates = append(out.Candidates, one)
	}
	for _, r := range p.Rejected {
		out.Rejected = append(out.Rejected, &gpuctlv1.MachineRejection{Host: r.Host, Gpu: r.GPU, Model: r.Model, Reasons: r.Reasons})
	}
	return out
}
