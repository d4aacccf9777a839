package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
)

const (
	kindCreate  = "create"
	kindSwap    = "swap"
	kindSuspend = "suspend"
	kindResume  = "resume"
	kindPlan    = "plan"

	toMemory = "memory" // value of SuspendedTo
	toAway   = "away"

	defaultFreeze = 10 * time.Second
)

// Step names.
const (
	stepCheck    = "check"
	stepStart    = "start"
	stepPrepare  = "prepare"
	stepPrecopy  = "precopy"
	stepFreeze   = "freeze"
	stepTransfer = "transfer"
	stepSwitch   = "switch"
	stepRetire   = "retire"
	stepExport   = "export"
	stepMark     = "mark"
	stepLoad     = "load"
	stepDiscard  = "discard"
)

// stepNames returns the names of the steps that an operation of this kind runs.
func stepNames(kind string) []string {
	op := &operation{}
	switch kind {
	case kindSwap:
		op.steps = (&swapping{}).steps(op)
	case kindSuspend:
		op.steps = (&suspending{}).steps(op)
	case kindResume:
		op.steps = (&resuming{}).steps(op)
	}
	return op.names()
}

// errLost means that neither side of a switch can continue.
var errLost = errors.New("the session's requests are lost with the target")

// operation is a swap, suspend or resume in progress.
type operation struct {
	*engine.Life

	s      *session
	kind   string
	steps  []engine.Step
	fault  engine.Fault
	start  time.Time
	still  time.Duration // how long the application may be frozen without progress
	result *gpuctlv1.SwapResult

	reporter *engine.Reporter

	source, target *executor
	freeze         uint64    // number of the freeze that thawSource undoes
	graph          []byte    // the newest
	fetch          string    // contents go straight to the target, by this name; empty: through this host
	frozenAt       time.Time // zero while the application runs
	unfrozen       bool      // the source has refused to freeze
	lingers        bool      // gpuguest closes before the source has ended
	failure        error     // of the operation
}

// names returns the names of the steps, in the order in which they run.
func (op *operation) names() []string {
	var names []string
	for _, st := range op.steps {
		names = append(names, st.Name)
	}
	return names
}

// begin starts an operation on a session, if no other runs. ctx, the end of the application
// and the end of the manager cancel the operation up to its commit point.
func (s *session) begin(
	ctx context.Context, kind string, steps func(*operation) []engine.Step, failAt string, still time.Duration, sink func(*gpuctlv1.Progress),
) (*operation, error) {
	op := &operation{s: s, kind: kind, reporter: engine.NewReporter(sink), start: time.Now(), still: still, result: &gpuctlv1.SwapResult{}}
	op.steps = steps(op)
	var err error
	if op.fault, err = engine.ParseFault(failAt, s.m.cfg.Faults, op.names()); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.rec.ID
	precondition := func(format string, args ...any) error {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(format, args...))
	}
	suspended := s.rec.SuspendedTo != ""
	switch {
	case s.ending:
		return nil, precondition("session %s has ended", id)
	case s.state == gpuctlv1.SessionState_SESSION_STATE_HELD:
		return nil, precondition("session %s is held: %s", id, s.message)
	case s.op != nil:
		return nil, precondition("session %s: a %s is running, at step %s", id, s.op.kind, s.rec.Op.Step)
	case s.state == gpuctlv1.SessionState_SESSION_STATE_LOST:
		return nil, precondition("session %s is lost: %s", id, s.message)
	case kind == kindResume && !suspended:
		return nil, precondition("session %s is not suspended", id)
	case kind == kindSuspend && suspended:
		return nil, precondition("session %s is suspended already", id)
	}
	op.source = s.current
	op.Life = engine.NewLife(ctx, s.m.ctx)
	s.op = op
	s.rec.Op = &opRecord{Kind: kind, Step: op.steps[0].Name}
	if kind != kindPlan {
		s.state, s.message = gpuctlv1.SessionState_SESSION_STATE_SWAPPING, kind
	}
	return op, nil
}

