package clustertest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/clustertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCutLinksLoseOneDirection(t *testing.T) {
	t.Parallel()
	n := clustertest.NewNetwork(time.Millisecond)
	for name, tt := range map[string]struct {
		from, to string
		arrives  bool
	}{
		"request": {"a", "b", false},
		"answer":  {"b", "a", true},
	} {
		n.Set(tt.from, tt.to, clustertest.Link{Cut: true})
		arrived := false
		err := n.Call(t.Context(), "a", "b", func() error {
			arrived = true
			return nil
		})
		if !errors.Is(err, clustertest.ErrUnreachable) || arrived != tt.arrives {
			t.Errorf("%s lost: arrived %v, %v", name, arrived, err)
		}
		n.Heal()
	}
	if err := n.Call(t.Context(), "a", "b", func() error { return nil }); err != nil {
		t.Errorf("healed: %v", err)
	}
}

func TestClockNeverGoesBack(t *testing.T) {
	t.Parallel()
	c := clustertest.NewClock()
	before, wall := c.Monotonic(), c.Wall()
	c.Leap(-time.Hour)
	c.Jump(-time.Hour)
	if c.Monotonic() < before || !c.Wall().Before(wall) {
		t.Errorf("monotonic %v after %v, wall %v after %v", c.Monotonic(), before, c.Wall(), wall)
	}
}

func TestKilledNodeKeepsItsFiles(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c := clustertest.New(t, clustertest.Options{Nodes: 3, Disk: true})
	c.Must(ctx, c.Nodes[2], &clusterv1.Command{Op: &clusterv1.Command_PutIdentity{PutIdentity: &clusterv1.PutIdentity{
		Identity: &clusterv1.Identity{Id: "somebody", Role: clusterv1.Role_ROLE_VIEWER},
	}}})
	for _, n := range c.Nodes {
		n.Kill()
		if n.Store() != nil {
			t.Errorf("%s lives", n.Name)
		}
	}
	for _, n := range c.Nodes {
		if err := n.Start(ctx); err != nil {
			t.Fatal(err)
		}
	}
	v, err := c.Nodes[0].Store().Read(ctx, false)
	if err != nil {
		t.Fatal(err)
	}
	if v.Identity("somebody") == nil {
		t.Error("it is forgotten")
	}
	c.Equal(ctx)
}
