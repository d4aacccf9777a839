package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/size"
)

// Names of the steps of a migration whose applications compute on a remote GPU meanwhile.
const (
	StepBorrow = "borrow"
	StepSwap   = "swap"
	StepHome   = "home"
)

// LiveProtocol is the lowest version of gpuguest whose sessions can compute on a remote GPU.
const LiveProtocol = 3

// Live is whether the applications compute on a remote GPU while their VM moves.
type Live string

// The default is LiveAuto: they do if that is predicted to shorten their downtime.
const (
	LiveAuto   Live = ""
	LiveAlways Live = "always"
	LiveNever  Live = "never"
)

// Codes of reasons why the applications do not compute on a remote GPU meanwhile, and why a
// GPU does not fit for that. They are part of the API.
const (
	ReasonLiveOld     = "agent_old_live"
	ReasonLiveCUDA    = "live_cuda"
	ReasonNoSessions  = "no_sessions"
	ReasonNoRemote    = "no_remote_gpu"
	ReasonNotShorter  = "not_shorter"
	ReasonUnprotected = "live_lock_manager"
	ReasonNotReached  = "not_reached"
	ReasonCandidate   = "remote_meanwhile"
)

// Far is a remote GPU that is lent to a VM.
type Far struct {
	GPU   string // id
	Claim string // the VM's claim of it
}

// FarFacts are what a plan needs to know about a GPU that could be lent to the VM.
type FarFacts struct {
	GPUFacts
	Host      string
	HostState string // ready, draining or down
	Error     string // why the VM does not reach the host's port for carriers; empty: it does
	Through   bool   // it does so through its host, not over its network
	RTT       time.Duration
	Link      uint64 // speed to the VM's host, bytes per second; 0: unknown
}

// LivePlan is the part of a plan about the remote GPU.
type LivePlan struct {
	Far       *FarFacts // nil: the applications are frozen
	Reasons   []*gpuctlv1.Reason
	Rejected  []Rejection
	Otherwise time.Duration // predicted downtime of the other way; 0: that is impossible
}

// running plans a migration that does not stop the VM: with its applications on a remote GPU
// meanwhile, or frozen.
func running(r Request, m VMFacts, hosts []HostFacts, model *CostModel) *Plan {
	frozen := judge(r, m, hosts, model)
	if r.Live == LiveNever || len(m.GPUs) == 0 || m.Agent == nil {
		if r.Live == LiveAlways && len(m.GPUs) == 0 {
			frozen.Reasons = append(frozen.Reasons, because(ReasonNoGPU, "VM %s has no GPU: none of its applications has to compute elsewhere meanwhile; leave out --live", m.Name))
		}
		return frozen
	}
	out := &LivePlan{Reasons: againstLive(m)}
	if len(out.Reasons) > 0 {
		return frozen.without(r, out)
	}
	live := liveOn(r, m, hosts, model, frozen, out)
	if live == nil {
		out.Reasons = append(out.Reasons, because(ReasonNoRemote, "no GPU of the cluster can be lent to VM %s meanwhile", m.Name))
		return frozen.without(r, out)
	}
	live.Live = out
	if r.Live == LiveAuto && frozen.Possible() {
		mine, other := live.Candidates[0], frozen.Candidates[0]
		if mine.Cost.Stop >= other.Cost.Stop || mine.GPU.ID != other.GPU.ID {
			out.Reasons = append(out.Reasons, because(ReasonNotShorter, "on %s meanwhile, its downtime is predicted to be %s, and %s otherwise", out.Far.ID, mine.Cost.Stop.Round(time.Millisecond), other.Cost.Stop.Round(time.Millisecond)))
		}
		if names := unlocked(m, hosts, mine.Host); len(names) > 0 {
			out.Reasons = append(out.Reasons, because(ReasonUnprotected, "libvirt has no lock manager on %s that keeps it from that: if VM %s ran on both hosts after a lost answer, both copies would compute on %s; with --live it is done all the same", strings.Join(names, " and "), m.Name, out.Far.ID))
		}
	}
	if frozen.Possible() {
		out.Otherwise = frozen.Candidates[0].Cost.Stop
	}
	if len(out.Reasons) > 0 {
		out.Otherwise = live.Candidates[0].Cost.Stop
		return frozen.without(r, out)
	}
	return live
}

