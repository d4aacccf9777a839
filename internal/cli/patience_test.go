package cli

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// electing is a host of a cluster that has no leader for some calls.
type electing struct {
	clusterv1connect.UnimplementedClusterServiceHandler

	without atomic.Int32 // calls that nobody takes
	asked   atomic.Int32
	reason  reason.Code
}

func (e *electing) answer() error {
	e.asked.Add(1)
	if e.without.Add(-1) < 0 {
		return nil
	}
	return reason.Coded(reason.Errorf(e.reason, "the cluster has no leader"))
}

func (e *electing) Join(context.Context, *connect.Request[clusterv1.JoinRequest]) (*connect.Response[clusterv1.JoinResponse], error) {
	return connect.NewResponse(&clusterv1.JoinResponse{}), e.answer()
}

func (e *electing) List(context.Context, *connect.Request[clusterv1.ListRequest]) (*connect.Response[clusterv1.ListResponse], error) {
	return connect.NewResponse(&clusterv1.ListResponse{}), e.answer()
}

func TestCallsThatChangeSomethingRideOutElections(t *testing.T) {
	e := &electing{}
	mux := http.NewServeMux()
	mux.Handle(clusterv1connect.NewClusterServiceHandler(e))
	server := httptest.NewServer(mux)
	defer server.Close()
	var said bytes.Buffer
	a := &app{Stdio: cmdutil.Stdio{Err: &said}, timeout: time.Hour}
	c := clusterv1connect.NewClusterServiceClient(server.Client(), server.URL, a.patience())
	join := func() error {
		_, err := c.Join(t.Context(), connect.NewRequest(&clusterv1.JoinRequest{}))
		return err
	}
	for _, r := range []reason.Code{reason.NoLeader, reason.NotLeader} {
		e.reason = r
		e.without.Store(3)
		e.asked.Store(0)
		if err := join(); err != nil || e.asked.Load() != 4 {
			t.Errorf("%s: %v after %d calls", r, err, e.asked.Load())
		}
	}
	// What may have been done is not done again.
	e.reason = reason.OutcomeUnknown
	e.without.Store(1)
	e.asked.Store(0)
	if err := join(); connect.CodeOf(err) != connect.CodeUnavailable || e.asked.Load() != 1 {
		t.Errorf("an outcome that is not known: %v after %d calls", err, e.asked.Load())
	}
	// Who only looks is told at once.
	e.reason = reason.NoLeader
	e.without.Store(1)
	e.asked.Store(0)
	_, err := c.List(t.Context(), connect.NewRequest(&clusterv1.ListRequest{}))
	if !reason.Retry(err) || e.asked.Load() != 1 {
		t.Errorf("a read: %v after %d calls", err, e.asked.Load())
	}
	// The time is up, and the error is why.
	a.timeout = time.Second
	e.without.Store(1 << 30)
	e.asked.Store(0)
	if err := join(); !reason.Retry(err) || e.asked.Load() < 2 {
		t.Errorf("no leader at all: %v after %d calls", err, e.asked.Load())
	}
}

func TestWaitingIsTold(t *testing.T) {
	var said bytes.Buffer
	a := &app{Stdio: cmdutil.Stdio{Err: &said}, timeout: quietPatience + time.Second}
	ctx, cancel := context.WithTimeout(t.Context(), a.timeout)
	defer cancel()
	_, err := a.ride(ctx, "hostd's answer", func() (connect.AnyResponse, error) {
		return nil, reason.Coded(reason.Errorf(reason.NoLeader, "nobody leads"))
	})
	if !reason.Retry(err) || !strings.Contains(said.String(), "waiting for the cluster to have a leader") {
		t.Errorf("%v, said %q", err, said.String())
	}
}

// queued is a host that has a GPU for a claim after some time.
type queued struct {
	gpuctlv1connect.UnimplementedHostServiceHandler
}

func (queued) CreateClaim(ctx context.Context, _ *connect.Request[gpuctlv1.CreateClaimRequest]) (*connect.Response[gpuctlv1.CreateClaimResponse], error) {
	select {
	case <-time.After(time.Second):
		return connect.NewResponse(&gpuctlv1.CreateClaimResponse{Token: "t"}), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func TestWaitForAGPULastsLongerThanPatience(t *testing.T) {
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewHostServiceHandler(queued{}))
	server := httptest.NewServer(mux)
	defer server.Close()
	a := &app{Stdio: cmdutil.Stdio{Err: &bytes.Buffer{}}, timeout: 100 * time.Millisecond}
	c := gpuctlv1connect.NewHostServiceClient(server.Client(), server.URL, a.patience())
	claim := func(wait bool) error {
		_, err := c.CreateClaim(t.Context(), connect.NewRequest(&gpuctlv1.CreateClaimRequest{Wait: wait}))
		return err
	}
	if err := claim(true); err != nil {
		t.Errorf("a claim that waits for a GPU: %v", err)
	}
	if err := claim(false); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("a claim that does not: %v", err)
	}
	a.timed = true // the user has said how long
	if err := claim(true); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("a claim that waits for so long: %v", err)
	}
}
