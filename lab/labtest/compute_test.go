package labtest

import (
	"context"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab"
)

var virtio = model{slot: "0000:05:00.0", id: "1af4:1050"}

// TestComputeGuest checks that a guest of the lab runs OpenCL programs under
// gpuguest, with the runtime that is chosen by the card that is plugged in, and
// that programs without gpuctl stay right across a live migration, which is
// what a migration with a GPU is compared with.
func TestComputeGuest(t *testing.T) {
	l := Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 40*time.Minute)
	defer cancel()
	a, b := l.Hosts()[0], l.Hosts()[1]
	step := func(name string, run func(*testing.T, context.Context)) {
		t.Helper()
		if t.Failed() {
			return
		}
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(ctx, 14*time.Minute)
			defer cancel()
			began := time.Now()
			run(t, ctx)
			t.Logf("%s: %.1f s", name, time.Since(began).Seconds())
		})
	}
	began := time.Now()
	g, err := NewComputeGuest(ctx, l)
	must(t, err)
	t.Logf("image on both hosts: %.1f s", time.Since(began).Seconds())
	g.Name = "computer"
	t.Cleanup(func() {
		if t.Failed() && g.Host() != nil {
			log, err := g.AgentLog(context.WithoutCancel(ctx))
			t.Logf("gpuguest: %v\n%s", err, log)
		}
	})

	var agent *Agent
	waiting := Endure{Seed: 7, KiB: 1024, Ballast: 16}
	var waits *Endurance
	step("create", func(t *testing.T, ctx context.Context) { must(t, g.Create(ctx, a)) })
	step("gpuguest answers", func(t *testing.T, ctx context.Context) {
		var err error
		agent, err = g.Agent(ctx)
		must(t, err)
		hello(t, ctx, g, agent)
	})
	defer func() {
		if agent != nil {
			must(t, agent.Close())
		}
	}()
	step("a program waits for a GPU", func(t *testing.T, ctx context.Context) {
		var err error
		waits, err = g.StartEndure(ctx, "waits", waiting)
		must(t, err)
		time.Sleep(3 * time.Second) // nothing tells that it finds no device
		if out, err := waits.Output(ctx); err != nil || !strings.HasPrefix(out, "start ") || strings.Contains(out, "device") {
			t.Errorf("without a GPU it says %q %v", out, err)
		}
	})
	step("a card that PoCL serves", func(t *testing.T, ctx context.Context) {
		must(t, g.Attach(ctx, virtio.slot))
		d, err := agent.WaitReady(ctx, 0x1af4, 0x1050)
		must(t, err)
		if d.Profile != "emulated-virtio" || d.Target.GetRuntime().GetLibrary() != "libpocl.so.2" {
			t.Errorf("it is served by %v", d)
		}
	})
	step("the program computes", func(t *testing.T, ctx context.Context) {
		must(t, waits.WaitIteration(ctx, 10))
		n, err := waits.Finish(ctx)
		must(t, err)
		t.Logf("%d iterations", n)
	})
	step("gpuguest is killed", func(t *testing.T, ctx context.Context) { agentDies(ctx, t, g, agent, waiting) })
	step("the card goes", func(t *testing.T, ctx context.Context) {
		d, err := agent.WaitReady(ctx, 0x1af4, 0x1050)
		must(t, err)
		_, err = agent.Release(ctx, connect.NewRequest(&gpuctlv1.ReleaseRequest{Address: d.Address}))
		must(t, err)
		must(t, g.Detach(ctx, virtio.slot))
		must(t, g.WaitGone(ctx, virtio.id))
	})
	step("a card that Oclgrind serves", func(t *testing.T, ctx context.Context) { oclgrindServes(ctx, t, g, agent) })
	step("controls migrate", func(t *testing.T, ctx context.Context) {
		must(t, agent.Close())
		agent = nil
		controlsMigrate(ctx, t, g, b)
	})
	step("gpuguest answers after the migration", func(t *testing.T, ctx context.Context) {
		var err error
		agent, err = g.Agent(ctx)
		must(t, err)
		hello(t, ctx, g, agent)
	})
	step("healthy", func(t *testing.T, ctx context.Context) { must(t, g.Healthy(ctx)) })
	step("destroy", func(t *testing.T, ctx context.Context) {
		must(t, agent.Close())
		agent = nil
		must(t, g.Destroy(ctx))
	})
}

// agentDies kills gpuguest under a program, which goes on with the next one.
func agentDies(ctx context.Context, t *testing.T, g *ComputeGuest, agent *Agent, program Endure) {
	t.Helper()
	e, err := g.StartEndure(ctx, "orphan", program)
	must(t, err)
	must(t, e.WaitIteration(ctx, 1))
	before, err := agent.Hello(ctx, connect.NewRequest(&gpuctlv1.HelloRequest{}))
	must(t, err)
	must(t, g.KillAgent(ctx))
	must(t, testkit.Poll(ctx, "another gpuguest's answer", func() error {
		after, err := agent.Hello(ctx, connect.NewRequest(&gpuctlv1.HelloRequest{}))
		return testkit.Want(err == nil && after.Msg.Instance != before.Msg.Instance, err)
	}))
	_, err = agent.WaitReady(ctx, 0x1af4, 0x1050)
	must(t, err)
	_, err = e.Finish(ctx)
	must(t, err)
}

