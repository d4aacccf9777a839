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
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// session is the session of one application.
type session struct {
	m     *Manager
	id    string
	began int64 // Unix milliseconds
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
	fresh   time.Time // when usage was read
	current *executor // nil while suspended or lost
	op      *operation
	transit *transit // of op
	ending  bool
	gone    chan struct{} // closed by release
	ended   chan struct{} // closed when the session has been removed completely
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
func (s *session) update(change func(*record)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.rec
	if s.rec.Op != nil {
		op := *s.rec.Op
		next.Op = &op
	}
	change(&next)
	if err := next.write(s.dir); err != nil {
		return fmt.Errorf("journal of session %s: %w", s.id, err)
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

// spec returns what the next executor is started with. The caller holds mu.
func (s *session) spec(rt *gpuctlv1.Runtime) Spec {
	gen := s.rec.Generation + 1
	control, imports := s.sockets(gen)
	return Spec{
		Dir: s.executorsDir(), Log: s.logFile(gen), Generation: gen, Socket: control, ImportSocket: imports,
		Runtime: rt, Device: s.rec.device(), Memory: s.mem.files(),
		CacheKey: s.rec.cacheKey(rt), AppPID: s.rec.PID, AppStart: s.rec.Start,
	}
}

// launch starts an executor of the next generation and waits until it serves. journal is
// called before the executor does anything. If the executor fails, launch kills it.
func (s *session) launch(ctx context.Context, target *gpuctlv1.Target,
	journal func(*record, executorRecord),
) (*executor, *gpuctlv1.DescribeResponse, error) {
	s.mu.Lock()
	spec := s.spec(target.GetRuntime())
	s.mu.Unlock()
	gen := spec.Generation
	var e *executor
	_, err := s.m.cfg.Launcher.Launch(ctx, spec, func(p Process) error {
		e = newExecutor(gen, target, p, spec.Socket, spec.ImportSocket)
		return s.update(func(r *record) {
			r.Generation = gen
			journal(r, e.record())
		})
	})
	if err != nil {
		return nil, nil, err
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
		return nil, nil, err
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
		s.lose("executor has ended: " + e.proc.Exit())
	}
}

// lose marks the session as lost for its application: its state no longer exists.
func (s *session) lose(why string) {
	s.mu.Lock()
	e := s.current
	s.current = nil
	s.mu.Unlock()
	if e != nil && !e.dead() {
		e.kill() // it must not touch the ring any more
	}
	s.mem.setState(wire.StateLost)
	s.log.Error("session lost", "err", why)
	s.set(gpuctlv1.SessionState_SESSION_STATE_LOST, why)
}

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
			var b [64]byte
			for {
				if _, err := s.conn.Read(b[:]); err != nil {
					break
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
		op.cancel(errAppEnded)
		op.giveUp()
		<-op.done
	}
	s.mu.Lock()
	e, rec := s.current, s.rec
	s.mu.Unlock()
	if e != nil {
		ctx, cancel := context.WithTimeout(context.Background(), retireTimeout)
		orderly := !e.dead() && e.retire(ctx) == nil
		cancel()
		if orderly {
			s.keepCompiled()
		}
	}
	if isFile(rec.SuspendedTo) {
		_ = s.removeState(rec.SuspendedTo)
	}
	s.release()
	if err := s.m.removeDir(s.dir); err != nil {
		s.log.Warn("remove session folder", "err", err)
	}
	s.log.Info("session ended")
	s.m.remove(s)
	close(s.ended)
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

// refresh asks the executor for the session's usage, at most once per every.
func (s *session) refresh(ctx context.Context, every time.Duration) {
	s.mu.Lock()
	e := s.current
	skip := e == nil || time.Since(s.fresh) < every
	if !skip {
		s.fresh = time.Now()
	}
	s.mu.Unlock()
	if skip {
		return
	}
	d, err := e.describe(ctx)
	if err != nil {
		return
	}
	s.mu.Lock()
	moved := !proto.Equal(s.usage, d.Usage)
	s.usage = d.Usage
	s.mu.Unlock()
	if moved {
		s.m.changed(s)
	}
}

var errAppEnded = errors.New("the application has ended")

func joinWords(words []string) string { return strings.Join(words, "; ") }
