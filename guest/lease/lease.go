package lease

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/budget"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/session"
	"github.com/gpuctl/gpuctl/internal/beneath"
	"github.com/gpuctl/gpuctl/internal/throttle"
)

// Config is the configuration of a Manager.
type Config struct {
	Dir      string // gpuguest's run folder
	Launcher session.Launcher
	Logger   *slog.Logger
	Listen   []string // addresses for carriers; none if hostd hands connections over
	Most     int      // leases at once; 0: 256
}

const (
	defaultMost = 256
	leasesName  = "leases"
	budgetsName = "leases-budgets"
	recordName  = "lease.json"
	runName     = "x" // the folder of a lease's executor, in that of the lease
	mostRecord  = 1 << 20
	maxID       = 32

	// SocketName is the socket in the run folder to which connections are handed over. The
	// name of each is HandName of its preamble.
	SocketName = "lend.sock"
)

// Manager has the leases of one run folder.
type Manager struct {
	cfg       Config
	log       *slog.Logger // limited: carriers cause its lines
	ctx       context.Context
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	listeners []net.Listener
	hand      *net.UnixListener
	lock      *os.File
	budgets   *budget.Table
	greeting  chan struct{} // taken by connections that have not said who they are

	mu     sync.Mutex
	leases map[string]*lease
}

// lease is one GPU that is lent.
type lease struct {
	dir   string
	rec   record
	req   *gpuctlv1.LendRequest
	proc  session.Process
	used  bool
	fetch *allowed  // a far executor of another host that may connect; protected by Manager.mu
	drop  sync.Once // removes its folder

	handing atomic.Int32  // connections on their way to the far executor
	made    chan struct{} // closed when it was made, or has failed
	err     error
}

// record is the content of lease.json.
type record struct {
	Request   json.RawMessage `json:"request"`
	Token     []byte          `json:"token"`
	Identity  remote.Identity `json:"identity"`
	PID       int             `json:"pid"`
	Start     uint64          `json:"start"`
	StartedMS int64           `json:"started_ms"`
}

// Limits of what is logged because of others, and of connections that say nothing.
const (
	logBurst     = 20
	logEvery     = 5 * time.Second
	mostGreeting = 64
)

// New takes over the leases that an earlier gpuguest has left, and listens.
func New(cfg Config) (*Manager, error) {
	if cfg.Most == 0 {
		cfg.Most = defaultMost
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("run folder %s: %w", cfg.Dir, err)
	}
	cfg.Dir = dir
	m := &Manager{cfg: cfg, log: throttle.Logger(cfg.Logger, logBurst, logEvery), leases: map[string]*lease{}, greeting: make(chan struct{}, mostGreeting)}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	if err := os.MkdirAll(m.folder(), 0o711); err != nil {
		return nil, fmt.Errorf("leases: %w", err)
	}
	if m.lock, err = engine.LockFolder(dir, leasesName+".lock"); err != nil {
		return nil, fmt.Errorf("leases: %w", err)
	}
	if m.budgets, err = budget.Open(filepath.Join(dir, budgetsName)); err == nil {
		err = m.adopt()
	}
	if err == nil {
		err = m.budgets.Retain(func(lease string) bool { return m.leases[lease] != nil })
	}
	if err != nil {
		m.lock.Close()
		return nil, err
	}
	if err := m.listen(); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// Sharers implements session.Lender.
func (m *Manager) Sharers() (out []session.Sharer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, l := range m.leases {
		select {
		case <-l.made:
		default:
			continue
		}
		if l.err == nil && l.used && !l.ended() {
			out = append(out, session.Sharer{
				ID: id, Owner: cmp.Or(l.req.Owner, "lease:"+id), GPUs: l.req.Gpus, Process: l.proc, Socket: l.control(), Log: m.log.With("lease", id),
			})
		}
	}
	return out
}

func (m *Manager) folder() string { return filepath.Join(m.cfg.Dir, leasesName) }

// Close stops listening. Far executors go on; the next Manager takes them over.
func (m *Manager) Close() {
	m.cancel()
	for _, l := range m.listeners {
		l.Close()
	}
	if m.hand != nil {
		m.hand.Close()
	}
	m.wg.Wait()
	m.lock.Close()
}

// adopt finds the leases of an earlier gpuguest.
func (m *Manager) adopt() error {
	names, err := os.ReadDir(m.folder())
	if err != nil {
		return fmt.Errorf("leases: %w", err)
	}
	for _, n := range names {
		l := &lease{dir: filepath.Join(m.folder(), n.Name()), req: &gpuctlv1.LendRequest{}, made: make(chan struct{})}
		close(l.made)
		b, err := beneath.ReadFile(l.dir, recordName, mostRecord)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it may be there, and its executor with it
			return fmt.Errorf("lease in folder %s: %w", n.Name(), err)
		}
		if err == nil {
			err = json.Unmarshal(b, &l.rec)
		}
		if err == nil {
			err = protojson.Unmarshal(l.rec.Request, l.req)
		}
		if err != nil || folderOf(l.req.Lease) != n.Name() {
			// It was being made: nobody has its token.
			m.cfg.Logger.Warn("lease dropped", "folder", n.Name(), "err", err)
			m.forget(l)
			continue
		}
		l.used = true
		l.proc, err = m.cfg.Launcher.Adopt(l.rec.PID, l.rec.Start, l.log())
		if errors.Is(err, session.ErrGone) {
			l.proc = nil
		} else if err != nil { // nobody knows whether it still has its GPU
			return fmt.Errorf("lease %s: far executor: %w", l.req.Lease, err)
		}
		m.leases[l.req.Lease] = l
	}
	return nil
}

