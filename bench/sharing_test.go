package main

import (
	"math"
	"testing"
)

func TestWindowsOfShares(t *testing.T) {
	const ms = 1_000_000
	// Two that take turns of 1 and 3 ms without a gap.
	var a, b []interval
	for at := int64(0); at < 8000*ms; at += 4 * ms {
		a = append(a, interval{at, at + ms})
		b = append(b, interval{at + ms, at + 4*ms})
	}
	for _, c := range []struct {
		weight []int
		jain   float64
	}{{[]int{1, 1}, 0.8}, {[]int{1, 3}, 1}} {
		f, err := windows([][]interval{a, b}, c.weight)
		if err != nil || math.Abs(f.jain-c.jain) > 0.01 || f.worst > f.jain || f.busy < 0.999 || f.other != 0 {
			t.Errorf("weights %v: %+v, %v", c.weight, f, err)
		}
	}
	same, other := gaps(within([][]interval{{{0, 10}, {15, 20}, {27, 30}, {70, 80}}, {{40, 50}, {52, 55}, {79, 81}}}, 0, 80))
	if same != 4 || other != 12 {
		t.Errorf("idle for %d between kernels of one and for %d between those of two", same, other)
	}
	if _, err := windows([][]interval{a[:3], b}, []int{1, 1}); err == nil {
		t.Error("figures of nothing")
	}
	if n := covered([]interval{{5, 9}, {0, 6}, {8, 20}}, 2, 12); n != 10 {
		t.Errorf("%d of 10 are covered", n)
	}
}
