package replica_test

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/clustertest"
	"github.com/gpuctl/gpuctl/cluster/replica"
)

func quantile(ds []time.Duration, q float64) time.Duration {
	slices.Sort(ds)
	return ds[min(int(float64(len(ds))*q), len(ds)-1)].Round(10 * time.Microsecond)
}

// TestLeaderKillLatency kills leaders with the timing that hosts use: 2, or 20
// with GPUCTL_LATENCY.
func TestLeaderKillLatency(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	kills := 2
	if os.Getenv("GPUCTL_LATENCY") != "" {
		kills = 20
	}
	ctx := t.Context()
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true, GPUs: 1, Config: func(_ int, cfg *replica.Config) {
		review := cfg.Timing.Review
		cfg.Timing = replica.Fast()
		cfg.Timing.Review = review
	}})
	var took []time.Duration
	for i := range kills {
		leader := c.Leader(ctx)
		other := c.Nodes[0]
		if other == leader {
			other = c.Nodes[1]
		}
		c.Must(ctx, other, note("the leader works"))
		start := time.Now()
		leader.Kill()
		r := c.Must(ctx, other, whole(fmt.Sprintf("claim-%d", i), other.Name+"/g0"))
		took = append(took, time.Since(start))
		a := r.GetAssignments()[0]
		if err := leader.Start(ctx); err != nil {
			t.Fatal(err)
		}
		c.Must(ctx, other, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: a.GetClaim()}}})
		c.Must(ctx, other, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{
			Host: a.GetHost(), Confirmations: []*clusterv1.Confirmation{{Assignment: a.GetId(), Token: a.GetToken(), Gone: true}},
		}}})
		c.Equal(ctx)
	}
	t.Logf("leader killed, until the next assignment is committed: p50 %v, max %v of %d", quantile(took, 0.5), quantile(took, 1), kills)
	if worst := quantile(took, 1); worst > 1500*time.Millisecond {
		t.Errorf("the longest took %v", worst)
	}
}

// TestCommitLatency reports how long a claim takes to be a committed
// assignment: three nodes, files, fsync. 100 times, or 2000 with
// GPUCTL_LATENCY.
func TestCommitLatency(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	n := 100
	if os.Getenv("GPUCTL_LATENCY") != "" {
		n = 2000
	}
	ctx := t.Context()
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true, GPUs: 100, Config: func(_ int, cfg *replica.Config) {
		review := cfg.Timing.Review
		cfg.Timing = replica.Fast()
		cfg.Timing.Review = review
	}})
	for _, via := range []string{"leader", "follower"} {
		from := c.Leader(ctx)
		if via == "follower" {
			for _, o := range c.Nodes {
				if o != c.Leader(ctx) {
					from = o
				}
			}
		}
		var took []time.Duration
		for i := range n {
			gpu := fmt.Sprintf("n%d/g%d", i%3, i%100)
			cmd := whole(fmt.Sprintf("%s-%d", via, i), gpu)
			start := time.Now()
			r := c.Must(ctx, from, cmd)
			took = append(took, time.Since(start))
			a := r.GetAssignments()[0]
			c.Must(ctx, from, &clusterv1.Command{Op: &clusterv1.Command_DeleteClaim{DeleteClaim: &clusterv1.DeleteClaim{Claim: a.GetClaim()}}})
			c.Must(ctx, from, &clusterv1.Command{Op: &clusterv1.Command_ConfirmAssignments{ConfirmAssignments: &clusterv1.ConfirmAssignments{
				Host: a.GetHost(), Confirmations: []*clusterv1.Confirmation{{Assignment: a.GetId(), Token: a.GetToken(), Gone: true}},
			}}})
		}
		t.Logf("claim to committed assignment, three nodes with fsync, through the %s: p50 %v, p99 %v, max %v of %d",
			via, quantile(took, 0.5), quantile(took, 0.99), quantile(took, 1), n)
	}
}
