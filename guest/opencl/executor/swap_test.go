package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func noProgress(string, uint64, uint64) {}

func swap(ctx context.Context, dir string, from, to *session, _ uint32) error {
	sock := filepath.Join(dir, "i")
	l, err := net.Listen("unix", sock)
	if err != nil {
		return err
	}
	defer l.Close()
	go to.serveImports(l)
	if err := move(ctx, from, to, sock, false); err != nil {
		return err
	}
	if _, err := from.freeze(ctx, 10*time.Second); err != nil {
		return err
	}
	if err := move(ctx, from, to, sock, true); err != nil {
		from.thaw()
		return err
	}
	takeOver(from, to)
	return nil
}

// move creates the source's objects on the target, and sends their contents to the socket at
// which the target receives.
func move(ctx context.Context, from, to *session, sock string, final bool) error {
	from.mu.Lock()
	b, err := from.graph(final).encode()
	from.mu.Unlock()
	if err != nil {
		return err
	}
	g, err := decodeGraph(b)
	if err != nil {
		return err
	}
	to.mu.Lock()
	err = to.restore(g, noProgress)
	to.mu.Unlock()
	if err != nil {
		return err
	}
	p, err := from.dialPeer(ctx, sock)
	if err != nil {
		return err
	}
	return from.export(ctx, sock, false, final, p, noProgress)
}

// takeOver ends a swap after the target has received everything.
func takeOver(from, to *session) {
	from.ring.(*shm.Ring).SetOwner(to.cfg.Generation)
	to.activate()
	from.closed.Store(true)
	from.retire()
	from.mu.Lock()
	from.host.end()
	from.mu.Unlock()
}

func equal(t *testing.T, got []uint32, want uint32) {
	t.Helper()
	for i, v := range got {
		if v != want {
			t.Fatalf("element %d is %d, want %d", i, v, want)
		}
	}
}

func TestLaunchAndRead(t *testing.T) {
	c := newClient(t)
	c.executor(1).activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 7)
	for range 100 {
		c.launch(q, k, b, 2, 1024, 0)
	}
	equal(t, c.read(q, b, 4096), 207)
	c.call(&wire.Finish{Queue: q})
}

// A command that waits for a user event is not enqueued before the event is set, whatever
// the application does in the meantime. Such a command survives a swap.
func TestHeldCommandsSurviveSwap(t *testing.T) {
	for _, swapped := range []bool{false, true} {
		c := newClient(t)
		s := c.executor(1)
		s.activate()
		ctx, q, k := c.setup(cl.QueueProfilingEnable)
		b := c.buffer(ctx, 4096)
		c.fill(q, b, 4096, 1)
		u, e := c.id(), c.id()
		c.post(&wire.CreateUserEvent{ID: u, Context: ctx})
		c.launch(q, k, b, 10, 1024, e, u)
		c.launch(q, k, b, 100, 1024, 0)
		c.post(&wire.Release{ID: k})
		finish := c.start(&wire.Finish{Queue: q})
		waiter := c.start(&wire.WaitEvents{Wait: []uint32{e}})
		c.post(&wire.Release{ID: b})
		b2 := c.buffer(ctx, 64) // the application continues in the meantime
		_ = b2
		if c.answered(finish) || c.answered(waiter) {
			t.Fatal("a wait on a user event returned early")
		}
		if swapped {
			to := c.executor(2)
			c.swap(s, to)
			time.Sleep(20 * time.Millisecond) // there is no event that shows that no answer comes
			if c.answered(finish) {
				t.Fatal("finish returned over the swap")
			}
		}
		c.call(&wire.SetUserEvent{Event: u, Status: 0})
		if st, _ := c.answer(waiter); st != cl.Success {
			t.Fatal(st)
		}
		if st, _ := c.answer(finish); st != cl.Success {
			t.Fatal(st)
		}
		ts := numbers(c.call(&wire.EventProfiling{Event: e}))
		for i := 1; i < 4; i++ {
			if ts[i] < ts[i-1] {
				t.Fatalf("times go back: %v", ts)
			}
		}
	}
}

