package carrier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
)

var errLost = errors.New("the far executor has given the session up: its log has the reason")

// mayWrite reports whether the far host may write a block of the arena: in the executors'
// half, or where a read is staged.
func (c *carrier) mayWrite(x *remote.Block) bool {
	if x.End() <= c.split {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.reads {
		if x.At >= r[0] && x.End() <= r[0]+r[1] {
			return true
		}
	}
	return false
}

func (c *carrier) block(head []byte, n int) (remote.Block, error) {
	x, err := remote.ParseBlock(head, c.arena.Size())
	switch {
	case err != nil:
		return x, err
	case x.Size() != uint64(n):
		return x, fmt.Errorf("%d bytes for a block of %d: %w", n, x.Size(), errHostile)
	case c.ring.Owner() != c.cfg.Generation:
		return x, c.notOurs()
	case !c.mayWrite(&x):
		return x, fmt.Errorf("block of %d bytes at %#x, where nothing is expected: %w", n, x.At, errHostile)
	}
	return x, nil
}

// placeCommand returns where the body of a frame belongs.
func (c *carrier) placeCommand(kind uint16, head []byte, n int) ([]byte, error) {
	if kind != remote.KindBlock {
		return make([]byte, n), nil
	}
	x, err := c.block(head, n)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.showing = span{} // it comes again, on a new connection
	c.changed.Broadcast()
	c.awaitStored(&x)
	c.showing = around(&x)
	if x.Tight() {
		return x.Bytes(c.arena.Bytes()), nil
	}
	return make([]byte, n), nil
}

// command takes a frame of the stream of commands.
func (c *carrier) command(f link.Frame) error {
	switch f.Kind {
	case remote.KindReply:
		r, err := remote.ParseReply(f.Head)
		if err != nil {
			return err
		}
		if err := c.speaks(); err != nil {
			return err
		}
		return c.reply(r, f.Body)
	case remote.KindPend:
		var i, state uint64
		if err := remote.ParseWords(f.Head, &i, &state); err != nil {
			return err
		}
		if err := c.speaks(); err != nil {
			return err
		}
		return c.pend(i, state)
	case remote.KindBlock:
		x, err := c.block(f.Head, len(f.Body))
		if err != nil {
			return err
		}
		if !x.Tight() {
			x.Store(c.arena.Bytes(), f.Body)
		}
		c.shows(&x, f.Body)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.showing = span{}
		c.changed.Broadcast()
		return nil
	case remote.KindCallback:
		var token, status, kind uint64
		if err := remote.ParseWords(f.Head, &token, &status, &kind); err != nil {
			return err
		}
		if token > 1<<32-1 || status > 1<<32-1 || kind == 0 || kind > wire.CbDestroyed {
			return fmt.Errorf("callback %d of kind %d: %w", token, kind, errHostile)
		}
		if err := c.owns(); err != nil {
			return err
		}
		c.cbCame.Add(1)
		select {
		case c.callbacks <- [3]uint32{uint32(token), uint32(status), uint32(kind)}:
			return nil
		default:
			return fmt.Errorf("more than %d callbacks: %w", wire.CbCount, errHostile)
		}
	case remote.KindPrint:
		if err := c.owns(); err != nil {
			return err
		}
		return c.print(f.Body)
	case remote.KindState:
		var state uint64
		if err := remote.ParseWords(f.Head, &state); err != nil {
			return err
		}
		if state != wire.StateLost {
			return fmt.Errorf("state %d: %w", state, errHostile)
		}
		return errLost
	case remote.KindMapped:
		m, err := remote.ParseMapping(f.Head, c.split)
		if err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.mappings) >= 1<<20 {
			return fmt.Errorf("%d mappings: %w", len(c.mappings), errHostile)
		}
		c.awaitStored(&m.Block)
		c.mappings[mapKey{m.Mem, m.ID}] = m
		c.await(m)
		return nil
	case remote.KindShown, remote.KindUnmapped:
		var name uint64
		if err := remote.ParseWords(f.Head, &name); err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		k := mapKey{uint32(name), uint32(name >> 32)}
		if f.Kind == remote.KindShown {
			c.showsNext(k)
			return nil
		}
		delete(c.mappings, k)
		c.forget(k)
		return nil
	}
	return c.service(f)
}

