package migrate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// errAborted means that an operator has aborted the migration.
var errAborted = errors.New("aborted by an operator")

// Config has what a Runner depends on, and its settings.
type Config struct {
	Sites   Sites
	Claims  Claims
	Journal Journal
	// Aborting reports whether an operator has aborted a migration.
	Aborting func(id string) bool
	// Hosts returns the hosts of the cluster; nil: they are not known.
	Hosts func() []string
	// Report is called with each progress. It must not block. waits is what the step
	// waits for.
	Report func(m *clusterv1.Migration, done, total uint64, waits string)
	// Before is called before each step. If it returns an error, the step fails. For
	// tests.
	Before func(step string, undo bool) error
	Log    *slog.Logger

	Patience time.Duration // how long to wait for unreachable hosts: 2 min; a quarter of it while the VM is on its source and its applications are frozen, and for an undo that can be left to its host
	Pause    time.Duration // interval of attempts: 100 ms
}

// Runner drives migrations.
type Runner struct{ Config }

// New returns a Runner.
func New(c Config) *Runner {
	if c.Patience == 0 {
		c.Patience = 2 * time.Minute
	}
	if c.Pause == 0 {
		c.Pause = 100 * time.Millisecond
	}
	if c.Aborting == nil {
		c.Aborting = func(string) bool { return false }
	}
	if c.Hosts == nil {
		c.Hosts = func() []string { return nil }
	}
	if c.Report == nil {
		c.Report = func(*clusterv1.Migration, uint64, uint64, string) {}
	}
	return &Runner{c}
}

// run is one migration in progress.
type run struct {
	*Runner
	m     *clusterv1.Migration
	kept  *clusterv1.Migration // the last record that was written
	all   []step
	a, b  Site // source and destination
	bytes uint64
	// stopped is the longest downtime of a session in the present step, if that is a swap.
	stopped time.Duration
	began   time.Time // when the present step began
}

func (r *run) move() *clusterv1.MachineMove { return r.m.GetMachine() }
func (r *run) vm() vm.VM                    { return vm.VM{UUID: r.move().GetUuid(), Name: r.move().GetName()} }
func (r *run) from() Site                   { return r.a }
func (r *run) to() Site                     { return r.b }

func (r *run) progress(done, total uint64, waits string) {
	r.bytes = done
	r.Report(r.m, done, total, waits)
}

// Run drives a migration to its end: done, rolled back, held or failed, as the record
// says. The record may be new, or one whose driver does not run any more. If it returns
// an error, this host can do nothing more: another host drives the migration (ErrStale),
// or the record cannot be written. The next driver continues from the record.
func (c *Runner) Run(ctx context.Context, m *clusterv1.Migration) (*clusterv1.Migration, error) {
	r := &run{Runner: c, m: m, kept: proto.CloneOf(m)}
	r.load()
	for {
		ended, err := r.next(ctx)
		if err != nil || ended {
			return r.m, err
		}
	}
}

// load sets the steps and the hosts for the present candidate.
func (r *run) load() {
	r.all = steps(r.move())
	r.a, r.b = r.Sites.Site(r.move().GetFromHost()), r.Sites.Site(r.move().GetToHost())
}

func (r *run) did(name string) bool { return slices.Contains(r.m.GetDone(), name) }

