package placement_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/placement/placementtest"
)

const gib = 1 << 30

// BenchmarkPlace decides on 10 000 hosts with 8 GPUs each, with the
// expression compiled anew.
func BenchmarkPlace(b *testing.B) {
	c, err := placementtest.Synthetic(10_000, 8, 0.5, 1)
	if err != nil {
		b.Fatal(err)
	}
	from := placementtest.HostName(42) + "/0000:10:00.0"
	ix := placement.NewIndex(c.Store.View())
	for name, req := range map[string]placement.Request{
		"whole":      {Claim: &clusterv1.Claim{Id: "x"}},
		"cheapest":   {Claim: &clusterv1.Claim{Id: "x", MinMemory: 20 * gib, PreferMemory: 40 * gib}},
		"pack":       {Claim: &clusterv1.Claim{Id: "x", MinMemory: 8 * gib, Policy: clusterv1.Policy_POLICY_PACK}},
		"spread":     {Claim: &clusterv1.Claim{Id: "x", Policy: clusterv1.Policy_POLICY_SPREAD}},
		"four":       {Claim: &clusterv1.Claim{Id: "x", Count: 4, OneRuntime: true}},
		"class":      {Claim: &clusterv1.Claim{Id: "x", Expr: `model in ["A100", "H100"] && fp64`}},
		"expr":       {Claim: &clusterv1.Claim{Id: "x", Expr: `host.startsWith("n07") && health == "ok"`}},
		"limits":     {Claim: &clusterv1.Claim{Id: "x", MinLimits: &gpuctlv1.Limits{MaxAlloc: 20 * gib, ComputeUnits: 120}}},
		"impossible": {Claim: &clusterv1.Claim{Id: "x", MinMemory: 900 * gib}},
		"upgrade":    {Claim: &clusterv1.Claim{Id: "x"}, Verb: placement.Upgrade, From: []string{from}},
		"migrate":    {Claim: &clusterv1.Claim{Id: "x"}, Verb: placement.Migrate, From: []string{from}, Bytes: 20 * gib, Deadline: time.Minute},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var times []time.Duration
			fits := 0
			for b.Loop() {
				start := time.Now()
				d := placement.Place(ix, req)
				times = append(times, time.Since(start))
				if d.Err != nil {
					b.Fatal(d.Err)
				}
				fits = d.Fits
			}
			p50, p99, _ := placementtest.Percentiles(times)
			b.ReportMetric(float64(p50)/1e6, "p50-ms")
			b.ReportMetric(float64(p99)/1e6, "p99-ms")
			b.ReportMetric(float64(fits), "fits")
		})
	}
	b.Run("rejected", func(b *testing.B) {
		d := placement.Place(ix, placement.Request{Claim: &clusterv1.Claim{Id: "x", MinMemory: 900 * gib}})
		n := 0
		for b.Loop() {
			n = 0
			for range d.Rejected() {
				n++
			}
		}
		b.ReportMetric(float64(n), "rejections")
	})
	b.Run("update", func(b *testing.B) {
		var times []time.Duration
		n := 0
		for b.Loop() {
			n++
			d := placement.Place(ix, placement.Request{Claim: &clusterv1.Claim{Id: fmt.Sprintf("u%d", n), MinMemory: 1 << 20}, Limit: 1})
			c.Put(&clusterv1.Claim{Id: fmt.Sprintf("u%d", n), MinMemory: 1 << 20}, d.Candidates[0].Choices)
			v := c.Store.View()
			start := time.Now()
			ix.Update(v)
			times = append(times, time.Since(start))
		}
		p50, p99, _ := placementtest.Percentiles(times)
		b.ReportMetric(float64(p50)/1e6, "p50-ms")
		b.ReportMetric(float64(p99)/1e6, "p99-ms")
	})
}

// BenchmarkOpenb replays a public trace from the folder that GPUCTL_OPENB
// names.
func BenchmarkOpenb(b *testing.B) {
	folder := os.Getenv("GPUCTL_OPENB")
	if folder == "" {
		b.Skip("GPUCTL_OPENB names no folder with the trace")
	}
	for _, pods := range []string{placementtest.OpenbPods, placementtest.OpenbPodSpec} {
		t, err := placementtest.LoadOpenb(folder, pods)
		if err != nil {
			b.Fatal(err)
		}
		choosers := []func() placementtest.Chooser{
			placementtest.FirstFit,
			func() placementtest.Chooser { return placementtest.Random(1) },
		}
		for _, p := range []clusterv1.Policy{
			clusterv1.Policy_POLICY_PACK, clusterv1.Policy_POLICY_SPREAD, clusterv1.Policy_POLICY_CHEAPEST, clusterv1.Policy_POLICY_BEST,
		} {
			choosers = append(choosers, func() placementtest.Chooser { return placementtest.NewPlacer(p) })
		}
		for _, mode := range []string{"replay", "fill"} {
			for _, ch := range choosers {
				b.Run(fmt.Sprintf("%s/%s/%s", pods, mode, ch().Name()), func(b *testing.B) {
					var r placementtest.Report
					for b.Loop() {
						if mode == "replay" {
							r, err = t.Replay(ch())
						} else {
							r, err = t.Fill(ch(), 1.3, 1)
						}
						if err != nil {
							b.Fatal(err)
						}
					}
					if r.Refused > 0 {
						b.Errorf("the state refused %d choices", r.Refused)
					}
					b.Log(r)
					b.ReportMetric(float64(r.P50)/1e6, "p50-ms")
					b.ReportMetric(float64(r.P99)/1e6, "p99-ms")
					b.ReportMetric(100*float64(r.Given)/float64(r.Asked), "given-%")
					b.ReportMetric(100*r.Allocated, "allocated-%")
					b.ReportMetric(100*r.Fragmentation, "fragmented-%")
				})
			}
		}
	}
}
