package executor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/exact"
	"github.com/gpuctl/gpuctl/internal/link"
)

// farEnd is the transport of a far executor. It has a ring and an arena of its own, like
// those of the session. Requests that come from the carrier are put into that ring, so that
// they are read as always. Answers, and what they imply, go to the carrier. All methods work
// on a nil farEnd where a session has none.
type farEnd struct {
	*shm.Ring
	region *shm.Region // of the ring
	arena  *shm.Region
	feed   *shm.Feeder
	log    *slog.Logger
	hello  remote.Hello
	ctx    context.Context // ends with the executor

	commands, bulk *link.Stream
	chunks         [remote.ChunkStreams]*link.Stream
	home           *outlet // for contents that go to the carrier's host
	fetches        *fetches
	state          farState
	names          atomic.Bool // the carrier knows KindShown and KindUnmapped

	mu                 sync.Mutex
	changed            *sync.Cond // what the client has taken
	lanes              [wire.LaneCount]farLane
	cbSent, cbTaken    uint64
	outSent, outTaken  uint64
	synced, syncedWant uint64
	freed, freedThere  uint64         // how often memory was freed; as often the carrier has given it back
	marks              uint64         // on the stream of commands
	joined             []*link.Stream // those of chunks that have been connected
	answers            map[*link.Stream]*syncAnswer
}

var _ transport = (*farEnd)(nil)

func newFarEnd(ctx context.Context, ring, arena *shm.Region, hello remote.Hello, log *slog.Logger) (*farEnd, error) {
	q, err := shm.NewRing(ring)
	if err != nil {
		return nil, err
	}
	f := &farEnd{
		Ring: q, region: ring, arena: arena, feed: shm.NewFeeder(ring), log: log, hello: hello, ctx: ctx,
		home: newOutlet(), fetches: newFetches(), answers: map[*link.Stream]*syncAnswer{},
	}
	f.changed = sync.NewCond(&f.mu)
	for i := range f.lanes {
		f.lanes[i].news = make(chan struct{}, 1)
	}
	stream := func(r remote.Role, place func(uint16, []byte, int) ([]byte, error), greeted func()) *link.Stream {
		return link.New(link.Options{ID: hello.Stream(r), MaxHead: remote.MaxHead, MaxBody: remote.MaxBody, Place: place, Greeted: greeted})
	}
	f.commands, f.bulk = stream(remote.Commands, f.placeCommand, nil), stream(remote.Bulk, f.placeBulk, nil)
	for i := range f.chunks {
		f.chunks[i] = stream(remote.Chunks+remote.Role(i), f.placeBulk, func() { f.join(f.chunks[i]) })
	}
	return f, nil
}

// send sends a frame. It fails only at the executor's end.
func (f *farEnd) send(s *link.Stream, kind uint16, head, body []byte) {
	if err := s.Send(f.ctx, link.Frame{Kind: kind, Head: head, Body: body}, nil); err != nil && f.ctx.Err() == nil {
		f.log.Warn("send to the carrier", "kind", kind, "err", err)
	}
}

// post sends a frame of the stream of commands that may wait for the next one there. stays says that
// the body is in the arena.
func (f *farEnd) post(kind uint16, head, body []byte, stays bool) {
	if err := f.commands.Post(f.ctx, link.Frame{Kind: kind, Head: head, Body: body, Stays: stays}); err != nil && f.ctx.Err() == nil {
		f.log.Warn("send to the carrier", "kind", kind, "err", err)
	}
}

func (f *farEnd) say(kind uint16, v ...uint64) { f.send(f.commands, kind, remote.Words(v...), nil) }

// placeCommand returns where the body of a frame belongs.
func (f *farEnd) placeCommand(kind uint16, head []byte, n int) ([]byte, error) {
	if kind == remote.KindBlock {
		x, err := remote.ParseBlock(head, f.arena.Size())
		if err != nil {
			return nil, err
		}
		if x.Size() != uint64(n) {
			return nil, fmt.Errorf("%d bytes for a block of %d: %w", n, x.Size(), errHostile)
		}
		if x.Tight() {
			return x.Bytes(f.arena.Bytes()), nil
		}
	}
	return make([]byte, n), nil
}

