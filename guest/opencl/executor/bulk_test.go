package executor

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// mover simulates the threads of the application's library that copy the data of bulk
// transfers.
type mover struct {
	c *client

	hold chan struct{} // nil or closed: chunks are moved freely
	step chan struct{} // while hold is open, one chunk is moved for each value received here

	mu    sync.Mutex        // held while a chunk is moved, too
	data  map[uint32][]byte // by completion word: what to write, or where to read to
	write map[uint32]bool
	froms []uint64 // the position at which each run began
}

// mover starts threads that move chunks. If held is set, they move only as many as the test
// requests through step, until it closes hold.
func (c *client) mover(held bool) *mover {
	m := &mover{c: c, data: map[uint32][]byte{}, write: map[uint32]bool{}, step: make(chan struct{})}
	if held {
		m.hold = make(chan struct{})
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for lane := range wire.LaneCount {
		wg.Go(func() { m.serve(lane, stop) })
	}
	c.t.Cleanup(func() { close(stop); wg.Wait() })
	return m
}

func (m *mover) add(word uint32, data []byte, write bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.c.ring.Store32(wire.PendOff+4*uint64(word), wire.PendBusy)
	m.data[word], m.write[word] = data, write
}

func (m *mover) serve(lane int, stop chan struct{}) {
	ring, o := m.c.ring, uint64(wire.LaneOff+lane*wire.LaneSize)
	ended := func() bool {
		select {
		case <-stop:
			return true
		default:
			return false
		}
	}
	var run, next uint32
	var pos uint64
	for !ended() {
		seen := ring.Load32(wire.HdrBell)
		r, state := ring.Load32(o+wire.LaneRun), ring.Load32(o+wire.LaneState)
		if state == wire.LaneLeft {
			ring.Store32(o+wire.LaneState, wire.LaneFree)
		}
		if state != wire.LaneStream && state != wire.LaneDirect {
			shm.FutexWait(ring.Word32(wire.HdrBell), seen, time.Millisecond)
			continue
		}
		word, limit, from := ring.Load32(o+wire.LaneWord), ring.Load32(o+wire.LaneLimit), ring.Load64(o+wire.LaneFrom)
		at := ring.Load64(o + wire.LaneDirectAt)
		if ring.Load32(o+wire.LaneRun) != r {
			continue
		}
		m.mu.Lock()
		data, write := m.data[word], m.write[word]
		if r != run {
			run, next, pos = r, 0, from
			m.froms = append(m.froms, from)
		}
		m.mu.Unlock()
		if next >= limit || pos >= uint64(len(data)) {
			shm.FutexWait(ring.Word32(wire.HdrBell), seen, time.Millisecond)
			continue
		}
		if m.hold != nil {
			select {
			case <-m.hold:
			case m.step <- struct{}{}:
			case <-stop:
				return
			}
		}
		n := min(wire.LaneChunk, uint64(len(data))-pos)
		off := uint64(testSplit) + uint64(lane)*laneBytes + uint64(next%wire.LaneChunks)*wire.LaneChunk
		if state == wire.LaneDirect {
			off = at + pos
		}
		m.mu.Lock()
		if write {
			copy(m.c.arena.Bytes()[off:], data[pos:pos+n])
		} else {
			copy(data[pos:], m.c.arena.Bytes()[off:off+n])
		}
		m.mu.Unlock()
		pos += n
		next++
		ring.Store32(o+wire.LaneDone, next)
		shm.FutexWake(ring.Word32(o+wire.LaneDone), shm.All)
	}
}

// moved returns what the transfer of a completion word has written or read, and the
// positions at which the runs of all transfers began.
func (m *mover) moved(word uint32) (data []byte, froms []uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.data[word], m.froms
}

func (c *client) pend(word uint32) uint32 { return c.ring.Load32(wire.PendOff + 4*uint64(word)) }

func noise(n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(1, uint64(n)))
	for i := 0; i+8 <= n; i += 8 {
		v := r.Uint64()
		for k := range 8 {
			b[i+k] = byte(v >> (8 * k))
		}
	}
	return b
}

func (c *client) finish(q uint32) {
	c.t.Helper()
	if st, _ := c.answer(c.start(&wire.Finish{Queue: q})); st != cl.Success {
		c.t.Fatal(st)
	}
}

