package sessions

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/config"
	"github.com/gpuctl/gpuctl/hostd/inventory"
	"github.com/gpuctl/gpuctl/hostd/sessions/ledger"
	"github.com/gpuctl/gpuctl/hostd/telemetry/metrics"
	"github.com/gpuctl/gpuctl/hostd/telemetry/trace"
	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/expr"
	"github.com/gpuctl/gpuctl/internal/glimpse"
	"github.com/gpuctl/gpuctl/internal/news"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
	"github.com/gpuctl/gpuctl/internal/wait"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

var (
	errNotFound = reason.New(reason.NotFound, "not found")
	errInvalid  = reason.New(reason.Invalid, "invalid")
	errBusy     = reason.New(reason.Busy, "busy")
)

const (
	callTimeout   = 20 * time.Second // for a short call to gpuguest
	holdTimeout   = 3 * time.Second
	buildTimeout  = 10 * time.Minute // for a plan that builds programs
	resyncEvery   = 5 * time.Second
	holdersEvery  = time.Second
	releaseWait   = time.Second
	maxClaims     = 4096
	maxClaimGPUs  = 64
	maxNameLength = 255
)

// HostConfig has what a Host depends on.
type HostConfig struct {
	Guest     gpuctlv1connect.GuestServiceClient
	AppSocket string // path of the socket that applications connect to
	StateFile string
	Config    config.Config
	Root      fs.FS        // the host's root folder
	PCI       *pci.Scanner // reads the same host's PCI devices
	Cluster   Cluster
	// LendAddress returns the address at which carriers of other hosts reach this host;
	// empty: it lends no GPU. nil: the same.
	LendAddress func() string
	// Pending reports whether a migration has not ended, or whether that is unknown. nil: no
	// VM migrates.
	Pending func(ctx context.Context, migration string) bool
	VMs     VMs     // nil: no VM has a GPU of this host lastingly
	Servers Servers // nil: no VM serves others
	NVML    NVML    // nil: NVML is not used
	// Catalog finds a model by its PCI ids; nil: no catalogue.
	Catalog func(*pci.Device) (catalog.Entry, bool)
	// Settled are set when the keepers of this host's other GPUs know who has which. They are
	// made after the host, and report it here.
	Settled []*atomic.Bool
	Metrics *metrics.Counters // nil: no metrics
	Tracer  *trace.Tracer     // nil: no traces
	// Whose returns the user whose a user is, for what each may have of what processes cost. nil: each is
	// its own.
	Whose func(uid uint32) uint32
	Log   *slog.Logger
}

// Host is the state of one host, and the rules by which it changes.
type Host struct {
	HostConfig
	proc       fs.FS
	discovered chan struct{} // closed when the GPUs are known
	ready      chan struct{} // closed when the sessions are known, too

	// ctx ends with the daemon. Operations use it, as they go on after their caller has
	// left.
	ctx  context.Context
	work sync.WaitGroup

	changes news.Changes[string, *gpuctlv1.Session]
	listing chan struct{} // has something while gpuguest is asked for its sessions
	reads   glimpse.Reads // of processes that use GPUs

	dropping busy.Set // leases for others that are being ended
	ending   busy.Set // claims of VMs that are being ended

	mu       sync.Mutex
	gpus     []*gpuctlv1.GPU // without owners; not changed after discovered is closed
	warnings []string
	ledger   *ledger.Ledger
	claims   map[string]*claim
	claiming map[string]bool // claims for which a call to the cluster is in progress
	sessions map[string]*session
	over     map[string]time.Time  // when sessions ended that a later list may still contain
	wanted   *list                 // the next list of sessions, which has not begun; nil: nobody waits for one
	ops      map[string]*operation // by session
	last     map[string]*gpuctlv1.SwapResult
	saved    []byte            // content of the state file
	names    map[string]string // of the runtimes' cards, by their PCI addresses

	borrowed map[string]*borrowed // leases from other hosts
	asking   map[string]bool      // of these, those that nothing names yet
	unnamed  chan struct{}        // gets something when an operation has ended, which may have named a lease
	lent     map[string]*lent     // leases for other hosts
	lending  map[string]int       // calls of Lend in progress, by claim
	serving  map[string]bool      // GPUs of service VMs that are in the ledger
	clean    map[string]bool      // service VMs, by UUID, in which nothing computes but the leases
	swept    bool                 // gpuguest's leases were compared since the start
	abroad   map[string]bool      // GPUs of other hosts that are in the ledger
	homing   map[string]int       // attempts to bring sessions home
	vacant   map[string]bool      // GPUs that were free at the last look for sessions to bring home
}