// run runs the steps and ends the operation.
func (op *operation) run() *gpuctlv1.SwapResult {
	s := op.s
	s.m.changed(s)
	s.log.Info("operation starts", "op", op.kind)
	r := &engine.Runner{
		Start: op.start,
		Begin: func(i, n int, name string) error {
			op.reporter.Step(i, n, name)
			if err := op.journalStep(name); err != nil {
				return err
			}
			switch victim := op.fault.Victim(name); {
			case victim == "source" && op.source != nil:
				op.source.kill()
			case victim == "target" && op.target != nil:
				op.target.kill()
			}
			return nil
		},
		After: func(name string, committed bool) error {
			if name == stepSwitch {
				return nil // the fault is injected in the middle of that step
			}
			if op.fault.Deadly(name) {
				s.m.die()
			}
			if name == stepMark {
				return nil
			}
			return op.fault.Fail(name)
		},
		Late: func(name string, err error) {
			s.log.Warn("step failed after the commit", "op", op.kind, "step", name, "err", err)
		},
	}
	err := op.Life.Run(r, op.steps)
	op.failure = err
	op.result.Steps = r.Times
	op.result.TotalNs = time.Since(op.start).Nanoseconds()
	res := op.result
	var se *engine.StepError
	if errors.As(err, &se) && len(se.Left) > 0 && op.hold(se, res) {
		return res
	}
	if op.lingers { // the journal has the source, and the next gpuguest waits for its end
		res.Held = true
		op.Over()
	} else {
		op.finish(err, res)
	}
	res.Session = s.snapshot()
	return res
}

// journalStep records which step begins. While the application stands still, it is not written: what a later
// gpuguest does depends on what the steps themselves write.
func (op *operation) journalStep(name string) error {
	change := func(r *record) { r.Op.Step = name }
	if op.frozenAt.IsZero() {
		return op.s.update(change)
	}
	op.s.note(change)
	return nil
}

// hold marks an operation as held: it has failed and cannot be undone yet. The undos are
// repeated. Until they succeed, nobody knows whether the application continues, and no
// other operation begins. It reports whether the operation is held: if the application has
// ended, there is nothing to undo.
func (op *operation) hold(se *engine.StepError, res *gpuctlv1.SwapResult) bool {
	s := op.s
	s.mu.Lock()
	ending := s.ending && !s.m.closing()
	if !ending {
		s.state, s.message = gpuctlv1.SessionState_SESSION_STATE_HELD, engine.HeldText(op.kind, se)
	}
	s.mu.Unlock()
	if ending {
		return false
	}
	s.log.Error("operation failed and is held", "op", op.kind, "err", se)
	s.m.changed(s)
	res.Held, res.Error = true, se.Error()
	if !op.frozenAt.IsZero() {
		res.StoppedNs = time.Since(op.frozenAt).Nanoseconds()
	}
	res.Session = s.snapshot()
	op.result = &gpuctlv1.SwapResult{} // what follows is not reported to the caller
	op.Repeat(s.log, func(ctx context.Context) (err error) {
		se.Left, err = engine.Undo(ctx, se.Left)
		return err
	}, func() { op.finish(se, op.result) })
	return true
}

