package session

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/engine"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/turn"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && (os.Args[1] == "executor" || os.Args[1] == "probe") {
		os.Exit(reportSurroundings())
	}
	testkit.HalfMain()
	goleak.VerifyTestMain(m)
}

const (
	running   = gpuctlv1.SessionState_SESSION_STATE_RUNNING
	suspended = gpuctlv1.SessionState_SESSION_STATE_SUSPENDED
	lost      = gpuctlv1.SessionState_SESSION_STATE_LOST
)

var testTarget = &gpuctlv1.Target{Gpu: "gpu-2", Runtime: &gpuctlv1.Runtime{Library: "/lib/fake.so"}}

// bench is a manager, its fake executors, and one application.
type bench struct {
	t    *testing.T
	dir  string
	l    *fakeLauncher
	m    *Manager
	conn *net.UnixConn
	fds  []int
	ring *shm.Ring
	reg  *shm.Region
	id   string
}

func newManager(t *testing.T, dir string, l *fakeLauncher, with ...func(*Config)) *Manager {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	c := Config{Dir: dir, Launcher: l, Logger: log, Faults: true}
	for _, set := range with {
		set(&c)
	}
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func newBench(t *testing.T, with ...func(*Config)) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "gs") // short, because unix addresses are
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{t: t, dir: dir, l: newFakeLauncher(t)}
	b.m = newManager(t, dir, b.l, with...)
	t.Cleanup(func() { b.m.Close() })
	if err := b.m.offer(&gpuctlv1.OfferRequest{Token: "tok", Claim: "claim-1", Target: testTarget}); err != nil {
		t.Fatal(err)
	}
	lis, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "apps"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lis.Close() })
	go func() { _ = b.m.ServeApps(lis) }()
	status, text := b.connect("tok")
	if status != 0 {
		t.Fatalf("greeting: %d %s", status, text)
	}
	b.id = text
	if b.reg, err = shm.Open(b.fds[0], wire.RingMem); err != nil {
		t.Fatal(err)
	}
	if b.ring, err = shm.NewRing(b.reg); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bench) connect(token string) (int32, string) {
	b.t.Helper()
	return b.connectTo(filepath.Join(b.dir, "apps"), token)
}

func (b *bench) connectTo(socket, token string) (int32, string) {
	b.t.Helper()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { conn.Close() })
	b.conn = conn
	hello := make([]byte, helloSize)
	binary.LittleEndian.PutUint32(hello, wire.HelloMagic)
	binary.LittleEndian.PutUint32(hello[4:], wire.Version)
	binary.LittleEndian.PutUint32(hello[8:], uint32(os.Getpid()))
	copy(hello[16:], token)
	if err := shm.SendFds(conn, hello, int(os.Stdout.Fd())); err != nil {
		b.t.Fatal(err)
	}
	buf := make([]byte, 8+maxAnswer)
	n, fds, err := shm.RecvFds(conn, buf, 3)
	if err != nil || n < 8 {
		b.t.Fatal(n, err)
	}
	b.fds = fds
	for _, fd := range fds {
		b.t.Cleanup(func() { _ = unix.Close(fd) })
	}
	return int32(binary.LittleEndian.Uint32(buf)), string(buf[8:n])
}

func (b *bench) session() *gpuctlv1.Session {
	b.t.Helper()
	s, err := b.m.lookup(b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	return s.snapshot()
}

func (b *bench) swap(failAt string) *gpuctlv1.SwapResult {
	b.t.Helper()
	res, err := b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: testTarget, FailAt: failAt}, b.sink)
	if err != nil {
		b.t.Fatal(err)
	}
	return res
}

func (b *bench) suspend(file, failAt string) *gpuctlv1.SwapResult {
	b.t.Helper()
	res, err := b.m.Suspend(context.Background(), &gpuctlv1.SuspendRequest{Session: b.id, File: file, FailAt: failAt}, b.sink)
	if err != nil {
		b.t.Fatal(err)
	}
	return res
}

func (b *bench) resume(failAt string) *gpuctlv1.SwapResult {
	b.t.Helper()
	res, err := b.m.Resume(context.Background(), &gpuctlv1.ResumeRequest{Session: b.id, Target: testTarget, FailAt: failAt}, b.sink)
	if err != nil {
		b.t.Fatal(err)
	}
	return res
}

func (b *bench) sink(*gpuctlv1.Progress) {}

