package shm

import (
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Print passes output to the client, which writes it to its standard output. It passes as
// many of the bytes as there is room for, and returns their number. Only the executor that
// owns the ring may call it, from one goroutine at a time.
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

// WakeWaiting wakes clients that sleep until a reply or a callback, so that they look for
// output to print.
func (q *Ring) WakeWaiting() {
	for n := uint16(0); n < wire.SlotCount; n++ {
		s, _ := slot(n)
		if q.r.Load32(s+wire.SlotState) == wire.SlotAsleep {
			FutexWake(q.r.Word32(s+wire.SlotState), All)
		}
	}
	FutexWake(q.r.Word32(wire.HdrCbTail), All)
}

// AwaitPrint waits until Print has room, or until the timeout.
func (q *Ring) AwaitPrint(timeout time.Duration) {
	head := q.r.Load32(wire.HdrOutHead)
	if q.r.Load32(wire.HdrOutTail)-head >= wire.OutSize {
		FutexWait(q.r.Word32(wire.HdrOutHead), head, timeout)
	}
}