// put writes the record. Without a written record, no step is done. While the cluster has
// no leader, it tries again.
func (r *run) put(ctx context.Context) error {
	for {
		kept, err := r.Journal.Put(ctx, r.m)
		if err == nil {
			r.m, r.kept = kept, proto.CloneOf(kept)
			return nil
		}
		if errors.Is(err, ErrRefused) && r.kept != nil {
			r.m = proto.CloneOf(r.kept) // continue from the last record, which can be undone
		}
		if !errors.Is(err, ErrUnreachable) || ctx.Err() != nil {
			return fmt.Errorf("migration %s: %w", r.m.GetId(), err)
		}
		if err := wait(ctx, r.Pause); err != nil {
			return err
		}
	}
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// next does one step, forward or backward.
func (r *run) next(ctx context.Context) (ended bool, err error) {
	if !r.move().GetUndoing() && !r.did(StepCommit) && (r.move().GetAborting() || r.Aborting(r.m.GetId())) {
		r.m.Machine.Aborting = true
		r.fail(errAborted)
		return false, r.put(ctx)
	}
	if r.move().GetUndoing() {
		return r.back(ctx)
	}
	i := slices.IndexFunc(r.all, func(s step) bool { return !r.did(s.name) })
	if i < 0 {
		return true, r.finish(ctx, clusterv1.MigrationState_MIGRATION_STATE_DONE, "")
	}
	s := r.all[i]
	if r.waits(s.name) {
		return true, r.wait(ctx)
	}
	if s.name == StepDefine || s.name == StepStart {
		r.m.Machine.AbsentOn = nil // it was about an earlier attempt: from now on the VM may be there
		r.leaves(r.move().GetToHost(), false)
	}
	if err := r.enter(ctx, s.name, false); err != nil {
		return false, err
	}
	if s.name == StepCommit && r.move().GetAborting() {
		return false, nil // an operator was faster, and was told that it is undone
	}
	err = r.attempt(ctx, s, s.do, false)
	if stop := r.halted(ctx, err); stop != nil {
		return false, stop
	}
	if err == nil {
		r.m.Done = append(r.m.GetDone(), s.name)
		return false, r.put(ctx)
	}
	if r.did(StepCommit) {
		// The applications go on. The source's keeper of cards will clean up by itself.
		r.Log.Warn("not cleaned up yet", "migration", r.m.GetId(), "step", s.name, "err", err)
		return true, r.finish(ctx, clusterv1.MigrationState_MIGRATION_STATE_DONE, fmt.Sprintf("%s: %v; the host does that when it can", s.name, err))
	}
	if errors.Is(err, errTwice) || errors.Is(err, errKept) || errors.Is(err, errAstray) || r.move().GetSentTo() != "" && s.name == StepMove && errors.Is(err, ErrUnreachable) {
		return true, r.halt(ctx, err)
	}
	if errors.Is(err, errLost) {
		return true, r.finish(ctx, clusterv1.MigrationState_MIGRATION_STATE_FAILED, fmt.Sprintf("%s: %v", s.name, err))
	}
	r.fail(fmt.Errorf("%s: %w", s.name, err))
	return false, r.put(ctx)
}

// halted returns an error if this driver must stop: another host drives the migration, or
// hostd ends.
func (r *run) halted(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, ErrStale):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return nil
}

// enter records that a step begins.
func (r *run) enter(ctx context.Context, name string, undo bool) error {
	r.m.Step = name
	r.began, r.bytes, r.stopped = time.Now(), 0, 0
	r.m.Steps = append(r.m.GetSteps(), &clusterv1.MigrationStep{Name: name, StartedUnixNs: r.began.UnixNano(), Undo: undo})
	if n := len(r.m.GetSteps()); n > maxRecorded {
		r.m.Steps = r.m.GetSteps()[n-maxRecorded:]
	}
	return r.put(ctx)
}

// maxRecorded is the most steps in the record.
const maxRecorded = 500

// attempt does a step. While a host is unreachable, it tries again, for the time Patience
// at most from when that was noticed: the step may have taken longer than that before. An
// undo that can be left to its host gets a quarter of that, as the applications may be
// frozen until the next candidate is tried.
func (r *run) attempt(ctx context.Context, s step, do func(context.Context, *run) error, undo bool) (err error) {
	said, patience := "", r.Patience
	if undo && leavable(s.name) {
		patience /= 4
	}
	var home time.Time // since when the VM is on its source and can go on there; zero: it is not
	var lost time.Time // when a host was found to be unreachable
	for {
		err = r.once(ctx, s.limit, s.name, do, undo)
		if err == nil || !errors.Is(err, ErrUnreachable) || ctx.Err() != nil {
			break
		}
		if lost.IsZero() {
			lost = time.Now()
		}
		if time.Since(lost) > patience {
			break
		}
		switch atHome := errors.Is(err, errAtHome); {
		case !atHome:
			home = time.Time{}
		case home.IsZero():
			home = time.Now()
		}
		if !home.IsZero() && time.Since(home) > r.Patience/4 {
			break
		}
		if err.Error() != said {
			said = err.Error()
			r.Log.Info("trying again", "migration", r.m.GetId(), "step", s.name, "err", err)
		}
		r.Report(r.m, r.bytes, 0, excerpt.Of(said, 200))
		if wait(ctx, r.Pause) != nil {
			break
		}
	}
	last := r.m.GetSteps()[len(r.m.GetSteps())-1]
	last.TookNs, last.Bytes, last.StoppedNs = max(1, int64(time.Since(r.began))), r.bytes, int64(max(0, min(r.stopped, time.Since(r.began)))) // the VM says how long it was
	if err != nil {
		last.Error = limited(err.Error())
	}
	r.m.Bytes += r.bytes
	return err
}

