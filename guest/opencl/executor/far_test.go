package executor

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/arena"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

const (
	farArena = 1 << 30
	farSplit = 512 << 20
)

func testFarEnd(t testing.TB) *farEnd {
	t.Helper()
	ring, err := shm.Create("ring", wire.RingMem)
	if err != nil {
		t.Fatal(err)
	}
	arena, err := shm.Create("arena", farArena)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ring.Close(); arena.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	f, err := newFarEnd(ctx, ring, arena, remote.Hello{Carrier: link.ID{1}, ArenaSize: farArena, ArenaSplit: farSplit, Generation: 1}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	f.Init(farArena, farSplit)
	return f
}

func (f *farEnd) giveCommand(kind uint16, head, body []byte) error {
	return giveFrame(f.placeCommand, f.command, kind, head, body)
}

func (f *farEnd) giveBulk(kind uint16, head, body []byte) error {
	return giveFrame(f.placeBulk, f.bulkFrame, kind, head, body)
}

func giveFrame(place func(uint16, []byte, int) ([]byte, error), handle func(link.Frame) error, kind uint16, head, body []byte) error {
	fr := link.Frame{Kind: kind, Head: head}
	if len(body) > 0 {
		b, err := place(kind, head, len(body))
		if err != nil {
			return err
		}
		copy(b, body)
		fr.Body = b
	}
	return handle(fr)
}

func TestRequestsOfACarrierAreReadInOrder(t *testing.T) {
	f := testFarEnd(t)
	buf := make([]byte, wire.MaxRequest)
	next := byte(0)
	for round := range 40 { // the ring wraps
		var b []byte
		for i := range 4 {
			b = shm.AppendRecord(b, shm.Record{Op: wire.OpFlush, Slot: uint16(i), Body: bytes.Repeat([]byte{byte(4*round + i)}, 8*(1+997*i))})
		}
		if err := f.giveCommand(remote.KindRecords, nil, b); err != nil {
			t.Fatal(err)
		}
		for i := range 4 {
			rec, ok, err := f.Next(buf)
			if err != nil || !ok || rec.Slot != uint16(i) || len(rec.Body) != 8*(1+997*i) || rec.Body[0] != next {
				t.Fatal(round, i, rec.Op, rec.Slot, len(rec.Body), ok, err)
			}
			next++
			f.Advance()
		}
	}
}

func TestMalformedFramesOfACarrier(t *testing.T) {
	good := shm.AppendRecord(nil, shm.Record{Op: wire.OpFlush, Slot: 1, Body: make([]byte, 8)})
	for name, x := range map[string]link.Frame{
		"no such kind":         {Kind: 999},
		"a reply":              {Kind: remote.KindReply, Head: remote.Reply{}.Append(nil)},
		"half a request":       {Kind: remote.KindRecords, Body: good[:12]},
		"half of the second":   {Kind: remote.KindRecords, Body: append(bytes.Clone(good), good[:9]...)},
		"padding":              {Kind: remote.KindRecords, Body: shm.AppendRecord(nil, shm.Record{Op: wire.OpPad, Slot: wire.NoSlot})},
		"a slot that is none":  {Kind: remote.KindRecords, Body: shm.AppendRecord(nil, shm.Record{Op: wire.OpFlush, Slot: wire.SlotCount})},
		"a block out of range": {Kind: remote.KindBlock, Head: remote.Range(farArena-1, 16).Append(nil), Body: make([]byte, 16)},
		"another length":       {Kind: remote.KindBlock, Head: remote.Range(0, 15).Append(nil), Body: make([]byte, 16)},
	} {
		if err := testFarEnd(t).giveCommand(x.Kind, x.Head, x.Body); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	for name, x := range map[string]link.Frame{
		"more taken than said":  {Kind: remote.KindTaken, Head: remote.Words(1, 0)},
		"lane out of range":     {Kind: remote.KindLaneFree, Head: remote.Words(wire.LaneCount)},
		"chunk without a run":   {Kind: remote.KindLaneChunk, Head: remote.Words(9, 1, 0), Body: make([]byte, 16)},
		"a chunk that is large": {Kind: remote.KindLaneChunk, Head: remote.Words(1, 1, 0), Body: make([]byte, wire.LaneChunk+1)},
	} {
		if err := testFarEnd(t).giveBulk(x.Kind, x.Head, x.Body); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func TestChunksOfACarrier(t *testing.T) {
	f := testFarEnd(t)
	chunk := bytes.Repeat([]byte{7}, wire.LaneChunk)
	f.StartLane(1, shm.Lane{Word: 3, Limit: 2, Write: true, Row: 9 << 20, Slice: 9 << 20, Total: 9 << 20})
	for i := range uint64(2) {
		if err := f.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, i), chunk); err != nil {
			t.Fatal(err)
		}
	}
	if n := f.WaitLane(1, 0, 0); n != 2 {
		t.Errorf("%d chunks", n)
	}
	if err := f.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 2), chunk); err == nil {
		t.Error("a chunk beyond the limit was taken")
	}
	at := uint64(farSplit + laneBytes)
	if b := f.arena.Bytes(); b[at] != 7 || b[at+2*wire.LaneChunk-1] != 7 || b[at+2*wire.LaneChunk] != 0 || b[at-1] != 0 {
		t.Error("the chunks are elsewhere")
	}
	f.EndLane(1, wire.LaneLeft)
	if f.LaneFree(1) {
		t.Error("a lane that the client is in is free")
	}
	if err := f.giveBulk(remote.KindLaneFree, remote.Words(1), nil); err != nil || !f.LaneFree(1) {
		t.Error("a lane that the client has left is not free", err)
	}
}