// finish ends the operation, and sets the state that the session has after it.
func (op *operation) finish(err error, res *gpuctlv1.SwapResult) {
	s := op.s
	var refused *engine.RefusedError
	switch {
	case err == nil:
		s.log.Info("operation done", "op", op.kind, "stopped", time.Duration(res.StoppedNs), "took", stepTimes(res.Steps))
	case op.appEnded():
		res.Ended, res.Error = true, errAppEnded.Error()
		s.log.Info("operation ended with its application", "op", op.kind, "err", err)
	case errors.As(err, &refused):
		res.Refused = true
		res.Reasons = refused.Reasons
		res.Error = err.Error()
		s.log.Info("operation refused", "op", op.kind, "err", err)
	default:
		res.Error = err.Error()
		s.log.Warn("operation failed", "op", op.kind, "err", err)
	}
	s.mu.Lock()
	if !errors.Is(err, errLost) { // otherwise the target may not have ended, and lose forgets it
		s.rec.Op = nil
	}
	werr := s.rec.write(s.dir)
	s.op = nil
	e, ending := s.current, s.ending
	suspended := s.rec.SuspendedTo != ""
	s.mu.Unlock()
	if !errors.Is(err, errLost) { // lose waits for the executors' ends
		s.settleBudget(e)
	}
	if werr != nil {
		s.log.Warn("journal", "err", werr) // the next step or the next gpuguest repairs it
	}
	switch {
	case errors.Is(err, errLost):
		s.lose(err.Error())
	case suspended:
		s.set(gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, suspendedText(s.snapshot().SuspendedTo))
	case e == nil || e.dead():
		if !ending {
			why := "executor has ended"
			if e != nil {
				why = endedText(e)
			}
			s.lose(why)
		}
	default:
		s.set(gpuctlv1.SessionState_SESSION_STATE_RUNNING, "")
	}
	after := s.snapshot().State
	res.Held = after == gpuctlv1.SessionState_SESSION_STATE_HELD // it is lost, and an executor has not ended
	res.RolledBack = err != nil && !res.Refused && !res.Ended && !res.Held && after != gpuctlv1.SessionState_SESSION_STATE_LOST
	op.Over()
}

// stepTimes is for the log: how long each step took.
func stepTimes(steps []*gpuctlv1.StepTime) slog.Value {
	var took []slog.Attr
	for _, t := range steps {
		took = append(took, slog.Duration(t.Step, time.Duration(t.DurationNs)))
	}
	return slog.GroupValue(took...)
}

// appEnded reports whether the application has ended. Then an error of the operation does
// not matter.
func (op *operation) appEnded() bool {
	op.s.mu.Lock()
	defer op.s.mu.Unlock()
	return op.s.ending && !op.s.m.closing()
}

// progress passes on what an executor reports during the running step.
func (op *operation) progress(p *gpuctlv1.Progress) {
	op.reporter.Bytes(p.BytesDone, p.BytesTotal, p.Message)
}

// waits passes on what an executor waits for.
func (op *operation) waits(text string) { op.reporter.Waits(text) }

// patience returns how long an executor that lives may make no progress.
func (op *operation) patience(frozen bool) time.Duration {
	if !frozen {
		return buildTimeout
	}
	return op.still
}

// stillPatience returns the same limit for the time while the application is frozen. The
// operator can set it.
func stillPatience(timeoutMS, freezeMS int64) time.Duration {
	if timeoutMS > 0 {
		return time.Duration(timeoutMS) * time.Millisecond
	}
	return max(stallTimeout, 2*freezePatience(freezeMS))
}

// startTarget is the work of the start step. It starts the target, and checks that the
// devices that the target really has can serve what the session has used.
func (op *operation) startTarget(ctx context.Context, target *gpuctlv1.Target, usage *gpuctlv1.Usage, devices int) error {
	e, d, err := op.s.launch(ctx, target, func(r *record, e executorRecord) { r.Op.Other = &e })
	op.target = e // also with an error: it may not have ended
	if err != nil {
		return err
	}
	return engine.Refuse(deviceReasons(usage, d.Devices, devices))
}

// deviceReasons checks every device of the target, because the session may use any of them.
func deviceReasons(usage *gpuctlv1.Usage, have []*gpuctlv1.Limits, need int) []*gpuctlv1.Reason {
	var rs []*gpuctlv1.Reason
	if len(have) < need {
		rs = append(rs, &gpuctlv1.Reason{
			Code:    "devices",
			Message: fmt.Sprintf("the session has %d devices, the target offers %d", need, len(have)),
		})
	}
	for _, l := range have {
		for _, r := range Reasons(usage, l) {
			if !slices.ContainsFunc(rs, func(o *gpuctlv1.Reason) bool { return proto.Equal(o, r) }) {
				rs = append(rs, r)
			}
		}
	}
	return rs
}

// killTarget undoes the start of a target. It is an error if the target does not end,
// because then the target still has its device, and memory of the session.
func (op *operation) killTarget(context.Context) error {
	if op.target == nil {
		return nil
	}
	op.target.kill()
	if !op.target.dead() {
		return errors.New(lingers(op.target))
	}
	return nil
}