// speaks is called before the application sees what the far executor has done for it. That
// may be so before this carrier knows that the far executor was activated, or if the answer
// to that is lost: from now on gpuguest must not give the ring back to the source, which
// would do the same once more. Before the commit, nothing is said to the application; after
// a swap away from here, what this executor answers is for nobody.
func (c *carrier) speaks() error {
	switch {
	case c.active.Load():
	case c.ring.Owner() != c.cfg.Generation:
		return c.notOurs()
	default:
		c.ring.SetServing(c.cfg.Generation)
	}
	return nil
}

func (c *carrier) notOurs() error {
	return fmt.Errorf("it answers for executor %d, which does not serve the session: %w", c.cfg.Generation, errHostile)
}

// owns is speaks for what two executors would write at the same places: the application's
// memory, and the rings of its callbacks and its text.
func (c *carrier) owns() error {
	if c.ring.Owner() != c.cfg.Generation {
		return c.notOurs()
	}
	return c.speaks()
}

// service takes a frame that the application does not see.
func (c *carrier) service(f link.Frame) error {
	switch f.Kind {
	case remote.KindFreed:
		var off, size uint64
		if err := remote.ParseWords(f.Head, &off, &size); err != nil {
			return err
		}
		if size == 0 || off >= c.split || size > c.split-off {
			return fmt.Errorf("%d bytes freed at %#x: %w", size, off, errHostile)
		}
		return c.freed(span{off, size})
	case remote.KindMark:
		var n uint64
		if err := remote.ParseWords(f.Head, &n); err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.marked = max(c.marked, n)
		c.changed.Broadcast()
		return nil
	case remote.KindNeed:
		x, err := remote.ParseBlock(f.Head, c.arena.Size())
		if err != nil {
			return err
		}
		return c.outbox.add(func(context.Context) {
			if err := c.sendBlock(x); err != nil && !c.over() {
				c.log.Warn("staged data", "err", err)
			}
		})
	case remote.KindSync:
		head := append([]byte(nil), f.Head...)
		return c.outbox.add(func(context.Context) { _ = c.send(c.commands, remote.KindSynced, head, nil, nil) })
	case remote.KindSynced:
		return c.gotSync(c.commands, f.Head)
	}
	return fmt.Errorf("frame of kind %d: %w", f.Kind, errHostile)
}

// reply writes a reply, if a call waits for it.
func (c *carrier) reply(r remote.Reply, data []byte) error {
	if len(data) > shm.MaxReply || r.Total > 1<<32 {
		return fmt.Errorf("reply of %d bytes of %d: %w", len(data), r.Total, errHostile)
	}
	c.mu.Lock()
	delete(c.reads, slotKey(r.Slot))
	c.mu.Unlock()
	at := uint64(wire.SlotOff) + uint64(r.Slot)*wire.SlotSize + wire.SlotState
	if s := c.region.Load32(at); s != wire.SlotPending && s != wire.SlotAsleep || c.ring.Owner() != c.cfg.Generation {
		c.log.Warn("reply that nobody waits for", "slot", r.Slot)
		return nil
	}
	if err := c.ring.Reply(r.Slot, r.Err, data, r.Token, r.Total); err != nil {
		return err
	}
	c.mu.Lock()
	_, moves := c.callers[uint64(r.Slot)]
	delete(c.callers, uint64(r.Slot))
	c.mu.Unlock()
	if moves { // it sleeps on its bell, which may have rung before: KindRing is on the other stream
		c.ring.RingCaller(r.Slot)
	}
	return nil
}

