package executor

import (
	"bytes"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// A program that measures asks for the times of the event for which it has just waited.
// From its second wait on, the answer of the wait contains them.
func TestTheAnswerOfAWaitBringsTheTimesThatAreAskedForNext(t *testing.T) {
	c := newClient(t)
	c.executor(1).activate()
	ctx, q, k := c.setup(cl.QueueProfilingEnable)
	plain := c.id()
	c.call(&wire.CreateQueue{ID: plain, Context: ctx, Device: 1})
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 0)
	launch := func(q uint32) uint32 {
		e := c.id()
		c.launch(q, k, b, 1, 1024, e)
		return e
	}
	wait := func(events ...uint32) []byte { return c.call(&wire.WaitEvents{Wait: events}) }
	e := launch(q)
	if got := wait(e); len(got) != 0 {
		t.Fatalf("a program that never asked for times got %d bytes of them", len(got))
	}
	c.call(&wire.EventProfiling{Event: e})
	for range 3 {
		e = launch(q)
		got := wait(e)
		if want := c.call(&wire.EventProfiling{Event: e}); !bytes.Equal(got, want) {
			t.Fatalf("a wait brought the times %v, they are %v", numbers(got), numbers(want))
		}
	}
	if got := wait(launch(q), launch(q)); len(got) != 0 {
		t.Fatalf("a wait for two events brought %d bytes of times", len(got))
	}
	if got := wait(launch(plain)); len(got) != 0 {
		t.Fatalf("a wait for a command without times brought %d bytes of them", len(got))
	}
	e = launch(q)
	slot := c.start(&wire.WaitEvents{Wait: []uint32{e}})
	c.post(&wire.Release{ID: e})
	if st, _ := c.answer(slot); st != cl.Success {
		t.Fatal(st)
	}
}
