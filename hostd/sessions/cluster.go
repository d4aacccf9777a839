package sessions

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	place "github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/hostd/inventory/discover"
	"github.com/gpuctl/gpuctl/hostd/inventory/hostinfo"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/internal/expr"
)

// Cluster has the last word on who gets a GPU. GPUs are named as this host
// names them, without its own name.
type Cluster interface {
	// HostName is what the cluster calls this host.
	HostName() string
	// Claim binds a claim to GPUs of this host, or says why not.
	Claim(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error)
	// Place ranks where a claim of this host can go.
	Place(ctx context.Context, r place.Request) (place.Decision, error)
	// Acquire gives a claim GPUs beside what it has. An error that wraps
	// member.ErrTaken says that others have them.
	Acquire(ctx context.Context, c *clusterv1.Claim, gpus []string, amount uint64) error
	// Settle waits until the cluster knows what this host has given back.
	Settle(ctx context.Context)
	// Kick makes the cluster look at what this host uses.
	Kick()
	// Known waits until the cluster knows GPUs of this host.
	Known(ctx context.Context, gpus []string)
	// Announce reports this host now.
	Announce(ctx context.Context) error
	// Record notes where a long operation is.
	Record(m *clusterv1.Migration)
	// Note tells the cluster's log what happened to an object.
	Note(e *clusterv1.Event)
	// OtherHosts names those that are up; Devices reaches the cards of one.
	OtherHosts() []string
	Devices(host string) (gpuctlv1connect.DeviceServiceClient, error)
}

var (
	_ Cluster     = (*member.Node)(nil)
	_ member.Host = (*Host)(nil)
)

// gpusAsked is how long the other sources of GPUs may take.
const gpusAsked = 5 * time.Second

var errNotReady = errors.New("the GPUs of this host are not known yet")

// forCluster is the claim as the cluster knows it: for those of this host's
// GPUs for which its expression holds.
func (c *claim) forCluster(gpus []string) *clusterv1.Claim {
	quoted := make([]string, len(gpus))
	for i, g := range gpus {
		quoted[i] = strconv.Quote(g)
	}
	out := &clusterv1.Claim{
		Id: c.ID, Holder: c.holderName(), MinMemory: c.Min, PreferMemory: c.Prefer, Count: uint32(c.Count), OneRuntime: true,
		Unmet: clusterv1.Unmet_UNMET_REFUSE, CreatedUnixMs: c.Created,
		Device: &gpuctlv1.VirtualDevice{Name: c.Name, Type: c.Type},
	}
	if len(gpus) > 0 {
		out.Expr = "name in [" + strings.Join(quoted, ", ") + "]"
	}
	return out
}

func (c *claim) holderName() string {
	if c.Holder.PID == 0 {
		return "sessions"
	}
	return fmt.Sprintf("process %d", c.Holder.PID)
}

// matching are the GPUs for which an expression holds, and those for which it
// does not.
func matching(ctx context.Context, gpus []*gpuctlv1.GPU, e *expr.Expr) (names []string, out []*gpuctlv1.Candidate, err error) {
	for _, g := range gpus {
		if err := ctx.Err(); err != nil {
			return nil, nil, fmt.Errorf("expression %q: it was given up: %w", e, err)
		}
		switch ok, err := e.Match(ctx, expr.OfGPU(g)); {
		case err != nil:
			out = append(out, rejected(g, because("expr", "%v", err)))
		case !ok:
			out = append(out, rejected(g, because("expr", "%s is not true of it", e)))
		default:
			names = append(names, g.GetId())
		}
	}
	return names, out, nil
}

// candidates makes GPUs' reasons of the cluster's. A host that is rejected as
// a whole stands for those of its GPUs that were asked for.
// h.mu is held.
func (h *Host) candidates(rejections []*clusterv1.Rejection, asked []string) (out []*gpuctlv1.Candidate) {
	byID := map[string]*gpuctlv1.GPU{}
	for _, g := range h.gpus {
		byID[g.GetId()] = g
	}
	said := map[string]bool{}
	say := func(id string, reasons []*gpuctlv1.Reason) {
		if g := byID[id]; g != nil && slices.Contains(asked, id) && !said[id] {
			said[id] = true
			out = append(out, rejected(g, reasons...))
		}
	}
	for _, r := range rejections {
		if r.GetHost() != h.Cluster.HostName() {
			continue
		}
		var reasons []*gpuctlv1.Reason
		for _, why := range r.GetReasons() { // in this host's own names; they are shared
			reasons = append(reasons, because(why.GetCode(), "%s", strings.ReplaceAll(why.GetMessage(), r.GetHost()+"/", "")))
		}
		if r.GetGpu() != "" {
			say(localName(r.GetGpu()), reasons)
			continue
		}
		for _, id := range asked {
			say(id, reasons)
		}
	}
	if len(out) == 0 {
		for _, id := range asked {
			say(id, []*gpuctlv1.Reason{because("unknown", "the cluster does not know it yet")})
		}
	}
	return out
}

// localName is a GPU's name without its host's.
func localName(id string) string {
	if _, name, ok := strings.Cut(id, "/"); ok {
		return name
	}
	return id
}

// Report says what the host is and has.
func (h *Host) Report(ctx context.Context) (*clusterv1.Host, []*clusterv1.GPU, error) {
	gpus, err := h.DetectedGPUs(ctx)
	if err != nil {
		return nil, nil, err
	}
	info, err := hostinfo.Read(ctx, h.Root, hostinfo.Netlink{})
	if err != nil {
		h.Log.Debug("not all of the host is known", "err", err)
	}
	return info, gpus, nil
}

