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
		jain, worst, busy, err := windows([][]interval{a, b}, c.weight)
		if err != nil || math.Abs(jain-c.jain) > 0.01 || worst > jain || busy < 0.999 {
			t.Errorf("weights %v: %v, worst %v, busy %v, %v", c.weight, jain, worst, busy, err)
		}
	}
	if _, _, _, err := windows([][]interval{a[:3], b}, []int{1, 1}); err == nil {
		t.Error("figures of nothing")
	}
	if n := covered([]interval{{5, 9}, {0, 6}, {8, 20}}, 2, 12); n != 10 {
		t.Errorf("%d of 10 are covered", n)
	}
}
