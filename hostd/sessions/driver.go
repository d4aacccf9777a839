package sessions

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Names of the engines of sessions. A session of an older gpuguest has none, and is portable.
const (
	portableEngine = "portable"
	driverEngine   = "driver"
)

// NVML answers what NVIDIA's driver knows of the GPUs.
type NVML interface {
	// List returns all properties of all GPUs, Facts what changes often.
	List(ctx context.Context) (*nvml.Response, error)
	Facts(ctx context.Context) (*nvml.Response, error)
}

// withDriver adds the GPUs of NVIDIA's driver, if it has answered, to those of OpenCL.
func (h *Host) withDriver(gpus []*gpuctlv1.GPU, answer *nvml.Response) ([]*gpuctlv1.GPU, []string) {
	cards, err := h.PCI.Cards()
	if err != nil {
		h.Log.Debug("pci devices not scanned", "err", err)
	}
	return inventory.WithDriver(gpus, answer, cards, h.Config.Models)
}

// askDriver asks NVML once, while the runtimes are probed. nil: there is no driver.
func (h *Host) askDriver(ctx context.Context) <-chan *nvml.Response {
	out := make(chan *nvml.Response, 1)
	go func() {
		defer close(out)
		if h.NVML == nil {
			return
		}
		answer, err := h.NVML.List(ctx)
		if err != nil {
			h.Log.Debug("no gpu of nvidia's driver", "err", err)
			return
		}
		out <- answer
	}()
	return out
}

// driver returns what the engine driver needs of the GPUs. It returns nil if it can't use
// all of them, or if the claim does not have all of each: what a CUDA program does there
// is not limited.
func (p placement) driver(amount uint64) []*gpuctlv1.DriverGPU {
	if amount != ledger.Whole || p.far() {
		return nil
	}
	var out []*gpuctlv1.DriverGPU
	for _, g := range p {
		if g.GetDriverGpu() == nil {
			return nil
		}
		out = append(out, proto.CloneOf(g.GetDriverGpu()))
	}
	return out
}

// forEngine keeps the GPUs that the claim's engine can use, and returns why it can't use
// the others. Without an engine, a GPU without an OpenCL runtime is kept only if there is no
// other: an OpenCL program could not use it.
func (c *claim) forEngine(names []string, gpus []*gpuctlv1.GPU) (kept []string, out []*gpuctlv1.Candidate) {
	byID := map[string]*gpuctlv1.GPU{}
	opencl := false
	for _, g := range gpus {
		byID[g.GetId()] = g
		opencl = opencl || g.GetRuntime() != nil && slices.Contains(names, g.GetId())
	}
	for _, name := range names {
		g := byID[name]
		var why *gpuctlv1.Reason
		switch {
		case c.Engine == driverEngine && g.GetDriverGpu() == nil:
			why = because("engine", "NVIDIA's driver does not serve it, so no CUDA program can use it")
		case g.GetRuntime() != nil:
		case c.Engine == portableEngine:
			why = because("engine", "it has no OpenCL runtime")
		case c.Min > 0:
			why = because("exclusive", "only CUDA programs can use it, and they have a GPU alone; leave out --min-memory")
		case opencl && c.Engine == "":
			why = because("engine", "it has no OpenCL runtime, and others have; for a CUDA program say --engine driver")
		}
		if why != nil {
			out = append(out, rejected(g, why))
			continue
		}
		kept = append(kept, name)
	}
	return kept, out
}

// misfit returns why a session's engine can't use the GPUs, or nil.
func misfit(s *gpuctlv1.Session, p placement) *gpuctlv1.Reason {
	for _, g := range p {
		switch {
		case s.GetEngine() == driverEngine && p.far():
			return because("engine", "it is on another host, and CUDA programs compute on their own host's GPUs")
		case s.GetEngine() == driverEngine && g.GetDriverGpu() == nil:
			return because("engine", "NVIDIA's driver does not serve it, and the session is of a CUDA program")
		case s.GetEngine() != driverEngine && (g.GetRuntime() == nil && !p.far() || g.GetRuntimeName() == inventory.CUDA):
			return because("engine", "it has no OpenCL runtime, and the session is of an OpenCL program")
		}
	}
	return nil
}

