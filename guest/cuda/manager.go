package cuda

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/cuda/ask"
	"github.com/gpuctl/gpuctl/guest/cuda/criu"
	"github.com/gpuctl/gpuctl/guest/cuda/holders"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/internal/glimpse"
	"github.com/gpuctl/gpuctl/internal/news"
)

const (
	engineName  = "driver"
	idPrefix    = "d-"
	mostSession = 1024
)

// Config is the configuration of a Manager.
type Config struct {
	Dir    string // run folder; created if missing
	Logger *slog.Logger
	Faults bool // allow fail_at
	// Detach says that the card is to be taken away from suspended sessions, as in a VM:
	// a suspend is refused if a process would keep the card open.
	Detach bool
	// NoCanary has no test process go through an operation first.
	NoCanary bool
	// Parallel is how many processes of a session are moved at once; 0: 4.
	Parallel  int
	Deadlines Deadlines

	Roots   holders.Roots // where processes and nodes are
	Cgroups string        // where control groups are; empty: /sys/fs/cgroup
	Helper  ask.Helper    // the helper; its zero value is this program
	// Canary is the command line of a canary; empty: this program.
	Canary ask.Helper
	UID    uint32 // gpuguest's user
	CRIU   criu.Program

	die    func()                      // ends this process; only fault injection calls it
	at     func(point string)          // between two acts on a folder; nil but in tests
	crash  func(when string, o ask.Op) // before and after each call; nil but in tests
	memory func() (uint64, error)      // available on this machine; nil but in tests
}

// Manager manages the sessions of one run folder.
type Manager struct {
	cfg    Config
	log    *slog.Logger
	lock   *os.File
	losses *engine.Losses
	ask    *ask.Client
	self   string // this program

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	changes  news.Changes[string, *session]
	adopting sync.Mutex

	strangers strangers // only findOffered's

	mu       sync.Mutex
	sessions map[string]*session
	offers   engine.Offers
	aside    map[turn]bool // by whom jobs are being adopted
	seenAt   time.Time     // of the last look
	looking  chan struct{} // closed when the look for lists of sessions has ended; nil: there is none
	late     bool          // the last such look took long
}

