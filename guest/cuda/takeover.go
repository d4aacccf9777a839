package cuda

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/beneath"
)

// takeOver takes over the sessions of an earlier gpuguest. Operations that it did not end
// are finished or rolled back.
func (m *Manager) takeOver() error {
	d, err := beneath.OpenDir(m.cfg.Dir, "sessions")
	if err != nil {
		return fmt.Errorf("sessions: %w", err)
	}
	names, err := d.Readdirnames(-1)
	d.Close()
	if err != nil {
		return fmt.Errorf("sessions: %w", err)
	}
	for _, name := range names {
		id, ok := strings.CutSuffix(name, ".json")
		if !ok {
			continue // a record that was not complete
		}
		rec, err := readRecord(m.cfg.Dir, id)
		if engine.Scarce(err) {
			return fmt.Errorf("session %s: %w", id, err) // it may be suspended, and could not be adopted again
		}
		if err != nil {
			// Its processes are not touched: they can be adopted again if they run.
			m.log.Error("a session's record can't be read; adopt its processes again", "session", id, "err", err)
			continue
		}
		s := &session{m: m, id: id, rec: *rec}
		s.state, s.message = gpuctlv1.SessionState_SESSION_STATE_RUNNING, ""
		switch {
		case rec.Lost != "":
			s.state, s.message = gpuctlv1.SessionState_SESSION_STATE_LOST, rec.Lost
		case rec.SuspendedTo != "":
			s.state, s.message = gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, suspendedText(rec)
		}
		m.enter(s)
		interrupted := rec.Op != nil && rec.Lost == ""
		revived := interrupted && rec.Op.Kind == kindRevive // read before repair changes it
		if interrupted {
			s.repair()
		}
		if !revived { // its processes may not be there; the end of the operation watches them
			m.wg.Go(s.watch)
		}
	}
	return nil
}

// repair finishes an operation of an earlier gpuguest after its commit, and rolls it back
// before. What a member's state is, the driver says.
func (s *session) repair() {
	m := s.m
	op := &operation{
		s: s, kind: s.rec.Op.Kind, Life: engine.NewLife(m.ctx, m.ctx), start: time.Now(), home: s.rec.Op.Home,
		reporter: engine.NewReporter(func(*gpuctlv1.Progress) {}), result: &gpuctlv1.SwapResult{},
	}
	op.caller = &caller{s: s, lock: defaultLock, pool: &pool{}, began: op.began}
	s.op = op
	s.state = gpuctlv1.SessionState_SESSION_STATE_HELD
	s.message = fmt.Sprintf("a %s of an earlier gpuguest is being %s", op.kind, map[bool]string{true: "finished", false: "taken back"}[s.rec.Op.Committed])
	why := errors.New("gpuguest ended meanwhile")
	if s.rec.Op.Committed {
		why = nil
	}
	try := func(ctx context.Context) error {
		if s.rec.Op.Kind == kindStore && s.rec.Op.Committed { // nothing is to be asked of the driver
			return op.endTree(ctx)
		}
		a, err := m.ask.Call(ctx, ask.Request{Op: ask.Devices}, m.cfg.Deadlines.Look)
		if err != nil {
			return err
		}
		op.caller.shown = (&machine{Answer: a}).uuids()
		return op.again(ctx, func(ctx context.Context) error { return op.all(ctx, s.rec.aim(), true) })
	}
	m.wg.Go(func() {
		err := try(op.Rest)
		if err != nil && op.isLost() == nil {
			s.set(gpuctlv1.SessionState_SESSION_STATE_HELD, engine.HeldText(op.kind, err))
			err = engine.Retry(op.Rest, s.log, func(ctx context.Context) error {
				if err := try(ctx); err != nil && op.isLost() == nil {
					return err
				}
				return nil
			})
		}
		if err != nil && op.isLost() == nil {
			op.Over() // the next gpuguest goes on
			return
		}
		op.finish(why, op.result)
	})
}

// aim returns where the members of a session belong whose operation was interrupted.
func (r *record) aim() goal {
	dest := r.Op.Home
	if r.Op.Committed {
		dest = r.Op.Dest
	}
	switch {
	case r.Op.Kind == kindSuspend && r.Op.Committed, (r.Op.Kind == kindResume || r.Op.Kind == kindRevive) && !r.Op.Committed:
		return goal{state: ask.Checkpointed}
	}
	return goal{state: ask.Running, dest: dest}
}