// command takes a frame of the stream of commands.
func (f *farEnd) command(fr link.Frame) error {
	switch fr.Kind {
	case remote.KindRecords:
		return f.records(fr.Body)
	case remote.KindBlock:
		x, err := remote.ParseBlock(fr.Head, f.arena.Size())
		if err == nil && x.Size() != uint64(len(fr.Body)) {
			err = errHostile
		}
		if err == nil && !x.Tight() {
			x.Store(f.arena.Bytes(), fr.Body)
		}
		return err
	case remote.KindSync:
		f.sayDone(f.commands, fr.Head)
		return nil
	case remote.KindSynced:
		var n uint64
		if err := remote.ParseWords(fr.Head, &n); err != nil {
			return err
		}
		f.mu.Lock()
		f.synced = n
		f.changed.Broadcast()
		f.mu.Unlock()
		return nil
	}
	return fmt.Errorf("frame of kind %d from a carrier: %w", fr.Kind, errHostile)
}

// syncAnswer is what is still to be answered on a stream to the carrier's KindSync.
type syncAnswer struct {
	asked   uint64 // the newest question
	head    []byte // of the newest question; nil: it is answered
	sending bool
}

// awaitAsked waits until all has come that the carrier had sent before its question n, which it
// asks on so many streams. It returns those.
func (f *farEnd) awaitAsked(ctx context.Context, n uint64, streams uint32) (on []*link.Stream, err error) {
	if f == nil || n == 0 {
		return nil, nil
	}
	defer f.wakenBy(ctx)()
	f.mu.Lock()
	defer f.mu.Unlock()
	for {
		on = on[:0]
		for st, a := range f.answers {
			if a.asked >= n {
				on = append(on, st)
			}
		}
		switch {
		case len(on) >= int(streams):
			return on, nil
		case ctx.Err() != nil || f.ctx.Err() != nil:
			return nil, fmt.Errorf("what the carrier had sent before has come on %d of %d streams: %w", len(on), streams, errors.Join(ctx.Err(), f.ctx.Err()))
		}
		f.changed.Wait()
	}
}

// wakenBy makes the end of a context wake who waits for a change.
func (f *farEnd) wakenBy(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.changed.Broadcast()
	})
}

// sayDone answers a question without waiting for the stream. The answer to the newest is one
// to all before it, so a carrier that asks and does not read costs no more than one.
func (f *farEnd) sayDone(st *link.Stream, head []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.answers[st]
	if a == nil {
		a = &syncAnswer{}
		f.answers[st] = a
	}
	a.head = append([]byte{}, head...)
	var n uint64
	if remote.ParseWords(head, &n) == nil {
		a.asked = max(a.asked, n)
		f.changed.Broadcast()
	}
	if a.sending {
		return
	}
	a.sending = true
	go func() {
		for {
			f.mu.Lock()
			head := a.head
			a.head = nil
			if head == nil || f.ctx.Err() != nil {
				a.sending = false
				f.mu.Unlock()
				return
			}
			f.mu.Unlock()
			f.send(st, remote.KindSynced, head, nil)
		}
	}()
}

func (f *farEnd) records(b []byte) error {
	now := false
	for len(b) > 0 {
		rec, rest, err := shm.ParseRecord(b)
		if err != nil {
			return err
		}
		now = now || rec.Slot != wire.NoSlot || rec.Op == wire.OpFlush || rec.Op == wire.OpSetUserEvent
		if err := f.feed.Put(rec, f.ctx.Done()); err != nil {
			return err
		}
		b = rest
	}
	f.feed.Publish(now)
	return nil
}

// sync waits until the carrier has done all that was sent before.
func (f *farEnd) sync(ctx context.Context) error {
	f.mu.Lock()
	f.syncedWant++
	n := f.syncedWant
	f.mu.Unlock()
	f.say(remote.KindSync, n)
	defer f.wakenBy(ctx)()
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.synced < n && ctx.Err() == nil && f.ctx.Err() == nil {
		f.changed.Wait()
	}
	if f.synced < n {
		return fmt.Errorf("the carrier does not answer: %w", errors.Join(ctx.Err(), f.ctx.Err()))
	}
	return nil
}

// free tells the carrier of memory that nothing uses any more.
func (f *farEnd) free(off, size uint64) {
	f.say(remote.KindFreed, off, size)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.freed++
}

// awaitFreed waits until the carrier has given back the memory that it was told of: contents go on
// another connection, maybe to the same place.
func (f *farEnd) awaitFreed(ctx context.Context) error {
	f.mu.Lock()
	n, before := f.freed, f.freedThere
	f.mu.Unlock()
	if n == before {
		return nil
	}
	if err := f.sync(ctx); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.freedThere = max(f.freedThere, n)
	return nil
}

