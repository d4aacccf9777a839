package endpoint

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// cudaGuest is a VM's gpuguest with sessions of which some rehearse.
type cudaGuest struct {
	gpuctlv1connect.UnimplementedGuestServiceHandler

	sessions []*gpuctlv1.Session
	refused  []*gpuctlv1.AdoptRefusal
	results  map[string]*gpuctlv1.SwapResult
	asked    []string
}

func (g *cudaGuest) Adopt(context.Context, *connect.Request[gpuctlv1.AdoptRequest]) (*connect.Response[gpuctlv1.AdoptResponse], error) {
	return connect.NewResponse(&gpuctlv1.AdoptResponse{Sessions: g.sessions, Refused: g.refused}), nil
}

func (g *cudaGuest) ListSessions(context.Context, *connect.Request[gpuctlv1.ListSessionsRequest]) (*connect.Response[gpuctlv1.ListSessionsResponse], error) {
	return connect.NewResponse(&gpuctlv1.ListSessionsResponse{Sessions: g.sessions}), nil
}

func (g *cudaGuest) Swap(_ context.Context, r *connect.Request[gpuctlv1.SwapRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	if !r.Msg.GetRehearse() || r.Msg.GetTarget() != nil || r.Msg.GetFreezeTimeoutMs() != 7000 {
		return connect.NewError(connect.CodeInvalidArgument, nil)
	}
	g.asked = append(g.asked, r.Msg.GetSession())
	if err := out.Send(&gpuctlv1.Progress{Step: "lock"}); err != nil {
		return err
	}
	if res := g.results[r.Msg.GetSession()]; res != nil {
		return out.Send(&gpuctlv1.Progress{Result: res})
	}
	return nil // it goes away
}

// hostOf returns a host with a VM in which these answer.
func hostOf(t *testing.T, agent gpuctlv1connect.AgentServiceHandler, guest *cudaGuest) *Local {
	t.Helper()
	console, root := channeltest.New(t), t.TempDir()
	console.Root(root, channel.Name)
	mux := http.NewServeMux()
	mux.Handle(gpuctlv1connect.NewAgentServiceHandler(agent))
	mux.Handle(gpuctlv1connect.NewGuestServiceHandler(guest))
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	over := make(chan error)
	go func() { over <- channel.Serve(ctx, channel.Port{Root: root}.Open, mux) }()
	l := &Local{Whereabouts: Whereabouts{Name: "h1", Log: slog.New(slog.DiscardHandler)}}
	l.Guests = NewGuests(GuestsConfig{Channels: &guestAgent{console: console}, Log: l.Log})
	t.Cleanup(func() {
		err := l.Guests.Close()
		cancel()
		if err := errors.Join(err, <-over); err != nil {
			t.Error(err)
		}
	})
	return l
}

// A rehearsal of a VM is of its CUDA sessions that run, one after the other. What is against it is
// found before any of them is asked.
func TestRehearsalOfAVM(t *testing.T) {
	session := func(id, engine string, state gpuctlv1.SessionState) *gpuctlv1.Session {
		return &gpuctlv1.Session{Id: id, Command: "train", Engine: engine, State: state, Target: &gpuctlv1.Target{Gpu: "vm/0000:00:05.0", Model: "H100"}}
	}
	const runs, frozen, swapping = gpuctlv1.SessionState_SESSION_STATE_RUNNING, gpuctlv1.SessionState_SESSION_STATE_SUSPENDED, gpuctlv1.SessionState_SESSION_STATE_SWAPPING
	good := &gpuctlv1.SwapResult{Rehearsed: true, StoppedNs: 5}
	bad := &gpuctlv1.SwapResult{Refused: true, Reasons: []*gpuctlv1.Reason{{Code: "canary", Message: "it did not bear it"}}}
	all := []*gpuctlv1.Session{session("s-1", "portable", runs), session("d-1", driverEngine, runs), session("d-2", driverEngine, frozen), session("d-3", driverEngine, runs)}
	for _, c := range []struct {
		name     string
		guest    cudaGuest
		asked    string // sessions
		rejected string
		refused  string // words of the refusal
		fails    string // of another error
	}{
		{"two", cudaGuest{sessions: all, results: map[string]*gpuctlv1.SwapResult{"d-1": good, "d-3": good}}, "d-1 d-3", "", "", ""},
		{"one does not bear it", cudaGuest{sessions: all, results: map[string]*gpuctlv1.SwapResult{"d-1": bad, "d-3": good}}, "d-1 d-3", "vm/0000:00:05.0 H100 it did not bear it", "", ""},
		{"none", cudaGuest{sessions: all[:1]}, "", "", "no CUDA program computes in it", ""},
		{"a process that can't be a session", cudaGuest{sessions: all, refused: []*gpuctlv1.AdoptRefusal{{Pid: 7, Command: "mps", Reasons: bad.GetReasons()}}}, "", "", "process 7 (mps) uses CUDA and can't be moved: it did not bear it", ""},
		{"one that changes", cudaGuest{sessions: []*gpuctlv1.Session{all[1], session("d-4", driverEngine, swapping)}}, "", "", "session d-4 (train): ", ""},
		{"gpuguest goes away", cudaGuest{sessions: all, results: map[string]*gpuctlv1.SwapResult{"d-3": good}}, "d-1", "", "", "session d-1 (train): its gpuguest went away"},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := hostOf(t, &guestAgent{}, &c.guest)
			rejected := ""
			results := 0
			err := l.Rehearse(t.Context(), "u-1", "web", 7*time.Second, func(u *gpuctlv1.OperationUpdate) error {
				if u.GetProgress().GetResult() != nil {
					results++
				}
				for _, r := range u.GetRejected() {
					rejected += r.GetGpu() + " " + r.GetModel() + " " + r.GetReasons()[0].GetMessage()
				}
				return nil
			})
			if got := strings.Join(c.guest.asked, " "); got != c.asked || rejected != c.rejected {
				t.Errorf("asked %s, rejected %s", got, rejected)
			}
			switch {
			case c.refused != "":
				if !reason.Is(err, reason.Refused) || !strings.Contains(err.Error(), "vm web: ") || !strings.Contains(err.Error(), c.refused) {
					t.Errorf("%v", err)
				}
			case c.fails != "":
				if err == nil || !strings.Contains(err.Error(), c.fails) {
					t.Errorf("%v", err)
				}
			default:
				if want := slices.Compact(strings.Fields(c.asked)); err != nil || results != len(want) {
					t.Errorf("%d results, %v", results, err)
				}
			}
		})
	}
}
