package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/guest/engine"
)

const (
	kindSwap     = "swap"
	kindSuspend  = "suspend"
	kindResume   = "resume"
	kindRehearse = "rehearse"
	kindStore    = "store"  // suspend to a folder, with the processes
	kindRevive   = "revive" // resume from one

	// defaultLock is how long the driver may wait for kernels that run.
	defaultLock = 10 * time.Second
)

// Names of steps.
const (
	stepCheck      = "check"
	stepPrepare    = "prepare"
	stepLock       = "lock"
	stepCheckpoint = "checkpoint"
	stepRestore    = "restore"
	stepUnlock     = "unlock"
	stepMark       = "mark"
	stepDump       = "dump"
	stepSeal       = "seal"
	stepEnd        = "end"
	stepMake       = "make"
)

// operation is a swap, suspend, resume or rehearsal in progress.
type operation struct {
	*engine.Life

	s        *session
	kind     string
	steps    []engine.Step
	fault    engine.Fault
	reporter *engine.Reporter
	start    time.Time
	result   *gpuctlv1.SwapResult

	caller *caller
	target *gpuctlv1.Target // as asked; nil: where it was
	home   [][]ask.UUID     // GPUs of each member before
	dest   [][]ask.UUID     // and after
	to     []ask.UUID       // the GPUs that the session has after it
	known  map[int]bool     // who had the driver's nodes at the check
	dir    string           // of a store or a revive
	disk   *criu.Manifest
	bytes  uint64 // that criu reads or writes

	mu       sync.Mutex
	lost     error
	stoppedA time.Time // since when a process is locked; zero: none is
	stopped  time.Duration
}

// begin starts an operation on a session, if no other runs.
func (s *session) begin(ctx context.Context, kind string, target *gpuctlv1.Target, lockMS int64, failAt string, sink func(*gpuctlv1.Progress)) (*operation, error) {
	op := &operation{
		s: s, kind: kind, target: target, start: time.Now(),
		reporter: engine.NewReporter(sink), result: &gpuctlv1.SwapResult{},
	}
	op.caller = &caller{s: s, lock: defaultLock, pool: &pool{}, began: op.began}
	if lockMS > 0 {
		op.caller.lock = min(time.Duration(lockMS)*time.Millisecond, ask.MostTimeout)
	}
	op.steps = op.stepsOf(kind)
	var names []string
	for _, st := range op.steps {
		names = append(names, st.Name)
	}
	var err error
	if op.fault, err = engine.ParseFault(failAt, s.m.cfg.Faults, names); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	precondition := func(format string, args ...any) error {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf(format, args...))
	}
	suspended := s.rec.SuspendedTo != ""
	switch {
	case s.ended:
		return nil, precondition("session %s has ended", s.id)
	case s.state == gpuctlv1.SessionState_SESSION_STATE_HELD:
		return nil, precondition("session %s is held: %s", s.id, s.message)
	case s.op != nil:
		return nil, precondition("session %s: a %s is running, at step %s", s.id, s.op.kind, s.rec.Op.Step)
	case s.state == gpuctlv1.SessionState_SESSION_STATE_LOST:
		return nil, precondition("session %s is lost: %s", s.id, s.message)
	case kind == kindResume && !suspended:
		return nil, precondition("session %s is not suspended", s.id)
	case kind != kindResume && suspended:
		return nil, precondition("session %s is suspended; resume it first", s.id)
	}
	op.Life = engine.NewLife(ctx, s.m.ctx)
	s.op, s.begun = op, s.begun+1
	s.rec.Op = &opRecord{Kind: kind, Step: stepCheck, Home: make([][]ask.UUID, len(s.rec.Members))}
	for i, mb := range s.rec.Members {
		s.rec.Op.Home[i] = mb.Uses
	}
	s.state, s.message = gpuctlv1.SessionState_SESSION_STATE_SWAPPING, kind
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
			return s.update(func(r *record) { r.Op.Step = name })
		},
		After: func(name string, _ bool) error {
			if op.fault.Deadly(name) {
				s.m.cfg.die()
			}
			if name == stepMark {
				return nil // injected before the mark is written
			}
			return op.fault.Fail(name)
		},
		Late: func(name string, err error) {
			s.log.Warn("step failed after the commit", "op", op.kind, "step", name, "err", err)
			op.note(err)
		},
	}
	err := op.Life.Run(r, op.steps)
	op.caller.pool.end()
	res := op.result
	res.Steps, res.TotalNs, res.StoppedNs = r.Times, time.Since(op.start).Nanoseconds(), op.downtime().Nanoseconds()
	var se *engine.StepError
	switch {
	case errors.As(err, &se) && len(se.Left) > 0 && op.isLost() == nil:
		op.hold(err, func(ctx context.Context) (err error) {
			se.Left, err = engine.Undo(ctx, se.Left)
			return err
		})
		return res
	case err == nil && op.isLost() == nil && op.unsettled():
		op.hold(errors.New("it is done, but for processes that have not ended yet, or that the driver has not unlocked yet"), func(ctx context.Context) error {
			if op.kind == kindStore {
				return op.endTree(ctx)
			}
			return op.all(ctx, goal{ask.Running, op.dest}, true)
		})
		return res
	}
	op.finish(err, res)
	res.Session = s.snapshot()
	return res
}

