package sessions

import (
	"context"
	"errors"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/guesttest"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/hostd/servicevm"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

// fakeServers is one service VM with one GPU of 2 GiB.
type fakeServers struct {
	guest  *guesttest.Guest
	client gpuctlv1connect.GuestServiceClient

	mu     sync.Mutex
	why    string // against its GPU
	silent bool   // nobody answers there
	ended  bool   // libvirt says that the VM has ended
	lies   func(*gpuctlv1.LendResponse)
}

var svc = vm.VM{UUID: "u-svc", Name: "svc"}

const served = "vm-svc"

func (s *fakeServers) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *fakeServers) GPUs() []servicevm.GPU {
	s.mu.Lock()
	defer s.mu.Unlock()
	return []servicevm.GPU{{Name: served, VM: svc, Present: !s.ended, Why: s.why, Addresses: []string{"192.0.2.7:7651"}, Target: &gpuctlv1.Target{
		Model: "A10", Runtime: &gpuctlv1.Runtime{Library: "/vm.so"}, Limits: &gpuctlv1.Limits{GlobalMemory: 2 << 30, MaxAlloc: 1 << 30},
	}}}
}

func (s *fakeServers) Client(_ context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.silent || s.ended || uuid != svc.UUID {
		return nil, errors.New("no gpuguest answers")
	}
	return &lyingClient{s.client, s}, nil
}

func (s *fakeServers) Ended(context.Context, string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

// lyingClient changes what the VM answers.
type lyingClient struct {
	gpuctlv1connect.GuestServiceClient
	of *fakeServers
}

func (c *lyingClient) Lend(ctx context.Context, r *connect.Request[gpuctlv1.LendRequest]) (*connect.Response[gpuctlv1.LendResponse], error) {
	res, err := c.GuestServiceClient.Lend(ctx, r)
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if err == nil && c.of.lies != nil {
		c.of.lies(res.Msg)
	}
	return res, err
}

// newServed is a host that lends, with a service VM.
func newServed(t *testing.T, with ...func(*HostConfig)) (*lender, *fakeServers) {
	t.Helper()
	s := &fakeServers{guest: guesttest.New()}
	front := httptest.NewServer(s.guest.Handler())
	s.client = gpuctlv1connect.NewGuestServiceClient(front.Client(), front.URL)
	t.Cleanup(func() {
		front.CloseClientConnections()
		front.Close()
	})
	l := newLender(t, append([]func(*HostConfig){func(c *HostConfig) { c.Servers = s }}, with...)...)
	l.settled()
	return l, s
}

// settled waits until the service VM may be used, and the cluster knows it.
func (l *lender) settled() {
	l.t.Helper()
	testkit.Until(l.t, "what computes in the service VM is known", func() error {
		l.host.mu.Lock()
		clean := l.host.clean[svc.UUID]
		l.host.mu.Unlock()
		g := l.node.View().GPU("here/" + served)
		return testkit.Want(clean && g.GetHealth() == clusterv1.Health_HEALTH_OK, g)
	})
}

func (l *lender) holds(claim string) bool {
	l.host.mu.Lock()
	defer l.host.mu.Unlock()
	_, ok := l.host.ledger.Holds(claim, served)
	return ok
}

// Sessions of other hosts have parts of it, in its own gpuguest; sessions of this host do not.
func TestAGPUOfAServiceVMIsForOthersOnly(t *testing.T) {
	l, s := newServed(t)
	token := l.assign("c", 1<<30, served)
	g := l.node.View().GPU("here/" + served)
	if g.GetServer() != "svc" || g.GetModel() != "A10" || !slices.Equal(g.GetKinds(), []string{"remote"}) || g.GetLimits().GetGlobalMemory() != 2<<30 {
		t.Fatalf("%v", g)
	}
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == '" + served + "'"}); c != nil {
		t.Errorf("a session of this host has it: %v", c)
	}
	res := l.lend(request("l1", "c", token, served))
	if !slices.Equal(res.GetAddresses(), []string{"192.0.2.7:7651"}) || l.host.Expects(res.GetToken()) || res.GetMemory() != 1<<30 {
		t.Errorf("%v", res)
	}
	if in := s.guest.Leases()["l1"]; in.GetRuntime().GetLibrary() != "/vm.so" || in.GetMemory() != 1<<30 || in.GetOwner() != "host:there" || len(l.guest.Leases()) > 0 {
		t.Errorf("%v, on the host %v", in, l.guest.Leases())
	}
	if own := l.owners()[served]; len(own) != 1 || own[0].GetHost() != "there" {
		t.Errorf("the inventory: %v", own)
	}
	// Its card has 2 GiB for all.
	if _, err := l.host.Lend(t.Context(), there, request("l2", "d", token, served)); err == nil {
		t.Error("lent without an assignment")
	}
	s.set(func() { s.why = "its card is being detached" })
	if _, err := l.host.Lend(t.Context(), there, request("l3", "c", token, served)); !reason.Is(err, reason.NotReady) || !errors.Is(err, migrate.ErrUnreachable) {
		t.Errorf("%v", err)
	}
	if err := l.host.EndLease(t.Context(), there, "l1"); err != nil || len(s.guest.Leases()) > 0 || l.holds("c") {
		t.Errorf("%v", err)
	}
}