func folderOf(id string) string { return "l-" + id }

func (l *lease) log() string     { return filepath.Join(l.dir, "executor-1.log") }
func (l *lease) control() string { return filepath.Join(l.run(), "c1") }
func (l *lease) run() string     { return filepath.Join(l.dir, runName) }
func (l *lease) socket() string  { return filepath.Join(l.run(), "f1") }

func (l *lease) ended() bool {
	if l.proc == nil {
		return true
	}
	select {
	case <-l.proc.Done():
		return true
	default:
		return false
	}
}

func checkID(id string) error {
	ok := len(id) > 0 && len(id) <= maxID && !strings.ContainsFunc(id, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-'
	})
	if !ok {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("lease %.40q: an id has 1 to %d letters, digits and '-'", id, maxID))
	}
	return nil
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// Lend implements session.Lender.
func (m *Manager) Lend(ctx context.Context, req *gpuctlv1.LendRequest) (*gpuctlv1.LendResponse, error) {
	if err := checkID(req.Lease); err != nil {
		return nil, err
	}
	switch {
	case req.Runtime.GetLibrary() == "" || req.Runtime.GetRemote() != nil:
		return nil, invalid("lease %s: it names no runtime library of this host", req.Lease)
	case !req.Plain && len(req.PeerCertSha256) != sha256.Size:
		return nil, invalid("lease %s: the hash of the carrier's certificate has %d bytes, not %d", req.Lease, len(req.PeerCertSha256), sha256.Size)
	}
	m.mu.Lock()
	l := m.leases[req.Lease]
	if l == nil {
		if err := m.full(req.Claim); err != nil {
			m.mu.Unlock()
			return nil, connect.NewError(connect.CodeResourceExhausted, err)
		}
		l = &lease{dir: filepath.Join(m.folder(), folderOf(req.Lease)), req: proto.CloneOf(req), made: make(chan struct{})}
		m.leases[req.Lease] = l
		m.mu.Unlock()
		l.err = m.make(ctx, l)
		if l.err != nil {
			m.forget(l) // Launch leaves no process
			m.mu.Lock()
			delete(m.leases, req.Lease)
			m.mu.Unlock()
		}
		close(l.made)
	} else {
		m.mu.Unlock()
	}
	select {
	case <-l.made:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if l.err != nil {
		return nil, fmt.Errorf("lease %s: %w", req.Lease, l.err)
	}
	if !proto.Equal(l.req, req) {
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("lease %s exists with another request", req.Lease))
	}
	resp := &gpuctlv1.LendResponse{Token: l.rec.Token}
	if !req.Plain {
		resp.CertSha256 = l.rec.Identity.Hash()
	}
	resp.Addresses = m.Addresses()
	return resp, nil
}

// full returns an error if a claim gets no further lease. It has at most as many as are left for
// others: each of its sessions has one, and its user says how many there are. The caller holds m.mu.
func (m *Manager) full(claim string) error {
	own, left := 0, m.cfg.Most-len(m.leases)
	for _, l := range m.leases {
		if claim != "" && l.req.Claim == claim {
			own++
		}
	}
	switch {
	case left <= 0:
		return fmt.Errorf("all %d leases are taken", m.cfg.Most)
	case own > 0 && own >= left:
		return fmt.Errorf("claim %s has %d leases, and the last %d of %d are left for other claims", claim, own, left, m.cfg.Most)
	}
	return nil
}

