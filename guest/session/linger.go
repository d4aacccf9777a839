package session

import (
	"fmt"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// A driver may delay the end of a process that was killed, and until then the process may
// have its GPU. So a session whose executor was killed and has not ended is held, by which
// hostd keeps its GPUs from others, and is not over before its last executor is.

// living returns the executors that have not ended.
func living(all []*executor) (out []*executor) {
	for _, e := range all {
		if e != nil && !e.dead() {
			out = append(out, e)
		}
	}
	return out
}

// has notes an executor that was started or taken over.
func (s *session) has(e *executor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(living(s.all), e)
}

// left returns the session's executors that have not ended.
func (s *session) left() []*executor {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = living(s.all)
	return append([]*executor(nil), s.all...)
}

// leave kills an executor. It is an error if it lives on.
func leave(e *executor) error {
	if e == nil {
		return nil
	}
	e.kill()
	if e.dead() {
		return nil
	}
	return fmt.Errorf("%s: %w", lingers(e), errUnsettled)
}

func lingers(e *executor) string {
	return fmt.Sprintf("executor %d was killed and has not ended: its driver does not let go of it, and it may still have its GPU", e.gen)
}

// killAll kills executors, and waits for the end of all of them as long as for one.
func killAll(all []*executor) {
	for _, e := range all {
		e.proc.Kill()
	}
	timer := time.NewTimer(retireTimeout)
	defer timer.Stop()
	for _, e := range all {
		select {
		case <-e.proc.Done():
		case <-timer.C:
			timer.Reset(0)
		}
		e.http.CloseIdleConnections()
	}
}

// awaitGone waits for executors that were killed, and holds the session meanwhile. It
// reports whether they have ended: they have not if gpuguest closes before.
func (s *session) awaitGone(why string, all []*executor) bool {
	left := living(all)
	for _, e := range left {
		s.log.Error("session is held", "reason", why, "err", lingers(e))
		s.set(gpuctlv1.SessionState_SESSION_STATE_HELD, why+"; "+lingers(e))
		select {
		case <-e.proc.Done():
			s.log.Info("executor has ended at last", "generation", e.gen)
		case <-s.m.ctx.Done():
			return false
		}
	}
	return true
}

// retireSource ends the executor that the session has left. The operation is not over, and
// the source's GPU is not given back, before that executor has ended.
func (op *operation) retireSource(err error) error {
	if left := living([]*executor{op.source}); len(left) > 0 {
		op.waits(lingers(op.source))
		op.lingers = !op.s.awaitGone("the "+op.kind+" is done", left)
	}
	return err
}

// bury removes a session that no application has, when its executors have ended.
func (s *session) bury(remove func()) {
	left := s.left()
	killAll(left)
	if len(living(left)) == 0 {
		s.settleBudget(nil)
		remove()
		close(s.ended)
		return
	}
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	s.m.add(s)
	go func() {
		defer close(s.ended)
		if s.awaitGone("it is over", left) { // otherwise the next gpuguest does the same
			s.settleBudget(nil)
			remove()
			s.m.remove(s)
		}
	}()
}