// Chunks come on several connections, which do not wait for each other. Those before which none
// is missing are the executor's.
func TestChunksOfACarrierComeInAnyOrder(t *testing.T) {
	f := testFarEnd(t)
	f.StartLane(1, shm.Lane{Word: 3, Limit: 4, Write: true, Row: 9 << 20, Slice: 9 << 20, Total: 9 << 20})
	give := func(i uint64) error {
		st := f.chunks[i%2]
		return giveFrame(f.placeBulk, func(fr link.Frame) error { return f.chunkFrame(st, fr) }, remote.KindLaneChunk, remote.Words(1, 1, i), bytes.Repeat([]byte{byte(1 + i)}, wire.LaneChunk))
	}
	for _, x := range []struct {
		chunk uint64
		done  uint32
	}{{1, 0}, {3, 0}, {0, 2}, {2, 4}} {
		if err := give(x.chunk); err != nil {
			t.Fatal(err)
		}
		if got := f.WaitLane(1, 0, 0); got != x.done {
			t.Errorf("after chunk %d, %d are there, not %d", x.chunk, got, x.done)
		}
	}
	for i := range uint64(4) {
		if got := f.arena.Bytes()[farSplit+laneBytes+i*wire.LaneChunk]; got != byte(1+i) {
			t.Errorf("at the place of chunk %d is %d", i, got)
		}
	}
	if give(1) == nil {
		t.Error("a chunk was taken twice")
	}
	if f.chunkFrame(f.chunks[0], link.Frame{Kind: remote.KindLaneFree, Head: remote.Words(1)}) == nil {
		t.Error("another frame was taken among chunks")
	}
}

// A device that is slow leaves requests in the ring of its far executor. Nobody else has them, so
// the session is not frozen before they are taken.
func TestFreezeDoesNotLeaveRequestsInTheRingOfAFarExecutor(t *testing.T) {
	f := testFarEnd(t)
	s := &session{cfg: Config{Far: &Far{}}, far: f, ring: f, log: slog.New(slog.DiscardHandler), host: hostMemory{all: arena.New(farSplit)}}
	s.active.Store(true)
	if err := f.giveCommand(remote.KindRecords, nil, shm.AppendRecord(nil, shm.Record{Op: wire.OpFlush, Slot: 1, Body: make([]byte, 8)})); err != nil {
		t.Fatal(err)
	}
	_, err := (&controller{s: s}).Freeze(t.Context(), connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: 20}))
	if connect.CodeOf(err) != connect.CodeFailedPrecondition || !errors.Is(err, ErrBusy) {
		t.Errorf("the freeze: %v", err)
	}
	if s.isFrozen() || s.gate.Load() {
		t.Error("the session stands still, and a request is left")
	}
	// It runs when the device has time.
	if rec, ok, err := f.Next(make([]byte, wire.MaxRequest)); !ok || err != nil || rec.Op != wire.OpFlush {
		t.Error(rec, ok, err)
	}
}

