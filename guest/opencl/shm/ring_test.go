package shm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// client is the application's side, as PROTOCOL.md specifies it.
type client struct{ r *Region }

func (c client) send(op wire.Op, slot uint16, body []byte) {
	n := uint64(8 + (len(body)+7)&^7)
	tail := c.r.Load64(wire.HdrTail)
	if left := wire.RingSize - tail%wire.RingSize; left < n {
		c.room(tail, left)
		c.header(tail, left, wire.OpPad, wire.NoSlot)
		tail += left
	}
	c.room(tail, n)
	c.header(tail, n, op, slot)
	copy(c.r.Bytes()[wire.RingOff+tail%wire.RingSize+8:], body)
	c.r.Store64(wire.HdrTail, tail+n)
	if c.r.Load32(wire.HdrSleep) == 1 && c.r.Swap32(wire.HdrSleep, 0) == 1 {
		FutexWake(c.r.Word32(wire.HdrSleep), 1)
	}
}

func (c client) header(at, n uint64, op wire.Op, slot uint16) {
	c.r.Store64(wire.RingOff+at%wire.RingSize, n|uint64(op)<<32|uint64(slot)<<48)
}

func (c client) room(tail, n uint64) {
	for tail+n-c.r.Load64(wire.HdrHead) > wire.RingSize {
		c.r.Store32(wire.HdrSpace, 1)
		if tail+n-c.r.Load64(wire.HdrHead) > wire.RingSize {
			FutexWait(c.r.Word32(wire.HdrSpace), 1, 100*time.Millisecond)
		}
	}
}

// call sends a request, waits for the reply, and returns the error and the data.
func (c client) call(op wire.Op, n uint16, body []byte) (int32, []byte) {
	s, _ := slot(n)
	c.r.Store32(s+wire.SlotState, wire.SlotPending)
	c.send(op, n, body)
	for i := 0; c.r.Load32(s+wire.SlotState) != wire.SlotDone; i++ {
		if i < 2000 {
			Pause()
		} else if c.r.CAS32(s+wire.SlotState, wire.SlotPending, wire.SlotAsleep) || c.r.Load32(s+wire.SlotState) == wire.SlotAsleep {
			FutexWait(c.r.Word32(s+wire.SlotState), wire.SlotAsleep, 100*time.Millisecond)
		}
	}
	data, err := c.r.Range(s+wire.SlotData, uint64(c.r.Load32(s+wire.SlotLen)))
	if err != nil {
		panic(err)
	}
	return int32(c.r.Load32(s + wire.SlotErr)), data
}

func newRing(t testing.TB) (*Ring, client) {
	t.Helper()
	r := newRegion(t, wire.RingMem)
	q, err := NewRing(r)
	if err != nil {
		t.Fatal(err)
	}
	q.Init(1<<30, 1<<29)
	return q, client{r}
}

func buffer() []byte { return make([]byte, wire.MaxRequest) }

func TestInit(t *testing.T) {
	q, _ := newRing(t)
	if err := q.Check(); err != nil {
		t.Error(err)
	}
	if size, split, err := q.Arena(); size != 1<<30 || split != 1<<29 || err != nil {
		t.Errorf("arena %d, %d, %v", size, split, err)
	}
	if q.State() != wire.StateRunning || !q.Empty() {
		t.Errorf("state %d, empty %v", q.State(), q.Empty())
	}
	q.SetOwner(3)
	q.SetState(wire.StateSuspended)
	if q.Owner() != 3 || q.State() != wire.StateSuspended {
		t.Errorf("owner %d, state %d", q.Owner(), q.State())
	}
	q.r.Store64(wire.HdrArenaSplit, 1<<31)
	if _, _, err := q.Arena(); !errors.Is(err, ErrRing) {
		t.Errorf("split beyond the arena: %v", err)
	}
	q.r.Store32(wire.HdrVersion, wire.Version+1)
	if err := q.Check(); !errors.Is(err, ErrRing) {
		t.Errorf("other version: %v", err)
	}
	if _, err := NewRing(newRegion(t, 4096)); !errors.Is(err, ErrRange) {
		t.Errorf("small region: %v", err)
	}
}

