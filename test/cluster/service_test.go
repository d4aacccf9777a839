package cluster

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

const (
	svcUUID  = "11111111-2222-4333-8444-555555555503"
	loudUUID = "11111111-2222-4333-8444-555555555504"
	service  = "b/vm-svc" // its GPU in the inventory
)

// newServer makes a VM on the host that has a card, for which a runtime of processors stands
// in, and lends it.
func newServer(t *testing.T, ctx context.Context, h *vmHost, name, uuid string, users int) *guest {
	t.Helper()
	v := newGuest(t, ctx, h, name, uuid, users, "emulatedDevices: true", "lend: 127.0.0.1:"+freePort(t))
	v.tree.Write("sys/bus/pci/drivers_autoprobe", "1\n")
	v.tree.Add(pcitest.Function{Address: "0000:00:05.0", Vendor: 0x1af4, Device: 0x1050, Class: 0x038000, IOMMUGroup: -1, NUMANode: -1})
	return v
}

// serving waits until a GPU is given to others, or is not.
func serving(t *testing.T, ctx context.Context, h *vmHost, gpu string, want bool) {
	t.Helper()
	testkit.Until(t, fmt.Sprintf("%s serves others: %v", gpu, want), func() error {
		gpus, err := h.get(ctx, "gpus")
		if err != nil {
			return err
		}
		i := slices.IndexFunc(gpus, func(g object) bool { return g["id"] == gpu })
		return testkit.Want((i >= 0 && gpus[i]["health"] == "ok") == want, gpus)
	})
}

// TestVMsAndHostsShareAGPUOfAServiceVM is the life of a service VM: VMs of both hosts and a
// session of the other host compute on its card by memory, while its gpuguest and the hostds
// are killed. A VM that offers itself without being declared serves nobody.
func TestVMsAndHostsShareAGPUOfAServiceVM(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("gpuguest of hosts and of VMs need users of their own")
	}
	built := build(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	hosts := vmHosts(t, ctx, built, "a", "b")
	a, b := hosts[0], hosts[1]
	svc := newServer(t, ctx, b, "svc", svcUUID, 2130800200)
	newServer(t, ctx, a, "loud", loudUUID, 2130800300)
	web := newGuest(t, ctx, a, "web", webUUID, 2130800000)
	db := newGuest(t, ctx, b, "db", dbUUID, 2130800100)

	if plan := a.must(ctx, "attach", "svc", "--serves", "--plan"); !strings.Contains(plan, "declare") || !strings.Contains(plan, "offer") {
		t.Errorf("plan: %s", plan)
	}
	_, err := a.gpuctl(ctx, "attach", "web", "--serves")
	refusedFor(t, err, "lends nothing")
	a.must(ctx, "attach", "svc", "--serves") // from any host
	serving(t, ctx, a, service, true)
	if gpus, err := a.get(ctx, "gpus"); err != nil || !slices.Equal(names(gpus, "id"), []string{"a/one", "b/one", service}) {
		t.Errorf("%v: %v", err, names(gpus, "id"))
	}

	// VMs of both hosts, and a session of the other host, have parts of it. Sessions of its own
	// host have not.
	a.must(ctx, "attach", "web", service, "--remote", "--min-memory", "300MiB")
	b.must(ctx, "attach", "db", service, "--remote", "--min-memory", "300MiB")
	first, other := web.run(ctx), db.run(ctx)
	far := a.run(ctx, "--remote", "only", "--gpu", "id == '"+service+"'", "--min-memory", "300MiB")
	first.goesOn(t)
	other.goesOn(t)
	far.goesOn(t)
	if _, err := b.gpuctl(ctx, "run", "--gpu", "name == 'vm-svc' || id == 'vm-svc'", "--", "true"); err == nil {
		t.Error("a session of the service VM's host has its GPU")
	}
	if text := b.must(ctx, "inventory"); !strings.Contains(text, "vm:web") || !strings.Contains(text, "vm:db") {
		t.Errorf("inventory: %s", text)
	}
	if text := a.must(ctx, "vms"); !strings.Contains(text, service+" (serves)") {
		t.Errorf("vms: %s", text)
	}

	// Its gpuguest is killed, then hostd of its host. What computes goes on, and new sessions
	// begin there afterwards.
	svc.kill()
	first.goesOn(t)
	far.goesOn(t)
	svc.start()
	serving(t, ctx, a, service, true)
	second := web.run(ctx)
	second.goesOn(t)
	second.checkedIn(web)
	b.kill()
	first.goesOn(t)
	other.goesOn(t)
	b.start()
	serving(t, ctx, a, service, true)
	third := db.run(ctx)
	third.goesOn(t)
	third.checkedIn(db)

	// It is neither taken back nor moved while others have parts of it.
	_, err = a.gpuctl(ctx, "detach", "svc", "--serves")
	refusedFor(t, err, "vm:web")
	_, err = a.gpuctl(ctx, "migrate", "svc", "--to", "a")
	refusedFor(t, err, "service VM")
	first.goesOn(t)
	first.checkedIn(web)
	other.checkedIn(db)
	far.checked(t, ctx)
	for _, name := range []string{"web", "db"} {
		testkit.Until(t, "it is taken back from "+name, func() error {
			_, err := a.gpuctl(ctx, "detach", name, service)
			return err
		})
	}
	testkit.Until(t, "the VM serves nobody any more", func() error {
		_, err := a.gpuctl(ctx, "detach", "svc", "--serves")
		return err
	})
	testkit.Until(t, "its GPU has gone", func() error {
		gpus, err := a.get(ctx, "gpus")
		return cmpErr(err, slices.Equal(names(gpus, "id"), []string{"a/one", "b/one"}), gpus)
	})
	free(t, ctx, a.host, b.host)
}

func cmpErr(err error, ok bool, got any) error {
	if err != nil {
		return err
	}
	return testkit.Want(ok, got)
}