// What a map command shows may be more than may be under way, and meanwhile the application may ask for
// more than the ring has room for. The acknowledgements come after those requests.
func TestMuchIsShownWhileRequestsFillTheRing(t *testing.T) {
	const size = 96 << 20
	f := testFarEnd(t)
	peer := link.New(link.Options{ID: link.ID{1}, MaxHead: remote.MaxHead, MaxBody: remote.MaxBody})
	a, b := net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 2)
	go func() { served <- f.commands.Serve(ctx, a, f.command) }()
	got := 0
	all := make(chan struct{})
	go func() {
		served <- peer.Serve(ctx, b, func(fr link.Frame) error {
			if got += len(fr.Body); fr.Kind == remote.KindPend {
				close(all)
			}
			return nil
		})
	}()
	batch, records := []byte(nil), 0
	for ; len(batch) < 15<<10; records++ {
		batch = shm.AppendRecord(batch, shm.Record{Op: wire.OpFlush, Slot: wire.NoSlot, Body: make([]byte, 120)})
	}
	const batches = 2 * wire.RingSize / (15 << 10)
	sent := make(chan error, 1)
	go func() { // once the ring is full, sending may wait for the one who reads
		for range batches {
			if err := peer.Send(ctx, link.Frame{Kind: remote.KindRecords, Body: batch}, nil); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	testkit.Until(t, "a full ring", func() error {
		waits := f.region.Load32(wire.HdrSpace)
		return testkit.Want(waits == 1, waits)
	})
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		s := &session{far: f, arena: f.arena}
		s.show(remote.Range(0, size))
		s.far.say(remote.KindPend, 1, wire.PendDone)
	}()
	for what, c := range map[string]chan struct{}{"shows": shown, "has shown": all} {
		select {
		case <-c:
		case <-testkit.Context(t).Done():
			t.Fatalf("nobody %s it", what)
		}
	}
	if got != size {
		t.Errorf("%d bytes have come, not %d", got, size)
	}
	buf := make([]byte, wire.MaxRequest)
	for n := 0; n < batches*records; {
		if _, ok, err := f.Next(buf); err != nil {
			t.Fatal(err)
		} else if ok {
			f.Advance()
			n++
		}
	}
	if err := <-sent; err != nil {
		t.Fatal(err)
	}
	cancel()
	<-served
	<-served
}

// Contents go on another connection than the news of memory that is free. They may be for the same
// place, and would be gone with that memory if they came first.
func TestContentsWaitForFreedMemoryToBeGivenBack(t *testing.T) {
	f := testFarEnd(t)
	s := &session{far: f, arena: f.arena}
	peer := link.New(link.Options{ID: link.ID{1}, MaxHead: remote.MaxHead, MaxBody: remote.MaxBody})
	a, b := net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	served, kinds := make(chan error, 2), make(chan uint16, 8)
	go func() { served <- f.commands.Serve(ctx, a, f.command) }()
	go func() { served <- peer.Serve(ctx, b, func(fr link.Frame) error { kinds <- fr.Kind; return nil }) }()
	defer func() { cancel(); <-served; <-served }()

	ours, theirs := connected(t)
	p := &peerSink{s: s, conn: ours, bytes: true, sizes: true, clear: func() error { return f.awaitFreed(ctx) }}
	accept := func() chan error {
		done := make(chan error, 1)
		go func() { done <- p.accept([]piece{{ID: 9, N: 4096, At: 8192, m: &mem{size: 4096}}}) }()
		return done
	}
	comes := func() bool {
		_ = theirs.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := io.ReadFull(theirs, make([]byte, 8+40+4096))
		return err == nil
	}
	f.free(8192, 4096)
	done := accept()
	for _, want := range []uint16{remote.KindFreed, remote.KindSync} {
		select {
		case got := <-kinds:
			if got != want {
				t.Fatalf("a frame of kind %d, not %d", got, want)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no frame of kind %d", want)
		}
	}
	if comes() {
		t.Error("contents have come before the memory was given back")
	}
	if err := f.giveCommand(remote.KindSynced, remote.Words(1), nil); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || !comes() {
		t.Error("no contents have come:", err)
	}
	p.cleared = false // the next export, before which nothing was freed
	if err := <-accept(); err != nil || !comes() {
		t.Error("no contents have come:", err)
	}
}

// The first connection of a carrier may break before it is answered. The next one is the first then.
func TestFirstConnectionThatBreaksDoesNotTakeTheLease(t *testing.T) {
	v := &farServer{first: make(chan remote.Hello, 1), ctrl: newCarried()}
	hello := remote.Hello{Carrier: link.ID{1}, ArenaSize: farArena, ArenaSplit: farSplit, Generation: 1}
	come := func(h remote.Hello, broken bool) error {
		a, b := net.Pipe()
		t.Cleanup(func() { a.Close(); b.Close() })
		if broken {
			b.Close()
		} else {
			go func() { _, _ = io.Copy(io.Discard, b) }()
		}
		return v.admit(arrival{a, remote.Commands, h})
	}
	if err := come(hello, true); err == nil {
		t.Fatal("a broken connection was taken")
	}
	if err := come(hello, false); err != nil {
		t.Fatal(err)
	}
	select {
	case h := <-v.first:
		if !h.Same(hello) {
			t.Error("another carrier has come:", h)
		}
	default:
		t.Error("the far executor waits for a carrier, which has come")
	}
	if err := come(remote.Hello{Carrier: link.ID{2}, ArenaSize: farArena, ArenaSplit: farSplit, Generation: 1}, false); !errors.Is(err, errOther) {
		t.Errorf("a second carrier: %v", err)
	}
}

// A stream of chunks whose connection broke before the carrier knew that it was taken may never be
// connected again. Chunks do not go there.
func TestChunksDoNotGoWhereTheCarrierHasNotCome(t *testing.T) {
	f := testFarEnd(t)
	v := &farServer{s: &session{far: f}}
	come := func() net.Conn {
		a, b := net.Pipe()
		t.Cleanup(func() { b.Close() })
		v.mu.Lock()
		defer v.mu.Unlock()
		v.serve(arrival{conn: a, role: remote.Chunks})
		return b
	}
	joined := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.joined)
	}
	come().Close()
	testkit.Until(t, "the end of the connection", func() error {
		v.mu.Lock()
		defer v.mu.Unlock()
		return testkit.Want(v.live == 0 && !v.seen.IsZero(), v.live)
	})
	if n := joined(); n != 0 {
		t.Errorf("%d streams are used", n)
	}
	carrier := link.New(link.Options{ID: f.hello.Stream(remote.Chunks)})
	t.Cleanup(carrier.Close)
	conn := come()
	go func() { _ = carrier.Serve(t.Context(), conn, func(link.Frame) error { return nil }) }()
	testkit.Until(t, "a stream for chunks", func() error { return testkit.Want(joined() == 1, joined()) })
}

