package executor

import (
	"path/filepath"
	"testing"

	"github.com/gpuctl/gpuctl/guest/budget"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// budgeted opens an executor whose session has a line in the claim's file.
func (c *client) budgeted(table *budget.Table, who string, generation uint32, limit uint64) *session {
	c.t.Helper()
	f, line, err := table.Line("claim", who)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { f.Close() })
	s := c.executor(generation)
	if s.cfg.Budget, err = budget.Use(f, line, limit); err != nil {
		c.t.Fatal(err)
	}
	return s
}

// What a claim may have of a GPU's memory is for all of its sessions together, also after a
// swap, and what a session gives back is the others'.
func TestSessionsOfAClaimHaveItsMemoryTogether(t *testing.T) {
	const limit = 100 << 20
	table, err := budget.Open(filepath.Join(t.TempDir(), "budgets"))
	if err != nil {
		t.Fatal(err)
	}
	a, b := newClient(t), newClient(t)
	sa, sb := a.budgeted(table, "s-a", 1, limit), b.budgeted(table, "s-b", 1, limit)
	sa.activate()
	sb.activate()
	actx, _, _ := a.setup(0)
	bctx, _, _ := b.setup(0)
	alloc := func(c *client, ctx uint32, mib uint64) (uint32, cl.Status) {
		id := c.id()
		st, _ := c.answer(c.start(&wire.CreateBuffer{ID: id, Context: ctx, Flags: cl.MemReadWrite, Size: mib << 20}))
		return id, st
	}
	fits := func(what string, c *client, ctx uint32, mib uint64, want cl.Status) uint32 {
		t.Helper()
		id, st := alloc(c, ctx, mib)
		if st != want {
			t.Errorf("%s: %v", what, st)
		}
		return id
	}
	x := fits("60 of 100", a, actx, 60, cl.Success)
	fits("50 more", b, bctx, 50, cl.MemObjectAllocationFailure)
	fits("40 more", b, bctx, 40, cl.Success)
	fits("1 more", a, actx, 1, cl.MemObjectAllocationFailure)

	next := a.budgeted(table, "s-a", 2, limit)
	a.swap(sa, next)
	fits("1 more after a swap on the same GPU", b, bctx, 1, cl.MemObjectAllocationFailure)
	a.call(&wire.Release{ID: x})
	fits("what was given back", b, bctx, 60, cl.Success)

	// A target that finds no room refuses, and takes nothing.
	other := b.budgeted(table, "s-c", 2, limit)
	if err := swap(t.Context(), t.TempDir(), sb, other, wire.StateRunning); err == nil {
		t.Error("a target has room that its claim has not")
	}
}
