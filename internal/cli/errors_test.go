package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/reason"
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

// A VM writes how its rehearsal has ended, an executor why a swap has failed. Neither may
// control the terminal, or add lines as if gpuctl had said them.
func TestHowAnOperationEndsDoesNotControlTheTerminal(t *testing.T) {
	const evil = "\x1b]0;title\a\x1b[2J\u009b2J\ngpuctl: done"
	for name, r := range map[string]*gpuctlv1.SwapResult{
		"rolled back": {RolledBack: true, Error: evil},
		"held":        {Held: true, Error: evil},
		"ended":       {Ended: true, Error: evil},
		"failed":      {Error: evil},
		"refused":     {Refused: true, Reasons: []*gpuctlv1.Reason{{Code: "x", Message: evil}}},
		"done":        {StoppedNs: 1, Detour: evil},
	} {
		var out, shown bytes.Buffer
		a := &app{Stdio: cmdutil.Stdio{Out: &out, Err: &shown}}
		u := &gpuctlv1.OperationUpdate{Session: evil, Gpus: []string{evil}, Model: evil, Progress: &gpuctlv1.Progress{Result: r}}
		u.Rejected = []*gpuctlv1.Candidate{{Gpu: "small", Reasons: r.GetReasons()}}
		err := a.judge("rehearsal", "it goes on", "it goes on", u)
		if (err == nil) != (name == "done") {
			t.Errorf("%s: %v", name, err)
		}
		said := fmt.Sprint(err) + "\n" + out.String() + shown.String()
		if strings.ContainsAny(said, "\x1b\a\u009b") || strings.Contains(said, "\ngpuctl: done") {
			t.Errorf("%s: %q", name, said)
		}
	}
}

// The host's message names the command, or gpuctl does: never both, and whatever
// the words are.
func TestHeldMigrationSaysOnceHowItGoesOn(t *testing.T) {
	for _, u := range []*gpuctlv1.MachineProgress{
		{Id: "m-1", End: endHeld, Message: "the link is down; resume it: gpuctl migrations resume m-1", Next: "gpuctl migrations resume m-1"},
		{Id: "m-1", End: endHeld, Message: "the link is down"},
	} {
		if said := endWords("migrate", "web", u, nil); strings.Count(said, "gpuctl migrations resume m-1") != 1 {
			t.Errorf("%q", said)
		}
	}
	// A message that only mentions it is no advice.
	if said := endWords("migrate", "web", &gpuctlv1.MachineProgress{Id: "m-1", End: endHeld, Message: "migrations resume failed"}, nil); !strings.Contains(said, "gpuctl migrations resume m-1") {
		t.Errorf("%q", said)
	}
}

// Advice of a host's is not followed by gpuctl's own, and what names nothing to
// do is: by the reason, not by the words.
func TestAdviceIsGivenOnce(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
		exit int
	}{
		{reason.Errorf(reason.RoleTooLow, "a viewer may not").Do("ask ada"), "a viewer may not; ask ada", cmdutil.Failed},
		{reason.Errorf(reason.RoleTooLow, "the token of gpuctl is a viewer's: run it elsewhere"), "the token of gpuctl is a viewer's: run it elsewhere; an administrator can give you a token: gpuctl cluster token create --role ROLE", cmdutil.Failed},
		{reason.Errorf(reason.Stale, "other"), "other; it changed in the meantime: look again, then repeat", cmdutil.Failed},
		{reason.Errorf(reason.Busy, "a swap is under way"), "a swap is under way", cmdutil.Refused},
		{reason.Errorf(reason.Internal, "refused: it says"), "it says", cmdutil.Failed},
		{reason.Errorf(reason.HostDown, "host h2 is down").On("host", "h2").Do("wait"), "host h2 is down; wait", exitUnavailable},
	} {
		_, handler := clusterv1connect.NewClusterServiceHandler(&answers{err: reason.Coded(c.err), status: &clusterv1.StatusResponse{Joined: true}})
		server := httptest.NewServer(handler)
		client := clusterv1connect.NewClusterServiceClient(server.Client(), server.URL)
		_, err := client.List(t.Context(), connect.NewRequest(&clusterv1.ListRequest{}))
		server.Close()
		for how, got := range map[string]error{"explained": explain(err), "advised": advise(t.Context(), client, err), "inside another": explain(fmt.Errorf("x: %w", err))} {
			if got == nil || got.Error() != c.want || cmdutil.Code(got) != c.exit {
				t.Errorf("%s: %q, exit status %d; want %q, %d", how, got, cmdutil.Code(got), c.want, c.exit)
			}
		}
	}
}

// What does not exist gets near names from gpuctl only if hostd has named none.
func TestNearNamesAreGivenOnce(t *testing.T) {
	for _, c := range []struct{ err, want string }{
		{"", `there is no host "h9" (did you mean gpuctl get?); gpuctl get hosts lists them`},
		{"gpuctl get hosts lists them", `there is no host "h9" (did you mean gpuctl get?); gpuctl get hosts lists them`},
	} {
		refusal := reason.Errorf(reason.NotFound, `there is no host "h9" (did you mean gpuctl get?)`).On("host", "h9")
		if c.err != "" {
			refusal = refusal.Do(c.err)
		}
		_, handler := clusterv1connect.NewClusterServiceHandler(&answers{err: reason.Coded(refusal), status: &clusterv1.StatusResponse{Joined: true}})
		server := httptest.NewServer(handler)
		client := clusterv1connect.NewClusterServiceClient(server.Client(), server.URL)
		_, err := callOn(t.Context(), client, kind{one: "host", many: "hosts"}, "h9", client.List, &clusterv1.ListRequest{})
		server.Close()
		if err == nil || err.Error() != c.want || cmdutil.Code(err) != cmdutil.Failed {
			t.Errorf("%q: %v, exit status %d; want %s", c.err, err, cmdutil.Code(err), c.want)
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