// TestHintIsOfWhoServes: an executor that knows nothing of the hint of the one before it must
// not leave it.
func TestHintIsOfWhoServes(t *testing.T) {
	q, _ := newRing(t)
	q.SetServing(3)
	q.SetBulkFrom(1 << 20)
	if q.SetServing(4); q.r.Load32(wire.HdrBulkFrom) != 0 {
		t.Error("executor 4 serves with the hint of executor 3")
	}
}

// Records arrive complete, once and in order, whatever their sizes and however the ring
// wraps.
func TestRecordsArriveInOrder(t *testing.T) {
	q, c := newRing(t)
	const records = 3000
	size := func(rnd *rand.Rand) int { return 8 * rnd.IntN(1+rnd.IntN(wire.MaxRequest/8-1)) }
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		rnd := rand.New(rand.NewPCG(1, 2))
		for i := range records {
			b := bytes.Repeat([]byte{byte(i)}, size(rnd))
			c.send(wire.OpFlush, uint16(i%wire.SlotCount), b)
		}
	})
	rnd := rand.New(rand.NewPCG(1, 2))
	buf := buffer()
	for i := range records {
		rec, ok, err := q.Next(buf)
		for !ok && err == nil {
			q.Sleep(100 * time.Millisecond)
			rec, ok, err = q.Next(buf)
		}
		if err != nil {
			t.Fatal(err)
		}
		if want := bytes.Repeat([]byte{byte(i)}, size(rnd)); rec.Op != wire.OpFlush || rec.Slot != uint16(i%wire.SlotCount) || !bytes.Equal(rec.Body, want) {
			t.Fatalf("record %d: %s, slot %d, %d bytes, want %d", i, rec.Op, rec.Slot, len(rec.Body), len(want))
		}
		again, ok, err := q.Next(buf)
		if !ok || err != nil || again.Op != rec.Op || len(again.Body) != len(rec.Body) {
			t.Fatalf("record %d went before Advance", i)
		}
		q.Advance()
	}
	if !q.Empty() {
		t.Error("more arrived than was sent")
	}
}

// A reader that looks at the ring while it is being replaced must not move the head,
// because the head then belongs to the new reader.
func TestPaddingIsTakenWithItsRecord(t *testing.T) {
	q, c := newRing(t)
	const at = wire.RingSize - 64
	c.r.Store64(wire.HdrHead, at)
	c.r.Store64(wire.HdrTail, at)
	c.send(wire.OpFlush, wire.NoSlot, make([]byte, 128))
	rec, ok, err := q.Next(buffer())
	if err != nil || !ok || rec.Op != wire.OpFlush {
		t.Fatal(rec.Op, ok, err)
	}
	if head := c.r.Load64(wire.HdrHead); head != at {
		t.Fatalf("head %d after a look, not %d", head, at)
	}
	q.Advance()
	if !q.Empty() {
		t.Fatal("the record is there after it was taken")
	}
}