// without returns the plan in which the applications are frozen, with why they do not
// compute meanwhile. It is impossible if the operator wants that.
func (p *Plan) without(r Request, l *LivePlan) *Plan {
	l.Far = nil
	p.Live = l
	if r.Live == LiveAlways {
		p.Reasons = append(p.Reasons, l.Reasons...)
	}
	return p
}

// liveOn returns the plan with the best remote GPU that leaves a candidate; nil: there is
// none. It adds the GPU, and those that do not fit, to out.
func liveOn(r Request, m VMFacts, hosts []HostFacts, model *CostModel, frozen *Plan, out *LivePlan) *Plan {
	var fit []FarFacts
	for _, f := range m.Far {
		if reasons := againstFar(m, f); len(reasons) > 0 {
			out.Rejected = append(out.Rejected, Rejection{f.Host, f.ID, f.Model, reasons})
			continue
		}
		fit = append(fit, f)
	}
	to := m.Host
	if len(frozen.Candidates) > 0 {
		to = frozen.Candidates[0].Host
	}
	sortFar(m, to, frozen.Candidates, fit)
	for _, f := range fit {
		r.far = &f
		if p := judge(r, m, hosts, model); p.Possible() {
			out.Far = &f
			return p
		}
	}
	return nil
}

// sortFar sorts the best remote GPU first. One that the VM could get for good is left for
// that. A GPU of a third host comes after those of the VM's own two: if that host fails, the
// applications are lost.
func sortFar(m VMFacts, to string, candidates []Candidate, all []FarFacts) {
	rank := func(f FarFacts) int {
		switch {
		case slices.ContainsFunc(candidates, func(c Candidate) bool { return c.GPU.ID == f.ID }):
			return 2
		case f.Host != m.Host && f.Host != to:
			return 1
		}
		return 0
	}
	slices.SortStableFunc(all, func(a, b FarFacts) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(b.Rank, a.Rank), cmp.Compare(b.Link, a.Link), cmp.Compare(a.RTT, b.RTT), strings.Compare(a.ID, b.ID))
	})
}

// againstLive returns why no remote GPU can serve the VM's applications.
func againstLive(m VMFacts) (out []*gpuctlv1.Reason) {
	if n := len(m.Agent.ofDriver()); n > 0 {
		out = append(out, because(ReasonLiveCUDA, "CUDA programs run in VM %s (%d): they cannot compute on a remote GPU", m.Name, n))
	}
	if m.Agent.Protocol < LiveProtocol {
		out = append(out, because(ReasonLiveOld, "gpuguest %s in VM %s speaks protocol %d, and remote GPUs take %d: install a newer one there", m.Agent.Version, m.Name, m.Agent.Protocol, LiveProtocol))
	}
	if !slices.ContainsFunc(m.Agent.Sessions, func(s SessionFacts) bool { return s.Memory == 0 || s.Resident < s.Memory }) {
		out = append(out, because(ReasonNoSessions, "no application of VM %s computes", m.Name))
	}
	return out
}

// againstFar returns why a GPU cannot serve the VM's applications over the network.
func againstFar(m VMFacts, f FarFacts) (out []*gpuctlv1.Reason) {
	add := func(when bool, code, format string, args ...any) {
		if when {
			out = append(out, because(code, format, args...))
		}
	}
	add(f.HostState != "ready", ReasonHostState, "host %s is %s", f.Host, f.HostState)
	add(f.Holder != "", ReasonTaken, "%s belongs to %s", f.ID, f.Holder)
	add(f.Health != "", ReasonHealth, "%s is not fit: %s", f.ID, f.Health)
	add(f.IsCordoned, ReasonCordoned, "%s is cordoned%s", f.ID, message(f.Cordoned))
	state := m.state()
	add(f.Memory > 0 && state > f.Memory, ReasonGPUMemory, "the applications of VM %s use %s and %s has %s", m.Name, size.Format(state), f.ID, size.Format(f.Memory))
	for _, s := range m.Agent.Sessions {
		out = append(out, outgrown(s, f.GPUFacts)...)
	}
	if len(out) == 0 {
		add(f.Error != "", ReasonNotReached, "VM %s does not reach the port for carriers of host %s over its network: %s", m.Name, f.Host, f.Error)
	}
	return out
}

