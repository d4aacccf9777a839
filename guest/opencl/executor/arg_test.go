package executor

import (
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// withSum returns a session whose kernel k has added 5 to the zeros of buffer b.
func withSum(t *testing.T, size uint64) (c *client, s *session, ctx, q, k, b uint32) {
	t.Helper()
	c = newClient(t)
	s = c.executor(1)
	s.activate()
	ctx, q, k = c.setup(0)
	b = c.buffer(ctx, size)
	c.fill(q, b, size, 0)
	c.launch(q, k, b, 5, size/4, 0)
	return c, s, ctx, q, k, b
}

// An argument that is refused leaves the one before in force: for a launch at once, for one that waits, for a clone, and
// after a swap.
func TestARefusedArgumentLeavesTheOneBefore(t *testing.T) {
	const size = 4096
	c, s, ctx, q, k, b := withSum(t, size)
	gate, clone := c.id(), c.id()
	slot := c.start(&wire.SetArg{Kernel: k, Index: 1, Kind: wire.ArgPlain, Size: 8, Value: []byte{9, 0, 0, 0, 0, 0, 0, 0}})
	if st, _ := c.answer(slot); st != cl.InvalidArgSize {
		t.Fatal(st)
	}
	run := func(k uint32, wait ...uint32) {
		c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: size / 4, Wait: wait})
	}
	run(k)
	equal(t, c.read(q, b, size), 10)
	c.post(&wire.CreateUserEvent{ID: gate, Context: ctx})
	run(k, gate)
	c.post(&wire.SetUserEvent{Event: gate})
	equal(t, c.read(q, b, size), 15)
	c.call(&wire.CloneKernel{ID: clone, Kernel: k})
	run(clone)
	equal(t, c.read(q, b, size), 20)
	c.swap(s, c.executor(2))
	run(k)
	equal(t, c.read(q, b, size), 25)
}

// A launch that the runtime refuses is no use of the device that another one would have to allow: programs try how large a
// work-group may be.
func TestARefusedWorkGroupDoesNotKeepASessionFromBeingSwapped(t *testing.T) {
	const size, large = 4096, uint64(1 << 20)
	c, s, _, q, k, b := withSum(t, size)
	slot := c.start(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: large, Loc0: large, Has: 2})
	if st, _ := c.answer(slot); st != cl.InvalidWorkGroupSize && st != cl.InvalidWorkItemSize {
		t.Fatal(st)
	}
	s.mu.Lock()
	if u := s.describe(); u.LargestWorkGroup >= large || u.WorkItemSizes[0] >= large {
		t.Errorf("the session is said to use groups of %d, and of %d in one dimension", u.LargestWorkGroup, u.WorkItemSizes[0])
	}
	s.mu.Unlock()
	c.swap(s, c.executor(2))
	equal(t, c.read(q, b, size), 5)
}
