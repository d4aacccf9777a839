package executor

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// refusing has the runtime refuse to wait for anything while do runs.
func refusing(t *testing.T, do func()) { t.Helper(); during(t, "REFUSE_WAITS", do) }

// during has the runtime of testdata/il.c do what the variable says while do runs.
func during(t *testing.T, name string, do func()) {
	t.Helper()
	t.Setenv(name, "1")
	do()
	if err := os.Unsetenv(name); err != nil {
		t.Fatal(err)
	}
}

// spinning returns a session of such a runtime whose kernel uses b until end is called.
func spinning(t *testing.T) (c *client, s *session, q, b uint32, end func()) {
	t.Helper()
	c = newClient(t)
	s = c.executorOf(1, withIL(t))
	s.activate()
	ctx, q, _ := c.setup(0)
	b = c.buffer(ctx, 4096)
	return c, s, q, b, c.spin(s, ctx, q, b, 0)
}

// A queue whose runtime refuses to wait for it is not taken for idle while its commands run: a freeze
// would not wait for them.
func TestAQueueIsNotIdleAfterAWaitThatFailed(t *testing.T) {
	for name, op := range map[string]func(q, b uint32) wire.Request{
		"finish": func(q, _ uint32) wire.Request { return &wire.Finish{Queue: q} },
		"a blocking map": func(q, b uint32) wire.Request {
			return &wire.MapBuffer{Queue: q, Mem: b, Blocking: 1, Flags: cl.MapRead, Map: 1, Size: 4}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, s, q, b, end := spinning(t)
			defer end()
			refusing(t, func() {
				if st, _ := c.answer(c.start(op(q, b))); st != cl.OutOfResources {
					t.Fatal(st)
				}
			})
			inside(s, q, func(q *queue) {
				if !q.busy() {
					t.Error("the queue counts as idle, and its kernel runs")
				}
			})
			end()
			c.call(&wire.Finish{Queue: q})
			inside(s, q, func(q *queue) {
				if q.busy() {
					t.Error("the queue is busy after it was waited for")
				}
			})
		})
	}
}

// If the runtime refuses to wait for the commands before an export, or takes no marker of them, what arrives in the end is
// not from before them.
func TestWhatWasReadBeforeACommandEndedIsNotWhatArrives(t *testing.T) {
	for _, refuses := range []string{"REFUSE_WAITS", "REFUSE_MARKERS"} {
		t.Run(refuses, func(t *testing.T) { whatArrives(t, refuses) })
	}
}

func whatArrives(t *testing.T, refuses string) {
	c, s, q, _, end := spinning(t)
	defer end()
	w, f := emptyState(t, s)
	during(t, refuses, func() {
		time.AfterFunc(300*time.Millisecond, end) // it writes the second word only then
		if err := s.export(t.Context(), "state", true, false, w, noProgress); err != nil {
			t.Fatal(err)
		}
	})
	end()
	c.call(&wire.Finish{Queue: q})
	if err := errors.Join(s.export(t.Context(), "", false, true, w, noProgress), w.finish()); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	if n := binary.LittleEndian.Uint32(got[4:]); n != 5 {
		t.Errorf("the second word is %d, not 5", n)
	}
}

// A freeze does not take a kernel for over because the runtime refuses to wait for it: what it writes would be lost, and a
// read behind it would be reported as done.
func TestAFreezeIsGivenUpWhileAKernelRunsWhoseWaitIsRefused(t *testing.T) {
	c, s, q, b, end := spinning(t)
	defer end()
	const word = 3
	c.post(&wire.ReadBuffer{Queue: q, Mem: b, Size: 8, Mode: wire.DataStaged, StageOff: c.stage, StageLen: 8, Pend: word})
	refusing(t, func() {
		if _, err := s.freeze(t.Context(), 500*time.Millisecond); !errors.Is(err, ErrBusy) {
			t.Errorf("frozen while a kernel runs: %v", err)
		}
	})
	if c.pend(word) == wire.PendDone {
		t.Error("a read is reported as done before the kernel that it is to come after")
	}
	if t.Failed() {
		return
	}
	end()
	if _, err := s.freeze(t.Context(), 10*time.Second); err != nil {
		t.Fatal(err)
	}
}

// A released queue lives on while its kernel runs, also if the runtime refuses to wait for that: the memory that the kernel
// writes would be another buffer's.
func TestAReleasedQueueIsNotOverWhileTheRuntimeRefusesToWait(t *testing.T) {
	c, s, q, b, end := spinning(t)
	defer end()
	var ctx uint32
	inside(s, q, func(q *queue) { ctx = q.ctx.id })
	other := c.id()
	c.call(&wire.CreateQueue{ID: other, Context: ctx, Device: 1})
	refusing(t, func() {
		c.post(&wire.Release{ID: q})
		c.post(&wire.Release{ID: b})
		c.call(&wire.Flush{Queue: other})
		time.Sleep(300 * time.Millisecond)
	})
	fresh := c.buffer(ctx, 4096)
	c.fill(other, fresh, 4096, 0)
	c.call(&wire.Finish{Queue: other})
	end()
	testkit.Until(t, "the released queue is gone", func() error {
		n := 0
		inside(s, ctx, func(x *clContext) { n = len(x.queues) })
		return testkit.Want(n == 1, n)
	})
	time.Sleep(300 * time.Millisecond) // for the kernel of a queue that went too early
	if n := c.read(other, fresh, 8)[1]; n != 0 {
		t.Errorf("another buffer has %d of the kernel", n)
	}
}

// What waits until the device has left memory alone goes on waiting if the runtime refuses to wait: a lane's chunk would be
// another transfer's, and what is behind a barrier would be moved before what is ahead of it.
func TestMemoryInUseIsWaitedForThoughTheRuntimeRefuses(t *testing.T) {
	for name, wait := range map[string]func(s *session, q *queue, ev cl.Event){
		"a lane": func(s *session, _ *queue, ev cl.Event) {
			r := laneRun{s: s}
			r.evs[0] = ev
			r.settleAll()
		},
		"a barrier": func(s *session, q *queue, ev cl.Event) { s.awaitTurn(&bulk{p: &parkedCall{q: q}, barrier: ev}) },
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t)
			s := c.executorOf(1, withIL(t))
			s.activate()
			ctx, q, _ := c.setup(cl.QueueOutOfOrderExecModeEnable)
			runs := c.id()
			end := c.spin(s, ctx, q, c.buffer(ctx, 4096), runs)
			defer end()
			var ev cl.Event
			var vq *queue
			inside(s, runs, func(e *event) { ev, vq = e.vendor, e.q })
			cl.RetainEvent(ev)
			over := make(chan bool)
			refusing(t, func() {
				go func() { wait(s, vq, ev); close(over) }()
				select {
				case <-over:
					t.Error("over while the command runs")
				case <-time.After(300 * time.Millisecond):
				}
			})
			end()
			<-over
		})
	}
}

// A blocking map that fails while it is waited for has mapped nothing: the application has no pointer to give back.
func TestABlockingMapThatFailsLeavesNothingMapped(t *testing.T) {
	c, s, q, b, end := spinning(t)
	defer end()
	refusing(t, func() {
		m := wire.MapBuffer{Queue: q, Mem: b, Blocking: 1, Flags: cl.MapRead, Map: 1, Size: 4}
		if st, _ := c.answer(c.start(&m)); st != cl.OutOfResources {
			t.Fatal(st)
		}
	})
	inside(s, b, func(m *mem) {
		if m.isMapped() {
			t.Error("the buffer counts as mapped")
		}
	})
}
