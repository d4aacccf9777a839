package xen

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

const kvmConfig = `version: 1
discover: false
cluster: {host: kvma, listen: "10.77.0.3:7650", raftMultiplier: 5}
`

// TestKVM gives a VM of a host with KVM a card by VFIO, and takes it back. Then the VM, which has no network,
// computes on a GPU of its host over vsock, through the death of gpuguest and of hostd.
func TestKVM(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Minute)
	defer cancel()
	l, kvma := labtest.StartKVM(t)
	h := &host{kvma, t}
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	g.Name, g.KVM, g.MemoryMiB = "web", true, 512
	must(t, g.Prepare(ctx, kvma))
	must(t, labtest.Install(ctx, kvma, "gpuctl", "hostd", "gpuguest"))
	must(t, g.Runtimes(ctx, kvma))
	t.Cleanup(func() {
		_, _ = h.Run(context.Background(), "systemctl stop "+unit+"; pkill -x gpuguest; virsh -q -c "+h.URI()+" destroy web; umount -l /usr; rm -rf /var/lib/gpuctl /run/gpuctl")
	})
	must(t, h.PutReader(ctx, strings.NewReader(kvmConfig+liveConfig), "/etc/gpuctl.yaml", 0o600))
	h.run(ctx, "modprobe vfio-pci")
	h.start(ctx)
	h.must(ctx, "cluster", "init")
	gpu := h.Name + "/far"
	testkit.Until(t, "the host has a GPU", func() error {
		out, err := h.gpuctl(ctx, "get", "gpus", "-o", "wide")
		return testkit.Want(err == nil && strings.Contains(out, gpu), out, err)
	})
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		for _, command := range []string{"tail -n 40 /var/log/libvirt/qemu/web-console.log", "tail -n 20 /var/log/libvirt/qemu/web.log", "journalctl -q -n 60 --no-pager -o short-monotonic"} {
			out, err := h.Run(context.Background(), command)
			t.Log(command, err, out)
		}
		log, err := g.AgentLog(context.Background())
		t.Log(err, log)
	})
	r := rough{t}
	var work *labtest.Endurance
	goesOn := func() {
		before, err := work.Progress(ctx)
		must(t, err)
		must(t, work.WaitIteration(ctx, uint64(len(before))+3))
	}
	r.step("the VM", func() { must(t, g.Create(ctx, kvma)) })
	r.step("a card by VFIO, and back", func() {
		t.Log(h.must(ctx, "attach", "web", virtio))
		d, err := g.WaitDevice(ctx, "1af4:1050")
		must(t, err)
		t.Logf("%+v", d)
		h.must(ctx, "detach", "web", virtio)
		must(t, g.WaitGone(ctx, "1af4:1050"))
	})
	r.step("a GPU for it", func() { t.Log(h.must(ctx, "attach", "web", gpu, "--remote")) })
	r.step("it computes", func() {
		work, err = g.StartEndure(ctx, "endure", small)
		must(t, err)
		must(t, work.WaitIteration(ctx, 3))
	})
	r.step("over vsock", func() {
		// A line for each: state, queues, this end, the other as cid:port.
		out := h.run(ctx, "ss -H --vsock | grep -w ESTAB | awk '{print $NF}'")
		if n := len(strings.Fields(out)); n < 2 {
			t.Errorf("%d connections to the VM: %s", n, out)
		}
	})
	r.step("after the death of gpuguest", func() { must(t, g.KillAgent(ctx)); goesOn() })
	r.step("after the death of hostd", func() { h.run(ctx, kill); h.answers(ctx); goesOn() })
	r.step("to its end", func() {
		n, err := work.Finish(ctx)
		must(t, err)
		t.Logf("%d iterations, all right", n)
		h.must(ctx, "detach", "web", gpu)
	})
}
