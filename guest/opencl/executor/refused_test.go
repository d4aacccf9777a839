package executor

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// refusing has the runtime refuse to wait for anything while do runs.
func refusing(t *testing.T, do func()) {
	t.Helper()
	t.Setenv("REFUSE_WAITS", "1")
	do()
	if err := os.Unsetenv("REFUSE_WAITS"); err != nil {
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

// If the runtime refuses to wait for the commands before an export, what it read may be from before them,
// and the next one sends it again.
func TestWhatWasReadBeforeACommandEndedIsSentAgain(t *testing.T) {
	c, s, q, _, end := spinning(t)
	defer end()
	w, f := emptyState(t, s)
	refusing(t, func() {
		if err := s.export(t.Context(), "state", true, false, w, noProgress); err != nil {
			t.Fatal(err)
		}
	})
	end() // it writes the second word only now
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
