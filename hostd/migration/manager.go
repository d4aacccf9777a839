package migration

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/busy"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// Node gives access to the cluster.
type Node interface {
	Log
	Status() *clusterv1.StatusResponse
	PutMigration(ctx context.Context, r *clusterv1.Migration, takeOver bool) (*clusterv1.Migration, error)
	Site(host string) (gpuctlv1connect.SiteServiceClient, error)
	Migrations(host string) (gpuctlv1connect.MigrationServiceClient, error)
	// Note adds an event to the cluster's log.
	Note(e *clusterv1.Event)
}

// Config has what a Manager depends on, and its settings.
type Config struct {
	Node Node
	// VMs lists the VMs of all hosts, and the hosts that did not answer.
	VMs func(ctx context.Context) ([]*gpuctlv1.Machine, []string)
	// Ready reports whether this host may continue the migrations that it drove before.
	Ready func() bool
	Most  int // most migrations from or to one host at a time; 0: 2
	Log   *slog.Logger
	Every time.Duration // time between two searches for migrations without a driver; 0: 2 s
	// Rehearse lets the CUDA programs of a VM of this host go through it.
	Rehearse func(ctx context.Context, uuid, name string, patience time.Duration, send func(*gpuctlv1.OperationUpdate) error) error
	// Before is migrate.Config.Before, for tests.
	Before func(step string, undo bool) error
}

// Manager drives migrations. It is safe for concurrent use.
type Manager struct {
	Config
	Records
	work sync.WaitGroup
	// starting has the VMs, by UUID, whose migration is being started or taken over: its
	// record exists already, but it is not in runs yet.
	starting busy.Set

	mu   sync.Mutex
	ctx  context.Context
	runs map[string]*watched // migrations that this host drives, by id
}

// watched is a migration that this host drives, with its progress for clients.
type watched struct {
	last    *gpuctlv1.MachineProgress
	left    bool          // not driven by this host any more: last is the final progress
	changed chan struct{} // closed when last changes
	records *recorder
	began   time.Time
}

// New returns a Manager. It drives migrations only while Run runs.
func New(c Config) *Manager {
	if c.Most == 0 {
		c.Most = 2
	}
	if c.Every == 0 {
		c.Every = 2 * time.Second
	}
	return &Manager{Config: c, Records: NewRecords(c.Node), runs: map[string]*watched{}}
}

// Run continues the migrations that this host drove before, and takes over those whose
// driver is down, until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	m.mu.Lock()
	m.ctx = ctx
	m.mu.Unlock()
	tick := time.NewTicker(m.Every)
	defer tick.Stop()
	for {
		if m.Ready() {
			m.adopt(ctx)
		}
		select {
		case <-ctx.Done():
			m.work.Wait()
			return
		case <-tick.C:
		}
	}
}

// Leaving returns the migration of a VM of this host that has not ended; empty: none. Unlike Moving, it knows one whose
// record is not applied here yet, and there is an error while one is being begun: it may have been planned.
func (m *Manager) Leaving(ctx context.Context, uuid string) (migration string, err error) {
	if m.starting.Has(uuid) {
		return "", errBegun
	}
	v := m.Node.View()
	if v == nil {
		return "", nil // this host is in no cluster
	}
	if now, err := m.committed(ctx); err == nil {
		v = now
	}
	return runs(v, uuid), nil
}

var errBegun = reason.New(reason.Busy, "a migration of it is being begun, or rehearsed: try again when that has ended")

// endTimeout is how long a host may take to end what computes for a VM.
const endTimeout = 30 * time.Second

// adopt takes over the migrations that this host is to drive. In an old state their drivers
// may be missing or down that are not.
func (m *Manager) adopt(ctx context.Context) {
	if !m.Node.CaughtUp() {
		return
	}
	v := m.Node.View()
	if v == nil {
		return
	}
	for r := range v.Migrations() {
		if r.GetMachine() == nil || r.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING || !m.mine(v, r) {
			continue
		}
		if err := m.takeOver(ctx, r); err != nil {
			m.Log.Warn("migration not taken over", "migration", r.GetId(), "err", err)
		}
	}
}

// takeOver begins to drive a migration, unless this host drives it already.
func (m *Manager) takeOver(ctx context.Context, r *clusterv1.Migration) error {
	end, err := m.alone(r.GetMachine().GetUuid(), r.GetMachine().GetName())
	if err != nil {
		return nil // another call has just begun with it
	}
	defer end()
	m.mu.Lock()
	_, running := m.runs[r.GetId()]
	m.mu.Unlock()
	if running {
		return nil
	}
	kept, err := m.Node.PutMigration(ctx, r, true)
	if err != nil || kept.GetState() != clusterv1.MigrationState_MIGRATION_STATE_RUNNING { // it is held, and this host has not learned that yet
		return err
	}
	m.Log.Info("going on with a migration", "migration", r.GetId(), "step", r.GetStep(), "driver", r.GetDriver())
	m.begin(kept)
	return nil
}