// pend sets a completion word, if a transfer has it.
func (c *carrier) pend(i, state uint64) error {
	if i == 0 || i >= wire.PendCount || state != wire.PendDone && state != wire.PendFailed {
		return fmt.Errorf("completion word %d, state %d: %w", i, state, errHostile)
	}
	c.mu.Lock()
	delete(c.reads, uint32(i))
	c.mu.Unlock()
	if c.region.Load32(wire.PendOff+4*i) != wire.PendBusy || c.ring.Owner() != c.cfg.Generation {
		c.log.Warn("completion word that no transfer has", "word", i)
		return nil
	}
	return c.ring.PendDone(uint32(i), uint32(state))
}

// print passes on what a kernel has printed. The far executor knows how much room there is.
func (c *carrier) print(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	c.mu.Lock()
	c.printed += uint64(len(p))
	c.rest = append(c.rest, p...)
	most := len(c.rest) > wire.OutSize
	c.mu.Unlock()
	if most {
		return fmt.Errorf("%d bytes printed, without room for them: %w", len(p), errHostile)
	}
	c.pushText()
	c.tell()
	return nil
}

// pushText passes on text as far as there is room. There is less than the far executor knows
// of if the application has not yet read what an earlier executor has printed.
func (c *carrier) pushText() (left uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.rest) == 0 {
		return 0
	}
	n, err := c.ring.Print(c.rest)
	if err != nil {
		n = len(c.rest) // the application has caused this, and only it loses text
	}
	c.rest = append(c.rest[:0], c.rest[n:]...)
	if n > 0 {
		c.ring.WakeWaiting()
	}
	return uint64(len(c.rest))
}

func (c *carrier) tell() {
	select {
	case c.tellTaken <- struct{}{}:
	default:
	}
}

// pushCallbacks moves callbacks to the application's ring, and waits for room there.
func (c *carrier) pushCallbacks() {
	for {
		select {
		case <-c.ctx.Done():
			return
		case cb := <-c.callbacks:
			if err := c.ring.PushCallback(cb[0], int32(cb[1]), cb[2], c.ctx.Done()); err != nil && !c.over() {
				c.log.Warn("callback", "err", err)
			}
			c.cbTaken.Add(1)
			c.tell()
		}
	}
}

// awaitTaken waits until the application's rings have all callbacks and all text that the
// far executor has said. When another executor serves the session, nobody writes what is
// left here.
func (c *carrier) awaitTaken(ctx context.Context) error {
	for nap := 50 * time.Microsecond; ; nap = min(2*nap, time.Millisecond) {
		text, callbacks := c.pushText(), c.cbCame.Load()-c.cbTaken.Load()
		if text == 0 && callbacks == 0 {
			return nil
		}
		select {
		case <-time.After(nap):
		case <-c.ctx.Done():
			return c.ctx.Err()
		case <-ctx.Done():
			return fmt.Errorf("the application has not taken %d callbacks and %d bytes of text: %w", callbacks, text, ctx.Err())
		}
	}
}

// takenEvery is how often the far executor is told what the application has read of the
// printed text, while some is not read.
const takenEvery = 2 * time.Millisecond

// reportTaken tells the far executor what was taken.
func (c *carrier) reportTaken() {
	var cbs, out uint64
	for c.ctx.Err() == nil {
		left := c.pushText()
		c.mu.Lock()
		printed := c.printed
		c.mu.Unlock()
		waits := min(c.region.Load32(wire.HdrOutTail)-c.region.Load32(wire.HdrOutHead), wire.OutSize)
		taken := printed - min(printed-out, uint64(waits)+left)
		if n := c.cbTaken.Load(); n != cbs || taken != out {
			cbs, out = n, taken
			if c.send(c.bulk, remote.KindTaken, remote.Words(cbs, out), nil, nil) != nil {
				return
			}
		}
		if out != printed {
			select {
			case <-c.tellTaken:
			case <-time.After(takenEvery):
			}
			continue
		}
		select {
		case <-c.tellTaken:
		case <-c.ctx.Done():
		}
	}
}

