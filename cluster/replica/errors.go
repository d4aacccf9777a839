package replica

import (
	"fmt"

	"github.com/gpuctl/gpuctl/internal/reason"
)

// Errors of this package. After any of them except ErrTimeout, nothing was applied.
var (
	// ErrNoLeader means that no leader was reached. The command was never proposed.
	ErrNoLeader = reason.New(reason.NoLeader, "the cluster has no leader")
	// ErrTimeout means that the time was over after the command was proposed: it may be
	// applied or not. The same command id can be sent again.
	ErrTimeout = reason.New(reason.OutcomeUnknown, "the outcome is not known")
	// ErrNotInCluster means that this host has not joined a cluster, or was removed.
	ErrNotInCluster = reason.New(reason.NotInCluster, "this host is in no cluster")
	// ErrExists means that this host already has the state of a cluster.
	ErrExists = reason.New(reason.HasCluster, "this host already belongs to a cluster")
	// ErrStopped means that the node has found an entry that it must not apply.
	ErrStopped = reason.New(reason.LogStopped, "this host has stopped applying the log")
	// ErrNotLeader means that only the leader can do that. See NotLeaderError.
	ErrNotLeader = reason.New(reason.NotLeader, "not the leader")
	// ErrProtocol means that a host is too old for the command.
	ErrProtocol = reason.New(reason.HostTooOld, "a host is too old for this command")
	// ErrClosed means that the store was closed.
	ErrClosed = reason.New(reason.Stopping, "the store is closed")
)

// NotLeaderError is ErrNotLeader with the leader's address.
type NotLeaderError struct {
	Leader string // address; empty: unknown
}

func (e *NotLeaderError) Error() string {
	if e.Leader == "" {
		return "not the leader, and none is known"
	}
	return fmt.Sprintf("not the leader: that is %s", e.Leader)
}

// Is reports whether target is ErrNotLeader.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// Reason returns the reason, with the leader's address. Nothing was done.
func (e *NotLeaderError) Reason() reason.Reason {
	return reason.Reason{Code: reason.NotLeader, Kind: "leader", Object: e.Leader}
}
