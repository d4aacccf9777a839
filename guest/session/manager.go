package session

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/budget"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/opencl/compiled"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/glimpse"
	"github.com/gpuctl/gpuctl/internal/news"
	"github.com/gpuctl/gpuctl/internal/patience"
	"github.com/gpuctl/gpuctl/internal/timeshare"
)

const (
	defaultMaxSessions = 1024
	usageEvery         = time.Second
	answerTime         = 500 * time.Millisecond // within which an executor says what it uses
	maxToken           = 48                     // bytes; as long as in the greeting
	maxOwner           = 128
	maxWeight          = timeshare.MaxWeight
)

// Config is the configuration of a Manager.
type Config struct {
	Dir         string // run folder; created if missing
	Launcher    Launcher
	Logger      *slog.Logger
	Faults      bool   // allow fail_at
	Verify      bool   // compare all contents after each swap
	MaxSessions int    // at once; 0: 1024
	Lender      Lender // nil: nothing is lent
	CompileAnew bool   // do not keep what runtimes compile for the next session of a user's program
	Sharing     turn.Settings
	// Whose returns the user whose a user is: what each user may have, all of that user's
	// have together. nil: each is its own.
	Whose func(uid uint32) uint32
	// Lease returns how the carrier of a session that begins reaches a far executor, for
	// an offer of a remote GPU that names none. nil: there are no such offers.
	Lease func(ctx context.Context, session string, offer *gpuctlv1.OfferRequest) (*gpuctlv1.Target, error)
}

// Manager manages the sessions of one run folder.
type Manager struct {
	cfg  Config
	log  *slog.Logger
	lock *os.File

	ctx     context.Context // ends with Close
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	model   *model
	kept    *compiled.Store // nil: nothing is kept
	budgets *budget.Table
	losses  *engine.Losses
	loads   *patience.Patience // time limits of loading runtimes, by library
	die     func()             // ends this process; only fault injection calls it

	changes news.Changes[string, *session]
	sharing *sharing
	reads   glimpse.Reads // of applications

	mu       sync.Mutex
	sessions map[string]*session
	creating map[string]uint32 // users of sessions that are being made, by id; some are in sessions already
	offers   engine.Offers
}

// New locks the run folder and takes over the sessions that it finds there.
func New(cfg Config) (*Manager, error) {
	if cfg.MaxSessions == 0 {
		cfg.MaxSessions = defaultMaxSessions
	}
	share, err := cfg.Sharing.Config()
	if err != nil {
		return nil, fmt.Errorf("sharing: %w", err)
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("run folder %s: %w", cfg.Dir, err)
	}
	cfg.Dir = dir
	// The longest socket name must fit into a unix address.
	if longest := filepath.Join(dir, "sessions", "s-000000", "x", "c4294967295"); len(longest) > 107 {
		return nil, fmt.Errorf("run folder %s: path is too long for unix sockets", dir)
	}
	// Executors of another user can pass through to their own folder, but no further.
	if err := os.MkdirAll(filepath.Join(dir, "sessions"), 0o711); err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	lock, err := engine.LockFolder(dir, "lock")
	if err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, log: cfg.Logger, lock: lock, model: newModel(), loads: patience.New(leastLoad, mostLoad), die: engine.KillSelf,
		sessions: map[string]*session{}, creating: map[string]uint32{},
	}
	m.reads.Whose = cfg.Whose
	m.sharing = newSharing(m, share)
	m.ctx, m.cancel = context.WithCancel(context.Background())
	if !cfg.CompileAnew {
		m.kept, err = compiled.Open(filepath.Join(dir, "compiled"))
	}
	if err == nil {
		m.budgets, err = budget.Open(filepath.Join(dir, "budgets"))
	}
	if err == nil {
		m.losses, err = engine.OpenLosses(dir, "lost")
	}
	if err == nil {
		err = m.loadOffers()
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	err = m.adoptAll()
	if err == nil {
		err = m.budgets.Retain(func(name string) bool { _, err := m.lookup(name); return err == nil })
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	m.wg.Go(m.refreshLoop)
	m.wg.Go(func() { m.sharing.run(m.ctx) })
	return m, nil
}

// Close rolls back what is not committed, and releases the sessions. Applications and
// executors continue to run; the next Manager takes them over.
func (m *Manager) Close() {
	m.cancel()
	for _, s := range m.list() { // whose executor is asked from now on, knows that it is over
		s.mu.Lock()
		s.mu.Unlock() //nolint:staticcheck // only to wait for who has it
	}
	m.wg.Wait()
	m.mu.Lock()
	sessions := m.sessions
	m.sessions = map[string]*session{}
	m.mu.Unlock()
	for _, s := range sessions {
		s.mu.Lock()
		op, ending, e := s.op, s.ending, s.current
		s.ending = true // from now on, no operation begins and no session is lost
		s.mu.Unlock()
		if op != nil {
			<-op.Done()
			s.mu.Lock()
			e = s.current
			s.mu.Unlock()
		}
		if ending {
			<-s.ended
			continue
		}
		if e != nil {
			e.http.CloseIdleConnections()
		}
		s.release()
	}
	m.lock.Close()
}

func (m *Manager) closing() bool { return m.ctx.Err() != nil }

func (m *Manager) lookup(id string) (*session, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if s, ok := m.sessions[id]; ok {
		return s, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no session %q", id))
}

// list returns the sessions, oldest first.
func (m *Manager) list() []*session {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]*session, 0, len(m.sessions))
	for _, s := range m.sessions {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *session) int {
		if a.began != b.began {
			return int(a.began - b.began)
		}
		return strings.Compare(a.id, b.id)
	})
	return all
}

