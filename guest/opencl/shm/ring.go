package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Errors of rings; but ErrStopped they mean a broken or hostile client.
var (
	// ErrRing is returned for a ring whose content breaks the protocol.
	ErrRing = errors.New("ring corrupt")
	// ErrTooLong is returned for data that does not fit into a reply slot.
	ErrTooLong = errors.New("too long for a reply slot")
	// ErrStopped is returned by a wait that was told to stop.
	ErrStopped = errors.New("stopped")
)

// MaxReply is how many bytes of a reply fit into its slot.
const MaxReply = wire.SlotSize - wire.SlotData

// Ring is the executor's side of the ring memfd. One goroutine at a time may
// read requests (Next, Advance, Sleep, Announce, Withdraw); everything else
// may be called by many at once.
//
// A slot number outside the table, such as wire.NoSlot, is one that nobody
// waits for: what is addressed to it is dropped.
type Ring struct {
	r      *Region
	next   uint64 // where the record ends that Next returned last
	kicked atomic.Bool
	push   chan struct{} // held by the one that pushes callbacks
}

// Record is one request.
type Record struct {
	Op   wire.Op
	Slot uint16 // wire.NoSlot when nobody waits
	Body []byte // the fields, 8-byte aligned if the buffer is
}

// NewRing uses a region as a ring: one that Init has formatted or will.
func NewRing(r *Region) (*Ring, error) {
	if r.Size() < wire.RingMem {
		return nil, fmt.Errorf("ring memory of %d bytes: %w", r.Size(), ErrRange)
	}
	return &Ring{r: r, push: make(chan struct{}, 1)}, nil
}

// Close unmaps the ring's region. Nothing may use the ring any more.
func (q *Ring) Close() error { return q.r.Close() }

// Init formats a fresh ring memfd. The sizes are bytes.
func (q *Ring) Init(arenaSize, arenaSplit uint64) {
	q.r.Store32(wire.HdrVersion, wire.Version)
	q.r.Store64(wire.HdrRingSize, wire.RingSize)
	q.r.Store64(wire.HdrArenaSize, arenaSize)
	q.r.Store64(wire.HdrArenaSplit, arenaSplit)
	q.r.Store32(wire.HdrSlots, wire.SlotCount)
	q.r.Store32(wire.HdrPends, wire.PendCount)
	q.r.Store32(wire.HdrState, wire.StateRunning)
	q.r.Store32(wire.HdrMagic, wire.Magic)
}

// Check reports whether the ring is formatted as this version does it.
func (q *Ring) Check() error {
	if m := q.r.Load32(wire.HdrMagic); m != wire.Magic {
		return fmt.Errorf("ring magic %#x: %w", m, ErrRing)
	}
	if v := q.r.Load32(wire.HdrVersion); v != wire.Version {
		return fmt.Errorf("ring version %d, not %d: %w", v, wire.Version, ErrRing)
	}
	return nil
}

// Arena returns the arena's size and split in bytes as the header has them.
// Like all shared memory they may have been tampered with: compare the size
// with the arena's own.
func (q *Ring) Arena() (size, split uint64, err error) {
	size, split = q.r.Load64(wire.HdrArenaSize), q.r.Load64(wire.HdrArenaSplit)
	if split > size || split%4096 != 0 {
		return 0, 0, fmt.Errorf("arena of %d bytes split at %d: %w", size, split, ErrRing)
	}
	return size, split, nil
}

// Owner is the generation of the executor that may read the ring.
func (q *Ring) Owner() uint32 { return q.r.Load32(wire.HdrOwner) }

// SetOwner hands the ring to another generation: the commit point of a swap.
func (q *Ring) SetOwner(generation uint32) { q.r.Store32(wire.HdrOwner, generation) }

// SetServing says that the executor of that generation has begun to serve: what
// it does from here on nobody can take back.
func (q *Ring) SetServing(generation uint32) { q.r.Store32(wire.HdrServing, generation) }

