package mediated

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/random"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// GPU is a mediated GPU of this host, as configured.
type GPU struct {
	Name  string
	Model server.Model
}

// Profile returns the name of its parts' profile, such as 1of4.
func (g GPU) Profile() string { return fmt.Sprintf("1of%d", g.Model.Parts) }

// Domain is the domain of a VM that runs.
type Domain struct {
	ID     uint16
	Paused bool
	HVM    bool
	Ran    bool // one of its vCPUs has run
}

// Domains asks the hypervisor.
type Domains interface {
	// Of returns the domains of VMs, by the VMs' UUIDs.
	Of(ctx context.Context) (map[string]Domain, error)
}

// VMs asks libvirt.
type VMs interface {
	Find(ctx context.Context, ref string) (vm.Info, error)
}

// Process is the process that has a GPU.
type Process interface {
	Attach(ctx context.Context, p server.Part) error
	Detach(ctx context.Context, id string) error
	List(ctx context.Context) ([]server.Status, error)

	Park(ctx context.Context, id string) (config []byte, err error)
	Save(ctx context.Context, id string, w io.Writer) error
	Restore(ctx context.Context, id string, from io.Reader) error
	Give(ctx context.Context, id, seal string) error
	Resume(ctx context.Context, id string) error
}

// Cluster assigns parts to claims.
type Cluster interface {
	HostName() string
	Claim(ctx context.Context, c *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error)
	Settle(ctx context.Context)
	Kick()
}

// Config is what a Keeper depends on.
type Config struct {
	GPUs    []GPU
	File    string // path of the record
	Domains Domains
	VMs     VMs
	// Process returns the process that has a GPU, after starting it if none has.
	Process func(ctx context.Context, gpu string) (Process, error)
	Cluster Cluster
	// Over returns whether a migration has ended, and whether the VM belongs to this host
	// then. nil: there are no migrations.
	Over func(ctx context.Context, migration string) (over, here bool)
	// Settled is set when Uses, Knows and Held are complete. nil: nobody asks.
	Settled *atomic.Bool
	// List gets the UUIDs of the VMs that have parts, and of those of them that are to arrive,
	// sorted, whenever they change: while hostd does not run, the hook refuses to start them, or
	// to let them run. nil: nobody wants them.
	List func(have, arrive []string) error
	// Changed is sent to when domains come and go; nil: nobody does.
	Changed <-chan struct{}
	// Event records an event about a GPU for the operator.
	Event func(gpu, kind, message string)
	Now   func() time.Time
	Log   *slog.Logger
	Every time.Duration // between looks at everything; 0: 10 s
	Soon  time.Duration // the same while a VM is to arrive or its domain is being made; 0: 500 ms
}

// Keeper manages mediated GPUs. It is safe for concurrent use.
type Keeper struct {
	Config
	wake chan struct{}

	work sync.Mutex // held by who changes what VMs have

	mu       sync.Mutex
	parts    map[string]*assignment
	claiming map[string]bool
	health   map[string]string // by GPU: why its process cannot be used
	seen     map[string]server.Status
}

// New returns a keeper with the record on disk.
func New(c Config) (*Keeper, error) {
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Every == 0 {
		c.Every = 10 * time.Second
	}
	if c.Soon == 0 {
		c.Soon = 500 * time.Millisecond
	}
	if c.Settled == nil {
		c.Settled = new(atomic.Bool)
	}
	k := &Keeper{
		Config: c, wake: make(chan struct{}, 1), parts: map[string]*assignment{}, claiming: map[string]bool{},
		health: map[string]string{}, seen: map[string]server.Status{},
	}
	all, err := readRecord(c.File)
	if err != nil {
		return nil, err
	}
	for _, a := range all {
		k.parts[a.ID] = a
	}
	k.Settled.Store(len(k.GPUs) == 0 && len(k.parts) == 0) // otherwise the processes are asked first
	k.list()
	return k, nil
}

// list tells which VMs have parts. The caller holds k.mu, or nobody else has k yet.
func (k *Keeper) list() {
	if k.List == nil {
		return
	}
	var have, arrive []string
	for _, a := range k.parts {
		have = append(have, a.UUID)
		if a.comes() {
			arrive = append(arrive, a.UUID)
		}
	}
	slices.Sort(have)
	slices.Sort(arrive)
	if err := k.List(slices.Compact(have), slices.Compact(arrive)); err != nil {
		k.Log.Error("the hook does not know which VMs have parts of mediated GPUs", "err", err)
	}
}

