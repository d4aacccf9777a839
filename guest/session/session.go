package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/budget"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// session is the session of one application.
type session struct {
	m     *Manager
	id    string
	who   uint32 // the user for whom it counts: the application's, or whose that is; 0 as well if an older gpuguest has not recorded it
	began int64  // Unix milliseconds
	log   *slog.Logger
	dir   string
	mem   *memory
	app   *process      // nil if gpuguest can't see the application's pid
	conn  *net.UnixConn // nil after gpuguest has taken the session over

	mu      sync.Mutex
	rec     record
	state   gpuctlv1.SessionState
	message string
	usage   *gpuctlv1.Usage
	fresh   time.Time // when usage was asked for
	late    bool      // the last answer took long
	// answered is closed when the executor has said what it uses; nil: it is not asked.
	answered chan struct{}
	current  *executor   // nil while suspended or lost
	all      []*executor // those that were started and may not have ended
	op       *operation
	digest   *gpuctlv1.DigestResponse // of what the former executor had; its operation's own
	transit  *transit                 // of op
	ending   bool
	gone     chan struct{} // closed by release
	ended    chan struct{} // closed when the session has been removed completely
}

// snapshot returns the session as the API shows it.
func (s *session) snapshot() *gpuctlv1.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.snapshotLocked()
}

func (s *session) snapshotLocked() *gpuctlv1.Session {
	return &gpuctlv1.Session{
		Id: s.rec.ID, Claim: s.rec.Claim, Pid: uint32(s.rec.PID), Command: s.rec.Command,
		State: s.state, Target: s.rec.Current.target(), Usage: proto.CloneOf(s.usage),
		StartedUnixMs: s.rec.StartedMS, Message: s.message, Generation: s.rec.Current.Generation,
		SuspendedTo: s.rec.SuspendedTo, Device: s.rec.device(), Away: s.rec.Away.proto(), Engine: engineName,
		Owner: s.rec.Owner, Weight: s.rec.Weight, Share: s.m.sharing.shareOf(s.current),
	}
}

// update changes the record under the lock and writes it.
func (s *session) update(change func(*record)) error { return s.amend(change, true) }

// note changes the record as update does, and leaves it to the next change to write it: for what no
// later gpuguest depends on yet.
func (s *session) note(change func(*record)) { _ = s.amend(change, false) }

func (s *session) amend(change func(*record), write bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.rec
	if s.rec.Op != nil {
		op := *s.rec.Op
		next.Op = &op
	}
	change(&next)
	if write {
		if err := next.write(s.dir); err != nil {
			return fmt.Errorf("journal of session %s: %w", s.id, err)
		}
	}
	s.rec = next
	return nil
}

func (s *session) set(state gpuctlv1.SessionState, message string) {
	s.mu.Lock()
	s.state, s.message = state, message
	s.mu.Unlock()
	s.m.changed(s)
}

func (s *session) executorsDir() string { return filepath.Join(s.dir, executorsName) }

// executorsName is the name of the folder in a session's folder that belongs to its
// executors.
const executorsName = "x"

func (s *session) logFile(gen uint32) string {
	return filepath.Join(s.dir, fmt.Sprintf("executor-%d.log", gen))
}

func (s *session) sockets(gen uint32) (control, imports string) {
	return filepath.Join(s.executorsDir(), fmt.Sprintf("c%d", gen)),
		filepath.Join(s.executorsDir(), fmt.Sprintf("i%d", gen))
}

// spec returns what the next executor is started with. The caller holds mu, and closes the
// spec.
func (s *session) spec(rt *gpuctlv1.Runtime) (Spec, error) {
	gen := s.rec.Generation + 1
	control, imports := s.sockets(gen)
	spec := Spec{
		Dir: s.executorsDir(), Log: s.logFile(gen), Generation: gen, Socket: control, ImportSocket: imports,
		Runtime: rt, Device: s.rec.device(), Memory: s.mem.files(),
		CacheKey: s.rec.cacheKey(rt), AppPID: s.rec.PID, AppStart: s.rec.Start,
	}
	if rt.GetRemote() != nil || spec.Device.GetGlobalMemory() == 0 {
		return spec, nil // counted where it is lent, or without a limit
	}
	key, err := BudgetKey(s.rec.Claim, rt)
	if err != nil {
		return spec, err
	}
	spec.Budget, spec.BudgetLine, err = s.m.budgets.Line(key, s.id)
	return spec, err
}