func TestNextRefuses(t *testing.T) {
	rec := func(n uint32, op wire.Op, slot uint16) uint64 {
		return uint64(n) | uint64(op)<<32 | uint64(slot)<<48
	}
	for name, c := range map[string]struct{ head, tail, word uint64 }{
		"no length":                {0, 16, rec(0, wire.OpFlush, 0)},
		"short length":             {0, 16, rec(4, wire.OpFlush, 0)},
		"misaligned length":        {0, 16, rec(12, wire.OpFlush, 0)},
		"length beyond the tail":   {0, 16, rec(24, wire.OpFlush, 0)},
		"length beyond the ring":   {wire.RingSize - 8, wire.RingSize + 64, rec(16, wire.OpFlush, 0)},
		"length beyond all":        {0, 16, rec(0xfffffff8, wire.OpFlush, 0)},
		"too long":                 {0, wire.RingSize, rec(wire.MaxRequest+8, wire.OpFlush, 0)},
		"no such slot":             {0, 16, rec(16, wire.OpFlush, wire.SlotCount)},
		"misaligned head":          {4, 20, 0},
		"misaligned tail":          {0, 12, rec(8, wire.OpFlush, 0)},
		"tail before head":         {64, 32, rec(8, wire.OpFlush, 0)},
		"more than the ring":       {0, wire.RingSize + 8, rec(8, wire.OpFlush, 0)},
		"padding at the start":     {0, wire.RingSize, rec(wire.RingSize, wire.OpPad, wire.NoSlot)},
		"padding alone":            {8, wire.RingSize, rec(wire.RingSize-8, wire.OpPad, wire.NoSlot)},
		"padding short of the end": {8, wire.RingSize, rec(16, wire.OpPad, wire.NoSlot)},
	} {
		q, _ := newRing(t)
		q.r.Store64(wire.HdrHead, c.head)
		q.r.Store64(wire.HdrTail, c.tail)
		q.r.Store64(wire.RingOff+c.head%wire.RingSize&^7, c.word)
		if _, _, err := q.Next(buffer()); !errors.Is(err, ErrRing) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever the ring contains, and even while it changes, Next returns valid records or an
// error, and terminates.
func FuzzNext(f *testing.F) {
	good := binary.LittleEndian.AppendUint64(nil, 16|uint64(wire.OpFlush)<<32|7<<48)
	f.Add(uint64(0), uint64(16), append(good, good...))
	f.Add(uint64(wire.RingSize-16), uint64(wire.RingSize+16), good)
	f.Add(uint64(0), uint64(wire.RingSize), bytes.Repeat([]byte{0xff}, 64))
	q, _ := newRing(f)
	mem := q.r.Bytes()[wire.RingOff:][:wire.RingSize]
	buf := buffer()
	f.Fuzz(func(t *testing.T, head, tail uint64, content []byte) {
		q.r.Store64(wire.HdrHead, head)
		q.r.Store64(wire.HdrTail, tail)
		for i, b := range content {
			mem[(head+uint64(i))%wire.RingSize] = b
		}
		var stop atomic.Bool
		var wg sync.WaitGroup
		if len(content) >= 16 {
			wg.Go(func() {
				a, b := binary.LittleEndian.Uint64(content), binary.LittleEndian.Uint64(content[8:])
				at := uint64(wire.RingOff) + head%wire.RingSize&^7
				for !stop.Load() {
					q.r.Store64(at, b)
					q.r.Store64(wire.HdrTail, tail+8)
					q.r.Store64(at, a)
					q.r.Store64(wire.HdrTail, tail)
					runtime.Gosched()
				}
			})
		}
		for range 64 {
			rec, ok, err := q.Next(buf)
			if err != nil {
				break
			}
			if !ok {
				continue
			}
			if len(rec.Body) > wire.MaxRequest-8 || len(rec.Body)%8 != 0 || rec.Slot != wire.NoSlot && rec.Slot >= wire.SlotCount || rec.Op == wire.OpPad {
				t.Fatalf("record %s, slot %d, %d bytes", rec.Op, rec.Slot, len(rec.Body))
			}
			q.Advance()
		}
		stop.Store(true)
		wg.Wait()
	})
}

func serve(q *Ring, stop *atomic.Bool) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	buf := buffer()
	for idle := 0; !stop.Load(); {
		rec, ok, err := q.Next(buf)
		if err != nil {
			panic(err)
		}
		if !ok {
			if idle++; idle < 2000 {
				Pause()
			} else {
				q.Sleep(100 * time.Millisecond)
				idle = 0
			}
			continue
		}
		idle = 0
		q.Advance()
		if err := q.Reply(rec.Slot, -int32(len(rec.Body)), rec.Body, 0, uint64(len(rec.Body))); err != nil {
			panic(err)
		}
	}
}

func TestRoundTrips(t *testing.T) {
	q, c := newRing(t)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() { serve(q, &stop) })
	for i := range 2000 {
		body := []byte(fmt.Sprintf("%08d", i))
		if i%100 == 0 {
			testkit.Parked(t, "shm.(*Ring).Sleep", 1) // the reader sleeps, too
		}
		if err, got := c.call(wire.OpFlush, uint16(i%wire.SlotCount), body); err != -8 || !bytes.Equal(got, body) {
			t.Fatalf("call %d: %d, %q", i, err, got)
		}
	}
	stop.Store(true)
	q.WakeReader()
	wg.Wait()
}