// runsOn checks that the session is complete, on one executor of that generation.
func (b *bench) runsOn(gen uint32) {
	b.t.Helper()
	s := b.session()
	if s.State != running || s.Generation != gen {
		b.t.Fatalf("session is %v (%s) on %d, want RUNNING on %d", s.State, s.Message, s.Generation, gen)
	}
	if got := b.l.running(); !slices.Equal(got, []uint32{gen}) {
		b.t.Fatalf("executors %v run, want %d alone", got, gen)
	}
	e := b.l.generation(gen)
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.active || e.frozen || e.gated || e.holds {
		b.t.Fatalf("executor %d: active %v, frozen %v, gated %v, holds memory for an export %v", gen, e.active, e.frozen, e.gated, e.holds)
	}
	if !strings.HasPrefix(e.content, "content of ") {
		b.t.Fatalf("executor %d lost the contents: %q", gen, e.content)
	}
	if b.ring.Owner() != gen || b.ring.State() != wire.StateRunning {
		b.t.Fatalf("ring: owner %d, state %d", b.ring.Owner(), b.ring.State())
	}
	if rec, err := readRecord(b.m.sessionDir(b.id)); err != nil || rec.Op != nil || rec.Current.Generation != gen {
		b.t.Fatalf("journal: %+v, %v", rec, err)
	}
}

func (b *bench) isSuspended(to string) {
	b.t.Helper()
	s := b.session()
	if s.State != suspended || s.SuspendedTo != to {
		b.t.Fatalf("session is %v (%s), suspended to %q", s.State, s.Message, s.SuspendedTo)
	}
	if got := b.l.running(); len(got) != 0 {
		b.t.Fatalf("executors %v run", got)
	}
	if b.ring.State() != wire.StateSuspended {
		b.t.Fatalf("ring: state %d", b.ring.State())
	}
}

func TestSwapMovesTheSession(t *testing.T) {
	b := newBench(t)
	b.runsOn(1)
	for gen := uint32(2); gen < 5; gen++ {
		res := b.swap("")
		if res.Error != "" || res.RolledBack || res.StoppedNs <= 0 || res.BytesPrecopied == 0 || len(res.Steps) != 8 {
			t.Fatalf("%v", res)
		}
		if res.Session.State != running || res.Session.Target.Gpu != "gpu-2" {
			t.Fatalf("%v", res.Session)
		}
		b.runsOn(gen)
	}
}

func TestEveryFailureBeforeTheCommitRollsBackOnce(t *testing.T) {
	steps := stepNames(kindSwap)
	steps = steps[:len(steps)-1] // retire is after the commit
	for i, step := range steps {
		for _, fault := range []string{step, "kill_target@" + step} {
			if i < 2 && fault != step {
				continue // no target yet
			}
			t.Run(fault, func(t *testing.T) {
				b := newBench(t)
				res := b.swap(fault)
				if !res.RolledBack || res.Error == "" || !strings.HasPrefix(res.Error, step+":") {
					t.Fatalf("%v", res)
				}
				b.runsOn(1)
				want := 0
				if i >= slices.Index(steps, stepFreeze) {
					want = 1
				}
				if got := b.l.generation(1).thaws; got != want && fault == step {
					t.Fatalf("thawed %d times, want %d", got, want)
				}
				if res := b.swap(""); res.Error != "" {
					t.Fatalf("swap after a roll-back: %v", res)
				}
			})
		}
	}
}

func TestEveryFailingCallRollsBack(t *testing.T) {
	for _, method := range []string{"Describe", "target.Launch", "target.Describe", "Snapshot", "target.Prepare", "Export", "Freeze", "target.Activate"} {
		t.Run(method, func(t *testing.T) {
			b := newBench(t)
			b.l.setFailure(method, errFake)
			res := b.swap("")
			b.l.setFailure(method, nil)
			if !res.RolledBack || !strings.Contains(res.Error, errFake.Error()) {
				t.Fatalf("%v", res)
			}
			b.runsOn(1)
		})
	}
}

func TestFailureAfterTheCommitIsOnlyLogged(t *testing.T) {
	for _, fault := range []string{stepRetire, "kill_source@retire", "kill_source@switch"} {
		t.Run(fault, func(t *testing.T) {
			b := newBench(t)
			if res := b.swap(fault); res.Error != "" || res.RolledBack {
				t.Fatalf("%v", res)
			}
			b.runsOn(2)
		})
	}
}