// DetectedGPUs returns the GPUs of this host, of all sources.
func (h *Host) DetectedGPUs(ctx context.Context) ([]*clusterv1.GPU, error) {
	select {
	case <-h.discovered:
	default:
		return nil, errNotReady
	}
	var err error
	in := discover.Input{Runtimes: h.gpus, RuntimeKey: runtimeKey, Ours: h.ours}
	if in.Cards, err = h.PCI.Cards(); err != nil {
		h.Log.Debug("pci devices not scanned", "err", err)
	}
	if h.NVML != nil {
		ctx, cancel := context.WithTimeout(ctx, gpusAsked)
		in.NVML, in.NVMLErr = h.NVML.List(ctx)
		cancel()
	}
	if h.Cards != nil {
		in.Catalog, in.Profiles = h.Cards.Catalog.Lookup, h.Cards.Keeper.Profiles
	}
	gpus, warnings := discover.Merge(in)
	for _, w := range warnings {
		h.Log.Debug("gpu left out", "err", w)
	}
	if h.Cards != nil {
		h.Cards.Keeper.Annotate(gpus)
	}
	return gpus, nil
}

// ours reports whether a process uses a GPU for a session: it is an executor.
func (h *Host) ours(pid uint32) bool {
	data, err := fs.ReadFile(h.proc, strconv.FormatUint(uint64(pid), 10)+"/cmdline")
	args := strings.Split(string(data), "\x00")
	return err == nil && len(args) > 1 && args[1] == "executor"
}

// Facts are what changes often.
func (h *Host) Facts(ctx context.Context) (*clusterv1.HostFacts, error) {
	f := &clusterv1.HostFacts{UnixMs: time.Now().UnixMilli()}
	var err error
	if f.Load1, f.FreeMemory, err = hostinfo.Load(h.Root); err != nil {
		h.Log.Debug("load is not known", "err", err)
	}
	gpus, err := h.DetectedGPUs(ctx)
	if err != nil {
		return nil, err
	}
	var answer *nvml.Response
	if h.NVML != nil {
		ctx, cancel := context.WithTimeout(ctx, gpusAsked)
		answer, _ = h.NVML.Facts(ctx) // its reason is in the GPUs' health
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

// Knows reports whether a claim of this host's making is still one.
func (h *Host) Knows(id string) bool {
	if h.Cards != nil && h.Cards.Keeper.Knows(id) {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.claims[id] != nil || h.claiming[id]
}

// Uses reports whether a claim has something on a GPU.
func (h *Host) Uses(id, gpu string) bool {
	if h.Cards != nil && h.Cards.Keeper.Uses(id, gpu) {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.claiming[id] {
		return true
	}
	if _, ok := h.ledger.Holds(id, gpu); ok {
		return true
	}
	for _, op := range h.ops {
		if op.Claim == id && slices.Contains(op.GPUs, gpu) {
			return true
		}
	}
	return false
}

// Holdings are what this host's claims have, as the cluster should know it.
func (h *Host) Holdings() []member.Holding {
	var out []member.Holding
	if h.Cards != nil {
		for c, gpu := range h.Cards.Keeper.Held() {
			out = append(out, member.Holding{Claim: c, GPUs: []string{gpu}})
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.claims {
		held := member.Holding{Claim: c.forCluster(nil)}
		for _, g := range h.gpus {
			if amount, ok := h.ledger.Holds(c.ID, g.GetId()); ok {
				held.GPUs, held.Amount = append(held.GPUs, g.GetId()), amount
			}
		}
		if len(held.GPUs) > 0 {
			out = append(out, held)
		}
	}
	return out
}

// Ready reports whether Uses and Knows can be believed: a host that has just been
// started has to hear of its sessions first.
func (h *Host) Ready() bool {
	select {
	case <-h.ready:
		return h.Cards == nil || h.Cards.Keeper.Settled()
	default:
		return false
	}
}

// Sessions as they are now.
func (h *Host) Sessions() []*clusterv1.Session {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []*clusterv1.Session
	for _, s := range h.sessions {
		if s.GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED {
			continue
		}
		out = append(out, &clusterv1.Session{
			Id: s.GetId(), Claim: s.GetClaim(), Pid: s.GetPid(), Command: s.GetCommand(), State: s.GetState(),
			Gpus: splitIDs(s.GetTarget().GetGpu()), Model: s.GetTarget().GetModel(), Generation: s.GetGeneration(),
			SuspendedTo: s.GetSuspendedTo(), Message: s.GetMessage(), StartedUnixMs: s.GetStartedUnixMs(),
		})
	}
	return out
}

// record notes in the cluster where an operation is.
func (h *Host) record(op *operation, change func(*clusterv1.Migration)) {
	h.mu.Lock()
	change(op.record)
	m := proto.CloneOf(op.record)
	h.mu.Unlock()
	h.Cluster.Record(m)
}

// RecordCardEvent tells the cluster what happened to a card.
func (h *Host) RecordCardEvent(gpu, kind, message string) {
	if c := h.Cluster; c != nil {
		c.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_GPU, Object: c.HostName() + "/" + gpu, Type: kind, Message: message})
	}
}

// RecordHostEvent tells the cluster what happened to this host.
func (h *Host) RecordHostEvent(kind, message string) {
	if c := h.Cluster; c != nil {
		c.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_HOST, Object: c.HostName(), Type: kind, Message: message})
	}
}
