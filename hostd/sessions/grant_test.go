package sessions

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/migration/endpoint"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/migrate"
)

var (
	webVM = vm.VM{UUID: "11111111-2222-4333-8444-555555555501", Name: "web"}
	dbVM  = vm.VM{UUID: "11111111-2222-4333-8444-555555555502", Name: "db"}
)

// vmsElsewhere says where VMs are.
type vmsElsewhere struct {
	mu    sync.Mutex
	is    migrate.Presence
	err   error
	moves bool
	asked []string
	// movedTo is where a migration has taken it, and there what that host says.
	movedTo string
	there   migrate.Presence
	dumb    error
}

func (v *vmsElsewhere) WhereOn(_ context.Context, host string, _ vm.VM) (migrate.Presence, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.asked = append(v.asked, host)
	if host == v.movedTo {
		return v.there, v.dumb
	}
	return v.is, v.err
}

func (v *vmsElsewhere) MovedTo(string) string {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.movedTo
}

func (v *vmsElsewhere) Moves(context.Context, string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.moves
}

func newGranter(t *testing.T) (*lender, *vmsElsewhere) {
	t.Helper()
	v := &vmsElsewhere{is: migrate.Running}
	l, _ := newVMLender(t, func(c *HostConfig) { c.VMs = v })
	return l, v
}

func (l *lender) grant(m vm.VM, gpu string, memory uint64, persistent bool) error {
	return l.host.GrantVM(l.t.Context(), m, endpoint.Grant{GPU: gpu, Claim: endpoint.LastingClaim(m.UUID), Host: "h1", MinMemory: memory, Persistent: persistent})
}

func (l *lender) leaseOf(m vm.VM, lease, gpu string) (*clusterv1.LendResponse, error) {
	return l.host.LeaseVM(l.t.Context(), m, vmRequest(lease, endpoint.LastingClaim(m.UUID), gpu))
}