// session is what gpuguest has reported last.
type session struct {
	*gpuctlv1.Session
	seen time.Time // when it was reported first
}

// NewHost returns a host that knows no GPUs, claims or sessions. Start finds them. ctx ends
// with the daemon.
func NewHost(ctx context.Context, c HostConfig) (*Host, error) {
	proc, err := fs.Sub(c.Root, "proc")
	if err != nil {
		return nil, fmt.Errorf("root: %w", err)
	}
	return &Host{
		HostConfig: c, reads: glimpse.Reads{Whose: c.Whose}, proc: proc, discovered: make(chan struct{}), ready: make(chan struct{}), ctx: ctx, listing: make(chan struct{}, 1),
		ledger: ledger.New(), claims: map[string]*claim{}, claiming: map[string]bool{}, sessions: map[string]*session{}, over: map[string]time.Time{},
		ops: map[string]*operation{}, last: map[string]*gpuctlv1.SwapResult{},
		borrowed: map[string]*borrowed{}, asking: map[string]bool{}, unnamed: make(chan struct{}, 1), lent: map[string]*lent{}, lending: map[string]int{},
		serving: map[string]bool{}, clean: map[string]bool{}, abroad: map[string]bool{}, homing: map[string]int{}, vacant: map[string]bool{},
	}, nil
}

// Start reads the journal, discovers the GPUs, and takes over the existing claims and
// sessions. Calls that need these wait until Start has returned.
func (h *Host) Start(ctx context.Context) error {
	j, err := readJournal(h.StateFile)
	if err != nil {
		// The true state is in gpuguest. hostd can manage it without the journal, if that
		// is damaged.
		h.Log.Warn("state file is not used", "err", err)
	}
	driver := h.askDriver(ctx)
	gpus, warnings, err := inventory.Discover(ctx, h.Root, h.Config, j.Names, prober{h.Guest})
	if err != nil {
		return fmt.Errorf("inventory: %w", err)
	}
	names := inventory.Names(gpus, j.Names)
	gpus, more := h.withDriver(gpus, <-driver)
	warnings = append(warnings, more...)
	for _, w := range warnings {
		h.Log.Warn("gpu not available", "err", w)
	}
	for _, g := range gpus {
		h.Log.Info("gpu found", "gpu", g.GetId(), "model", g.GetModel(), "memory", g.GetLimits().GetGlobalMemory())
	}
	h.mu.Lock()
	h.gpus, h.warnings, h.names = gpus, warnings, names
	for _, g := range gpus {
		h.ledger.SetGPU(g.GetId(), g.GetLimits().GetGlobalMemory())
	}
	h.served()
	for _, c := range j.Claims {
		h.claims[c.ID] = c
		for _, gpu := range slices.Sorted(maps.Keys(c.Held)) {
			h.count(gpu)
			if err := h.ledger.Reserve(c.ID, []string{gpu}, c.Held[gpu]); err != nil {
				h.Log.Warn("claim lost a gpu", "claim", c.ID, "gpu", gpu, "err", err)
			}
		}
	}
	for _, b := range j.Borrowed {
		h.borrowed[b.ID] = b
	}
	h.restoreLent(j.Lent)
	for _, op := range j.Operations {
		op.doubt = true
		h.ops[op.Session] = op
	}
	h.save() // a VM may get a card, and hostd be restarted, before anything else is saved
	h.mu.Unlock()
	close(h.discovered)
	if err := h.Cluster.Announce(ctx); err != nil {
		h.Log.Warn("host not reported yet", "err", err)
	}
	if err := h.Resync(ctx); err != nil {
		h.Log.Warn("sessions not known yet", "err", err)
	}
	h.Cluster.AcquireHoldings(ctx)
	h.Reoffer(ctx)
	close(h.ready)
	h.Cluster.Kick()
	return nil
}

// Wait returns when all operations have ended. They end when the context of NewHost ends.
func (h *Host) Wait() { h.work.Wait() }