// A carrier that asks and never reads does not make the far executor keep an answer to each
// question: the newest is answered, which answers all before it.
func TestQuestionsOfACarrierThatDoesNotReadCostNothing(t *testing.T) {
	f := testFarEnd(t)
	before := runtime.NumGoroutine()
	for n := range uint64(10000) {
		if f.giveCommand(remote.KindSync, remote.Words(n), nil) != nil || f.giveBulk(remote.KindSync, remote.Words(n), nil) != nil {
			t.Fatal("a question was refused")
		}
		if n == 0 {
			// Fill both streams, as if nobody read: what follows has to wait.
			for _, st := range []*link.Stream{f.commands, f.bulk} {
				for ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond); ; {
					if st.Send(ctx, link.Frame{Kind: remote.KindBlock, Body: make([]byte, 4<<20)}, nil) != nil {
						cancel()
						break
					}
				}
			}
		}
	}
	if more := runtime.NumGoroutine() - before; more > 8 {
		t.Errorf("%d goroutines wait", more)
	}
}

func TestChunkOfACarrierWithoutBytesIsNotCounted(t *testing.T) {
	f := testFarEnd(t)
	f.StartLane(1, shm.Lane{Word: 3, Limit: 2, Write: true, Row: 9 << 20, Slice: 9 << 20, Total: 9 << 20})
	if err := f.giveBulk(remote.KindLaneChunk, remote.Words(1, 1, 0), nil); err == nil || f.WaitLane(1, 0, 0) != 0 {
		t.Errorf("%v; %d chunks", err, f.WaitLane(1, 0, 0))
	}
}

// Nothing that a carrier sends makes the far end write outside of its arena, or fail in
// another way than with an error.
func FuzzCarrier(f *testing.F) {
	f.Add(uint16(remote.KindRecords), []byte(nil), shm.AppendRecord(nil, shm.Record{Op: wire.OpFlush, Slot: 1, Body: make([]byte, 8)}), false)
	f.Add(uint16(remote.KindBlock), remote.Range(0, 16).Append(nil), make([]byte, 16), false)
	f.Add(uint16(remote.KindLaneChunk), remote.Words(1, 1, 0), make([]byte, 100), true)
	f.Add(uint16(remote.KindTaken), remote.Words(0, 0), []byte(nil), true)
	var n atomic.Uint64
	e := testFarEnd(f)
	buf := make([]byte, wire.MaxRequest)
	f.Fuzz(func(t *testing.T, kind uint16, head, body []byte, bulk bool) {
		if kind == remote.KindSync {
			t.Skip() // it is answered, and nobody takes the answers
		}
		if n.Add(1)%64 == 1 {
			e.EndLane(1, wire.LaneFree)
			e.StartLane(1, shm.Lane{Word: 3, Limit: 4, Write: true, Row: 100, Slice: 100, Total: 400})
		}
		if bulk {
			_ = e.giveBulk(kind, head, body)
		} else {
			_ = e.giveCommand(kind, head, body)
		}
		for {
			rec, ok, err := e.Next(buf)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			_ = rec
			e.Advance()
		}
	})
}