// Two VMs share a GPU up to its memory. All sessions of one stay within its claim together,
// as their far executors have one budget.
func TestVMsShareAGPUUpToItsMemory(t *testing.T) {
	l, _ := newGranter(t)
	for range 2 { // an answer may have been lost
		if err := l.grant(webVM, "big", 3<<30, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.grant(dbVM, "big", 6<<30, false); !errors.Is(err, migrate.ErrTaken) {
		t.Errorf("9 of 8 GiB: %v", err)
	}
	if err := l.grant(dbVM, "big", 0, false); !errors.Is(err, migrate.ErrTaken) {
		t.Errorf("all of a GPU that is shared: %v", err)
	}
	if err := l.grant(dbVM, "big", 4<<30, false); err != nil {
		t.Fatal(err)
	}
	if err := l.grant(webVM, "mid", 1<<30, false); !errors.Is(err, migrate.ErrTaken) {
		t.Errorf("a second GPU for a VM: %v", err)
	}
	c := l.node.View().Claim(endpoint.LastingClaim(webVM.UUID))
	if c.GetLabels()[endpoint.LabelVM] != webVM.UUID || c.GetLabels()[endpoint.LabelName] != "web" || c.GetHolder() != "vm web" {
		t.Errorf("the log does not say for whom: %v", c)
	}
	for i, m := range []vm.VM{webVM, webVM, dbVM} {
		res, err := l.leaseOf(m, fmt.Sprint("l", i), "big")
		if err != nil || res.GetLimits().GetGlobalMemory() != map[string]uint64{"web": 3 << 30, "db": 4 << 30}[m.Name] {
			t.Errorf("%v %v", res, err)
		}
	}
	leases := l.guest.Leases()
	if a, b := leases["l0"], leases["l1"]; a.GetMemory() != 3<<30 || b.GetMemory() != 3<<30 || a.GetClaim() != b.GetClaim() || a.GetOwner() != "vm:web" {
		t.Errorf("%v %v", a, b)
	}
	if leases["l2"].GetOwner() != "vm:db" {
		t.Errorf("%v", leases["l2"])
	}
	if _, err := l.leaseOf(webVM, "l9", "mid"); err == nil {
		t.Error("a lease of a GPU that it does not have")
	}
	if _, err := l.host.LeaseVM(t.Context(), dbVM, vmRequest("l9", endpoint.LastingClaim(webVM.UUID), "big")); err == nil {
		t.Error("a lease by another VM's claim")
	}
	if _, err := l.ReleaseClaim(t.Context(), connect.NewRequest(&gpuctlv1.ReleaseClaimRequest{Claim: endpoint.LastingClaim(webVM.UUID)})); err == nil {
		t.Error("somebody releases it beside the VM")
	}
	if err := l.host.EndLendVM(t.Context(), webVM, endpoint.LastingClaim(webVM.UUID)); err != nil {
		t.Fatal(err)
	}
	if n := len(l.guest.Leases()); n != 1 {
		t.Errorf("%d far executors", n)
	}
	testkit.Until(t, "its part is free", func() error { return l.grant(webVM, "big", 4<<30, false) })
}

// A VM says how many sessions it has. They are processes of this host.
func TestAClaimOfAVMHasALimitedNumberOfLeases(t *testing.T) {
	l, _ := newGranter(t)
	if err := l.grant(webVM, "big", 1<<30, false); err != nil {
		t.Fatal(err)
	}
	for i := range maxLentVM {
		if _, err := l.leaseOf(webVM, fmt.Sprint("l", i), "big"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.leaseOf(webVM, "more", "big"); !errors.Is(err, errBusy) {
		t.Errorf("%v", err)
	}
	if err := l.host.EndLeasesVM(t.Context(), webVM, endpoint.LastingClaim(webVM.UUID), "twice"); err != nil || len(l.guest.Leases()) > 0 {
		t.Errorf("%v: %d far executors", err, len(l.guest.Leases()))
	}
	if _, err := l.leaseOf(webVM, "again", "big"); err != nil {
		t.Errorf("the claim has gone, too: %v", err)
	}
}

// The claim outlives hostd. It ends when its VM is gone for a while, and goes on while that is
// unknown, or while the VM moves.
func TestALastingClaimEndsWithItsVM(t *testing.T) {
	id := endpoint.LastingClaim(webVM.UUID)
	for name, c := range map[string]struct {
		is         migrate.Presence
		err        error
		moves      bool
		persistent bool
		ends       bool
	}{
		"it runs":              {is: migrate.Running},
		"it moves":             {is: migrate.Moving},
		"it has stopped":       {is: migrate.Stopped, ends: true},
		"it starts again":      {is: migrate.Stopped, persistent: true},
		"it is undefined":      {is: migrate.Absent, persistent: true, ends: true},
		"gpuctl moves it":      {is: migrate.Absent, moves: true},
		"nobody says":          {err: errors.New("no answer")},
		"its host was removed": {err: fmt.Errorf("h1: %w", endpoint.ErrNoHost), ends: true},
	} {
		t.Run(name, func(t *testing.T) {
			l, v := newGranter(t)
			v.mu.Lock()
			v.is, v.err, v.moves = c.is, c.err, c.moves
			v.mu.Unlock()
			if err := l.grant(webVM, "big", 1<<30, c.persistent); err != nil {
				t.Fatal(err)
			}
			l.halt()
			l.start()
			look := func(later time.Duration) bool {
				l.host.mu.Lock()
				k := l.host.claims[id]
				if k != nil {
					f := *k.VM
					f.looked = time.Time{}
					if !f.gone.IsZero() {
						f.gone = f.gone.Add(-later)
					}
					k.VM = &f
				}
				l.host.mu.Unlock()
				return k != nil && !l.host.lasts(t.Context(), k, map[string]bool{})
			}
			first, then := look(0), look(2*vmGrace)
			if then != c.ends && first != c.ends {
				t.Errorf("it ends: %v, and %v later", first, then)
			}
			if first && c.err == nil {
				t.Error("it ends at once")
			}
		})
	}
}

// A migration has taken the VM to another host, which does not reach this one just then, or whose
// hostd is down: its sessions go on there, and the host that it has left knows nothing of it.
func TestALastingClaimDoesNotEndWhileItsVMIsWhereAMigrationHasTakenIt(t *testing.T) {
	for name, c := range map[string]struct {
		here  error
		there migrate.Presence
		dumb  error
		ends  bool
	}{
		"it runs there":                  {there: migrate.Running},
		"it was left by its former host": {here: fmt.Errorf("h1: %w", endpoint.ErrNoHost), there: migrate.Running},
		"nobody says":                    {dumb: errors.New("no answer")},
		"it has ended there":             {there: migrate.Absent, ends: true},
		"both hosts have left":           {dumb: fmt.Errorf("h2: %w", endpoint.ErrNoHost), here: fmt.Errorf("h1: %w", endpoint.ErrNoHost), ends: true},
	} {
		t.Run(name, func(t *testing.T) {
			l, v := newGranter(t)
			if err := l.grant(webVM, "big", 1<<30, false); err != nil {
				t.Fatal(err)
			}
			v.mu.Lock()
			v.is, v.err, v.movedTo, v.there, v.dumb = migrate.Absent, c.here, "h2", c.there, c.dumb
			v.mu.Unlock()
			look := func() bool {
				l.host.mu.Lock()
				k := l.host.claims[endpoint.LastingClaim(webVM.UUID)]
				f := *k.VM
				f.looked = time.Time{}
				if !f.gone.IsZero() {
					f.gone = f.gone.Add(-2 * vmGrace)
				}
				k.VM = &f
				l.host.mu.Unlock()
				return !l.host.lasts(t.Context(), k, map[string]bool{})
			}
			if first, then := look(), look(); (first || then) != c.ends {
				t.Errorf("it ends: %v, and %v later", first, then)
			}
		})
	}
}

// slowCluster takes its time for claims.
type slowCluster struct {
	Cluster
	asked, answer chan struct{}
}

func (c slowCluster) Claim(ctx context.Context, k *clusterv1.Claim) (*clusterv1.CreateClaimResponse, error) {
	close(c.asked)
	<-c.answer
	return c.Cluster.Claim(ctx, k)
}

// Whoever asked for the claim waits no longer and takes it back, as it seems to have failed. It
// would have been told that it is gone, and the VM have kept the GPU.
func TestAClaimOfAVMThatIsStillBeingMadeIsNotSaidToHaveEnded(t *testing.T) {
	l, _ := newGranter(t)
	id := endpoint.LastingClaim(webVM.UUID)
	c := slowCluster{asked: make(chan struct{}), answer: make(chan struct{})}
	l.halt()
	l.wrap = func(is Cluster) Cluster {
		c.Cluster = is
		return c
	}
	l.start()
	made := make(chan error, 1)
	go func() { made <- l.grant(webVM, "big", 1<<30, false) }()
	<-c.asked
	err := l.host.EndLendVM(t.Context(), webVM, id)
	close(c.answer)
	if gerr := <-made; gerr != nil {
		t.Fatal(gerr)
	}
	if !errors.Is(err, migrate.ErrUnreachable) {
		t.Errorf("the end of a claim that was made after it: %v", err)
	}
	if err := l.host.EndLendVM(t.Context(), webVM, id); err != nil {
		t.Error(err)
	}
	l.gone(id, "big")
}

// A claim follows its VM, and one that the log has released ends.
func TestALastingClaimFollowsItsVMAndTheLog(t *testing.T) {
	l, _ := newGranter(t)
	id := endpoint.LastingClaim(webVM.UUID)
	if err := l.grant(webVM, "big", 1<<30, false); err != nil {
		t.Fatal(err)
	}
	if host, err := l.host.VMHost(webVM, id); err != nil || host != "h1" {
		t.Errorf("%s %v", host, err)
	}
	if _, err := l.host.VMHost(dbVM, id); err == nil {
		t.Error("another VM's claim")
	}
	if err := l.host.FollowVM(webVM, id, "h2"); err != nil {
		t.Fatal(err)
	}
	l.halt()
	l.start()
	if host, err := l.host.VMHost(webVM, id); err != nil || host != "h2" {
		t.Errorf("after a restart: %s %v", host, err)
	}
	if _, err := l.leaseOf(webVM, "l1", "big"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.node.Log().Apply(t.Context(), &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: id}}}); err != nil {
		t.Fatal(err)
	}
	testkit.Until(t, "nothing of it is left", func() error {
		l.host.mu.Lock()
		if k := l.host.claims[id]; k != nil {
			f := *k.VM
			f.looked = time.Time{}
			k.VM = &f
		}
		l.host.mu.Unlock()
		l.host.endVMs(t.Context())
		l.host.checkLent(t.Context())
		return testkit.Want(len(l.guest.Leases()) == 0 && len(l.owners()["big"]) == 0)
	})
	l.gone(id, "big")
}