type prober struct {
	guest gpuctlv1connect.GuestServiceClient
}

func (p prober) Probe(ctx context.Context, r *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
	res, err := p.guest.Probe(ctx, connect.NewRequest(&gpuctlv1.ProbeRequest{Runtime: r}))
	if err != nil {
		return nil, plain(err)
	}
	return res.Msg, nil
}

// plain removes Connect's code from an error's text. It has no meaning for people.
func plain(err error) error {
	var c *connect.Error
	if errors.As(err, &c) {
		return errors.New(c.Message())
	}
	return err
}

// Watch follows gpuguest until ctx ends, and updates the claims.
func (h *Host) Watch(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { h.follow(ctx) })
	wg.Go(func() { h.watchLeases(ctx) })
	wg.Go(func() { h.watchVMs(ctx) })
	wg.Go(func() { h.watchServers(ctx) })
	defer wg.Wait()
	resync, holders := time.NewTicker(resyncEvery), time.NewTicker(holdersEvery)
	defer resync.Stop()
	defer holders.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-resync.C:
			if err := h.Resync(ctx); err != nil && ctx.Err() == nil {
				h.Log.Debug("sessions not listed", "err", err)
			}
		case <-holders.C:
			h.releaseOrphans(ctx)
		}
	}
}

// follow reads gpuguest's stream of sessions, and opens it again when it ends.
func (h *Host) follow(ctx context.Context) {
	for ctx.Err() == nil {
		stream, err := h.Guest.WatchSessions(ctx, connect.NewRequest(&gpuctlv1.WatchSessionsRequest{}))
		if err == nil {
			for stream.Receive() {
				h.handleUpdate(ctx, proto.CloneOf(stream.Msg()))
			}
			err = cmp.Or(stream.Err(), errors.New("ended"))
			_ = stream.Close()
		}
		if ctx.Err() == nil {
			h.Log.Debug("guest stream ended", "err", err)
		}
		_ = wait.For(ctx, 500*time.Millisecond)
	}
}

// handleUpdate processes a message of the stream. The stream may be behind a list. So an unknown
// session is not added from it: that session may have ended already, and another one may
// have its GPU. A new list is requested instead.
func (h *Host) handleUpdate(ctx context.Context, s *gpuctlv1.Session) {
	h.mu.Lock()
	known := h.sessions[s.GetId()] != nil || s.GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED
	if known {
		h.update(s, time.Time{})
	}
	h.mu.Unlock()
	if known {
		return
	}
	if err := h.Resync(ctx); err != nil && ctx.Err() == nil {
		h.Log.Debug("sessions not listed", "err", err)
	}
}

// placement returns the GPUs with these ids. It returns nil if ids is empty or one is
// unknown.
func (h *Host) placement(ids []string) placement {
	var p placement
	for _, id := range ids {
		if far(id) {
			g := inventory.OfCluster(h.Cluster.GPU(id))
			if g == nil {
				return nil
			}
			p = append(p, g)
			continue
		}
		i := slices.IndexFunc(h.gpus, func(g *gpuctlv1.GPU) bool { return g.GetId() == id })
		if i < 0 {
			return nil
		}
		p = append(p, h.gpus[i])
	}
	return p
}

// count enters a GPU of another host into the ledger. How much of it there is is counted by
// the cluster. The caller holds h.mu.
func (h *Host) count(gpu string) {
	if far(gpu) && !h.abroad[gpu] {
		h.abroad[gpu] = true
		h.ledger.SetGPU(gpu, countedElsewhere)
	}
}

