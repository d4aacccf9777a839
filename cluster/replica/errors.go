package replica

import (
	"fmt"

	"github.com/gpuctl/gpuctl/internal/reason"
)

// Errors of this package. All but ErrTimeout say that nothing was applied.
var (
	// ErrNoLeader says that no leader was reached; the command was never proposed.
	ErrNoLeader = reason.New(reason.NoLeader, "the cluster has no leader")
	// ErrTimeout says that the time ran out after the command was proposed: it
	// may or may not be applied. The same id can be sent again.
	ErrTimeout = reason.New(reason.OutcomeUnknown, "the outcome is not known")
	// ErrNotInCluster says that this host has not joined, or was removed.
	ErrNotInCluster = reason.New(reason.NotInCluster, "this host is in no cluster")
	// ErrExists says that this host already has state of a cluster.
	ErrExists = reason.New(reason.HasCluster, "this host already belongs to a cluster")
	// ErrStopped says that the node met an entry that it must not apply.
	ErrStopped = reason.New(reason.LogStopped, "this host has stopped applying the log")
	// ErrNotLeader says that only the leader does that. See NotLeaderError.
	ErrNotLeader = reason.New(reason.NotLeader, "not the leader")
	// ErrProtocol says that a host is too old for the command.
	ErrProtocol = reason.New(reason.HostTooOld, "a host is too old for this command")
	// ErrClosed says that the store was closed.
	ErrClosed = reason.New(reason.Stopping, "the store is closed")
)

// NotLeaderError is an ErrNotLeader that says who is.
type NotLeaderError struct {
	Leader string // address; empty: not known
}

func (e *NotLeaderError) Error() string {
	if e.Leader == "" {
		return "not the leader, and none is known"
	}
	return fmt.Sprintf("not the leader: that is %s", e.Leader)
}

// Is makes it an ErrNotLeader.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// Reason says that nothing was done, and who leads.
func (e *NotLeaderError) Reason() reason.Reason {
	return reason.Reason{Code: reason.NotLeader, Kind: "leader", Object: e.Leader}
}
