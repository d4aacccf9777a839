package endpoint

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// hostileVM offers a way to it that it does not read, and lists its sessions as it likes, or
// takes requests and does not answer.
type hostileVM struct {
	guestAgent
	gpuctlv1connect.UnimplementedGuestServiceHandler

	list      *gpuctlv1.ListSessionsResponse
	suspended atomic.Int64
	mute      bool
}

func (v *hostileVM) Hello(ctx context.Context, _ *connect.Request[gpuctlv1.HelloRequest]) (*connect.Response[gpuctlv1.HelloResponse], error) {
	if v.mute {
		<-ctx.Done()
	}
	return connect.NewResponse(&gpuctlv1.HelloResponse{}), ctx.Err()
}

func (v *hostileVM) OpenBulk(context.Context, *connect.Request[gpuctlv1.OpenBulkRequest]) (*connect.Response[gpuctlv1.OpenBulkResponse], error) {
	return connect.NewResponse(&gpuctlv1.OpenBulkResponse{VsockPort: 1, Secret: make([]byte, 32)}), nil
}

func (v *hostileVM) ListSessions(context.Context, *connect.Request[gpuctlv1.ListSessionsRequest]) (*connect.Response[gpuctlv1.ListSessionsResponse], error) {
	return connect.NewResponse(v.list), nil
}

func (v *hostileVM) Suspend(_ context.Context, _ *connect.Request[gpuctlv1.SuspendRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	v.suspended.Add(1)
	return out.Send(&gpuctlv1.Progress{Result: &gpuctlv1.SwapResult{}})
}

func (v *hostileVM) serve(t *testing.T, c GuestsConfig) *Local {
	t.Helper()
	v.console = channeltest.New(t)
	root := t.TempDir()
	v.console.Root(root, channel.Name)
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error)
	go func() {
		mux := http.NewServeMux()
		mux.Handle(gpuctlv1connect.NewAgentServiceHandler(v))
		mux.Handle(gpuctlv1connect.NewGuestServiceHandler(v))
		over <- channel.Serve(ctx, channel.Port{Root: root}.Open, mux)
	}()
	c.Channels, c.Log = v, slog.New(slog.DiscardHandler)
	g := NewGuests(c)
	t.Cleanup(func() {
		if err := g.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-over; err != nil {
			t.Error(err)
		}
	})
	return &Local{Whereabouts: Whereabouts{Name: "h1", Log: c.Log}, Guests: g}
}

// A VM that takes a connection over vsock and reads nothing of it does not keep the host: the
// host takes the VM's channel.
func TestVMThatReadsNothingOverVsockDoesNotKeepTheHost(t *testing.T) {
	here, there := net.Pipe()
	defer there.Close()
	defer here.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	dialled := make(chan struct{})
	v := &hostileVM{}
	l := v.serve(t, GuestsConfig{Vsock: func(context.Context, string) (func(context.Context, uint32) (net.Conn, error), error) {
		return func(context.Context, uint32) (net.Conn, error) {
			close(dialled)
			return here, nil
		}, nil
	}})
	ended := make(chan error, 1)
	go func() {
		_, done, err := l.Guests.Bulk(ctx, "vm")
		if err == nil {
			done()
		}
		ended <- err
	}()
	<-dialled
	cancel()
	testkit.Until(t, "the host goes on", func() error { return testkit.Want(len(ended) == 1, "it still writes") })
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A session that a VM lists many times is frozen once: a list has room for many thousands.
func TestSessionThatAVMListsManyTimesIsFrozenOnce(t *testing.T) {
	v := &hostileVM{list: &gpuctlv1.ListSessionsResponse{}}
	for range 100 {
		v.list.Sessions = append(v.list.Sessions, &gpuctlv1.Session{Id: "s-1", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING})
	}
	l := v.serve(t, GuestsConfig{})
	err := l.Freeze(t.Context(), &gpuctlv1.SiteSessionsRequest{Machine: &gpuctlv1.SiteMachine{Uuid: "vm"}, Sessions: []string{"s-1"}}, func(uint64, uint64, string) {})
	if n := v.suspended.Load(); err != nil || n != 1 {
		t.Errorf("%d suspends: %v", n, err)
	}
}

// A VM whose gpuguest takes requests and does not answer is planned for as one without: who
// drains a host goes on to the next VM.
func TestPlanDoesNotWaitForAVMThatDoesNotAnswer(t *testing.T) {
	v := &hostileVM{mute: true}
	l := v.serve(t, GuestsConfig{Patience: 100 * time.Millisecond})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	facts := make(chan *gpuctlv1.SiteMachineFacts, 1)
	go func() {
		out := &gpuctlv1.SiteMachineFacts{Uuid: "vm"}
		l.agentFacts(ctx, out)
		facts <- out
	}()
	testkit.Until(t, "there are facts", func() error { return testkit.Want(len(facts) == 1, "it still asks") })
	if out := <-facts; out.GetAgent() || out.GetAgentError() == "" {
		t.Errorf("%v", out)
	}
}
