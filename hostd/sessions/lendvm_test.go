package sessions

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/cluster/access"
	"github.com/gpuctl/gpuctl/hostd/migration"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

var web = vm.VM{UUID: "u-web", Name: "web"}

// runningMigrations are those that have not ended.
type runningMigrations struct {
	mu  sync.Mutex
	ids map[string]bool
}

func (r *runningMigrations) end(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.ids, id)
}

func (r *runningMigrations) pending(_ context.Context, id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ids[id]
}

// newVMLender is a host that lends to VMs, with migration m-1 running.
func newVMLender(t *testing.T, with ...func(*HostConfig)) (*lender, *runningMigrations) {
	t.Helper()
	r := &runningMigrations{ids: map[string]bool{"m-1": true}}
	return newLender(t, append(with, lends, func(c *HostConfig) { c.Pending = r.pending })...), r
}

// lends makes a host lend to VMs.
func lends(c *HostConfig) { c.LendAddress = func() string { return "here:7651" } }

func (l *lender) lendVM(claim, gpu string) error {
	return l.host.LendVM(l.t.Context(), web, gpu, claim, "m-1")
}

func vmRequest(lease, claim, gpu string) *clusterv1.LendRequest {
	return &clusterv1.LendRequest{Lease: lease, Claim: claim, Gpus: []string{"here/" + gpu}, CertificateSha256: make([]byte, 32)}
}

func (l *lender) gone(claim, gpu string) {
	l.t.Helper()
	testkit.Until(l.t, "nothing of it is left", func() error {
		switch {
		case len(l.guest.Leases()) > 0:
			return errors.New("a far executor runs")
		case len(l.owners()[gpu]) > 0:
			return errors.New("the ledger has it")
		case l.node.View().Claim(claim) != nil:
			return errors.New("the log has it")
		}
		return nil
	})
}

// A VM has a GPU whole, by a claim of the host that lends it; each of its sessions has a far
// executor there. Nobody else gets that GPU until all of them have ended.
func TestAGPUIsLentToAVM(t *testing.T) {
	l, _ := newVMLender(t)
	for range 2 { // by another driver
		if err := l.lendVM("vm-1", "big"); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.lendVM("vm-2", "big"); !errors.Is(err, migrate.ErrTaken) {
		t.Errorf("lent twice: %v", err)
	}
	if c := l.node.View().Claim("vm-1"); c.GetHolder() != "vm web" {
		t.Errorf("the log does not say for whom: %v", c)
	}
	first, err := l.host.LeaseVM(t.Context(), web, vmRequest("l1", "vm-1", "big"))
	if err != nil || len(first.GetAddresses()) == 0 || first.GetAddresses()[0] != "here:7651" || !l.host.Expects(first.GetToken()) {
		t.Fatalf("%v %v", first, err)
	}
	if _, err := l.host.LeaseVM(t.Context(), web, vmRequest("l2", "vm-1", "big")); err != nil {
		t.Fatal(err)
	}
	if own := l.owners()["big"]; len(own) != 1 || own[0].GetOwner() != "vm:web" || own[0].GetHost() != "" {
		t.Errorf("%v", own)
	}
	for what, err := range map[string]error{
		"another VM":          second(l.host.LeaseVM(t.Context(), vm.VM{UUID: "u-db"}, vmRequest("l3", "vm-1", "big"))),
		"another claim":       second(l.host.LeaseVM(t.Context(), web, vmRequest("l3", "vm-9", "big"))),
		"another GPU":         second(l.host.LeaseVM(t.Context(), web, vmRequest("l3", "vm-1", "mid"))),
		"ended by another VM": l.host.EndLendVM(t.Context(), vm.VM{UUID: "u-db"}, "vm-1"),
		"of another host":     second(l.host.Lend(t.Context(), there, request("l3", "vm-1", 1, "big"))),
		"no such GPU":         l.host.LendVM(t.Context(), web, "none", "vm-3", "m-1"),
		"no claim":            l.host.LendVM(t.Context(), web, "mid", "", "m-1"),
	} {
		if err == nil {
			t.Errorf("%s: it is done", what)
		}
	}
	if _, err := l.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: "vm-1"})); err == nil {
		t.Error("somebody takes it from a VM that moves")
	}
	if n := len(l.guest.Leases()); n != 2 {
		t.Fatalf("%d far executors", n)
	}
	// The end of one fails: the GPU is nobody else's until it has ended.
	l.guest.Step = func(kind, step string) error {
		if kind == "lend" && step == "end" {
			return errors.New("it does not end")
		}
		return nil
	}
	if err := l.host.EndLendVM(t.Context(), web, "vm-1"); err == nil {
		t.Error("it has ended")
	}
	if _, err := l.host.LeaseVM(t.Context(), web, vmRequest("l4", "vm-1", "big")); err == nil {
		t.Error("a lease began after the end")
	}
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}); c != nil {
		t.Fatal("the GPU has two owners")
	}
	l.guest.Step = nil
	for range 2 {
		if err := l.host.EndLendVM(t.Context(), web, "vm-1"); err != nil {
			t.Fatal(err)
		}
	}
	l.gone("vm-1", "big")
	if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}); c == nil {
		t.Error("it is not free")
	}
}

