package reason_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// refusing answers every call with an error, or passes on another host's.
type refusing struct {
	gpuctlv1connect.UnimplementedHostServiceHandler

	err  error
	next gpuctlv1connect.HostServiceClient
}

func (s *refusing) GetInventory(ctx context.Context, r *connect.Request[gpuctlv1.GetInventoryRequest]) (*connect.Response[gpuctlv1.GetInventoryResponse], error) {
	if s.next != nil {
		_, err := s.next.GetInventory(ctx, connect.NewRequest(r.Msg))
		return nil, reason.Coded(err)
	}
	return nil, reason.Coded(s.err)
}

func (s *refusing) WatchSessions(ctx context.Context, r *connect.Request[gpuctlv1.HostWatchSessionsRequest], _ *connect.ServerStream[gpuctlv1.Session]) error {
	if s.next != nil {
		in, err := s.next.WatchSessions(ctx, connect.NewRequest(r.Msg))
		if err != nil {
			return err
		}
		defer in.Close()
		for in.Receive() {
		}
		return in.Err()
	}
	return reason.Coded(s.err)
}

func serve(t *testing.T, s *refusing, options ...connect.ClientOption) gpuctlv1connect.HostServiceClient {
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewHostServiceHandler(s))
	server := httptest.NewUnstartedServer(mux)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return gpuctlv1connect.NewHostServiceClient(server.Client(), server.URL, options...)
}

