package shm

import (
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Print gives the client as many of the bytes as there is room for, to write
// them to its standard output, and returns how many those are. One goroutine at
// a time may call it, of the executor that owns the ring.
func (q *Ring) Print(p []byte) (int, error) {
	tail, head := q.r.Load32(wire.HdrOutTail), q.r.Load32(wire.HdrOutHead)
	if tail-head > wire.OutSize {
		return 0, fmt.Errorf("%d bytes of output waiting: %w", tail-head, ErrRing)
	}
	p = p[:min(len(p), int(wire.OutSize-(tail-head)))]
	out := q.r.mem[wire.OutOff:][:wire.OutSize]
	n := copy(out[tail%wire.OutSize:], p)
	copy(out, p[n:])
	q.r.Store32(wire.HdrOutTail, tail+uint32(len(p)))
	return len(p), nil
}

// WakeWaiting has clients that sleep until they are answered, or called back,
// look at what there is to print.
func (q *Ring) WakeWaiting() {
	for n := uint16(0); n < wire.SlotCount; n++ {
		s, _ := slot(n)
		if q.r.Load32(s+wire.SlotState) == wire.SlotAsleep {
			FutexWake(q.r.Word32(s+wire.SlotState), All)
		}
	}
	FutexWake(q.r.Word32(wire.HdrCbTail), All)
}

// AwaitPrint waits until Print has room, or for the timeout.
func (q *Ring) AwaitPrint(timeout time.Duration) {
	head := q.r.Load32(wire.HdrOutHead)
	if q.r.Load32(wire.HdrOutTail)-head >= wire.OutSize {
		FutexWait(q.r.Word32(wire.HdrOutHead), head, timeout)
	}
}
