package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/guest/vm/channel"
	"github.com/gpuctl/gpuctl/guest/vm/channel/channeltest"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

const (
	lender  = "h3"
	farHere = lender + "/far"
)

var lentVM = vm.VM{UUID: "11111111-2222-4333-8444-555555555555", Name: "web"}

// granter is a host that has a lasting claim of one VM.
type granter struct {
	mu     sync.Mutex
	host   string // of the VM; empty: there is no claim
	grants []Grant
	leases []*clusterv1.LendRequest
	ended  []string
}

func (g *granter) GrantVM(_ context.Context, _ vm.VM, x Grant) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.grants, g.host = append(g.grants, x), x.Host
	return nil
}

func (g *granter) VMHost(m vm.VM, claim string) (string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.host == "" || m.UUID != lentVM.UUID || claim != LastingClaim(m.UUID) {
		return "", errors.New("no such claim")
	}
	return g.host, nil
}

func (g *granter) FollowVM(_ vm.VM, _, host string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.host = host
	return nil
}

func (g *granter) EndLeasesVM(_ context.Context, _ vm.VM, claim, why string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ended = append(g.ended, claim+": "+why)
	return nil
}

func (g *granter) LendVM(context.Context, vm.VM, string, string, string) error {
	return errors.New("not for a migration")
}

func (g *granter) EndLendVM(context.Context, vm.VM, string) error { return nil }

func (g *granter) LeaseVM(_ context.Context, _ vm.VM, r *clusterv1.LendRequest) (*clusterv1.LendResponse, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leases = append(g.leases, r)
	return &clusterv1.LendResponse{Token: []byte("token"), CertificateSha256: make([]byte, 32), Addresses: []string{"h3:1"}, Model: "Far"}, nil
}

func (g *granter) made() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.leases)
}

// whereabouts is a host that says whether it has a VM.
type whereabouts struct {
	gpuctlv1connect.UnimplementedSiteServiceHandler

	presence string
	fails    bool
}

func (w *whereabouts) Where(context.Context, *connect.Request[gpuctlv1.SiteMachine]) (*connect.Response[gpuctlv1.SiteWhereResponse], error) {
	if w.fails {
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("it is down"))
	}
	return connect.NewResponse(&gpuctlv1.SiteWhereResponse{Presence: w.presence}), nil
}

// called serves a host to callers of the name that caller has.
func called(t *testing.T, caller *string, handle func(*http.ServeMux)) gpuctlv1connect.SiteServiceClient {
	t.Helper()
	mux := http.NewServeMux()
	handle(mux)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mux.ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), access.Caller{Kind: access.Host, Host: *caller})))
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(func() {
		srv.Client().CloseIdleConnections()
		srv.Close()
	})
	return gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL)
}

// lendingRig is the host h3, which lends to a VM that was on h1, and what h1 says of it.
type lendingRig struct {
	caller  string
	grants  *granter
	former  *whereabouts
	local   *Local
	service gpuctlv1connect.SiteServiceClient
}

func newLendingRig(t *testing.T) *lendingRig {
	t.Helper()
	r := &lendingRig{caller: "h1", grants: &granter{host: "h1"}, former: &whereabouts{presence: migrate.Running.String()}}
	h1 := called(t, &r.caller, func(mux *http.ServeMux) { mux.Handle(gpuctlv1connect.NewSiteServiceHandler(r.former)) })
	r.local = &Local{
		Whereabouts: Whereabouts{
			Name: lender, Member: func(host string) bool { return host != "removed" }, Log: slog.New(slog.DiscardHandler),
			Peer: func(host string) (gpuctlv1connect.SiteServiceClient, error) { return h1, nil },
		},
		Lender: r.grants, Grants: r.grants, Borrows: func(*gpuctlv1.SiteMachine, string, string, string) error { return errors.New("no migration") },
	}
	r.service = called(t, &r.caller, func(mux *http.ServeMux) { r.local.Handle(mux) })
	return r
}

func (r *lendingRig) lease(m *gpuctlv1.SiteMachine, claim string) error {
	_, err := r.service.Lease(context.Background(), connect.NewRequest(&gpuctlv1.SiteLeaseRequest{
		Machine: m, Gpu: farHere, Claim: claim, Lease: "l-1", CertificateSha256: make([]byte, 32), OutageMs: 1000,
	}))
	return err
}

