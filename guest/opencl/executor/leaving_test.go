package executor

import (
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// A program may release all that it has while its last commands wait for their turn. They are moved with what
// they use: the context and its sub-device, too, whose ids may be those of other objects by then.
func TestReleasedContextWhoseCommandsWaitForTheirTurnIsSwapped(t *testing.T) {
	for _, taken := range []bool{false, true} {
		d := newDesk(t)
		c := newClient(t)
		a := c.executor(1)
		a.activate()
		sub, ctx, q, p, k := c.id(), c.id(), c.id(), c.id(), c.id()
		c.call(&wire.CreateSubDevices{Parent: 1, Props: []uint64{cl.DevicePartitionByCounts, 1, 0, 0}, IDs: []uint32{sub}})
		c.call(&wire.CreateContext{ID: ctx, Devices: []uint32{sub}})
		c.call(&wire.CreateQueue{ID: q, Context: ctx, Device: sub})
		c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte(
			"kernel void add(global uint *a, uint n) { a[get_global_id(0)] += n; }")})
		c.call(&wire.BuildProgram{Program: p})
		c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("add")})
		b := c.buffer(ctx, 4096)
		c.fill(q, b, 4096, 1)
		c.call(&wire.Finish{Queue: q})
		seat := d.takesTurns(a)
		d.takes()
		e := c.id()
		c.launch(q, k, b, 10, 1024, e)
		c.launch(q, k, b, 100, 1024, 0)
		d.waiting(seat, "it waits", isWaiting)
		for _, id := range []uint32{e, k, p, b, q, ctx, sub} {
			c.post(&wire.Release{ID: id})
		}
		if taken {
			c.call(&wire.CreateContext{ID: ctx, Devices: []uint32{1}})
			c.call(&wire.CreateQueue{ID: q, Context: ctx, Device: 1})
		}
		c.call(&wire.DeviceTimer{Device: 1}) // all earlier requests have run when it returns
		for gen := uint32(2); gen < 4; gen++ {
			next := c.executor(gen)
			c.swap(a, next)
			a = next
		}
		testkit.Until(t, "what was released has ended", func() error {
			a.mu.Lock()
			defer a.mu.Unlock()
			return testkit.Want(len(a.parked)+len(a.ghosts)+len(a.leaving) == 0 && a.memory == 0, len(a.parked), a.ghosts, a.leaving, a.memory)
		})
		if a.usage.Launches != 2 {
			t.Errorf("%d launches", a.usage.Launches)
		}
	}
}
