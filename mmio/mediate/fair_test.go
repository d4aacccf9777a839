package mediate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// load is a VM that launches a kernel, waits for it, thinks and launches the next.
type load struct {
	vm     mmio.VM
	d      *guestdriver.Driver
	us     uint32        // the kernel takes, within 20 %
	at     time.Duration // when it launches next; -1: it waits for the GPU
	before time.Duration // what it had had at the start of the window
}

// share runs n VMs, half with commands of 1 ms and half with those of 10 ms, and returns Jain's index over
// windows of 500 ms and the part of the time that the GPU was busy.
func share(t *testing.T, policy timeshare.Policy, n int, length time.Duration) (jain, busy float64) {
	t.Helper()
	r := newRig(t, func(c *Config) { c.Policy = timeshare.DefaultConfig(policy) })
	rnd := rand.New(rand.NewPCG(1, uint64(n)))
	think := func() time.Duration { return time.Duration(200 * float64(time.Microsecond) * rnd.ExpFloat64()) }
	var all []*load
	for i := range n {
		vm := mmio.VM(i + 1)
		r.add(vm, Lazy, func(q *Request) { q.Memory, q.Tables = 2*mib, 64 })
		l := &load{vm: vm, d: r.open(vm), us: []uint32{1000, 10000}[i%2]}
		if err := l.d.Wait(); err != nil {
			t.Fatal(err)
		}
		all = append(all, l)
	}
	r.settle()
	begin := r.clock
	for _, l := range all {
		l.at = begin + think()
		l.before = usage(t, r, l.vm)
	}
	busyBefore := r.gpu.Totals().Busy
	window, windows := begin+500*ms, 0
	for r.clock < begin+length {
		next := window
		if at, ok := r.gpu.Next(); ok {
			next = min(next, at)
		}
		for _, l := range all {
			if l.at >= 0 {
				next = min(next, l.at)
			}
		}
		r.clock = max(r.clock, next)
		r.gpu.Poll()
		for _, l := range all {
			switch {
			case l.at < 0 && l.d.Done():
				l.at = r.clock + think()
			case l.at >= 0 && r.clock >= l.at:
				l.at = -1
				us := uint32(float64(l.us) * (0.8 + 0.4*rnd.Float64()))
				if err := l.d.LaunchNext(nvc0.KernelLoop, guestdriver.Buffer{}, guestdriver.Buffer{}, guestdriver.Buffer{}, us, 1); err != nil {
					t.Fatal(err)
				}
			}
		}
		if r.clock >= window {
			var sum, squares float64
			for _, l := range all {
				now := usage(t, r, l.vm)
				x := (now - l.before).Seconds()
				l.before, sum, squares = now, sum+x, squares+x*x
			}
			jain += sum * sum / squares / float64(n)
			windows++
			window += 500 * ms
		}
	}
	return jain / float64(windows), float64(r.gpu.Totals().Busy-busyBefore) / float64(r.clock-begin)
}

func usage(t *testing.T, r *rig, vm mmio.VM) time.Duration {
	u, err := r.gpu.Usage(vm)
	if err != nil {
		t.Fatal(err)
	}
	return u.Busy
}

// TestVMsShareTheGPUFairly runs drivers through the mediator, on the hardware's clock, and
// holds FAIR to an index of 0.99 with a GPU that is busy for 90 %. The other policies are
// there to compare with.
func TestVMsShareTheGPUFairly(t *testing.T) {
	policies := []timeshare.Policy{timeshare.FIFO, timeshare.Credit, timeshare.Band, timeshare.Fair}
	if testing.Short() {
		policies = policies[3:]
	}
	for _, policy := range policies {
		line, length := "", 4*sec
		if policy == timeshare.Fair && !testing.Short() {
			length = 10 * sec
		}
		for _, n := range []int{2, 4, 8} {
			jain, busy := share(t, policy, n, length)
			line += fmt.Sprintf(" | %d VMs: %.3f, %.1f %%", n, jain, 100*busy)
			if policy == timeshare.Fair && (jain < 0.99 || busy < 0.9) {
				t.Errorf("%d VMs: Jain %.4f, want 0.99; busy %.4f, want 0.9", n, jain, busy)
			}
			if policy == timeshare.FIFO && jain > 0.9 {
				t.Errorf("FIFO has %.4f: this test sees nothing", jain)
			}
		}
		t.Logf("%-6s%s", policy, line)
	}
}

// TestFloodedGPUIsSharedByWeight: one VM keeps many commands queued, the other one at a
// time.
func TestFloodedGPUIsSharedByWeight(t *testing.T) {
	r := newRig(t)
	var all []*guestdriver.Driver
	for vm, weight := range []int{1, 1, 2} {
		r.add(mmio.VM(vm+1), Lazy, func(q *Request) { q.Weight = weight })
		all = append(all, r.open(mmio.VM(vm+1)))
	}
	r.settle()
	begin := r.clock
	launch := func(d *guestdriver.Driver) {
		if err := d.LaunchNext(nvc0.KernelLoop, guestdriver.Buffer{}, guestdriver.Buffer{}, guestdriver.Buffer{}, 1000, 1); err != nil {
			t.Fatal(err)
		}
	}
	left := slices.Repeat([]int{0}, 3)
	for r.clock < begin+4*sec {
		for i, d := range all {
			if d.Done() {
				left[i] = 0
			}
			for most := []int{30, 2, 2}[i]; left[i] == 0 || left[i] < most && i == 0; left[i]++ {
				launch(d)
			}
		}
		r.tick()
	}
	a, b, c := usage(t, r, 1).Seconds(), usage(t, r, 2).Seconds(), usage(t, r, 3).Seconds()
	if a > 1.15*b || c < 1.7*b || c > 2.3*b {
		t.Errorf("they had %.2f, %.2f and %.2f s", a, b, c)
	}
}