// update processes gpuguest's report on a session, from a list that was requested at the time
// asked, or from the stream if that is zero. Only a list ends the doubt about an operation, and
// only one that was requested after the doubt began. The caller holds h.mu.
func (h *Host) update(s *gpuctlv1.Session, asked time.Time) {
	s = h.withNames(s)
	id := s.GetId()
	s = hide(s)
	if text := lostMessage(s); text != s.GetMessage() {
		s = proto.CloneOf(s)
		s.Message = text
	}
	old := h.sessions[id]
	if old != nil && s.GetGeneration() < old.GetGeneration() && s.GetState() != gpuctlv1.SessionState_SESSION_STATE_ENDED {
		return // this message is older than what is known
	}
	ended := s.GetState() == gpuctlv1.SessionState_SESSION_STATE_ENDED
	if old != nil && old.GetState() == gpuctlv1.SessionState_SESSION_STATE_LOST && s.GetState() != gpuctlv1.SessionState_SESSION_STATE_LOST && !ended {
		// Nothing brings it back: this is older than the result that told of the loss. It would give
		// away the target, where its processes may be.
		return
	}
	if ended {
		h.over[id] = time.Now()
	}
	if old == nil && ended {
		return
	}
	if old == nil {
		h.Log.Info("session began", "session", id, "claim", s.GetClaim(), "gpu", s.GetTarget().GetGpu(), "pid", s.GetPid())
		h.sessions[id] = &session{s, time.Now()}
	} else {
		if old.GetState() != s.GetState() {
			h.Log.Info("session is "+expr.StateName(s.GetState()), "session", id, "gpu", s.GetTarget().GetGpu())
		}
		h.noteLapse(old.Session, s)
		old.Session = s
	}
	c := h.claims[s.GetClaim()]
	if c == nil && !ended {
		c = h.adopt(s)
	}
	if op := h.ops[id]; op != nil && op.doubt && op.since.Before(asked) && !changing(s.GetState()) {
		delete(h.ops, id)
		h.conclude(op, s)
		if c != nil && op.Folder != "" && !ended {
			h.revived(op, c, s)
		}
		if c != nil && h.moved(c, s) {
			h.work.Go(func() { h.repeatOffer(h.ctx, c) })
		}
	}
	if c != nil && !ended && h.taken(c, s) {
		h.work.Go(func() { h.repeatOffer(h.ctx, c) })
	}
	if ended {
		delete(h.sessions, id)
		delete(h.homing, id)
		delete(h.last, id)
		if op := h.ops[id]; op != nil && op.doubt {
			delete(h.ops, id)
			h.conclude(op, nil)
			if c != nil {
				op.unmade(c)
			}
		}
	}
	if c != nil {
		h.settle(c)
	}
	h.changes.Put(s.GetId(), s)
}

// adopt makes a claim for a session whose claim is unknown to this hostd. The claim's
// token is lost, so no new session can use it.
func (h *Host) adopt(s *gpuctlv1.Session) *claim {
	gpus := splitIDs(s.GetTarget().GetGpu())
	c := &claim{
		ID: s.GetClaim(), Count: max(1, len(gpus)), Min: s.GetDevice().GetGlobalMemory(), Memory: s.GetDevice().GetGlobalMemory(),
		Name: s.GetDevice().GetName(), Type: s.GetDevice().GetType(), Created: s.GetStartedUnixMs(), Released: true,
		Owner: s.GetOwner(), Weight: s.GetWeight(),
	}
	h.claims[c.ID] = c
	h.Log.Info("claim rebuilt from a session", "claim", c.ID, "session", s.GetId(), "gpu", s.GetTarget().GetGpu())
	return c
}

// onGPU reports whether a session in this state has its GPU.
func onGPU(s gpuctlv1.SessionState) bool {
	return s == gpuctlv1.SessionState_SESSION_STATE_RUNNING || changing(s)
}

// changing reports whether an operation on the session has neither been completed nor
// rolled back.
func changing(s gpuctlv1.SessionState) bool {
	return s == gpuctlv1.SessionState_SESSION_STATE_SWAPPING || s == gpuctlv1.SessionState_SESSION_STATE_HELD
}

// onGPU reports whether the session has the GPU that it names. While a resume is in
// progress it has not: the name is that of the GPU that it gave back at its suspend. The
// caller holds h.mu.
func (h *Host) onGPU(s *gpuctlv1.Session) bool {
	op := h.ops[s.GetId()]
	resuming := op != nil && op.Kind == "resume" && changing(s.GetState())
	return onGPU(s.GetState()) && !resuming
}

// clings reports whether nobody knows on which GPUs a session still is: it is lost, and its
// processes live, as NVIDIA's driver has failed for one of them. What its claim has stays
// reserved until they have ended.
func clings(s *gpuctlv1.Session) bool {
	return s.GetEngine() == driverEngine && s.GetState() == gpuctlv1.SessionState_SESSION_STATE_LOST
}