// note keeps the error that loses the session.
func (op *operation) note(err error) {
	op.mu.Lock()
	defer op.mu.Unlock()
	if op.lost == nil && errors.Is(err, ErrLost) {
		op.lost = err
	}
}

func (op *operation) isLost() error {
	op.mu.Lock()
	defer op.mu.Unlock()
	return op.lost
}

// unsettled reports whether a member is not known to run after an operation that ends with
// all running.
func (op *operation) unsettled() bool {
	switch op.kind {
	case kindSuspend:
		return false
	case kindStore:
		return op.s.rec.Op.Disk.left()
	}
	for _, mb := range op.s.members() {
		if mb.state != ask.Running && !op.caller.gone(mb) {
			return true
		}
	}
	return false
}

// began notes when a process is stopped.
func (op *operation) began(o ask.Op) {
	op.mu.Lock()
	defer op.mu.Unlock()
	if op.stoppedA.IsZero() && (o == ask.Lock || o == ask.Restore) {
		op.stoppedA = time.Now()
	}
}

// goesOn notes that all processes run, or that they are suspended.
func (op *operation) goesOn() {
	op.mu.Lock()
	defer op.mu.Unlock()
	if !op.stoppedA.IsZero() {
		op.stopped += time.Since(op.stoppedA)
		op.stoppedA = time.Time{}
	}
}

func (op *operation) downtime() time.Duration {
	op.mu.Lock()
	defer op.mu.Unlock()
	d := op.stopped
	if !op.stoppedA.IsZero() {
		d += time.Since(op.stoppedA)
	}
	return d
}

// hold marks the operation as held, and repeats try until it succeeds. Until then nobody
// knows whether the processes go on, and no other operation begins.
func (op *operation) hold(why error, try func(context.Context) error) {
	s := op.s
	s.set(gpuctlv1.SessionState_SESSION_STATE_HELD, engine.HeldText(op.kind, why))
	s.log.Error("operation is held", "op", op.kind, "err", why)
	op.result.Held, op.result.Error = true, why.Error()
	op.result.Session = s.snapshot()
	op.Repeat(s.log, func(ctx context.Context) error {
		if err := try(ctx); err != nil && op.isLost() == nil {
			return err
		}
		return nil
	}, func() { op.finish(why, &gpuctlv1.SwapResult{}) })
}

