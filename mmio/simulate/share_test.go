package simulate

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// TestVMsShareTheGPUFairly holds FAIR to an index of 0.99 with a GPU that is busy for 90 %.
// The other policies are there to compare with.
func TestVMsShareTheGPUFairly(t *testing.T) {
	for _, policy := range []timeshare.Policy{timeshare.FIFO, timeshare.Credit, timeshare.Band, timeshare.Fair} {
		line, length := "", 2*time.Second
		if policy == timeshare.Fair {
			length = 10 * time.Second
		}
		for _, n := range []int{2, 4, 8} {
			jain, busy, err := Share(timeshare.DefaultConfig(policy), n, 10*time.Millisecond, length)
			if err != nil {
				t.Fatal(err)
			}
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

// TestFloodedGPUIsSharedByWeight: one VM keeps many commands queued, the others one at a
// time.
func TestFloodedGPUIsSharedByWeight(t *testing.T) {
	m, err := New(32*MiB, 8*MiB, timeshare.DefaultConfig(timeshare.Fair), nil)
	if err != nil {
		t.Fatal(err)
	}
	var all []*guestdriver.Driver
	for i, weight := range []int{1, 1, 2} {
		vm := mmio.VM(i + 1)
		v, err := m.Add(mediate.Request{VM: vm, Memory: 4 * MiB, Channels: 2, Mode: mediate.Lazy, Tables: 64, Weight: weight})
		if err != nil {
			t.Fatal(err)
		}
		d, err := m.Open(v, vm, 0)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	m.Settle()
	begin := m.Clock
	left := make([]int, len(all))
	for m.Clock < begin+4*time.Second {
		for i, d := range all {
			if d.Done() {
				left[i] = 0
			}
			for most := []int{30, 1, 1}[i]; left[i] < most; left[i]++ {
				if err := d.LaunchNext(nvc0.KernelLoop, guestdriver.Buffer{}, guestdriver.Buffer{}, guestdriver.Buffer{}, 1000, 1); err != nil {
					t.Fatal(err)
				}
			}
		}
		m.Tick()
	}
	if a, b, c := m.used(1).Seconds(), m.used(2).Seconds(), m.used(3).Seconds(); a > 1.15*b || c < 1.7*b || c > 2.3*b {
		t.Errorf("they had %.2f, %.2f and %.2f s", a, b, c)
	}
	if len(m.Violations) > 0 {
		t.Error(m.Violations[0])
	}
}
