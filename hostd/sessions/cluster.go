package sessions

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	place "github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/hostd/inventory/discover"
	"github.com/gpuctl/gpuctl/hostd/member"
	"github.com/gpuctl/gpuctl/hostd/member/clusterapi"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/glimpse"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Cluster decides who gets a GPU. In its calls, a GPU has the name that this host uses
// for it, without the host's name.
type Cluster interface {
	// HostName returns the name that the cluster uses for this host, and Self its id, too.
	HostName() string
	Self() clusterapi.Self
	// Claim assigns GPUs of this host to a claim, or returns why it cannot.
	Claim(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error)
	// Place finds where a claim of this host can go, best first.
	Place(ctx context.Context, r place.Request) (place.Decision, error)
	// Acquire gives a claim GPUs in addition to those that it has. The error wraps
	// member.ErrTaken if other claims have them.
	Acquire(ctx context.Context, c *clusterv1.Claim, gpus []string, amount uint64) error
	// Settle waits until the cluster knows which GPUs this host has given back.
	Settle(ctx context.Context)
	// Kick starts a comparison of the cluster's claims with what this host uses. It does
	// not wait.
	Kick()
	// Known waits until the cluster knows the given GPUs of this host.
	Known(ctx context.Context, gpus []string)
	// AcquireHoldings tells the cluster what the claims of this host have, before new ones
	// are made.
	AcquireHoldings(ctx context.Context)
	// Announce sends this host's report to the cluster now.
	Announce(ctx context.Context) error
	// Record stores the progress of a long operation in the cluster.
	Record(m *clusterv1.Migration)
	// Note adds an event about an object to the cluster's log.
	Note(e *clusterv1.Event)
	// What follows is about GPUs of other hosts, which have the cluster's name here.

	// Queue returns how waiting claims are served.
	Queue() clusterv1.QueuePolicy
	// OtherGPUs returns the GPUs of other hosts that sessions of this host could use, and
	// GPU any GPU by its id in the cluster, or nil.
	OtherGPUs() []*clusterv1.GPU
	GPU(id string) *clusterv1.GPU
	// Room returns how many bytes of a GPU a claim can have, and whether no other claim
	// has any of it.
	Room(claim, gpu string) (bytes uint64, free bool)
	// Waits reports whether a claim waits that could have a GPU of this host, and
	// AwaitBound waits until a claim of this host is bound.
	Waits() bool
	AwaitBound(ctx context.Context, claim string) ([]*clusterv1.Assignment, error)
	// Borrow asks a host for a lease, and GiveBack ends it.
	Borrow(ctx context.Context, host string, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error)
	GiveBack(ctx context.Context, host, lease string) error
	// AllowFetch lets a far executor fetch contents from that of a lease of a host, EndFetch
	// takes it back, and Fetch makes the far executor of a lease fetch.
	AllowFetch(ctx context.Context, host string, r *clusterv1.AllowFetchRequest) (*clusterv1.AllowFetchResponse, error)
	EndFetch(ctx context.Context, host, lease string) error
	Fetch(ctx context.Context, host string, r *clusterv1.FetchRequest) error
	// LendsAt returns the address at which carriers reach a host.
	LendsAt(host string) (string, error)
	// Assigned returns how much of GPUs of this host, by their names here, the log has
	// assigned to a claim of the host with id borrower. The error wraps
	// member.ErrNotAssigned if it has not, and not if that is unknown now.
	Assigned(ctx context.Context, claim, borrower string, gpus []string, token uint64, now bool) (uint64, error)
	// TokenOf returns the highest fencing token of a claim's assignments. The error wraps
	// member.ErrNotAssigned if it has none.
	TokenOf(ctx context.Context, claim string) (uint64, error)
	// Link returns what is known of the network to a host, or nil. ReportLink stores it,
	// and Calibrate measures it, unless that was done not long ago.
	Link(to string) *clusterv1.Link
	ReportLink(ctx context.Context, l *clusterv1.Link) error
	Calibrate(ctx context.Context, host string, refresh func(*clusterv1.Link, time.Duration, float64) *clusterv1.Link) error
	// OtherHosts returns the names of the other hosts that are up. Devices returns a
	// client for the cards of one of them.
	OtherHosts() []string
	Devices(host string) (gpuctlv1connect.DeviceServiceClient, error)
}

var _ Cluster = (*member.Node)(nil)

