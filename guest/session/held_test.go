package session

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

const held = gpuctlv1.SessionState_SESSION_STATE_HELD

// isHeld checks that a session is held and that no other operation begins on it.
func (b *bench) isHeld(why string) {
	b.t.Helper()
	s := b.session()
	if s.State != held || !strings.Contains(s.Message, why) {
		b.t.Fatalf("session is %v: %s", s.State, s.Message)
	}
	_, err := b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: testTarget}, b.sink)
	if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "is held: ") {
		b.t.Fatal(err)
	}
	if rec, err := readRecord(b.m.sessionDir(b.id)); err != nil || rec.Op == nil {
		b.t.Fatalf("the journal does not know of it: %+v, %v", rec, err)
	}
}

func (b *bench) isTold(res *gpuctlv1.SwapResult) {
	b.t.Helper()
	if !res.Held || res.RolledBack || res.Refused || res.GetSession().GetState() != held || !strings.Contains(res.Error, "not taken back yet: undo freeze: executor 1: thaw: fake failure") {
		b.t.Fatalf("%v", res)
	}
}

func TestThawThatFailsHoldsTheSessionUntilItIsThawed(t *testing.T) {
	for name, operate := range map[string]func(*bench) *gpuctlv1.SwapResult{
		"swap":    func(b *bench) *gpuctlv1.SwapResult { return b.swap(stepTransfer) },
		"suspend": func(b *bench) *gpuctlv1.SwapResult { return b.suspend("", stepExport) },
		"to file": func(b *bench) *gpuctlv1.SwapResult { return b.suspend(filepath.Join(b.dir, "state"), stepExport) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.l.setFailure("Thaw", errFake)
			b.isTold(operate(b))
			b.isHeld("undo freeze")
			b.l.setFailure("Thaw", nil)
			testkit.Until(b.t, "it is thawed", func() error { return testkit.Want(b.session().State == running, b.session()) })
			b.runsOn(1)
			if got := b.l.generation(1).thaws; got != 1 {
				t.Errorf("thawed %d times", got)
			}
			if res := b.swap(""); res.Error != "" {
				t.Fatal(res)
			}
		})
	}
}

func TestHeldSessionIsBroughtToRestByTheNextManager(t *testing.T) {
	b := newBench(t)
	b.l.setFailure("Thaw", errFake)
	b.isTold(b.swap(stepTransfer))
	b.restart(func() {})
	b.isHeld("a swap failed and is not taken back yet")
	b.l.setFailure("Thaw", nil)
	testkit.Until(b.t, "it is thawed", func() error { return testkit.Want(b.session().State == running, b.session()) })
	b.runsOn(1)
	if res := b.swap(""); res.Error != "" {
		t.Fatal(res)
	}
}

// An executor whose runtime computes does not answer for a while. That is no reason to end
// it.
func TestBusyExecutorIsNotLostByTheNextManager(t *testing.T) {
	for name, op := range map[string]struct {
		do  func(*bench)
		gen uint32
	}{
		"running":            {func(*bench) {}, 1},
		"swap at transfer":   {func(b *bench) { b.swap("kill_self@" + stepTransfer) }, 1},
		"swap after switch":  {func(b *bench) { b.swap("kill_self@" + stepSwitch) }, 2},
		"suspend at freeze":  {func(b *bench) { b.suspend("", "kill_self@"+stepFreeze) }, 1},
		"resume after store": {func(b *bench) { b.suspend("", ""); b.resume("kill_self@" + stepSwitch) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.restart(func() {
				defer b.l.setFailure("Describe", errFake) // it does not answer that it refuses
				op.do(b)
			})
			if s := b.session(); s.State != held || !strings.Contains(s.Message, "fake failure") {
				t.Fatalf("session is %v: %s", s.State, s.Message)
			}
			b.l.setFailure("Describe", nil)
			testkit.Until(b.t, "it runs again", func() error { return testkit.Want(b.session().State == running, b.session()) })
			b.runsOn(op.gen)
		})
	}
}

func TestHeldSessionEndsWithItsApplication(t *testing.T) {
	for _, again := range []bool{false, true} {
		b := newBench(t)
		b.l.setFailure("Thaw", errFake)
		b.isTold(b.swap(stepTransfer))
		if again {
			b.restart(func() {})
			b.isHeld("thaw")
			s, err := b.m.lookup(b.id)
			if err != nil {
				t.Fatal(err)
			}
			s.end() // a session that was taken over has no socket; its pid is this test's
		} else {
			b.conn.Close()
		}
		testkit.Until(b.t, "the session is gone", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
		if got := b.l.running(); len(got) != 0 {
			t.Fatalf("executors %v run", got)
		}
	}
}

func TestHeldSessionIsLostWithItsExecutor(t *testing.T) {
	b := newBench(t)
	b.l.setFailure("Thaw", errFake)
	b.isTold(b.swap(stepTransfer))
	b.l.generation(1).Kill()
	testkit.Until(b.t, "it is lost", func() error { return testkit.Want(b.session().State == lost, b.session()) })
}

func TestEndOfTheApplicationIsAllThatIsSaid(t *testing.T) {
	b := newBench(t)
	hangs := b.l.hangExport()
	done := make(chan *gpuctlv1.SwapResult)
	go func() {
		res, _ := b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: testTarget}, b.sink)
		done <- res
	}()
	<-hangs
	b.conn.Close()
	if res := <-done; !res.Ended || res.RolledBack || res.Held || res.Error != "the application has ended" {
		t.Errorf("%v", res)
	}
}