// Has reports whether a name is that of a mediated GPU of this host.
func (k *Keeper) Has(ref string) bool { return k.gpu(ref) != nil }

func (k *Keeper) gpu(ref string) *GPU {
	ref = strings.TrimPrefix(ref, k.Cluster.HostName()+"/")
	for i := range k.GPUs {
		if k.GPUs[i].Name == ref {
			return &k.GPUs[i]
		}
	}
	return nil
}

// HasProfile reports whether a mediated GPU of this host has a profile.
func (k *Keeper) HasProfile(name string) bool {
	return slices.ContainsFunc(k.GPUs, func(g GPU) bool { return g.Profile() == name })
}

// Inventory returns the GPUs in the inventory's form.
func (k *Keeper) Inventory() []*clusterv1.GPU {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := make([]*clusterv1.GPU, 0, len(k.GPUs))
	for _, g := range k.GPUs {
		o := &clusterv1.GPU{
			Host: k.Cluster.HostName(), Id: k.Cluster.HostName() + "/" + g.Name, Name: g.Name, Model: "NVC0 (software)", Vendor: "gpuctl", Type: "gpu", NumaNode: -1,
			Present: true, Health: clusterv1.Health_HEALTH_OK, Kinds: []string{state.KindMediated},
			Limits:   &gpuctlv1.Limits{GlobalMemory: g.Model.Memory},
			Profiles: []*clusterv1.Profile{{Name: g.Profile(), Memory: g.Model.Each(), MaxInstances: uint32(g.Model.Parts)}},
		}
		if why := k.health[g.Name]; why != "" {
			o.Health, o.HealthReason = clusterv1.Health_HEALTH_FAILED, why
		}
		for _, a := range k.parts {
			if a.GPU == g.Name && a.Message != "" && o.GetHealth() == clusterv1.Health_HEALTH_OK {
				o.Health, o.HealthReason = clusterv1.Health_HEALTH_DEGRADED, "vm "+a.vm()+": "+a.Message
			}
		}
		out = append(out, o)
	}
	return out
}

// Knows reports whether a claim belongs to a part, or is being made.
func (k *Keeper) Knows(claim string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.claiming[claim] {
		return true
	}
	for _, a := range k.parts {
		if a.Claim == claim {
			return true
		}
	}
	return false
}

// Uses reports whether a claim has a part of a GPU, or is being made.
func (k *Keeper) Uses(claim, gpu string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.claiming[claim] {
		return true
	}
	for _, a := range k.parts {
		if a.Claim == claim && a.GPU == gpu {
			return true
		}
	}
	return false
}

// Held is a claim that has a part.
type Held struct {
	Claim  *clusterv1.Claim
	GPU    string
	Memory uint64
}

// Held returns the claims that have parts.
func (k *Keeper) Held() (out []Held) {
	for _, a := range k.of(func(*assignment) bool { return true }) {
		out = append(out, Held{a.claim(), a.GPU, a.Memory})
	}
	return out
}

// Labels returns what a VM has, for people.
func (k *Keeper) Labels(uuid string) (out []string) {
	for _, a := range k.of(func(a *assignment) bool { return a.UUID == uuid }) {
		out = append(out, a.GPU+" ("+a.Profile+")")
	}
	return out
}

// Cards returns the GPUs with their parts, in the form in which cards are listed.
func (k *Keeper) Cards() (out []*gpuctlv1.Card) {
	for _, g := range k.Inventory() {
		p := g.GetProfiles()[0]
		c := &gpuctlv1.Card{
			Gpu: g.GetName(), Model: g.GetModel(), Memory: g.GetLimits().GetGlobalMemory(), Mediated: true, Phase: gpuctlv1.CardPhase_CARD_PHASE_FREE,
			Message: g.GetHealthReason(),
		}
		free := p.GetMaxInstances()
		for _, a := range k.of(func(a *assignment) bool { return a.GPU == g.GetName() }) {
			free -= min(free, 1)
			c.Slices = append(c.Slices, k.slice(a))
		}
		c.Profiles = []*gpuctlv1.SliceProfile{{
			Name: p.GetName(), Kind: state.KindMediated, Memory: p.GetMemory(), Max: p.GetMaxInstances(), Existing: p.GetMaxInstances() - free, Free: free,
		}}
		if free == 0 {
			c.Profiles[0].Why = "all parts are taken"
		}
		out = append(out, c)
	}
	return out
}