// VMs share it by memory, and what computes there ends with their claims, or with the service.
func TestVMsShareAGPUOfAServiceVM(t *testing.T) {
	l, s := newServed(t, lends)
	db := vm.VM{UUID: "11111111-2222-4333-8444-555555555502", Name: "db"}
	web := vm.VM{UUID: "11111111-2222-4333-8444-555555555501", Name: "web"}
	for _, m := range []vm.VM{web, db} {
		if err := l.host.GrantVM(t.Context(), m, endpoint.Grant{GPU: served, Claim: endpoint.LastingClaim(m.UUID), Host: "here", MinMemory: 900 << 20}); err != nil {
			t.Fatal(err)
		}
		if _, err := l.host.LeaseVM(t.Context(), m, &clusterv1.LendRequest{
			Lease: "l-" + m.Name, Claim: endpoint.LastingClaim(m.UUID), Gpus: []string{"here/" + served}, CertificateSha256: make([]byte, 32),
		}); err != nil {
			t.Fatal(err)
		}
	}
	third := vm.VM{UUID: "11111111-2222-4333-8444-555555555503", Name: "third"}
	if err := l.host.GrantVM(t.Context(), third, endpoint.Grant{GPU: served, Claim: endpoint.LastingClaim(third.UUID), Host: "here", MinMemory: 900 << 20}); err == nil {
		t.Error("2.7 of 2 GiB are given away")
	}
	if n := len(s.guest.Leases()); n != 2 {
		t.Errorf("%d leases in the VM", n)
	}
	if users := l.host.GPUUsers([]string{served}); !slices.Equal(users, []string{"vm:db", "vm:web"}) {
		t.Errorf("%v", users)
	}
	if err := l.host.EndUsers(t.Context(), svc.UUID, []string{served}, "test"); err != nil {
		t.Error(err)
	}
	if users := l.host.GPUUsers([]string{served}); len(users)+len(s.guest.Leases()) > 0 {
		t.Errorf("%v", users)
	}
}

// Nobody knows what computes in a VM that does not answer. Its leases stay reserved, over a
// restart of hostd, until it answers or libvirt says that it has ended.
func TestASilentServiceVMKeepsItsLeases(t *testing.T) {
	l, s := newServed(t)
	token := l.assign("c", 1<<30, served)
	l.lend(request("l1", "c", token, served))
	late := l.assign("d", 1<<29, served) // before the cluster knows
	s.set(func() { s.silent = true })
	if err := l.host.EndLease(t.Context(), there, "l1"); err == nil || !l.holds("c") {
		t.Errorf("%v: it has ended, as far as anybody knows", err)
	}
	l.halt()
	l.start()
	if !l.holds("c") || !slices.Contains(l.host.GPUUsers([]string{served}), "host there") {
		t.Error("a restart of hostd gives its part away")
	}
	if _, err := l.host.Lend(t.Context(), there, request("l2", "d", late, served)); !reason.Is(err, reason.NotReady) {
		t.Errorf("lent beside what nobody knows: %v", err)
	}
	s.set(func() { s.ended = true })
	testkit.Until(t, "what has ended with the VM is given back", func() error { return testkit.Want(!l.holds("c")) })
}

// What a former hostd or another lender has started in the VM ends before anything is lent.
func TestStraysInAServiceVMEndFirst(t *testing.T) {
	l, s := newServed(t)
	s.set(func() { s.silent = true })
	testkit.Until(t, "it is not trusted any more", func() error {
		l.host.mu.Lock()
		defer l.host.mu.Unlock()
		return testkit.Want(!l.host.clean[svc.UUID])
	})
	if _, err := s.client.Lend(t.Context(), connect.NewRequest(&gpuctlv1.LendRequest{Lease: "stray", Runtime: &gpuctlv1.Runtime{Library: "/vm.so"}, PeerCertSha256: make([]byte, 32)})); err != nil {
		t.Fatal(err)
	}
	s.set(func() { s.silent = false })
	l.settled()
	if n := len(s.guest.Leases()); n > 0 {
		t.Errorf("%d strays are left", n)
	}
}

// What a service VM answers decides about its own sessions only.
func TestHostileAnswersOfAServiceVM(t *testing.T) {
	l, s := newServed(t)
	token := l.assign("c", 1<<30, served)
	for what, lie := range map[string]func(*gpuctlv1.LendResponse){
		"a short token": func(r *gpuctlv1.LendResponse) { r.Token = r.Token[1:] },
		"a long hash":   func(r *gpuctlv1.LendResponse) { r.CertSha256 = make([]byte, 4096) },
	} {
		s.set(func() { s.lies = lie })
		if _, err := l.host.Lend(t.Context(), there, request("l1", "c", token, served)); err == nil {
			t.Errorf("%s: it is lent", what)
		}
	}
	if len(s.guest.Leases()) > 0 || l.holds("c") {
		t.Error("something of it is left")
	}
	s.set(func() {
		s.lies = func(r *gpuctlv1.LendResponse) { r.Addresses = []string{"127.0.0.1:22", strings.Repeat("x", 1<<16)} }
	})
	if res := l.lend(request("l2", "c", token, served)); !slices.Equal(res.GetAddresses(), []string{"192.0.2.7:7651"}) {
		t.Errorf("carriers are sent to %v", res.GetAddresses())
	}
}
