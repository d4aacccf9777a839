package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/placement"
	"github.com/gpuctl/gpuctl/cluster/placement/placementtest"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/state"
)

const (
	inventoryHosts = 10_000
	gpusOfHost     = 8
	inventoryRuns  = 300 // of each list and placement: enough for a 99th percentile
	gib            = 1 << 30
)

// row is a figure of the inventory, in ms.
type row struct {
	name             string
	p50, p99, target float64 // target: of p99; 0: none
}

func newRow(name string, target float64, times []time.Duration) row {
	p50, p99, _ := placementtest.Percentiles(times)
	return row{name, float64(p50) / 1e6, float64(p99) / 1e6, target}
}

// inventory measures a large one: no host, no network, the state alone.
func (b *bench) inventory(ctx context.Context) error {
	rows, err := inventoryRows(ctx, b.traces)
	for _, r := range rows {
		var pass func() bool
		target := ""
		if r.target > 0 {
			target, pass = fmt.Sprint(r.target), func() bool { return r.p99 <= r.target }
		}
		b.report.add(r.name+", p50", "ms", 0, r.p50, "", nil)
		b.report.add(r.name+", p99", "ms", 0, r.p99, target, pass)
	}
	return err
}

// inventoryRows measures lists, placements, snapshots and, if there is a folder
// with the openb trace, how a real cluster fills.
func inventoryRows(ctx context.Context, traces string) ([]row, error) {
	c, err := placementtest.Synthetic(inventoryHosts, gpusOfHost, 0.5, 1)
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, part := range []func(context.Context, *placementtest.Cluster) ([]row, error){listRows, placementRows, snapshotRows} {
		more, err := part(ctx, c)
		rows = append(rows, more...)
		if err != nil {
			return rows, err
		}
	}
	if _, err := os.Stat(filepath.Join(traces, placementtest.OpenbNodes)); traces == "" || errors.Is(err, os.ErrNotExist) {
		return rows, nil
	}
	more, err := openbRows(ctx, traces)
	return append(rows, more...), err
}

// changer cordons one GPU after the other, and makes them usable again.
func changer(c *placementtest.Cluster) func() error {
	n := 0
	return func() error {
		n++
		gpu := placementtest.HostName(n/2*7919%inventoryHosts) + "/0000:10:00.0"
		r := c.Apply(&clusterv1.Command{Op: &clusterv1.Command_CordonGpu{CordonGpu: &clusterv1.CordonGPU{Gpu: gpu, Cordoned: n%2 == 0}}})
		if r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
			return fmt.Errorf("cordon %s: %s", gpu, r.GetMessage())
		}
		return nil
	}
}

// listRows are of ten expressions, compiled each time, on a store as it is and
// with a change before each list.
func listRows(ctx context.Context, c *placementtest.Cluster) ([]row, error) {
	const kind, target = clusterv1.Kind_KIND_GPU, 5
	cache := query.NewCache()
	change := changer(c)
	var rows []row
	for _, f := range []struct {
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
	} {
		list := func() (time.Duration, error) {
			start := time.Now()
			q, err := cache.Compile(kind, f.where)
			if err == nil {
				_, _, err = cache.List(q, c.Store.View(), "", f.limit)
			}
			return time.Since(start), err
		}
		if _, err := list(); err != nil { // reads the inventory in
			return rows, err
		}
		for _, changes := range []bool{false, true} {
			name := "list " + f.where
			if changes {
				name += ", changing"
			}
			var times []time.Duration
			for range inventoryRuns {
				if changes {
					if err := change(); err != nil {
						return rows, err
					}
				}
				d, err := list()
				if err != nil {
					return rows, err
				}
				times = append(times, d)
			}
			rows = append(rows, newRow(name, target, times))
			if ctx.Err() != nil {
				return rows, ctx.Err()
			}
		}
	}
	return rows, nil
}