// A session keeps its contents, kernel arguments and timestamps over many swaps.
func TestSwapChain(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, k := c.setup(cl.QueueProfilingEnable)
	b := c.buffer(ctx, 1<<20)
	c.fill(q, b, 1<<20, 5)
	want := uint32(5)
	var last uint64
	for gen := uint32(2); gen < 6; gen++ {
		for range 10 {
			c.launch(q, k, b, 3, 1<<18, 0)
			want += 3
		}
		extra := c.buffer(ctx, 1<<16)
		c.fill(q, extra, 1<<16, gen)
		to := c.executor(gen)
		c.swap(s, to)
		s = to
		equal(t, c.read(q, extra, 1<<16), gen)
		if gen%2 == 0 {
			c.post(&wire.Release{ID: extra})
		}
		e := c.id()
		c.launch(q, k, b, 1, 1<<18, e)
		want++
		c.call(&wire.WaitEvents{Wait: []uint32{e}})
		ts := numbers(c.call(&wire.EventProfiling{Event: e}))
		if ts[0] < last {
			t.Fatalf("generation %d: queued at %d, before %d", gen, ts[0], last)
		}
		last = ts[3]
		equal(t, c.read(q, b, 1<<20), want)
	}
}

// A sub-buffer of a released buffer survives a swap, even if the application has given the
// buffer's id to another buffer.
func TestSubBufferOfAReleasedBufferSurvivesSwap(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, k := c.setup(0)
	parent, part := c.buffer(ctx, 8192), c.id()
	c.fill(q, parent, 8192, 5)
	c.call(&wire.CreateSubBuffer{ID: part, Parent: parent, Origin: 4096, Size: 4096})
	c.post(&wire.Release{ID: parent})
	c.call(&wire.CreateBuffer{ID: parent, Context: ctx, Flags: cl.MemReadWrite, Size: 8192})
	c.fill(q, parent, 8192, 9)
	c.call(&wire.Finish{Queue: q})
	for gen := uint32(2); gen < 4; gen++ {
		to := c.executor(gen)
		c.swap(s, to)
		s = to
		c.launch(q, k, part, 1, 1024, 0)
		equal(t, c.read(q, part, 4096), 4+gen)
		equal(t, c.read(q, parent, 8192), 9)
	}
	c.post(&wire.Release{ID: part})
	c.call(&wire.Finish{Queue: q})
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ghosts) != 0 {
		t.Fatalf("%d released objects are kept that nobody uses", len(s.ghosts))
	}
}

// A target releases an object that it has prepared if the newer graph does not have it any
// more, even if a parked call still used the object during the first preparation.
func TestTargetDropsWhatWasReleasedWhileItWasPrepared(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, k := c.setup(0)
	b, u := c.buffer(ctx, 4096), c.id()
	c.post(&wire.CreateUserEvent{ID: u, Context: ctx})
	c.launch(q, k, b, 1, 1024, 0, u)
	c.post(&wire.Release{ID: b})
	c.call(&wire.DeviceTimer{Device: 1}) // all earlier requests have run when it returns
	to := c.executor(2)
	prepare := func() {
		s.mu.Lock()
		g := s.graph(false)
		s.mu.Unlock()
		to.mu.Lock()
		defer to.mu.Unlock()
		if err := to.restore(g, noProgress); err != nil {
			t.Fatal(err)
		}
	}
	prepare()
	if len(to.ghosts) != 1 {
		t.Fatalf("%d released objects were prepared, not 1", len(to.ghosts))
	}
	c.call(&wire.SetUserEvent{Event: u, Status: 0})
	c.call(&wire.Finish{Queue: q})
	c.post(&wire.Release{ID: u})
	c.call(&wire.DeviceTimer{Device: 1})
	prepare()
	if len(to.ghosts) != 0 || to.memory != 0 {
		t.Fatalf("%d released objects are left, %d bytes of memory", len(to.ghosts), to.memory)
	}
}