// needs returns the GPUs that the claim needs: its placement, what is offered to it, the GPUs of
// its sessions, and the targets of their operations. live is whether it has any of these but a
// placement. The caller holds h.mu.
func (h *Host) needs(c *claim) (need map[string]bool, live bool) {
	need = map[string]bool{}
	if !c.Released {
		for _, gpu := range c.GPUs {
			need[gpu] = true
		}
	}
	// A session may begin there until the offer is replaced or withdrawn.
	for _, gpu := range c.Offered {
		need[gpu], live = true, true
	}
	for _, s := range h.sessions {
		if s.GetClaim() != c.ID {
			continue
		}
		live = true
		if clings(s.Session) {
			for _, g := range h.gpus {
				if _, ok := h.ledger.Holds(c.ID, g.GetId()); ok {
					need[g.GetId()] = true
				}
			}
		}
		if h.onGPU(s.Session) {
			for _, gpu := range splitIDs(s.GetTarget().GetGpu()) {
				need[gpu] = true
			}
		}
	}
	for _, op := range h.ops {
		if op.Claim != c.ID {
			continue
		}
		live = true
		for _, gpu := range slices.Concat(op.GPUs, op.From) {
			need[gpu] = true
		}
	}
	if c.VM != nil && h.serves(c) {
		live = true
		for _, gpu := range c.GPUs {
			need[gpu] = true
		}
	}
	return need, live
}

// settle makes the ledger agree with what the claim needs. The caller holds h.mu.
func (h *Host) settle(c *claim) {
	need, live := h.needs(c)
	keep := slices.Sorted(maps.Keys(need))
	h.ledger.Retain(c.ID, keep)
	for _, gpu := range keep {
		h.count(gpu)
		if _, ok := h.ledger.Holds(c.ID, gpu); ok {
			continue
		}
		room, _ := h.ledger.Room(c.ID, gpu)
		amount := c.amount(room)
		if err := h.ledger.Reserve(c.ID, []string{gpu}, amount); err != nil && !errors.Is(err, ledger.ErrUnknownGPU) {
			h.Log.Error("gpu is used by a claim that does not hold it", "claim", c.ID, "gpu", gpu, "err", err)
		}
	}
	h.Cluster.Kick()
	if c.Released && !live {
		delete(h.claims, c.ID)
		h.ledger.Retain(c.ID, nil)
		h.Log.Info("claim ended", "claim", c.ID)
	}
	h.save()
}

// serves reports whether a far executor runs, or is being started, by a claim of this host.
// The caller holds h.mu.
func (h *Host) serves(c *claim) bool {
	for _, l := range h.lent {
		if l.Claim == c.ID {
			return true
		}
	}
	return h.lending[c.ID] > 0
}

// moved changes the claim's placement to that of its session, so that new sessions start
// there, and reports whether it did. It does not if another session of the claim has a
// GPU. The caller holds h.mu and repeats the offer.
func (h *Host) moved(c *claim, s *gpuctlv1.Session) bool {
	for _, other := range h.sessions {
		if other.GetClaim() == c.ID && other.GetId() != s.GetId() && h.onGPU(other.Session) {
			return false
		}
	}
	var now []string
	if onGPU(s.GetState()) {
		now = splitIDs(s.GetTarget().GetGpu())
	}
	if slices.Equal(now, c.GPUs) {
		return false
	}
	c.place(now)
	return true
}

// save writes the journal. The caller holds h.mu.
func (h *Host) save() {
	j := journal{Version: journalVersion, Revision: journalRevision, Names: h.names}
	for _, c := range h.claims {
		c.Held = map[string]uint64{}
		for _, g := range h.counted() {
			if n, ok := h.ledger.Holds(c.ID, g); ok {
				c.Held[g] = n
			}
		}
		for g := range h.abroad {
			if n, ok := h.ledger.Holds(c.ID, g); ok {
				c.Held[g] = n
			}
		}
		j.Claims = append(j.Claims, c)
	}
	for _, b := range h.borrowed {
		j.Borrowed = append(j.Borrowed, b)
	}
	for _, l := range h.lent {
		j.Lent = append(j.Lent, l)
	}
	for _, op := range h.ops {
		j.Operations = append(j.Operations, op)
	}
	data, err := j.encode()
	if err == nil && bytes.Equal(data, h.saved) {
		return
	}
	if err == nil {
		// Not synced to disk: the sessions end with the kernel, too.
		err = beneath.Replace(filepath.Dir(h.StateFile), filepath.Base(h.StateFile), data, 0o600)
	}
	if h.saved = data; err != nil {
		h.saved = nil
		h.Log.Error("state not saved: a restart of hostd would forget claims", "err", err)
	}
}

