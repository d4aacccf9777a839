package carrier

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/fxamacker/cbor/v2"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

const (
	arenaSize  = 1 << 30
	arenaSplit = 512 << 20
)

// newCarrier returns a carrier on memory of its own, without a connection.
func newCarrier(t testing.TB) *carrier {
	t.Helper()
	ring, err := shm.Create("ring", wire.RingMem)
	if err != nil {
		t.Fatal(err)
	}
	arena, err := shm.Create("arena", arenaSize)
	if err != nil {
		t.Fatal(err)
	}
	q, err := shm.NewRing(ring)
	if err != nil {
		t.Fatal(err)
	}
	q.Init(arenaSize, arenaSplit)
	q.SetOwner(1)
	q.SetServing(1)
	c := &carrier{
		cfg: Config{Generation: 1}, log: slog.New(slog.DiscardHandler), ring: q, region: ring, arena: arena, split: arenaSplit,
		mappings: map[mapKey]remote.Mapping{}, seed: maphash.MakeSeed(), shown: map[mapKey]*shown{}, awaits: map[uint64][]*shown{}, reads: map[uint32][2]uint64{}, synced: map[*link.Stream]uint64{}, callers: map[uint64]struct{}{},
		callbacks: make(chan [3]uint32, wire.CbCount), tellTaken: make(chan struct{}, 1),
	}
	c.changed = sync.NewCond(&c.mu)
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.dialer = &remote.Dialer{Hello: remote.Hello{Carrier: link.ID{1}, ArenaSize: arenaSize, ArenaSplit: arenaSplit, Part: 1, Generation: 1}}
	c.control = newControl(c.dialer)
	c.streams()
	c.outbox.init()
	c.gate.init()
	t.Cleanup(func() { c.cancel(nil) })
	return c
}

// give does with a frame what the link does: it asks for the body's place, and hands the
// frame over.
func give(place func(uint16, []byte, int) ([]byte, error), handle func(link.Frame) error, kind uint16, head, body []byte) error {
	f := link.Frame{Kind: kind, Head: head}
	if len(body) > 0 {
		b, err := place(kind, head, len(body))
		if err != nil {
			return err
		}
		copy(b, body)
		f.Body = b
	}
	return handle(f)
}

func (c *carrier) giveCommand(kind uint16, head, body []byte) error {
	return give(c.placeCommand, c.command, kind, head, body)
}

func (c *carrier) giveBulk(kind uint16, head, body []byte) error {
	return give(c.placeBulk, c.bulkFrame, kind, head, body)
}

func TestFarHostWritesOnlyWhereItMay(t *testing.T) {
	c := newCarrier(t)
	staged := uint64(arenaSplit + 300<<20)
	c.expect(wire.NoSlot, 7, staged, 4096)
	body := bytes.Repeat([]byte{9}, 4096)
	for name, x := range map[string]remote.Block{
		"the client's half":              remote.Range(arenaSplit, 4096),
		"across the split":               remote.Range(arenaSplit-1, 4096),
		"behind a staged read":           remote.Range(staged+1, 4096),
		"before a staged read":           remote.Range(staged-4096, 4096),
		"beyond the arena":               remote.Range(arenaSize-1, 4096),
		"rows that leave a staged read":  {At: staged, Row: 1024, Rows: 4, Slices: 1, RowPitch: 2048},
		"a length that is not the frame": remote.Range(0, 4095),
	} {
		if err := c.giveCommand(remote.KindBlock, x.Append(nil), body); err == nil {
			t.Errorf("%s was written", name)
		}
	}
	for _, x := range []remote.Block{remote.Range(0, 4096), remote.Range(staged, 4096)} {
		if err := c.giveCommand(remote.KindBlock, x.Append(nil), body); err != nil || c.arena.Bytes()[x.At] != 9 {
			t.Error(err)
		}
	}
	if err := c.giveCommand(remote.KindPend, remote.Words(7, wire.PendDone), nil); err != nil {
		t.Error(err)
	}
	if err := c.giveCommand(remote.KindBlock, remote.Range(staged, 4096).Append(nil), body); err == nil {
		t.Error("a read that is over was written")
	}
}