// forCluster returns the claim in the form of the cluster. If gpus is not empty, the
// cluster may choose only from these GPUs of this host.
func (c *claim) forCluster(gpus []string) *clusterv1.Claim {
	quoted := make([]string, len(gpus))
	for i, g := range gpus {
		quoted[i] = strconv.Quote(g)
	}
	out := &clusterv1.Claim{
		Id: c.ID, Holder: c.holderName(), MinMemory: c.Min, PreferMemory: c.Prefer, Count: uint32(c.Count), OneRuntime: true,
		Unmet: clusterv1.Unmet_UNMET_REFUSE, CreatedUnixMs: c.Created, Remote: c.remote(),
		Device: &gpuctlv1.VirtualDevice{Name: c.Name, Type: c.Type},
	}
	if c.Wait {
		out.Unmet = clusterv1.Unmet_UNMET_WAIT
	}
	if c.VM != nil && c.VM.Migration == "" {
		out.Labels = c.VM.labels()
	}
	if len(gpus) > 0 {
		out.Expr = "name in [" + strings.Join(quoted, ", ") + "]"
	}
	return out
}

// named returns the claim in the form of the cluster. The cluster may choose from these
// GPUs of this host, and those GPUs of others.
func (c *claim) named(host string, gpus, others []string) *clusterv1.Claim {
	if len(others) == 0 {
		return c.forCluster(gpus)
	}
	out := c.forCluster(nil)
	quoted := make([]string, 0, len(gpus)+len(others))
	for _, g := range gpus {
		quoted = append(quoted, strconv.Quote(host+"/"+g))
	}
	for _, id := range others {
		quoted = append(quoted, strconv.Quote(id))
	}
	out.Expr = "id in [" + strings.Join(quoted, ", ") + "]"
	return out
}

func (c *claim) holderName() string {
	if c.VM != nil {
		return "vm " + c.VM.Name
	}
	if c.Holder.PID == 0 {
		return "sessions"
	}
	return fmt.Sprintf("process %d", c.Holder.PID)
}

// matching returns the names of the GPUs for which the expression is true, and the others
// with the reason.
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

// candidates converts the cluster's rejections to reasons for each GPU. If a host is
// rejected as a whole, its reasons apply to each of its GPUs that is in asked. The caller
// holds h.mu.
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
		for _, why := range r.GetReasons() { // rejections are shared, so the copy gets this host's names of GPUs
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

// farCandidates returns the cluster's rejections of GPUs of other hosts.
func (h *Host) farCandidates(rejections []*clusterv1.Rejection, asked []string) (out []*gpuctlv1.Candidate) {
	if len(asked) == 0 {
		return nil
	}
	for _, r := range rejections {
		if r.GetHost() != h.Cluster.HostName() {
			out = append(out, &gpuctlv1.Candidate{Gpu: cmp.Or(r.GetGpu(), r.GetHost()+"/*"), Model: r.GetModel(), Reasons: r.GetReasons()})
		}
	}
	return out
}

// localName returns a GPU's name without the host's name.
func localName(id string) string {
	if _, name, ok := strings.Cut(id, "/"); ok {
		return name
	}
	return id
}

// DetectedGPUs returns the GPUs of this host that OpenCL's runtimes, NVML or the scan of PCI
// devices have found, as they name them.
func (h *Host) DetectedGPUs(ctx context.Context) ([]*clusterv1.GPU, error) {
	return h.merged(ctx, nil)
}

// merged is DetectedGPUs with the profiles of cards; nil: there are none.
func (h *Host) merged(ctx context.Context, profiles func(*pci.Card) []*clusterv1.Profile) ([]*clusterv1.GPU, error) {
	select {
	case <-h.discovered:
	default:
		return nil, errNotReady
	}
	var err error
	inSessions := h.driverPIDs()
	in := discover.Input{
		Runtimes: h.gpus, RuntimeKey: runtimeKey, Catalog: h.Catalog, Profiles: profiles,
		Ours: func(pid uint32) bool { return inSessions[pid] || h.ours(pid) },
	}
	if in.Cards, err = h.PCI.Cards(); err != nil {
		h.Log.Debug("pci devices not scanned", "err", err)
	}
	if h.NVML != nil {
		ctx, cancel := context.WithTimeout(ctx, gpusAsked)
		in.NVML, in.NVMLErr = h.NVML.List(ctx)
		cancel()
	}
	gpus, warnings := discover.Merge(in)
	for _, w := range warnings {
		h.Log.Debug("gpu left out", "err", w)
	}
	return gpus, nil
}

// ours reports whether the process is an executor, that is, uses a GPU for a session.
func (h *Host) ours(pid uint32) bool {
	name := strconv.FormatUint(uint64(pid), 10) + "/cmdline"
	user, _ := userOf(h.proc, int(pid)) // without one it is counted as root's
	data, _ := glimpse.Do(&h.reads, user, name, func() []byte {
		data, err := fs.ReadFile(h.proc, name)
		if err != nil {
			return nil
		}
		return data
	})
	args := strings.Split(string(data), "\x00")
	return len(args) > 1 && args[1] == "executor"
}

// Knows reports whether a claim that this host has made for sessions still exists.
func (h *Host) Knows(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.claims[id] != nil || h.claiming[id]
}

// Uses reports whether a claim uses a GPU for sessions, has part of it reserved, or is getting one.
func (h *Host) Uses(id, gpu string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.claiming[id] || h.lending[id] > 0 {
		return true
	}
	if _, ok := h.ledger.Holds(id, gpu); ok {
		return true
	}
	if c := h.claims[id]; c != nil { // a GPU that was not found has no entry in the ledger
		if need, _ := h.needs(c); need[gpu] {
			return true
		}
	}
	for _, l := range h.lent {
		if l.Claim == id && slices.Contains(l.GPUs, gpu) { // nor then
			return true
		}
	}
	for _, op := range h.ops {
		if op.Claim == id && slices.Contains(op.GPUs, gpu) {
			return true
		}
	}
	return false
}

// Holdings returns which GPUs this host's claims of sessions have.
func (h *Host) Holdings() []member.Holding {
	var out []member.Holding
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.claims {
		held := member.Holding{Claim: c.forCluster(nil)}
		for _, g := range h.counted() {
			if amount, ok := h.ledger.Holds(c.ID, g); ok {
				held.GPUs, held.Amount = append(held.GPUs, g), amount
			}
		}
		if len(held.GPUs) > 0 {
			out = append(out, held)
		}
	}
	return out
}

// Ready reports whether it is known who has which GPU of this host. After its start, a host
// first has to learn which sessions exist, and which cards VMs have.
func (h *Host) Ready() bool {
	select {
	case <-h.ready:
		return !slices.ContainsFunc(h.Settled, func(s *atomic.Bool) bool { return !s.Load() })
	default:
		return false
	}
}

// Sessions returns the sessions in their present state.
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
			SuspendedTo: s.GetSuspendedTo(), Message: s.GetMessage(), StartedUnixMs: s.GetStartedUnixMs(), Engine: cmp.Or(s.GetEngine(), portableEngine),
		})
	}
	return out
}