func TestWakeReader(t *testing.T) {
	q, _ := newRing(t)
	q.WakeReader()
	q.Sleep(-1) // returns, because the wake-up came before
	var wg sync.WaitGroup
	wg.Go(func() { q.Sleep(-1) })
	testkit.Parked(t, "shm.FutexWait", 1)
	q.WakeReader()
	wg.Wait()
}

// While the reader is in a call that blocks, a request wakes another thread.
func TestAnnounceHandsOver(t *testing.T) {
	q, c := newRing(t)
	got := make(chan bool)
	go func() { got <- q.Sleep(-1) }()
	testkit.Parked(t, "shm.FutexWait", 1)
	q.Announce()
	c.send(wire.OpFlush, wire.NoSlot, nil)
	select {
	case ok := <-got:
		if !ok {
			t.Error("woken without a request")
		}
	case <-testkit.Context(t).Done():
		t.Fatal("nobody took over")
	}
	q.Withdraw()
	if q.r.Load32(wire.HdrSleep) != 0 {
		t.Error("still announced")
	}
}

func TestReplyLimits(t *testing.T) {
	q, _ := newRing(t)
	if err := q.Reply(0, 0, make([]byte, MaxReply+1), 0, 0); !errors.Is(err, ErrTooLong) {
		t.Errorf("too long: %v", err)
	}
	// A slot outside the table must not be written to: its memory would be in the ring.
	before := bytes.Clone(q.r.Bytes())
	for _, n := range []uint16{wire.SlotCount, wire.NoSlot} {
		if err := q.Reply(n, -1, []byte("x"), 1, 1); err != nil {
			t.Error(err)
		}
		q.RingCaller(n)
	}
	if err := q.PendDone(wire.PendCount, wire.PendDone); !errors.Is(err, ErrRange) {
		t.Errorf("completion word beyond the table: %v", err)
	}
	if err := q.PendDone(0, wire.PendDone); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(before, q.r.Bytes()) {
		t.Error("memory was written")
	}
	if err := q.PendDone(wire.PendCount-1, wire.PendFailed); err != nil || q.r.Load32(wire.PendOff+4*(wire.PendCount-1)) != wire.PendFailed {
		t.Errorf("last completion word: %v", err)
	}
}

// A client that finds the same run before and after it has read a lane's other words has read that
// run's. So whoever sees a word of a run sees the run's number, too.
func TestLaneHasTheNumberOfARunBeforeItsOtherWords(t *testing.T) {
	q, c := newRing(t)
	const runs = 500000
	o := lane(1)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for i := uint32(1); i <= runs; i++ {
			q.StartLane(1, Lane{Word: i, From: uint64(i), At: uint64(i), Limit: i})
			q.EndLane(1, wire.LaneFree)
		}
	}()
	for {
		select {
		case <-over:
			return
		default:
		}
		seen := max(uint64(c.r.Load32(o+wire.LaneWord)), uint64(c.r.Load32(o+wire.LaneLimit)), c.r.Load64(o+wire.LaneFrom), c.r.Load64(o+wire.LaneDirectAt))
		if run := c.r.Load32(o + wire.LaneRun); uint64(run) < seen {
			t.Errorf("the lane has words of run %d while it is run %d", seen, run)
			<-over
			return
		}
	}
}

