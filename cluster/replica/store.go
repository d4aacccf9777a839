package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// Store is a node of the cluster.
type Store struct {
	cfg   Config
	log   *slog.Logger
	fsm   *fsm
	raft  *raft.Raft
	logs  raft.LogStore // for reading, without the guard
	guard *guard
	acks  *acks
	pulse *pulse

	reads   coalescer // read indexes of this node as the leader
	remote  coalescer // read indexes that this node asks the leader for
	ctx     context.Context
	cancel  context.CancelFunc
	work    sync.WaitGroup
	closers []io.Closer
	once    sync.Once
	closed  error
	ready   atomic.Uint64 // term in which this node leads and has applied everything before
	began   uint64        // index of the last log entry when this node started
	caught  atomic.Bool   // that entry, or the one that has replaced it, is applied
}

// Open starts a node with the content of its folder. A new node is in no cluster until
// Bootstrap, or until a leader adds it.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	s := &Store{
		cfg: cfg, log: cfg.Log, fsm: newFSM(cfg.Log), guard: newGuard(cfg.Log),
		acks: newAcks(), pulse: newPulse(cfg.Clock),
	}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := s.open(ctx); err != nil {
		s.cancel()
		return nil, errors.Join(fmt.Errorf("open store %s: %w", cfg.Dir, err), s.closeFiles())
	}
	s.work.Go(s.follow)
	s.work.Go(s.watchStop)
	s.work.Go(s.beat)
	return s, nil
}

func (s *Store) open(ctx context.Context) error {
	disk, err := s.disk()
	if err != nil {
		return err
	}
	if s.cfg.Wrap != nil {
		disk = s.cfg.Wrap(disk)
	}
	s.logs = disk.Logs // the guard ends Raft's goroutines, but must not end those of callers
	disk = s.guard.wrap(disk)
	cache, err := raft.NewLogCache(1024, disk.Logs)
	if err != nil {
		return err
	}
	disk.Logs = cache
	trans, err := s.transport()
	if err != nil {
		return err
	}
	if s.raft, err = s.start(ctx, disk, trans); err != nil {
		return err
	}
	s.began = s.raft.LastIndex()
	s.work.Go(func() { trans.pass(s.ctx, s.admit) })
	return nil
}

// CaughtUp reports whether this node has applied what was in its log when it was started.
// Before that, its state is an old one: Raft applies nothing until a leader has sent how
// far the log is committed.
func (s *Store) CaughtUp() bool {
	if s.caught.Load() {
		return true
	}
	applied := s.raft.AppliedIndex()
	if applied < min(s.began, s.raft.LastIndex()) {
		return false
	}
	// Raft counts entries that it has passed on, not those that are applied.
	command, err := s.lastCommand(applied)
	if err != nil || s.fsm.index() < command {
		return false
	}
	s.caught.Store(true)
	return true
}

// start starts Raft. If the disk takes no writes, it waits until ctx ends.
func (s *Store) start(ctx context.Context, disk Storage, trans raft.Transport) (*raft.Raft, error) {
	type started struct {
		raft *raft.Raft
		err  error
	}
	done := make(chan started, 1)
	go func() {
		var st started
		// The library panics if its log has a gap: a snapshot was damaged after the
		// entries before it had been removed.
		defer func() {
			if p := recover(); p != nil {
				st.err = fmt.Errorf("its log cannot be read: %v; remove the host from the cluster and join it anew", p)
			}
			if st.err == nil && st.raft == nil {
				st.err = errors.New("it was closed")
			}
			done <- st
		}()
		st.raft, st.err = raft.NewRaft(s.cfg.raft(), s.fsm, disk.Logs, disk.Stable, disk.Snapshots, trans)
	}()
	select {
	case st := <-done:
		return st.raft, errors.Join(st.err, s.fsm.restoreErr(st.err))
	case <-ctx.Done():
		s.guard.close()
		st := <-done
		if st.raft != nil { // it has been completed just now
			_ = st.raft.Shutdown().Error()
		}
		return nil, errors.Join(ctx.Err(), s.guard.health())
	}
}