func TestSourceThatDiesLosesTheSession(t *testing.T) {
	for _, step := range []string{stepCheck, stepPrepare, stepFreeze, stepTransfer} {
		t.Run(step, func(t *testing.T) {
			b := newBench(t)
			res := b.swap("kill_source@" + step)
			if res.RolledBack || res.Error == "" {
				t.Fatalf("%v", res)
			}
			if s := b.session(); s.State != lost || b.ring.State() != wire.StateLost {
				t.Fatalf("session is %v, ring %d", s.State, b.ring.State())
			}
			if got := b.l.running(); len(got) != 0 {
				t.Fatalf("executors %v run", got)
			}
		})
	}
}

func TestTargetThatTookRequestsCantBeRolledBack(t *testing.T) {
	b := newBench(t)
	b.m.die = func() { b.reg.Store64(wire.HdrHead, 64) } // as if the target had read
	b.l.setFailure("target.Activate", errFake)
	res := b.swap("kill_self@switch")
	if res.RolledBack || b.session().State != lost {
		t.Fatalf("%v", res)
	}
}

func TestRefusalTouchesNothing(t *testing.T) {
	b := newBench(t)
	small := &gpuctlv1.Target{Runtime: testTarget.Runtime, Limits: &gpuctlv1.Limits{GlobalMemory: 10, MaxAlloc: 5, MaxWorkGroupSize: 4}}
	res, err := b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: small}, b.sink)
	if err != nil || !res.Refused || res.RolledBack || len(res.Reasons) != 3 {
		t.Fatal(res, err)
	}
	// The limits of the real device count, whatever the inventory has.
	b.l.limits = &gpuctlv1.Limits{MaxAlloc: 5}
	if res := b.swap(""); !res.Refused || len(res.Reasons) != 1 {
		t.Fatal(res)
	}
	b.l.limits = nil
	b.l.reasons = []*gpuctlv1.Reason{{Code: "build", Message: "program 64 does not build"}}
	if res := b.swap(""); !res.Refused || res.Reasons[0].Code != "build" {
		t.Fatal(res)
	}
	b.l.reasons = nil
	b.runsOn(1)
}

func TestBlockersAreNamed(t *testing.T) {
	b := newBench(t)
	b.l.blockers = []string{"kernel spin of queue 70"}
	res := b.swap("")
	if !res.RolledBack || !strings.Contains(res.Error, "kernel spin of queue 70") {
		t.Fatal(res)
	}
	b.runsOn(1)
}

func TestSecondOperationIsRefused(t *testing.T) {
	b := newBench(t)
	hangs := b.l.hangExport()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan *gpuctlv1.SwapResult)
	go func() {
		res, _ := b.m.Swap(ctx, &gpuctlv1.SwapRequest{Session: b.id, Target: testTarget}, b.sink)
		done <- res
	}()
	<-hangs
	_, err := b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: testTarget}, b.sink)
	if connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "a swap is running, at step precopy") {
		t.Fatal(err)
	}
	cancel() // up to the commit point, a cancelled context causes a roll-back
	if res := <-done; !res.RolledBack {
		t.Fatal(res)
	}
	b.runsOn(1)
}

// An executor that writes into pages that are taken away dies, and the session with it.
func TestSuspendToMemoryThatIsGivenUpWhileItWrites(t *testing.T) {
	b := newBench(t)
	hangs := b.l.hangExport()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan *gpuctlv1.SwapResult)
	go func() {
		res, _ := b.m.Suspend(ctx, &gpuctlv1.SuspendRequest{Session: b.id}, b.sink)
		done <- res
	}()
	<-hangs
	cancel()
	if res := <-done; !res.RolledBack {
		t.Fatal(res)
	}
	b.runsOn(1)
	b.stateIsEmpty()
	if res := b.suspend("", ""); res.Error != "" {
		t.Fatal(res)
	}
	b.isSuspended(toMemory)
}

// stateIsEmpty checks that the session's state memory uses no memory.
func (b *bench) stateIsEmpty() {
	b.t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(b.fds[2], &st); err != nil || st.Size != 0 {
		b.t.Fatal(st.Size, err)
	}
}

