package mediate

import (
	"testing"

	"github.com/gpuctl/gpuctl/mmio"
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