// What nobody waits for changes nothing.
func TestRepliesAndWordsThatNobodyWaitsFor(t *testing.T) {
	c := newCarrier(t)
	before := bytes.Clone(c.region.Bytes())
	_ = c.giveCommand(remote.KindReply, remote.Reply{Slot: 3, Err: -1}.Append(nil), []byte("data"))
	_ = c.giveCommand(remote.KindPend, remote.Words(12, wire.PendFailed), nil)
	if !bytes.Equal(before, c.region.Bytes()) {
		t.Error("the ring was written")
	}
	slot := uint64(wire.SlotOff + 3*wire.SlotSize)
	c.region.Store32(slot+wire.SlotState, wire.SlotPending)
	if err := c.giveCommand(remote.KindReply, remote.Reply{Slot: 3, Err: -1}.Append(nil), []byte("data")); err != nil || c.region.Load32(slot+wire.SlotState) != wire.SlotDone {
		t.Error(err)
	}
}

// The target of a swap says nothing to the application before the commit. Once it has said
// something, the ring does not go back to the source, also if the answer to the activation
// is lost.
func TestWhatTheTargetOfASwapSays(t *testing.T) {
	frames := map[uint16][2][]byte{
		remote.KindReply: {remote.Reply{Slot: 3}.Append(nil)},
		remote.KindPend:  {remote.Words(7, wire.PendDone)},
		remote.KindPrint: {nil, []byte("hello")},
	}
	for kind, f := range frames {
		c := newCarrier(t)
		c.ring.SetOwner(5)
		c.ring.SetServing(5)
		c.region.Store32(wire.PendOff+4*7, wire.PendBusy)
		c.region.Store32(uint64(wire.SlotOff)+3*wire.SlotSize+wire.SlotState, wire.SlotPending)
		if err := c.giveCommand(kind, f[0], f[1]); err == nil {
			t.Errorf("kind %d before the commit was passed on", kind)
		}
		if c.region.Load32(wire.PendOff+4*7) != wire.PendBusy || c.region.Load32(uint64(wire.SlotOff)+3*wire.SlotSize+wire.SlotState) != wire.SlotPending || c.ring.Serving() == 1 {
			t.Errorf("kind %d has changed the session of another executor", kind)
		}
		c.ring.SetOwner(1)
		if err := c.giveCommand(kind, f[0], f[1]); err != nil || c.ring.Serving() != 1 {
			t.Errorf("kind %d: %v; serving is %d", kind, err, c.ring.Serving())
		}
		// Another executor has the session again.
		c.active.Store(true)
		c.ring.SetOwner(6)
		c.region.Store32(wire.PendOff+4*7, wire.PendBusy)
		c.region.Store32(uint64(wire.SlotOff)+3*wire.SlotSize+wire.SlotState, wire.SlotPending)
		_ = c.giveCommand(kind, f[0], f[1])
		if c.region.Load32(wire.PendOff+4*7) != wire.PendBusy || c.region.Load32(uint64(wire.SlotOff)+3*wire.SlotSize+wire.SlotState) != wire.SlotPending {
			t.Errorf("kind %d has changed the session of the next executor", kind)
		}
	}
}

func TestMalformedFramesEndTheSession(t *testing.T) {
	for name, f := range map[string]link.Frame{
		"no such kind":              {Kind: 999},
		"requests":                  {Kind: remote.KindRecords, Body: make([]byte, 16)},
		"completion word 0":         {Kind: remote.KindPend, Head: remote.Words(0, wire.PendDone)},
		"completion word too large": {Kind: remote.KindPend, Head: remote.Words(wire.PendCount, wire.PendDone)},
		"state of a word":           {Kind: remote.KindPend, Head: remote.Words(1, wire.PendBusy)},
		"slot too large":            {Kind: remote.KindReply, Head: remote.Words(wire.SlotCount, 0, 0)},
		"long reply":                {Kind: remote.KindReply, Head: remote.Words(1, 0, 0), Body: make([]byte, wire.SlotSize)},
		"kind of a callback":        {Kind: remote.KindCallback, Head: remote.Words(1, 0, 99)},
		"short head":                {Kind: remote.KindCallback, Head: []byte{1}},
		"state of the session":      {Kind: remote.KindState, Head: remote.Words(wire.StateSuspended)},
		"memory of the client":      {Kind: remote.KindFreed, Head: remote.Words(arenaSplit-4096, 8192)},
		"mapping of the client's":   {Kind: remote.KindMapped, Head: remote.Mapping{Mem: 70, ID: 1, Block: remote.Range(arenaSplit, 10)}.Append(nil)},
		"answer to no question":     {Kind: remote.KindSynced, Head: remote.Words(5)},
	} {
		c := newCarrier(t)
		before := bytes.Clone(c.region.Bytes())
		if err := c.giveCommand(f.Kind, f.Head, f.Body); err == nil {
			t.Errorf("%s was taken", name)
		}
		if !bytes.Equal(before, c.region.Bytes()) {
			t.Errorf("%s: the ring was written", name)
		}
	}
}

