package mediate

import (
	"testing"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

var everyMode = []Mode{Eager, Lazy, Para}

// TestResultsAreRightInEachMode runs a driver with each way of keeping shadows, beside
// another VM that does the same.
func TestResultsAreRightInEachMode(t *testing.T) {
	for _, mode := range everyMode {
		t.Run(string(mode), func(t *testing.T) {
			r := newRig(t)
			v := r.add(1, mode)
			r.add(2, Eager)
			a, b := r.open(1), r.open(2)
			work(t, a, 3)
			work(t, b, 5)
			work(t, a, 7)
			if err := a.Close(); err != nil {
				t.Fatal(err)
			}
			work(t, b, 9)
			if n := v.Stats().Total().Refusals(); n != 0 {
				t.Errorf("%d refusals: %v", n, r.events)
			}
			for p := range mmio.Phase(mmio.Phases) {
				c := v.Stats().Counters(p)
				t.Logf("%-6s %-6v: %6d exits, %3d scans, %3d calls", mode, p, c.Exits(), c.Scans, c.Hypercalls)
			}
		})
	}
}

// TestCommandOfAChannelThatIsTakenOffGoesOnWhenItIsListedAgain: nothing of it is lost or done
// twice, and another VM has the GPU meanwhile.
func TestCommandOfAChannelThatIsTakenOffGoesOnWhenItIsListedAgain(t *testing.T) {
	r := newRig(t)
	v := r.add(1, Lazy)
	r.add(2, Eager)
	d, other := r.open(1), r.open(2)
	buf, err := d.Alloc(4096)
	if err != nil {
		t.Fatal(err)
	}
	none := guestdriver.Buffer{}
	if err := d.LaunchNext(nvc0.KernelLoop, none, none, none, 5000, 1); err != nil {
		t.Fatal(err)
	}
	r.clock += 2 * ms
	r.gpu.Poll()
	r.store(1, 3, 0x2000+nvc0.InstLimit, 8, 1<<40-1) // makes its shadow anew while it runs
	r.set(1, nvc0.RegPlaylistLength, 0)
	r.set(1, nvc0.RegKick, 0)
	work(t, other, 3)
	if r.settle(); d.Done() || v.atWork() {
		t.Fatal("it went on")
	}
	r.set(1, nvc0.RegPlaylistLength, 1)
	if err := d.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := d.Launch(nvc0.KernelFill, buf, buf, buf, 3, 64); err != nil {
		t.Fatal(err)
	}
	if err := d.Wait(); err != nil {
		t.Fatal(err)
	}
	if w := d.Read(buf, 2); w[0] != 3 || w[1] != 4 {
		t.Errorf("the next command left %v", w)
	}
	if n := v.Stats().Total().Refusals(); n != 0 {
		t.Errorf("%d refusals", n)
	}
}

// TestFreshDriverTakesFewExits: what is zero is not cleared, also when the driver is opened again.
func TestFreshDriverTakesFewExits(t *testing.T) {
	for _, mode := range []Mode{Eager, Lazy} {
		r := newRig(t)
		v := r.add(1, mode)
		for i := range uint32(2) {
			before := v.Stats().Total().Exits()
			d := r.open(1, func(o *guestdriver.Options) { o.Fresh = true })
			if n := v.Stats().Total().Exits() - before; n > 300 {
				t.Errorf("%s: %d exits to open the GPU", mode, n)
			}
			work(t, d, 3+i)
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if n := v.Stats().Total().Refusals(); n != 0 {
			t.Errorf("%d refusals: %v", n, r.events)
		}
	}
}
