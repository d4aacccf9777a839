package executor

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
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

// More callbacks are due than the application's ring has room for. The executor that a
// session leaves is not frozen before all of them are there: the next one does not know of
// them.
func TestNoCallbackIsLostInASwap(t *testing.T) {
	const most = wire.CbCount + 100
	c := newClient(t)
	from := c.executor(1)
	from.activate()
	ctx, _, _ := c.setup(0)
	event := c.id()
	c.call(&wire.CreateUserEvent{ID: event, Context: ctx})
	for i := range uint32(most) {
		c.post(&wire.EventCallback{Event: event, Type: int32(cl.Complete), Callback: 1 + i})
	}
	c.call(&wire.SetUserEvent{Event: event, Status: int32(cl.Complete)})
	if what, err := from.freeze(t.Context(), 50*time.Millisecond); !errors.Is(err, ErrBusy) || len(what) != 1 {
		t.Fatalf("frozen while callbacks wait for room: %v, %v", what, err)
	}
	seen := map[uint32]bool{}
	take := func() {
		head, tail := c.ring.Load32(wire.HdrCbHead), c.ring.Load32(wire.HdrCbTail)
		for ; head != tail; head++ {
			seen[c.ring.Load32(wire.CbOff+16*uint64(head%wire.CbCount))] = true
		}
		c.ring.Store32(wire.HdrCbHead, head)
		shm.FutexWake(c.ring.Word32(wire.HdrCbHead), shm.All)
	}
	take()
	to := c.executor(2)
	c.swap(from, to)
	take()
	if len(seen) != most {
		t.Errorf("%d callbacks of %d", len(seen), most)
	}
}

// A posted command that fails has no event, so the next call of its queue that waits says
// it, whatever that call is, and only that one.
func TestTheNextCallThatWaitsTellsOfAFailedCommand(t *testing.T) {
	const n = 1 << 20
	c := newClient(t)
	m := c.mover(false)
	c.executor(1).activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, n)
	c.fill(q, b, n, 1)
	m.add(1, make([]byte, n), false)
	for name, wait := range map[string]wire.Request{
		"finish":         &wire.Finish{Queue: q},
		"small read":     &wire.ReadBuffer{Queue: q, Mem: b, Blocking: 1, Size: 64, Mode: wire.DataStaged, StageOff: c.stage, StageLen: 64},
		"read":           &wire.ReadBuffer{Queue: q, Mem: b, Blocking: 1, Size: directRead * 2, Mode: wire.DataStaged, StageOff: c.stage, StageLen: directRead * 2},
		"write":          &wire.WriteBuffer{Queue: q, Mem: b, Blocking: 1, Size: 64, Mode: wire.DataStaged, StageOff: c.stage, StageLen: 64},
		"large transfer": &wire.ReadBuffer{Queue: q, Mem: b, Blocking: 1, Size: n, Mode: wire.DataBulk, Pend: 1},
	} {
		c.post(&wire.FillBuffer{Queue: q, Mem: 1 << 20, Size: 4, Pattern: make([]byte, 4)})
		if st, _ := c.answer(c.start(wait)); st != cl.InvalidMemObject {
			t.Errorf("%s: %v", name, st)
		}
		c.finish(q)
	}
}

// An application that cleans up after a failed command waits for all that is under way, and then
// frees the memory to which reads were to come.
func TestWaitForAFailedEventWaitsForTheOthersToo(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b, gate, failed, runs := c.buffer(ctx, 4096), c.id(), c.id(), c.id()
	end := c.spin(s, ctx, q, b, runs)
	c.post(&wire.CreateUserEvent{ID: gate, Context: ctx})
	c.post(&wire.Marker{Queue: q, Event: failed, Wait: []uint32{gate}})
	c.post(&wire.SetUserEvent{Event: gate, Status: -7})
	slot := c.start(&wire.WaitEvents{Wait: []uint32{failed, runs}})
	early := c.answeredWithin(slot, time.Second)
	end()
	if st, _ := c.answer(slot); st != cl.ExecStatusErrorForEventsInWaitList || early {
		t.Errorf("a wait for a command that has failed and one that runs: %v, while that ran: %v", st, early)
	}
	c.call(&wire.Finish{Queue: q})
}
