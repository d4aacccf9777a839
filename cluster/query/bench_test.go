package query_test

import (
	"fmt"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/placement/placementtest"
	"github.com/gpuctl/gpuctl/cluster/query"
)

const gpus = clusterv1.Kind_KIND_GPU

// BenchmarkList lists GPUs of 10 000 hosts with 8 each: compiled anew each time
// and with the results collected, as a server does it.
func BenchmarkList(b *testing.B) {
	c, err := placementtest.Synthetic(10_000, 8, 0.5, 1)
	if err != nil {
		b.Fatal(err)
	}
	filters := []struct {
		where string
		limit int
	}{
		{"free && memory >= 40*GiB", 100},
		{`model == "A100"`, 0},
		{`host.startsWith("n00")`, 0},
		{`health != "ok"`, 0},
		{`id == "n04242/0000:10:00.0"`, 0},
		{`host in ["n00001", "n09999"]`, 0},
		{`free_memory * 2 >= memory && rank > 30 && !cordoned`, 100},
		{`model.matches("^[AH]100$") && "cl_khr_fp64" in extensions && numa_node == 1 && free && host.endsWith("7")`, 0},
		{`used_memory > 70*GiB || health == "failed" && model != "T4"`, 0},
		{`host == "n00500" && extensions.exists(e, e.startsWith("cl_"))`, 0},
	}
	cache := query.NewCache()
	for _, path := range []string{"cache", "view"} {
		for i, f := range filters {
			b.Run(fmt.Sprintf("%s/%d", path, i), func(b *testing.B) {
				b.ReportAllocs()
				var times []time.Duration
				found := 0
				for b.Loop() {
					start := time.Now()
					v := c.Store.View()
					q, err := cache.Compile(gpus, f.where)
					if err != nil {
						b.Fatal(err)
					}
					var objects []*clusterv1.Object
					if path == "cache" {
						objects, _, err = cache.List(q, v, "", f.limit)
					} else {
						objects, _, err = q.List(v, "", f.limit)
					}
					if err != nil {
						b.Fatal(err)
					}
					found = len(objects)
					times = append(times, time.Since(start))
				}
				p50, p99, _ := placementtest.Percentiles(times)
				b.ReportMetric(float64(p50)/1e6, "p50-ms")
				b.ReportMetric(float64(p99)/1e6, "p99-ms")
				b.ReportMetric(float64(found), "found")
			})
		}
	}
}

// BenchmarkChanging lists after each change: what reading a view in costs.
func BenchmarkChanging(b *testing.B) {
	c, err := placementtest.Synthetic(10_000, 8, 0.5, 1)
	if err != nil {
		b.Fatal(err)
	}
	cache := query.NewCache()
	q, err := cache.Compile(gpus, "free && memory >= 40*GiB")
	if err != nil {
		b.Fatal(err)
	}
	var times []time.Duration
	n := 0
	list := func() {
		start := time.Now()
		if _, _, err := cache.List(q, c.Store.View(), "", 100); err != nil {
			b.Fatal(err)
		}
		times = append(times, time.Since(start))
	}
	list()
	times = nil
	for b.Loop() {
		n++
		claim := &clusterv1.Claim{Id: fmt.Sprintf("x%d", n)}
		for g := range c.Store.View().GPUsOfHost(placementtest.HostName(n * 7919 % 10_000)) {
			if g.GetFreeMemory() > 0 {
				claim.MinMemory = 1 << 20
				c.Put(claim, []*clusterv1.Choice{{Gpu: g.GetId(), Memory: 1 << 20}})
				break
			}
		}
		list()
	}
	p50, p99, _ := placementtest.Percentiles(times)
	b.ReportMetric(float64(p50)/1e6, "p50-ms")
	b.ReportMetric(float64(p99)/1e6, "p99-ms")
}