// freed gives memory back. In another part, it is the memory of the executor that served the
// session before, and is given back when that has ended.
func (c *carrier) freed(x span) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, m := range c.mappings { // of an object that was released and is never unmapped
		if x.meets(around(&m.Block)) {
			delete(c.mappings, k)
			c.forget(k)
		}
	}
	c.freeUnmapped(x)
	size := c.partSize()
	if own := uint64(c.dialer.Hello.Part); x.off/size == own && (x.off+x.size-1)/size == own {
		return c.arena.PunchHole(x.off, x.size)
	}
	if len(c.punches) >= 1<<16 {
		return nil // it stays until the session's end
	}
	c.punches = append(c.punches, x)
	return nil
}

func (c *carrier) partSize() uint64 { return c.split / wire.ArenaParts &^ (2<<20 - 1) }

// reclaim gives back what was freed in parts whose owner has ended.
func (c *carrier) reclaim() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.punches) == 0 || !c.active.Load() {
		return
	}
	size, keep := c.partSize(), c.punches[:0]
	for _, x := range c.punches {
		part := x.off / size
		lock := int64(wire.LockPart) + int64(part)
		if part != (x.off+x.size-1)/size || part >= wire.ArenaParts {
			continue // of several: it is given back with the session
		}
		if part != uint64(c.dialer.Hello.Part) {
			if shm.LockByte(c.locks, lock) != nil {
				keep = append(keep, x)
				continue
			}
		}
		_ = c.arena.PunchHole(x.off, x.size)
		if part != uint64(c.dialer.Hello.Part) {
			_ = shm.UnlockByte(c.locks, lock)
		}
	}
	c.punches = keep
}

// question is what the far executor is asked on each stream: whether it has done all that was
// sent there before.
type question struct {
	n       uint64
	streams []*link.Stream
}

// sync waits until the far executor has done all that was sent, and this carrier all that
// the far executor had sent before its answer.
func (c *carrier) sync(ctx context.Context) error {
	q, err := c.ask(ctx)
	if err != nil {
		return err
	}
	return c.awaitAnswer(ctx, q)
}

// ask asks. An answer to a later question is one to this, too.
func (c *carrier) ask(ctx context.Context) (question, error) {
	c.mu.Lock()
	c.syncs++
	q := question{c.syncs, append([]*link.Stream{c.commands, c.bulk}, c.joined...)}
	c.mu.Unlock()
	for _, st := range q.streams {
		if err := st.Send(ctx, link.Frame{Kind: remote.KindSync, Head: remote.Words(q.n)}, nil); err != nil {
			return q, err
		}
	}
	return q, nil
}

// next is a question that is not asked: the far executor knows when to answer it.
func (c *carrier) next(q question) question {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.syncs = max(c.syncs, q.n+1)
	return question{q.n + 1, q.streams}
}

// awaitAnswer waits for the answer on each stream.
func (c *carrier) awaitAnswer(ctx context.Context, q question) error {
	stop := context.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.changed.Broadcast()
	})
	defer stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	silent := func() bool {
		return slices.ContainsFunc(q.streams, func(st *link.Stream) bool { return c.synced[st] < q.n })
	}
	for silent() && ctx.Err() == nil && c.ctx.Err() == nil {
		c.changed.Wait()
	}
	if silent() {
		return fmt.Errorf("the far executor does not answer: %w", errors.Join(ctx.Err(), c.ctx.Err()))
	}
	return nil
}

func (c *carrier) gotSync(st *link.Stream, head []byte) error {
	var n uint64
	if err := remote.ParseWords(head, &n); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > c.syncs {
		return fmt.Errorf("answer %d of %d: %w", n, c.syncs, errHostile)
	}
	c.synced[st] = max(c.synced[st], n)
	c.changed.Broadcast()
	return nil
}