// discardSource undoes the copy of contents while the application runs.
func (op *operation) discardSource(ctx context.Context) error {
	op.s.dropExport(ctx, op.source)
	return nil
}

// freezeSource is the work of the freeze step. From this step on, the application is frozen.
func (op *operation) freezeSource(ctx context.Context, timeoutMS int64) error {
	if op.target != nil && op.target.dead() {
		op.unfrozen = true
		return fmt.Errorf("%w: executor %d has ended: %s", errNotFrozen, op.target.gen, op.target.proc.Exit())
	}
	timeout := freezePatience(timeoutMS)
	op.frozenAt = time.Now()
	snap, err := op.source.freeze(ctx, op.freeze, timeout, op)
	if err != nil {
		op.unfrozen = errors.Is(err, errNotFrozen)
		return err
	}
	// Before the freeze, the executor lets the application run until the device is idle, if
	// it becomes idle by itself.
	if d := time.Duration(snap.GatedNs); d > 0 && d < time.Since(op.frozenAt) {
		op.frozenAt = time.Now().Add(-d)
	}
	op.graph = snap.Graph
	// With the head, a new gpuguest can find out whether a dead target has taken requests. It is
	// in the journal before there can be such.
	head := op.s.mem.head()
	op.s.note(func(r *record) { r.Op.Head = &head })
	return op.remember(ctx)
}

// freezePatience returns how long commands that are running may take to end.
func freezePatience(timeoutMS int64) time.Duration {
	if timeoutMS > 0 {
		return time.Duration(timeoutMS) * time.Millisecond
	}
	return defaultFreeze
}

// thawSource undoes freezeSource.
func (op *operation) thawSource(ctx context.Context) error {
	if op.unfrozen || errors.Is(op.failure, errLost) { // lost: another executor has read requests already
		op.recordDowntime()
		return nil
	}
	if err := op.source.thaw(ctx, op.freeze); err != nil && !op.source.dead() {
		return err // the application may stay frozen
	}
	op.recordDowntime()
	return nil
}

// recordDowntime ends the application's downtime and notes it in the result.
func (op *operation) recordDowntime() {
	if !op.frozenAt.IsZero() {
		op.result.StoppedNs = time.Since(op.frozenAt).Nanoseconds()
		op.frozenAt = time.Time{}
	}
}

// handOver gives the ring to the target. The store of the owner word is the commit point.
// If the target then fails, the ring goes back, unless the target has taken requests: no
// other executor has seen those.
func (op *operation) handOver(ctx context.Context, from uint32) error {
	s, ctx := op.s, context.WithoutCancel(ctx)
	head := s.mem.head()
	if err := s.update(func(r *record) { r.Op.Head = &head }); err != nil {
		return err
	}
	s.mem.setOwner(op.target.gen)
	if op.fault.Deadly(stepSwitch) {
		s.m.die()
	}
	err := op.fault.Fail(stepSwitch)
	if err == nil {
		err = op.target.activate(ctx)
	}
	if err != nil && s.mem.serving() == op.target.gen && !op.target.dead() {
		// Only the answer was lost. Nobody can undo what the target has done.
		if d, derr := op.target.describeWithin(ctx, quickTimeout); derr == nil && d.Active {
			return nil
		}
	}
	if err == nil {
		return nil
	}
	op.target.kill()
	if !op.target.dead() || s.mem.head() != head || s.mem.serving() == op.target.gen {
		op.failure = fmt.Errorf("%w: %w", errLost, err)
		return op.failure
	}
	s.mem.setOwner(from)
	return err
}

// adoptTarget makes the target the session's executor.
func (op *operation) adoptTarget(change func(*record)) {
	s := op.s
	s.mu.Lock()
	s.current = op.target
	s.rec.Current = op.target.record()
	change(&s.rec)
	err := s.rec.write(s.dir)
	s.mu.Unlock()
	if err != nil {
		s.log.Warn("journal", "err", err) // the owner word has the same information
	}
	s.watchExecutor(op.target)
}
