package executor

import (
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// A parked command may name an object twice, or an object and a part of it. If the
// application has released the object in the meantime, it is still released only once.
// Objects that the application has are kept.
func TestHeldCommandThatNamesAnObjectTwiceLetsGoOfItOnce(t *testing.T) {
	const size = 1 << 20
	copied := func(q, src, dst uint32, wait ...uint32) *wire.CopyBuffer {
		return &wire.CopyBuffer{Queue: q, Src: src, Dst: dst, DstOff: 8192, Size: 4096, Wait: wait}
	}
	for _, test := range []struct {
		name string
		// held enqueues a command that waits for the event, and releases the objects that
		// it has created for the command.
		held func(c *client, ctx, q, b, event uint32)
	}{
		{"a buffer to itself", func(c *client, ctx, q, _, event uint32) {
			x := c.buffer(ctx, size)
			c.fill(q, x, size, 1)
			c.post(copied(q, x, x, event))
			c.post(&wire.Release{ID: x})
		}},
		{"a part to itself", func(c *client, _, q, b, event uint32) {
			x := c.id()
			c.call(&wire.CreateSubBuffer{ID: x, Parent: b, Origin: size / 2, Size: size / 4})
			c.post(copied(q, x, x, event))
			c.post(&wire.Release{ID: x})
		}},
		{"a part to its buffer", func(c *client, ctx, q, _, event uint32) {
			x, y := c.buffer(ctx, size), c.id()
			c.call(&wire.CreateSubBuffer{ID: y, Parent: x, Origin: size / 2, Size: size / 4})
			c.post(copied(q, y, x, event))
			c.post(&wire.Release{ID: x})
			c.post(&wire.Release{ID: y})
		}},
		{"a migration", func(c *client, ctx, q, _, event uint32) {
			x := c.buffer(ctx, size)
			c.post(&wire.Migrate{Queue: q, Mems: []uint32{x, x}, Wait: []uint32{event}})
			c.post(&wire.Release{ID: x})
		}},
		{"a sampler", func(c *client, ctx, q, _, event uint32) {
			p, k, x := c.id(), c.id(), c.id()
			c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte("kernel void two(sampler_t a, sampler_t b) { }")})
			c.call(&wire.BuildProgram{Program: p})
			c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("two")})
			c.call(&wire.CreateSampler{ID: x, Context: ctx, Normalized: 1, Addressing: 0x1131, Filter: 0x1140})
			for i := range uint32(2) {
				c.post(&wire.SetArg{Kernel: k, Index: i, Kind: wire.ArgSampler, Object: x, Size: 8})
			}
			c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: 1, Wait: []uint32{event}})
			c.post(&wire.Release{ID: k})
			c.post(&wire.Release{ID: x})
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newClient(t)
			s := c.executor(1)
			s.activate()
			ctx, q, k := c.setup(0)
			b, part, event := c.buffer(ctx, size), c.id(), c.id()
			c.call(&wire.CreateSubBuffer{ID: part, Parent: b, Size: size / 4})
			c.fill(q, b, size, 3)
			c.post(&wire.CreateUserEvent{ID: event, Context: ctx})
			test.held(c, ctx, q, b, event)
			c.post(&wire.Release{ID: b})
			c.call(&wire.SetUserEvent{Event: event, Status: int32(cl.Complete)})
			c.call(&wire.Finish{Queue: q})
			s.mu.Lock()
			taken := s.memory
			s.mu.Unlock()
			if taken != size {
				t.Fatalf("%d bytes are counted as taken, %d are", int64(taken), size)
			}
			c.launch(q, k, part, 4, size/16, 0)
			equal(t, c.read(q, part, size/4), 7)
			c.post(&wire.Release{ID: part})
			c.call(&wire.Finish{Queue: q})
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.memory != 0 {
				t.Fatalf("%d bytes are counted as taken, none are", int64(s.memory))
			}
		})
	}
}

// An application that releases a queue does not wait for its commands, nor do other calls.
func TestReleasedQueueWhoseKernelRunsKeepsNobodyWaiting(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, other, _ := c.setup(0)
	q, b := c.id(), c.buffer(ctx, 4096)
	c.call(&wire.CreateQueue{ID: q, Context: ctx, Device: 1})
	end := c.spin(s, ctx, q, b, 0)
	c.post(&wire.Release{ID: q})
	slot := c.start(&wire.Finish{Queue: other})
	answered := c.answeredWithin(slot, 10*time.Second)
	end()
	if st, _ := c.answer(slot); st != cl.Success || !answered {
		t.Errorf("finish of another queue: %v, while the kernel ran: %v", st, answered)
	}
	testkit.Until(t, "the released queue is gone", func() error {
		n := 0
		inside(s, ctx, func(x *clContext) { n = len(x.queues) })
		return testkit.Want(n == 1, n)
	})
	if got := c.read(other, b, 8); got[1] != 5 {
		t.Errorf("the kernel has written %d", got[1])
	}
}

// A program may release all it has while a command waits, or waits for ever because nobody can end
// its event any more. The session can be moved all the same.
func TestCommandThatWaitsOutlivesItsContext(t *testing.T) {
	const size = 1 << 20
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	for range 2 {
		ctx, q, gate := c.id(), c.id(), c.id()
		c.call(&wire.CreateContext{ID: ctx, Devices: []uint32{1}})
		c.call(&wire.CreateQueue{ID: q, Context: ctx, Device: 1})
		b := c.buffer(ctx, size)
		c.post(&wire.CreateUserEvent{ID: gate, Context: ctx})
		c.post(&wire.FillBuffer{Queue: q, Mem: b, Size: size, Pattern: []byte{1, 2, 3, 4}, Wait: []uint32{gate}})
		for _, id := range []uint32{b, gate, q, ctx} {
			c.post(&wire.Release{ID: id})
		}
	}
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, size)
	c.fill(q, b, size, 7)
	for gen := range uint32(2) {
		to := c.executor(2 + gen)
		c.swap(s, to)
		s = to
	}
	equal(t, c.read(q, b, size), 7)
}