// finish ends the operation, and sets the state that the session has after it.
func (op *operation) finish(err error, res *gpuctlv1.SwapResult) {
	s := op.s
	lost := op.isLost()
	if op.kind == kindRevive && !s.rec.Op.Committed {
		lost = nil // the folder still has it
	}
	if op.kind == kindStore && s.rec.Op.Committed {
		err, lost = nil, nil // the folder has it, whatever has become of the processes
	}
	if lost != nil {
		op.settleOthers()
	}
	var refused *engine.RefusedError
	switch {
	case lost != nil:
		res.Error = lost.Error()
		s.log.Error("session is lost", "op", op.kind, "err", lost)
		s.remember(lost)
	case err == nil:
		s.log.Info("operation done", "op", op.kind, "stopped", op.downtime())
	case op.kind != kindRevive && op.allGone():
		res.Ended, res.Error = true, "the processes have ended meanwhile"
	case errors.As(err, &refused):
		res.Refused, res.Reasons, res.Error = true, refused.Reasons, err.Error()
		s.log.Info("operation refused", "op", op.kind, "err", err)
	default:
		res.Error, res.RolledBack = err.Error(), true
		s.log.Warn("operation failed", "op", op.kind, "err", err)
	}
	res.Rehearsed = op.kind == kindRehearse
	s.mu.Lock()
	committed := s.rec.Op.Committed
	s.rec.Op = nil
	state, message := gpuctlv1.SessionState_SESSION_STATE_RUNNING, ""
	switch {
	case lost != nil:
		s.rec.Lost = lost.Error() + s.rec.rest()
		state, message = gpuctlv1.SessionState_SESSION_STATE_LOST, s.rec.Lost
	case op.kind == kindStore && committed, op.kind == kindRevive && !committed:
		state = gpuctlv1.SessionState_SESSION_STATE_ENDED
	case s.rec.SuspendedTo != "":
		state, message = gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, suspendedText(&s.rec)
	}
	s.state, s.message = state, message
	werr := s.rec.write(s.m.cfg.Dir)
	s.op = nil // together with the state: whoever sees the state may begin the next operation
	s.mu.Unlock()
	if werr != nil {
		s.log.Warn("journal", "err", werr)
	}
	s.m.changed(s)
	switch {
	case op.kind == kindRevive && committed:
		s.m.wg.Go(s.watch)
	case op.kind == kindRevive:
		s.m.remove(s)
	}
	op.Over()
}

// settleOthers suspends members of a lost session that are locked. One that was restored must
// not be ended as it is; one that is suspended can be.
func (op *operation) settleOthers() {
	for _, mb := range op.s.members() {
		if mb.state != ask.Locked {
			continue
		}
		if err := op.caller.bring(op.Rest, mb, ask.Checkpointed, nil); err != nil {
			op.s.log.Warn("suspend another process of a lost session", "pid", mb.PID, "err", err)
		}
	}
}

// rest says in which state the members of a lost session are.
func (r *record) rest() string {
	text := ""
	for _, mb := range r.Members {
		st := mb.state
		if st == "" {
			st = ask.Unknown
		}
		text += fmt.Sprintf("; pid %d is %s", mb.PID, st)
	}
	return text
}

func (op *operation) allGone() bool {
	for _, mb := range op.s.members() {
		if !op.caller.gone(mb) {
			return false
		}
	}
	return true
}

// all brings every member into a state, several at once. A process that has ended is an
// error, unless it may. After the session is lost, nothing is asked any more.
func (op *operation) all(ctx context.Context, g goal, mayEnd bool) error {
	members := op.s.members()
	errs := make([]error, len(members))
	turn := make(chan struct{}, op.s.m.cfg.Parallel)
	var wg sync.WaitGroup
	for i, mb := range members {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			if op.isLost() != nil {
				return
			}
			err := op.caller.bring(ctx, mb, g.state, g.of(i))
			if mayEnd && errors.Is(err, holders.ErrGone) {
				err = nil
			}
			op.note(err)
			errs[i] = err
		})
	}
	wg.Wait()
	if op.isLost() != nil && mayEnd {
		return nil
	}
	return errors.Join(errs...)
}