// make starts the far executor of a lease.
func (m *Manager) make(ctx context.Context, l *lease) error {
	for _, dir := range []string{l.dir, l.run()} {
		mode := os.FileMode(0o711)
		if dir == l.run() {
			mode = 0o700
		}
		if err := os.Mkdir(dir, mode); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	l.rec.Token = make([]byte, remote.TokenSize)
	_, _ = rand.Read(l.rec.Token) // never fails
	l.rec.StartedMS = time.Now().UnixMilli()
	far := &session.FarConfig{Plain: l.req.Plain, Peer: l.req.PeerCertSha256, Outage: time.Duration(l.req.OutageMs) * time.Millisecond, CompressAlways: l.req.CompressAlways}
	if !l.req.Plain {
		id, err := remote.NewIdentity("gpuctl far executor")
		if err != nil {
			return err
		}
		l.rec.Identity = id
		far.Certificate, far.Key = id.Certificate, id.Key
	}
	req, err := protojson.Marshal(l.req)
	if err != nil {
		return err
	}
	l.rec.Request = req
	device := proto.CloneOf(l.req.Device)
	if device == nil {
		device = &gpuctlv1.VirtualDevice{}
	}
	if most := l.req.Memory; most > 0 && (device.GlobalMemory == 0 || device.GlobalMemory > most) {
		device.GlobalMemory = most
	}
	spec := session.Spec{
		Dir: l.run(), Log: l.log(), Generation: 1, Socket: l.control(), ImportSocket: filepath.Join(l.run(), "i1"),
		Runtime: l.req.Runtime, Device: device, Far: far,
	}
	if l.req.Claim != "" && l.req.Memory > 0 {
		key, err := session.BudgetKey(l.req.Claim, l.req.Runtime)
		if err != nil {
			return err
		}
		if spec.Budget, spec.BudgetLine, err = m.budgets.Line(key, l.req.Lease); err != nil {
			return err
		}
		defer spec.Budget.Close()
	}
	l.proc, err = m.cfg.Launcher.Launch(ctx, spec, func(p session.Process) error {
		l.rec.PID, l.rec.Start = p.PID(), p.Start()
		b, err := json.Marshal(&l.rec)
		if err != nil {
			return err
		}
		return beneath.Replace(l.dir, recordName, b, 0o600)
	})
	return err
}

// end ends the far executor. If there is an error, it may still have its GPU.
func (l *lease) end(ctx context.Context) error {
	if l.proc == nil {
		return nil
	}
	l.proc.Kill()
	timer := time.NewTimer(killTimeout) // a driver may delay it
	defer timer.Stop()
	select {
	case <-l.proc.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("lease %s: process %d was killed and has not ended: %w", l.req.GetLease(), l.proc.PID(), ctx.Err())
	case <-timer.C:
		return fmt.Errorf("lease %s: process %d was killed and has not ended within %v; it may still use its GPU", l.req.GetLease(), l.proc.PID(), killTimeout)
	}
}

// forget removes the folder of a lease of which nothing runs.
func (m *Manager) forget(l *lease) {
	if err := errors.Join(m.cfg.Launcher.Forget(l.run()), m.budgets.Leave(l.req.GetLease(), ""), os.RemoveAll(l.dir)); err != nil {
		m.cfg.Logger.Warn("remove lease", "folder", l.dir, "err", err)
	}
}

const killTimeout = 5 * time.Second

// EndLease implements session.Lender. The lease stays until its far executor has ended: its
// GPU must not be given to others before.
func (m *Manager) EndLease(ctx context.Context, id string) error {
	m.mu.Lock()
	l := m.leases[id]
	m.mu.Unlock()
	if l == nil {
		return nil
	}
	select {
	case <-l.made:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := l.end(ctx); err != nil {
		return err
	}
	// Before the id is free: the next lease of that name has the same folder.
	l.drop.Do(func() { m.forget(l) })
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.leases[id] == l {
		delete(m.leases, id)
	}
	return nil
}

// Leases implements session.Lender.
func (m *Manager) Leases() []*gpuctlv1.Lease {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*gpuctlv1.Lease
	for id, l := range m.leases {
		select {
		case <-l.made:
		default:
			continue
		}
		x := &gpuctlv1.Lease{Id: id, Runtime: l.req.Runtime, State: gpuctlv1.LeaseState_LEASE_STATE_OFFERED, StartedUnixMs: l.rec.StartedMS}
		switch {
		case l.ended():
			x.State, x.Message = gpuctlv1.LeaseState_LEASE_STATE_ENDED, l.why()
		case l.used:
			x.State = gpuctlv1.LeaseState_LEASE_STATE_USED
		}
		out = append(out, x)
	}
	slices.SortFunc(out, func(a, b *gpuctlv1.Lease) int {
		return cmp.Or(cmp.Compare(a.StartedUnixMs, b.StartedUnixMs), strings.Compare(a.Id, b.Id))
	})
	return out
}

func (l *lease) why() string {
	if l.proc == nil {
		return "the far executor has ended"
	}
	return "the far executor has ended: " + l.proc.Exit()
}