// What two executors would write at the same places is not written by one that does not own
// the session: neither by a swap's target before the commit, nor by its source after it.
func TestFarHostThatDoesNotOwnTheSessionWritesNothingOfIt(t *testing.T) {
	for name, active := range map[string]bool{"before the commit": false, "after a swap away": true} {
		for kind, f := range map[uint16][2][]byte{
			remote.KindBlock:    {remote.Range(64, 16).Append(nil), bytes.Repeat([]byte{9}, 16)},
			remote.KindCallback: {remote.Words(3, 0, wire.CbEvent), nil},
			remote.KindPrint:    {nil, []byte("hello")},
		} {
			c := newCarrier(t)
			c.active.Store(active)
			c.ring.SetOwner(5)
			if err := c.giveCommand(kind, f[0], f[1]); err == nil {
				t.Errorf("%s: kind %d was taken", name, kind)
			}
			if c.arena.Bytes()[64] != 0 || len(c.callbacks) > 0 || c.region.Load32(wire.HdrOutTail) != 0 {
				t.Errorf("%s: kind %d has reached the application", name, kind)
			}
		}
	}
}

// A chunk that comes without its bytes has been given no place: the application would take
// what is there from an earlier transfer.
func TestChunkWithoutBytesIsNotShown(t *testing.T) {
	for _, write := range []bool{false, true} {
		c := newCarrier(t)
		start := remote.LaneStart{Lane: 1, Run: 1, Word: 3, Write: write, Limit: 2, Cut: remote.Cut{Row: 9 << 20, Slice: 9 << 20, Total: 9 << 20}}
		if err := c.giveBulk(remote.KindLaneStart, start.Append(nil), nil); err != nil {
			t.Fatal(err)
		}
		limit := c.region.Load32(laneWord(1) + wire.LaneLimit)
		if err := c.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 3), nil); err == nil {
			t.Errorf("write %v: it was taken", write)
		}
		if got := c.region.Load32(laneWord(1) + wire.LaneLimit); got != limit {
			t.Errorf("write %v: the application may move %d chunks, not %d", write, got, limit)
		}
	}
}

