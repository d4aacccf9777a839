package cli

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// answers is a service that answers List and Status as it is told.
type answers struct {
	clusterv1connect.UnimplementedClusterServiceHandler
	err    error
	status *clusterv1.StatusResponse
}

func (s *answers) List(context.Context, *connect.Request[clusterv1.ListRequest]) (*connect.Response[clusterv1.ListResponse], error) {
	return nil, s.err
}

func (s *answers) Status(context.Context, *connect.Request[clusterv1.StatusRequest]) (*connect.Response[clusterv1.StatusResponse], error) {
	return connect.NewResponse(s.status), nil
}

// Every refusal has its exit status, and says what to do next.
func TestAdvice(t *testing.T) {
	joined := &clusterv1.StatusResponse{Joined: true, Host: "h1"}
	for _, c := range []struct {
		code   connect.Code
		status *clusterv1.StatusResponse
		exit   int
		want   string
	}{
		{connect.CodeInvalidArgument, joined, cmdutil.BadUse, "no way"},
		{connect.CodeNotFound, joined, cmdutil.Failed, "no way"},
		{connect.CodeFailedPrecondition, joined, cmdutil.Refused, "no way"},
		{connect.CodeFailedPrecondition, &clusterv1.StatusResponse{Host: "h1"}, cmdutil.Failed, "gpuctl cluster init, or enter one with gpuctl cluster join"},
		{connect.CodeFailedPrecondition, &clusterv1.StatusResponse{Standalone: true}, cmdutil.Refused, "no way"},
		{connect.CodeUnavailable, joined, exitUnavailable, "gpuctl cluster status says"},
		{connect.CodeUnavailable, &clusterv1.StatusResponse{}, cmdutil.Failed, "in no cluster yet"},
		{connect.CodeDeadlineExceeded, joined, exitUnavailable, "no answer in time"},
		{connect.CodeResourceExhausted, joined, cmdutil.Refused, "no way"},
		{connect.CodeAborted, joined, cmdutil.Failed, "look again, then repeat"},
		{connect.CodePermissionDenied, joined, cmdutil.Failed, "gpuctl cluster token create --role"},
		{connect.CodeUnauthenticated, joined, cmdutil.Failed, "gpuctl cluster login"},
		{connect.CodeUnimplemented, joined, cmdutil.Failed, "older than gpuctl"},
		{connect.CodeInternal, joined, cmdutil.Failed, "no way"},
	} {
		_, handler := clusterv1connect.NewClusterServiceHandler(&answers{err: connect.NewError(c.code, errors.New("no way\x1b[2J")), status: c.status})
		server := httptest.NewServer(handler)
		client := clusterv1connect.NewClusterServiceClient(server.Client(), server.URL)
		_, err := call(t.Context(), client, client.List, &clusterv1.ListRequest{})
		server.Close()
		err = explain(err)
		if err == nil || cmdutil.Code(err) != c.exit || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\x1b") {
			t.Errorf("%v: %q, exit status %d; want %q, %d", c.code, err, cmdutil.Code(err), c.want, c.exit)
		}
	}
}

// A host with another cluster's certificate is no host that is down.
func TestAdviceOnCertificates(t *testing.T) {
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	defer server.Close()
	client := clusterv1connect.NewClusterServiceClient(&http.Client{Transport: &http.Transport{}}, server.URL)
	_, err := call(t.Context(), client, client.List, &clusterv1.ListRequest{})
	if err == nil || !strings.Contains(err.Error(), "not of this cluster") || cmdutil.Code(err) != cmdutil.Failed {
		t.Errorf("%v, exit status %d", err, cmdutil.Code(err))
	}
	crashed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			_ = conn.Close()
		}
	}))
	defer crashed.Close()
	client = clusterv1connect.NewClusterServiceClient(crashed.Client(), crashed.URL)
	if _, err := call(t.Context(), client, client.List, &clusterv1.ListRequest{}); cmdutil.Code(err) != exitUnavailable || !strings.Contains(err.Error(), "went away") {
		t.Errorf("one that crashed: %v, exit status %d", err, cmdutil.Code(err))
	}
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	client = clusterv1connect.NewClusterServiceClient(http.DefaultClient, gone.URL)
	if _, err := call(t.Context(), client, client.List, &clusterv1.ListRequest{}); cmdutil.Code(err) != exitUnavailable {
		t.Errorf("nobody there: %v, exit status %d", err, cmdutil.Code(err))
	}
}

// A host that takes a call and never answers keeps no shell waiting.
func TestCompletionEnds(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	for _, args := range [][]string{{"get", "gpus", ""}, {"describe", "gpu", ""}, {"label", "host", "h1", ""}} {
		t.Run(args[0], func(t *testing.T) {
			t.Parallel()
			var out, log bytes.Buffer
			begin := time.Now()
			err := Run(t.Context(), append([]string{"--host", "unix://" + socket, "__complete"}, args...), cmdutil.Stdio{Out: &out, Err: &log})
			if spent := time.Since(begin); err != nil || spent > completionTimeout+time.Second || spent < completionTimeout/2 {
				t.Errorf("it took %v: %v", spent, err)
			}
			if strings.Contains(out.String(), "h1") || strings.Contains(log.String(), "hostd") {
				t.Errorf("it says %q and %q", &out, &log)
			}
		})
	}
}