// placementRows are of decisions, each with the change of the one before read
// into the index: what was placed is committed.
func placementRows(ctx context.Context, c *placementtest.Cluster) ([]row, error) {
	const target = 5
	change := changer(c)
	ix := placement.NewIndex(c.Store.View())
	from := placementtest.HostName(42) + "/0000:10:00.0"
	policy := func(p clusterv1.Policy) placement.Request {
		return placement.Request{Claim: &clusterv1.Claim{MinMemory: 2 * gib, PreferMemory: 4 * gib, Policy: p}}
	}
	var rows []row
	for _, x := range []struct {
		name string
		req  placement.Request
	}{
		{"pack", policy(clusterv1.Policy_POLICY_PACK)},
		{"spread", policy(clusterv1.Policy_POLICY_SPREAD)},
		{"cheapest", policy(clusterv1.Policy_POLICY_CHEAPEST)},
		{"best", policy(clusterv1.Policy_POLICY_BEST)},
		{"a whole GPU", placement.Request{Claim: &clusterv1.Claim{}}},
		{"four of a host", placement.Request{Claim: &clusterv1.Claim{Count: 4, OneRuntime: true}}},
		{"models by name", placement.Request{Claim: &clusterv1.Claim{MinMemory: 2 * gib, Expr: `model in ["A100", "H100"] && fp64`}}},
		{"an expression over GPUs", placement.Request{Claim: &clusterv1.Claim{MinMemory: 2 * gib, Expr: `host.startsWith("n07") && health == "ok"`}}},
		{"upgrade", placement.Request{Claim: &clusterv1.Claim{MinMemory: 2 * gib}, Verb: placement.Upgrade, From: []string{from}}},
		{"migrate 20 GiB in a minute", placement.Request{
			Claim: &clusterv1.Claim{MinMemory: 2 * gib}, Verb: placement.Migrate, From: []string{from}, Bytes: 20 * gib, Deadline: time.Minute,
		}},
	} {
		var times []time.Duration
		for i := range inventoryRuns {
			// As the state stores claims, each is one of its own.
			claim := &clusterv1.Claim{
				Id: fmt.Sprintf("bench-%d", len(rows)*inventoryRuns+i), Count: x.req.Claim.GetCount(), OneRuntime: x.req.Claim.GetOneRuntime(),
				MinMemory: x.req.Claim.GetMinMemory(), PreferMemory: x.req.Claim.GetPreferMemory(), Policy: x.req.Claim.GetPolicy(), Expr: x.req.Claim.GetExpr(),
			}
			req := x.req
			req.Claim = claim
			v := c.Store.View()
			start := time.Now()
			ix.Update(v)
			d := placement.Place(ix, req)
			if took := time.Since(start); i > 0 { // the first expression reads the inventory in
				times = append(times, took)
			}
			if d.Err != nil {
				return rows, fmt.Errorf("%s: %w", x.name, d.Err)
			}
			if !d.OK() { // above the best model there is none
				if err := change(); err != nil {
					return rows, err
				}
				continue
			}
			if r := c.Put(claim, d.Candidates[0].Choices); r.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
				return rows, fmt.Errorf("%s: %s", x.name, r.GetMessage())
			}
		}
		rows = append(rows, newRow("place: "+x.name+", changing", target, times))
		if ctx.Err() != nil {
			return rows, ctx.Err()
		}
	}
	var times []time.Duration
	d := placement.Place(ix, placement.Request{Claim: &clusterv1.Claim{Id: "x", MinMemory: 900 * gib}})
	for range 20 {
		start := time.Now()
		n := 0
		for range d.Rejected() {
			n++
		}
		times = append(times, time.Since(start))
		if n < inventoryHosts {
			return rows, fmt.Errorf("%d rejections of %d hosts", n, inventoryHosts)
		}
	}
	return append(rows, newRow("reasons of all hosts", 60, times)), nil
}

func snapshotRows(ctx context.Context, c *placementtest.Cluster) ([]row, error) {
	var times []time.Duration
	var buf bytes.Buffer
	for range 5 {
		buf.Reset()
		start := time.Now()
		if err := c.Store.View().Persist(&buf); err != nil {
			return nil, err
		}
		if err := state.New().Restore(&buf); err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return []row{newRow("snapshot and restore", 2000, times)}, nil
}

// openbRows fill the cluster of the trace with tasks that are drawn from it.
func openbRows(ctx context.Context, traces string) ([]row, error) {
	t, err := placementtest.LoadOpenb(traces, placementtest.OpenbPods)
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, p := range []clusterv1.Policy{
		clusterv1.Policy_POLICY_PACK, clusterv1.Policy_POLICY_SPREAD, clusterv1.Policy_POLICY_CHEAPEST, clusterv1.Policy_POLICY_BEST,
	} {
		placer := placementtest.NewPlacer(p)
		r, err := t.Fill(placer, 1.3, 1)
		if err != nil {
			return rows, err
		}
		if r.Refused > 0 {
			return rows, fmt.Errorf("%s: the state refused %d choices", r.Policy, r.Refused)
		}
		// The first decision has no update before it.
		times := placer.Times()[1:]
		for i, u := range placer.Updates() {
			times[i] += u
		}
		rows = append(rows, newRow("openb: "+r.Policy+", changing", 1, times))
		if ctx.Err() != nil {
			return rows, ctx.Err()
		}
	}
	return rows, nil
}