// Serving is the generation of the executor that last began to serve.
func (q *Ring) Serving() uint32 { return q.r.Load32(wire.HdrServing) }

// State is the session's, one of wire.StateRunning and so on.
func (q *Ring) State() uint32 { return q.r.Load32(wire.HdrState) }

// SetState changes the session's state and wakes who waits for that.
func (q *Ring) SetState(s uint32) { q.set(wire.HdrState, s) }

func (q *Ring) set(off uint64, v uint32) {
	q.r.Store32(off, v)
	FutexWake(q.r.Word32(off), All)
}

// Next copies the next record's fields into buf, which must have
// wire.MaxRequest bytes, and returns false if there is none. The record stays
// in the ring until Advance.
func (q *Ring) Next(buf []byte) (rec Record, ok bool, err error) {
	// Padding goes with the record behind it: a reader that is being replaced
	// moves the head in Advance and nowhere else.
	for head, tail := q.r.Load64(wire.HdrHead), q.r.Load64(wire.HdrTail); ; {
		if head == tail {
			return Record{}, false, nil
		}
		if head%8 != 0 || tail%8 != 0 || tail-head > wire.RingSize {
			return Record{}, false, fmt.Errorf("head %d, tail %d: %w", head, tail, ErrRing)
		}
		at := head % wire.RingSize
		// One load: what is checked is what is used.
		h := q.r.Load64(wire.RingOff + at)
		n, op, slot := h&0xffffffff, wire.Op(h>>32), uint16(h>>48)
		if n < 8 || n%8 != 0 || n > tail-head || n > wire.RingSize-at {
			return Record{}, false, fmt.Errorf("record of %d bytes at %d, tail %d: %w", n, head, tail, ErrRing)
		}
		if op == wire.OpPad {
			// Where the ring begins there is nothing to pad; so no two follow each
			// other. It comes with the record that it makes room for.
			if at == 0 || n != wire.RingSize-at || n == tail-head {
				return Record{}, false, fmt.Errorf("padding of %d bytes at %d: %w", n, head, ErrRing)
			}
			head += n
			continue
		}
		if n > wire.MaxRequest || n-8 > uint64(len(buf)) {
			return Record{}, false, fmt.Errorf("%s of %d bytes: %w", op, n, ErrRing)
		}
		if slot >= wire.SlotCount && slot != wire.NoSlot {
			return Record{}, false, fmt.Errorf("%s for slot %d: %w", op, slot, ErrRing)
		}
		n -= 8
		copy(buf[:n], q.r.mem[wire.RingOff+at+8:][:n])
		q.next = head + 8 + n
		return Record{Op: op, Slot: slot, Body: buf[:n:n]}, true, nil
	}
}

// Advance takes the record that Next returned last out of the ring. It wakes
// clients that wait for room once half the ring is free, so that they do not
// come for the room of each record on its own.
func (q *Ring) Advance() {
	q.r.Store64(wire.HdrHead, q.next)
	if q.r.Load32(wire.HdrSpace) != 0 && q.r.Load64(wire.HdrTail)-q.next <= wire.RingSize/2 && q.r.Swap32(wire.HdrSpace, 0) != 0 {
		FutexWake(q.r.Word32(wire.HdrSpace), All)
	}
}

// Empty reports whether the ring holds no request.
func (q *Ring) Empty() bool { return q.r.Load64(wire.HdrHead) == q.r.Load64(wire.HdrTail) }

// Sleep waits for a request, WakeReader or the timeout, and reports whether
// there is a request. Whoever leaves it is to read the ring.
func (q *Ring) Sleep(timeout time.Duration) bool {
	q.r.Store32(wire.HdrSleep, 1)
	if q.Empty() && !q.kicked.Swap(false) {
		FutexWait(q.r.Word32(wire.HdrSleep), 1, timeout)
		q.kicked.Store(false)
	}
	q.r.Store32(wire.HdrSleep, 0)
	return !q.Empty()
}