// restoreErr returns why a snapshot could not be restored, if the node could not start
// because of that.
func (f *fsm) restoreErr(failed error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if failed == nil {
		return nil
	}
	return f.restored
}

// disk opens Raft's storage.
func (s *Store) disk() (Storage, error) {
	if s.cfg.Dir == "" {
		m := raft.NewInmemStore()
		return Storage{Logs: m, Stable: m, Snapshots: raft.NewInmemSnapshotStore()}, nil
	}
	if err := os.MkdirAll(s.cfg.Dir, 0o700); err != nil {
		return Storage{}, err
	}
	if err := prepare(s.cfg.Dir, s.log); err != nil {
		return Storage{}, err
	}
	folder := filepath.Join(s.cfg.Dir, logFolder)
	stable, err := openBolt(filepath.Join(folder, stableFile)) // before the log, because its lock keeps other processes out
	if err != nil {
		return Storage{}, err
	}
	s.closers = append(s.closers, stable)
	logs, err := openJournal(folder, s.log)
	if err != nil {
		return Storage{}, err
	}
	s.closers = append(s.closers, logs)
	snaps, err := raft.NewFileSnapshotStoreWithLogger(s.cfg.Dir, 2, newLogger(s.log))
	if err != nil {
		return Storage{}, err
	}
	if err := logs.cover(snaps); err != nil {
		return Storage{}, err
	}
	return Storage{Logs: logs, Stable: stable, Snapshots: snaps}, nil
}

func (s *Store) transport() (*transport, error) {
	inner := s.cfg.Transport
	switch {
	case inner != nil:
	case s.cfg.Stream != nil:
		t := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
			Stream: s.cfg.Stream, MaxPool: 3, Timeout: s.cfg.Timing.RPC,
			// No pipelining: a pipeline whose follower answers with a newer term can
			// block its sender for ever, and Shutdown with it. Entries that arrive during
			// a call are sent with the next one.
			MaxRPCsInFlight: 1,
			Logger:          newLogger(s.log), MsgpackUseNewTimeFormat: true,
		})
		s.closers = append(s.closers, t)
		inner = t
	default:
		_, t := raft.NewInmemTransport(raft.ServerAddress(s.cfg.Address))
		s.closers = append(s.closers, t)
		inner = t
	}
	pre, ok := inner.(raft.WithPreVote)
	if !ok {
		return nil, fmt.Errorf("the transport %T knows no pre-votes", inner)
	}
	return &transport{Transport: inner, WithPreVote: pre, acks: s.acks, stalled: s.stalled, calls: make(chan raft.RPC)}, nil
}

// Bootstrap makes a new cluster of this node alone. If it was interrupted, it may be
// repeated. It returns ErrExists if the node has a cluster's state.
func (s *Store) Bootstrap(ctx context.Context, init *clusterv1.InitCluster) error {
	servers := s.servers()
	unfinished := len(servers) == 1 && servers[0].ID == raft.ServerID(s.cfg.ID)
	if len(servers) > 0 && !unfinished {
		return ErrExists
	}
	if len(servers) == 0 {
		err := s.raft.BootstrapCluster(raft.Configuration{Servers: []raft.Server{{
			Suffrage: raft.Voter, ID: raft.ServerID(s.cfg.ID), Address: raft.ServerAddress(s.cfg.Address),
		}}}).Error()
		if errors.Is(err, raft.ErrCantBootstrap) {
			return ErrExists
		}
		if err != nil {
			return fmt.Errorf("bootstrap: %w", err)
		}
	}
	view, err := s.Read(ctx, false)
	if err != nil {
		return fmt.Errorf("bootstrap: %w", err)
	}
	if view.ClusterID() != "" {
		return ErrExists
	}
	r, err := s.Apply(ctx, &clusterv1.Command{Actor: s.cfg.Name, Op: &clusterv1.Command_InitCluster{InitCluster: init}})
	if err != nil {
		return fmt.Errorf("bootstrap: %w", err)
	}
	if r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		return fmt.Errorf("bootstrap: %s", r.GetMessage())
	}
	return nil
}

