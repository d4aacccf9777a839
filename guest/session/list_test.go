package session

import (
	"context"
	"testing"
	"time"
)

// TestBusyExecutorKeepsNoListWaiting: whoever wants to know of sessions gets what is known, as an
// application decides for how long its executor is busy.
func TestBusyExecutorKeepsNoListWaiting(t *testing.T) {
	b := newBench(t)
	s, err := b.m.lookup(b.id)
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.fresh = time.Time{}
	s.mu.Unlock()
	e := b.l.generation(1)
	e.mu.Lock()
	listed := make(chan int)
	for range 2 { // the second one comes while the executor is asked
		go func() { listed <- len(b.m.List(context.Background())) }()
	}
	for range 2 {
		if n := <-listed; n != 1 {
			t.Errorf("%d sessions", n)
		}
	}
	s.mu.Lock()
	answered := s.answered
	s.mu.Unlock()
	if answered == nil {
		t.Error("the lists waited until it was given up")
	}
	e.mu.Unlock()
	if answered != nil {
		<-answered
	}
}