// record changes the operation's entry in the cluster.
func (h *Host) record(op *operation, change func(*clusterv1.Migration)) {
	h.mu.Lock()
	change(op.Record.Migration)
	h.save()
	m := proto.CloneOf(op.Record.Migration)
	h.mu.Unlock()
	h.Cluster.Record(m)
}

// restarted begins the message of an operation that nobody has followed to its end.
const restarted = "hostd was restarted during it"

// conclude writes the end of an operation that was in progress when hostd was started: nobody
// follows it any more. s is what a list says of its session. The caller holds h.mu.
func (h *Host) conclude(op *operation, s *gpuctlv1.Session) {
	m := op.Record.Migration
	if m == nil || !op.since.IsZero() {
		return
	}
	gpu := s.GetTarget().GetGpu()
	m.State, m.Message = clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, restarted
	switch s.GetState() {
	case gpuctlv1.SessionState_SESSION_STATE_RUNNING:
		if op.Kind == "resume" || op.Kind != "suspend" && gpu != m.GetFrom() {
			m.State, m.Message, m.To = clusterv1.MigrationState_MIGRATION_STATE_DONE, "", gpu
		}
	case gpuctlv1.SessionState_SESSION_STATE_SUSPENDED:
		if op.Kind == "suspend" {
			m.State, m.Message = clusterv1.MigrationState_MIGRATION_STATE_DONE, ""
		}
	case gpuctlv1.SessionState_SESSION_STATE_LOST:
		m.State, m.Message = clusterv1.MigrationState_MIGRATION_STATE_FAILED, s.GetMessage()
	default:
		if op.Into != "" {
			h.work.Go(func() { h.concludeIn(op.Into, m) })
			return
		}
		if op.Folder == "" { // otherwise it was not made from its folder
			m.State, m.Message = clusterv1.MigrationState_MIGRATION_STATE_FAILED, restarted+", and the session is gone"
		}
	}
	h.recordEnd(m)
}

// concludeIn is conclude for a session that is gone: it is in the folder, or has ended.
func (h *Host) concludeIn(dir string, m *clusterv1.Migration) {
	plan, err := h.plan(h.ctx, &gpuctlv1.PlanRequest{Folder: dir})
	switch {
	case err == nil && plan.GetSession().GetId() == m.GetObject():
		m.State, m.Message = clusterv1.MigrationState_MIGRATION_STATE_DONE, ""
	case err == nil || refusedCall(err):
		m.State, m.Message = clusterv1.MigrationState_MIGRATION_STATE_FAILED, restarted+", and the session is gone"
	default:
		m.State = clusterv1.MigrationState_MIGRATION_STATE_FAILED
		m.Message = fmt.Sprintf("%s, and whether the session is in %s is not known (%v); gpuctl resume --from %s --plan says", restarted, dir, plain(err), dir)
	}
	h.recordEnd(m)
}

// recordEnd writes that an operation has ended which nobody has followed.
func (h *Host) recordEnd(m *clusterv1.Migration) {
	if m.GetStep() != "" {
		m.Done, m.Step = append(m.Done, m.Step), ""
	}
	m.EndedUnixMs = time.Now().UnixMilli()
	h.Cluster.Record(proto.CloneOf(m))
}