// A write in which the application takes part may continue while an export reads the buffer
// and marks it as clean. The bytes that are written after that must be exported again.
func TestBulkWriteUnderAnExportIsNotLost(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	const size = 1 << 20
	b := c.buffer(ctx, size)
	slot := c.start(&wire.WriteBuffer{Queue: q, Mem: b, Blocking: 1, Size: size, Mode: wire.DataBulk, Pend: 1})
	testkit.Until(t, "the transfer has its lane", func() error {
		state := c.ring.Load32(wire.LaneOff + wire.LaneState)
		return testkit.Want(state == wire.LaneDirect, state)
	})
	s.mu.Lock()
	m := lookup[mem](s, b)
	clear(m.dirty) // as session.contents does
	s.mu.Unlock()
	c.ring.Store32(wire.LaneOff+wire.LaneDone, 1)
	shm.FutexWake(c.ring.Word32(wire.LaneOff+wire.LaneDone), shm.All)
	if st, _ := c.answer(slot); st != cl.Success {
		t.Fatal(st)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !anyOf(m.dirty) {
		t.Fatal("the buffer counts as clean")
	}
}

// An executor that retires after another one has taken over does not free the contents, even
// if it has begun a suspension to a file before and not finished it.
func TestSourceLeavesContentsAloneAfterAGivenUpSuspension(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, 4096)
	c.fill(q, b, 4096, 3)
	c.call(&wire.Finish{Queue: q})
	file := filepath.Join(t.TempDir(), "state")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	s.handed.put(file, f)
	if err := s.exportState(t.Context(), file, &gpuctlv1.ExportRequest{File: file, All: true}, noProgress); err != nil {
		t.Fatal(err)
	}
	to := c.executor(2)
	c.swap(s, to)
	equal(t, c.read(q, b, 4096), 3)
}

// What an export has written is forgotten with it: who wanted it may not live to say so. A
// complete state is the only copy of a session that is about to be suspended, so it stays.
func TestStateOfAnExportThatIsGivenUpIsDiscarded(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	c.fill(q, c.buffer(ctx, 4096), 4096, 3)
	export := func(ctx context.Context, final bool) error {
		if !final {
			f, err := os.Create(filepath.Join(t.TempDir(), "state"))
			if err != nil {
				t.Fatal(err)
			}
			s.handed.put("state", f)
		}
		return s.exportState(ctx, "state", &gpuctlv1.ExportRequest{File: "state", All: !final, Final: final}, noProgress)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := export(gone, false); !errors.Is(err, context.Canceled) || s.stateTo != nil {
		t.Fatal(err, s.stateTo)
	}
	api := &controller{s: s}
	discard := func() error {
		_, err := api.Discard(t.Context(), connect.NewRequest(&gpuctlv1.DiscardRequest{}))
		return err
	}
	if err := errors.Join(export(t.Context(), false), discard()); err != nil || s.stateTo != nil {
		t.Fatal(err, s.stateTo)
	}
	if err := export(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.freeze(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := export(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if err := discard(); connect.CodeOf(err) != connect.CodeFailedPrecondition || s.stateTo == nil {
		t.Fatal(err, s.stateTo)
	}
	s.thaw()
	if s.stateTo != nil {
		t.Fatal("a session that goes on keeps its old state")
	}
	if err := s.openWindow(windowChunk); err != nil { // as an export from a card does
		t.Fatal(err)
	}
	if err := discard(); err != nil || s.windowSize != 0 {
		t.Fatal(err, s.windowSize)
	}
}

// emptyState returns a file into which the session's contents are exported, and its sink.
func emptyState(t *testing.T, s *session) (*stateFile, *os.File) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	w := newStateFile(s, f, false)
	if err := w.reserve(); err != nil {
		t.Fatal(err)
	}
	return w, f
}

// A disk that has no room after all, or somebody who cuts the file, is an error at most, and
// not the end of the executor.
func TestStateFileThatIsCutDoesNotEndTheExecutor(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, 1<<20)
	c.fill(q, b, 1<<20, 3)
	c.call(&wire.Finish{Queue: q})
	w, f := emptyState(t, s)
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.export(t.Context(), "state", true, false, w, noProgress), w.finish()); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	for at := range 1 << 18 {
		equal(t, []uint32{binary.LittleEndian.Uint32(got[4*at:])}, 3)
	}
	ro, err := os.Open(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	w.f = ro // as if the disk were full
	if err := s.export(t.Context(), "state", true, false, w, noProgress); err == nil || !strings.Contains(err.Error(), "write "+ro.Name()) {
		t.Fatal(err)
	}
}

// A parked launch keeps its kernel's program in a swap, even if the kernel and the program
// were released and the program's id is used again.
func TestParkedLaunchKeepsItsProgramOverASwap(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	p, k, b, u := c.id(), c.id(), c.buffer(ctx, 4096), c.id()
	c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte(
		"kernel void double_it(global uint *a, uint n) { a[get_global_id(0)] *= n; }")})
	c.call(&wire.BuildProgram{Program: p})
	c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("double_it")})
	c.fill(q, b, 4096, 5)
	c.post(&wire.CreateUserEvent{ID: u, Context: ctx})
	c.launch(q, k, b, 3, 1024, 0, u)
	c.post(&wire.Release{ID: k})
	c.post(&wire.Release{ID: p})
	c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte("kernel void other(void) {}")})
	for gen := uint32(2); gen < 4; gen++ {
		to := c.executor(gen)
		c.swap(s, to)
		s = to
	}
	c.call(&wire.SetUserEvent{Event: u, Status: 0})
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, 4096), 15)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ghosts) != 0 {
		t.Fatalf("%d released objects are kept that nobody uses", len(s.ghosts))
	}
}

