package sessions

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/hostd/servicevm"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/internal/vm"
)

// soon fails if something has taken as long as a call to who does not answer.
func soon(t *testing.T, what string, done func() error) {
	t.Helper()
	began := time.Now()
	testkit.Until(t, what, done)
	if took := time.Since(began); took > callTimeout*3/4 {
		t.Errorf("%s: it took %v", what, took)
	}
}

// stick has the first far executor that is to end stay, until the test ends.
func (l *lender) stick() (stuck *atomic.Bool) {
	stuck = &atomic.Bool{}
	free := make(chan struct{})
	l.t.Cleanup(func() { close(free) })
	l.guest.Step = func(kind, step string) error {
		if kind == "lend" && step == "end" && stuck.CompareAndSwap(false, true) {
			<-free
			return errors.New("it has not ended")
		}
		return nil
	}
	return stuck
}

// A driver does not let go of a process whose GPU hangs.
func TestLeaseThatDoesNotEndKeepsNoOtherFromEnding(t *testing.T) {
	l := newLender(t)
	for claim, gpu := range map[string]string{"c": "big", "d": "mid"} {
		l.lend(request("l-"+claim, claim, l.assign(claim, 0, gpu), gpu))
	}
	stuck := l.stick()
	for _, claim := range []string{"c", "d"} {
		if _, err := l.node.Log().Apply(t.Context(), &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: claim}}}); err != nil {
			t.Fatal(err)
		}
	}
	soon(t, "the other one has ended", func() error { return testkit.Want(stuck.Load() && len(l.guest.Leases()) == 1, l.guest.Leases()) })
}

func TestFarExecutorOfAVMThatDoesNotEndKeepsNoOtherVMsClaimFromEnding(t *testing.T) {
	l, r := newVMLender(t)
	r.mu.Lock()
	r.ids["m-2"] = true
	r.mu.Unlock()
	db := vm.VM{UUID: "u-db", Name: "db"}
	if err := l.host.LendVM(t.Context(), db, "mid", "vm-2", "m-2"); err != nil {
		t.Fatal(err)
	}
	if err := l.lendVM("vm-1", "big"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.host.LeaseVM(t.Context(), db, vmRequest("l2", "vm-2", "mid")); err != nil {
		t.Fatal(err)
	}
	stuck := l.stick()
	r.end("m-2")
	testkit.Until(t, "one of them is to end", func() error { return testkit.Want(stuck.Load()) })
	r.end("m-1")
	soon(t, "the other VM's claim has ended", func() error { return testkit.Want(len(l.owners()["big"]) == 0, l.owners()["big"]) })
}

// besides is another service VM beside one that does not answer.
type besides struct{ *fakeServers }

func (b besides) GPUs() []servicevm.GPU {
	all := b.fakeServers.GPUs()
	silent := all[0]
	silent.Name, silent.VM = "vm-silent", vm.VM{UUID: "u-silent", Name: "silent"}
	return append(all, silent)
}

func (b besides) Client(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error) {
	if uuid == "u-silent" {
		return silentClient{}, nil
	}
	return b.fakeServers.Client(ctx, uuid)
}

type silentClient struct {
	gpuctlv1connect.GuestServiceClient
}

func (silentClient) ListLeases(ctx context.Context, _ *connect.Request[gpuctlv1.ListLeasesRequest]) (*connect.Response[gpuctlv1.ListLeasesResponse], error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestSilentServiceVMKeepsNoOtherFromBeingLookedAt(t *testing.T) {
	l, s := newServed(t, func(c *HostConfig) { c.Servers = besides{c.Servers.(*fakeServers)} })
	l.lend(request("l1", "c", l.assign("c", 1<<30, served), served))
	s.guest.KillLease("l1")
	soon(t, "what its far executor had is given back", func() error { return testkit.Want(!l.holds("c")) })
}

// meanwhile has something happen between the end of a far executor and hostd's knowing of it, once.
type meanwhile struct {
	*fakeServers
	mu sync.Mutex
	do func()
}

func (m *meanwhile) Client(ctx context.Context, uuid string) (gpuctlv1connect.GuestServiceClient, error) {
	c, err := m.fakeServers.Client(ctx, uuid)
	return meanwhileClient{c, m}, err
}

type meanwhileClient struct {
	gpuctlv1connect.GuestServiceClient
	m *meanwhile
}

func (c meanwhileClient) EndLease(ctx context.Context, r *connect.Request[gpuctlv1.EndLeaseRequest]) (*connect.Response[gpuctlv1.EndLeaseResponse], error) {
	res, err := c.GuestServiceClient.EndLease(ctx, r)
	c.m.mu.Lock()
	do := c.m.do
	c.m.do = nil
	c.m.mu.Unlock()
	if do != nil {
		do()
	}
	return res, err
}

// A request for a lease may be repeated while its end is asked for, or found to be due. Its GPU would be given to
// others while a far executor computes there.
func TestLeaseThatIsAskedForAgainWhileItEndsComputesForNobody(t *testing.T) {
	m := &meanwhile{}
	l, s := newServed(t, func(c *HostConfig) { m.fakeServers = c.Servers.(*fakeServers); c.Servers = m })
	r := request("l1", "c", l.assign("c", 1<<30, served), served)
	l.lend(r)
	m.mu.Lock()
	m.do = func() {
		if _, err := l.host.Lend(t.Context(), there, r); !errors.Is(err, errNotFound) {
			t.Errorf("lent again: %v", err)
		}
	}
	m.mu.Unlock()
	if err := l.host.EndLease(t.Context(), there, "l1"); err != nil {
		t.Fatal(err)
	}
	l.host.mu.Lock()
	known := l.host.lent["l1"] != nil
	l.host.mu.Unlock()
	if n := len(s.guest.Leases()); n != 0 && !known {
		t.Errorf("%d far executors compute for nobody", n)
	}
}