// warm starts in advance what a probe, and the next executor of each session that has one
// now, will need.
func (m *Manager) warm(ctx context.Context, rt *gpuctlv1.Runtime) error {
	if rt.GetRemote() != nil {
		return nil // a carrier starts at once
	}
	specs := []Spec{{Runtime: rt}}
	for _, s := range m.list() {
		s.mu.Lock()
		if s.current != nil && s.op == nil && !s.ending {
			spec, err := s.spec(rt)
			if err != nil {
				s.mu.Unlock()
				return err
			}
			defer spec.close()
			specs = append(specs, spec)
		}
		s.mu.Unlock()
	}
	errs := make([]error, len(specs))
	var wg sync.WaitGroup
	for i := range specs {
		wg.Go(func() { errs[i] = m.cfg.Launcher.Warm(ctx, specs[i]) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// reserve reserves a place and an unused id for a new session of a user. unreserve ends the
// reservation. A user has at most as many places as are left for others, so nobody finds all of
// them taken by another user. Only root, and gpuguest's own user, may take all.
func (m *Manager) reserve(uid uint32) (id string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing() {
		return "", errors.New("gpuguest is shutting down")
	}
	users := maps.Clone(m.creating)
	for id, s := range m.sessions {
		users[id] = s.who
	}
	switch own, left := places(users, uid, m.cfg.MaxSessions); {
	case left <= 0:
		return "", fmt.Errorf("all %d sessions are taken", m.cfg.MaxSessions)
	case !trusted(uid) && own >= left:
		return "", fmt.Errorf("user %d has %d sessions, and the last %d of %d are left for other users: end some (maxSessions)", uid, own, left, m.cfg.MaxSessions)
	}
	for {
		var b [3]byte
		_, _ = rand.Read(b[:]) // never fails
		id = "s-" + hex.EncodeToString(b[:])
		_, creating := m.creating[id]
		if _, err := os.Lstat(m.sessionDir(id)); errors.Is(err, fs.ErrNotExist) && !creating && !m.losses.Has(id) {
			break
		}
	}
	m.creating[id] = uid
	return id, nil
}

// places returns how many of the sessions are a user's, and how many places of all are left.
func places(users map[string]uint32, uid uint32, all int) (own, left int) {
	for _, of := range users {
		if of == uid {
			own++
		}
	}
	return own, all - len(users)
}

// whose returns the user for whom a user counts.
func (m *Manager) whose(uid uint32) uint32 {
	if m.cfg.Whose == nil {
		return uid
	}
	return m.cfg.Whose(uid)
}

// trusted reports whether a user may have all that there is.
func trusted(uid uint32) bool { return uid == 0 || int(uid) == os.Getuid() }

func (m *Manager) unreserve(id string) {
	m.mu.Lock()
	delete(m.creating, id)
	m.mu.Unlock()
}

// removeDir removes a session's folder, and ends what still runs as its executors' user.
func (m *Manager) removeDir(dir string) error {
	return errors.Join(m.cfg.Launcher.Forget(filepath.Join(dir, executorsName)), os.RemoveAll(dir))
}

// keepCompiled stores what the session's runtimes have compiled, for the next session of
// its program. It may be called only if the executors have ended normally: an executor that
// was killed may have been writing.
func (s *session) keepCompiled() {
	if err := s.m.cfg.Launcher.Forget(s.executorsDir()); err != nil { // also ends the processes that they have started
		s.log.Debug("what was compiled is not kept", "err", err)
		return
	}
	if err := s.m.kept.Keep(s.rec.Program, s.executorsDir()); err != nil {
		s.log.Debug("what was compiled is not kept", "err", err)
	}
}

func (m *Manager) sessionDir(id string) string { return filepath.Join(m.cfg.Dir, "sessions", id) }

func (m *Manager) add(s *session) {
	m.addIf(s, func() bool { return true })
}

// addBy adds a session that was made by an offer, unless that was replaced or withdrawn
// meanwhile: once the caller of Offer or Withdraw has its answer, no session can begin by the
// old offer that is not in the list, and what only that offered may be somebody else's.
func (m *Manager) addBy(s *session, token string, offer *gpuctlv1.OfferRequest) bool {
	return m.addIf(s, func() bool { return proto.Equal(m.offers[token], offer) })
}

func (m *Manager) addIf(s *session, ok func() bool) bool {
	m.mu.Lock()
	if !ok() {
		m.mu.Unlock()
		return false
	}
	m.sessions[s.id] = s
	m.mu.Unlock()
	m.changed(s)
	return true
}

func (m *Manager) remove(s *session) {
	s.mu.Lock()
	s.state = gpuctlv1.SessionState_SESSION_STATE_ENDED
	s.mu.Unlock()
	m.mu.Lock()
	delete(m.sessions, s.id)
	m.mu.Unlock()
	m.changed(s)
}

func (m *Manager) offer(o *gpuctlv1.OfferRequest) error {
	if len(o.Token) > maxToken || strings.ContainsRune(o.Token, 0) {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the token is longer than %d bytes or holds a NUL", maxToken))
	}
	if err := checkTarget(o.Target); err != nil {
		return err
	}
	if len(o.Owner) > maxOwner || o.Weight > maxWeight {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("the owner's name is longer than %d bytes, or its weight more than %d", maxOwner, maxWeight))
	}
	return m.changeOffers(func(all engine.Offers) { all[o.Token] = proto.CloneOf(o) })
}

func (m *Manager) withdraw(token string) error {
	return m.changeOffers(func(all engine.Offers) { delete(all, token) })
}

func (m *Manager) changeOffers(change func(engine.Offers)) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.offers, err = m.offers.Change(m.cfg.Dir, change)
	return err
}

const mostOffers = 64 << 20 // bytes

func (m *Manager) loadOffers() (err error) {
	m.offers, err = engine.ReadOffers(m.cfg.Dir, mostOffers)
	return err
}

func (m *Manager) offered(token string) (*gpuctlv1.OfferRequest, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o, ok := m.offers[token]
	return o, ok
}

// refreshLoop updates the usage of all sessions while somebody watches.
func (m *Manager) refreshLoop() {
	t := time.NewTicker(usageEvery)
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
		}
		if m.changes.Watched() {
			m.refreshAll(m.ctx)
		}
	}
}

// refreshAll asks all executors what they use, and waits for those that answer in time. One that is
// busy, as with what its application has it compile, must not keep whoever wants to know of others:
// what it used before is good enough.
func (m *Manager) refreshAll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	var asked []<-chan struct{}
	for _, s := range m.list() {
		if answered, late := s.refresh(usageEvery / 2); answered != nil && !late {
			asked = append(asked, answered)
		}
	}
	for _, answered := range asked {
		select {
		case <-answered:
		case <-ctx.Done():
			return
		}
	}
}

func (m *Manager) changed(s *session) {
	m.changes.Put(s.id, s)
	m.sharing.ring()
}

// Watch calls send with each session's current state, and then for each change, until ctx
// or the manager ends or send fails.
func (m *Manager) Watch(ctx context.Context, send func(*gpuctlv1.Session) error) error {
	list := func(ctx context.Context) []*session {
		m.refreshAll(ctx)
		return m.list()
	}
	return engine.Watched[*session]{Changes: &m.changes, List: list, Snapshot: (*session).snapshot, Ended: m.ctx.Done()}.Watch(ctx, send)
}
