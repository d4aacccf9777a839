package cli

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/reason"
)

const (
	defaultPatience = time.Minute            // limit for a call that changes something
	quietPatience   = 3 * time.Second        // time after which the user is told what gpuctl waits for
	tellEvery       = 10 * time.Second       // interval of further messages
	askAgain        = 250 * time.Millisecond // pause after the answer that there is no leader
)

// changing reports whether a procedure needs a leader, and does nothing without one.
func changing(procedure string) bool {
	switch procedure {
	case clusterv1connect.ClusterServiceInitProcedure, clusterv1connect.ClusterServiceJoinProcedure,
		clusterv1connect.ClusterServiceCreateClaimProcedure, clusterv1connect.ClusterServiceDeleteClaimProcedure,
		clusterv1connect.ClusterServiceSetDrainProcedure, clusterv1connect.ClusterServiceSetCordonProcedure,
		clusterv1connect.ClusterServiceSetLabelsProcedure, clusterv1connect.ClusterServiceSetRankProcedure,
		clusterv1connect.ClusterServiceCreateTokenProcedure, clusterv1connect.ClusterServiceDeleteTokenProcedure,
		clusterv1connect.ClusterServiceRemoveHostProcedure, clusterv1connect.ClusterServiceRevokeIdentityProcedure,
		gpuctlv1connect.HostServiceCreateClaimProcedure,
		gpuctlv1connect.MigrationServiceAbortProcedure, gpuctlv1connect.MigrationServiceResumeProcedure:
		return true
	}
	return false
}

// patience repeats calls that change something while there is no leader, until their time
// is over. Without a leader, nothing was done, so that is safe. Meanwhile it prints what
// it waits for.
func (a *app) patience() connect.ClientOption {
	return connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			if !changing(req.Spec().Procedure) {
				return next(ctx, req)
			}
			if waits(req) && !a.timed { // as long as it takes
				return a.ride(ctx, "a free GPU", func() (connect.AnyResponse, error) { return next(ctx, req) })
			}
			bound, cancel := context.WithTimeout(ctx, a.timeout)
			defer cancel()
			return a.ride(bound, "hostd's answer", func() (connect.AnyResponse, error) { return next(bound, req) })
		}
	}))
}

// waits reports whether a call is answered only when a GPU is free for its claim.
func waits(req connect.AnyRequest) bool {
	m, ok := req.Any().(*gpuctlv1.CreateClaimRequest)
	return ok && m.GetWait()
}

func (a *app) ride(ctx context.Context, why string, call func() (connect.AnyResponse, error)) (connect.AnyResponse, error) {
	type answer struct {
		res connect.AnyResponse
		err error
	}
	began, tell := time.Now(), time.NewTimer(quietPatience)
	defer tell.Stop()
	limit := ""
	if _, limited := ctx.Deadline(); limited {
		limit = fmt.Sprintf(" of %s, --timeout", a.timeout)
	}
	var last error // the last error: there is no leader
	for {
		answers := make(chan answer, 1)
		go func() {
			res, err := call()
			answers <- answer{res, err}
		}()
		var again <-chan time.Time
		for waiting := true; waiting; {
			select {
			case got := <-answers:
				if !reason.Retry(got.err) {
					if last != nil && connect.CodeOf(got.err) == connect.CodeDeadlineExceeded {
						return nil, last
					}
					return got.res, got.err
				}
				last, why = got.err, "the cluster to have a leader"
				again = time.After(askAgain)
			case <-again:
				waiting = false
			case <-tell.C:
				fmt.Fprintf(a.Err, "gpuctl: waiting for %s (%s%s)\n", why, time.Since(began).Round(time.Second), limit)
				tell.Reset(tellEvery)
			case <-ctx.Done():
				if last != nil {
					return nil, last
				}
				got := <-answers // the call ends with its context, and returns its error
				return got.res, got.err
			}
		}
	}
}
