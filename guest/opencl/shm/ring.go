package shm

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Errors of rings. All except ErrStopped mean a broken or hostile client.
var (
	// ErrRing is returned for a ring whose content breaks the protocol.
	ErrRing = errors.New("ring corrupt")
	// ErrTooLong is returned for data that does not fit into a reply slot.
	ErrTooLong = errors.New("too long for a reply slot")
	// ErrStopped is returned by a wait whose stop channel was closed.
	ErrStopped = errors.New("stopped")
)

// MaxReply is how many bytes of a reply fit into its slot.
const MaxReply = wire.SlotSize - wire.SlotData

// Ring is the executor's side of the ring memfd. Only one goroutine at a time may read
// requests (Next, Advance, Sleep, Announce, Withdraw). The other methods may be called
// concurrently.
//
// A slot number outside the table, for example wire.NoSlot, means that nobody waits: a
// reply to it is dropped.
type Ring struct {
	r      *Region
	next   uint64 // end of the record that Next has returned last
	kicked atomic.Bool
	push   chan struct{} // taken while callbacks are pushed
}

// Record is one request.
type Record struct {
	Op   wire.Op
	Slot uint16 // wire.NoSlot if nobody waits
	Body []byte // the fields, 8-byte aligned if the buffer is
}

// NewRing uses a region as a ring. The region is formatted by Init, before or after.
func NewRing(r *Region) (*Ring, error) {
	if r.Size() < wire.RingMem {
		return nil, fmt.Errorf("ring memory of %d bytes: %w", r.Size(), ErrRange)
	}
	return &Ring{r: r, push: make(chan struct{}, 1)}, nil
}

// Close unmaps the ring's region. Nothing may use the ring after that.
func (q *Ring) Close() error { return q.r.Close() }

// Init formats a new ring memfd. The sizes are in bytes.
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

// Check returns an error unless the ring has the format of this version.
func (q *Ring) Check() error {
	if m := q.r.Load32(wire.HdrMagic); m != wire.Magic {
		return fmt.Errorf("ring magic %#x: %w", m, ErrRing)
	}
	if v := q.r.Load32(wire.HdrVersion); v != wire.Version {
		return fmt.Errorf("ring version %d, not %d: %w", v, wire.Version, ErrRing)
	}
	return nil
}

// Arena returns the arena's size and split in bytes from the header. As in all shared
// memory, the client may have changed them: compare the size with the arena's real size.
func (q *Ring) Arena() (size, split uint64, err error) {
	size, split = q.r.Load64(wire.HdrArenaSize), q.r.Load64(wire.HdrArenaSplit)
	if split > size || split%4096 != 0 {
		return 0, 0, fmt.Errorf("arena of %d bytes split at %d: %w", size, split, ErrRing)
	}
	return size, split, nil
}

// Owner returns the generation of the executor that may read the ring.
func (q *Ring) Owner() uint32 { return q.r.Load32(wire.HdrOwner) }

// SetOwner gives the ring to another generation. This is the commit point of a swap.
func (q *Ring) SetOwner(generation uint32) { q.r.Store32(wire.HdrOwner, generation) }

// SetServing records that the executor of that generation has begun to serve. From then on,
// nobody can undo what it does. It has the client use its own threshold for lanes.
func (q *Ring) SetServing(generation uint32) {
	q.r.Store32(wire.HdrServing, generation)
	q.SetBulkFrom(0)
}

// SetBulkFrom says from how many bytes on blocking transfers of buffers should go through a
// lane; 0: as the client thinks best. It is a hint.
func (q *Ring) SetBulkFrom(n uint32) { q.r.Store32(wire.HdrBulkFrom, n) }

// Serving returns the generation of the executor that was the last to begin to serve.
func (q *Ring) Serving() uint32 { return q.r.Load32(wire.HdrServing) }

// State returns the session's state: wire.StateRunning or another of these constants.
func (q *Ring) State() uint32 { return q.r.Load32(wire.HdrState) }

// SetState changes the session's state and wakes those who wait for that.
func (q *Ring) SetState(s uint32) { q.set(wire.HdrState, s) }

func (q *Ring) set(off uint64, v uint32) {
	q.r.Store32(off, v)
	FutexWake(q.r.Word32(off), All)
}

