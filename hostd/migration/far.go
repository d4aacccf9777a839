package migration

import (
	"context"
	"slices"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/migrate"
)

// cuda is the inventory's runtime of GPUs that NVIDIA's driver alone knows.
const cuda = "cuda"

// mostLenders is how many hosts' ports a VM is asked about.
const mostLenders = 64

// far adds the GPUs that hosts could lend to the VM while it moves, and whether the VM
// reaches them.
func (m *Manager) far(ctx context.Context, v *state.View, vm *migrate.VMFacts, live migrate.Live) {
	if v.Protocol() < state.ProtocolLive || vm.Agent == nil || vm.Agent.Protocol < migrate.LiveProtocol || live == migrate.LiveAuto && len(vm.Agent.Sessions) == 0 {
		return
	}
	var addresses []string
	for h := range v.Hosts() {
		address := h.GetLendAddress()
		if address == "" || len(addresses) >= mostLenders {
			continue
		}
		before := len(vm.Far)
		for g := range v.GPUsOfHost(h.GetName()) {
			if !g.GetPresent() || g.GetRuntimeKey() == "" || g.GetRuntime() == cuda || g.GetServer() != "" || slices.Contains(vm.GPUs, g.GetId()) {
				continue
			}
			vm.Far = append(vm.Far, m.farFacts(v, h, g))
		}
		if len(vm.Far) > before && !slices.Contains(addresses, address) {
			addresses = append(addresses, address)
		}
	}
	if len(addresses) == 0 {
		return
	}
	reached := m.reach(ctx, vm.UUID, addresses)
	for i := range vm.Far {
		f := &vm.Far[i]
		r := reached[v.Host(f.Host).GetLendAddress()]
		f.Error, f.Through, f.RTT = r.GetError(), r.GetThroughHost(), max(0, time.Duration(r.GetRttNs())) // the VM says it
	}
}

func (m *Manager) farFacts(v *state.View, h *clusterv1.Host, g *clusterv1.GPU) migrate.FarFacts {
	out := migrate.FarFacts{
		GPUFacts: migrate.GPUFacts{
			ID: g.GetId(), Model: g.GetModel(), Rank: g.GetRank(), Memory: g.GetLimits().GetGlobalMemory(), Limits: g.GetLimits(),
			Cordoned: g.GetCordonReason(), IsCordoned: g.GetCordoned(),
		},
		Host: h.GetName(), HostState: hostState(h), Link: v.Link(m.Node.HostName() + "/" + h.GetName()).GetRate(),
	}
	if !g.GetFree() {
		out.Holder = "a claim: gpuctl describe gpu " + g.GetId()
	}
	if g.GetHealth() == clusterv1.Health_HEALTH_FAILED {
		out.Health = g.GetHealthReason()
	}
	return out
}

// reach asks the VM, which is on this host, which addresses it reaches.
func (m *Manager) reach(ctx context.Context, uuid string, addresses []string) map[string]*gpuctlv1.Reached {
	ctx, cancel := context.WithTimeout(ctx, asking)
	defer cancel()
	out := map[string]*gpuctlv1.Reached{}
	var answers []*gpuctlv1.Reached
	c, err := m.Node.Site(m.Node.HostName())
	if err == nil {
		var res *connect.Response[gpuctlv1.ReachResponse]
		if res, err = c.Reach(ctx, connect.NewRequest(&gpuctlv1.SiteReachRequest{Uuid: uuid, Addresses: addresses})); err == nil {
			answers = res.Msg.GetReached()
		}
	}
	for i, a := range addresses {
		switch {
		case err != nil:
			out[a] = &gpuctlv1.Reached{Error: err.Error()}
		case i < len(answers):
			out[a] = answers[i]
		default:
			out[a] = &gpuctlv1.Reached{Error: "it does not say"}
		}
	}
	return out
}

// liveProto converts the part of a plan about the remote GPU.
func liveProto(l *migrate.LivePlan) *gpuctlv1.MachineLive {
	if l == nil {
		return nil
	}
	out := &gpuctlv1.MachineLive{Reasons: l.Reasons, OtherwiseStopNs: int64(l.Otherwise)}
	if l.Far != nil {
		out.Gpu, out.Model, out.RttNs, out.ThroughHost = l.Far.ID, l.Far.Model, int64(l.Far.RTT), l.Far.Through
	}
	for _, r := range l.Rejected {
		out.Rejected = append(out.Rejected, &gpuctlv1.MachineRejection{Host: r.Host, Gpu: r.GPU, Model: r.Model, Reasons: r.Reasons})
	}
	return out
}