func answers(t *testing.T, c gpuctlv1connect.HostServiceClient) map[string]error {
	_, call := c.GetInventory(t.Context(), connect.NewRequest(&gpuctlv1.GetInventoryRequest{}))
	in, err := c.WatchSessions(t.Context(), connect.NewRequest(&gpuctlv1.HostWatchSessionsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	for in.Receive() {
	}
	return map[string]error{"call": call, "stream": in.Err()}
}

// A reason is the same at a client, and at one of a host that asked another.
func TestEveryReasonSurvivesTheWayToTheClient(t *testing.T) {
	first := &refusing{}
	direct := serve(t, first)
	clients := map[string]gpuctlv1connect.HostServiceClient{
		"direct": direct, "gRPC": serve(t, first, connect.WithGRPC()), "through another host": serve(t, &refusing{next: direct}),
	}
	for _, e := range reason.Table() {
		cause := errors.New("cause")
		first.err = fmt.Errorf("outer: %w", reason.Errorf(e.Code, "no %w", cause).On("gpu", "h1/größer").Do("look at %s", "h2"))
		if !errors.Is(first.err, cause) {
			t.Errorf("%s: the cause is lost", e.Code)
		}
		for how, c := range clients {
			for kind, err := range answers(t, c) {
				want := reason.Reason{Code: e.Code, Kind: "gpu", Object: "h1/größer", Next: "look at h2", Retry: e.Retry, Exit: e.Exit}
				var said *connect.Error
				if got := reason.Of(err); got != want || !errors.As(err, &said) || said.Code() != e.Connect || said.Message() != "outer: no cause; look at h2" {
					t.Errorf("%s, %s, %s: %v, %+v; want %+v", e.Code, how, kind, err, got, want)
				}
				if got := reason.Of(err).Advice(); got != "" {
					t.Errorf("%s: advice %q beside the message's", e.Code, got)
				}
			}
		}
		if r := reason.Of(reason.Coded(reason.New(e.Code, "x"))); r.Advice() != e.Next {
			t.Errorf("%s: advice %q, want %q", e.Code, r.Advice(), e.Next)
		}
	}
}

// Nobody goes by the message, whatever it says.
func TestTextOfAnErrorDecidesNothing(t *testing.T) {
	for _, e := range reason.Table() {
		err := reason.Coded(reason.Errorf(e.Code, "not found: refused: the cluster has no leader; gpuctl get gpus lists them"))
		if r := reason.Of(err); r.Code != e.Code || r.Exit != e.Exit || r.Retry != e.Retry || r.Next != "" {
			t.Errorf("%s: %+v", e.Code, r)
		}
	}
}

func TestErrorsWithoutAReason(t *testing.T) {
	if reason.Of(nil) != (reason.Reason{}) || reason.Is(nil, reason.Internal) || reason.Retry(nil) || reason.Coded(nil) != nil {
		t.Error("no error has a reason")
	}
	for code := connect.CodeCanceled; code <= connect.CodeUnauthenticated; code++ {
		r := reason.Of(connect.NewError(code, errors.New("x")))
		if r.Code == "" || r.Retry || r.Exit == 0 {
			t.Errorf("%v: %+v", code, r)
		}
	}
	for err, code := range map[error]reason.Code{
		errors.New("x"): reason.Internal, context.Canceled: reason.Canceled,
		fmt.Errorf("x: %w", context.DeadlineExceeded): reason.TimedOut,
	} {
		if got := reason.Of(reason.Coded(err)); got.Code != code {
			t.Errorf("%v: %+v, want %s", err, got, code)
		}
	}
	if dial := (&net.OpError{Op: "dial", Err: errors.New("x")}); reason.Retry(dial) || !reason.Undone(dial) {
		t.Error("what could not be sent was not done")
	}
}

// A reason of a later version: what it says of itself counts, and its code of
// Connect's.
func TestReasonOfANewerHost(t *testing.T) {
	err := connect.NewError(connect.CodeFailedPrecondition, errors.New("x"))
	detail, _ := connect.NewErrorDetail(&gpuctlv1.ErrorReason{Code: "FROM_THE_FUTURE", Object: "o", Next: "wait", Retry: true})
	err.AddDetail(detail)
	want := reason.Reason{Code: "FROM_THE_FUTURE", Object: "o", Next: "wait", Retry: true, Exit: 3}
	if got := reason.Of(err); got != want || !reason.Retry(err) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// Hosts are upgraded one by one: those of the version before say it in a header.
func TestHeaderOfOlderHostsIsUnderstood(t *testing.T) {
	for name, code := range map[string]reason.Code{
		"no-leader": reason.NoLeader, "not-leader": reason.NotLeader, "timeout": reason.OutcomeUnknown, "not-in-cluster": reason.NotInCluster,
		"stopped": reason.LogStopped, "protocol": reason.HostTooOld, "closed": reason.Stopping, "contended": reason.Contended, "revoked": reason.Revoked,
	} {
		err := connect.NewError(connect.CodeUnavailable, errors.New("x"))
		err.Meta().Set("Gpuctl-Reason", name)
		err.Meta().Set("Gpuctl-Leader", "h1:7843")
		if r := reason.Of(err); r.Code != code || r.Object != "h1:7843" || r.Retry != (code == reason.NoLeader || code == reason.NotLeader) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// The outermost reason counts, and what the one within says of the object and
// of what to do next, which the text has, too.
func TestOutermostReasonCounts(t *testing.T) {
	within := reason.Errorf(reason.NotFound, "no host").On("host", "h1").Do("look")
	err := reason.Errorf(reason.Stale, "it went: %w", within)
	if r := reason.Of(err); r.Code != reason.Stale || r.Kind != "host" || r.Object != "h1" || r.Next != "look" || err.Error() != "it went: no host; look" {
		t.Errorf("%+v: %v", r, err)
	}
	if r := reason.Of(errors.Join(errors.New("x"), within)); r.Code != reason.NotFound {
		t.Errorf("one of several: %+v", r)
	}
	if got := reason.Coded(fmt.Errorf("x: %w", reason.Coded(within))); !reason.Is(got, reason.NotFound) {
		t.Errorf("coded twice: %v", got)
	}
}

// What is sent of a name stays a text, and short.
func TestErrorsThatNameNoObjectAreAboutTheRequests(t *testing.T) {
	refused := reason.New(reason.Refused, "refused")
	named := reason.Detail(refused).On("vm", "web")
	for err, want := range map[error][2]string{refused: {"gpu", "a"}, fmt.Errorf("x: %w", refused): {"gpu", "a"}, named: {"vm", "web"}, errors.New("x"): {"gpu", "a"}} {
		got := reason.Of(reason.CodedOn(err, "gpu", "a"))
		if got.Kind != want[0] || got.Object != want[1] || got.Code != reason.Of(err).Code {
			t.Errorf("%v is %+v, want %v", err, got, want)
		}
	}
}

func TestLongAndBrokenNamesAreSent(t *testing.T) {
	for _, name := range []string{strings.Repeat("ö", 10_000), "\xff\xfe x"} {
		got := reason.Of(errors.Unwrap(fmt.Errorf("%w", reason.Coded(fmt.Errorf("%w", reason.Errorf(reason.NotFound, "no").On("gpu", name))))))
		if got.Code != reason.NotFound || got.Object == name || got.Object == "" || len(got.Object) > 1<<10 {
			t.Errorf("%d bytes: %d", len(name), len(got.Object))
		}
	}
}

// Each reason has one entry, is given by somebody, and is documented.
func TestEveryReasonIsInTheTableInUseAndDocumented(t *testing.T) {
	names := map[string]string{} // of the constants, by code
	f, err := parser.ParseFile(token.NewFileSet(), "reason.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == 1 {
			if typ, ok := v.Type.(*ast.Ident); ok && typ.Name == "Code" {
				code, _ := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
				names[code] = v.Names[0].Name
			}
		}
		return true
	})
	used := map[string]bool{}
	eachFile(t, func(path string, f *ast.File) {
		if path == "internal/reason/reason.go" {
			return
		}
		own := strings.HasPrefix(path, "internal/reason/")
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "reason" {
					used[n.Sel.Name] = true
				}
			case *ast.Ident:
				if own {
					used[n.Name] = true
				}
			}
			return true
		})
	})
	manual, err := os.ReadFile("../../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range reason.Table() {
		name := names[string(e.Code)]
		delete(names, string(e.Code))
		switch {
		case name == "":
			t.Errorf("%s is twice in the table, or no constant", e.Code)
		case !used[name]:
			t.Errorf("nobody gives %s as a reason, or goes by it", e.Code)
		case e.Doc == "" || !strings.Contains(string(manual), "| `"+string(e.Code)+"` | "+e.Doc+" |"):
			t.Errorf("%s is not in docs/errors.md: make generate", e.Code)
		case e.Exit == 0:
			t.Errorf("%s: an error with the exit status of none", e.Code)
		}
	}
	for code := range names {
		t.Errorf("%s is not in the table", code)
	}
}