func TestEndOfTheApplicationEndsEverything(t *testing.T) {
	for _, during := range []string{"running", "swap", "suspended"} {
		t.Run(during, func(t *testing.T) {
			b := newBench(t)
			file := filepath.Join(t.TempDir(), "state")
			done := make(chan struct{})
			switch during {
			case "swap":
				hangs := b.l.hangExport()
				go func() {
					defer close(done)
					b.swap("")
				}()
				<-hangs
			case "suspended":
				b.suspend(file, "")
				close(done)
			default:
				close(done)
			}
			b.conn.Close()
			<-done
			testkit.Until(b.t, "the session is gone", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
			if got := b.l.running(); len(got) != 0 {
				t.Fatalf("executors %v run", got)
			}
			for _, p := range []string{b.m.sessionDir(b.id), file} {
				if _, err := os.Stat(p); !errors.Is(err, os.ErrNotExist) {
					t.Fatalf("%s is left: %v", p, err)
				}
			}
		})
	}
}

func TestDeadExecutorLosesTheSession(t *testing.T) {
	b := newBench(t)
	b.l.generation(1).Kill()
	testkit.Until(b.t, "the ring says lost", func() error { return testkit.Want(b.ring.State() == wire.StateLost, b.ring.State()) })
	testkit.Until(b.t, "the session says lost", func() error {
		return testkit.Want(b.session().State == lost && strings.Contains(b.session().Message, "was killed"), b.session())
	})
	if _, err := b.m.Swap(context.Background(), &gpuctlv1.SwapRequest{Session: b.id, Target: testTarget}, b.sink); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Fatal(err)
	}
}

func TestSuspendAndResume(t *testing.T) {
	for _, to := range []string{toMemory, "file"} {
		t.Run(to, func(t *testing.T) {
			b := newBench(t)
			file, where := "", toMemory
			if to == "file" {
				file = filepath.Join(t.TempDir(), "state")
				where = file
			}
			for _, step := range []string{stepCheck, stepPrecopy, stepFreeze, stepExport, stepMark} {
				if res := b.suspend(file, step); !res.RolledBack {
					t.Fatalf("%s: %v", step, res)
				}
				b.runsOn(1)
				if file != "" {
					if left, _ := filepath.Glob(file + "*"); len(left) > 0 {
						t.Fatalf("%s left %v", step, left)
					}
				}
			}
			if res := b.suspend(file, ""); res.Error != "" {
				t.Fatal(res)
			}
			b.isSuspended(where)
			for _, fault := range []string{stepCheck, stepStart, stepPrepare, stepLoad, stepSwitch, "kill_target@prepare", "kill_target@load", "kill_target@switch"} {
				if res := b.resume(fault); !res.RolledBack {
					t.Fatalf("%s: %v", fault, res)
				}
				b.isSuspended(where)
			}
			res := b.swap("") // a swap of a suspended session is a resume
			if res.Error != "" {
				t.Fatal(res)
			}
			b.runsOn(res.Session.Generation)
			if st, _ := os.Stat(file); st != nil {
				t.Fatal("the file is left")
			}
			b.stateIsEmpty()
		})
	}
}

// restart kills the manager at the fault's step and starts another one.
func (b *bench) restart(op func()) {
	b.t.Helper()
	dead := make(chan struct{})
	old := b.m
	old.die = func() { runtime.Goexit() }
	go func() {
		defer close(dead)
		op()
	}()
	<-dead
	for _, s := range old.list() {
		s.release()
	}
	old.cancel()
	old.wg.Wait()
	old.lock.Close()
	b.m = newManager(b.t, b.dir, b.l)
}

func TestNextManagerFinishesOrRollsBack(t *testing.T) {
	for _, step := range stepNames(kindSwap) {
		t.Run("swap/"+step, func(t *testing.T) {
			b := newBench(t)
			b.restart(func() { b.swap("kill_self@" + step) })
			want := uint32(1)
			if step == stepSwitch || step == stepRetire {
				want = 2
			}
			b.runsOn(want)
			if res := b.swap(""); res.Error != "" {
				t.Fatal(res)
			}
		})
	}
	for _, to := range []string{toMemory, "file"} {
		for _, step := range stepNames(kindSuspend) {
			t.Run("suspend/"+to+"/"+step, func(t *testing.T) {
				b := newBench(t)
				file, where := "", to
				if to == "file" {
					file = filepath.Join(t.TempDir(), "state")
					where = file
				}
				b.restart(func() { b.suspend(file, "kill_self@"+step) })
				if step == stepMark || step == stepRetire {
					b.isSuspended(where)
				} else {
					b.runsOn(1)
					b.stateIsEmpty()
				}
				if left, _ := filepath.Glob(file + "*"); file != "" && b.session().State == running && len(left) > 0 {
					t.Fatalf("left %v", left)
				}
			})
		}
		for _, step := range stepNames(kindResume) {
			t.Run("resume/"+to+"/"+step, func(t *testing.T) {
				b := newBench(t)
				file, where := "", to
				if to == "file" {
					file = filepath.Join(t.TempDir(), "state")
					where = file
				}
				b.suspend(file, "")
				b.restart(func() { b.resume("kill_self@" + step) })
				if step == stepSwitch || step == stepDiscard {
					b.runsOn(2)
					return
				}
				b.isSuspended(where)
				res := b.resume("")
				if res.Error != "" {
					t.Fatal(res)
				}
				b.runsOn(res.Session.Generation)
			})
		}
	}
}