// BudgetKey names what the sessions of a claim that one runtime serves take together.
func BudgetKey(claim string, rt *gpuctlv1.Runtime) (string, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(rt)
	if err != nil {
		return "", fmt.Errorf("runtime %s: %w", rt.GetLibrary(), err)
	}
	return budget.Key(claim, b), nil
}

func (spec *Spec) close() {
	if spec.Budget != nil {
		spec.Budget.Close()
	}
}

// settleBudget gives back what the session has taken of GPUs that it is not on.
func (s *session) settleBudget(on *executor) {
	keep := ""
	if on != nil && on.target.GetRuntime().GetRemote() == nil {
		var err error
		if keep, err = BudgetKey(s.rec.Claim, on.target.GetRuntime()); err != nil {
			s.log.Warn("memory of the claim", "err", err)
			return
		}
	}
	if err := s.m.budgets.Leave(s.id, keep); err != nil {
		s.log.Warn("memory of the claim", "err", err)
	}
}

// launch starts an executor of the next generation and waits until it serves. journal is
// called before the executor does anything. If the executor fails, launch kills it; it also
// returns it, as it may not have ended.
func (s *session) launch(ctx context.Context, target *gpuctlv1.Target,
	journal func(*record, executorRecord),
) (*executor, *gpuctlv1.DescribeResponse, error) {
	s.mu.Lock()
	spec, err := s.spec(target.GetRuntime())
	s.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	defer spec.close()
	gen := spec.Generation
	var e *executor
	_, err = s.m.cfg.Launcher.Launch(ctx, spec, func(p Process) error {
		e = newExecutor(gen, target, p, spec.Socket, spec.ImportSocket)
		s.has(e)
		return s.update(func(r *record) {
			r.Generation = gen
			journal(r, e.record())
		})
	})
	if err != nil {
		return e, nil, err
	}
	began := time.Now()
	d, err := e.ready(ctx)
	if err == nil { // a probe of this runtime may take as long
		s.m.loads.Took(target.GetRuntime().GetLibrary(), time.Since(began))
	}
	if err == nil && d.Generation != gen {
		err = fmt.Errorf("executor %d says it is generation %d", gen, d.Generation)
	}
	if err != nil {
		e.kill()
		return e, nil, err
	}
	return e, d, nil
}

// watchExecutor marks the session as lost when its executor ends unexpectedly.
func (s *session) watchExecutor(e *executor) {
	go func() {
		select {
		case <-e.proc.Done():
			s.executorEnded(e)
		case <-s.gone:
		}
	}()
}

// executorEnded is called when an executor of the session has ended. If an operation runs,
// the operation decides whether that matters.
func (s *session) executorEnded(e *executor) {
	s.mu.Lock()
	lost := s.current == e && s.op == nil && !s.ending
	s.mu.Unlock()
	if lost {
		s.lose(endedText(e))
	}
}

func endedText(e *executor) string { return "executor has ended: " + e.proc.Exit() }

// lose marks the session as lost for its application: its state no longer exists. It is held
// until its executors have ended.
func (s *session) lose(why string) {
	s.mu.Lock()
	s.current = nil
	s.mu.Unlock()
	left := s.left()
	killAll(left) // they must not touch the ring any more
	s.log.Error("session lost", "err", why)
	if err := s.update(func(r *record) { r.Lost = why }); err != nil {
		s.log.Warn("journal", "err", err)
	}
	s.remember(why) // before the application knows: it may end at once, and who started it asks why
	s.mem.setState(wire.StateLost)
	if len(living(left)) == 0 {
		s.lost(why)
		return
	}
	s.set(gpuctlv1.SessionState_SESSION_STATE_HELD, why)
	go func() {
		if s.awaitGone("it is lost: "+why, left) {
			s.lost(why)
		}
	}()
}

// remember keeps that the session is lost, also for the time after the end of its application.
func (s *session) remember(why string) {
	if err := s.m.losses.Add(s.snapshot(), why); err != nil {
		s.log.Warn("the next gpuguest will not know that this session was lost", "err", err)
	}
}