// mine reports whether this host is to drive a migration.
func (m *Manager) mine(v *state.View, r *clusterv1.Migration) bool {
	self := m.Node.HostName()
	if r.GetDriver() == self {
		return true
	}
	down := func(host string) bool {
		h := v.Host(host)
		return h == nil || h.GetState() == clusterv1.HostState_HOST_STATE_DOWN
	}
	switch {
	case !down(r.GetDriver()):
		return false
	case !down(r.GetMachine().GetToHost()):
		return r.GetMachine().GetToHost() == self
	case !down(r.GetMachine().GetFromHost()):
		return r.GetMachine().GetFromHost() == self
	}
	return m.Node.Status().GetLeader() == self
}

// sites implements migrate's interfaces for one migration.
type sites struct {
	node  Node
	id    string
	token uint64
}

func (s sites) Site(host string) migrate.Site { return s.site(host) }

// hosts returns the hosts of the cluster.
func (s sites) hosts() (all []string) {
	v := s.node.View()
	if v == nil {
		return nil
	}
	for h := range v.Hosts() {
		all = append(all, h.GetName())
	}
	return all
}

// site returns a host's part. A host that was removed from the cluster is like one that
// does not answer: the migration must be able to end without it.
func (s sites) site(host string) *endpoint.Remote {
	c, err := s.node.Site(host)
	if err != nil {
		c = gpuctlv1connect.NewSiteServiceClient(unknown{err}, "https://"+host)
	}
	return &endpoint.Remote{Host: host, Migration: s.id, Token: s.token, Service: c}
}

// unknown is the HTTP client for a host whose address is not known.
type unknown struct{ err error }

// Do returns why.
func (u unknown) Do(*http.Request) (*http.Response, error) { return nil, u.err }

// Reserve makes the card's host assign the card to the claim, because that host manages
// the claim.
func (s sites) Reserve(ctx context.Context, claim string, m vm.VM, gpu string) error {
	return s.site(migrate.HostOf(gpu)).Reserve(ctx, m, gpu, claim)
}

// EndClaim makes the card's host give the card back, which ends the claim.
func (s sites) EndClaim(ctx context.Context, _ string, m vm.VM, gpu string) error {
	return s.site(migrate.HostOf(gpu)).GiveBack(ctx, m, gpu)
}

// begin drives a migration that is recorded, until its end.
func (m *Manager) begin(r *clusterv1.Migration) *watched {
	w := &watched{last: progress(r, 0, 0), changed: make(chan struct{}), records: newRecorder(m.Node, r), began: time.Now()}
	if r.GetStartedUnixMs() > 0 {
		w.began = time.UnixMilli(r.GetStartedUnixMs())
	}
	m.mu.Lock()
	ctx := m.ctx
	m.runs[r.GetId()] = w
	m.mu.Unlock()
	s := sites{m.Node, r.GetId(), r.GetToken()}
	runner := migrate.New(migrate.Config{
		Sites: s, Claims: s, Journal: w.records, Hosts: s.hosts, Log: m.Log, Before: m.Before,
		Aborting: func(string) bool { return w.records.aborted(ctx) },
		Report: func(r *clusterv1.Migration, done, total uint64, waits string) {
			p := progress(r, done, total)
			if waits != "" {
				p.Message = waits
			}
			m.tell(w, p, false)
		},
	})
	m.work.Go(func() {
		known := len(r.GetMachine().GetLost())
		last, err := runner.Run(ctx, r)
		p, left := progress(last, 0, 0), false
		if len(last.GetMachine().GetLost()) > known {
			m.Node.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_MIGRATION, Object: last.GetId(), Type: "MigrationSessionsLost", Message: excerpt.Of(migrate.LostWords(last.GetMachine()), 1024)})
		}
		switch {
		case err == nil && last.GetMachine().GetTwice():
			m.Node.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_MIGRATION, Object: last.GetId(), Type: "MachineOnTwoHosts", Message: last.GetMessage()})
			p.End = endOf(last)
			m.distrust(ctx, last.GetMachine())
			m.Log.Error("a VM runs on two hosts", "migration", r.GetId(), "machine", r.GetMachine().GetName(), "message", last.GetMessage())
		case err == nil && last.GetMachine().GetKeptOn() != "":
			m.Node.Note(&clusterv1.Event{Kind: clusterv1.Kind_KIND_MIGRATION, Object: last.GetId(), Type: "MachineKept", Message: last.GetMessage()})
			p.End = endOf(last)
			m.Log.Error("libvirt keeps a copy of a VM from running", "migration", r.GetId(), "machine", r.GetMachine().GetName(), "host", last.GetMachine().GetKeptOn(), "message", last.GetMessage())
		case err != nil:
			p.Message, left = fmt.Sprintf("not driven here any more: %v", err), true
			m.Log.Warn("migration is not driven here any more", "migration", r.GetId(), "err", err)
		default:
			p.End = endOf(last)
			m.Log.Info("migration ended", "migration", r.GetId(), "machine", r.GetMachine().GetName(), "state", p.GetEnd(), "message", last.GetMessage(),
				"stopped", time.Duration(last.GetStoppedNs()))
		}
		m.mu.Lock()
		if m.runs[r.GetId()] == w { // otherwise it was started again meanwhile
			delete(m.runs, r.GetId())
		}
		m.mu.Unlock()
		m.tell(w, p, left)
	})
	return w
}

