package executor

import (
	"context"
	"encoding/binary"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

const (
	testArena = 4 << 30
	testSplit = 2 << 30
)

// client simulates the application's library for a session in this process.
type client struct {
	t     testing.TB
	ctx   context.Context // ends shortly before the deadline of the test
	ring  *shm.Region
	arena *shm.Region
	state *shm.Region
	slots uint32
	next  uint32
	stage uint64
}

func newClient(t testing.TB) *client {
	t.Helper()
	c := &client{t: t, ctx: testkit.Context(t), next: wire.FirstID, stage: testSplit}
	var err error
	if c.ring, err = shm.Create("ring", wire.RingMem); err != nil {
		t.Fatal(err)
	}
	if c.arena, err = shm.Create("arena", testArena); err != nil {
		t.Fatal(err)
	}
	if c.state, err = shm.Create("state", 0); err != nil {
		t.Fatal(err)
	}
	r, err := shm.NewRing(c.ring)
	if err != nil {
		t.Fatal(err)
	}
	r.Init(testArena, testSplit)
	r.SetOwner(1)
	r.SetState(wire.StateRunning)
	return c
}

func dup(t testing.TB, r *shm.Region) int {
	fd, err := unix.FcntlInt(uintptr(r.FD()), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// pocl returns the path of PoCL, which is installed on every machine of the project, or the
// library of a card's vendor, if GPUCTL_TEST_CARDS names it.
func pocl(t testing.TB) string {
	if cards := os.Getenv("GPUCTL_TEST_CARDS"); cards != "" {
		return cards
	}
	ms, _ := filepath.Glob("/usr/lib/*/libpocl.so.2*")
	if len(ms) == 0 {
		t.Fatal("PoCL is missing: make setup")
	}
	return ms[0]
}

// executor opens a session on the client's shared memory, as an executor process does.
func (c *client) executor(generation uint32) *session {
	c.t.Helper()
	return c.executorOf(generation, pocl(c.t))
}

func (c *client) executorOf(generation uint32, library string) *session {
	c.t.Helper()
	s, err := open(Config{
		Generation: generation, Runtime: &gpuctlv1.Runtime{Library: library},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}, dup(c.t, c.ring), dup(c.t, c.arena), dup(c.t, c.state))
	if err != nil {
		c.t.Fatal(err)
	}
	go s.watchEvents()
	go s.pushCallbacks()
	c.t.Cleanup(func() { s.closed.Store(true); s.retire() })
	return s
}

func (c *client) id() uint32 { c.next++; return c.next - 1 }

func (c *client) write(m wire.Request, slot uint16) {
	c.t.Helper()
	body := m.Append(nil)
	n := uint64(8 + len(body))
	tail := c.ring.Load64(wire.HdrTail)
	for tail+n+wire.MaxRequest > c.ring.Load64(wire.HdrHead)+wire.RingSize {
		runtime.Gosched()
	}
	at := tail % wire.RingSize
	if at+n > wire.RingSize {
		h := make([]byte, 8)
		binary.LittleEndian.PutUint32(h, uint32(wire.RingSize-at))
		copy(c.ring.Bytes()[wire.RingOff+at:], h)
		tail += wire.RingSize - at
		at = 0
	}
	h := make([]byte, 8)
	binary.LittleEndian.PutUint32(h, uint32(n))
	binary.LittleEndian.PutUint16(h[4:], uint16(m.Op()))
	binary.LittleEndian.PutUint16(h[6:], slot)
	copy(c.ring.Bytes()[wire.RingOff+at:], append(h, body...))
	c.ring.Store64(wire.HdrTail, tail+n)
	if c.ring.Load32(wire.HdrSleep) == 1 && c.ring.Swap32(wire.HdrSleep, 0) == 1 {
		shm.FutexWake(c.ring.Word32(wire.HdrSleep), 1)
	}
}

func (c *client) post(m wire.Request) { c.t.Helper(); c.write(m, wire.NoSlot) }

// start sends a request that has an answer, and does not wait for the answer.
func (c *client) start(m wire.Request) uint16 {
	c.t.Helper()
	slot := uint16(atomic.AddUint32(&c.slots, 1) % wire.SlotCount)
	off := wire.SlotOff + uint64(slot)*wire.SlotSize
	for o := uint64(0); o < 64; o += 4 {
		c.ring.Store32(off+o, 0)
	}
	c.ring.Store32(off, wire.SlotPending)
	c.write(m, slot)
	return slot
}

func (c *client) answered(slot uint16) bool {
	return c.ring.Load32(wire.SlotOff+uint64(slot)*wire.SlotSize) == wire.SlotDone
}

func (c *client) answer(slot uint16) (cl.Status, []byte) {
	c.t.Helper()
	off := wire.SlotOff + uint64(slot)*wire.SlotSize
	state := off + wire.SlotState
	for !c.answered(slot) { // the library waits like this after it has spun long enough
		if c.ring.CAS32(state, wire.SlotPending, wire.SlotAsleep) || c.ring.Load32(state) == wire.SlotAsleep {
			shm.FutexWait(c.ring.Word32(state), wire.SlotAsleep, time.Second)
		}
		if c.ctx.Err() != nil {
			c.t.Fatal("no answer")
		}
	}
	n := c.ring.Load32(off + wire.SlotLen)
	data := append([]byte(nil), c.ring.Bytes()[off+wire.SlotData:][:n]...)
	return cl.Status(int32(c.ring.Load32(off + wire.SlotErr))), data
}

func (c *client) call(m wire.Request) []byte {
	c.t.Helper()
	st, data := c.answer(c.start(m))
	if st != cl.Success {
		c.t.Fatalf("%s: %v", m.Op(), st)
	}
	return data
}

// setup creates a context, a queue and a program with a kernel "add", which adds its second
// argument to every element.
func (c *client) setup(props uint64) (ctx, q, k uint32) {
	c.t.Helper()
	ctx, q, k = c.id(), c.id(), c.id()
	p := c.id()
	c.call(&wire.CreateContext{ID: ctx, Devices: []uint32{1}})
	c.call(&wire.CreateQueue{ID: q, Context: ctx, Device: 1, Props: props})
	c.call(&wire.CreateProgramSource{ID: p, Context: ctx, Mode: wire.DataInline, Source: []byte(
		"kernel void add(global uint *a, uint n) { a[get_global_id(0)] += n; }")})
	c.call(&wire.BuildProgram{Program: p})
	c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("add")})
	return ctx, q, k
}

func (c *client) buffer(ctx uint32, size uint64) uint32 {
	b := c.id()
	c.call(&wire.CreateBuffer{ID: b, Context: ctx, Flags: cl.MemReadWrite, Size: size})
	return b
}

func (c *client) launch(q, k, b, n uint32, count uint64, event uint32, wait ...uint32) {
	v := make([]byte, 4)
	binary.LittleEndian.PutUint32(v, n)
	c.post(&wire.SetArg{Kernel: k, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
	c.post(&wire.SetArg{Kernel: k, Index: 1, Kind: wire.ArgPlain, Size: 4, Value: v})
	c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: count, Event: event, Wait: wait})
}

func (c *client) fill(q, b uint32, size uint64, v uint32) {
	p := make([]byte, 4)
	binary.LittleEndian.PutUint32(p, v)
	c.post(&wire.FillBuffer{Queue: q, Mem: b, Size: size, Pattern: p})
}

func (c *client) read(q, b uint32, size uint64) []uint32 {
	c.t.Helper()
	c.call(&wire.ReadBuffer{Queue: q, Mem: b, Blocking: 1, Size: size, Mode: wire.DataStaged, StageOff: c.stage, StageLen: size})
	out := make([]uint32, size/4)
	for i := range out {
		out[i] = binary.LittleEndian.Uint32(c.arena.Bytes()[c.stage+4*uint64(i):])
	}
	return out
}

// spin launches a kernel that runs until end is called, and writes 5 to the second word of b then.
func (c *client) spin(s *session, ctx, q, b, event uint32) (end func()) {
	c.t.Helper()
	p, k := c.program(ctx, "kernel void until(volatile global uint *a) { while (!a[0]) ; a[1] = 5; }"), c.id()
	c.call(&wire.BuildProgram{Program: p})
	c.call(&wire.CreateKernel{ID: k, Program: p, Name: []byte("until")})
	c.fill(q, b, 4096, 0)
	c.call(&wire.Finish{Queue: q})
	var word *uint32
	inside(s, b, func(m *mem) { word = c.arena.Word32(m.arena) })
	c.post(&wire.SetArg{Kernel: k, Index: 0, Kind: wire.ArgMem, Object: b, Size: 8})
	c.post(&wire.Ndrange{Queue: q, Kernel: k, Dims: 1, Glob0: 1, Event: event})
	c.call(&wire.Flush{Queue: q})
	return func() { atomic.StoreUint32(word, 1) }
}

// answeredWithin reports whether an answer comes within a time.
func (c *client) answeredWithin(slot uint16, d time.Duration) bool {
	ctx, cancel := context.WithTimeout(c.ctx, d)
	defer cancel()
	return testkit.Poll(ctx, "an answer", func() error { return testkit.Want(c.answered(slot)) }) == nil
}

// swap moves the session to another executor, as gpuguest does.
func (c *client) swap(from, to *session) {
	c.t.Helper()
	if err := swap(c.t.Context(), c.t.TempDir(), from, to, wire.StateRunning); err != nil {
		c.t.Fatal(err)
	}
}
