package cluster

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// TestVMWithoutNetworkComputesThroughItsHost is the life of a VM that has neither a card nor a
// network: its carriers connect through its host, over the VM's channel, while each process
// that takes part is killed and the hosts' network is cut, and the VM moves.
func TestVMWithoutNetworkComputesThroughItsHost(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("gpuguest of hosts and of VMs need users of their own, and namespaces")
	}
	built := build(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	hosts := vmHosts(t, ctx, built, "a", "b")
	a, b := hosts[0], hosts[1]
	web := newGuest(t, ctx, a, "web", webUUID, 2130800000, offline)

	if plan := a.must(ctx, "attach", "web", "b/one", "--remote", "--min-memory", "300MiB", "--plan"); !strings.Contains(plan, "through its host") {
		t.Errorf("plan: %s", plan)
	}
	a.must(ctx, "attach", "web", "b/one", "--remote", "--min-memory", "300MiB")
	first := web.run(ctx)
	first.goesOn(t)
	if b.relay.Passed() == 0 {
		t.Error("nothing has gone to the port for carriers")
	}

	// hostd of the VM's host dies, and with it all connections.
	a.kill()
	second := web.run(ctx)
	a.start()
	first.goesOn(t)
	second.goesOn(t)
	second.checkedIn(web)

	// So do the network between the hosts, gpuguest in the VM, and hostd of the host that lends.
	b.relay.Cut(true)
	web.kill()
	b.relay.Cut(false)
	web.start()
	first.goesOn(t)
	b.kill()
	b.start()
	first.goesOn(t)

	// The VM moves to the host that lends. There, its carriers connect through that one.
	testkit.Until(t, "the VM has moved", func() error { // hostd of b has just been started
		_, err := a.gpuctl(ctx, "migrate", "web", "--to", "b")
		return err
	})
	first.goesOn(t)
	third := web.run(ctx)
	third.goesOn(t)
	third.checkedIn(web)
	first.checkedIn(web)
	testkit.Until(t, "it is taken back", func() error {
		_, err := a.gpuctl(ctx, "detach", "web", "--remote")
		return err
	})
	free(t, ctx, a.host, b.host)

	// Without a GPU, its programs reach nothing through the host.
	a.must(ctx, "attach", "web", "--remote", "--min-memory", "300MiB")
	_, err := a.gpuctl(ctx, "attach", "web", "--remote", "--min-memory", "300MiB")
	refusedFor(t, err, "already")
	a.must(ctx, "detach", "web", "--remote")
	if strings.Contains(web.log.String(), "panic") {
		t.Error(errors.New("gpuguest in the VM panics"))
	}
}
