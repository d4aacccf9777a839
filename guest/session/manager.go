package session

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
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
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/compiled"
	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/news"
	"github.com/gpuctl/gpuctl/internal/patience"
)

const (
	defaultMaxSessions = 1024
	usageEvery         = time.Second
	maxToken           = 48 // bytes; as long as in the greeting
)

// ErrLocked is returned by New when another gpuguest uses the run folder.
var ErrLocked = errors.New("another gpuguest uses this run folder")

// Config is the configuration of a Manager.
type Config struct {
	Dir         string // run folder; created if missing
	Launcher    Launcher
	Logger      *slog.Logger
	Faults      bool   // allow fail_at
	MaxSessions int    // at once; 0: 1024
	Lender      Lender // nil: nothing is lent
	CompileAnew bool   // do not keep what runtimes compile for the next session of a user's program
}

// Manager manages the sessions of one run folder.
type Manager struct {
	cfg  Config
	log  *slog.Logger
	lock *os.File

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	model  *model
	kept   *compiled.Store    // nil: nothing is kept
	loads  *patience.Patience // time limits of loading runtimes, by library
	die    func()             // ends this process; only fault injection calls it

	changes news.Changes[string, *session]

	mu       sync.Mutex
	sessions map[string]*session
	creating int
	offers   map[string]*gpuctlv1.OfferRequest
}

// New locks the run folder and takes over the sessions that it finds there.
func New(cfg Config) (*Manager, error) {
	if cfg.MaxSessions == 0 {
		cfg.MaxSessions = defaultMaxSessions
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
	lock, err := beneath.OpenFile(dir, "lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("run folder: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: %w", dir, ErrLocked)
		}
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	m := &Manager{
		cfg: cfg, log: cfg.Logger, lock: lock, model: newModel(), loads: patience.New(leastLoad, mostLoad), die: killSelf,
		sessions: map[string]*session{}, offers: map[string]*gpuctlv1.OfferRequest{},
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	if !cfg.CompileAnew {
		m.kept, err = compiled.Open(filepath.Join(dir, "compiled"))
	}
	if err == nil {
		err = m.loadOffers()
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	if err := m.adoptAll(); err != nil {
		m.Close()
		return nil, err
	}
	m.wg.Go(m.refreshLoop)
	return m, nil
}

// Close rolls back what is not committed, and releases the sessions. Applications and
// executors continue to run; the next Manager takes them over.
func (m *Manager) Close() {
	m.cancel()
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
			<-op.done
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
			specs = append(specs, s.spec(rt))
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

// reserve reserves a place and an unused id for a new session. unreserve ends the
// reservation.
func (m *Manager) reserve() (id string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing() {
		return "", errors.New("gpuguest is shutting down")
	}
	if len(m.sessions)+m.creating >= m.cfg.MaxSessions {
		return "", fmt.Errorf("all %d sessions are taken", m.cfg.MaxSessions)
	}
	for {
		var b [3]byte
		_, _ = rand.Read(b[:]) // never fails
		id = "s-" + hex.EncodeToString(b[:])
		if _, err := os.Lstat(m.sessionDir(id)); errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	m.creating++
	return id, nil
}

func (m *Manager) unreserve() {
	m.mu.Lock()
	m.creating--
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
	m.mu.Lock()
	m.sessions[s.id] = s
	m.mu.Unlock()
	m.changed(s)
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
	return m.changeOffers(func(all map[string]*gpuctlv1.OfferRequest) { all[o.Token] = proto.CloneOf(o) })
}

func (m *Manager) withdraw(token string) error {
	return m.changeOffers(func(all map[string]*gpuctlv1.OfferRequest) { delete(all, token) })
}

func (m *Manager) changeOffers(change func(map[string]*gpuctlv1.OfferRequest)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(m.offers)
	list := make([]json.RawMessage, 0, len(m.offers))
	for _, o := range m.offers {
		list = append(list, marshal(o))
	}
	b, err := json.Marshal(list)
	if err == nil {
		err = beneath.Replace(m.cfg.Dir, offersName, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("keep offers: %w", err)
	}
	return nil
}

const (
	offersName = "offers.json"
	mostOffers = 64 << 20 // bytes
)

func (m *Manager) loadOffers() error {
	b, err := beneath.ReadFile(m.cfg.Dir, offersName, mostOffers)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("offers: %w", err)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(b, &list); err != nil {
		return fmt.Errorf("%s: %w", filepath.Join(m.cfg.Dir, offersName), err)
	}
	for _, raw := range list {
		o := &gpuctlv1.OfferRequest{}
		if err := protojson.Unmarshal(raw, o); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(m.cfg.Dir, offersName), err)
		}
		m.offers[o.Token] = o
	}
	return nil
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

func (m *Manager) refreshAll(ctx context.Context) {
	var wg sync.WaitGroup
	for _, s := range m.list() {
		wg.Go(func() { s.refresh(ctx, usageEvery/2) })
	}
	wg.Wait()
}

func (m *Manager) changed(s *session) { m.changes.Put(s.id, s) }

// watch calls send with each session's current state, and then for each change, until ctx
// or the manager ends or send fails.
func (m *Manager) watch(ctx context.Context, send func(*gpuctlv1.Session) error) error {
	changed := m.changes.Read()
	defer changed.Close()
	m.refreshAll(ctx)
	for _, s := range m.list() {
		if err := send(s.snapshot()); err != nil {
			return err
		}
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-m.ctx.Done():
			return nil
		case <-changed.Bell():
		}
		for _, s := range changed.Take() {
			// Take the snapshot now. Of two snapshots that were taken earlier, the older
			// one could arrive later, and show a session as running that has ended.
			if err := send(s.snapshot()); err != nil {
				return err
			}
		}
	}
}