// WakeReader ends the Sleep of a reader in this process, the next one if none
// sleeps now.
func (q *Ring) WakeReader() {
	q.kicked.Store(true)
	q.r.Store32(wire.HdrSleep, 0)
	FutexWake(q.r.Word32(wire.HdrSleep), All)
}

// Announce says that the reader is about to be inside a call that may block,
// so that clients wake another one, which waits in Sleep.
func (q *Ring) Announce() { q.r.Store32(wire.HdrSleep, 1) }

// Withdraw takes Announce back: the caller reads the ring again. A reader that
// has been replaced meanwhile must not call it.
func (q *Ring) Withdraw() { q.r.Store32(wire.HdrSleep, 0) }

// slot is the offset of a slot's header.
func slot(n uint16) (off uint64, ok bool) {
	return wire.SlotOff + uint64(n)*wire.SlotSize, n < wire.SlotCount
}

// Reply answers a request. Of a reply that does not fit, data is the first
// part, at most MaxReply bytes, total the whole length, and token what the
// client fetches the rest with.
func (q *Ring) Reply(n uint16, err int32, data []byte, token uint32, total uint64) error {
	s, ok := slot(n)
	if !ok {
		return nil
	}
	if len(data) > MaxReply {
		return fmt.Errorf("reply of %d bytes: %w", len(data), ErrTooLong)
	}
	copy(q.r.mem[s+wire.SlotData:][:MaxReply], data)
	// Plain stores, a fraction of the price: the exchange releases them.
	*q.r.Word32(s + wire.SlotErr) = uint32(err)
	*q.r.Word32(s + wire.SlotLen) = uint32(len(data))
	*q.r.Word32(s + wire.SlotToken) = token
	*q.r.Word64(s + wire.SlotTotal) = total
	if q.r.Swap32(s+wire.SlotState, wire.SlotDone) == wire.SlotAsleep {
		FutexWake(q.r.Word32(s+wire.SlotState), All)
	}
	return nil
}

// Lane is what the executor says of a bulk transfer that takes a lane.
type Lane struct {
	Direct bool   // the bytes are in the arena, from At on
	Word   uint32 // the transfer's completion word
	From   uint64 // its byte that this run begins at
	At     uint64 // arena offset of its byte 0, when direct
	Limit  uint32 // chunks that the client may move at first
}

func lane(n int) uint64 { return wire.LaneOff + uint64(n)*wire.LaneSize }

// LaneFree reports whether a transfer may take lane n, one of wire.LaneCount.
func (q *Ring) LaneFree(n int) bool { return q.r.Load32(lane(n)+wire.LaneState) == wire.LaneFree }

// StartLane gives a free lane to a transfer.
func (q *Ring) StartLane(n int, l Lane) {
	o := lane(n)
	state := uint32(wire.LaneStream)
	if l.Direct {
		state = wire.LaneDirect
	}
	q.r.Store32(o+wire.LaneWord, l.Word)
	q.r.Store64(o+wire.LaneFrom, l.From)
	q.r.Store64(o+wire.LaneDirectAt, l.At)
	q.r.Store32(o+wire.LaneDone, 0)
	q.r.Store32(o+wire.LaneLimit, l.Limit)
	q.r.Store32(o+wire.LaneRun, q.r.Load32(o+wire.LaneRun)+1)
	q.r.Store32(o+wire.LaneState, state)
}

// RaiseLane lets the client move the chunks of lane n below limit.
func (q *Ring) RaiseLane(n int, limit uint32) { q.r.Store32(lane(n)+wire.LaneLimit, limit) }

// EndLane ends a run: wire.LaneFree when the client has moved all that it was
// allowed to, else wire.LaneLeft.
func (q *Ring) EndLane(n int, state uint32) { q.r.Store32(lane(n)+wire.LaneState, state) }

// WaitLane waits until the client's count of moved chunks in lane n is no
// longer old, or for the timeout, and returns it.
func (q *Ring) WaitLane(n int, old uint32, timeout time.Duration) uint32 {
	return q.waitCounter(lane(n)+wire.LaneDone, old, timeout)
}

