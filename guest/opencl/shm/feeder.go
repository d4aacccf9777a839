package shm

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Feeder is the client's side of the request ring, for requests that came over a network.
// Only one goroutine may use it.
type Feeder struct {
	r    *Region
	tail uint64
}

// NewFeeder returns the client's side of a ring.
func NewFeeder(r *Region) *Feeder { return &Feeder{r: r, tail: r.Load64(wire.HdrTail)} }

// recordHead is the size of a record's header in bytes.
const recordHead = 8

// ParseRecord splits the first record off b. The records are as in the ring.
func ParseRecord(b []byte) (rec Record, rest []byte, err error) {
	if len(b) < recordHead {
		return Record{}, nil, fmt.Errorf("record of %d bytes: %w", len(b), ErrRing)
	}
	h := binary.LittleEndian.Uint64(b)
	n, op, slot := h&0xffffffff, wire.Op(h>>32), uint16(h>>48)
	if n < recordHead || n%8 != 0 || n > wire.MaxRequest || n > uint64(len(b)) || op == wire.OpPad || slot >= wire.SlotCount && slot != wire.NoSlot {
		return Record{}, nil, fmt.Errorf("%s of %d bytes for slot %d: %w", op, n, slot, ErrRing)
	}
	return Record{Op: op, Slot: slot, Body: b[recordHead:n:n]}, b[n:], nil
}

// AppendRecord appends a record to b as it is in the ring.
func AppendRecord(b []byte, rec Record) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(recordHead+len(rec.Body))|uint64(rec.Op)<<32|uint64(rec.Slot)<<48)
	return append(b, rec.Body...)
}

// Put writes a record, and waits for room until stop is closed. Publish makes it visible.
func (f *Feeder) Put(rec Record, stop <-chan struct{}) error {
	n := uint64(recordHead + len(rec.Body))
	if left := wire.RingSize - f.tail%wire.RingSize; left < n {
		if err := f.room(left+n, stop); err != nil {
			return err
		}
		f.head(left, wire.OpPad, wire.NoSlot)
		f.tail += left
	} else if err := f.room(n, stop); err != nil {
		return err
	}
	f.head(n, rec.Op, rec.Slot)
	copy(f.r.mem[wire.RingOff+f.tail%wire.RingSize+recordHead:], rec.Body)
	f.tail += n
	return nil
}

func (f *Feeder) head(n uint64, op wire.Op, slot uint16) {
	f.r.Store64(wire.RingOff+f.tail%wire.RingSize, n|uint64(op)<<32|uint64(slot)<<48)
}

// room waits for n bytes. What was put before is published first.
func (f *Feeder) room(n uint64, stop <-chan struct{}) error {
	for f.tail+n-f.r.Load64(wire.HdrHead) > wire.RingSize {
		f.Publish(true)
		f.r.Store32(wire.HdrSpace, 1)
		if f.tail+n-f.r.Load64(wire.HdrHead) <= wire.RingSize {
			return nil
		}
		select {
		case <-stop:
			return fmt.Errorf("request: %w", ErrStopped)
		default:
			FutexWait(f.r.Word32(wire.HdrSpace), 1, 100*time.Millisecond)
		}
	}
	return nil
}

// Publish releases what was put, and wakes the reader. now means that somebody waits for one
// of the requests, so that a reader that naps is woken, too.
func (f *Feeder) Publish(now bool) {
	if f.r.Load64(wire.HdrTail) == f.tail {
		return
	}
	f.r.Store64(wire.HdrTail, f.tail)
	if f.r.Load32(wire.HdrSleep) == 1 && f.r.Swap32(wire.HdrSleep, 0) == 1 {
		FutexWake(f.r.Word32(wire.HdrSleep), 1)
	}
	if now && f.r.Load32(wire.HdrNap) == 1 && f.r.Swap32(wire.HdrNap, 0) == 1 {
		FutexWake(f.r.Word32(wire.HdrNap), 1)
	}
}
