package carrier

import (
	"bytes"
	"net"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

func (c *carrier) giveChunk(stream int, head, body []byte) error {
	place := func(kind uint16, head []byte, n int) ([]byte, error) { return c.placeChunk(stream, kind, head, n) }
	return give(place, func(f link.Frame) error { return c.chunkFrame(stream, f) }, remote.KindLaneChunk, head, body)
}

func (c *carrier) mayMove(lane uint32) uint32 {
	return c.region.Load32(laneWord(lane) + wire.LaneLimit)
}

const nine = 9 << 20

func nineMiB(write bool) remote.LaneStart {
	return remote.LaneStart{Lane: 1, Run: 1, Word: 3, Write: write, Cut: remote.Cut{Row: nine, Slice: nine, Total: nine}}
}

// Chunks come on several connections, which do not wait for each other. The application moves
// those before which none is missing, each from its own place.
func TestChunksComeInAnyOrder(t *testing.T) {
	c := newCarrier(t)
	if err := c.giveBulk(remote.KindLaneStart, nineMiB(false).Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		stream int
		chunk  uint64
		shown  uint32
	}{{2, 1, 0}, {4, 3, 0}, {1, 0, 2}, {0, 4, 2}, {3, 2, 5}} {
		body := bytes.Repeat([]byte{byte(1 + x.chunk)}, int(min(wire.LaneChunk, nine-x.chunk*wire.LaneChunk)))
		if err := c.giveChunk(x.stream, remote.Words(1, 1, x.chunk), body); err != nil {
			t.Fatal(err)
		}
		if got := c.mayMove(1); got != x.shown {
			t.Errorf("after chunk %d the application may move %d, not %d", x.chunk, got, x.shown)
		}
	}
	for i := range uint32(5) {
		if b, err := c.chunk(1, i, 1); err != nil || b[0] != byte(1+i) {
			t.Errorf("at the place of chunk %d is %d: %v", i, b, err)
		}
	}
	if err := c.giveChunk(1, remote.Words(1, 1, 0), make([]byte, wire.LaneChunk)); err == nil {
		t.Error("a chunk was taken twice")
	}
}

// A chunk that overtakes the begin of its run waits for it, and one of a run that was given up
// is dropped.
func TestChunkThatOvertakesTheBeginOfItsRunWaits(t *testing.T) {
	c := newCarrier(t)
	took := make(chan error, 1)
	go func() { took <- c.giveChunk(1, remote.Words(1, 1, 0), bytes.Repeat([]byte{7}, wire.LaneChunk)) }()
	testkit.Parked(t, "carrier.(*carrier).placeChunk", 1)
	if err := c.giveBulk(remote.KindLaneStart, nineMiB(false).Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	if err := <-took; err != nil || c.mayMove(1) != 1 {
		t.Errorf("%v; the application may move %d chunks", err, c.mayMove(1))
	}
	if err := c.giveBulk(remote.KindLaneEnd, remote.Words(1, 1, wire.LaneLeft), nil); err != nil {
		t.Fatal(err)
	}
	if err := c.giveChunk(2, remote.Words(1, 1, 1), bytes.Repeat([]byte{8}, wire.LaneChunk)); err != nil {
		t.Error(err)
	}
	if b, _ := c.chunk(1, 1, 1); b[0] != 0 {
		t.Error("a chunk of a run that was given up was stored")
	}
}

// The memory of a lane that was given up is not given to another run while bytes may still come
// into it, or be sent from it.
func TestLaneIsNotFreeWhileAChunkIsUnderWay(t *testing.T) {
	free := func(c *carrier) bool {
		c.region.Store32(laneWord(1)+wire.LaneState, wire.LaneFree) // the application has left it
		if _, err := c.freeLanes(false); err != nil {
			t.Fatal(err)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		return !c.lanes[1].left
	}
	c := newCarrier(t)
	if err := c.giveBulk(remote.KindLaneStart, nineMiB(false).Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := c.placeChunk(2, remote.KindLaneChunk, remote.Words(1, 1, 0), wire.LaneChunk); err != nil {
		t.Fatal(err)
	}
	if err := c.giveBulk(remote.KindLaneEnd, remote.Words(1, 1, wire.LaneLeft), nil); err != nil {
		t.Fatal(err)
	}
	if free(c) {
		t.Error("bytes may still come")
	}
	// The connection was broken, and the chunk comes on the next one.
	if err := c.giveChunk(2, remote.Words(1, 1, 0), make([]byte, wire.LaneChunk)); err != nil || !free(c) {
		t.Errorf("the lane stays taken: %v", err)
	}

	c = newCarrier(t)
	start := nineMiB(true)
	start.Limit = 2
	if err := c.giveBulk(remote.KindLaneStart, start.Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	if err := c.sendChunk(start, remote.NewPosition(start.Cut, 0), 0); err != nil { // without a connection
		t.Fatal(err)
	}
	if err := c.giveBulk(remote.KindLaneEnd, remote.Words(1, 1, wire.LaneLeft), nil); err != nil {
		t.Fatal(err)
	}
	if free(c) {
		t.Error("bytes may still be sent")
	}
}

// Memory from which a chunk was sent is filled again when it has arrived, and those before it.
func TestChunksThatAreSentArriveInAnyOrder(t *testing.T) {
	c := newCarrier(t)
	go c.outbox.run(c.ctx)
	start := nineMiB(true)
	start.Cut = remote.Cut{Row: 1 << 30, Slice: 1 << 30, Total: 1 << 30}
	start.Limit = 12
	if err := c.giveBulk(remote.KindLaneStart, start.Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	far := [2]*link.Stream{}
	gates := [2]chan struct{}{make(chan struct{}), make(chan struct{})}
	c.mu.Lock()
	c.joined = c.chunks[:2]
	c.mu.Unlock()
	for i := range far {
		far[i] = link.New(link.Options{ID: c.dialer.Hello.Stream(remote.Chunks + remote.Role(i)), MaxHead: remote.MaxHead, MaxBody: remote.MaxBody})
		a, b := net.Pipe()
		go func() { _ = far[i].Serve(c.ctx, a, func(link.Frame) error { <-gates[i]; return nil }) }()
		go func() { _ = c.chunks[i].Serve(c.ctx, b, func(link.Frame) error { return nil }) }()
	}
	pos := remote.NewPosition(start.Cut, 0)
	for i := range uint32(2) {
		if err := c.sendChunk(start, pos, i); err != nil {
			t.Fatal(err)
		}
	}
	acked := func() (n uint32, second bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.lanes[1].acked.Count(), c.lanes[1].acked.Has(1)
	}
	close(gates[1])
	testkit.Until(t, "the second chunk has arrived", func() error { _, ok := acked(); return testkit.Want(ok) })
	if n, _ := acked(); n != 0 || c.mayMove(1) != wire.LaneChunks {
		t.Errorf("%d chunks have arrived, and the application may move %d", n, c.mayMove(1))
	}
	close(gates[0])
	testkit.Until(t, "both have arrived", func() error { return testkit.Want(c.mayMove(1) == wire.LaneChunks+2, c.mayMove(1)) })
}
