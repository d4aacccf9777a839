package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/migrate"
)

// lossyVM is a VM in which sessions were lost. Nothing can be done with those that it still
// lists: it fails the test if that is tried.
type lossyVM struct {
	gpuctlv1connect.UnimplementedGuestServiceHandler

	t       *testing.T
	console *channeltest.Console
	list    *gpuctlv1.ListSessionsResponse
	suspend func(session string) // nil: none is to be suspended
}

func (v *lossyVM) Channel(context.Context, string) (string, error) { return v.console.Socket(), nil }

func (v *lossyVM) ListSessions(context.Context, *connect.Request[gpuctlv1.ListSessionsRequest]) (*connect.Response[gpuctlv1.ListSessionsResponse], error) {
	return connect.NewResponse(v.list), nil
}

func (v *lossyVM) Suspend(_ context.Context, req *connect.Request[gpuctlv1.SuspendRequest], _ *connect.ServerStream[gpuctlv1.Progress]) error {
	if v.suspend != nil {
		v.suspend(req.Msg.GetSession())
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("it does not freeze"))
	}
	v.t.Error("a lost session is suspended")
	return nil
}

func (v *lossyVM) Resume(context.Context, *connect.Request[gpuctlv1.ResumeRequest], *connect.ServerStream[gpuctlv1.Progress]) error {
	v.t.Error("a lost session is resumed")
	return nil
}

func (v *lossyVM) serve() *Local {
	v.t.Helper()
	v.console = channeltest.New(v.t)
	root := v.t.TempDir()
	v.console.Root(root, channel.Name)
	ctx, cancel := context.WithCancel(context.Background())
	over := make(chan error)
	go func() {
		mux := http.NewServeMux()
		mux.Handle(gpuctlv1connect.NewGuestServiceHandler(v))
		over <- channel.Serve(ctx, channel.Port{Root: root}.Open, mux)
	}()
	g := NewGuests(GuestsConfig{Channels: v, Log: slog.New(slog.DiscardHandler)})
	v.t.Cleanup(func() {
		if err := g.Close(); err != nil {
			v.t.Error(err)
		}
		cancel()
		if err := <-over; err != nil {
			v.t.Error(err)
		}
	})
	return &Local{Whereabouts: Whereabouts{Name: "h1", Log: slog.New(slog.DiscardHandler)}, Guests: g}
}

// The sessions that the driver asks for are told of, whether their applications have ended or
// not, each once, and in no longer text than a host would write. Those of others are not.
func TestLostSessionsOfAVM(t *testing.T) {
	v := &lossyVM{t: t, list: &gpuctlv1.ListSessionsResponse{
		Sessions: []*gpuctlv1.Session{
			{Id: "s-1", Command: "x264", State: gpuctlv1.SessionState_SESSION_STATE_LOST, Message: "executor has ended"},
			{Id: "s-2", State: gpuctlv1.SessionState_SESSION_STATE_RUNNING},
			{Id: "s-3", State: gpuctlv1.SessionState_SESSION_STATE_LOST, Message: "an older gpuguest tells of it here alone"},
		},
		Lost: []*gpuctlv1.LostSession{
			{Id: "s-0", Reason: "before the migration"},
			{Id: "s-1", Command: "x264", Reason: "executor has ended", LostUnixMs: 7},
			{Id: "s-4", Command: strings.Repeat("c", 1<<16), Reason: "a\x1b[31m\n" + strings.Repeat("r", 1<<16)},
			{Id: "s-4"},
		},
	}}
	l := v.serve()
	lost, err := l.Lost(t.Context(), "vm", []string{"s-1", "s-2", "s-3", "s-4", "s-5"})
	if err != nil || len(lost) != 3 {
		t.Fatalf("%v: %v", err, lost)
	}
	byID := map[string]*gpuctlv1.LostSession{}
	for _, s := range lost {
		byID[s.GetId()] = s
	}
	if s := byID["s-1"]; s.GetLostUnixMs() != 7 || s.GetReason() != "executor has ended" {
		t.Errorf("%v", s)
	}
	if s := byID["s-3"]; s.GetReason() != "an older gpuguest tells of it here alone" {
		t.Errorf("%v", s)
	}
	if s := byID["s-4"]; len(s.GetCommand()) > 100 || len(s.GetReason()) > 200 || strings.ContainsAny(s.GetReason(), "\x1b\n") {
		t.Errorf("%d, %q", len(s.GetCommand()), s.GetReason())
	}
}

// Steps are done without lost sessions: they keep no other from being frozen or thawed.
func TestStepsAreDoneWithoutLostSessions(t *testing.T) {
	v := &lossyVM{t: t, list: &gpuctlv1.ListSessionsResponse{Sessions: []*gpuctlv1.Session{
		{Id: "s-1", State: gpuctlv1.SessionState_SESSION_STATE_LOST}, {Id: "s-2", State: gpuctlv1.SessionState_SESSION_STATE_LOST},
	}}}
	l := v.serve()
	machine := &gpuctlv1.SiteMachine{Uuid: "vm"}
	report := func(uint64, uint64, string) {}
	if err := l.Freeze(t.Context(), &gpuctlv1.SiteSessionsRequest{Machine: machine, Sessions: []string{"s-1", "s-2"}, Away: []string{"s-2"}}, report); err != nil {
		t.Errorf("freeze: %v", err)
	}
	if err := l.Deposit(t.Context(), &gpuctlv1.SiteSessionsRequest{Machine: machine, Sessions: []string{"s-1", "s-2"}, To: "h2"}, report); err != nil {
		t.Errorf("deposit: %v", err)
	}
}

// A driver that was replaced while it froze sessions freezes no more of them: the next one may have
// thawed all and ended the migration, and nobody would thaw those that come after it.
func TestReplacedDriverFreezesNoMoreSessions(t *testing.T) {
	v := &lossyVM{t: t, list: &gpuctlv1.ListSessionsResponse{}}
	r := &gpuctlv1.SiteSessionsRequest{Machine: &gpuctlv1.SiteMachine{Uuid: "vm", Migration: "m-1", Token: 7}}
	for i := range mostAtOnce + 4 {
		id := fmt.Sprint("s-", i)
		v.list.Sessions = append(v.list.Sessions, &gpuctlv1.Session{Id: id, State: gpuctlv1.SessionState_SESSION_STATE_RUNNING})
		r.Sessions = append(r.Sessions, id)
	}
	began, goOn := make(chan string, len(r.Sessions)), make(chan struct{})
	v.suspend = func(session string) {
		began <- session
		<-goOn
	}
	l := v.serve()
	var err error
	if l.Fence, err = OpenFence(filepath.Join(t.TempDir(), "tokens.json"), func() string { return "c" }); err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() {
		over <- (&Service{l}).step(r.GetMachine(), func() error { return l.Freeze(t.Context(), r, func(uint64, uint64, string) {}) })
	}()
	for range mostAtOnce {
		<-began
	}
	if err := l.Fence.Admit(&gpuctlv1.SiteMachine{Uuid: "vm", Migration: "m-1", Token: 8}); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	if err := <-over; !errors.Is(err, migrate.ErrStale) {
		t.Errorf("%v", err)
	}
	if len(began) > 0 {
		t.Errorf("%d more were frozen", len(began))
	}
}
