package executor

import (
	"encoding/binary"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// leaver is a session whose last commands wait for their turn: they add 110 to a buffer of ones, and read it.
type leaver struct {
	*client
	s                       *session
	sub, ctx, q, p, k, b, e uint32
}

func newLeaver(t *testing.T) *leaver {
	t.Helper()
	d := newDesk(t)
	c := newClient(t)
	l := &leaver{client: c, s: c.executor(1), sub: c.id(), ctx: c.id(), q: c.id(), p: c.id(), k: c.id(), e: c.id()}
	l.s.activate()
	c.call(&wire.CreateSubDevices{Parent: 1, Props: []uint64{cl.DevicePartitionByCounts, 1, 0, 0}, IDs: []uint32{l.sub}})
	c.call(&wire.CreateContext{ID: l.ctx, Devices: []uint32{l.sub}})
	c.call(&wire.CreateQueue{ID: l.q, Context: l.ctx, Device: l.sub})
	c.call(&wire.CreateProgramSource{ID: l.p, Context: l.ctx, Mode: wire.DataInline, Source: []byte(
		"kernel void add(global uint *a, uint n) { a[get_global_id(0)] += n; }")})
	c.call(&wire.BuildProgram{Program: l.p})
	c.call(&wire.CreateKernel{ID: l.k, Program: l.p, Name: []byte("add")})
	l.b = c.buffer(l.ctx, 4096)
	c.fill(l.q, l.b, 4096, 1)
	c.call(&wire.Finish{Queue: l.q})
	seat := d.takesTurns(l.s)
	d.takes()
	c.launch(l.q, l.k, l.b, 10, 1024, l.e)
	c.launch(l.q, l.k, l.b, 100, 1024, 0)
	c.post(&wire.ReadBuffer{Queue: l.q, Mem: l.b, Size: 4096, Mode: wire.DataStaged, StageOff: c.stage, StageLen: 4096, Pend: 1})
	d.waiting(seat, "it waits", isWaiting)
	return l
}

// release releases objects. The requests have run when it returns.
func (l *leaver) release(ids ...uint32) {
	l.t.Helper()
	for _, id := range ids {
		l.post(&wire.Release{ID: id})
	}
	l.call(&wire.DeviceTimer{Device: 1})
}

// ended checks what the commands have done, and that nothing is left of what they needed.
func (l *leaver) ended(s *session) {
	l.t.Helper()
	testkit.Until(l.t, "what was released has ended", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return testkit.Want(len(s.parked)+len(s.ghosts)+len(s.leaving) == 0 && s.memory == 0, len(s.parked), s.ghosts, s.leaving, s.memory)
	})
	if v := binary.LittleEndian.Uint32(l.arena.Bytes()[l.stage:]); v != 111 || s.usage.Launches != 2 {
		l.t.Errorf("%d launches, %d read", s.usage.Launches, v)
	}
}

// A program may release all that it has while its last commands wait for their turn. They are moved with what
// they use: the context and its sub-device, too, whose ids may be those of other objects by then.
func TestReleasedContextWhoseCommandsWaitForTheirTurnIsSwapped(t *testing.T) {
	for _, taken := range []bool{false, true} {
		l := newLeaver(t)
		l.release(l.e, l.k, l.p, l.b, l.q, l.ctx, l.sub)
		if taken {
			l.call(&wire.CreateContext{ID: l.ctx, Devices: []uint32{1}})
			l.call(&wire.CreateQueue{ID: l.q, Context: l.ctx, Device: 1})
		}
		s := l.s
		for gen := uint32(2); gen < 4; gen++ {
			next := l.executor(gen)
			l.swap(s, next)
			s = next
		}
		l.ended(s)
	}
}

