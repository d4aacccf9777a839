package session

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/compiled"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/glimpse"
	"github.com/gpuctl/gpuctl/internal/throttle"
)

const (
	helloSize    = 64
	helloTimeout = 5 * time.Second
	maxAnswer    = 4096

	clDeviceNotAvailable = -2
)

// greeting is an application's request for a session.
type greeting struct {
	uid   uint32
	who   uint32 // the user for whom it counts
	pid   int    // 0 if gpuguest can't see it
	token string
}

// ServeApps accepts applications until the listener is closed.
func (m *Manager) ServeApps(l *net.UnixListener) error {
	return m.serveApps(l, newDoor(m.ctx, helloTimeout))
}

func (m *Manager) serveApps(l *net.UnixListener, d *door) error {
	log := throttle.Logger(m.log, refusalsLogged, refusalsEvery) // anybody can connect
	for {
		conn, err := l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// Mostly out of descriptors. The applications that wait can be served later.
			log.Warn("accept application", "err", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		cred, err := handover.Peer(conn)
		if err != nil {
			conn.Close()
			log.Warn("accept application", "err", err)
			continue
		}
		who := m.whose(cred.Uid)
		d.enter(who, conn) // in the order in which they connected
		m.wg.Go(func() {
			if err := m.greet(conn, cred, who, d); err != nil {
				log.Warn("application refused", "pid", cred.Pid, "uid", cred.Uid, "err", err)
			}
		})
	}
}

// greet creates the session of one application, or answers why it gets none.
func (m *Manager) greet(conn *net.UnixConn, cred *unix.Ucred, who uint32, d *door) error {
	_ = conn.SetDeadline(time.Now().Add(d.patience))
	g, err := readGreeting(conn, cred)
	g.who = who
	if !d.leave(who, conn) {
		return errDropped // and the connection is closed
	}
	if err == nil {
		// An application without a valid token must not wait behind those that have one.
		if _, ok := m.offered(g.token); !ok {
			err = errNoToken
		}
	}
	if err == nil {
		err = d.turn(who, func() error {
			for {
				if err := m.create(conn, g); !errors.Is(err, engine.ErrOfferedAnew) {
					return err
				}
			}
		})
	}
	if err == nil {
		return nil
	}
	_ = conn.SetDeadline(time.Now().Add(helloTimeout))
	_, _ = conn.Write(answer(clDeviceNotAvailable, err.Error()))
	conn.Close()
	return err
}

var errNoToken = errors.New("no GPU is claimed for this application: unknown token")

func answer(status int32, text string) []byte {
	text = text[:min(len(text), maxAnswer)]
	b := binary.LittleEndian.AppendUint32(nil, uint32(status))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(text)))
	return append(b, text...)
}

func readGreeting(conn *net.UnixConn, cred *unix.Ucred) (greeting, error) {
	g := greeting{uid: cred.Uid, pid: int(cred.Pid)}
	if self := os.Getuid(); self != 0 && int(cred.Uid) != self {
		return g, fmt.Errorf("user %d may not use the GPUs of user %d", cred.Uid, self)
	}
	var hello [helloSize]byte
	// The kernel closes descriptors that are sent along: this call receives none.
	if _, err := io.ReadFull(conn, hello[:]); err != nil {
		return g, fmt.Errorf("greeting: %w", err)
	}
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(hello[4*i:]) }
	if word(0) != wire.HelloMagic {
		return g, errors.New("greeting: not from a gpuctl library")
	}
	if v := word(1); v != wire.Version {
		return g, fmt.Errorf("the library speaks version %d of the protocol, gpuguest %d", v, wire.Version)
	}
	// In a container, the application has another pid in its own namespace.
	if claimed := int(word(2)); g.pid != 0 && claimed != g.pid && claimed != innerPID(g.pid) {
		return g, fmt.Errorf("greeting: process %d says it is %d", g.pid, claimed)
	}
	g.token, _, _ = strings.Cut(string(hello[16:]), "\x00")
	return g, nil
}

// create makes a session and answers the application. If it succeeds, it owns conn. Nothing is left of a
// session if the error is engine.ErrOfferedAnew.
func (m *Manager) create(conn *net.UnixConn, g greeting) error {
	offer, ok := m.offered(g.token)
	if !ok {
		return errNoToken
	}
	id, err := m.reserve(g.who)
	if err != nil {
		return err
	}
	defer m.unreserve(id)
	now := time.Now().UnixMilli()
	command, program := m.programOf(g, id)
	s := &session{
		m: m, id: id, who: g.who, began: now, log: m.log.With("session", id), dir: m.sessionDir(id), gone: make(chan struct{}), ended: make(chan struct{}),
		state: gpuctlv1.SessionState_SESSION_STATE_RUNNING,
		rec: record{
			Version: recordVersion, ID: id, UID: g.uid, Claim: offer.Claim, PID: g.pid, Command: command,
			StartedMS: now, Op: &opRecord{Kind: kindCreate}, CacheSecret: newSecret(), Program: program,
		},
	}
	if s.rec.Owner, s.rec.Weight = offer.Owner, offer.Weight; s.rec.Owner == "" {
		s.rec.Owner = fmt.Sprint("user:", g.who)
	}
	if s.rec.Weight == 0 {
		s.rec.Weight = turn.DefaultWeight
	}
	if offer.Device != nil {
		s.rec.Device = marshal(offer.Device)
	}
	target, err := m.targetFor(s, offer)
	if err != nil {
		return err
	}
	if err := s.open(m.ctx, target, g); err != nil {
		return err
	}
	first := s.current
	s.conn = conn // before others see the session
	// Before the application, or whoever started it, can ask for the session.
	if !m.addBy(s, g.token, offer) {
		s.log.Info("offered anew while its first executor was loading", "gpu", target.GetGpu())
		s.conn = nil // the application waits for the next session
		s.discard()  // what of it lingers is in the list
		return engine.ErrOfferedAnew
	}
	s.log.Info("session begins", "pid", g.pid, "claim", offer.Claim, "gpu", target.GetGpu())
	if err := s.welcome(conn); err != nil {
		s.log.Warn("session without application", "err", err)
		s.end()
		return nil
	}
	s.watchApp()
	s.watchExecutor(first)
	return nil
}

