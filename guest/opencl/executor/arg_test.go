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

// An application that was not told that an argument is refused believes in it. It gets an error of what it launches then, and not
// the results of the argument before: of a launch at once, of one that waits, of a clone, and after a swap. Once it has set
// the argument, all is well.
func TestAnArgumentThatIsRefusedUnheardKeepsTheKernelFromRunning(t *testing.T) {
	const size = 4096
	c, s, ctx, q, k, b := withSum(t, size)
	clone := c.id()
	spoil := func(k uint32) {
		c.post(&wire.SetArg{Kernel: k, Index: 1, Kind: wire.ArgPlain, Size: 8, Value: []byte{9, 0, 0, 0, 0, 0, 0, 0}})
		c.post(&wire.SetArg{Kernel: k, Index: 0, Kind: wire.ArgMem, Object: 1 << 20, Size: 8})
	}
	run := func(k uint32, wait ...uint32) {
		c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: size / 4, Wait: wait})
	}
	fails := func(what string) {
		t.Helper()
		if st, _ := c.answer(c.start(&wire.Finish{Queue: q})); st != cl.InvalidKernelArgs {
			t.Errorf("%s: %v", what, st)
		}
		equal(t, c.read(q, b, size), 5)
	}
	next := c.executor(2)
	peer := prepared(t, next)
	prepare(t, s, next, peer) // with the arguments of before
	spoil(k)
	run(k)
	fails("a launch at once")
	gate := c.id()
	c.post(&wire.CreateUserEvent{ID: gate, Context: ctx})
	run(k, gate)
	c.post(&wire.SetUserEvent{Event: gate})
	fails("a launch that waited")
	c.call(&wire.CloneKernel{ID: clone, Kernel: k})
	run(clone)
	fails("a clone")
	finish(t, s, next, peer)
	run(k)
	fails("after a swap")
	c.post(&wire.SetArg{Kernel: clone, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
	run(clone)
	fails("a clone, half of whose arguments are set")
	for _, k := range []uint32{k, clone} {
		c.launch(q, k, b, 2, size/4, 0)
	}
	equal(t, c.read(q, b, size), 9)
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
