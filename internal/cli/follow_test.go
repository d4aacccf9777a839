package cli

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// serving serves what add adds, until the test ends.
func serving(t *testing.T, add func(*http.ServeMux)) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	add(mux)
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server
}

// happening has no events at first. While its stream is away, three happen.
type happening struct {
	clusterv1connect.UnimplementedClusterServiceHandler

	asked atomic.Int32
}

func (h *happening) Events(_ context.Context, r *connect.Request[clusterv1.EventsRequest], st *connect.ServerStream[clusterv1.Event]) error {
	switch h.asked.Add(1) {
	case 1:
		return nil // hostd ends in order
	case 2:
		all := []*clusterv1.Event{{Index: 1, Type: "One"}, {Index: 2, Type: "Two"}, {Index: 3, Type: "Three"}}
		if n := int(r.Msg.GetLast()); n > 0 {
			all = all[len(all)-n:]
		}
		for _, e := range all {
			if err := st.Send(e); err != nil {
				return err
			}
		}
	}
	return connect.NewError(connect.CodeInternal, errors.New("enough"))
}

func TestFollowedEventsAreCompleteIfNoneWasThereBeforeTheBreak(t *testing.T) {
	server := serving(t, func(mux *http.ServeMux) { mux.Handle(clusterv1connect.NewClusterServiceHandler(&happening{})) })
	c := clusterv1connect.NewClusterServiceClient(server.Client(), server.URL)
	var out bytes.Buffer
	a := &app{Stdio: cmdutil.Stdio{Out: &out, Err: &bytes.Buffer{}}, output: "json"}
	err := a.followEvents(t.Context(), c, &clusterv1.EventsRequest{Follow: true, Last: 1})
	if err == nil || !strings.Contains(err.Error(), "enough") {
		t.Fatal(err)
	}
	for _, want := range []string{"One", "Two", "Three"} {
		if strings.Count(out.String(), `"`+want+`"`) != 1 {
			t.Errorf("%s is not there once:\n%s", want, out.String())
		}
	}
}

// working is a host with an operation in progress. If it does not stay, it goes away in the middle.
type working struct {
	gpuctlv1connect.UnimplementedHostServiceHandler
	gpuctlv1connect.UnimplementedDeviceServiceHandler

	stays atomic.Bool
}

func (w *working) Swap(ctx context.Context, _ *connect.Request[gpuctlv1.HostSwapRequest], st *connect.ServerStream[gpuctlv1.OperationUpdate]) error {
	if err := st.Send(&gpuctlv1.OperationUpdate{Session: "s-1", Progress: &gpuctlv1.Progress{Step: "transfer", Steps: 8}}); err != nil {
		return err
	}
	return w.goOn(ctx)
}

func (w *working) Detach(ctx context.Context, _ *connect.Request[gpuctlv1.DetachRequest], st *connect.ServerStream[gpuctlv1.DeviceUpdate]) error {
	if err := st.Send(&gpuctlv1.DeviceUpdate{Step: "ask", Steps: 8}); err != nil {
		return err
	}
	return w.goOn(ctx)
}

func (w *working) goOn(ctx context.Context) error {
	if !w.stays.Load() {
		panic(http.ErrAbortHandler)
	}
	<-ctx.Done()
	return nil
}

// onWrite is called for what is written.
type onWrite func()

func (f onWrite) Write(b []byte) (int, error) {
	f()
	return len(b), nil
}

// What an operation was going to do, it does, whoever watches it. Somebody who ends gpuctl, or whose
// hostd ends, has to know that.
func TestWhoDoesNotSeeTheEndOfAnOperationIsToldWhatGoesOn(t *testing.T) {
	w := &working{}
	server := serving(t, func(mux *http.ServeMux) {
		mux.Handle(gpuctlv1connect.NewHostServiceHandler(w))
		mux.Handle(gpuctlv1connect.NewDeviceServiceHandler(w))
	})
	host := gpuctlv1connect.NewHostServiceClient(server.Client(), server.URL)
	devices := gpuctlv1connect.NewDeviceServiceClient(server.Client(), server.URL)
	swap := func(a *app) error { return follow(t.Context(), a, "upgrade", host.Swap, &gpuctlv1.HostSwapRequest{}) }
	detach := func(a *app) error {
		return followDevice(t.Context(), a, devices.Detach, &gpuctlv1.DetachRequest{}, "VM %s has given %s back", true)
	}
	for name, c := range map[string]struct {
		do    func(*app) error
		stays bool // and gpuctl is interrupted
		code  int
		want  string
	}{
		"interrupted swap":   {swap, true, cmdutil.Failed, "interrupted; the upgrade of session s-1 goes on: gpuctl describe session s-1 says how it ends"},
		"hostd went away":    {swap, false, exitUnavailable, "; gpuctl describe session s-1 says how the upgrade ends"},
		"interrupted detach": {detach, true, cmdutil.Failed, "interrupted; what has begun goes on, and gpuctl cards and gpuctl vms say how far it is"},
	} {
		t.Run(name, func(t *testing.T) {
			w.stays.Store(c.stays)
			heard := func() {
				if c.stays {
					_ = syscall.Kill(os.Getpid(), syscall.SIGINT)
				}
			}
			a := &app{Stdio: cmdutil.Stdio{Out: &bytes.Buffer{}, Err: onWrite(heard)}, getenv: func(string) string { return "" }}
			err := c.do(a)
			if err == nil || !strings.HasSuffix(err.Error(), c.want) || cmdutil.Code(err) != c.code {
				t.Errorf("%v, status %d", err, cmdutil.Code(err))
			}
		})
	}
}
