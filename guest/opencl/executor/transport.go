package executor

import (
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/shm"
)

// transport is how requests come from the application and answers go back.
// Shared memory is the one there is; PROTOCOL.md of guest/opencl/wire says what each
// part means.
type transport interface {
	// Next and Advance take requests in order; a request stays until Advance.
	Next(buf []byte) (shm.Record, bool, error)
	Advance()
	Empty() bool

	// The doorbell: Announce and Withdraw say that nobody reads, or that
	// somebody does again.
	Announce()
	Withdraw()
	Bell() uint32
	AwaitBell(seen uint32, timeout time.Duration)
	Nap(d time.Duration)
	RingBell()

	Reply(slot uint16, err int32, data []byte, token uint32, total uint64) error
	PendDone(index, state uint32) error
	PushCallback(token uint32, status int32, kind uint32, stop <-chan struct{}) error

	// What is printed: as much as there is room for, and waiting for more.
	Print(p []byte) (int, error)
	WakeWaiting()
	AwaitPrint(timeout time.Duration)

	// The lanes of bulk transfers, and the bells of those who move their data.
	LaneFree(lane int) bool
	StartLane(lane int, l shm.Lane)
	RaiseLane(lane int, limit uint32)
	WaitLane(lane int, old uint32, timeout time.Duration) uint32
	EndLane(lane int, state uint32)
	RingMovers()
	RingCaller(slot uint16)

	// Whose turn it is, and how the session is.
	Owner() uint32
	SetServing(generation uint32)
	State() uint32
	SetState(state uint32)
}

var _ transport = (*shm.Ring)(nil)
