package session

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// clings waits until the session is held because an executor was killed and lives.
func (b *bench) clings() {
	b.t.Helper()
	testkit.Until(b.t, "it is held by an executor that does not end", func() error {
		s := b.session()
		return testkit.Want(s.State == held && strings.Contains(s.Message, "it may still have its GPU"), s)
	})
}

func (b *bench) becomes(state gpuctlv1.SessionState) {
	b.t.Helper()
	testkit.Until(b.t, "it is "+state.String(), func() error { return testkit.Want(b.session().State == state, b.session()) })
}

// replace closes the manager, and makes the next one.
func (b *bench) replace() {
	b.t.Helper()
	b.m.Close()
	b.m = newManager(b.t, b.dir, b.l)
}

// begins starts an operation, whose result comes later.
func (b *bench) begins(operate func() (*gpuctlv1.SwapResult, error)) <-chan *gpuctlv1.SwapResult {
	done := make(chan *gpuctlv1.SwapResult, 1)
	go func() {
		res, err := operate()
		if err != nil {
			b.t.Error(err)
		}
		done <- res
	}()
	return done
}

func (b *bench) beginsSwap() <-chan *gpuctlv1.SwapResult {
	return b.begins(func() (*gpuctlv1.SwapResult, error) {
		return b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: testTarget}, b.sink)
	})
}

// succeedsLate checks that an operation is over when let was called, and not before.
func (b *bench) succeedsLate(let func(), done <-chan *gpuctlv1.SwapResult) {
	b.t.Helper()
	b.clings()
	select {
	case res := <-done:
		b.t.Fatalf("it is over: %v", res)
	default:
	}
	let()
	if res := <-done; res.Error != "" || res.Held {
		b.t.Fatal(res)
	}
}

// The driver may keep a process that was killed, and the process its GPU. The GPU is others'
// when the operation is over or the session no longer has it, so neither comes before the
// process has ended.
func TestNoGPUIsGivenBackBeforeItsExecutorHasEnded(t *testing.T) {
	for name, test := range map[string]func(*bench){
		"swap": func(b *bench) {
			b.succeedsLate(b.l.cling(1), b.beginsSwap())
			b.runsOn(2)
		},
		"suspend": func(b *bench) {
			b.succeedsLate(b.l.cling(1), b.begins(func() (*gpuctlv1.SwapResult, error) {
				return b.m.Suspend(context.Background(), &gpuctlv1.SuspendRequest{Session: b.id}, b.sink)
			}))
			b.isSuspended(toMemory)
		},
		"swap, and gpuguest is replaced": func(b *bench) {
			let, done := b.l.cling(1), b.beginsSwap()
			b.clings()
			b.replace()
			if res := <-done; !res.Held {
				b.t.Errorf("it is over: %v", res)
			}
			b.clings()
			let()
			b.becomes(running)
			b.runsOn(2)
		},
		"target that does not start": func(b *bench) {
			let := b.l.cling(2)
			b.l.setFailure("target.Describe", errFake)
			if res := <-b.beginsSwap(); !res.Held || res.RolledBack {
				b.t.Fatal(res)
			}
			b.clings()
			let()
			b.becomes(running)
			b.runsOn(1)
		},
		"end of the application": func(b *bench) {
			let := b.l.cling(1)
			b.conn.Close()
			b.clings()
			let()
			testkit.Until(b.t, "the session is gone", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
			if _, err := os.Stat(b.m.sessionDir(b.id)); !errors.Is(err, os.ErrNotExist) {
				b.t.Error(err)
			}
		},
		"end of the application, and gpuguest is replaced": func(b *bench) {
			let := b.l.cling(1)
			b.conn.Close()
			b.clings()
			b.replace()
			b.becomes(held)
			s, err := b.m.lookup(b.id)
			if err != nil {
				b.t.Fatal(err)
			}
			go s.end() // its pid is this test's
			let()
			testkit.Until(b.t, "the session is gone", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
		},
		"session that is lost": func(b *bench) {
			let := b.l.cling(1)
			s, err := b.m.lookup(b.id)
			if err != nil {
				b.t.Fatal(err)
			}
			s.lose("it is expelled")
			b.clings()
			if b.ring.State() != wire.StateLost {
				b.t.Error("the application does not know of it")
			}
			let()
			b.becomes(lost)
		},
		"session that its application has not received": func(b *bench) {
			let := b.l.cling(1)
			b.l.setFailure("Activate", errFake)
			if status, _ := b.connect("tok"); status == 0 {
				b.t.Fatal("it has received it")
			}
			for _, s := range b.m.list() {
				if s.id != b.id {
					b.id = s.id
				}
			}
			b.clings()
			let()
			testkit.Until(b.t, "the session is gone", func() error { return testkit.Want(len(b.m.list()) == 1, b.m.list()) })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(newBench(t))
		})
	}
}

// Others' executors get their turns, and are judged, by the loop that expels it.
func TestExecutorThatIsExpelledDuringAnOperationAndDoesNotEndKeepsNobodyWaiting(t *testing.T) {
	b := newBench(t)
	s, err := b.m.lookup(b.id)
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.op = &operation{}
	s.mu.Unlock()
	let := b.l.cling(1)
	began := time.Now()
	s.expel("it has had GPU one for 10m while others wait")
	if took := time.Since(began); took > retireTimeout*3/4 {
		t.Errorf("it took %v", took)
	}
	s.mu.Lock()
	s.op = nil
	s.mu.Unlock()
	let()
	<-b.l.generation(1).Done()
}