// A host gets leases for a VM that has a claim only if the VM is there: it is where it was,
// or its former host says that it is gone, does not exist any more, or does not answer and the log
// says that it was moved. A VM that runs twice loses what computes for it.
func TestLeasesFollowAVMToItsHost(t *testing.T) {
	web, claim := &gpuctlv1.SiteMachine{Uuid: lentVM.UUID, Name: lentVM.Name}, LastingClaim(lentVM.UUID)
	for name, c := range map[string]struct {
		caller string
		set    func(*lendingRig)
		ok     bool
		ended  bool
	}{
		"its host":                      {"h1", func(*lendingRig) {}, true, false},
		"another, while it runs":        {"h2", func(*lendingRig) {}, false, true},
		"another, while it moves":       {"h2", func(r *lendingRig) { r.former.presence = "moving" }, false, false},
		"another, after it has gone":    {"h2", func(r *lendingRig) { r.former.presence = "absent" }, true, false},
		"another, after it was stopped": {"h2", func(r *lendingRig) { r.former.presence = "stopped" }, true, false},
		"another, nobody answers":       {"h2", func(r *lendingRig) { r.former.fails = true }, false, false},
		"another, and the log says so": {"h2", func(r *lendingRig) {
			r.former.fails = true
			r.local.MovedTo = func(string) string { return "h2" }
		}, true, false},
		"a third, and the log says h2": {"h3", func(r *lendingRig) {
			r.former.fails = true
			r.local.MovedTo = func(string) string { return "h2" }
		}, false, false},
		"its host was removed": {"h2", func(r *lendingRig) { r.grants.host = "removed" }, true, false},
		"no claim":             {"h1", func(r *lendingRig) { r.grants.host = "" }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newLendingRig(t)
			c.set(r)
			r.caller = c.caller
			err := r.lease(web, claim)
			if (err == nil) != c.ok || r.grants.made() != map[bool]int{true: 1}[c.ok] {
				t.Errorf("%v, %d leases", err, r.grants.made())
			}
			if c.ok && r.grants.host != c.caller {
				t.Errorf("it is on %s", r.grants.host)
			}
			if len(r.grants.ended) > 0 != c.ended {
				t.Errorf("ended: %v", r.grants.ended)
			}
		})
	}
}

// A claim of a migration is no lasting one, and the other way round, whoever asks for what.
func TestLastingClaimsAreNoneOfMigrations(t *testing.T) {
	r := newLendingRig(t)
	moving, web := &gpuctlv1.SiteMachine{Uuid: lentVM.UUID, Migration: "m-1", Token: 1}, &gpuctlv1.SiteMachine{Uuid: lentVM.UUID, Name: "web"}
	claim := LastingClaim(lentVM.UUID)
	lend := func(m *gpuctlv1.SiteMachine, gpu, claim string) error {
		_, err := r.service.Lend(t.Context(), connect.NewRequest(&gpuctlv1.SiteLendRequest{Machine: m, Gpu: gpu, Claim: claim, MinMemory: 7, Persistent: true}))
		return err
	}
	end := func(m *gpuctlv1.SiteMachine, claim string) error {
		_, err := r.service.EndLend(t.Context(), connect.NewRequest(&gpuctlv1.SiteLendRequest{Machine: m, Gpu: farHere, Claim: claim}))
		return err
	}
	for what, err := range map[string]error{
		"a lasting claim for a migration":     lend(moving, farHere, claim),
		"a migration's claim for ever":        lend(web, farHere, "vm-1"),
		"another VM's claim":                  lend(web, farHere, LastingClaim("11111111-2222-4333-8444-555555555556")),
		"a GPU of another host":               lend(web, "h2/far", claim),
		"a VM without a UUID":                 lend(&gpuctlv1.SiteMachine{Uuid: "x"}, farHere, LastingClaim("x")),
		"a lease for a migration":             r.lease(moving, claim),
		"a lease by a migration's claim":      r.lease(web, "vm-1"),
		"the end of a migration's claim":      end(web, "vm-1"),
		"the end of a claim, by a migration":  end(moving, claim),
		"a lease by the claim of nobody's VM": r.lease(&gpuctlv1.SiteMachine{Uuid: "11111111-2222-4333-8444-555555555556"}, LastingClaim("11111111-2222-4333-8444-555555555556")),
	} {
		if err == nil {
			t.Errorf("%s: it is done", what)
		}
	}
	if len(r.grants.grants) > 0 || r.grants.made() > 0 {
		t.Fatalf("%v %v", r.grants.grants, r.grants.leases)
	}
	if err := errors.Join(lend(web, farHere, claim), end(web, claim)); err != nil {
		t.Error(err)
	}
	if want := (Grant{GPU: "far", Claim: claim, Host: "h1", MinMemory: 7, Persistent: true}); !slices.Equal(r.grants.grants, []Grant{want}) {
		t.Errorf("%v", r.grants.grants)
	}
}

