package session

import (
	"runtime"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

func (b *bench) isLost() {
	b.t.Helper()
	if s := b.session(); s.State != lost || b.ring.State() != wire.StateLost {
		b.t.Fatalf("session is %v, ring %d", s.State, b.ring.State())
	}
	if got := b.l.running(); len(got) != 0 {
		b.t.Fatalf("executors %v run", got)
	}
}

// diesWithItsTarget ends the manager in a resume that has handed over, and its target after did.
func (b *bench) diesWithItsTarget(did func()) {
	b.restart(func() {
		b.m.die = func() {
			did()
			b.l.generation(2).Kill()
			runtime.Goexit()
		}
		b.resume("kill_self@switch")
	})
}

// A resume whose target has taken requests and died loses the session. The state that it was
// resumed from is still there, but older than what the application was told.
func TestLostSessionIsNotResumedByTheNextManager(t *testing.T) {
	b := newBench(t)
	b.suspend("", "")
	b.m.die = func() { b.reg.Store64(wire.HdrHead, 64) } // as if the target had read
	b.l.setFailure("target.Activate", errFake)
	if res := b.resume("kill_self@switch"); res.RolledBack || b.session().State != lost {
		t.Fatalf("%v", res)
	}
	for range 2 {
		b.restart(func() {})
		b.isLost()
	}
}

// The same, if it is the next manager that finds it lost.
func TestSessionThatAManagerFindsLostIsLostForTheOneAfterIt(t *testing.T) {
	b := newBench(t)
	b.suspend("", "")
	b.diesWithItsTarget(func() { b.reg.Store64(wire.HdrHead, 64) })
	b.isLost()
	b.restart(func() {})
	b.isLost()
}

// A target runs calls that have waited, and answers them, without reading a request. Another
// one would run them again.
func TestResumeWhoseTargetHasBegunToServeIsNotUndone(t *testing.T) {
	b := newBench(t)
	b.suspend("", "")
	b.diesWithItsTarget(func() { b.ring.SetServing(2) })
	b.isLost()
}