// RingMovers tells the client's threads that move data for nobody's call to
// look at the lanes.
func (q *Ring) RingMovers() { q.count(wire.HdrBell) }

// RingCaller tells the thread whose call has the slot to look at the lanes.
func (q *Ring) RingCaller(n uint16) {
	if s, ok := slot(n); ok {
		q.count(s + wire.SlotBell)
	}
}

func (q *Ring) count(off uint64) {
	atomic.AddUint32(q.r.Word32(off), 1)
	FutexWake(q.r.Word32(off), All)
}

// spins is how long a wait polls before it sleeps: some microseconds, what a
// chunk's last bytes take and a wake-up costs.
const spins = 200

func (q *Ring) waitCounter(off uint64, old uint32, timeout time.Duration) uint32 {
	for range spins {
		if v := q.r.Load32(off); v != old {
			return v
		}
		Pause()
	}
	deadline := time.Now().Add(timeout)
	for {
		v := q.r.Load32(off)
		left := time.Until(deadline)
		if v != old || left <= 0 {
			return v
		}
		FutexWait(q.r.Word32(off), old, left)
	}
}

// PendDone sets a completion word to wire.PendDone or wire.PendFailed. Word 0
// is the one that nobody looks at.
func (q *Ring) PendDone(i, state uint32) error {
	if i >= wire.PendCount {
		return fmt.Errorf("completion word %d: %w", i, ErrRange)
	}
	if i != 0 {
		q.r.Store32(wire.PendOff+4*uint64(i), state)
	}
	return nil
}

// fullPoll bounds how long a full callback ring keeps a closed stop unnoticed.
const fullPoll = 20 * time.Millisecond

// PushCallback tells the client to call back. It blocks while the callback
// ring is full, until stop is closed: ErrStopped.
func (q *Ring) PushCallback(token uint32, status int32, kind uint32, stop <-chan struct{}) error {
	select {
	case q.push <- struct{}{}:
		defer func() { <-q.push }()
	case <-stop:
		return fmt.Errorf("callback %d: %w", token, ErrStopped)
	}
	tail := q.r.Load32(wire.HdrCbTail)
	for {
		head := q.r.Load32(wire.HdrCbHead)
		if n := tail - head; n < wire.CbCount {
			break
		} else if n > wire.CbCount {
			return fmt.Errorf("%d callbacks waiting: %w", n, ErrRing)
		}
		select {
		case <-stop:
			return fmt.Errorf("callback %d: %w", token, ErrStopped)
		default:
			FutexWait(q.r.Word32(wire.HdrCbHead), head, fullPoll)
		}
	}
	e := wire.CbOff + 16*uint64(tail%wire.CbCount)
	*q.r.Word32(e), *q.r.Word32(e + 4) = token, uint32(status)
	*q.r.Word32(e + 8), *q.r.Word32(e + 12) = kind, 0
	q.set(wire.HdrCbTail, tail+1)
	return nil
}

// Nap sleeps for a moment in which only requests that somebody waits for wake
// the reader; the others pile up and are read together. Its caller goes on
// being the reader.
func (q *Ring) Nap(d time.Duration) {
	q.r.Store32(wire.HdrNap, 1)
	if q.Empty() {
		FutexWait(q.r.Word32(wire.HdrNap), 1, d)
	}
	q.r.Store32(wire.HdrNap, 0)
}

// Bell is the doorbell's word as it is now, for AwaitBell.
func (q *Ring) Bell() uint32 { return q.r.Load32(wire.HdrSleep) }

// AwaitBell sleeps until a client rings or RingBell is called, but not if the
// word is no longer as seen, nor longer than the timeout.
func (q *Ring) AwaitBell(seen uint32, timeout time.Duration) {
	FutexWait(q.r.Word32(wire.HdrSleep), seen, timeout)
}

// RingBell wakes every reader, of this process and of others, to look again.
func (q *Ring) RingBell() {
	q.set(wire.HdrSleep, 0)
	q.set(wire.HdrNap, 0)
}