func TestTargetDeadWhileManagerWasAway(t *testing.T) {
	b := newBench(t)
	b.restart(func() {
		b.m.die = func() { b.l.generation(2).Kill(); runtime.Goexit() }
		b.swap("kill_self@switch")
	})
	b.runsOn(1) // the owner word was set back
	if got := b.l.generation(1).thaws; got != 1 {
		t.Fatalf("thawed %d times", got)
	}
}

func TestSourceThawedItselfWhileManagerWasAway(t *testing.T) {
	b := newBench(t)
	b.restart(func() {
		b.suspend("", "kill_self@mark")
	})
	b.isSuspended(toMemory)
	b = newBench(t)
	b.restart(func() {
		defer func() { // runs after the manager's death
			e := b.l.generation(1)
			e.mu.Lock()
			e.gated, e.frozen = false, false
			e.mu.Unlock()
		}()
		b.suspend("", "kill_self@mark")
	})
	b.runsOn(1) // the executor is newer than the saved state
}

func TestExecutorDeadWhileManagerWasAway(t *testing.T) {
	b := newBench(t)
	b.restart(func() { b.l.generation(1).Kill() })
	if s := b.session(); s.State != lost || b.ring.State() != wire.StateLost {
		t.Fatal(s)
	}
}

func TestApplicationGoneWhileManagerWasAway(t *testing.T) {
	b := newBench(t)
	dir := b.m.sessionDir(b.id)
	b.restart(func() {
		rec, err := readRecord(dir)
		if err != nil {
			t.Error(err)
			return
		}
		rec.Start++ // another process has the pid now
		raw, _ := json.Marshal(rec)
		if err := replaceFile(dir, recordName, raw); err != nil {
			t.Error(err)
		}
	})
	if len(b.m.list()) != 0 || len(b.l.running()) != 0 {
		t.Fatal(b.m.list(), b.l.running())
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
}

func TestSecondManagerIsRefused(t *testing.T) {
	b := newBench(t)
	if _, err := New(Config{Dir: b.dir, Launcher: b.l, Logger: slog.Default()}); !errors.Is(err, engine.ErrLocked) {
		t.Fatal(err)
	}
}

func TestUnknownTokenIsRefused(t *testing.T) {
	b := newBench(t)
	if status, text := b.connect("other"); status != clDeviceNotAvailable || !strings.Contains(text, "unknown token") {
		t.Fatal(status, text)
	}
	b.l.setFailure("Launch", errors.New("no such library"))
	if status, text := b.connect("tok"); status != clDeviceNotAvailable || !strings.Contains(text, "no such library") {
		t.Fatal(status, text)
	}
	if entries, _ := os.ReadDir(filepath.Join(b.dir, "sessions")); len(entries) != 1 {
		t.Fatal(entries)
	}
}

func TestOffersOutliveTheManager(t *testing.T) {
	b := newBench(t)
	b.restart(func() {})
	if o, ok := b.m.offered("tok"); !ok || o.Claim != "claim-1" {
		t.Fatal(o)
	}
	b.runsOn(1)
}

func TestPlan(t *testing.T) {
	b := newBench(t)
	p, err := b.m.Plan(context.Background(), &gpuctlv1.PlanRequest{Session: b.id, Target: testTarget, Build: true})
	if err != nil || len(p.Reasons) != 0 || p.Bytes != 1000 || p.PredictedNs <= p.PredictedStopNs || len(p.Steps) != 8 {
		t.Fatal(p, err)
	}
	b.runsOn(1)
	b.l.setFailure("target.Prepare", errFake)
	p, err = b.m.Plan(context.Background(), &gpuctlv1.PlanRequest{Session: b.id, Target: testTarget, Build: true})
	if err != nil || len(p.Reasons) != 1 {
		t.Fatal(p, err)
	}
	b.runsOn(1)
}

func TestWatch(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	seen := make(chan *gpuctlv1.Session, 100)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = b.m.Watch(ctx, func(s *gpuctlv1.Session) error { seen <- s; return nil })
	}()
	if s := <-seen; s.State != running {
		t.Fatal(s)
	}
	b.conn.Close()
	for s := range seen {
		if s.State == gpuctlv1.SessionState_SESSION_STATE_ENDED {
			break
		}
	}
	cancel()
	<-done
}

