package sessions

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/guesttest"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// lister is a client of gpuguest whose lists of sessions wait: each is what it was when it was
// asked for.
type lister struct {
	gpuctlv1connect.GuestServiceClient
	guest *guesttest.Guest

	asked chan chan struct{} // gets a channel for each list, which goes on when that is closed
}

func (l lister) ListSessions(ctx context.Context, r *connect.Request[gpuctlv1.ListSessionsRequest]) (*connect.Response[gpuctlv1.ListSessionsResponse], error) {
	res, err := l.guest.ListSessions(ctx, r)
	let := make(chan struct{})
	select {
	case l.asked <- let:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case <-let:
		return res, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l lister) Withdraw(ctx context.Context, r *connect.Request[gpuctlv1.WithdrawRequest]) (*connect.Response[gpuctlv1.WithdrawResponse], error) {
	return l.guest.Withdraw(ctx, r)
}

// newLister returns a host that has not been started, and its guest.
func newLister(t *testing.T) (*Host, lister) {
	t.Helper()
	f := newFixture(t, filepath.Join(t.TempDir(), "other.json")) // for its cluster
	t.Cleanup(f.close)
	l := lister{guest: guesttest.New(), asked: make(chan chan struct{})}
	h, err := NewHost(t.Context(), HostConfig{
		Guest: l, Cluster: f.node, StateFile: filepath.Join(t.TempDir(), "state.json"),
		Root: fstest.MapFS{"proc": {Mode: fs.ModeDir}}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	return h, l
}

// offer makes an offer for a claim.
func (l lister) offer(t *testing.T, token string) {
	t.Helper()
	if _, err := l.guest.Offer(t.Context(), connect.NewRequest(&gpuctlv1.OfferRequest{Token: token, Claim: "c-" + token, Target: &gpuctlv1.Target{
		Gpu: "big", Runtime: &gpuctlv1.Runtime{Library: "/lib.so", Devices: []uint32{0}}, Limits: &gpuctlv1.Limits{GlobalMemory: 1 << 30},
	}})); err != nil {
		t.Fatal(err)
	}
}

// begin begins a session of a claim of its own.
func (l lister) begin(t *testing.T, token string) string {
	t.Helper()
	l.offer(t, token)
	id, err := l.guest.Begin(token, 1, "x", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// Many claims end at once, and each asks which sessions are left. One list tells all of them,
// but none of those that have asked after it began.
func TestOneListServesAllWhoAskedBeforeItBegan(t *testing.T) {
	h, l := newLister(t)
	synctest.Test(t, func(t *testing.T) {
		l.asked = make(chan chan struct{})
		h.Guest, h.listing = l, make(chan struct{}, 1)
		ctx, stop := context.WithCancel(t.Context())
		var all sync.WaitGroup
		defer all.Wait()
		defer stop() // if it has failed
		resync := func(ctx context.Context, sessions int, want error) {
			all.Go(func() {
				if err := h.Resync(ctx); (err == nil) != (want == nil) {
					t.Errorf("%v, want %v", err, want)
				}
				if n := len(h.Sessions()); want == nil && n != sessions {
					t.Errorf("%d sessions, want %d", n, sessions)
				}
			})
			synctest.Wait()
		}
		resync(ctx, 0, nil)
		first := <-l.asked
		l.begin(t, "a")
		leaves, leave := context.WithCancel(ctx)
		resync(leaves, 1, context.Canceled) // it would make the next list
		for range 200 {
			resync(ctx, 1, nil)
		}
		leave()
		synctest.Wait()
		select {
		case <-l.asked:
			t.Fatal("lists are made at the same time")
		default:
		}
		close(first)
		close(<-l.asked)
		synctest.Wait()
		select {
		case <-l.asked:
			t.Error("there is a third list")
		default:
		}
	})
}

// The processes of many claims have died together.
func TestOneListIsMadeForAllClaimsOfDeadProcesses(t *testing.T) {
	h, l := newLister(t)
	for _, token := range []string{"a", "b", "c"} {
		h.claims["c-"+token] = &claim{ID: "c-" + token, Token: token, Offered: []string{"big"}, Holder: holder{PID: 1 << 30}}
		l.offer(t, token)
	}
	id := l.begin(t, "a")
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.releaseOrphans(t.Context())
	}()
	let := <-l.asked
	if left := l.guest.Offered(); len(left) > 0 {
		t.Fatalf("offered while sessions are listed: %v", left)
	}
	close(let)
	<-done
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.claims) != 1 || h.claims["c-a"] == nil || h.sessions[id] == nil {
		t.Errorf("only the claim of the session is left: %v", h.claims)
	}
}

func TestWhatKeepsAnOfferFromBeingWithdrawnIsSaidOnce(t *testing.T) {
	h, l := newLister(t)
	var out testkit.Log
	h.Log = slog.New(slog.NewTextHandler(&out, nil))
	c := &claim{ID: "c-a", Token: "a", Offered: []string{"big"}, Released: true}
	h.claims[c.ID] = c
	g := &stuck{lister: l}
	h.Guest = g
	for _, step := range []struct {
		err  error
		says string // empty: nothing
	}{
		{errors.New("no memory"), "no memory"},
		{errors.New("no memory"), ""},
		{errors.New("too busy"), "too busy"},
		{errors.New("too busy"), ""},
		{errors.New("no memory"), "no memory"},
		{nil, "offer withdrawn"},
		{nil, ""},
		{errors.New("no memory"), "no memory"},
	} {
		g.err = step.err
		c.offering.Lock()
		h.withdraw(t.Context(), c)
		c.offering.Unlock()
		if got := out.Take(); !strings.Contains(got, step.says) || (got == "") != (step.says == "") {
			t.Errorf("%v: %q is logged, want %q", step.err, got, step.says)
		}
	}
}

// stuck is a guest that may withdraw no offer.
type stuck struct {
	lister
	err error
}

func (s *stuck) Withdraw(ctx context.Context, r *connect.Request[gpuctlv1.WithdrawRequest]) (*connect.Response[gpuctlv1.WithdrawResponse], error) {
	if s.err != nil {
		return nil, s.err
	}
	return s.lister.Withdraw(ctx, r)
}

// A list of sessions that was asked for early and comes late brings no session back that has
// ended since.
func TestLateListRevivesNothing(t *testing.T) {
	h, l := newLister(t)
	id := l.begin(t, "a")
	late := make(chan error)
	go func() { late <- h.Resync(t.Context()) }()
	let := <-l.asked
	l.guest.End(id)
	h.handleUpdate(t.Context(), &gpuctlv1.Session{Id: id, Claim: "c-a", State: gpuctlv1.SessionState_SESSION_STATE_ENDED})
	close(let)
	if err := <-late; err != nil {
		t.Fatal(err)
	}
	if left := h.Sessions(); len(left) > 0 {
		t.Fatalf("revived: %v", left)
	}
}

// A list that was asked for before an operation began says that the session runs where it was.
func TestListFromBeforeAnOperationDoesNotEndTheDoubtAboutIt(t *testing.T) {
	h, l := newLister(t)
	id := l.begin(t, "a")
	var all sync.WaitGroup
	resync := func() chan struct{} {
		all.Go(func() {
			if err := h.Resync(t.Context()); err != nil {
				t.Error(err)
			}
		})
		return <-l.asked
	}
	close(resync())
	all.Wait()
	early := resync()
	op, _, _, err := h.begin(id, "migrate")
	if err != nil {
		t.Fatal(err)
	}
	h.doubt(op) // it asks for a list
	close(early)
	all.Wait()
	doubted := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.ops[id] == op
	}
	late := <-l.asked
	if !doubted() {
		t.Error("the early list has ended the doubt")
	}
	close(late)
	h.Wait()
	if doubted() {
		t.Error("the late list has not ended the doubt")
	}
}