// bulk posts a transfer of a whole buffer. As one rectangle, it passes through chunks on
// every device. Otherwise a device that computes in the arena transfers it directly.
func (c *client) bulk(q, b uint32, n uint64, write, rect bool, word, event uint32, wait ...uint32) {
	const row = 1 << 20
	o, r := []uint64{0, 0, 0}, []uint64{row, n / row, 1}
	switch {
	case rect && write:
		c.post(&wire.WriteBufferRect{Queue: q, Mem: b, Origin: o, Region: r, RowPitch: row, SlicePitch: n, Mode: wire.DataBulk, Pend: word, Event: event, Wait: wait})
	case rect:
		c.post(&wire.ReadBufferRect{Queue: q, Mem: b, Origin: o, Region: r, RowPitch: row, SlicePitch: n, Mode: wire.DataBulk, Pend: word, Event: event, Wait: wait})
	case write:
		c.post(&wire.WriteBuffer{Queue: q, Mem: b, Size: n, Mode: wire.DataBulk, Pend: word, Event: event, Wait: wait})
	default:
		c.post(&wire.ReadBuffer{Queue: q, Mem: b, Size: n, Mode: wire.DataBulk, Pend: word, Event: event, Wait: wait})
	}
}

// interrupted starts a bulk write of n bytes and returns after steps chunks of it. A read
// of all bytes is parked behind the write.
func (c *client) interrupted(n uint64, rect bool, steps int) (*mover, *session, uint32) {
	c.t.Helper()
	m := c.mover(true)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, n)
	m.add(1, noise(int(n)), true)
	m.add(2, make([]byte, n), false)
	c.bulk(q, b, n, true, rect, 1, 0)
	c.bulk(q, b, n, false, rect, 2, 0)
	for range steps {
		<-m.step
	}
	return m, s, q
}

// goOn lets both transfers end, and checks that the read returned what was written.
func (m *mover) goOn(q uint32) {
	m.c.t.Helper()
	close(m.hold)
	m.c.finish(q)
	in, _ := m.moved(1)
	out, _ := m.moved(2)
	if w, r := m.c.pend(1), m.c.pend(2); w != wire.PendDone || r != wire.PendDone || !bytes.Equal(in, out) {
		m.c.t.Fatalf("completion words %d, %d; equal: %v", w, r, bytes.Equal(in, out))
	}
}

// A freeze does not wait for a large transfer: the transfer stops between two chunks, and
// the other executor continues with the bytes that are left. Calls that are parked behind
// the transfer keep their place.
func TestTransferGoesOnAtAnotherExecutor(t *testing.T) {
	const n = 200 << 20
	for _, rect := range []bool{false, true} {
		c := newClient(t)
		m, s, q := c.interrupted(n, rect, 10)
		to := c.executor(2)
		go func() { // the application continues when the freeze has begun
			_ = testkit.Poll(c.ctx, "the session is to stand still", func() error { return testkit.Want(s.gate.Load()) })
			for {
				select {
				case <-m.step:
				case <-m.hold:
					return
				}
			}
		}()
		c.swap(s, to)
		if w := c.pend(1); w != wire.PendBusy {
			t.Fatalf("rect %v: the transfer was over before the swap: %d", rect, w)
		}
		m.goOn(q)
		if _, at := m.moved(2); len(at) != 3 || at[0] != 0 || at[1] == 0 || at[1] >= n || at[2] != 0 {
			t.Fatalf("rect %v: runs began at %d", rect, at)
		}
	}
}

// An application that is stopped in the middle of a transfer can be frozen and
// moved. Nothing else uses the chunks that it may still write to.
func TestStoppedApplicationIsFrozenInTheMiddleOfATransfer(t *testing.T) {
	const n = 64 << 20
	c := newClient(t)
	m, s, q := c.interrupted(n, true, 3)
	to := c.executor(2)
	c.swap(s, to)
	if st := c.ring.Load32(wire.LaneOff + wire.LaneState); st != wire.LaneLeft && st != wire.LaneFree {
		t.Fatalf("lane 0 is in state %d", st)
	}
	m.goOn(q)
}

// After a freeze fails, the transfers that it stopped continue.
func TestTransferGoesOnAfterAFailedFreeze(t *testing.T) {
	const n = 64 << 20
	c := newClient(t)
	m, s, q := c.interrupted(n, true, 1)
	if _, err := s.freeze(t.Context(), time.Millisecond); err == nil {
		t.Fatal("frozen within a millisecond")
	}
	m.goOn(q)
}

// Any number of transfers at the same time takes no more host memory than the lanes have.
func TestTransfersInFlightTakeBoundedMemory(t *testing.T) {
	const n, count = 32 << 20, 30
	c := newClient(t)
	m := c.mover(false)
	c.executor(1).activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, n)
	c.fill(q, b, n, 1)
	c.finish(q)
	before := c.used()
	u := c.id()
	c.post(&wire.CreateUserEvent{ID: u, Context: ctx})
	in := noise(n)
	for i := range uint32(count) {
		m.add(i+1, in, true)
		c.bulk(q, b, n, true, true, i+1, 0, u)
	}
	c.call(&wire.SetUserEvent{Event: u, Status: 0})
	c.finish(q)
	if grown := c.used() - before; grown > wire.LaneCount*laneBytes {
		t.Errorf("%d transfers of %d MiB took %d MiB of the arena", count, n>>20, grown>>20)
	}
}