// The end of a bulk transfer is said on both streams, which do not wait for each other. A thread
// that moves chunks sleeps on its bell: also if that has rung before the reply came, it wakes.
func TestReplyWakesACallerThatMovesChunks(t *testing.T) {
	c := newCarrier(t)
	slot := uint64(wire.SlotOff + 3*wire.SlotSize)
	c.region.Store32(slot+wire.SlotState, wire.SlotPending)
	if err := c.giveBulk(remote.KindRing, remote.Words(3), nil); err != nil {
		t.Fatal(err)
	}
	bell := c.region.Load32(slot + wire.SlotBell)
	if err := c.giveCommand(remote.KindReply, remote.Reply{Slot: 3}.Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	if c.region.Load32(slot+wire.SlotBell) == bell {
		t.Error("the bell has not rung after the reply")
	}
}

// farStub is a far executor that freezes at once.
type farStub struct {
	gpuctlv1connect.ExecutorServiceClient
}

func (farStub) Freeze(context.Context, *connect.Request[gpuctlv1.FreezeRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	graph, err := cbor.Marshal(map[string]any{"Version": 3, "Generation": 1}) // a session without objects
	return connect.NewResponse(&gpuctlv1.SnapshotResponse{Graph: graph}), err
}

func (farStub) Thaw(context.Context, *connect.Request[gpuctlv1.ThawRequest]) (*connect.Response[gpuctlv1.ThawResponse], error) {
	return connect.NewResponse(&gpuctlv1.ThawResponse{}), nil
}

func (farStub) Describe(context.Context, *connect.Request[gpuctlv1.DescribeRequest]) (*connect.Response[gpuctlv1.DescribeResponse], error) {
	return connect.NewResponse(&gpuctlv1.DescribeResponse{}), nil
}

// A freeze whose answer is lost leaves the reader at the gate. If gpuguest has died with it,
// nobody else lets the application go on.
func TestGuardOpensTheGateAfterAFreezeThatNobodyKnowsOf(t *testing.T) {
	t.Parallel()
	c := newCarrier(t)
	c.active.Store(true)
	c.far = farStub{}
	go c.guard()
	testkit.Until(t, "the reader goes on", func() error { return testkit.Want(!c.gate.closed.Load(), "a closed gate") })
}

// lostThaw thaws, and its answer is lost.
type lostThaw struct{ farStub }

func (lostThaw) Thaw(context.Context, *connect.Request[gpuctlv1.ThawRequest]) (*connect.Response[gpuctlv1.ThawResponse], error) {
	return nil, connect.NewError(connect.CodeUnavailable, io.ErrUnexpectedEOF)
}

// lateFar is a far executor that a freeze reaches later than a thaw.
type lateFar struct {
	farStub
	undone *atomic.Uint64
}

func (lateFar) Freeze(context.Context, *connect.Request[gpuctlv1.FreezeRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	return nil, connect.NewError(connect.CodeDeadlineExceeded, context.DeadlineExceeded)
}

func (f lateFar) Thaw(_ context.Context, r *connect.Request[gpuctlv1.ThawRequest]) (*connect.Response[gpuctlv1.ThawResponse], error) {
	f.undone.Store(r.Msg.Freeze)
	return connect.NewResponse(&gpuctlv1.ThawResponse{}), nil
}

func (f lateFar) Describe(context.Context, *connect.Request[gpuctlv1.DescribeRequest]) (*connect.Response[gpuctlv1.DescribeResponse], error) {
	return connect.NewResponse(&gpuctlv1.DescribeResponse{Active: true}), nil
}

// A freeze that was given up while the network was gone may come to the far executor when the swap has
// been undone. It learns which one that is, also from who does not know, as a new gpuguest.
func TestAFreezeThatMayComeAfterItsThawIsNamed(t *testing.T) {
	c := newCarrier(t)
	far := lateFar{undone: &atomic.Uint64{}}
	c.far = far
	c.active.Store(true)
	c.freezesAfter.Store(true)
	go c.lead()
	k := &controller{c: c}
	if _, err := k.Freeze(t.Context(), connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: 10, Freeze: 3})); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Fatal(err)
	}
	if _, err := k.Thaw(t.Context(), connect.NewRequest(&gpuctlv1.ThawRequest{Freeze: 2})); err != nil || c.gate.closed.Load() || far.undone.Load() != 3 {
		t.Errorf("freeze %d is undone: %v", far.undone.Load(), err)
	}
	if _, err := k.Thaw(t.Context(), connect.NewRequest(&gpuctlv1.ThawRequest{Freeze: 2})); err != nil || far.undone.Load() != 2 {
		t.Errorf("later, freeze %d is undone: %v", far.undone.Load(), err)
	}
}