// hostileAgent is a VM that asks for leases as it likes.
type hostileAgent struct {
	gpuctlv1connect.UnimplementedAgentServiceHandler

	console *channeltest.Console
	says    chan []*gpuctlv1.LeaseWish
	gets    chan *gpuctlv1.GrantRequest
}

func (v *hostileAgent) Channel(context.Context, string) (string, error) {
	return v.console.Socket(), nil
}

func (v *hostileAgent) Borrow(ctx context.Context, _ *connect.Request[gpuctlv1.BorrowRequest], st *connect.ServerStream[gpuctlv1.BorrowResponse]) error {
	for {
		select {
		case w := <-v.says:
			if err := st.Send(&gpuctlv1.BorrowResponse{Wishes: w}); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (v *hostileAgent) Grant(_ context.Context, r *connect.Request[gpuctlv1.GrantRequest]) (*connect.Response[gpuctlv1.GrantResponse], error) {
	v.gets <- r.Msg
	return connect.NewResponse(&gpuctlv1.GrantResponse{}), nil
}

// A VM gets leases by its own claim only, a limited number at a time, and what it asks for
// beside that is refused and logged.
func TestHostileVMsAskForLeases(t *testing.T) {
	r := newLendingRig(t)
	v := &hostileAgent{console: channeltest.New(t), says: make(chan []*gpuctlv1.LeaseWish), gets: make(chan *gpuctlv1.GrantRequest, 1000)}
	root := t.TempDir()
	v.console.Root(root, channel.Name)
	var work sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer work.Wait()
	defer cancel()
	work.Go(func() {
		_, handler := gpuctlv1connect.NewAgentServiceHandler(v)
		if err := channel.Serve(ctx, channel.Port{Root: root}.Open, handler); err != nil {
			t.Error(err)
		}
	})
	log := &testkit.Log{}
	host := &Local{Whereabouts: Whereabouts{Name: "h1", Log: slog.New(slog.NewTextHandler(log, nil)), Peer: func(string) (gpuctlv1connect.SiteServiceClient, error) { return r.service, nil }}}
	host.Guests = NewGuests(GuestsConfig{Channels: v, Log: slog.New(slog.DiscardHandler)})
	defer host.Guests.Close()
	told := make(chan struct{})
	work.Go(func() {
		err := host.ServeRemote(ctx, lentVM, Lent{GPU: farHere, Claim: LastingClaim(lentVM.UUID), Model: "Far"}, func() { close(told) })
		if ctx.Err() == nil {
			t.Errorf("it has ended: %v", err)
		}
	})
	good := &gpuctlv1.LeaseWish{Session: "s-1", Claim: LastingClaim(lentVM.UUID)}
	v.says <- []*gpuctlv1.LeaseWish{
		nil,
		{},
		{Session: strings.Repeat("x", 49), Claim: good.GetClaim()},
		{Session: "s-2", Claim: LastingClaim("11111111-2222-4333-8444-555555555556")},
		{Session: "s-3", Claim: "vm-1"},
		good, good,
	}
	<-told
	got := map[string]*gpuctlv1.GrantRequest{}
	for range 3 {
		g := <-v.gets
		got[g.GetSession()] = g
	}
	if g := got["s-1"]; g.GetError() != "" || string(g.GetTarget().GetRuntime().GetRemote().GetToken()) != "token" || g.GetTarget().GetGpu() != farHere {
		t.Errorf("its own: %v", g)
	}
	for _, id := range []string{"s-2", "s-3"} {
		if g := got[id]; g.GetTarget() != nil || !strings.Contains(g.GetError(), "has no claim") {
			t.Errorf("%s: %v", id, g)
		}
		if !strings.Contains(log.String(), "session="+id) {
			t.Errorf("%s is not in the log: %s", id, log)
		}
	}
	if n := r.grants.made(); n != 1 {
		t.Errorf("%d leases", n)
	}
	// Very many at once: no more than a few are answered until those have kept their places
	// for a while.
	var many []*gpuctlv1.LeaseWish
	for i := range 5000 {
		many = append(many, &gpuctlv1.LeaseWish{Session: fmt.Sprint("m-", i), Claim: "none"})
	}
	v.says <- many
	v.says <- nil // it has been read
	for range mostWishes - 2 {
		<-v.gets
	}
	if n := len(v.gets); n > 2 {
		t.Errorf("%d more were answered at once", n)
	}
}