// distrust ends the remote GPU that a VM has lastingly, if it runs twice: both copies have
// used its far executors, so nobody knows whose results these have. What fails is left to
// the host that lends, which refuses the second copy, and to the operator.
func (m *Manager) distrust(ctx context.Context, move *clusterv1.MachineMove) {
	v := m.Node.View()
	if v == nil {
		return
	}
	claim := endpoint.LastingClaim(move.GetUuid())
	for as := range v.AssignmentsOfClaim(claim) {
		call, cancel := context.WithTimeout(ctx, endTimeout)
		c, err := m.Node.Site(as.GetHost())
		if err == nil {
			_, err = c.EndLend(call, connect.NewRequest(&gpuctlv1.SiteLendRequest{
				Machine: &gpuctlv1.SiteMachine{Uuid: move.GetUuid(), Name: move.GetName()}, Gpu: as.GetGpu(), Claim: claim,
			}))
		}
		cancel()
		m.Log.Error("the remote GPU of a VM that runs twice is taken from it, as both copies have used it", "machine", move.GetName(), "gpu", as.GetGpu(), "err", err)
	}
}

// endOf returns the state of a migration as a word in lower case. One that is held because
// an operator wants that is waiting.
func endOf(r *clusterv1.Migration) string {
	if migrate.Waiting(r) {
		return "waiting"
	}
	return strings.ToLower(strings.TrimPrefix(r.GetState().String(), "MIGRATION_STATE_"))
}

// tell stores the progress and wakes the clients that watch. left means that it is the
// final progress.
func (m *Manager) tell(w *watched, p *gpuctlv1.MachineProgress, left bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.TookNs = int64(time.Since(w.began))
	w.last, w.left = p, left
	close(w.changed)
	w.changed = make(chan struct{})
}

// progress returns the progress of a migration in the API's form.
func progress(r *clusterv1.Migration, done, total uint64) *gpuctlv1.MachineProgress {
	p := &gpuctlv1.MachineProgress{
		Id: r.GetId(), Step: r.GetStep(), BytesDone: done, BytesTotal: total, Gpu: r.GetMachine().GetToGpu(), Message: r.GetMessage(),
		StoppedNs: r.GetStoppedNs(), PredictedNs: r.GetMachine().GetPredictedNs(),
		Lost: r.GetMachine().GetLost(), LostUnknown: r.GetMachine().GetLostUnknown(),
	}
	if r.GetState() == clusterv1.MigrationState_MIGRATION_STATE_HELD {
		p.Next = "gpuctl migrations resume " + r.GetId() // the message says with which options
	}
	names := migrate.StepNames(r.GetMachine())
	p.Steps, p.StepIndex = uint32(len(names)), uint32(slices.Index(names, r.GetStep())+1)
	if n := len(r.GetSteps()); n > 0 {
		p.Undo = r.GetSteps()[n-1].GetUndo()
	}
	return p
}

// follow sends the progress of a migration that this host drives, until its end. ok is
// false if this host does not drive it.
func (m *Manager) follow(ctx context.Context, id string, send func(*gpuctlv1.MachineProgress) error) (ok bool, err error) {
	m.mu.Lock()
	w := m.runs[id]
	m.mu.Unlock()
	if w == nil {
		return false, nil
	}
	return true, m.watch(ctx, w, send)
}

func (m *Manager) watch(ctx context.Context, w *watched, send func(*gpuctlv1.MachineProgress) error) error {
	for {
		m.mu.Lock()
		last, left, changed := proto.CloneOf(w.last), w.left, w.changed
		m.mu.Unlock()
		if err := send(last); err != nil {
			return err
		}
		if last.GetEnd() != "" || left {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
