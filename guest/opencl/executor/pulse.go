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
	var held time.Time // since when nothing else is answered
	for {
		what, lasts := c.s.waitsFor()
		if what == "" {
			if what = c.s.inCall(); what == "" || held.IsZero() {
				held = time.Now()
			}
			lasts = time.Since(held)
		}
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

// inCall returns what the application has the executor do while nothing else is answered; empty: it
// answers.
func (s *session) inCall() string {
	if s.mu.TryLock() {
		s.mu.Unlock()
		return ""
	}
	if n := s.builds.Load(); n > 0 {
		return fmt.Sprintf("%d programs of the application are being built", n)
	}
	return "a call of the application to the runtime has not ended"
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
