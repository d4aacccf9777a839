package clusterapi

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/cluster/replica"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// cutting is a follower whose leader takes what it is asked and is gone, with the
// majority, before it answers.
type cutting struct {
	*member

	err  error
	lose func()
}

func (c *cutting) Peer(string) clusterv1connect.PeerServiceClient { return &lostLeader{from: c} }

type lostLeader struct {
	clusterv1connect.PeerServiceClient
	from *cutting
}

func (l *lostLeader) CreateClaim(context.Context, *connect.Request[clusterv1.CreateClaimRequest]) (*connect.Response[clusterv1.CreateClaimResponse], error) {
	l.from.lose()
	return nil, l.from.err
}

func (l *lostLeader) Enroll(context.Context, *connect.Request[clusterv1.EnrollRequest]) (*connect.Response[clusterv1.EnrollResponse], error) {
	l.from.lose()
	return nil, l.from.err
}

// Clients ask again when nobody leads: with another claim, or another request for
// a certificate, if they had none of their own. What may have been done already
// must not be answered so.
func TestLostAnswerOfALeaderIsNotSaidToBeNone(t *testing.T) {
	t.Parallel()
	none := reason.Coded(reason.Errorf(reason.NoLeader, "none"))
	for _, c := range []struct {
		err        error
		leaderless bool
	}{{io.ErrUnexpectedEOF, false}, {none, true}} {
		ctx := testkit.Context(t)
		r := newRig(t, 3)
		l, others := r.leader(ctx)
		f := &cutting{member: others[0], err: c.err}
		cut := false
		f.lose = func() {
			if !cut {
				cut = true
				l.Kill()
				others[1].Kill()
			}
		}
		api := New(f, f.api.log)
		short, cancel := context.WithTimeout(ctx, 3*time.Second)
		_, err := api.Bind(short, &clusterv1.Claim{Id: "c", Expr: `name == "none"`, Count: 1})
		cancel()
		if errors.Is(err, replica.ErrNoLeader) != c.leaderless || reason.Retry(reason.Coded(err)) != c.leaderless {
			t.Errorf("%v: the claim: %v", c.err, err)
		}
		short, cancel = context.WithTimeout(ctx, 3*time.Second)
		_, err = api.enrollElsewhere(short, &following{Log: f.Log(), leader: l.Address}, connect.NewRequest(&clusterv1.EnrollRequest{}))
		cancel()
		if connect.CodeOf(err) != connect.CodeUnavailable || reason.Retry(err) != c.leaderless {
			t.Errorf("%v: the enrolment: %v", c.err, err)
		}
	}
}

// following is a log that still takes a host for its leader.
type following struct {
	Log
	leader string
}

func (f *following) IsLeader() bool               { return false }
func (f *following) Leader() (id, address string) { return "l", f.leader }
