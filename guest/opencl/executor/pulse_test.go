package executor

import (
	"context"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
)

// A thaw request that has waited for other requests must not undo the freeze of a later
// operation, whose state is being copied.
func TestLateThawDoesNotUndoALaterFreeze(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctl := &controller{s: s}
	freeze := func() uint64 {
		t.Helper()
		if _, err := ctl.Freeze(t.Context(), connect.NewRequest(&gpuctlv1.FreezeRequest{})); err != nil {
			t.Fatal(err)
		}
		d, err := ctl.Describe(t.Context(), nil)
		if err != nil || !d.Msg.Frozen {
			t.Fatal(d, err)
		}
		return d.Msg.Freezes
	}
	thaw := func(ctx context.Context, n uint64) error {
		_, err := ctl.Thaw(ctx, connect.NewRequest(&gpuctlv1.ThawRequest{Freeze: n}))
		return err
	}
	first := freeze()
	if err := thaw(t.Context(), first); err != nil || s.isFrozen() {
		t.Fatalf("frozen: %v, %v", s.isFrozen(), err)
	}
	second := freeze()
	if err := thaw(t.Context(), first); err != nil || !s.isFrozen() {
		t.Errorf("a thaw of freeze %d has undone freeze %d (%v)", first, second, err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := thaw(gone, 0); err == nil || !s.isFrozen() {
		t.Errorf("a thaw that nobody waits for was done (%v)", err)
	}
	if err := thaw(t.Context(), second); err != nil || s.isFrozen() {
		t.Errorf("frozen: %v, %v", s.isFrozen(), err)
	}
	// Nor does a freeze that comes later than its thaw, over another connection, stop anything.
	if err := thaw(t.Context(), second+1); err != nil {
		t.Error(err)
	}
	if _, err := ctl.Freeze(t.Context(), connect.NewRequest(&gpuctlv1.FreezeRequest{Freeze: second + 1})); connect.CodeOf(err) != connect.CodeFailedPrecondition || s.isFrozen() {
		t.Errorf("frozen %v by a freeze that was undone before: %v", s.isFrozen(), err)
	}
	if _, err := ctl.Freeze(t.Context(), connect.NewRequest(&gpuctlv1.FreezeRequest{Freeze: second + 2})); err != nil || !s.isFrozen() {
		t.Errorf("the next freeze: %v", err)
	}
}

// An executor still answers Pulse, with what it waits for, while the session's lock is locked
// during a call of the runtime and another request has the controller's lock.
func TestPulseIsAnsweredWhileTheRuntimeWorks(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	_, q, _ := c.setup(0)
	ctl := &controller{s: s}
	_, handler := gpuctlv1connect.NewExecutorServiceHandler(ctl)
	srv := httptest.NewServer(handler)
	defer srv.Close()
	defer srv.CloseClientConnections()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	st, err := gpuctlv1connect.NewExecutorServiceClient(srv.Client(), srv.URL).Pulse(ctx, connect.NewRequest(&gpuctlv1.PulseRequest{EveryMs: 10}))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	until := func(words string) {
		t.Helper()
		for st.Receive() {
			if strings.Contains(st.Msg().GetWaitsFor(), words) && (words != "" || st.Msg().GetWaitsFor() == "") {
				return
			}
		}
		t.Fatalf("it never says %q: %v", words, st.Err())
	}
	until("")
	s.mu.Lock() // as a call of a runtime does that waits for its compiler
	until("a call of the application to the runtime has not ended")
	s.builds.Add(1)
	until("1 programs of the application are being built")
	s.builds.Add(-1)
	s.mu.Unlock()
	until("")
	ctl.op.Lock()
	end := s.does("contents are being read")
	s.mu.Lock()
	until("contents are being read, in a call of the runtime")
	queue := lookup[queue](s, q)
	queue.seq, queue.kernel, queue.launched = queue.idle+1, "spin", time.Now()
	s.mu.Unlock()
	until("contents are being read: kernel spin of queue")
	s.mu.Lock()
	queue.seq = queue.idle
	s.mu.Unlock()
	end()
	ctl.op.Unlock()
	until("")
}