// programOf returns the command line of an application, and which program it is. Nothing is known of
// one that keeps that from being read.
func (m *Manager) programOf(g greeting, id string) (string, compiled.Program) {
	type known struct {
		command string
		program compiled.Program
	}
	k, _ := glimpse.Do(&m.reads, g.uid, id, func() known { return known{commandLine(g.pid), compiled.Of(g.uid, g.pid)} })
	return k.command, k.program
}

// mostLeases is how many leases the host of a VM gives to its sessions, which are of one claim.
const mostLeases = 64

// targetFor returns the target of a session that begins by an offer. An offer of a remote
// GPU may be for many sessions, each of which needs a lease of its own.
func (m *Manager) targetFor(s *session, offer *gpuctlv1.OfferRequest) (*gpuctlv1.Target, error) {
	r := offer.GetTarget().GetRuntime().GetRemote()
	if r == nil || len(r.GetToken()) > 0 {
		return offer.GetTarget(), nil
	}
	if m.cfg.Lease == nil {
		return nil, fmt.Errorf("GPU %s: the offer has no lease, and nobody can be asked for one", offer.GetTarget().GetGpu())
	}
	if err := m.roomFor(s); err != nil {
		return nil, err
	}
	return m.cfg.Lease(m.ctx, s.id, offer)
}

// roomFor returns an error if a session that is being made would have one of the leases that are
// left for other users. As of sessions, a user has at most as many as are left.
func (m *Manager) roomFor(next *session) error {
	all := m.list()
	m.mu.Lock()
	users := maps.Clone(m.creating)
	m.mu.Unlock()
	for _, s := range all {
		s.mu.Lock()
		if delete(users, s.id); s.current != nil && s.current.target.GetRuntime().GetRemote() != nil {
			users[s.id] = s.who
		}
		s.mu.Unlock()
	}
	delete(users, next.id)
	own, left := places(users, next.who, mostLeases)
	if !trusted(next.who) && own > 0 && own >= left {
		return fmt.Errorf("user %d has %d sessions on GPUs of other hosts, and the last %d of %d are left for other users: end some", next.who, own, max(0, left), mostLeases)
	}
	return nil
}

// open makes the session's folder, its memory and its first executor. If it fails, none of
// them remain.
func (s *session) open(ctx context.Context, target *gpuctlv1.Target, g greeting) (err error) {
	if g.pid != 0 {
		if s.app, err = openProcess(g.pid, 0, nil); err != nil {
			return err
		}
		s.rec.Start = s.app.start
	}
	if s.mem, err = createMemory(s.id); err != nil {
		if s.app != nil {
			s.app.close()
		}
		return err
	}
	defer func() {
		if err != nil {
			s.discard()
		}
	}()
	if s.rec.Memory, err = s.mem.inodes(); err != nil {
		return err
	}
	if err := s.mem.lockManager(); err != nil {
		return err
	}
	if err := makeDirs(s.dir, s.executorsDir()); err != nil {
		return fmt.Errorf("session folder: %w", err)
	}
	if err := s.m.kept.Fill(s.rec.Program, s.executorsDir()); err != nil {
		s.log.Warn("runtimes compile anew", "err", err)
	}
	e, d, err := s.launch(ctx, target, func(r *record, e executorRecord) { r.Current = e })
	if err != nil {
		return err
	}
	s.current, s.usage, s.fresh = e, d.Usage, time.Now()
	s.mem.setOwner(e.gen)
	s.mem.setState(wire.StateRunning)
	return e.activate(ctx)
}

// makeDirs makes the session's folder, which belongs to gpuguest, and in it the folder that
// executors write to. Executors may run as another user.
func makeDirs(dir, executors string) error {
	mode := os.FileMode(0o700)
	if os.Getuid() == 0 {
		mode = 0o711
	}
	return errors.Join(os.Mkdir(dir, mode), os.Mkdir(executors, 0o700))
}

// welcome writes to the journal that the application is about to get its session, and sends
// the session to it.
func (s *session) welcome(conn *net.UnixConn) error {
	if err := s.update(func(r *record) { r.Op, r.Connected = nil, true }); err != nil {
		return err
	}
	var fds []int
	for _, f := range s.mem.files() {
		fds = append(fds, int(f.Fd()))
	}
	_ = conn.SetDeadline(time.Now().Add(helloTimeout))
	msg := answer(0, s.id)
	n, _, err := conn.WriteMsgUnix(msg, unix.UnixRights(fds...), nil)
	if err == nil && n < len(msg) {
		_, err = conn.Write(msg[n:])
	}
	if err != nil {
		return fmt.Errorf("answer the application: %w", err)
	}
	_ = conn.SetDeadline(time.Time{}) // fails if the connection is closed already; the next read reports that
	return nil
}

// discard removes a session that its application has not received.
func (s *session) discard() {
	s.mu.Lock()
	s.ending = true
	s.mu.Unlock()
	s.release()
	s.bury(func() {
		if err := s.m.removeDir(s.dir); err != nil {
			s.log.Warn("remove session folder", "err", err)
		}
	})
}
