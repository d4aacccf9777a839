package xen

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// liveConfig gives a host a GPU that it can lend: its processor, by PoCL.
const liveConfig = `gpus:
  - id: far
    library: /usr/lib/x86_64-linux-gnu/libpocl.so.2
    env: {POCL_DEVICES: basic, POCL_MEMORY_LIMIT: "1"}
`

// throughHost is in a plan by which carriers connect through the VM's host.
const throughHost = "through the VM's host"

// TestMigrateLive moves a VM to the other host and back while its application computes on a
// GPU that one of the hosts lends to it: there over the VM's network, and back, when it has none
// any more, over vchans and through the host that it is on.
func TestMigrateLive(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 55*time.Minute)
	defer cancel()
	l := labtest.Start(t)
	a, b := pair(ctx, t, l)
	hosts := []*host{a, b}
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	g.Name, g.Network = "web", "10.77.0.101/24"
	for _, h := range hosts {
		must(t, labtest.Bridge(ctx, h.Host))
		must(t, g.Runtimes(ctx, h.Host))
		t.Cleanup(func() { // other tests put programs below /usr
			_, _ = h.Run(context.Background(), "systemctl stop "+unit+"; umount -l /usr")
		})
		h.stop(ctx)
		h.run(ctx, "cat >> /etc/gpuctl.yaml <<'END'\n"+liveConfig+"END")
		h.start(ctx)
		testkit.Until(t, h.Name+" has a GPU to lend", func() error {
			out, err := h.gpuctl(ctx, "get", "gpus", "-o", "wide")
			return testkit.Want(err == nil && strings.Contains(out, h.Name+"/far"), out, err)
		})
	}
	v := &traveller{t: t, hosts: hosts, at: place{a, virtio}, guest: g}
	t.Cleanup(v.tell)
	must(t, g.Create(ctx, a.Host, virtio))
	a.has(ctx, "web", virtio)
	v.work, err = g.StartEndure(ctx, "endure", small)
	must(t, err)
	must(t, v.work.WaitIteration(ctx, 1))
	v.boot, err = g.BootID(ctx)
	must(t, err)
	for i := range hosts { // there and back
		if i > 0 {
			// Its interface goes down: it has no program for that.
			_, err := g.Run(ctx, "cd /sys/class/net/eth0 && echo 0x1002 > flags && test $(($(cat flags) & 1)) = 0")
			must(t, err)
		}
		to := v.next(leg{"migrate", virtio})
		plan := v.at.host.must(ctx, "migrate", "web", "--to", to.gpu(), "--live", "--plan")
		t.Log(plan)
		if !strings.Contains(plan, "/far") || !strings.Contains(plan, "over the network") || strings.Contains(plan, throughHost) != (i > 0) {
			t.Fatal("its applications are not to compute meanwhile, or not by this way")
		}
		before, err := v.work.Progress(ctx)
		must(t, err)
		v.at.host.must(ctx, "migrate", "web", "--to", to.gpu(), "--live", "--no-wait")
		m := v.over(ctx, v.at.host.last(ctx).ID)
		if !v.ended(ctx, m, to) {
			t.Fatal("it was not done")
		}
		names := []string{}
		for _, s := range m.Steps {
			names = append(names, s.Name)
		}
		if !slices.Contains(names, "swap") || !slices.Contains(names, "home") || slices.Contains(names, "freeze") || !strings.HasSuffix(m.Machine.FarGPU, "/far") {
			t.Errorf("steps %v on %s", names, m.Machine.FarGPU)
		}
		after, err := v.work.Progress(ctx)
		must(t, err)
		if len(after) < len(before)+2 {
			t.Errorf("%d results before, %d after: it did not compute meanwhile", len(before), len(after))
		}
		for _, h := range hosts {
			testkit.Until(t, h.Name+" knows that nothing is lent to the VM any more", func() error {
				out, err := h.gpuctl(ctx, "get", "claims", "-o", "json")
				return testkit.Want(err == nil && !strings.Contains(out, m.Machine.FarClaim), out, err)
			})
		}
		must(t, v.work.WaitIteration(ctx, uint64(len(after))+2))
		t.Logf("downtime %.2f s in %d results", float64(m.StoppedNs)/1e9, len(after)-len(before))
		agent, err := g.AgentLog(ctx)
		must(t, err)
		for line := range strings.Lines(agent) {
			if strings.Contains(line, "operation done") {
				t.Log(line)
			}
		}
	}
	v.arrive(ctx)
}