func TestLaneCounters(t *testing.T) {
	q, c := newRing(t)
	const chunks = 200
	o := lane(2)
	var wg sync.WaitGroup
	defer wg.Wait()
	for run := range uint32(2) {
		wg.Go(func() {
			for c.r.Load32(o+wire.LaneState) != wire.LaneStream {
				seen := c.r.Load32(wire.HdrBell)
				if c.r.Load32(o+wire.LaneState) == wire.LaneFree {
					FutexWait(c.r.Word32(wire.HdrBell), seen, 100*time.Millisecond)
				}
			}
			if w, from := c.r.Load32(o+wire.LaneWord), c.r.Load64(o+wire.LaneFrom); w != 7 || from != 11 || c.r.Load32(o+wire.LaneRun) != run+1 {
				t.Errorf("word %d, from %d", w, from)
			}
			for i := range uint32(chunks) {
				for c.r.Load32(o+wire.LaneLimit) <= i {
					seen := c.r.Load32(wire.HdrBell)
					if c.r.Load32(o+wire.LaneLimit) <= i {
						FutexWait(c.r.Word32(wire.HdrBell), seen, 100*time.Millisecond)
					}
				}
				c.r.Store32(o+wire.LaneDone, i+1)
				FutexWake(c.r.Word32(o+wire.LaneDone), All)
			}
		})
		if !q.LaneFree(2) {
			t.Fatal("the lane is taken")
		}
		q.StartLane(2, Lane{Word: 7, From: 11, Limit: 4})
		q.RingMovers()
		if q.LaneFree(2) || !q.LaneFree(1) || !q.LaneFree(3) {
			t.Fatal("another lane was started")
		}
		for done := uint32(0); done < chunks; {
			p := q.WaitLane(2, done, 30*time.Second)
			if p == done {
				t.Fatalf("stuck at %d", done)
			}
			done = p
			q.RaiseLane(2, min(done+4, chunks))
			q.RingMovers()
		}
		wg.Wait()
		q.EndLane(2, wire.LaneFree)
	}
}

func TestCallbacks(t *testing.T) {
	q, c := newRing(t)
	never := make(chan struct{})
	for i := range uint32(wire.CbCount) {
		if err := q.PushCallback(i, -int32(i), wire.CbEvent, never); err != nil {
			t.Fatal(err)
		}
	}
	stop := make(chan struct{})
	stopped := make(chan error, 2)
	for range 2 {
		go func() { stopped <- q.PushCallback(0, 0, wire.CbEvent, stop) }()
	}
	testkit.Parked(t, "shm.(*Ring).PushCallback", 2)
	close(stop)
	for range 2 {
		if err := <-stopped; !errors.Is(err, ErrStopped) {
			t.Fatalf("full: %v", err)
		}
	}
	pushed := make(chan error)
	go func() { pushed <- q.PushCallback(5000, 1, wire.CbBuild, never) }()
	testkit.Parked(t, "shm.(*Ring).PushCallback", 1)
	c.r.Store32(wire.HdrCbHead, 1)
	FutexWake(c.r.Word32(wire.HdrCbHead), All)
	if err := <-pushed; err != nil {
		t.Fatal(err)
	}
	if c.r.Load32(wire.HdrCbTail) != wire.CbCount+1 || c.r.Load32(wire.CbOff) != 5000 || c.r.Load32(wire.CbOff+8) != wire.CbBuild {
		t.Error("the callback is not where it belongs")
	}
	if c.r.Load32(wire.CbOff+16) != 1 || int32(c.r.Load32(wire.CbOff+20)) != -1 {
		t.Error("an earlier one is damaged")
	}
	c.r.Store32(wire.HdrCbHead, 99999)
	if err := q.PushCallback(0, 0, wire.CbEvent, never); !errors.Is(err, ErrRing) {
		t.Errorf("hostile head: %v", err)
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	q, c := newRing(b)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() { serve(q, &stop) })
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	body := make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		c.call(wire.OpFlush, 1, body)
	}
	stop.Store(true)
	q.WakeReader()
	wg.Wait()
}

func BenchmarkPost(b *testing.B) {
	q, c := newRing(b)
	buf, body := buffer(), make([]byte, 64)
	for b.Loop() {
		c.send(wire.OpFlush, wire.NoSlot, body)
		if _, ok, err := q.Next(buf); !ok || err != nil {
			b.Fatal(err)
		}
		q.Advance()
	}
}
