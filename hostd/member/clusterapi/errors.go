package clusterapi

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/cluster/pki"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/cluster/scheduler"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// ErrNotJoined says that this host is in no cluster.
var ErrNotJoined = errors.New("this host is in no cluster: make one with gpuctl cluster init, or join one with gpuctl cluster join TOKEN")

var (
	errInvalid  = errors.New("invalid")
	errNotFound = errors.New("not found")
	errRefused  = errors.New("refused")
)

// What the log's errors are between hosts. Codes alone do not tell them apart.
const (
	reasonHeader = reason.Header
	leaderHeader = "Gpuctl-Leader"
)

// reasons are the store's errors by their names on the wire.
func reasons() map[string]error {
	return map[string]error{
		reason.NoLeader: replica.ErrNoLeader, "timeout": replica.ErrTimeout, "not-in-cluster": replica.ErrNotInCluster,
		"stopped": replica.ErrStopped, reason.NotLeader: replica.ErrNotLeader, "protocol": replica.ErrProtocol, "closed": replica.ErrClosed,
		"contended": scheduler.ErrContended,
	}
}

// Coded gives an error the code that clients know it by.
func Coded(err error) error {
	var done *connect.Error
	if err == nil || errors.As(err, &done) {
		return err
	}
	out := connect.NewError(code(err), err)
	for name, e := range reasons() {
		if errors.Is(err, e) {
			out.Meta().Set(reasonHeader, name)
		}
	}
	var elsewhere *replica.NotLeaderError
	if errors.As(err, &elsewhere) {
		out.Meta().Set(leaderHeader, elsewhere.Leader)
	}
	return out
}

func code(err error) connect.Code {
	var answer *scheduler.Error
	if errors.As(err, &answer) {
		switch answer.Result.GetOutcome() {
		case clusterv1.Outcome_OUTCOME_INVALID:
			return connect.CodeInvalidArgument
		case clusterv1.Outcome_OUTCOME_NOT_FOUND:
			return connect.CodeNotFound
		case clusterv1.Outcome_OUTCOME_ALREADY_EXISTS:
			return connect.CodeAlreadyExists
		case clusterv1.Outcome_OUTCOME_NO_CAPACITY:
			return connect.CodeResourceExhausted
		case clusterv1.Outcome_OUTCOME_STALE:
			return connect.CodeAborted
		case clusterv1.Outcome_OUTCOME_REFUSED, clusterv1.Outcome_OUTCOME_OK, clusterv1.Outcome_OUTCOME_UNSPECIFIED:
		}
		return connect.CodeFailedPrecondition
	}
	for _, c := range []struct {
		err  error
		code connect.Code
	}{
		{errInvalid, connect.CodeInvalidArgument},
		{query.ErrInvalid, connect.CodeInvalidArgument},
		{placement.ErrInvalid, connect.CodeInvalidArgument},
		{pki.ErrRequest, connect.CodeInvalidArgument},
		{pki.ErrIdentity, connect.CodeInvalidArgument},
		{pki.ErrTokenMalformed, connect.CodeInvalidArgument},
		{pki.ErrTokenUnknown, connect.CodePermissionDenied},
		{pki.ErrTokenExpired, connect.CodePermissionDenied},
		{pki.ErrTokenSecret, connect.CodePermissionDenied},
		{pki.ErrTokenName, connect.CodePermissionDenied},
		{errNotFound, connect.CodeNotFound},
		{placement.ErrNotFound, connect.CodeNotFound},
		{ErrNotJoined, connect.CodeFailedPrecondition},
		{errRefused, connect.CodeFailedPrecondition},
		{replica.ErrNotInCluster, connect.CodeFailedPrecondition},
		{replica.ErrStopped, connect.CodeFailedPrecondition},
		{replica.ErrProtocol, connect.CodeFailedPrecondition},
		{replica.ErrExists, connect.CodeFailedPrecondition},
		{replica.ErrNotLeader, connect.CodeUnavailable},
		{replica.ErrNoLeader, connect.CodeUnavailable},
		{replica.ErrTimeout, connect.CodeUnavailable},
		{replica.ErrClosed, connect.CodeUnavailable},
		{scheduler.ErrContended, connect.CodeUnavailable},
		{access.ErrNotReady, connect.CodeUnavailable},
		{context.Canceled, connect.CodeCanceled},
		{context.DeadlineExceeded, connect.CodeDeadlineExceeded},
	} {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return connect.CodeInternal
}

// Uncoded gives another host's error the store's sentinels back. An error that
// says that nobody was reached is ErrNoLeader: the request was not sent.
func Uncoded(err error) error {
	var c *connect.Error
	if err == nil || !errors.As(err, &c) {
		return err
	}
	name := c.Meta().Get(reasonHeader)
	if name == reason.NotLeader {
		return &replica.NotLeaderError{Leader: c.Meta().Get(leaderHeader)}
	}
	if e := reasons()[name]; e != nil {
		return fmt.Errorf("%w (%s)", e, c.Message())
	}
	return err
}