func oclgrindServes(ctx context.Context, t *testing.T, g *ComputeGuest, agent *Agent) {
	t.Helper()
	must(t, g.Attach(ctx, edu.slot))
	// It is where the other was, and what is there stays released.
	at, err := g.WaitDevice(ctx, edu.id)
	must(t, err)
	_, err = agent.TakeUp(ctx, connect.NewRequest(&gpuctlv1.TakeUpRequest{Address: at.Address}))
	must(t, err)
	d, err := agent.WaitReady(ctx, 0x1234, 0x11e8)
	must(t, err)
	if d.Profile != "emulated-edu" || !strings.Contains(d.Target.GetRuntime().GetLibrary(), "oclgrind") {
		t.Errorf("it is served by %v", d)
	}
	e, err := g.StartEndure(ctx, "small", Endure{KiB: 16, Iterations: 3})
	must(t, err)
	_, err = e.Finish(ctx)
	must(t, err)
	_, err = agent.Release(ctx, connect.NewRequest(&gpuctlv1.ReleaseRequest{Address: d.Address}))
	must(t, err)
	must(t, g.Detach(ctx, edu.slot))
	must(t, g.WaitGone(ctx, edu.id))
}

// controlsMigrate checks that programs without gpuctl stay right across a live
// migration.
func controlsMigrate(ctx context.Context, t *testing.T, g *ComputeGuest, to *lab.Host) {
	t.Helper()
	boot, err := g.BootID(ctx)
	must(t, err)
	cpu, err := g.StartEndure(ctx, "cpu", Endure{CPU: true, KiB: 1024, PauseMS: 50})
	must(t, err)
	native, err := g.StartEndure(ctx, "native", Endure{Native: true, KiB: 1024, PauseMS: 50, Ballast: 8})
	must(t, err)
	must(t, native.WaitIteration(ctx, 3))
	began := time.Now()
	must(t, g.Migrate(ctx, to))
	t.Logf("migration: %.1f s", time.Since(began).Seconds())
	if after, err := g.BootID(ctx); err != nil || after != boot {
		t.Fatalf("the guest booted anew: %s before, %s after %v", boot, after, err)
	}
	for _, e := range []*Endurance{cpu, native} {
		all, err := e.Progress(ctx)
		must(t, err)
		if len(all) == 0 {
			t.Fatalf("%s says nothing", e.name)
		}
		must(t, e.WaitIteration(ctx, all[len(all)-1].Number+5))
		n, err := e.Finish(ctx)
		must(t, err)
		t.Logf("%s: %d iterations", e.name, n)
	}
}

// hello checks what gpuguest says of its guest.
func hello(t *testing.T, ctx context.Context, g *ComputeGuest, agent *Agent) {
	t.Helper()
	h, err := agent.Hello(ctx, connect.NewRequest(&gpuctlv1.HelloRequest{}))
	must(t, err)
	boot, err := g.BootID(ctx)
	must(t, err)
	if h.Msg.BootId != boot || !h.Msg.Hotplug || h.Msg.TotalMemory < 600<<20 {
		t.Errorf("boot %s: it says %v", boot, h.Msg)
	}
	for _, d := range h.Msg.Devices {
		t.Logf("device %s %04x:%04x: %s", d.Address, d.VendorId, d.DeviceId, d.Message)
		if d.Ready {
			t.Errorf("a GPU is there that nobody plugged in: %v", d)
		}
	}
}

func TestEndureCheck(t *testing.T) {
	const good = "start 1\niteration 1 ok 1.5\niteration 2 ok 2.25\nresult OK 2 336b8acc4ceb4545\n"
	how := Endure{KiB: 64, Seed: 1}
	if n, err := how.check(good); err != nil || n != 2 {
		t.Errorf("what the program says natively: %d %v", n, err)
	}
	if all := iterations(good); len(all) != 2 || all[1].Number != 2 || all[1].At != 2250*time.Millisecond {
		t.Errorf("%v", all)
	}
	for name, out := range map[string]string{
		"another result":   strings.Replace(good, "4545", "4546", 1),
		"wrong":            strings.Replace(good, "OK", "WRONG", 1),
		"no result":        "start 1\niteration 1 ok 1.5\n",
		"not the last":     good + "Killed\n",
		"nothing":          "",
		"other iterations": strings.Replace(good, "OK 2", "OK 3", 1),
		"none":             strings.Replace(good, "OK 2", "OK 0", 1),
	} {
		if n, err := how.check(out); err == nil {
			t.Errorf("%s: taken for right after %d iterations", name, n)
		}
	}
	how.Iterations = 4
	if _, err := how.check(good); err == nil {
		t.Error("half of the iterations are taken for all")
	}
}
