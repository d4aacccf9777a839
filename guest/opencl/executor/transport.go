package executor

import (
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/shm"
)

// transport carries requests from the application, and answers to it. There is one
// implementation, in shared memory; PROTOCOL.md of guest/opencl/wire describes each part.
type transport interface {
	// Next and Advance take requests in their order. A request stays in the ring until
	// Advance.
	Next(buf []byte) (shm.Record, bool, error)
	Advance()
	Empty() bool

	// The doorbell: Announce tells the client that nobody reads the ring, and Withdraw that
	// a worker reads it again.
	Announce()
	Withdraw()
	Bell() uint32
	AwaitBell(seen uint32, timeout time.Duration)
	Nap(d time.Duration)
	RingBell()

	Reply(slot uint16, err int32, data []byte, token uint32, total uint64) error
	PendDone(index, state uint32) error
	PushCallback(token uint32, status int32, kind uint32, stop <-chan struct{}) error

	// Printed text: Print writes as much as there is room for; the others wait for more
	// room.
	Print(p []byte) (int, error)
	WakeWaiting()
	AwaitPrint(timeout time.Duration)

	// The lanes of bulk transfers, and the bells of the threads that copy their data.
	LaneFree(lane int) bool
	StartLane(lane int, l shm.Lane)
	RaiseLane(lane int, limit uint32)
	WaitLane(lane int, old uint32, timeout time.Duration) uint32
	EndLane(lane int, state uint32)
	RingMovers()
	RingCaller(slot uint16)

	// Which executor serves the session, and the session's condition.
	Owner() uint32
	SetServing(generation uint32)
	State() uint32
	SetState(state uint32)
}

var _ transport = (*shm.Ring)(nil)
