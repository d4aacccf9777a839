package session

import (
	"context"
	"strings"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
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

// TestOperationThatABusyExecutorDoesNotAnswerSaysWhatItDoes: an executor that compiles, or whose runtime waits
// for a kernel, may answer nothing for longer than an operation waits.
func TestOperationThatABusyExecutorDoesNotAnswerSaysWhatItDoes(t *testing.T) {
	b := newBench(t)
	for kind, run := range map[string]func() (*gpuctlv1.SwapResult, error){
		"swap": func() (*gpuctlv1.SwapResult, error) {
			return b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: &gpuctlv1.Target{Gpu: "b", Runtime: &gpuctlv1.Runtime{Library: "b.so"}}, FreezeTimeoutMs: 400}, func(*gpuctlv1.Progress) {})
		},
		"suspend": func() (*gpuctlv1.SwapResult, error) {
			return b.m.Suspend(context.Background(), &gpuctlv1.SuspendRequest{Session: b.id, FreezeTimeoutMs: 400}, func(*gpuctlv1.Progress) {})
		},
	} {
		e := b.l.generation(1)
		e.mu.Lock()
		res, err := run()
		e.mu.Unlock()
		if err != nil || !res.RolledBack || !strings.Contains(res.Error, "kernel spin of queue 3 has not ended") || !strings.Contains(res.Error, "--freeze-timeout") {
			t.Errorf("%s: %v, %v", kind, res, err)
		}
	}
}