func TestReasonsListsEveryReason(t *testing.T) {
	usage := &gpuctlv1.Usage{
		Memory: 3 << 30, LargestAlloc: 2 << 30, LocalMemory: 65536, LargestWorkGroup: 1024,
		WorkItemSizes: []uint64{1024, 2, 1}, Images: 3,
	}
	limits := &gpuctlv1.Limits{
		GlobalMemory: 1 << 30, MaxAlloc: 1 << 28, LocalMemory: 32768, MaxWorkGroupSize: 256,
		MaxWorkItemSizes: []uint64{256, 256, 256},
	}
	var codes []string
	for _, r := range Reasons(usage, limits) {
		codes = append(codes, r.Code)
	}
	want := []string{"memory", "max_alloc", "local_memory", "work_group_size", "work_item_sizes", "images"}
	if !slices.Equal(codes, want) {
		t.Fatalf("%v, want %v", codes, want)
	}
	if m := Reasons(usage, limits)[0].Message; m != "the session's memory objects take 3 GiB, the GPU has 1 GiB" {
		t.Fatal(m)
	}
}

// A session that has ended while a message about it was being sent must not be reported as
// running: who receives that counts its GPU as used.
func TestWatcherHearsHowASessionIsNow(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m := &Manager{ctx: ctx, sessions: map[string]*session{}}
	m.sharing = newSharing(m, turn.DefaultConfig())
	s := &session{m: m, id: "s-1", rec: record{ID: "s-1"}, state: running}
	m.add(s)
	said, read := make(chan gpuctlv1.SessionState), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = m.Watch(ctx, func(s *gpuctlv1.Session) error {
			said <- s.State
			<-read
			return nil
		})
	})
	defer wg.Wait()
	defer cancel()
	if got := <-said; got != running {
		t.Fatal(got)
	}
	m.changed(s) // while the listener is busy
	s.mu.Lock()
	s.state = gpuctlv1.SessionState_SESSION_STATE_ENDED
	s.mu.Unlock()
	read <- struct{}{}
	if got := <-said; got != gpuctlv1.SessionState_SESSION_STATE_ENDED {
		t.Errorf("said to be %v after its end", got)
	}
	read <- struct{}{}
}

// A lost session is known as lost after its application, which was told, has ended, and to
// the next gpuguest. One whose application has ended by itself is not.
func TestLostSessionIsRememberedAfterItsApplication(t *testing.T) {
	b := newBench(t)
	b.l.generation(1).Kill()
	testkit.Until(b.t, "the session is lost", func() error { return testkit.Want(b.session().State == lost, b.session()) })
	remembered := func() {
		t.Helper()
		if all := b.m.Lost(); len(all) != 1 || all[0].GetId() != b.id || !strings.Contains(all[0].GetReason(), "was killed") || all[0].GetLostUnixMs() == 0 {
			t.Errorf("lost: %v", all)
		}
	}
	remembered()
	b.conn.Close()
	testkit.Until(b.t, "the session is over", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
	remembered()
	b.m.Close()
	b.m = newManager(t, b.dir, b.l)
	remembered()

	b = newBench(t)
	b.conn.Close()
	testkit.Until(b.t, "the session is over", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
	if all := b.m.Lost(); len(all) != 0 {
		t.Errorf("its application has ended, and it counts as lost: %v", all)
	}
}

// An application that ends because of its executor's death may be noticed first.
func TestSessionIsLostAlsoIfItsApplicationIsFaster(t *testing.T) {
	for range 20 {
		b := newBench(t)
		e := b.l.generation(1)
		e.Kill()
		<-e.Done()
		b.conn.Close()
		testkit.Until(b.t, "the session is over", func() error { return testkit.Want(len(b.m.list()) == 0, b.m.list()) })
		testkit.Until(b.t, "it is known as lost", func() error { return testkit.Want(b.m.losses.Has(b.id), b.m.Lost()) })
	}
}