// servers returns the servers of the latest configuration.
func (s *Store) servers() []raft.Server {
	f := s.raft.GetConfiguration()
	if f.Error() != nil {
		return nil
	}
	return f.Configuration().Servers
}

// member returns ErrNotInCluster unless this node is a server of the cluster, as far as
// it knows.
func (s *Store) member() error {
	servers := s.servers()
	for _, x := range servers {
		if x.ID == raft.ServerID(s.cfg.ID) {
			return nil
		}
	}
	if len(servers) > 0 {
		return fmt.Errorf("%w: it was removed", ErrNotInCluster)
	}
	return ErrNotInCluster
}

// Joined waits until this node has learned from the leader that it is a server.
func (s *Store) Joined(ctx context.Context) error {
	for {
		err := s.member()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-s.ctx.Done():
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", err, ctx.Err())
		}
	}
}

// Leader returns the name and address of the leader; both are empty if it is unknown.
func (s *Store) Leader() (name, address string) {
	a, id := s.raft.LeaderWithID()
	if id == raft.ServerID(s.cfg.ID) {
		return s.cfg.Name, string(a)
	}
	if h := s.fsm.state.View().HostByID(string(id)); h != nil {
		return h.GetName(), string(a)
	}
	return string(id), string(a)
}

// IsLeader reports whether this node leads, as far as it knows, and its disk works.
func (s *Store) IsLeader() bool { return s.raft.State() == raft.Leader && !s.stalled() }

// stalled reports whether this node cannot lead because of its disk.
func (s *Store) stalled() bool { return s.guard.stalled(2 * s.cfg.Timing.Heartbeat) }

// State returns the state that is applied on this host.
func (s *Store) State() *state.Store { return s.fsm.state }

// Close transfers the leadership if possible, and stops the node.
func (s *Store) Close() error {
	if others, _ := s.others(); s.IsLeader() && s.fsm.err() == nil && len(others) > 0 {
		s.raft.LeadershipTransfer()
		for end := time.Now().Add(2*s.cfg.Timing.Election + 100*time.Millisecond); s.IsLeader() && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
	return s.Halt()
}

// others returns the voters without this node, and how many of them make a majority
// together with it.
func (s *Store) others() (ids []raft.ServerID, need int) {
	voters, self := 0, 0
	for _, x := range s.servers() {
		switch {
		case x.Suffrage != raft.Voter:
			continue
		case x.ID == raft.ServerID(s.cfg.ID):
			self = 1
		default:
			ids = append(ids, x.ID)
		}
		voters++
	}
	return ids, voters/2 + 1 - self
}

// Halt stops the node at once, as a crash would.
func (s *Store) Halt() error {
	s.once.Do(func() {
		s.cancel()
		s.guard.close()
		err := s.raft.Shutdown().Error()
		s.work.Wait()
		s.closed = errors.Join(err, s.closeFiles())
	})
	return s.closed
}

func (s *Store) closeFiles() error {
	var errs []error
	for i := len(s.closers) - 1; i >= 0; i-- {
		errs = append(errs, s.closers[i].Close())
	}
	s.closers = nil
	return errors.Join(errs...)
}

// watchStop stops Raft when an entry must not be applied. The node's log stays.
func (s *Store) watchStop() {
	select {
	case <-s.fsm.stopped:
		s.guard.close()
		if err := s.raft.Shutdown().Error(); err != nil {
			s.log.Error("stop", "err", err)
		}
	case <-s.ctx.Done():
	}
}