func (r *run) once(ctx context.Context, limit time.Duration, name string, do func(context.Context, *run) error, undo bool) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	r.Report(r.m, 0, 0, "")
	if r.Before != nil {
		if err := r.Before(name, undo); err != nil {
			return err
		}
	}
	err := do(ctx, r)
	if err != nil && ctx.Err() != nil && !errors.Is(err, ErrStale) {
		return fmt.Errorf("it took longer than %v: %w", limit, err)
	}
	return err
}

// limited shortens a message to the limit of the record.
func limited(s string) string { return excerpt.Of(s, 1024) }

// fail begins to undo the steps.
func (r *run) fail(cause error) {
	r.Log.Warn("going back", "migration", r.m.GetId(), "err", cause)
	r.m.Machine.Undoing, r.m.Machine.Failed, r.m.Message = true, r.m.GetStep(), limited(cause.Error())
	// The step that failed may have been done, so it is undone as well.
	if r.m.GetStep() != "" && !r.did(r.m.GetStep()) && index(r.all, r.m.GetStep()) >= 0 {
		r.m.Done = append(r.m.GetDone(), r.m.GetStep())
	}
}

// back undoes the last step that was done. If another candidate can be tried, it goes
// forward again with that.
func (r *run) back(ctx context.Context) (ended bool, err error) {
	if turned, err := r.freezeInstead(ctx); turned || err != nil {
		return false, err
	}
	if turned, err := r.another(ctx); turned || err != nil {
		return false, err
	}
	if len(r.m.GetDone()) == 0 {
		return true, r.finish(ctx, clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, r.m.GetMessage())
	}
	name := r.m.GetDone()[len(r.m.GetDone())-1]
	if err := r.undo(ctx, name); err != nil {
		if stop := r.halted(ctx, err); stop != nil {
			return false, stop
		}
		switch {
		case errors.Is(err, errTwice), errors.Is(err, errKept), errors.Is(err, errAstray), name == StepMove && r.move().GetSentTo() != "" && errors.Is(err, ErrUnreachable):
			return true, r.halt(ctx, err)
		case !leavable(name):
			return true, r.hold(ctx, name, err)
		}
		r.leave(name, err)
		return false, r.put(ctx)
	}
	return false, nil
}

// leavable reports whether the undo of a step can be left to the host of the destination's
// card, or of the remote GPU. It gives that back by itself when the migration has ended.
func leavable(name string) bool {
	return name == StepReserve || name == StepPrepare || name == StepBorrow
}

// leave continues without having given back the destination's card, or the remote GPU. Its
// host does that when it can, and nobody has to wait for it. The undo of reserve would ask
// the same host for the same as that of prepare, so it is left with it.
func (r *run) leave(name string, err error) {
	gpu := r.move().GetToGpu()
	if name == StepBorrow {
		gpu = r.move().GetFarGpu()
	}
	r.Log.Warn("a GPU is not given back yet", "migration", r.m.GetId(), "gpu", gpu, "err", err)
	r.m.Message = limited(fmt.Sprintf("%s; %s is not given back yet: %v", r.m.GetMessage(), gpu, err))
	r.m.Done = slices.DeleteFunc(r.m.GetDone(), func(s string) bool { return s == name || name == StepPrepare && s == StepReserve })
	r.m.Step = ""
}

// undo undoes one step and removes it from the steps that are done.
func (r *run) undo(ctx context.Context, name string) error {
	if i := index(r.all, name); i >= 0 && r.all[i].undo != nil {
		if err := r.enter(ctx, name, true); err != nil {
			return err
		}
		undo := func(ctx context.Context, r *run) error {
			if r.nothingThere(ctx, name) {
				if name == StepDefine {
					r.leaves(r.move().GetToHost(), true)
				}
				return nil
			}
			return r.all[i].undo(ctx, r)
		}
		if err := r.attempt(ctx, r.all[i], undo, true); err != nil {
			return err
		}
	}
	r.m.Done = slices.DeleteFunc(r.m.GetDone(), func(s string) bool { return s == name })
	r.m.Step = ""
	return r.put(ctx)
}

// halt ends the migration as held, without an undo: it is unknown where the VM runs, or
// it runs on two hosts. Frozen applications stay frozen.
func (r *run) halt(ctx context.Context, err error) error {
	r.Log.Error("a VM is not known to be in one place", "migration", r.m.GetId(), "machine", r.vm().Name, "err", err)
	return r.finish(ctx, clusterv1.MigrationState_MIGRATION_STATE_HELD, limited(err.Error()))
}

