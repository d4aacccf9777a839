package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/hashicorp/raft"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Forwarder calls other hosts. If the other host has returned an error of this package,
// the Forwarder's error must wrap it.
type Forwarder interface {
	Apply(ctx context.Context, address string, cmds []*clusterv1.Command) ([]*clusterv1.Result, error)
	ReadIndex(ctx context.Context, address string) (uint64, error)
	Heartbeat(ctx context.Context, address string, r *clusterv1.HeartbeatRequest) (*clusterv1.HeartbeatResponse, error)
}

// Config has what a node depends on, and its settings.
type Config struct {
	ID      string // Raft server id: random, made once
	Name    string // name of the host
	Address string // address at which other hosts reach it
	Version string // version of the program, for heartbeats
	BootID  string // boot id of the host, for heartbeats
	// Dir is the folder of the log and the snapshots. Empty: everything is in memory.
	// That is only for a cluster of one and for tests, because a voter must not forget
	// its votes.
	Dir string

	// Stream is Raft's connection to other hosts. Tests may set Transport instead.
	// Neither: a cluster of one.
	Stream    raft.StreamLayer
	Transport raft.Transport
	Peers     Forwarder // nil: a cluster of one

	Clock   Clock // nil: the system's clock
	Timing  Timing
	Members Members
	Log     *slog.Logger // nil: no log

	// A snapshot is taken when there are SnapshotThreshold entries since the last one (0:
	// 8192). That is checked each SnapshotInterval (0: 30 s). TrailingLogs entries stay
	// in the log for hosts that are behind (0: 4096).
	SnapshotThreshold uint64
	SnapshotInterval  time.Duration
	TrailingLogs      uint64

	// Tasks run while this node leads.
	Tasks []LeaderTask
	// Unknown is called if the leader does not know this host's present properties. The
	// host must then report itself.
	Unknown func()
	// Wrap wraps Raft's storage, for fault injection.
	Wrap func(Storage) Storage
}

// Storage is Raft's storage on disk.
type Storage struct {
	Logs      raft.LogStore
	Stable    raft.StableStore
	Snapshots raft.SnapshotStore
}

// Timing has the intervals and time-outs of a node. Zero fields are those of Fast.
type Timing struct {
	Heartbeat time.Duration // a follower without heartbeats for so long starts an election
	Election  time.Duration // an election that takes longer is started again
	Lease     time.Duration // a leader that reaches no majority for so long steps down
	Commit    time.Duration // longest delay until followers learn what is committed
	RPC       time.Duration // limit for one call between hosts
	Ping      time.Duration // a connection between hosts that is silent for so long is asked, and is lost after as long again

	Pulse  time.Duration // interval of hosts' heartbeats to the leader
	Down   time.Duration // a host without heartbeats for so long is down
	Review time.Duration // interval of reviews of the membership
	Expiry time.Duration // interval of checks of reservations
}

// Fast returns the timing for hosts in one network: a new leader is elected in less than
// a second after the last one is lost.
func Fast() Timing {
	return Timing{
		Heartbeat: 250 * time.Millisecond, Election: 250 * time.Millisecond,
		Lease: 200 * time.Millisecond, Commit: 100 * time.Millisecond, RPC: 2 * time.Second, Ping: 2 * time.Second,
		Pulse: 500 * time.Millisecond, Down: 3 * time.Second,
		Review: time.Second, Expiry: 100 * time.Millisecond,
	}
}

// Stretched returns the timing with n times the time-outs of leader election and of silent
// connections. It is for hosts that are slow or far apart: fewer needless elections and
// messages, and no operation fails because a busy host was slow to answer; but the loss of
// a leader or of a host is noticed later.
func (t Timing) Stretched(n int) Timing {
	for _, d := range []*time.Duration{&t.Heartbeat, &t.Election, &t.Lease, &t.Ping} {
		*d *= time.Duration(n)
	}
	return t
}

// Solo returns the timing for a cluster of one, which elects itself in about 10 ms.
func Solo() Timing {
	t := Fast()
	t.Heartbeat, t.Election, t.Lease, t.Commit = 5*time.Millisecond, 5*time.Millisecond, 5*time.Millisecond, 5*time.Millisecond
	return t
}

// Members has the rules for voters. Zero fields have defaults.
type Members struct {
	MaxVoters int           // 3, 5 or 7; 0: 7
	Stabilize time.Duration // a host must be healthy for so long to become a voter; 0: 10 s
	Lost      time.Duration // a voter that is down for so long is replaced; 0: 10 min
	Behind    uint64        // entries that a healthy host may be behind; 0: 1000
	Zone      string        // label that names a host's failure domain; empty: zone
}

func or[T comparable](x, otherwise T) T {
	var zero T
	if x == zero {
		return otherwise
	}
	return x
}

func (c *Config) fill() error {
	var errs []error
	if c.ID == "" {
		errs = append(errs, errors.New("no id"))
	}
	if c.Name == "" {
		errs = append(errs, errors.New("no host name"))
	}
	if c.Address == "" {
		errs = append(errs, errors.New("no address"))
	}
	if c.Stream != nil && c.Transport != nil {
		errs = append(errs, errors.New("both a stream and a transport"))
	}
	c.Members.MaxVoters = or(c.Members.MaxVoters, 7)
	if n := c.Members.MaxVoters; n < 3 || n > 7 || n%2 == 0 {
		errs = append(errs, fmt.Errorf("at most %d voters: must be 3, 5 or 7", n))
	}
	if c.Clock == nil {
		c.Clock = SystemClock()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	f, t := Fast(), &c.Timing
	t.Heartbeat, t.Election, t.Lease = or(t.Heartbeat, f.Heartbeat), or(t.Election, f.Election), or(t.Lease, f.Lease)
	t.Commit, t.RPC = or(t.Commit, f.Commit), or(t.RPC, f.RPC)
	t.Pulse, t.Down = or(t.Pulse, f.Pulse), or(t.Down, f.Down)
	t.Review, t.Expiry = or(t.Review, f.Review), or(t.Expiry, f.Expiry)
	c.Members.Stabilize = or(c.Members.Stabilize, 10*time.Second)
	c.Members.Lost = or(c.Members.Lost, 10*time.Minute)
	c.Members.Behind = or(c.Members.Behind, 1000)
	c.Members.Zone = or(c.Members.Zone, "zone")
	c.SnapshotThreshold = or(c.SnapshotThreshold, 8192)
	c.SnapshotInterval = or(c.SnapshotInterval, 30*time.Second)
	c.TrailingLogs = or(c.TrailingLogs, 4096)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	return nil
}

// raft returns the configuration of the Raft library.
func (c *Config) raft() *raft.Config {
	r := raft.DefaultConfig()
	r.LocalID = raft.ServerID(c.ID)
	r.HeartbeatTimeout, r.ElectionTimeout = c.Timing.Heartbeat, c.Timing.Election
	r.LeaderLeaseTimeout, r.CommitTimeout = c.Timing.Lease, c.Timing.Commit
	r.SnapshotThreshold, r.SnapshotInterval, r.TrailingLogs = c.SnapshotThreshold, c.SnapshotInterval, c.TrailingLogs
	// Proposals that arrive while the disk is busy are written together.
	r.BatchApplyCh, r.MaxAppendEntries = true, 256
	r.ShutdownOnRemove = false
	r.NoLegacyTelemetry = true
	r.Logger = newLogger(c.Log)
	return r
}