// A target that is being prepared has what the program has released before under the ids that it keeps, and the
// context that is released later under the former id. The commands got CL_INVALID_CONTEXT there.
func TestContextReleasedWhileItsTargetIsBeingPreparedIsOneThereToo(t *testing.T) {
	for n := range 8 {
		l := newLeaver(t)
		all := []uint32{l.e, l.b, l.q, l.k, l.p, l.ctx, l.sub}
		l.release(all[:n]...)
		to := l.executor(2)
		sock := filepath.Join(t.TempDir(), "i")
		contents, err := net.Listen("unix", sock)
		if err != nil {
			t.Fatal(err)
		}
		go to.serveImports(contents)
		if err := move(t.Context(), l.s, to, sock, false); err != nil {
			t.Fatal(err)
		}
		l.release(all[n:]...)
		if _, err := l.s.freeze(t.Context(), 10*time.Second); err != nil {
			t.Fatal(err)
		}
		if err := move(t.Context(), l.s, to, sock, true); err != nil {
			t.Fatalf("%d released before: %v", n, err)
		}
		contents.Close()
		takeOver(l.s, to)
		l.ended(to)
	}
}

// Ids are used again, so a sub-device may have a greater one than its parts.
func TestSubDeviceWithAGreaterIDThanItsPartsIsSwapped(t *testing.T) {
	c := newClient(t)
	a := c.executor(1)
	a.activate()
	part, whole, ctx := c.id(), c.id(), c.id()
	c.call(&wire.CreateSubDevices{Parent: 1, Props: []uint64{cl.DevicePartitionByCounts, 2, 0, 0}, IDs: []uint32{whole}})
	c.call(&wire.CreateSubDevices{Parent: whole, Props: []uint64{cl.DevicePartitionByCounts, 1, 0, 0}, IDs: []uint32{part}})
	c.call(&wire.CreateContext{ID: ctx, Devices: []uint32{part}})
	c.swap(a, c.executor(2))
}

// The memory of a buffer that is to be mapped is made ready in another goroutine. A program that had released the buffer and
// its context by then left the vendor's context behind, which on a card takes hundreds of MiB.
func TestContextReleasedWhileABufferOfItIsMadeReadyIsGivenBack(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	card(s)
	s.activate()
	ctx, b := c.id(), c.id()
	c.call(&wire.CreateContext{ID: ctx, Devices: []uint32{1}})
	s.pins.mu.Lock() // it goes on when this is unlocked
	c.call(&wire.CreateBuffer{Context: ctx, ID: b, Flags: cl.MemReadWrite | cl.MemAllocHostPtr, Size: readyMin})
	c.post(&wire.Release{ID: b})
	c.post(&wire.Release{ID: ctx})
	c.call(&wire.DeviceTimer{Device: 1}) // all earlier requests have run when it returns
	s.pins.mu.Unlock()
	testkit.Until(t, "the context is given back", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return testkit.Want(len(s.ghosts)+len(s.leaving) == 0, s.ghosts, s.leaving)
	})
}

// An event that one thread releases while another waits for it, as a program that measures does, stayed for ever,
// and with it the context that had been released by then.
func TestContextOfAnEventReleasedWhileItIsWaitedForIsGivenBack(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, k := c.setup(cl.QueueProfilingEnable)
	b := c.buffer(ctx, 4096)
	first, e := c.id(), c.id()
	c.launch(q, k, b, 1, 16, first)
	c.call(&wire.Finish{Queue: q})
	c.call(&wire.EventProfiling{Event: first})
	end := c.spin(s, ctx, q, b, e)
	slot := c.start(&wire.WaitEvents{Wait: []uint32{e}})
	testkit.Until(t, "it is waited for", func() (err error) {
		inside(s, e, func(e *event) { err = testkit.Want(e.users == 1, e.users) })
		return err
	})
	s.mu.Lock()
	var all []uint32
	for id, o := range s.objs {
		if _, ok := o.(*clContext); o != nil && id >= wire.FirstID && !ok {
			all = append(all, uint32(id))
		}
	}
	s.mu.Unlock()
	slices.Reverse(all) // kernels before their programs
	for _, id := range append(all, ctx) {
		c.post(&wire.Release{ID: id})
	}
	c.call(&wire.DeviceTimer{Device: 1}) // all earlier requests have run when it returns
	end()
	c.answer(slot)
	testkit.Until(t, "the context is given back", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		return testkit.Want(len(s.ghosts)+len(s.leaving) == 0, s.ghosts, s.leaving)
	})
}