// borrow adds the steps by which the applications go to the remote GPU.
func (l *list) borrow() {
	host := HostOf(l.GetFarGpu())
	l.add(l.live, step{
		StepBorrow, fmt.Sprintf("bind a claim of %s to %s, for the time of the move", l.GetName(), l.GetFarGpu()), "the claim is released", time.Minute,
		func(ctx context.Context, r *run) error {
			return r.Sites.Site(host).Lend(ctx, r.vm(), r.far())
		},
		func(ctx context.Context, r *run) error { return r.endLend(ctx) },
	})
	l.add(l.live, step{
		StepSwap, fmt.Sprintf("swap the applications to %s, where they compute over the network", l.GetFarGpu()), "they are swapped back", 20*time.Minute + freezePatience(l.MachineMove),
		func(ctx context.Context, r *run) error { return r.depart(ctx) },
		func(ctx context.Context, r *run) error { return r.home(ctx, r.from(), r.move().GetFromGpu()) },
	})
}

// comeHome adds the step by which they leave it.
func (l *list) comeHome() {
	l.add(l.live, step{
		StepHome, "swap the applications to " + l.GetToGpu(), "they are swapped to " + l.GetFarGpu() + " again", 20*time.Minute + freezePatience(l.MachineMove),
		func(ctx context.Context, r *run) error { return r.home(ctx, r.to(), r.move().GetToGpu()) },
		func(ctx context.Context, r *run) error { return r.swap(ctx, r.to()) },
	})
}

func (r *run) far() Far { return Far{GPU: r.move().GetFarGpu(), Claim: r.move().GetFarClaim()} }

// depart records which sessions run, and swaps them to the remote GPU.
func (r *run) depart(ctx context.Context) error {
	facts, err := r.sessions(ctx)
	if err != nil {
		return err
	}
	if cuda := facts.ofDriver(); len(cuda) > 0 {
		return fmt.Errorf("session %s (%s) is of a CUDA program, which cannot compute on a remote GPU", cuda[0].ID, cuda[0].Command)
	}
	if err := r.note(facts.Sessions); err != nil {
		return err
	}
	if err := r.put(ctx); err != nil {
		return err
	}
	return r.swap(ctx, r.from())
}

// releaseLimit is how long a release may take. Applications that have begun since the swap
// follow the others first.
func releaseLimit(live bool) time.Duration {
	if live {
		return 10 * time.Minute
	}
	return time.Minute
}

// newcomers is how often applications that have begun since the swap are swapped, too.
const newcomers = 3

// release makes the VM release the card that it leaves.
func (r *run) release(ctx context.Context) error {
	err := r.from().Release(ctx, r.vm(), r.move().GetFromGpu())
	for range newcomers {
		if err == nil || r.move().GetFarGpu() == "" || errors.Is(err, ErrUnreachable) || errors.Is(err, ErrStale) {
			return err
		}
		known := len(r.move().GetSessions())
		if derr := r.depart(ctx); derr != nil {
			return errors.Join(err, derr)
		}
		if len(r.move().GetSessions()) == known {
			return err // it is not for a new application
		}
		err = r.from().Release(ctx, r.vm(), r.move().GetFromGpu())
	}
	return err
}

// swap moves the recorded sessions to the remote GPU.
func (r *run) swap(ctx context.Context, s Site) error {
	stopped, err := s.Swap(ctx, r.vm(), r.far(), r.move().GetSessions(), freezePatience(r.move()), r.progress)
	r.stopped = max(r.stopped, stopped)
	return r.account(ctx, s, err)
}