// lost is called when all executors of a lost session have ended.
func (s *session) lost(why string) {
	s.mu.Lock()
	ending := s.ending
	s.mu.Unlock()
	if ending {
		return
	}
	s.settleBudget(nil)
	if err := s.update(func(r *record) { r.Op, r.Lost = nil, why }); err != nil {
		s.log.Warn("journal", "err", err)
	}
	s.set(gpuctlv1.SessionState_SESSION_STATE_LOST, why)
}

// How much an application may say after its greeting at once, and how often.
const (
	saidSize  = 64 << 10
	saidPause = 100 * time.Millisecond
)

// watchApp ends the session when the application has ended. It watches the connection, if
// there is one, and also the pid, because a child process may have the socket open, too.
func (s *session) watchApp() {
	if s.app != nil {
		go func() {
			select {
			case <-s.app.Done():
				s.end()
			case <-s.gone:
			}
		}()
	}
	if s.conn != nil {
		go func() {
			b := make([]byte, saidSize)
			for {
				if _, err := s.conn.Read(b); err != nil {
					break
				}
				// It has nothing to say. What it says all the same costs it more than gpuguest.
				select {
				case <-s.gone:
				case <-time.After(saidPause):
				}
			}
			select {
			case <-s.gone: // gpuguest has closed the connection
			default:
				s.end()
			}
		}()
	}
}

// end ends the session. It returns when everything of the session is removed.
func (s *session) end() {
	s.mu.Lock()
	if s.ending {
		s.mu.Unlock()
		select {
		case <-s.ended:
		case <-s.gone: // Close has released the session
		}
		return
	}
	s.ending = true
	op := s.op
	s.mu.Unlock()
	if op != nil {
		op.Cancel(errAppEnded)
		op.GiveUp()
		<-op.Done()
	}
	defer close(s.ended)
	s.mu.Lock()
	e, rec := s.current, s.rec
	s.mu.Unlock()
	if e != nil && e.dead() { // the application has been faster than we: it has ended because of that
		s.remember(endedText(e))
	}
	if e != nil {
		ctx, cancel := context.WithTimeout(context.Background(), retireTimeout)
		orderly := !e.dead() && e.retire(ctx) == nil
		cancel()
		if orderly {
			s.keepCompiled()
		}
	}
	left := s.left()
	killAll(left)
	if !s.awaitGone("its application has ended", left) {
		s.release() // the next gpuguest ends it
		return
	}
	if isFile(rec.SuspendedTo) {
		_ = s.removeState(rec.SuspendedTo)
	}
	s.release()
	s.settleBudget(nil)
	if err := s.m.removeDir(s.dir); err != nil {
		s.log.Warn("remove session folder", "err", err)
	}
	s.log.Info("session ended")
	s.m.remove(s)
}

// release stops watching the session's processes, and frees what gpuguest has for it. The
// processes continue.
func (s *session) release() {
	close(s.gone)
	s.m.cfg.Launcher.Cool(s.executorsDir())
	if s.conn != nil {
		s.conn.Close()
	}
	if s.app != nil {
		s.app.close()
	}
	s.mem.close()
}

// refresh asks the executor for the session's usage, at most once per every, and not again before it
// has answered. answered is closed when it has; nil: it is not asked. late is whether it took long the
// last time.
func (s *session) refresh(every time.Duration) (answered <-chan struct{}, late bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.current
	switch {
	case s.answered != nil:
		return s.answered, s.late
	case e == nil || time.Since(s.fresh) < every || s.m.ctx.Err() != nil:
		return nil, false
	}
	asked, done := time.Now(), make(chan struct{})
	s.fresh, s.answered = asked, done
	s.m.wg.Go(func() {
		defer close(done)
		d, err := e.describe(s.m.ctx)
		s.mu.Lock()
		s.answered, s.late = nil, time.Since(asked) >= answerTime
		moved := err == nil && !proto.Equal(s.usage, d.Usage)
		if moved {
			s.usage = d.Usage
		}
		s.mu.Unlock()
		if moved {
			s.m.changed(s)
		}
	})
	return done, s.late
}

var errAppEnded = errors.New("the application has ended")

func joinWords(words []string) string { return strings.Join(words, "; ") }