// current returns the session's executor as its manager has it.
func (b *bench) current() *executor {
	b.t.Helper()
	s, err := b.m.lookup(b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// hung makes an operation wait for an executor that makes no progress. It returns the
// operation's result, after told was called with what the executor waits for.
func (b *bench) hung(ctx context.Context, timeout time.Duration, told func(string)) *gpuctlv1.SwapResult {
	b.t.Helper()
	hangs := b.l.hangFinal()
	var once sync.Once
	var telling sync.WaitGroup
	done, over := make(chan *gpuctlv1.SwapResult, 1), make(chan struct{})
	go func() {
		res, err := b.m.Suspend(ctx, &gpuctlv1.SuspendRequest{Session: b.id, TimeoutMs: timeout.Milliseconds()}, func(p *gpuctlv1.Progress) {
			if p.Message == "" || p.Step != stepExport {
				return
			}
			once.Do(func() {
				telling.Go(func() { // it may be reported before the block
					select {
					case <-hangs:
						told(p.Message)
					case <-over:
					}
				})
			})
		})
		if err != nil {
			b.t.Error(err)
		}
		done <- res
	}()
	res := <-done
	close(over)
	telling.Wait()
	select {
	case <-hangs:
	default:
		b.t.Fatalf("it ended before it could hang: %v", res)
	}
	return res
}

// If an executor lives and reports what it waits for, the operation waits as long as the
// operator wants.
func TestBusyExecutorIsWaitedForAndSaysForWhat(t *testing.T) {
	b := newBench(t)
	b.current().silent = 5 * time.Second
	ctx, cancel := context.WithCancel(context.Background())
	said := ""
	res := b.hung(ctx, time.Hour, func(text string) { said = text; cancel() }) // only the operator ends it
	if want := "executor 1 waits: kernel spin of queue 3 has not ended, for 1m14s"; said != want {
		t.Errorf("it said %q, not %q", said, want)
	}
	if !res.RolledBack || !strings.Contains(res.Error, "context canceled") {
		t.Errorf("%v", res)
	}
	b.runsOn(1)

	res = b.hung(context.Background(), time.Second, func(string) {})
	if !res.RolledBack || !strings.Contains(res.Error, "no progress for 1s: it waits: kernel spin of queue 3 has not ended") {
		t.Errorf("%v", res)
	}
	b.runsOn(1)
}

func TestExecutorThatSaysNothingIsFoundAtOnce(t *testing.T) {
	b := newBench(t)
	b.l.setFailure("Pulse", errors.New("stuck"))
	b.current().silent = 100 * time.Millisecond
	res := b.hung(context.Background(), time.Hour, func(string) {})
	if !res.RolledBack || !strings.Contains(res.Error, "it does not answer: nothing was heard of it for 100ms") {
		t.Errorf("%v", res)
	}
	b.runsOn(1)
}

// An executor of an earlier version has no pulse: only its progress counts.
func TestExecutorWithoutPulseMayBeSilent(t *testing.T) {
	b := newBench(t)
	b.l.setFailure("Pulse", connect.NewError(connect.CodeUnimplemented, errors.New("no such method")))
	b.current().silent = 200 * time.Millisecond
	res := b.hung(context.Background(), time.Second, func(string) {})
	if !res.RolledBack || !strings.Contains(res.Error, "no progress for 1s") {
		t.Errorf("%v", res)
	}
	b.runsOn(1)
}

// The time limit for loading a runtime follows from earlier times on this machine.
func TestProbeOfASlowMachineGetsTheTimeThatItHasShown(t *testing.T) {
	b := newBench(t)
	const slow = "/lib/slow.so"
	limit := func() (left time.Duration) {
		t.Helper()
		_ = b.m.loading(t.Context(), slow, func(ctx context.Context) error {
			end, _ := ctx.Deadline()
			left = time.Until(end)
			return errFake // an error from which nothing is learned
		})
		return left
	}
	if left := limit(); left > leastLoad {
		t.Errorf("at first %v", left)
	}
	b.m.loads.Took(slow, 30*time.Second) // as the start of an executor did
	if left := limit(); left < time.Minute || left > 2*time.Minute {
		t.Errorf("%v, where a start took 30 s", left)
	}
}