// The application stands still as long as its requests are not read. Who looks after a freeze
// that failed must see that, although the far executor runs.
func TestClosedGateCountsAsFrozen(t *testing.T) {
	c := newCarrier(t)
	c.far = lostThaw{}
	c.active.Store(true)
	k := &controller{c: c}
	frozen := func() bool {
		t.Helper()
		d, err := k.Describe(t.Context(), connect.NewRequest(&gpuctlv1.DescribeRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return d.Msg.Frozen
	}
	if !frozen() {
		t.Error("nobody reads the application's requests, and it counts as running")
	}
	c.frozen.Store(true)
	if _, err := k.Thaw(t.Context(), connect.NewRequest(&gpuctlv1.ThawRequest{})); err != nil {
		t.Errorf("the far executor runs, and the thaw fails: %v", err)
	}
	if frozen() || c.frozen.Load() {
		t.Error("it has been thawed, and is frozen")
	}
}

// lostActivate activates, and its answer is lost.
type lostActivate struct{ farStub }

func (lostActivate) Activate(context.Context, *connect.Request[gpuctlv1.ActivateRequest]) (*connect.Response[gpuctlv1.ActivateResponse], error) {
	return nil, connect.NewError(connect.CodeUnavailable, io.ErrUnexpectedEOF)
}

func (lostActivate) Describe(context.Context, *connect.Request[gpuctlv1.DescribeRequest]) (*connect.Response[gpuctlv1.DescribeResponse], error) {
	return connect.NewResponse(&gpuctlv1.DescribeResponse{Active: true}), nil
}

// A far executor that serves the session is not given up because its answer was lost.
func TestActivationWhoseAnswerIsLostCounts(t *testing.T) {
	c := newCarrier(t)
	c.far = lostActivate{}
	if err := c.activate(t.Context()); err != nil || !c.active.Load() {
		t.Errorf("active: %v, %v", c.active.Load(), err)
	}
}

// A freeze does not end while callbacks or text are on their way to the application: the
// next executor knows nothing of them, and writes to the same rings.
func TestFreezeWaitsForWhatTheApplicationHasNotTaken(t *testing.T) {
	for name, test := range map[string]struct{ say, take func(*carrier) error }{
		"a callback": {
			func(c *carrier) error {
				return c.giveCommand(remote.KindCallback, remote.Words(3, 0, wire.CbEvent), nil)
			},
			func(c *carrier) error { go c.pushCallbacks(); return nil },
		},
		"text": {
			func(c *carrier) error {
				for range 1 + wire.OutSize/(1<<14) {
					if err := c.giveCommand(remote.KindPrint, nil, make([]byte, 1<<14)); err != nil {
						return err
					}
				}
				return nil
			},
			func(c *carrier) error {
				c.region.Store32(wire.HdrOutHead, c.region.Load32(wire.HdrOutTail))
				return nil
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCarrier(t)
			c.active.Store(true)
			c.far = farStub{}
			go c.lead()
			go func() { // the far executor does all that is sent at once
				tick := time.NewTicker(100 * time.Microsecond) // nothing tells of a question: there is no connection
				defer tick.Stop()
				for n := uint64(1); ; {
					select {
					case <-c.ctx.Done():
						return
					case <-tick.C:
					}
					if c.giveCommand(remote.KindSynced, remote.Words(n), nil) == nil && c.giveBulk(remote.KindSynced, remote.Words(n), nil) == nil {
						n++
					}
				}
			}()
			if err := test.say(c); err != nil {
				t.Fatal(err)
			}
			k := &controller{c: c}
			freeze := func(ms int64) error {
				_, err := k.Freeze(t.Context(), connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: ms}))
				return err
			}
			if err := freeze(20); err == nil || connect.CodeOf(err) == connect.CodeFailedPrecondition {
				t.Fatalf("with something on its way: %v; the far executor is frozen, so this is no refusal", err)
			}
			c.frozen.Store(false)
			c.gate.open()
			if err := test.take(c); err != nil {
				t.Fatal(err)
			}
			if err := freeze(60_000); err != nil {
				t.Error(err)
			}
		})
	}
}

// The reader can't send while the connection is broken. A freeze that is given up then lets
// it go on, and does not keep the next request.
func TestFreezeIsGivenUpWhileTheReaderCannotSend(t *testing.T) {
	c := newCarrier(t)
	c.active.Store(true)
	c.gate.open() // and nobody reads, so nobody waits at the gate
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	k := &controller{c: c}
	if _, err := k.Freeze(ctx, connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: 10})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("%v, not that it has refused", err)
	}
	if c.gate.closed.Load() {
		t.Error("the reader is kept from the ring")
	}
}

