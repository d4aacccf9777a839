package sessions

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/hostd/inventory/discover"
	"github.com/gpuctl/gpuctl/hostd/inventory/hostinfo"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/hostd/mediated"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Cards knows which VMs have cards of this host. cards.Keeper implements it.
type Cards interface {
	// Profiles returns the profiles of a card's slices.
	Profiles(card *pci.Card) []*clusterv1.Profile
	// Annotate adds what is known of cards to the host's GPUs.
	Annotate(gpus []*clusterv1.GPU)
	// Knows and Uses are as in member.Host.
	Knows(claim string) bool
	Uses(claim, gpu string) bool
	// Held returns the claims of assigned cards, each with its GPU's name.
	Held() map[*clusterv1.Claim]string
}

// Mediated knows which VMs have parts of mediated GPUs. mediated.Keeper implements it.
type Mediated interface {
	Inventory() []*clusterv1.GPU
	// Knows and Uses are as in member.Host.
	Knows(claim string) bool
	Uses(claim, gpu string) bool
	Held() []mediated.Held
}

// Report is what the cluster is told of this host: its GPUs from all sources, and what uses
// them. A Host knows the sessions only. The keepers of cards and of mediated GPUs are made
// after it, as they ask it who uses a service VM's GPUs, and the Report is made after them.
type Report struct {
	host     *Host
	cards    Cards
	mediated Mediated
}

var _ member.Host = (*Report)(nil)

// NewReport returns the report of a host. c is nil if cards are not given to VMs, and m if
// there are no mediated GPUs.
func NewReport(h *Host, c Cards, m Mediated) *Report { return &Report{h, c, m} }

// gpusAsked limits the time that the other sources of GPUs (not OpenCL) may take.
const gpusAsked = 5 * time.Second

var errNotReady = errors.New("the GPUs of this host are not known yet")

// Report returns the properties of this host and its GPUs, for the cluster.
func (r *Report) Report(ctx context.Context) (*clusterv1.Host, []*clusterv1.GPU, error) {
	gpus, err := r.gpus(ctx)
	if err != nil {
		return nil, nil, err
	}
	info, err := hostinfo.Read(ctx, r.host.Root, hostinfo.Netlink{})
	if err != nil {
		r.host.Log.Debug("not all of the host is known", "err", err)
	}
	return info, gpus, nil
}

// gpus returns the GPUs of this host, of all sources.
func (r *Report) gpus(ctx context.Context) (gpus []*clusterv1.GPU, err error) {
	if r.cards == nil {
		gpus, err = r.host.merged(ctx, nil)
	} else if gpus, err = r.host.merged(ctx, r.cards.Profiles); err == nil {
		r.cards.Annotate(gpus)
	}
	if err != nil {
		return nil, err
	}
	if r.mediated != nil {
		gpus = append(gpus, r.mediated.Inventory()...)
	}
	for _, g := range r.host.servedGPUs() {
		if slices.ContainsFunc(gpus, func(own *clusterv1.GPU) bool { return own.GetName() == g.GetName() }) {
			r.host.Log.Warn("a GPU of a service VM is left out: another GPU has its name", "gpu", g.GetName())
			continue
		}
		gpus = append(gpus, g)
	}
	return gpus, nil
}

// Facts returns the properties of this host that change often.
func (r *Report) Facts(ctx context.Context) (*clusterv1.HostFacts, error) {
	h := r.host
	f := &clusterv1.HostFacts{UnixMs: time.Now().UnixMilli()}
	var err error
	if f.Load1, f.FreeMemory, err = hostinfo.Load(h.Root); err != nil {
		h.Log.Debug("load is not known", "err", err)
	}
	gpus, err := r.gpus(ctx)
	if err != nil {
		return nil, err
	}
	var answer *nvml.Response
	if h.NVML != nil {
		ctx, cancel := context.WithTimeout(ctx, gpusAsked)
		answer, _ = h.NVML.Facts(ctx) // the health of the GPUs contains the error
		cancel()
	}
	known := map[string]*clusterv1.GPUFacts{}
	for _, g := range discover.Facts(gpus, answer) {
		known[localName(g.GetGpu())] = g
	}
	if err := h.Resync(ctx); err != nil {
		h.Log.Debug("sessions are as last seen", "err", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, g := range gpus {
		facts := known[g.GetName()]
		if facts == nil {
			facts = &clusterv1.GPUFacts{}
		}
		facts.Gpu, facts.Health, facts.HealthReason = g.GetName(), g.GetHealth(), g.GetHealthReason()
		var used uint64
		for _, s := range h.sessions {
			if !h.onGPU(s.Session) || !slices.Contains(splitIDs(s.GetTarget().GetGpu()), g.GetName()) {
				continue
			}
			used += s.GetUsage().GetMemory()
			facts.Sessions = append(facts.Sessions, &clusterv1.SessionFacts{
				Session: s.GetId(), Pid: s.GetPid(), Command: s.GetCommand(), Memory: s.GetUsage().GetMemory(), Launches: s.GetUsage().GetLaunches(),
				Owner: s.GetOwner(), Weight: s.GetWeight(), Share: s.GetShare(),
			})
		}
		if facts.UsedMemory == nil {
			facts.UsedMemory = &used
		}
		slices.SortFunc(facts.Sessions, func(a, b *clusterv1.SessionFacts) int { return strings.Compare(a.GetSession(), b.GetSession()) })
		f.Gpus = append(f.Gpus, facts)
	}
	return f, nil
}

// Knows reports whether a claim that this host has made still exists.
func (r *Report) Knows(id string) bool {
	return r.cards != nil && r.cards.Knows(id) || r.mediated != nil && r.mediated.Knows(id) || r.host.Knows(id)
}

// Uses reports whether a claim uses a GPU, has part of it reserved, or is getting one.
func (r *Report) Uses(id, gpu string) bool {
	return r.cards != nil && r.cards.Uses(id, gpu) || r.mediated != nil && r.mediated.Uses(id, gpu) || r.host.Uses(id, gpu)
}

// Holdings returns which GPUs this host's claims have, for the cluster's inventory.
func (r *Report) Holdings() (out []member.Holding) {
	if r.cards != nil {
		for c, gpu := range r.cards.Held() {
			out = append(out, member.Holding{Claim: c, GPUs: []string{gpu}})
		}
	}
	if r.mediated != nil {
		for _, held := range r.mediated.Held() {
			out = append(out, member.Holding{Claim: held.Claim, GPUs: []string{held.GPU}, Amount: held.Memory})
		}
	}
	return append(out, r.host.Holdings()...)
}

// Sessions returns the sessions in their present state.
func (r *Report) Sessions() []*clusterv1.Session { return r.host.Sessions() }

// Ready reports whether the answers of Uses, Knows and Holdings are complete.
func (r *Report) Ready() bool { return r.host.Ready() }