// prepare creates the source's objects on the target and sends their contents, while the
// application runs.
func prepare(t *testing.T, from, to *session, peer string) {
	t.Helper()
	if err := move(t.Context(), from, to, peer, false); err != nil {
		t.Fatal(err)
	}
}

// discrete makes a session behave as on a device with memory of its own.
func discrete(ss ...*session) {
	for _, s := range ss {
		s.unified = false
	}
}

// prepared returns the socket at which a target receives contents.
func prepared(t *testing.T, to *session) string {
	t.Helper()
	sock := filepath.Join(t.TempDir(), "i")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go to.serveImports(l)
	return sock
}

// finish ends a swap whose target is prepared.
func finish(t *testing.T, from, to *session, peer string) {
	t.Helper()
	if _, err := from.freeze(t.Context(), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := move(t.Context(), from, to, peer, true); err != nil {
		t.Fatal(err)
	}
	takeOver(from, to)
}

// If the application releases a buffer during the preparation and keeps a sub-buffer, the
// target creates the buffer again. The sub-buffer must then be a part of the new buffer.
func TestPartOfABufferReleasedDuringThePreparationKeepsItsContent(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	discrete(s)
	s.activate()
	ctx, q, _ := c.setup(0)
	whole, part := c.buffer(ctx, 8192), c.id()
	c.fill(q, whole, 8192, 5)
	c.call(&wire.CreateSubBuffer{ID: part, Parent: whole, Origin: 4096, Size: 4096})
	c.call(&wire.Finish{Queue: q})
	to := c.executor(2)
	discrete(to)
	peer := prepared(t, to)
	prepare(t, s, to, peer)
	c.post(&wire.Release{ID: whole})
	c.fill(q, part, 4096, 6)
	c.call(&wire.Finish{Queue: q})
	prepare(t, s, to, peer)
	c.fill(q, part, 4096, 7)
	c.call(&wire.Finish{Queue: q})
	finish(t, s, to, peer)
	equal(t, c.read(q, part, 4096), 7)
	c.post(&wire.Release{ID: part})
	c.call(&wire.Finish{Queue: q})
	to.mu.Lock()
	defer to.mu.Unlock()
	if len(to.ghosts) != 0 || to.memory != 0 {
		t.Fatalf("%d released objects are left, %d bytes of memory", len(to.ghosts), to.memory)
	}
}

// A released buffer that a parked command still uses remains on the target when a sub-buffer
// of it, which the target has prepared, too, is released.
func TestReleasedBufferOfAParkedCommandOutlivesItsPartOnTheTarget(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	discrete(s)
	s.activate()
	ctx, q, _ := c.setup(0)
	whole, part, copied, u := c.buffer(ctx, 8192), c.id(), c.buffer(ctx, 8192), c.id()
	c.fill(q, whole, 8192, 5)
	c.call(&wire.CreateSubBuffer{ID: part, Parent: whole, Origin: 4096, Size: 4096})
	c.call(&wire.Finish{Queue: q})
	c.post(&wire.CreateUserEvent{ID: u, Context: ctx})
	c.post(&wire.CopyBuffer{Queue: q, Src: whole, Dst: copied, Size: 8192, Wait: []uint32{u}})
	c.post(&wire.Release{ID: whole})
	c.call(&wire.DeviceTimer{Device: 1}) // all earlier requests have run when it returns
	to := c.executor(2)
	discrete(to)
	peer := prepared(t, to)
	prepare(t, s, to, peer)
	c.post(&wire.Release{ID: part})
	c.call(&wire.DeviceTimer{Device: 1})
	finish(t, s, to, peer)
	c.call(&wire.SetUserEvent{Event: u, Status: 0})
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, copied, 8192), 5)
}