func (k *Keeper) slice(a assignment) *gpuctlv1.Slice {
	k.mu.Lock()
	st, seen := k.seen[a.part()]
	k.mu.Unlock()
	s := &gpuctlv1.Slice{
		Id: a.ID, Profile: a.Profile, Kind: state.KindMediated, Phase: phases()[a.Phase], Machine: a.UUID, MachineName: a.Name, Claim: a.Claim,
		Message: a.Message, SinceUnixMs: a.Since, Weight: uint32(a.Weight),
	}
	if !seen {
		return s
	}
	for _, name := range slices.Sorted(func(yield func(string) bool) {
		for n := range st.Phases {
			if !yield(n) {
				return
			}
		}
	}) {
		c := st.Phases[name]
		s.Counts = append(s.Counts, &gpuctlv1.SliceCount{
			Phase: name, Exits: c.Exits, Scans: c.Scans, Hypercalls: c.Hypercalls, Refused: c.Refused, Commands: c.Commands,
		})
	}
	return s
}

// Statuses returns what the GPUs' processes said last about parts, by GPU.
func (k *Keeper) Statuses() map[string][]server.Status {
	out := map[string][]server.Status{}
	for _, a := range k.of(func(*assignment) bool { return true }) {
		k.mu.Lock()
		if st, seen := k.seen[a.part()]; seen {
			out[a.GPU] = append(out[a.GPU], st)
		}
		k.mu.Unlock()
	}
	return out
}

// obtain has the cluster assign a part to a new claim. The caller calls dropClaim when the
// part is recorded, or is not to be. It holds k.work, but not meanwhile: the cluster may have no
// leader, and others' VMs start.
func (k *Keeper) obtain(ctx context.Context, a *assignment, gpus []GPU, more string) error {
	c := a.claim()
	c.CreatedUnixMs = k.Now().UnixMilli()
	var names []string
	for _, g := range gpus {
		names = append(names, g.Name)
	}
	var err error
	if c.Expr, err = cards.Among(names, more); err != nil {
		return fmt.Errorf("vm %s: %w", a.vm(), err)
	}
	k.mu.Lock()
	k.claiming[c.GetId()] = true
	k.mu.Unlock()
	k.work.Unlock()
	k.Cluster.Settle(ctx)
	res, err := k.Cluster.Claim(ctx, c)
	k.work.Lock()
	if err == nil && len(res.GetAssignments()) == 0 {
		var why []string
		for _, r := range res.GetRejected() {
			for _, x := range r.GetReasons() {
				why = append(why, x.GetMessage())
			}
		}
		err = fmt.Errorf("%w: %s", cards.ErrRefused, strings.Join(why, "; "))
	}
	if err != nil {
		k.dropClaim(c.GetId())
		return fmt.Errorf("vm %s: %w", a.vm(), err)
	}
	a.GPU = strings.TrimPrefix(res.GetAssignments()[0].GetGpu(), k.Cluster.HostName()+"/")
	return nil
}

func (k *Keeper) dropClaim(claim string) {
	k.mu.Lock()
	delete(k.claiming, claim)
	k.mu.Unlock()
	k.Cluster.Kick()
}

// Kick makes Run look at everything now.
func (k *Keeper) Kick() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// Run looks at everything at once, whenever domains come or go, and from time to time,
// until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	timer := time.NewTimer(k.Every)
	defer timer.Stop()
	said := ""
	for {
		err := k.Reconcile(ctx)
		switch {
		case err == nil:
			said = ""
		case ctx.Err() == nil && err.Error() != said: // not each time
			said = err.Error()
			k.Log.Warn("mediated gpus not reconciled", "err", err)
		}
		timer.Reset(k.pause(err))
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-k.wake:
		case <-k.Changed:
		}
	}
}

// pause is how long Run waits after a look with a result. Xen's store tells of a domain only when
// it is complete; a VM that arrives has its domain long before that.
func (k *Keeper) pause(err error) time.Duration {
	if errors.Is(err, server.ErrEarly) || len(k.of((*assignment).comes)) > 0 {
		return min(k.Soon, k.Every)
	}
	return k.Every
}

func newID() string { return "mgpu-" + random.Hex(8) }

// errLate means that a domain ran before it had its part.
var errLate = errors.New("it ran before its part was there")