// Next copies the next record's fields into buf, which must have wire.MaxRequest bytes. It
// returns false if there is no record. The record stays in the ring until Advance.
func (q *Ring) Next(buf []byte) (rec Record, ok bool, err error) {
	// Padding is consumed together with the record after it. So a reader that is being
	// replaced moves the head only in Advance.
	for head, tail := q.r.Load64(wire.HdrHead), q.r.Load64(wire.HdrTail); ; {
		if head == tail {
			return Record{}, false, nil
		}
		if head%8 != 0 || tail%8 != 0 || tail-head > wire.RingSize {
			return Record{}, false, fmt.Errorf("head %d, tail %d: %w", head, tail, ErrRing)
		}
		at := head % wire.RingSize
		// Load the word once, so that the value that is checked is the one that is used.
		h := q.r.Load64(wire.RingOff + at)
		n, op, slot := h&0xffffffff, wire.Op(h>>32), uint16(h>>48)
		if n < 8 || n%8 != 0 || n > tail-head || n > wire.RingSize-at {
			return Record{}, false, fmt.Errorf("record of %d bytes at %d, tail %d: %w", n, head, tail, ErrRing)
		}
		if op == wire.OpPad {
			// At the beginning of the ring there is no padding, so two paddings never
			// follow each other. The client writes it together with the record that it
			// makes room for.
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

// Advance removes the record that Next has returned last from the ring. It wakes clients
// that wait for room only when half of the ring is free, so that they do not wake for each
// single record.
func (q *Ring) Advance() {
	q.r.Store64(wire.HdrHead, q.next)
	if q.r.Load32(wire.HdrSpace) != 0 && q.r.Load64(wire.HdrTail)-q.next <= wire.RingSize/2 && q.r.Swap32(wire.HdrSpace, 0) != 0 {
		FutexWake(q.r.Word32(wire.HdrSpace), All)
	}
}

// Empty reports whether the ring has no request.
func (q *Ring) Empty() bool { return q.r.Load64(wire.HdrHead) == q.r.Load64(wire.HdrTail) }

// Sleep waits for a request, WakeReader or the timeout, and reports whether there is a
// request. The caller must read the ring after it.
func (q *Ring) Sleep(timeout time.Duration) bool {
	q.r.Store32(wire.HdrSleep, 1)
	if q.Empty() && !q.kicked.Swap(false) {
		FutexWait(q.r.Word32(wire.HdrSleep), 1, timeout)
		q.kicked.Store(false)
	}
	q.r.Store32(wire.HdrSleep, 0)
	return !q.Empty()
}

// WakeReader ends the Sleep of a reader in this process. If none sleeps now, it ends the
// next Sleep.
func (q *Ring) WakeReader() {
	q.kicked.Store(true)
	q.r.Store32(wire.HdrSleep, 0)
	FutexWake(q.r.Word32(wire.HdrSleep), All)
}

// Announce records that the reader is about to make a call that may block, so that clients
// wake another reader, which waits in Sleep.
func (q *Ring) Announce() { q.r.Store32(wire.HdrSleep, 1) }

// Withdraw undoes Announce: the caller reads the ring again. A reader that has been
// replaced since must not call it.
func (q *Ring) Withdraw() { q.r.Store32(wire.HdrSleep, 0) }

// slot returns the offset of a slot's header.
func slot(n uint16) (off uint64, ok bool) {
	return wire.SlotOff + uint64(n)*wire.SlotSize, n < wire.SlotCount
}

// Reply answers a request. If the reply does not fit, data is the first part, at most
// MaxReply bytes, total is the whole length, and with token the client fetches the rest.
func (q *Ring) Reply(n uint16, err int32, data []byte, token uint32, total uint64) error {
	s, ok := slot(n)
	if !ok {
		return nil
	}
	if len(data) > MaxReply {
		return fmt.Errorf("reply of %d bytes: %w", len(data), ErrTooLong)
	}
	copy(q.r.mem[s+wire.SlotData:][:MaxReply], data)
	// Plain stores are much cheaper; the exchange below publishes them.
	*q.r.Word32(s + wire.SlotErr) = uint32(err)
	*q.r.Word32(s + wire.SlotLen) = uint32(len(data))
	*q.r.Word32(s + wire.SlotToken) = token
	*q.r.Word64(s + wire.SlotTotal) = total
	if q.r.Swap32(s+wire.SlotState, wire.SlotDone) == wire.SlotAsleep {
		FutexWake(q.r.Word32(s+wire.SlotState), All)
	}
	return nil
}

// Lane describes a bulk transfer that uses a lane.
type Lane struct {
	Direct bool   // the bytes are in the arena, from At on
	Word   uint32 // the transfer's completion word
	From   uint64 // the transfer's byte at which this run begins
	At     uint64 // arena offset of the transfer's byte 0, if direct
	Limit  uint32 // number of chunks that the client may move at first

	// What a transport over a network needs to know, too.
	Write             bool   // the client sends
	Row, Slice, Total uint64 // bytes of a row, of a slice, and of the transfer
}

func lane(n int) uint64 { return wire.LaneOff + uint64(n)*wire.LaneSize }

// LaneFree reports whether a transfer can use lane n, one of wire.LaneCount.
func (q *Ring) LaneFree(n int) bool { return q.r.Load32(lane(n)+wire.LaneState) == wire.LaneFree }

// StartLane assigns a free lane to a transfer.
func (q *Ring) StartLane(n int, l Lane) {
	o := lane(n)
	state := uint32(wire.LaneStream)
	if l.Direct {
		state = wire.LaneDirect
	}
	// The run first: who finds the same run behind the other words has read none of a later one.
	q.r.Store32(o+wire.LaneRun, q.r.Load32(o+wire.LaneRun)+1)
	q.r.Store32(o+wire.LaneWord, l.Word)
	q.r.Store64(o+wire.LaneFrom, l.From)
	q.r.Store64(o+wire.LaneDirectAt, l.At)
	q.r.Store32(o+wire.LaneDone, 0)
	q.r.Store32(o+wire.LaneLimit, l.Limit)
	q.r.Store32(o+wire.LaneState, state)
}

// RaiseLane permits the client to move the chunks of lane n below limit.
func (q *Ring) RaiseLane(n int, limit uint32) { q.r.Store32(lane(n)+wire.LaneLimit, limit) }

// EndLane ends a run. The state is wire.LaneFree if the client has moved everything that
// was permitted, and wire.LaneLeft otherwise.
func (q *Ring) EndLane(n int, state uint32) { q.r.Store32(lane(n)+wire.LaneState, state) }

// WaitLane waits until the client's count of moved chunks in lane n differs from old, or
// until the timeout. It returns the count.
func (q *Ring) WaitLane(n int, old uint32, timeout time.Duration) uint32 {
	return q.waitCounter(lane(n)+wire.LaneDone, old, timeout)
}

// RingMovers makes the client's threads that move data independently of any call look at
// the lanes.
func (q *Ring) RingMovers() { q.count(wire.HdrBell) }

// RingCaller makes the thread whose call has the slot look at the lanes.
func (q *Ring) RingCaller(n uint16) {
	if s, ok := slot(n); ok {
		q.count(s + wire.SlotBell)
	}
}

func (q *Ring) count(off uint64) {
	atomic.AddUint32(q.r.Word32(off), 1)
	FutexWake(q.r.Word32(off), All)
}

// spins is how often a wait polls before it sleeps. It takes some microseconds: about as
// long as the last bytes of a chunk, or a wake-up.
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

// PendDone sets a completion word to wire.PendDone or wire.PendFailed. Nobody reads word 0.
func (q *Ring) PendDone(i, state uint32) error {
	if i >= wire.PendCount {
		return fmt.Errorf("completion word %d: %w", i, ErrRange)
	}
	if i != 0 {
		q.r.Store32(wire.PendOff+4*uint64(i), state)
	}
	return nil
}

// fullPoll is the interval at which stop is checked while the callback ring is full.
const fullPoll = 20 * time.Millisecond

// PushCallback makes the client run a callback. It blocks while the callback ring is full.
// If stop is closed, it returns ErrStopped.
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

// Nap sleeps for a short time in which only requests that somebody waits for wake the
// reader. The others accumulate and are read together. The caller remains the reader.
func (q *Ring) Nap(d time.Duration) {
	q.r.Store32(wire.HdrNap, 1)
	if q.Empty() {
		FutexWait(q.r.Word32(wire.HdrNap), 1, d)
	}
	q.r.Store32(wire.HdrNap, 0)
}

// Bell returns the current value of the doorbell's word, for AwaitBell.
func (q *Ring) Bell() uint32 { return q.r.Load32(wire.HdrSleep) }

// AwaitBell sleeps until a client rings the doorbell, RingBell is called, or the timeout.
// It returns at once if the word differs from seen.
func (q *Ring) AwaitBell(seen uint32, timeout time.Duration) {
	FutexWait(q.r.Word32(wire.HdrSleep), seen, timeout)
}

// RingBell wakes all readers, in this and in other processes, so that they look at the ring
// again.
func (q *Ring) RingBell() {
	q.set(wire.HdrSleep, 0)
	q.set(wire.HdrNap, 0)
}
