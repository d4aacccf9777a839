package xen

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/lab/labtest"
)

// TestMigrateCUDA moves a VM with its GPU while a CUDA program runs in it, with the fake of NVIDIA's
// driver, and an OpenCL program beside: rehearsed, to the other host, and back home after the
// destination's card does not bear a canary.
func TestMigrateCUDA(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 70*time.Minute)
	defer cancel()
	l := labtest.Start(t)
	a, b := pair(ctx, t, l)
	g, err := labtest.NewComputeGuest(ctx, l)
	must(t, err)
	g.Name = "web"
	g.CUDA("1af4:1050", 256)
	v := &traveller{t: t, hosts: []*host{a, b}, at: place{a, virtio}, guest: g}
	c := &cudaTraveller{traveller: v}
	t.Cleanup(c.tellOfCUDA)
	t.Cleanup(v.tell)
	r := rough{t}
	r.step("a VM with a GPU and two programs", func() { c.board(ctx) })
	r.step("plan", func() {
		out := a.must(ctx, "migrate", "web", "--plan")
		t.Log(out)
		if !strings.Contains(out, "2 sessions") || !strings.Contains(out, "first free slot") {
			t.Error("the plan does not tell of both sessions, or of the slot")
		}
		a.refused(ctx, "restores them on the same chip only", "downgrade", "web", "--to", a.Name+"/"+bochs)
	})
	r.step("rehearsal", func() {
		t.Log(a.must(ctx, "migrate", "web", "--rehearse"))
		if n := c.plugs(ctx); n != 1 {
			t.Errorf("the card came %d times", n)
		}
		c.goesOn(ctx)
	})
	r.step("to the other host", func() {
		to := v.next(leg{"migrate", virtio})
		if !v.ended(ctx, v.over(ctx, v.begin(ctx, leg{"migrate", virtio}, to)), to) {
			t.Fatal("it was not done")
		}
		c.arrived(ctx, 2)
	})
	r.step("a card that does not bear a canary", func() {
		must(t, g.CUDAFails(ctx, "lock"))
		to := v.next(leg{"migrate", virtio})
		m := v.over(ctx, v.begin(ctx, leg{"migrate", virtio}, to))
		if v.ended(ctx, m, to) || !strings.Contains(m.Message, "a test process did not bear") {
			t.Fatalf("it was done, or not undone because of the canary: %v", m)
		}
		c.arrived(ctx, 4) // it came there and was restored at home
	})
	r.step("the right results", func() {
		n, err := c.loop.Finish(ctx)
		must(t, err)
		t.Logf("%d rounds of CUDA, all right", n)
		v.arrive(ctx)
	})
}

// cudaTraveller is a VM with a CUDA program, too.
type cudaTraveller struct {
	*traveller
	loop *labtest.CUDALoop
	seat string // the card's address in the VM
}

// board starts the VM with its programs.
func (c *cudaTraveller) board(ctx context.Context) {
	c.t.Helper()
	h, g := c.at.host, c.guest
	must(c.t, g.Create(ctx, h.Host, virtio))
	h.has(ctx, "web", virtio)
	must(c.t, g.WaitCUDA(ctx))
	d, err := g.WaitDevice(ctx, "1af4:1050")
	must(c.t, err)
	c.seat = d.Address
	c.loop, err = g.StartCUDALoop(ctx, "cuda", 4, 500*time.Millisecond)
	must(c.t, err)
	must(c.t, c.loop.WaitRound(ctx, 2))
	c.work, err = g.StartEndure(ctx, "endure", small)
	must(c.t, err)
	must(c.t, c.work.WaitIteration(ctx, 1))
	c.boot, err = g.BootID(ctx)
	must(c.t, err)
	testkit.Until(c.t, "gpuguest knows the card as NVIDIA's, too", func() error {
		out, err := g.AgentLog(ctx)
		return testkit.Want(err == nil && strings.Contains(out, "cuda=true"), out, err)
	})
}

// plugs returns how often a card came to the VM.
func (c *cudaTraveller) plugs(ctx context.Context) int {
	c.t.Helper()
	all, err := c.guest.CUDACards(ctx)
	must(c.t, err)
	return len(all)
}

// goesOn waits until the CUDA program computes, and checks that nobody broke the driver's rules.
func (c *cudaTraveller) goesOn(ctx context.Context) {
	c.t.Helper()
	n, err := c.loop.Rounds(ctx)
	must(c.t, err)
	must(c.t, c.loop.WaitRound(ctx, n+2))
	out, err := c.guest.CUDAViolations(ctx)
	must(c.t, err)
	if out != "" {
		c.t.Errorf("NVIDIA's driver would not bear this: %s", out)
	}
}

// arrived checks what a migration has left in the VM, which has had so many cards by now.
func (c *cudaTraveller) arrived(ctx context.Context, cards int) {
	c.t.Helper()
	c.goesOn(ctx)
	if n := c.plugs(ctx); n != cards {
		c.t.Errorf("the VM has had %d cards, not %d", n, cards)
	}
	d, err := c.guest.WaitDevice(ctx, "1af4:1050")
	must(c.t, err)
	if d.Address != c.seat {
		c.t.Errorf("the VM has its card at %s, and had it at %s", d.Address, c.seat)
	}
}

func (c *cudaTraveller) tellOfCUDA() {
	if !c.t.Failed() || c.guest.Host() == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := c.guest.Run(ctx, "cat /var/log/fakecard.log; head -n 50 /run/fakecuda/config /run/fakecuda/violations; tail -n 5 /var/tmp/lab/cuda/output; true")
	c.t.Logf("the fake: %s %v", out, err)
}