func TestCallbacksAreBounded(t *testing.T) {
	c := newCarrier(t)
	for i := range wire.CbCount {
		if err := c.giveCommand(remote.KindCallback, remote.Words(uint64(i), 0, wire.CbEvent), nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.giveCommand(remote.KindCallback, remote.Words(0, 0, wire.CbEvent), nil); err == nil {
		t.Error("one more than the ring has room for was taken")
	}
}

func TestTextIsBounded(t *testing.T) {
	c := newCarrier(t)
	for range 2 * wire.OutSize / (1 << 14) { // what is in the ring, and as much that waits for room
		if err := c.giveCommand(remote.KindPrint, nil, make([]byte, 1<<14)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.giveCommand(remote.KindPrint, nil, make([]byte, 1<<14)); err == nil {
		t.Error("more was taken than there is room for")
	}
}

func TestLanesOfAHostileFarHost(t *testing.T) {
	start := remote.LaneStart{Lane: 1, Run: 1, Word: 3, Cut: remote.Cut{Row: 9 << 20, Slice: 9 << 20, Total: 9 << 20}}
	chunk := make([]byte, wire.LaneChunk)
	begun := func(s remote.LaneStart) *carrier {
		c := newCarrier(t)
		if err := c.giveBulk(remote.KindLaneStart, s.Append(nil), nil); err != nil {
			t.Fatal(err)
		}
		return c
	}
	c := begun(start)
	if err := c.giveBulk(remote.KindLaneStart, start.Append(nil), nil); err == nil {
		t.Error("a lane was started twice")
	}
	c = begun(start)
	if err := c.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 0), chunk); err != nil {
		t.Fatal(err)
	}
	if err := c.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 0), chunk); err == nil {
		t.Error("a chunk was taken twice")
	}
	if err := begun(start).giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 0), chunk[1:]); err == nil {
		t.Error("a chunk of another size was taken")
	}
	c = begun(start)
	for i := range uint64(5) {
		if err := c.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, i), chunk[:min(wire.LaneChunk, 9<<20-i*wire.LaneChunk)]); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := c.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 5), chunk[:1]); err == nil {
		t.Error("a chunk behind the end was taken")
	}
	big := start
	big.Cut = remote.Cut{Row: 1 << 30, Slice: 1 << 30, Total: 1 << 30}
	c = begun(big)
	for i := range uint64(wire.LaneChunks) {
		if err := c.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, i), chunk); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, wire.LaneChunks), chunk); err == nil {
		t.Error("a chunk was taken over one that the application has not moved")
	}
	write := start
	write.Write, write.Limit = true, 2
	if err := begun(write).giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 0), chunk); err == nil {
		t.Error("a chunk of a write was taken")
	}
	if err := begun(write).giveBulk(remote.KindLaneRaise, remote.Words(1, 1, 1), nil); err == nil {
		t.Error("a limit was lowered")
	}
	if err := begun(start).giveBulk(remote.KindLaneEnd, remote.Words(1, 1, 7), nil); err == nil {
		t.Error("a lane got another state")
	}
}

// A far executor's contents do not overwrite what the application has mapped.
func TestContentsGoAroundMappings(t *testing.T) {
	c := newCarrier(t)
	mem := c.arena.Bytes()
	for i := range 64 {
		mem[i] = 1
	}
	c.mappings[mapKey{70, 1}] = remote.Mapping{Mem: 70, ID: 1, Block: remote.Block{At: 8, Row: 4, Rows: 2, Slices: 1, RowPitch: 16}}
	if err := c.store(bytes.NewReader(bytes.Repeat([]byte{2}, 64)), 0, 64); err != nil {
		t.Fatal(err)
	}
	for i := range 64 {
		want := byte(2)
		if i >= 8 && i < 12 || i >= 24 && i < 28 {
			want = 1
		}
		if mem[i] != want {
			t.Fatalf("byte %d is %d", i, mem[i])
		}
	}
}

// An application may release an object that it has mapped. When its memory is given back, what comes
// there next is no region of the application's.
func TestContentsComeToWhereAReleasedObjectWasMapped(t *testing.T) {
	for name, part := range map[string]uint64{"of this carrier's part": 1, "of the part of an executor before it": 2} {
		c := newCarrier(t)
		at := part * c.partSize()
		region := remote.Range(at, 3*sumPage)
		f := &farEnd{arena: make([]byte, arenaSize)}
		f.show(t, c, 70, 1, region, true)
		if err := c.giveCommand(remote.KindFreed, remote.Words(at, 4*sumPage), nil); err != nil {
			t.Fatal(err)
		}
		contents := bytes.Repeat([]byte{2}, 64)
		if err := c.store(bytes.NewReader(contents), at, 64); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(c.arena.Bytes()[at:at+64], contents) {
			t.Errorf("%s: the contents are lost", name)
		}
		if len(c.mappings) != 0 || len(c.shown) != 0 || c.sums != 0 {
			t.Errorf("%s: %d mappings are kept, and %d sums of %d", name, len(c.mappings), c.sums, len(c.shown))
		}
	}
}