// late is a context that ends just before the last check for its end: Done is still open, and
// Err already returns an error.
type late struct{ context.Context }

func (late) Err() error { return context.Canceled }

// The caller of a freeze may leave just before the freeze succeeds. Then the application
// continues.
func TestAFreezeGivenUpAtItsEndLetsTheApplicationGoOn(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	_, q, _ := c.setup(0)
	c.call(&wire.Finish{Queue: q})
	if _, err := s.freeze(late{t.Context()}, 10*time.Second); !errors.Is(err, ErrBusy) {
		t.Fatalf("freeze: %v", err)
	}
	c.call(&wire.Finish{Queue: q})
	if _, err := s.freeze(t.Context(), 10*time.Second); err != nil {
		t.Fatal(err)
	}
}

// What a kernel writes while its session is moved arrives, also if the kernel gets round the const
// of its argument: where that is possible, const is not believed.
func TestWritesThroughAConstArgumentArriveInASwap(t *testing.T) {
	const put = "[get_global_id(0)] = 7; }"
	for _, x := range []struct {
		name, source, options string
		link                  bool
	}{
		{name: "warning", source: "kernel void f(const global uint *a) { global uint *b = a; b" + put},
		{name: "no warnings wanted", source: "kernel void f(const global uint *a) { global uint *b = a; b" + put, options: "-w"},
		{name: "warning before the link", source: "kernel void f(const global uint *a) { global uint *b = a; b" + put, link: true},
		{name: "address space in a macro", source: "#define GLOBAL \\\n __global\nkernel void f(const GLOBAL uint *a) { ((GLOBAL uint *)a)" + put},
		{name: "type in a macro", source: "#define P __global uint *\nkernel void f(const global uint *a) { ((P)a)" + put},
		{name: "address space in an option", source: "kernel void f(const GLOBAL uint *a) { ((GLOBAL uint *)a)" + put, options: "-DGLOBAL=__global"},
		{name: "type of another pointer", source: "kernel void f(const global uint *a) { uint n = 0; global uint *b = 0; b = (__typeof__(b))a; b" + put},
		{name: "qualifier behind the address space", source: "kernel void f(const global uint *a) { ((uint global volatile *)a)" + put},
		{name: "silenced warning", source: "#pragma clang diagnostic ignored \"-Wincompatible-pointer-types-discards-qualifiers\"\n" +
			"kernel void f(const global uint *a) { global uint *b = a; b" + put},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := newClient(t)
			from, to := c.executor(1), c.executor(2)
			from.unified, to.unified = false, false
			from.activate()
			ctx, q, _ := c.setup(0)
			p, k := c.program(ctx, x.source), c.id()
			if x.link {
				object := p
				p = c.id()
				c.call(&wire.CompileProgram{Program: object, Options: []byte(x.options)})
				c.call(&wire.LinkProgram{ID: p, Context: ctx, Inputs: []uint32{object}})
			} else {
				c.call(&wire.BuildProgram{Program: p, Options: []byte(x.options)})
			}
			c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("f")})
			b := c.buffer(ctx, 4096)
			c.fill(q, b, 4096, 1)
			c.call(&wire.Finish{Queue: q})
			sock := filepath.Join(t.TempDir(), "i")
			l, err := net.Listen("unix", sock)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go to.serveImports(l)
			if err := move(t.Context(), from, to, sock, false); err != nil {
				t.Fatal(err)
			}
			c.call(&wire.SetArg{Kernel: k, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
			c.call(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: 1024})
			if _, err := from.freeze(t.Context(), 10*time.Second); err != nil {
				t.Fatal(err)
			}
			if err := move(t.Context(), from, to, sock, true); err != nil {
				t.Fatal(err)
			}
			takeOver(from, to)
			equal(t, c.read(q, b, 4096), 7)
		})
	}
}

