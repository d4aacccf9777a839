package executor

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// activity is a step of one of gpuguest's requests that may take long.
type activity struct {
	what  string
	since time.Time
}

// does begins a step that may take long. done ends it.
func (s *session) does(what string) (done func()) {
	a := &activity{what, time.Now()}
	s.doing.Store(a)
	return func() { s.doing.CompareAndSwap(a, nil) }
}

// Pulse shows that this process is alive while another request takes long, and reports what
// that request waits for. It waits for nothing itself: not for the device, and not for a
// lock that is held while a runtime works.
func (c *controller) Pulse(ctx context.Context, r *connect.Request[gpuctlv1.PulseRequest], out *connect.ServerStream[gpuctlv1.PulseResponse]) error {
	every := time.Duration(r.Msg.GetEveryMs()) * time.Millisecond
	if every <= 0 {
		every = time.Second
	}
	tick := time.NewTicker(max(every, 10*time.Millisecond))
	defer tick.Stop()
	for {
		what, lasts := c.s.waitsFor()
		if err := out.Send(&gpuctlv1.PulseResponse{WaitsFor: what, ForNs: lasts.Nanoseconds()}); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c.s.stop:
			return nil
		case <-tick.C:
		}
	}
}

// waitsFor returns what the running request waits for, and since how long.
func (s *session) waitsFor() (string, time.Duration) {
	a := s.doing.Load()
	if a == nil {
		return "", 0
	}
	what, since := a.what, a.since
	if !s.mu.TryLock() {
		return what + ", in a call of the runtime", time.Since(since)
	}
	defer s.mu.Unlock()
	var longest *queue
	for _, c := range s.contexts() {
		for _, q := range c.queues {
			if q.busy() && q.kernel != "" && (longest == nil || q.launched.Before(longest.launched)) {
				longest = q
			}
		}
	}
	if longest != nil {
		return fmt.Sprintf("%s: kernel %.64s of queue %d has not ended", what, longest.kernel, longest.id), time.Since(longest.launched)
	}
	return what, time.Since(since)
}