// hold ends the migration as held, because an undo has failed. The state is safe in the
// VM's memory or in that of its host.
func (r *run) hold(ctx context.Context, name string, err error) error {
	hint := ""
	if !errors.Is(err, errLost) {
		var gone error
		if hint, gone = r.gone(ctx); gone != nil {
			err = gone
		}
	}
	if errors.Is(err, errAstray) {
		return r.halt(ctx, err)
	}
	state := clusterv1.MigrationState_MIGRATION_STATE_HELD
	kept := "the VM and the frozen state of its applications are kept"
	if far := r.move().GetFarGpu(); far != "" && !r.move().GetCold() {
		kept = "the VM is kept, and " + far + " for its applications"
	}
	text := fmt.Sprintf("%s; the undo of %s failed: %s; %s%s: gpuctl migrations resume %s goes on when the cause is fixed",
		r.m.GetMessage(), name, limited(err.Error()), hint, kept, r.m.GetId())
	if errors.Is(err, errLost) {
		state, text = clusterv1.MigrationState_MIGRATION_STATE_FAILED, fmt.Sprintf("%s; %s: %v", r.m.GetMessage(), name, err)
	}
	return r.finish(ctx, state, text)
}

// another changes to the next candidate if the present one has failed: before anything
// was changed, or while the VM has no card and its state is in its memory. A VM that has
// moved already gets another card of its new host.
func (r *run) another(ctx context.Context) (turned bool, err error) {
	m := r.move()
	if m.GetAborting() {
		return false, nil
	}
	last := ""
	if n := len(r.m.GetDone()); n > 0 {
		last = r.m.GetDone()[n-1]
	}
	there := func(string) bool { return true }
	late := slices.Contains([]string{StepAttach, StepAwait, StepThaw, StepHome}, m.GetFailed())
	switch {
	case last == "" && (m.GetFailed() == StepReserve || m.GetFailed() == StepPrepare):
	case last == StepMove && late:
		there = func(gpu string) bool { return HostOf(gpu) == m.GetToHost() }
	case last == StepDetach && (late || m.GetFailed() == StepMove):
	case last == StepStop && m.GetFailed() != StepStop: // nothing of the VM is on another host
	default:
		return false, nil
	}
	i := slices.IndexFunc(m.GetCandidates(), there)
	if i < 0 {
		return false, nil
	}
	// Undo what was done for the failed candidate, even if it is not the last step.
	for _, name := range []string{StepPrepare, StepReserve} {
		if !r.did(name) {
			continue
		}
		if err := r.undo(ctx, name); err != nil {
			if stop := r.halted(ctx, err); stop != nil {
				return false, stop
			}
			r.leave(name, err)
		}
	}
	m = r.move() // the record that was written last
	gpu := m.GetCandidates()[i]
	if m.GetToHost() != m.GetFromHost() && HostOf(gpu) != m.GetToHost() {
		r.forget(ctx, r.to())
	}
	m.Candidates = slices.Delete(m.GetCandidates(), i, i+1)
	m.ToGpu, m.ToHost, m.Undoing, m.Failed, m.ToClaim = gpu, HostOf(gpu), false, "", nextClaim(m.GetToClaim())
	r.m.To, r.m.Step = gpu, ""
	r.Log.Info("trying the next candidate", "migration", r.m.GetId(), "gpu", gpu)
	r.load()
	return true, r.put(ctx)
}

// HostOf returns the host in a GPU's id.
func HostOf(gpu string) string {
	host, _, _ := strings.Cut(gpu, "/")
	return host
}

// nextClaim returns the id of the claim for the next candidate. The claim of the last one
// may still exist for a while.
func nextClaim(claim string) string {
	base, n, ok := strings.Cut(claim, ".")
	count := 1
	if ok {
		_, _ = fmt.Sscan(n, &count)
	}
	return fmt.Sprintf("%s.%d", base, count+1)
}

// finish writes the final state. If it returns an error, the record is not written, and
// the next driver comes to the same end.
func (r *run) finish(ctx context.Context, state clusterv1.MigrationState, message string) error {
	if state != clusterv1.MigrationState_MIGRATION_STATE_HELD { // which is not its end: what is lost is told then
		message = limited(also(message, LostWords(r.move())))
	}
	r.m.State, r.m.Message, r.m.Step = state, message, ""
	r.m.StoppedNs = standstill(r.m.GetSteps())
	return r.put(ctx)
}