// What a driver has left is ended with its migration, also by the next hostd.
func TestTheEndOfAMigrationEndsWhatItsVMHasBorrowed(t *testing.T) {
	for name, restart := range map[string]bool{"same hostd": false, "next hostd": true} {
		t.Run(name, func(t *testing.T) {
			l, r := newVMLender(t)
			if err := l.lendVM("vm-1", "big"); err != nil {
				t.Fatal(err)
			}
			if _, err := l.host.LeaseVM(t.Context(), web, vmRequest("l1", "vm-1", "big")); err != nil {
				t.Fatal(err)
			}
			if restart {
				l.halt()
				l.start()
			}
			l.host.endVMs(t.Context())
			if len(l.guest.Leases()) != 1 || len(l.owners()["big"]) != 1 {
				t.Fatal("it was ended while the migration runs")
			}
			if c := l.claim(&gpuctlv1.CreateClaimRequest{Expr: "id == 'big'"}); c != nil {
				t.Fatal("the GPU has two owners")
			}
			r.end("m-1")
			l.gone("vm-1", "big")
		})
	}
}

// The log decides: a claim that is deleted there ends its far executors.
func TestADeletedClaimOfAVMEndsItsLeases(t *testing.T) {
	l, _ := newVMLender(t)
	if err := l.lendVM("vm-1", "big"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.host.LeaseVM(t.Context(), web, vmRequest("l1", "vm-1", "big")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.node.Log().Apply(t.Context(), &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: "vm-1"}}}); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "its far executor has ended", func() error {
		l.host.checkLent(t.Context())
		return testkit.Want(len(l.guest.Leases()) == 0)
	})
}

// A host starts a far executor for a VM's session only if the log's record of a running
// migration names the GPU, the claim and the host that asks. This is the whole way but for
// the network: the driver's client, the service, the record and the ledger.
func TestTheRecordOfAMigrationDecidesWhoBorrowsForAVM(t *testing.T) {
	l, r := newVMLender(t)
	log := slog.New(slog.DiscardHandler)
	ready := func() bool { return true }
	manager := migration.New(migration.Config{Node: l.node, Ready: ready, Log: log})
	site := &endpoint.Local{Whereabouts: endpoint.Whereabouts{Name: "here", Log: log}, Lender: l.host, Borrows: manager.Borrows}
	mux := http.NewServeMux()
	site.Handle(mux)
	caller := "h1"
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mux.ServeHTTP(w, req.WithContext(access.WithCaller(req.Context(), access.Caller{Kind: access.Host, Host: caller})))
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(func() {
		srv.Client().CloseIdleConnections()
		srv.Close()
	})
	service := gpuctlv1connect.NewSiteServiceClient(srv.Client(), srv.URL)
	driver := &endpoint.Remote{Host: "here", Migration: "m-1", Token: 1, Service: service}
	far := migrate.Far{GPU: "here/big", Claim: "vm-1"}
	if err := driver.Lend(t.Context(), web, far); !errors.Is(err, migrate.ErrUnreachable) {
		t.Fatalf("without a record: %v", err)
	}
	kept, err := l.node.PutMigration(t.Context(), &clusterv1.Migration{
		Id: "m-1", Verb: "migrate", Object: "web", Driver: "here", State: clusterv1.MigrationState_MIGRATION_STATE_RUNNING,
		Machine: &clusterv1.MachineMove{Uuid: web.UUID, Name: web.Name, FromHost: "h1", ToHost: "h2", FarGpu: far.GPU, FarClaim: far.Claim},
	}, false)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := driver.Lend(t.Context(), web, far); err != nil {
			t.Fatal(err)
		}
	}
	lease := func(id string) error {
		_, err := service.Lease(t.Context(), connect.NewRequest(&gpuctlv1.SiteLeaseRequest{
			Machine: &gpuctlv1.SiteMachine{Uuid: web.UUID, Name: web.Name, Migration: "m-1", Token: 1}, Gpu: far.GPU, Claim: far.Claim, Lease: id,
			CertificateSha256: make([]byte, 32), OutageMs: 600_000,
		}))
		return err
	}
	for _, caller = range []string{"h1", "h2"} {
		if err := lease("l-" + caller); err != nil {
			t.Errorf("host %s of the migration: %v", caller, err)
		}
	}
	caller = "h3"
	if lease("l-thief") == nil {
		t.Error("another host borrows for the VM")
	}
	if n := len(l.guest.Leases()); n != 2 {
		t.Fatalf("%d far executors", n)
	}
	kept.State = clusterv1.MigrationState_MIGRATION_STATE_DONE
	if _, err := l.node.PutMigration(t.Context(), kept, false); err != nil {
		t.Fatal(err)
	}
	caller = "h1"
	if lease("l-late") == nil {
		t.Error("a lease after the end of the migration")
	}
	r.end("m-1")
	l.gone("vm-1", "big")
	if err := driver.EndLend(t.Context(), web, far); err != nil { // by a driver that does not know
		t.Error(err)
	}
}