// used returns how many bytes of the arena have memory.
func (c *client) used() int64 {
	var st unix.Stat_t
	if err := unix.Fstat(c.arena.FD(), &st); err != nil {
		c.t.Fatal(err)
	}
	return st.Blocks * 512
}

// A client may write any values into its requests and counters. A malformed request ends the
// session. Wrong counters do no harm.
func TestHostileBulkTransfers(t *testing.T) {
	for _, m := range []wire.Request{
		&wire.WriteBuffer{Size: 1 << 20, Mode: wire.DataBulk},
		&wire.WriteBuffer{Size: 1 << 20, Mode: wire.DataBulk, Pend: wire.PendCount},
		&wire.WriteBuffer{Size: 1 << 20, Mode: wire.DataBulk, Pend: 1, StageOff: 4096},
		&wire.WriteBuffer{Size: 1 << 20, Mode: wire.DataBulk, Pend: 1, StageOff: 1 << 63},
	} {
		c := newClient(t)
		s := c.executor(1)
		s.activate()
		ctx, q, _ := c.setup(0)
		w := m.(*wire.WriteBuffer)
		w.Queue, w.Mem = q, c.buffer(ctx, 1<<20)
		c.post(w)
		testkit.Until(t, "the session is closed", func() error { return testkit.Want(s.closed.Load()) })
	}
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, 1<<24)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // a client that writes wrong counts
		for v := uint32(0); ; v += 0x1234567 {
			select {
			case <-done:
				return
			default:
			}
			for lane := range uint64(wire.LaneCount) {
				c.ring.Store32(wire.LaneOff+lane*wire.LaneSize+wire.LaneDone, v%12)
				shm.FutexWake(c.ring.Word32(wire.LaneOff+lane*wire.LaneSize+wire.LaneDone), shm.All)
			}
		}
	})
	for i := range uint32(8) {
		c.bulk(q, b, 1<<24, i%2 == 0, true, i+1, 0)
	}
	c.finish(q)
	close(done)
	wg.Wait()
}

// A transfer is divided into the same chunks wherever it stops in between, and the chunks
// cover it without gaps.
func TestCutsCoverATransfer(t *testing.T) {
	for _, box := range [][3]uint64{{1, 1, 1}, {5 << 20, 1, 1}, {3001, 1000, 3}, {1000, 300, 20}, {2<<20 + 4099, 2, 2}, {2 << 20, 3, 1}, {1, 2<<20 + 1, 2}} {
		b := &bulk{box: box, total: box[0] * box[1] * box[2]}
		var at uint64
		count := b.chunks()
		for range count {
			n := b.cut(at)
			if n == 0 || n > wire.LaneChunk || at+n > b.total {
				t.Fatalf("%v: %d bytes at %d of %d", box, n, at, b.total)
			}
			row, slice := box[0], box[0]*box[1]
			inRow, inSlice := at%row+n <= row, at%row == 0 && n%row == 0 && at%slice+n <= slice
			if !inRow && !inSlice && (at%slice != 0 || n%slice != 0) {
				t.Fatalf("%v: %d bytes at %d are no box", box, n, at)
			}
			at += n
			b.moved = at
		}
		if at != b.total {
			t.Fatalf("%v: %d of %d bytes", box, at, b.total)
		}
	}
}

// A transfer whose events fail is over only when the commands before it in its queue are, so that the queue is not taken for
// idle while they run, and frozen.
func TestFailedTransferWaitsForTheCommandsBeforeIt(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	other, oq, _ := c.setup(0)
	b := c.buffer(ctx, 4096)
	events := []uint32{c.id(), c.id()}
	c.fill(oq, c.buffer(other, 4096), 4096, 1)
	c.post(&wire.Marker{Queue: oq, Event: events[0]})
	c.post(&wire.Marker{Queue: q, Event: events[1]})
	c.call(&wire.WaitEvents{Wait: events[:1]})
	end := c.spin(s, ctx, q, b, 0)
	defer end()
	s.mu.Lock()
	wait := slices.Clone(s.waits(events)) // of two contexts: the runtime refuses to wait for them
	x := &bulk{p: &parkedCall{q: lookup[queue](s, q)}, wait: wait}
	s.mu.Unlock()
	if len(wait) != 2 {
		t.Fatal(wait)
	}
	over := make(chan cl.Status, 1)
	go func() { over <- s.awaitTurn(x) }()
	select {
	case st := <-over:
		t.Fatalf("over with %v while a command before it runs", st)
	case <-time.After(300 * time.Millisecond):
	}
	end()
	if st := <-over; st != cl.InvalidContext {
		t.Fatal(st)
	}
}
