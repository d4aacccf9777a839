package xen

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// TestServiceVM has a VM that owns a card serve an application of a VM on the other host, over the
// VMs' network, through the death of its gpuguest.
func TestServiceVM(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Minute)
	defer cancel()
	l := labtest.Start(t)
	a, b := pair(ctx, t, l)
	guests := map[string]*labtest.ComputeGuest{"gpuvm": nil, "web": nil}
	for name, h := range map[string]*host{"gpuvm": a, "web": b} {
		g, err := labtest.NewComputeGuest(ctx, l)
		must(t, err)
		must(t, labtest.Bridge(ctx, h.Host))
		g.Name, g.Network = name, map[string]string{"gpuvm": "10.77.0.102/24", "web": "10.77.0.101/24"}[name]
		must(t, g.Create(ctx, h.Host))
		guests[name] = g
	}
	server, web := guests["gpuvm"], guests["web"]
	t.Cleanup(func() {
		for name, g := range guests {
			log, err := g.AgentLog(context.Background())
			if t.Failed() {
				t.Logf("gpuguest of %s: %v\n%s", name, err, log)
			}
		}
	})
	_, err := server.Run(ctx, `echo 'lend: ":7651"' >> /etc/gpuctl/gpuguest.yaml`)
	must(t, err)
	must(t, server.KillAgent(ctx))

	plan := a.must(ctx, "attach", "gpuvm", virtio, "--serves", "--plan")
	t.Log(plan)
	a.must(ctx, "attach", "gpuvm", virtio, "--serves")
	const gpu = "/vm-gpuvm"
	b.must(ctx, "attach", "web", a.Name+gpu, "--remote")
	work, err := web.StartEndure(ctx, "endure", small)
	must(t, err)
	must(t, work.WaitIteration(ctx, 3))
	a.refused(ctx, "web", "detach", "gpuvm", virtio)
	a.refused(ctx, "web", "detach", "gpuvm", "--serves")

	must(t, server.KillAgent(ctx))
	before, err := work.Progress(ctx)
	must(t, err)
	must(t, work.WaitIteration(ctx, uint64(len(before))+5))
	testkit.Until(t, "the next gpuguest of gpuvm lends the card", func() error {
		out, err := a.gpuctl(ctx, "get", "gpus")
		return testkit.Want(err == nil && strings.Contains(out, a.Name+gpu), out, err)
	})
	n, err := work.Finish(ctx)
	must(t, err)
	t.Logf("%d iterations, all right", n)

	b.must(ctx, "detach", "web", a.Name+gpu)
	a.must(ctx, "detach", "gpuvm", "--serves")
	a.must(ctx, "detach", "gpuvm", virtio)
	out := a.must(ctx, "get", "gpus")
	if strings.Contains(out, gpu) {
		t.Errorf("the VM's card is still shown: %s", out)
	}
}
