package service_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/service"
)

// fake is an engine whose sessions have its letter.
type fake struct {
	letter  string
	offers  map[string]string // claim by token
	changes chan *gpuctlv1.Session
	said    []string
}

func newFake(letter string) *fake {
	return &fake{letter: letter, offers: map[string]string{}, changes: make(chan *gpuctlv1.Session)}
}

func (f *fake) session(n string, began int64) *gpuctlv1.Session {
	return &gpuctlv1.Session{Id: f.letter + n, StartedUnixMs: began}
}

func (f *fake) Has(id string) bool { return strings.HasPrefix(id, f.letter) }

func (f *fake) List(context.Context) []*gpuctlv1.Session {
	if f.letter == "p" {
		return []*gpuctlv1.Session{f.session("1", 1), f.session("2", 3)}
	}
	return []*gpuctlv1.Session{f.session("1", 2)}
}

func (f *fake) Lost() []*gpuctlv1.LostSession {
	return []*gpuctlv1.LostSession{{Id: f.letter + "0", Reason: "why"}}
}

func (f *fake) Watch(ctx context.Context, send func(*gpuctlv1.Session) error) error {
	for {
		select {
		case s, ok := <-f.changes:
			if !ok {
				return errors.New("the engine ends")
			}
			if err := send(s); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (f *fake) Serves(t *gpuctlv1.Target) bool {
	if f.letter == "p" {
		return t.GetRuntime() != nil
	}
	return len(t.GetDriver()) > 0
}

func (f *fake) Offer(_ context.Context, o *gpuctlv1.OfferRequest) error {
	f.offers[o.GetToken()] = o.GetClaim()
	return nil
}

func (f *fake) Withdraw(_ context.Context, token string) error {
	delete(f.offers, token)
	return nil
}

func (f *fake) Plan(_ context.Context, req *gpuctlv1.PlanRequest) (*gpuctlv1.PlanResponse, error) {
	return &gpuctlv1.PlanResponse{Steps: []string{f.letter}}, nil
}

func (f *fake) run(sink func(*gpuctlv1.Progress), what string) (*gpuctlv1.SwapResult, error) {
	f.said = append(f.said, what)
	sink(&gpuctlv1.Progress{Step: what})
	return &gpuctlv1.SwapResult{TotalNs: 7}, nil
}

func (f *fake) Swap(_ context.Context, _ *gpuctlv1.SwapRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	return f.run(sink, "swap")
}

func (f *fake) Suspend(_ context.Context, _ *gpuctlv1.SuspendRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	return f.run(sink, "suspend")
}

func (f *fake) Resume(_ context.Context, _ *gpuctlv1.ResumeRequest, sink func(*gpuctlv1.Progress)) (*gpuctlv1.SwapResult, error) {
	return f.run(sink, "resume")
}

// adopting is an engine that can adopt.
type adopting struct{ *fake }

func (a adopting) Adopt(_ context.Context, req *gpuctlv1.AdoptRequest) (*gpuctlv1.AdoptResponse, error) {
	return &gpuctlv1.AdoptResponse{Sessions: []*gpuctlv1.Session{a.session("9", 9)}}, nil
}

func serve(t *testing.T, engines ...service.Engine) gpuctlv1connect.GuestServiceClient {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle(service.Handler(engines...))
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return gpuctlv1connect.NewGuestServiceClient(srv.Client(), srv.URL)
}

func TestSessionsOfAllEnginesAreListedOldestFirst(t *testing.T) {
	c := serve(t, newFake("p"), newFake("d"))
	res, err := c.ListSessions(t.Context(), connect.NewRequest(&gpuctlv1.ListSessionsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, s := range res.Msg.GetSessions() {
		ids = append(ids, s.GetId())
	}
	if !slices.Equal(ids, []string{"p1", "d1", "p2"}) {
		t.Error(ids)
	}
	if lost := res.Msg.GetLost(); len(lost) != 2 || lost[0].GetId() != "p0" || lost[1].GetId() != "d0" {
		t.Errorf("lost: %v", lost)
	}
}

func TestOperationGoesToTheEngineThatHasTheSession(t *testing.T) {
	p, d := newFake("p"), newFake("d")
	c := serve(t, p, d)
	st, err := c.Swap(t.Context(), connect.NewRequest(&gpuctlv1.SwapRequest{Session: "d1"}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var last *gpuctlv1.Progress
	for st.Receive() {
		last = st.Msg()
	}
	if st.Err() != nil || last.GetResult().GetTotalNs() != 7 || last.GetStep() != "swap" || !slices.Equal(d.said, []string{"swap"}) || p.said != nil {
		t.Errorf("%v %v, %v %v", st.Err(), last, d.said, p.said)
	}
	plan, err := c.Plan(t.Context(), connect.NewRequest(&gpuctlv1.PlanRequest{Session: "p2"}))
	if err != nil || plan.Msg.GetSteps()[0] != "p" {
		t.Errorf("%v %v", plan, err)
	}
	if _, err := c.Plan(t.Context(), connect.NewRequest(&gpuctlv1.PlanRequest{Session: "x"})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Error(err)
	}
	// Only portable sessions leave a VM.
	if _, err := c.KeptState(t.Context(), connect.NewRequest(&gpuctlv1.KeptStateRequest{Session: "d1"})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Error(err)
	}
}

func TestOfferGoesToTheEnginesThatCanUseItsTarget(t *testing.T) {
	p, d := newFake("p"), newFake("d")
	c := serve(t, p, d)
	offer := func(target *gpuctlv1.Target) error {
		_, err := c.Offer(t.Context(), connect.NewRequest(&gpuctlv1.OfferRequest{Token: "t", Claim: "c", Target: target}))
		return err
	}
	runtime, gpus := &gpuctlv1.Runtime{Library: "x"}, []*gpuctlv1.DriverGPU{{Uuid: "GPU-1"}}
	for _, want := range []struct {
		target *gpuctlv1.Target
		p, d   int
	}{
		{&gpuctlv1.Target{Runtime: runtime, Driver: gpus}, 1, 1},
		{&gpuctlv1.Target{Runtime: runtime}, 1, 0}, // the driver's offer has gone
		{&gpuctlv1.Target{Driver: gpus}, 0, 1},
	} {
		if err := offer(want.target); err != nil || len(p.offers) != want.p || len(d.offers) != want.d {
			t.Errorf("%v: %v, offers %v %v", want.target, err, p.offers, d.offers)
		}
	}
	if err := offer(&gpuctlv1.Target{}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Error(err)
	}
	if _, err := c.Withdraw(t.Context(), connect.NewRequest(&gpuctlv1.WithdrawRequest{Token: "t"})); err != nil || len(p.offers)+len(d.offers) != 0 {
		t.Error(err, p.offers, d.offers)
	}
}

func TestWatchHasTheChangesOfAllEnginesAndEndsWithOne(t *testing.T) {
	p, d := newFake("p"), newFake("d")
	c := serve(t, p, d)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() {
		for range 3 {
			p.changes <- p.session("1", 1)
			d.changes <- d.session("1", 1)
		}
		close(d.changes)
	}()
	st, err := c.WatchSessions(ctx, connect.NewRequest(&gpuctlv1.WatchSessionsRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	seen := map[string]int{}
	for st.Receive() {
		seen[st.Msg().GetId()]++
	}
	if st.Err() == nil || ctx.Err() != nil || seen["p1"] != 3 || seen["d1"] != 3 {
		t.Errorf("%v, seen %v", st.Err(), seen)
	}
}

func TestAdoptNeedsAnEngineThatAdoptsAndOneThingToAdopt(t *testing.T) {
	adopt := func(c gpuctlv1connect.GuestServiceClient, req *gpuctlv1.AdoptRequest) (*gpuctlv1.AdoptResponse, error) {
		res, err := c.Adopt(t.Context(), connect.NewRequest(req))
		if err != nil {
			return nil, err
		}
		return res.Msg, nil
	}
	c := serve(t, newFake("p"), adopting{newFake("d")})
	if res, err := adopt(c, &gpuctlv1.AdoptRequest{Pid: 5}); err != nil || res.GetSessions()[0].GetId() != "d9" {
		t.Errorf("%v %v", res, err)
	}
	for _, bad := range []*gpuctlv1.AdoptRequest{{}, {Pid: 5, All: true}} {
		if _, err := adopt(c, bad); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if _, err := adopt(serve(t, newFake("p")), &gpuctlv1.AdoptRequest{All: true}); connect.CodeOf(err) != connect.CodeUnimplemented {
		t.Error(err)
	}
}

// keeping is an engine that has sessions in folders.
type keeping struct{ *fake }

func (keeping) Folders() {}

func TestFolderGoesToTheEngineThatHasFolders(t *testing.T) {
	p, d := newFake("p"), newFake("d")
	c := serve(t, p, keeping{d})
	for _, req := range []*gpuctlv1.PlanRequest{{Folder: "/f"}, {Folder: "/f", Session: "d1"}} {
		if plan, err := c.Plan(t.Context(), connect.NewRequest(req)); err != nil || plan.Msg.GetSteps()[0] != "d" {
			t.Errorf("%v: %v %v", req, plan, err)
		}
	}
	// The state of an OpenCL session is not written to a path that was meant for processes.
	st, err := c.Suspend(t.Context(), connect.NewRequest(&gpuctlv1.SuspendRequest{Session: "p1", File: "/f", WithProcess: true}))
	if err == nil {
		for st.Receive() {
		}
		err = st.Err()
		_ = st.Close()
	}
	if connect.CodeOf(err) != connect.CodeFailedPrecondition || p.said != nil {
		t.Errorf("%v, %v", err, p.said)
	}
	none := serve(t, newFake("p"))
	if _, err := none.Plan(t.Context(), connect.NewRequest(&gpuctlv1.PlanRequest{Folder: "/f"})); connect.CodeOf(err) != connect.CodeUnimplemented {
		t.Errorf("%v", err)
	}
}