// drain waits until the requests that have come were taken. Nobody else has those that are left in
// the ring of a far executor: the next executor would never see them.
func (f *farEnd) drain(ctx context.Context) error {
	for f != nil && !f.Empty() {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%w: it has not taken all requests that have come: %w", ErrBusy, err)
		}
		exact.Sleep(20 * time.Microsecond)
	}
	return nil
}

// own makes the executor the owner of its ring, and fetches what parked requests will read.
func (f *farEnd) own(ctx context.Context, s *session) error {
	if f == nil {
		return nil
	}
	s.mu.Lock()
	told := s.tellMaps()
	var need []remote.Block
	for _, p := range s.parked {
		if x := s.reads(p); x.Row != 0 {
			need = append(need, x)
		}
	}
	s.mu.Unlock()
	for i := range need {
		if err := need[i].Check(f.arena.Size()); err != nil {
			return err
		}
		f.send(f.commands, remote.KindNeed, need[i].Append(nil), nil)
	}
	// The carrier has to know of mappings before it reads requests.
	if told || len(need) > 0 {
		if err := f.sync(ctx); err != nil {
			return err
		}
	}
	f.SetOwner(f.hello.Generation)
	return nil
}

// tellMaps tells a new carrier of the mappings that there are, and reports whether there are any.
// Those that parked commands are to show will come. It does not see requests to unmap that are parked:
// it is told of such a region only if it is to be shown, and then of its end, too.
func (s *session) tellMaps() (told bool) {
	ends := map[*mapping]bool{}
	for _, p := range s.parked {
		var u wire.Unmap
		if p.op == wire.OpUnmap && u.Decode(p.body) == nil {
			if m := lookupFor[mem](s, p, u.Mem); m != nil {
				ends[m.maps[u.Map]] = true
			}
		}
		object, id, ok := maps(p.op, p.body)
		if !ok {
			continue
		}
		if m := lookupFor[mem](s, p, object); m != nil && m.maps[id] != nil {
			m.maps[id].unseen = m.maps[id].shownFirst()
		}
	}
	s.each(func(_ uint32, _ uint64, o any) {
		if m, ok := o.(*mem); ok {
			for _, mp := range m.maps {
				if mp.unseen || !ends[mp] {
					s.mapped(m, mp)
					told, mp.told = true, ends[mp]
				}
			}
		}
	})
	return told
}

// reads returns what a parked request will read in the arena.
func (s *session) reads(p *parkedCall) remote.Block {
	m := wire.New(p.op)
	if m == nil || m.Decode(p.body) != nil {
		return remote.Block{}
	}
	if off, n, ok := remote.Staged(m); ok {
		x := remote.Range(off, n)
		if s.isToShow(&x) {
			return remote.Block{}
		}
		return x
	}
	if u, ok := m.(*wire.Unmap); ok {
		if o, mp := s.unmapped(p, u); mp != nil {
			return o.block(mp)
		}
	}
	return remote.Block{}
}

// shows makes the client see what a command writes into the arena, before it can learn of
// the command's end.
func (s *session) shows(x *cmd, b remote.Block) {
	if s.far != nil {
		x.show = b
		x.track()
	}
}

// show sends what a command has written. What says that it has ended follows: a reply, a
// completion word or a callback. It does not wait for acknowledgements: these come after the requests
// for which there is no room in the ring until the caller, who holds s.mu, goes on.
func (s *session) show(b remote.Block) { s.showOf(b, nil, nil) }

// showOf is show for the content of a mapping, which it names: a read may bring data to the same
// place before.
func (s *session) showOf(b remote.Block, m *mem, mp *mapping) {
	if s.far == nil || b.Row == 0 || b.Check(s.arena.Size()) != nil {
		return
	}
	if mp != nil && s.far.names.Load() {
		s.far.post(remote.KindShown, remote.Words(remote.MappingName(m.id, mp.ID)), nil, false)
	}
	_ = b.Split(1<<20, func(x remote.Block) error {
		s.far.post(remote.KindBlock, x.Append(nil), x.Bytes(s.arena.Bytes()), x.Tight())
		return nil
	})
}

// isOver tells the carrier that a mapping is over, if it does not see that itself: it would send what
// it has of the region, and keep contents from there.
func (s *session) isOver(m *mem, mp *mapping) {
	if s.far != nil && s.far.names.Load() {
		s.far.post(remote.KindUnmapped, remote.Words(remote.MappingName(m.id, mp.ID)), nil, false)
	}
}

// mapped tells the carrier of a mapping, so that it sends what the application has written
// there before the request that unmaps it.
func (s *session) mapped(m *mem, mp *mapping) {
	if s.far == nil {
		return
	}
	x := remote.Mapping{Mem: m.id, ID: mp.ID, Writes: mp.writes(), Comes: mp.unseen, Block: m.block(mp)}
	s.far.post(remote.KindMapped, x.Append(nil), nil, false)
}