// New locks the run folder and takes over the sessions that it finds there.
func New(cfg Config) (*Manager, error) {
	if cfg.Parallel <= 0 {
		cfg.Parallel = 4
	}
	if cfg.Cgroups == "" {
		cfg.Cgroups = "/sys/fs/cgroup"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.die == nil {
		cfg.die = engine.KillSelf
	}
	cfg.Deadlines = cfg.Deadlines.withDefaults()
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("run folder %s: %w", cfg.Dir, err)
	}
	cfg.Dir = dir
	if err := os.MkdirAll(filepath.Join(dir, "sessions"), 0o700); err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	lock, err := engine.LockFolder(dir, "lock")
	if err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, log: cfg.Logger, lock: lock, ask: &ask.Client{Helper: cfg.Helper},
		sessions: map[string]*session{}, aside: map[turn]bool{}, strangers: strangers{},
	}
	m.self, _ = os.Readlink("/proc/self/exe")
	if m.cfg.Roots.Reads == nil {
		m.cfg.Roots.Reads = &glimpse.Reads{}
	}
	if m.cfg.Roots.Except == nil {
		m.cfg.Roots.Except = m.ours
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.losses, err = engine.OpenLosses(dir, "lost")
	if err == nil {
		err = m.loadOffers()
	}
	if err == nil {
		err = m.takeOver()
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	m.wg.Go(m.adoptOffered)
	return m, nil
}

// ours reports whether a process is gpuguest itself, or a helper, an executor or a canary that it
// or an earlier gpuguest has started. The program alone does not tell: anybody may run it. Those
// of an earlier gpuguest have become children of the first process, or of one that this gpuguest
// descends from, too.
func (m *Manager) ours(pid int) bool {
	for range mostAncestors {
		exe, err := os.Readlink(filepath.Join(m.procRoot(), fmt.Sprint(pid), "exe"))
		if err != nil || strings.TrimSuffix(exe, " (deleted)") != strings.TrimSuffix(m.self, " (deleted)") {
			return false
		}
		if pid == os.Getpid() {
			return true
		}
		parent, err := m.cfg.Roots.Parent(pid)
		switch {
		case err != nil:
			return false
		case parent <= 1 || m.above(parent):
			return true
		}
		pid = parent
	}
	return false
}

// mostAncestors is how far a process's ancestors are looked for.
const mostAncestors = 64

// above reports whether this gpuguest descends from a process.
func (m *Manager) above(pid int) bool {
	of := os.Getpid()
	for range mostAncestors {
		parent, err := m.cfg.Roots.Parent(of)
		if err != nil || parent <= 1 {
			return false
		}
		if parent == pid {
			return true
		}
		of = parent
	}
	return false
}

// Close ends the manager. Sessions go on; the next one takes them over. An operation that
// runs is rolled back, if it is not committed yet.
func (m *Manager) Close() {
	m.cancel()
	m.mu.Lock()
	var ops []*operation
	for _, s := range m.sessions {
		s.mu.Lock()
		if s.op != nil {
			ops = append(ops, s.op)
		}
		s.mu.Unlock()
	}
	m.mu.Unlock()
	for _, op := range ops {
		<-op.Done()
	}
	m.wg.Wait()
	m.lock.Close()
}

func (m *Manager) lookup(id string) (*session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.sessions[id]; s != nil {
		return s, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no session %q", id))
}

func (m *Manager) list() []*session {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []*session
	for _, s := range m.sessions {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *session) int {
		return cmp.Or(cmp.Compare(a.rec.StartedMS, b.rec.StartedMS), strings.Compare(a.id, b.id))
	})
	return all
}

// sessionOf returns the session that a process is a member of, or the root, or nil.
func (m *Manager) sessionOf(pid int, start uint64) *session {
	for _, s := range m.list() {
		if s.has(pid, start) {
			return s
		}
	}
	return nil
}

// add gives a session an id, writes its record and watches it. One that begins by an offer is
// added only if that stands: once the caller of Offer or Withdraw has its answer, no session can
// begin by the old offer that is not in the list. The next look finds its processes again.
func (m *Manager) add(s *session, by *gpuctlv1.OfferRequest) error {
	if err := m.register(s, by); err != nil {
		return err
	}
	m.wg.Go(s.watch)
	return nil
}

// register does the same without watching it.
func (m *Manager) register(s *session, by *gpuctlv1.OfferRequest) error {
	m.mu.Lock()
	if by != nil && !proto.Equal(m.offers[by.GetToken()], by) {
		m.mu.Unlock()
		return fmt.Errorf("pid %d: %w", s.rec.PID, engine.ErrOfferedAnew)
	}
	if len(m.sessions) >= mostSession {
		m.mu.Unlock()
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d sessions are the most", mostSession))
	}
	if s.id != "" && m.sessions[s.id] != nil {
		m.mu.Unlock()
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("session %s is here already", s.id))
	}
	if s.id == "" {
		for {
			var b [4]byte
			_, _ = rand.Read(b[:]) // never fails
			s.id = idPrefix + hex.EncodeToString(b[:])
			if m.sessions[s.id] == nil && !m.losses.Has(s.id) {
				break
			}
		}
		s.rec.ID = s.id
	}
	s.log = m.log.With("session", s.id)
	m.sessions[s.id] = s
	m.mu.Unlock()
	if err := s.update(func(*record) {}); err != nil {
		m.remove(s)
		return fmt.Errorf("session %s: %w", s.id, err)
	}
	m.changed(s)
	return nil
}

// enter adds a session of an earlier gpuguest. Its record is there, and is left as it is: what is
// in it can't be found out again, and there may be no room to write it.
func (m *Manager) enter(s *session) {
	s.log = m.log.With("session", s.id)
	m.mu.Lock()
	m.sessions[s.id] = s
	m.mu.Unlock()
	m.changed(s)
}

func (m *Manager) remove(s *session) {
	m.mu.Lock()
	delete(m.sessions, s.id)
	m.mu.Unlock()
	if err := os.Remove(filepath.Join(m.cfg.Dir, recordName(s.id))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("remove the record", "err", err)
	}
	m.changed(s)
}

func (m *Manager) changed(s *session) { m.changes.Put(s.id, s) }
