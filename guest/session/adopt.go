package session

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// adoptTimeout is the time limit for the repair of one session.
const adoptTimeout = time.Minute

// adoptAll takes over the sessions of an earlier gpuguest. It finishes or rolls back the
// operations that the earlier one did not end. If a session cannot be repaired, its
// application loses the GPU; other sessions are not affected.
func (m *Manager) adoptAll() error {
	dir := filepath.Join(m.cfg.Dir, "sessions")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("sessions: %w", err)
	}
	var wg sync.WaitGroup
	errs := make([]error, len(entries))
	for i, e := range entries {
		wg.Go(func() { errs[i] = m.adopt(filepath.Join(dir, e.Name()), e.Name()) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// adopt takes over one session. With an error, nobody knows whether an executor of it lives.
func (m *Manager) adopt(dir, id string) error {
	log := m.log.With("session", id)
	rec, err := readRecord(dir)
	if engine.Scarce(err) {
		return fmt.Errorf("session %s: %w", id, err)
	}
	if err == nil && rec.ID != id {
		err = fmt.Errorf("record is of session %s", rec.ID)
	}
	if err != nil {
		// The session was being made and has no journal yet. No executor runs without a
		// record.
		log.Warn("session folder dropped", "err", err)
		_ = m.removeDir(dir)
		return nil
	}
	s := &session{
		m: m, id: id, who: m.whose(rec.UID), began: rec.StartedMS, log: log, dir: dir, rec: *rec, gone: make(chan struct{}), ended: make(chan struct{}),
		state: gpuctlv1.SessionState_SESSION_STATE_RUNNING, usage: &gpuctlv1.Usage{},
	}
	current, err := s.adoptExecutor(&rec.Current)
	if err != nil {
		return err
	}
	var other *executor
	if rec.Op != nil {
		if other, err = s.adoptExecutor(rec.Op.Other); err != nil {
			return err
		}
	}
	seen := false
	if rec.PID != 0 {
		var err error
		s.app, err = openProcess(rec.PID, rec.Start, nil)
		if err != nil && !errors.Is(err, ErrGone) { // nobody knows whether it has ended
			return fmt.Errorf("session %s: application: %w", id, err)
		}
		seen = err == nil
	}
	// If gpuguest can't see the application's pid, the connection that stood for the
	// application ended with the earlier gpuguest.
	if !seen || !rec.Connected {
		s.abandon("application has ended")
		return nil
	}
	pids := []int{rec.PID}
	for _, e := range []*executor{current, other} {
		if e != nil {
			pids = append(pids, e.proc.PID())
		}
	}
	if s.mem, err = findMemory(rec.Memory, pids...); engine.Scarce(err) {
		s.app.close()
		return fmt.Errorf("session %s: its memory: %w", id, err)
	}
	if err != nil {
		s.abandon(err.Error())
		return nil
	}
	if err := s.mem.lockManager(); err != nil {
		log.Warn("adopt", "err", err) // the application can take the lock, but harms only itself
	}

	r := &repair{s: s, current: current, other: other, patience: describeTimeout}
	r.settle()
	s.log.Info("session taken over", "state", s.state, "generation", s.rec.Current.Generation)
	last := s.current
	m.add(s)
	s.watchApp()
	if last != nil && s.op == nil {
		s.watchExecutor(last)
	}
	return nil
}

// adoptExecutor returns nil for an executor that has ended.
func (s *session) adoptExecutor(rec *executorRecord) (*executor, error) {
	if rec == nil || rec.PID == 0 {
		return nil, nil
	}
	p, err := s.m.cfg.Launcher.Adopt(rec.PID, rec.Start, s.logFile(rec.Generation))
	switch {
	case errors.Is(err, ErrGone):
		return nil, nil
	case err != nil: // nobody knows whether it still has its GPU
		return nil, fmt.Errorf("session %s: executor %d: %w", s.id, rec.Generation, err)
	}
	control, imports := s.sockets(rec.Generation)
	e := newExecutor(rec.Generation, rec.target(), p, control, imports)
	s.has(e)
	return e, nil
}

// abandon ends a session that has no user any more.
func (s *session) abandon(why string) {
	s.log.Info("session dropped", "reason", why)
	if s.app != nil {
		s.app.close()
	}
	s.bury(func() {
		for _, f := range []string{s.rec.SuspendedTo, s.partFile()} {
			if isFile(f) {
				_ = s.removeState(f)
			}
		}
		switch op := s.rec.Op; {
		case op == nil || !isFile(op.File):
		case op.Kind == kindSuspend:
			_ = s.removeWritten(op.File)
		default:
			_ = s.removeState(op.File)
		}
		if err := s.m.removeDir(s.dir); err != nil {
			s.log.Warn("remove session folder", "err", err)
		}
	})
}

// partFile returns the file that a suspend was writing when gpuguest ended, or "".
func (s *session) partFile() string {
	if op := s.rec.Op; op != nil && op.Kind == kindSuspend && isFile(op.File) {
		return partName(op.File, s.id)
	}
	return ""
}

func partName(file, id string) string { return file + "." + id + ".part" }

// repair brings an adopted session to a final state: RUNNING with one executor, or
// SUSPENDED without one. If an executor that lives does not do what is needed for that now,
// the session is held, and the repair is tried again.
type repair struct {
	s              *session
	current, other *executor     // nil if dead
	patience       time.Duration // with a busy executor

	// The session's values after the repair.
	rec     record
	runs    *executor
	usage   *gpuctlv1.Usage
	state   gpuctlv1.SessionState
	message string
}

// errUnsettled means that an executor that lives has not done what it was asked to do.
var errUnsettled = errors.New("it lives and does not answer as it should")

// settle tries to bring the session to its final state. If that is not possible now, an
// operation of its own holds the session until it is.
func (r *repair) settle() {
	s := r.s
	err := r.try(s.m.ctx)
	if !errors.Is(err, errUnsettled) {
		r.end(err)
		return
	}
	kind, text := kindCreate, fmt.Sprintf("it was taken over from an earlier gpuguest, which is not complete yet and goes on: %v", err)
	if s.rec.Op != nil {
		kind, text = s.rec.Op.Kind, engine.HeldText(s.rec.Op.Kind, err)
	}
	s.current = r.current
	if s.current == nil {
		s.current = r.other
	}
	s.state, s.message = gpuctlv1.SessionState_SESSION_STATE_HELD, text
	s.log.Error("session is held", "err", err)
	op := &operation{s: s, kind: kind, Life: engine.NewLife(s.m.ctx, s.m.ctx), source: s.current, reporter: engine.NewReporter(func(*gpuctlv1.Progress) {}), result: &gpuctlv1.SwapResult{}}
	s.op = op
	r.patience = quickTimeout
	go func() {
		var last error
		err := engine.Retry(op.Rest, s.log, func(ctx context.Context) error {
			if last = r.try(ctx); errors.Is(last, errUnsettled) {
				return last
			}
			return nil
		})
		if err == nil {
			r.end(last)
		} // otherwise the application has ended, and session.end does the rest, or the next gpuguest
		s.mu.Lock()
		if s.op == op {
			s.op = nil
		}
		e := s.current
		s.mu.Unlock()
		op.Over()
		s.m.changed(s)
		if err == nil && e != nil {
			s.watchExecutor(e)
		}
	}()
}

// try makes one attempt. It does not change the session's record.
func (r *repair) try(ctx context.Context) error {
	for _, e := range []**executor{&r.current, &r.other} {
		if *e != nil && (*e).dead() {
			*e = nil
		}
	}
	r.rec = r.s.rec
	r.runs, r.usage = nil, r.s.usage
	ctx, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	return r.run(ctx)
}

// end gives the session the state that the repair has found. With an error, the session is
// lost; its operation stays in the journal until lose has recorded that, and its executors have ended.
func (r *repair) end(err error) {
	s := r.s
	if err == nil {
		r.rec.Op = nil
	}
	s.mu.Lock()
	s.rec, s.usage = r.rec, r.usage
	s.op = nil // together with the state: whoever sees the state may begin the next operation
	if err == nil {
		s.current, s.state, s.message = r.runs, r.state, r.message
	} else {
		s.current = r.current
	}
	werr := s.rec.write(s.dir)
	s.mu.Unlock()
	if werr != nil {
		s.log.Warn("journal", "err", werr)
	}
	if err == nil {
		return
	}
	s.lose(err.Error()) // it ends all of the session's executors
}

func (r *repair) run(ctx context.Context) error {
	s, op := r.s, r.s.rec.Op
	switch {
	case s.rec.Lost != "":
		return errors.New(s.rec.Lost)
	case op == nil, op.Kind == kindPlan, op.Kind == kindCreate:
		if s.rec.SuspendedTo != "" {
			return r.suspended()
		}
		return r.alone(ctx)
	case op.Kind == kindSuspend && s.rec.SuspendedTo == "": // the record does not say SUSPENDED yet
		if err := r.running(ctx, r.current, false); errors.Is(err, errUnsettled) {
			return err
		} else if op.File != "" {
			return errors.Join(err, ignore(s, s.dropWritten(ctx, r.current, op.File, s.partFile())))
		} else {
			return err
		}
	case op.Kind == kindSuspend:
		return r.suspend(ctx)
	case op.Kind == kindResume && s.rec.SuspendedTo == "": // committed; the saved state is not deleted yet
		if err := r.running(ctx, r.current, false); err != nil {
			return err
		}
		return ignore(s, s.dropSaved(op.File, ""))
	case op.Kind == kindResume:
		if r.switched() && r.other != nil {
			return r.finishResume(ctx)
		}
		return r.suspended()
	case op.Kind == kindSwap:
		return r.swap(ctx)
	}
	return fmt.Errorf("unknown operation %q in the journal", op.Kind)
}

// suspend finishes a suspend whose state was complete. If the source was without a gpuguest
// for a long time, it may have thawed itself. Then it is newer than the saved state.
func (r *repair) suspend(ctx context.Context) error {
	s, op := r.s, r.s.rec.Op
	if r.current != nil {
		d, err := r.describe(ctx, r.current)
		switch {
		case errors.Is(err, errUnsettled):
			return err
		case err == nil && !d.Frozen:
			to := s.rec.SuspendedTo
			r.rec.SuspendedTo, r.rec.Away = "", nil
			if err := r.running(ctx, r.current, false); err != nil {
				return err
			}
			return ignore(s, s.dropWritten(ctx, r.current, to, ""))
		}
		if err := leave(r.current); err != nil {
			return err
		}
	}
	if op.Head != nil && s.mem.head() != *op.Head {
		return errLost
	}
	return r.suspended()
}

// begun reports whether the target of an operation that handed over has taken requests, or
// answered those that waited: what it did is lost with it.
func (r *repair) begun() bool {
	op := r.s.rec.Op
	return r.s.mem.head() != *op.Head || op.Other != nil && r.s.mem.serving() == op.Other.Generation
}

// switched reports whether the other executor of the journal owns the ring. The application
// can write the owner word, but before the freeze the result is never true.
func (r *repair) switched() bool {
	op := r.s.rec.Op
	return op.Other != nil && op.Head != nil && r.s.mem.owner() == op.Other.Generation
}

func (r *repair) swap(ctx context.Context) error {
	s, op := r.s, r.s.rec.Op
	if op.Other != nil && op.Other.Generation < s.rec.Current.Generation {
		return r.alone(ctx) // committed and in the journal: the other executor is the source
	}
	if !r.switched() {
		s.mem.setOwner(s.rec.Current.Generation)
		err := r.alone(ctx)
		if err == nil {
			s.dropExport(ctx, r.current)
		}
		return err
	}
	if r.other != nil {
		r.rec.Current = *op.Other
		err := r.running(ctx, r.other, true)
		switch {
		case err == nil:
			return leave(r.current)
		case errors.Is(err, errUnsettled):
			return err
		}
		s.log.Warn("finish the swap", "err", err)
		if err := leave(r.other); err != nil {
			return err
		}
		r.rec.Current = s.rec.Current
	}
	// The target is dead. Go back to the source.
	if r.current == nil || r.begun() {
		return errLost
	}
	s.mem.setOwner(r.current.gen)
	r.rec.Current = r.current.record()
	return r.running(ctx, r.current, false)
}

func (r *repair) finishResume(ctx context.Context) error {
	s, op := r.s, r.s.rec.Op
	to := s.rec.SuspendedTo
	r.rec.Current = *op.Other
	err := r.running(ctx, r.other, true)
	switch {
	case errors.Is(err, errUnsettled):
		return err
	case err != nil:
		s.log.Warn("finish the resume", "err", err)
		r.rec.Current = s.rec.Current
		return r.suspended()
	}
	r.rec.SuspendedTo, r.rec.Away = "", nil
	return ignore(s, s.dropSaved(to, ""))
}

// unsettled adds errUnsettled to the error of an executor that lives and has not done what
// it was asked. It does not do so if the executor has ended, or has refused.
func unsettled(e *executor, err error) error {
	var said *saidError
	if err == nil || e.dead() || errors.As(err, &said) && said.err.Code() == connect.CodeFailedPrecondition {
		return err
	}
	return fmt.Errorf("%w: %w", errUnsettled, err)
}

func (r *repair) describe(ctx context.Context, e *executor) (*gpuctlv1.DescribeResponse, error) {
	d, err := e.describeWithin(ctx, r.patience)
	return d, unsettled(e, err)
}

// running makes the executor run the session, whatever it was doing before. A target is
// activated; any other executor is thawed.
func (r *repair) running(ctx context.Context, e *executor, target bool) error {
	s := r.s
	if e == nil {
		return errors.New("executor has ended while no gpuguest ran")
	}
	d, err := r.describe(ctx, e)
	if err != nil {
		return err
	}
	if s.mem.owner() != e.gen {
		s.mem.setOwner(e.gen)
	}
	switch {
	case d.Frozen && !target:
		err = e.thaw(ctx, d.Freezes)
	case !d.Active:
		err = e.activate(ctx)
	}
	if err != nil {
		return unsettled(e, err)
	}
	s.mem.setState(wire.StateRunning)
	r.runs, r.usage = e, d.Usage
	r.state, r.message = gpuctlv1.SessionState_SESSION_STATE_RUNNING, ""
	return nil
}

// suspended leaves the session without an executor. If a resume was in progress that had
// handed over, its target must not have begun to serve.
func (r *repair) suspended() error {
	s := r.s
	if err := errors.Join(leave(r.other), leave(r.current)); err != nil {
		return err
	}
	if op := s.rec.Op; op != nil && op.Kind == kindResume && op.Head != nil && s.mem.owner() != r.rec.Current.Generation {
		if r.begun() {
			return errLost
		}
		s.mem.setOwner(r.rec.Current.Generation)
	}
	s.mem.setState(wire.StateSuspended)
	r.runs = nil
	r.state, r.message = gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, suspendedText(r.rec.SuspendedTo)
	return nil
}

// alone makes the journal's executor run the session, and ends the other one. While that
// lives, the session is held.
func (r *repair) alone(ctx context.Context) error {
	left := leave(r.other)
	if err := r.running(ctx, r.current, false); err != nil {
		return err
	}
	return left
}

// ignore logs an error whose only effect is that files are left behind.
func ignore(s *session, err error) error {
	if err != nil {
		s.log.Warn("clean up", "err", err)
	}
	return nil
}