// exportHome sends contents through the carrier to the target of a swap, over a connection that
// the carrier has made.
func (f *farEnd) exportHome(ctx context.Context, s *session, m *gpuctlv1.ExportRequest, report progress) error {
	u := outletUse{name: remote.ExportPeer, greet: s.greetHome}
	switch m.Peer {
	case remote.ExportPeer:
		u.anew, u.patience = true, remote.GreetTimeout
	case remote.ExportKept:
	default:
		return fmt.Errorf("export to %q: %w", m.Peer, ErrState)
	}
	return f.home.use(ctx, u, func(p *peerSink) error {
		// Each target of the same connection is told anew where the window is.
		p.some, p.asks = allObjects, p.wants
		p.clear, p.cleared = func() error { return f.awaitFreed(ctx) }, false
		if m.Mapped && m.Final {
			p.some = mappedOnly
			return s.export(ctx, "", false, true, p, report)
		}
		return s.export(ctx, remote.ExportPeer, m.All, m.Final, p, report)
	})
}

func (s *session) greetHome(conn net.Conn) (*peerSink, error) {
	p, err := s.greeted(conn, remote.GreetTimeout)
	if err != nil {
		return nil, fmt.Errorf("the carrier: %w", err)
	}
	p.bytes, p.ends, p.wants = true, p.stays, p.asks
	return p, nil
}

// Reply implements transport.
func (f *farEnd) Reply(slot uint16, err int32, data []byte, token uint32, total uint64) error {
	if slot >= wire.SlotCount {
		return nil
	}
	if len(data) > shm.MaxReply {
		return fmt.Errorf("reply of %d bytes: %w", len(data), shm.ErrTooLong)
	}
	f.send(f.commands, remote.KindReply, remote.Reply{Slot: slot, Err: err, Token: token, Total: total}.Append(nil), data)
	return nil
}

// PendDone implements transport.
func (f *farEnd) PendDone(index, state uint32) error {
	if index >= wire.PendCount {
		return fmt.Errorf("completion word %d: %w", index, shm.ErrRange)
	}
	if index != 0 {
		f.say(remote.KindPend, uint64(index), uint64(state))
	}
	return nil
}

// PushCallback implements transport. No more are under way than the client's ring has room
// for.
func (f *farEnd) PushCallback(token uint32, status int32, kind uint32, stop <-chan struct{}) error {
	f.mu.Lock()
	for f.cbSent-f.cbTaken >= wire.CbCount && f.ctx.Err() == nil {
		f.changed.Wait()
	}
	f.cbSent++
	f.mu.Unlock()
	if f.ctx.Err() != nil {
		return fmt.Errorf("callback %d: %w", token, shm.ErrStopped)
	}
	f.say(remote.KindCallback, uint64(token), uint64(uint32(status)), uint64(kind))
	return nil
}

// Print implements transport.
func (f *farEnd) Print(p []byte) (int, error) {
	const most = 16 << 10 // the link copies so much
	f.mu.Lock()
	n := min(len(p), most, int(wire.OutSize-(f.outSent-f.outTaken)))
	f.outSent += uint64(n)
	f.mu.Unlock()
	if n > 0 {
		f.send(f.commands, remote.KindPrint, nil, p[:n])
	}
	return n, nil
}

// WakeWaiting implements transport: the carrier does it.
func (f *farEnd) WakeWaiting() {}

// AwaitPrint implements transport.
func (f *farEnd) AwaitPrint(timeout time.Duration) {
	end := time.Now().Add(timeout)
	for time.Now().Before(end) && f.ctx.Err() == nil {
		f.mu.Lock()
		room := f.outSent-f.outTaken < wire.OutSize
		f.mu.Unlock()
		if room {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// SetState implements transport.
func (f *farEnd) SetState(state uint32) {
	f.Ring.SetState(state)
	f.say(remote.KindState, uint64(state))
}

// taken records what the client has taken in total.
func (f *farEnd) taken(callbacks, printed uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if callbacks > f.cbSent || callbacks < f.cbTaken || printed > f.outSent || printed < f.outTaken {
		return fmt.Errorf("%d callbacks and %d bytes taken, of %d and %d: %w", callbacks, printed, f.cbSent, f.outSent, errHostile)
	}
	f.cbTaken, f.outTaken = callbacks, printed
	f.changed.Broadcast()
	return nil
}