// withNames returns the session with the names that this host has for its GPUs. gpuguest may
// know only their UUIDs. The caller holds h.mu.
func (h *Host) withNames(s *gpuctlv1.Session) *gpuctlv1.Session {
	used := s.GetDriver().GetGpus()
	if s.GetEngine() != driverEngine || len(used) == 0 {
		return s
	}
	p, unknown := h.byUUID(used)
	names := p.ids()
	for _, g := range unknown {
		names = append(names, g.GetUuid())
	}
	slices.Sort(names)
	now := splitIDs(s.GetTarget().GetGpu())
	slices.Sort(now)
	if slices.Equal(names, now) {
		return s
	}
	s = proto.CloneOf(s)
	if s.Target == nil {
		s.Target = &gpuctlv1.Target{}
	}
	s.Target.Gpu = strings.Join(names, separator)
	if len(p) > 0 {
		s.Target.Model = p[0].GetModel()
	}
	return s
}

// byUUID returns this host's GPUs with these UUIDs, and those that it does not have. The
// caller holds h.mu.
func (h *Host) byUUID(used []*gpuctlv1.DriverGPU) (p placement, unknown []*gpuctlv1.DriverGPU) {
	for _, u := range used {
		i := slices.IndexFunc(h.gpus, func(g *gpuctlv1.GPU) bool {
			return g.GetDriverGpu() != nil && strings.EqualFold(g.GetDriverGpu().GetUuid(), u.GetUuid())
		})
		if i < 0 {
			unknown = append(unknown, u)
			continue
		}
		p = append(p, h.gpus[i])
	}
	return p, unknown
}

// inHere returns what a user has named as a target, with ids in the place of UUIDs and PCI
// addresses of GPUs.
func (h *Host) inHere(to string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	names := splitIDs(to)
	for i := range names {
		name, address := h.nameOf(names[i]), ""
		if a, err := pci.ParseAddress(name); err == nil {
			address = a.String()
		}
		for _, g := range h.gpus {
			if g.GetId() == name {
				names[i] = name
				break
			}
			if g.GetUuid() != "" && strings.EqualFold(g.GetUuid(), name) || address != "" && g.GetPciAddress() == address {
				names[i] = g.GetId()
			}
		}
	}
	return strings.Join(names, separator)
}

// driverPIDs returns the processes of the sessions of the engine driver.
func (h *Host) driverPIDs() map[uint32]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := map[uint32]bool{}
	for _, s := range h.sessions {
		for _, p := range s.GetDriver().GetProcesses() {
			out[p.GetPid()] = true
		}
	}
	return out
}

// rehearse lets a session go through all that can be undone, and back.
func (h *Host) rehearse(req *gpuctlv1.HostSwapRequest, send emit) error {
	op, s, c, err := h.begin(req.GetSession(), "rehearse")
	if err != nil {
		return err
	}
	start := func(ctx context.Context) (progressStream, error) {
		return h.Guest.Swap(ctx, newRequest(&gpuctlv1.SwapRequest{
			Session: s.GetId(), Rehearse: true, FreezeTimeoutMs: req.GetFreezeTimeoutMs(), TimeoutMs: req.GetTimeoutMs(), FailAt: req.GetFailAt(),
		}))
	}
	h.work.Go(func() { h.stay(op, s, c, start, send) })
	return nil
}

// planRehearsal returns what a rehearsal would do, and what is against it.
func (h *Host) planRehearsal(ctx context.Context, s *gpuctlv1.Session) (*gpuctlv1.HostPlanResponse, error) {
	return h.planStay(ctx, s, &gpuctlv1.PlanRequest{Session: s.GetId(), Rehearse: true})
}