// view returns copies of the GPUs, with their owners. The caller holds h.mu.
func (h *Host) view() []*gpuctlv1.GPU { return h.viewOf(h.gpus) }

func (h *Host) viewOf(gpus []*gpuctlv1.GPU) []*gpuctlv1.GPU {
	out := make([]*gpuctlv1.GPU, 0, len(gpus))
	for _, g := range gpus {
		g = proto.CloneOf(g)
		g.FreeMemory, g.Free = h.ledger.Room("", g.GetId())
		owners := h.ledger.Owners(g.GetId())
		for _, id := range slices.Sorted(maps.Keys(owners)) {
			owner := &gpuctlv1.Owner{Claim: id, Memory: owners[id], Host: h.lentTo(id)}
			if c := h.claims[id]; c != nil {
				owner.Owner, owner.Weight = c.Owner, c.Weight
			}
			for _, s := range h.sessions {
				if s.GetClaim() == id && h.onGPU(s.Session) && slices.Contains(splitIDs(s.GetTarget().GetGpu()), g.GetId()) {
					owner.Sessions = append(owner.Sessions, s.GetId())
					owner.Share = addShare(owner.Share, s.GetShare())
				}
			}
			slices.Sort(owner.Sessions)
			g.Owners = append(g.Owners, owner)
		}
		out = append(out, g)
	}
	return out
}

// find returns the session that the user's reference names: an id, the beginning of one,
// or a process id. The caller holds h.mu.
func (h *Host) find(ref string) (*gpuctlv1.Session, error) {
	ids := slices.Sorted(maps.Keys(h.sessions))
	if ref == "" {
		switch len(ids) {
		case 0:
			return nil, reason.Detail(fmt.Errorf("%w: there is no session", errNotFound)).On("session", "").Do("start one with gpuctl run -- COMMAND")
		case 1:
			return h.sessions[ids[0]].Session, nil
		}
		return nil, reason.Errorf(reason.Ambiguous, "%w: there are %d sessions, name one of %s", errInvalid, len(ids), strings.Join(ids, ", "))
	}
	if s := h.sessions[ref]; s != nil {
		return s.Session, nil
	}
	if pid, err := strconv.ParseUint(ref, 10, 32); err == nil {
		var found []*gpuctlv1.Session
		for _, id := range ids {
			if uint64(h.sessions[id].GetPid()) == pid {
				found = append(found, h.sessions[id].Session)
			}
		}
		if len(found) == 1 {
			return found[0], nil
		}
	}
	var matches []string
	for _, id := range ids {
		if strings.HasPrefix(id, ref) || strings.HasPrefix(id, "s-"+ref) {
			matches = append(matches, id)
		}
	}
	switch len(matches) {
	case 1:
		return h.sessions[matches[0]].Session, nil
	case 0:
		return nil, reason.Detail(fmt.Errorf("%w: no session %q%s", errNotFound, ref, suggest.Hint(ref, ids))).On("session", ref).Do("gpuctl sessions lists them")
	}
	return nil, reason.Errorf(reason.Ambiguous, "%w: session %q can be %s", errInvalid, ref, strings.Join(matches, " or ")).On("session", ref)
}

func cloneLimits(l *gpuctlv1.Limits) *gpuctlv1.Limits {
	if l == nil {
		return &gpuctlv1.Limits{}
	}
	return proto.CloneOf(l)
}

// Alive is the watchdog's probe: it does not return while h.mu is deadlocked.
func (h *Host) Alive(context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return nil
}

// Live returns the number of sessions. If gpuguest does not answer, it counts those that
// were known last.
func (h *Host) Live(ctx context.Context) int {
	if err := h.Resync(ctx); err != nil {
		h.Log.Debug("sessions are as last seen", "err", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.sessions)
}
