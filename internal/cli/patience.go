package cli

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/reason"
)

const (
	defaultPatience = time.Minute            // for a call that changes something
	quietPatience   = 3 * time.Second        // before the user is told what is waited for
	tellEvery       = 10 * time.Second       // and how often
	askAgain        = 250 * time.Millisecond // after an answer that nobody leads
)

// changing are the calls that need a leader and do nothing without one.
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

// patience rides out elections: a call that changes something is made again,
// until its time is up, when the answer is that nobody leads and so nothing was
// done. Meanwhile it says what is waited for.
func (a *app) patience() connect.ClientOption {
	return connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			if !changing(req.Spec().Procedure) {
				return next(ctx, req)
			}
			bound, cancel := context.WithTimeout(ctx, a.timeout)
			defer cancel()
			return a.ride(bound, func() (connect.AnyResponse, error) { return next(bound, req) })
		}
	}))
}

func (a *app) ride(ctx context.Context, call func() (connect.AnyResponse, error)) (connect.AnyResponse, error) {
	type answer struct {
		res connect.AnyResponse
		err error
	}
	began, tell := time.Now(), time.NewTimer(quietPatience)
	defer tell.Stop()
	why := "hostd's answer"
	var last error // that nobody leads
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
				fmt.Fprintf(a.Err, "gpuctl: waiting for %s (%s of %s, --timeout)\n", why, time.Since(began).Round(time.Second), a.timeout)
				tell.Reset(tellEvery)
			case <-ctx.Done():
				if last != nil {
					return nil, last
				}
				got := <-answers // the call ends with its context, and says how
				return got.res, got.err
			}
		}
	}
}