// NVIDIA's driver says nothing of a program that it has in its cache. So const is not believed there
// before the compiler was asked about a program that no cache has, which is when a session is about to
// be moved.
func TestConstIsNotBelievedByALogThatMayBeSilent(t *testing.T) {
	for name, x := range map[string]struct {
		source string
		want   bool
	}{
		"nothing is lost": {"kernel void f(const global uint *a, global uint *b) { b[0] = a[0]; }", true},
		"warning":         {"kernel void f(const global uint *a, global uint *b) { b = a; b[0] = 7; }", false},
	} {
		for _, released := range []bool{false, true} {
			c := newClient(t)
			s := c.executor(1)
			s.quirk.warns = false
			s.activate()
			ctx, q, _ := c.setup(0)
			p, k := c.program(ctx, x.source), c.id()
			c.call(&wire.BuildProgram{Program: p})
			c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("f")})
			a, b := c.buffer(ctx, 4096), c.buffer(ctx, 4096)
			for i, m := range []uint32{a, b} {
				c.call(&wire.SetArg{Kernel: k, Index: uint32(i), Kind: wire.ArgMem, Object: m, Size: 8})
			}
			s.mu.Lock()
			prog := lookup[program](s, p)
			for _, b := range prog.built { // as from a cache
				b.Log = ""
			}
			prog.exact = prog.isExact()
			s.mu.Unlock()
			if released {
				c.post(&wire.Release{ID: p})
				c.call(&wire.Finish{Queue: q})
			}
			writes := func() int {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.written(lookup[kernel](s, k)))
			}
			if n := writes(); n != 2 {
				t.Errorf("%s: %d of 2 buffers count as written before anybody asked", name, n)
			}
			if _, err := s.snapshot(); err != nil {
				t.Fatal(err)
			}
			<-prog.checked.done
			if n := writes(); (n == 1) != x.want {
				t.Errorf("%s, released %v: %d buffers count as written", name, released, n)
			}
		}
	}
}

// A target that does not begin to take contents keeps nobody when the swap is given up.
func TestSilentTargetIsLeftWhenTheSwapIsGivenUp(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error)
	go func() {
		_, err := (&session{}).dialPeer(ctx, l.Addr().String())
		over <- err
	}()
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cancel()
	select {
	case err := <-over:
		if err == nil {
			t.Error("there are contents for a target that does not take them")
		}
	case <-time.After(remote.GreetTimeout / 2):
		t.Error("it is waited for")
	}
}
