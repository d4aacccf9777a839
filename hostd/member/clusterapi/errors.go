package clusterapi

import (
	"errors"
	"fmt"

	"connectrpc.com/connect"

	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// ErrNotJoined means that this host is in no cluster.
var ErrNotJoined error = reason.Errorf(reason.NotJoined, "this host is in no cluster").Do("make one with gpuctl cluster init, or join one with gpuctl cluster join TOKEN")

var (
	errInvalid  = reason.New(reason.Invalid, "invalid")
	errNotFound = reason.New(reason.NotFound, "not found")
	errRefused  = reason.New(reason.Refused, "refused")
)

// logErrors maps reasons to errors of the log. Hosts send the reasons to each other.
func logErrors() map[reason.Code]error {
	return map[reason.Code]error{
		reason.NoLeader: replica.ErrNoLeader, reason.OutcomeUnknown: replica.ErrTimeout, reason.NotInCluster: replica.ErrNotInCluster,
		reason.LogStopped: replica.ErrStopped, reason.NotLeader: replica.ErrNotLeader, reason.HostTooOld: replica.ErrProtocol,
		reason.Stopping: replica.ErrClosed, reason.Contended: scheduler.ErrContended,
	}
}

// Uncoded converts another host's answer to the log's error that it was there. Other
// errors are returned unchanged.
func Uncoded(err error) error {
	var c *connect.Error
	if err == nil || !errors.As(err, &c) {
		return err
	}
	r := reason.Of(c)
	if r.Code == reason.NotLeader {
		return &replica.NotLeaderError{Leader: r.Object}
	}
	if e := logErrors()[r.Code]; e != nil {
		return fmt.Errorf("%w (%s)", e, c.Message())
	}
	return err
}
