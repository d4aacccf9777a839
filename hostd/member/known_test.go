package member

import (
	"strings"
	"testing"
	"time"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// Who asks for a GPU that the host has just found, and the cluster not heard of,
// waits for that, and is not told that there is none.
func TestGPUThatTheClusterHasNotHeardOfIsWaitedFor(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	m := newMachine(t, "a")
	m.dir = "" // a cluster of one in memory, as of gpuctl run
	m.stop()
	m.start(ctx)
	m.Known(ctx, []string{"g0", "g1"})
	m.host.do(func() {
		m.host.gpus = append(m.host.gpus, &clusterv1.GPU{Name: "new", Model: "test", Type: "gpu", Limits: &gpuctlv1.Limits{GlobalMemory: 8 << 30}})
	})
	if m.view(ctx).GPU("a/new").GetPresent() {
		t.Log("reported already: this time there is nothing to wait for")
	}
	began := time.Now()
	m.Known(ctx, []string{"g0", "new"})
	if !m.view(ctx).GPU("a/new").GetPresent() {
		t.Fatal("not known after it was waited for")
	}
	res, err := m.Claim(ctx, &clusterv1.Claim{Id: "c", Count: 1, Expr: `name == "new"`})
	if err != nil || len(res.GetAssignments()) != 1 {
		t.Errorf("%v, %v, after %s", res, err, time.Since(began))
	}
}

// The record of a VM's migration that is written late, after its start was said to have failed
// and another one has begun, begins no second migration of that VM.
func TestLateRecordBeginsNoSecondMigration(t *testing.T) {
	t.Parallel()
	ctx := testkit.Context(t)
	m := cluster(ctx, t, "a")[0]
	start := func(id string) error {
		_, err := m.PutMigration(ctx, &clusterv1.Migration{
			Id: id, Verb: "migrate", Object: "web", Machine: &clusterv1.MachineMove{Uuid: "u1", Name: "web", FromHost: "a", ToHost: "b"},
		}, false)
		return err
	}
	if err := start("m-2"); err != nil {
		t.Fatal(err)
	}
	if err := start("m-1"); err == nil || !strings.Contains(err.Error(), "migration m-2 of VM web is not over") || m.view(ctx).Migration("m-1") != nil {
		t.Errorf("%v; begun: %v", err, m.view(ctx).Migration("m-1"))
	}
}