// home moves the recorded sessions to a card, after the VM has found it.
func (r *run) home(ctx context.Context, s Site, gpu string) error {
	if err := s.Await(ctx, r.vm(), gpu); err != nil {
		return err
	}
	stopped, err := s.Home(ctx, r.vm(), gpu, r.move().GetSessions(), freezePatience(r.move()), r.progress)
	r.stopped = max(r.stopped, stopped)
	return r.account(ctx, s, err)
}

// endLend ends what computes on the remote GPU, and the claim of it.
func (r *run) endLend(ctx context.Context) error {
	if r.move().GetFarGpu() == "" {
		return nil
	}
	return r.Sites.Site(HostOf(r.move().GetFarGpu())).EndLend(ctx, r.vm(), r.far())
}

// distrust ends what computes for a VM that runs twice: both copies have used the same far
// executors, so nobody knows whose results these have. The applications are lost rather than
// wrong. It returns in words what was done.
func (r *run) distrust(ctx context.Context) string {
	if r.move().GetFarGpu() == "" || r.move().GetCold() {
		return ""
	}
	if err := r.endLend(ctx); err != nil {
		return fmt.Sprintf("; what computes for it on %s could not be ended: %v", r.move().GetFarGpu(), err)
	}
	return fmt.Sprintf("; what computed for it on %s was ended, as both copies have used it", r.move().GetFarGpu())
}

// freezeInstead goes forward again if the remote GPU could not be had: the applications are
// frozen then. They are on their card, and nothing else was changed yet. If an operator
// wants them to compute meanwhile, the migration is undone.
func (r *run) freezeInstead(ctx context.Context) (turned bool, err error) {
	m, done := r.move(), r.m.GetDone()
	if m.GetFarGpu() == "" || m.GetLive() || m.GetAborting() || m.GetFailed() != StepBorrow && m.GetFailed() != StepSwap {
		return false, nil
	}
	if len(done) > 0 && done[len(done)-1] != StepPrepare { // the VM's own card is not prepared
		return false, nil
	}
	r.Log.Warn("the applications are frozen meanwhile: the remote GPU cannot be had", "migration", r.m.GetId(), "gpu", m.GetFarGpu(), "err", r.m.GetMessage())
	m.FarGpu, m.FarClaim, m.Sessions, m.Undoing, m.Failed = "", "", nil, false, ""
	r.m.Step, r.m.Message = "", ""
	r.load()
	return true, r.put(ctx)
}

// waits reports whether a step must not be done before an operator says so: the applications
// compute on the remote GPU, and the VM has no card.
func (r *run) waits(name string) bool {
	return name == StepAttach && r.move().GetWait() && r.move().GetFarGpu() != "" && !r.move().GetUndoing()
}

// Waiting reports whether a migration is held because an operator wants that, with nothing
// wrong: its applications compute on the remote GPU.
func Waiting(m *clusterv1.Migration) bool {
	mm := m.GetMachine()
	if m.GetState() != clusterv1.MigrationState_MIGRATION_STATE_HELD || !mm.GetWait() || mm.GetFarGpu() == "" || mm.GetUndoing() || mm.GetTwice() {
		return false
	}
	for _, name := range StepNames(mm) {
		if !slices.Contains(m.GetDone(), name) {
			return name == StepAttach
		}
	}
	return false
}

// wait ends the driver's work for now. The record stays, with the claim of the remote GPU.
func (r *run) wait(ctx context.Context) error {
	m := r.move()
	return r.finish(ctx, clusterv1.MigrationState_MIGRATION_STATE_HELD, fmt.Sprintf("the applications of VM %s compute on %s, and %s can be serviced; gpuctl migrations resume %s gives the VM %s, gpuctl migrations abort %s puts all back",
		m.GetName(), m.GetFarGpu(), m.GetFromGpu(), r.m.GetId(), m.GetToGpu(), r.m.GetId()))
}

// standstill returns the downtime of the applications: from freeze to thaw or from park to
// restore, and of their swaps.
func standstill(steps []*clusterv1.MigrationStep) int64 {
	from, to := still(steps)
	out := max(0, to-from)
	for _, s := range steps {
		out += s.GetStoppedNs()
	}
	return out
}