func TestGateWaitsForWhatWasRead(t *testing.T) {
	var g gate
	g.init()
	g.open()
	sent, stop := make(chan struct{}), make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			default:
				select {
				case <-sent:
					g.pass(func() bool { return false })
				case <-time.After(time.Millisecond):
				}
			}
		}
	}()
	closed := make(chan struct{})
	go func() {
		g.close(func() {}, func() bool { return false })
		close(closed)
	}()
	select {
	case <-closed:
		t.Fatal("closed while the reader had something")
	case <-time.After(20 * time.Millisecond):
	}
	sent <- struct{}{}
	<-closed
	g.open()
	close(stop)
}

// Whatever the far host sends, the client's half and the header of the ring stay as they are.
func FuzzFarHost(f *testing.F) {
	f.Add(uint16(remote.KindBlock), remote.Range(0, 16).Append(nil), make([]byte, 16), false)
	f.Add(uint16(remote.KindReply), remote.Reply{Slot: 3}.Append(nil), []byte("x"), false)
	f.Add(uint16(remote.KindFreed), remote.Words(0, 4096), []byte(nil), false)
	f.Add(uint16(remote.KindMapped), remote.Mapping{Mem: 70, ID: 1, Block: remote.Range(0, 10)}.Append(nil), []byte(nil), false)
	f.Add(uint16(remote.KindLaneStart), remote.LaneStart{Lane: 1, Run: 1, Word: 3, Cut: remote.Cut{Row: 100, Slice: 100, Total: 100}}.Append(nil), []byte(nil), true)
	f.Add(uint16(remote.KindLaneChunk), remote.Words(1, 1, 0), make([]byte, 100), true)
	f.Add(uint16(remote.KindRing), remote.Words(4), []byte(nil), true)
	f.Fuzz(func(t *testing.T, kind uint16, head, body []byte, bulk bool) {
		if len(head) > remote.MaxHead || kind == remote.KindLaneStart && len(head) == 64 && !bytes.Equal(head[56:], make([]byte, 8)) {
			t.Skip() // it waits for a mark that never comes
		}
		c := newCarrier(t)
		c.region.Store64(wire.HdrHead, 8)
		owner := c.region.Load32(wire.HdrOwner)
		if bulk {
			_ = c.giveBulk(kind, head, body)
		} else {
			_ = c.giveCommand(kind, head, body)
		}
		if c.region.Load32(wire.HdrOwner) != owner || c.region.Load64(wire.HdrHead) != 8 || c.region.Load32(wire.HdrState) != wire.StateRunning {
			t.Error("the ring's header was written")
		}
		lanes := laneMemory(arenaSplit, wire.LaneCount) - arenaSplit
		rest := c.arena.Bytes()[arenaSplit+lanes:][:1<<20]
		if len(bytes.Trim(rest, "\x00")) > 0 {
			t.Error("the client's memory was written")
		}
		c.cancel(nil)
		c.watching.Wait()
		_ = c.region.Close()
		_ = c.arena.Close()
	})
}

// A far executor answers its carrier when its runtime is loaded, which takes longer than a
// connection may on a host that is busy. Nobody else waits that long: not for a host that is
// not there, nor for one that refuses.
func TestCarrierWaitsForARuntimeThatLoadsSlowly(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := &remote.Dialer{Addresses: []string{l.Addr().String()}, Plain: true, Hello: remote.Hello{Generation: 1}, Timeout: 30 * time.Millisecond}
	_, err = d.Dial(t.Context(), remote.Commands) // the kernel takes the connection, and nobody answers
	if got := patience(err); got != loadPatience {
		t.Errorf("it waits %v for a host that does not answer yet: %v", got, err)
	}
	l.Close()
	if _, err = d.Dial(t.Context(), remote.Commands); patience(err) != startPatience {
		t.Errorf("it waits %v for a host that is not there: %v", patience(err), err)
	}
	if patience(fmt.Errorf("far: %w", remote.ErrRefused)) != 0 {
		t.Error("it waits for a host that refuses")
	}
	c := newCarrier(t)
	c.dialer = d
	first := make(chan error, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	c.ctx, c.cancel = ctx, cancel
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	c.dialer.Addresses = []string{silent.Addr().String()}
	go c.keep(remote.Commands, c.commands, c.command, first)
	for range 3 { // it tries again
		conn, err := silent.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	select {
	case err := <-first:
		t.Errorf("it has given up: %v", err)
	default:
	}
	cancel(nil)
}
