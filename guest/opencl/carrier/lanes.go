package carrier

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
)

// lane is one lane at the application's end. The application always moves chunks through the
// lane's memory, also where the far executor computes in its arena. The fields are protected
// by carrier.mu.
type lane struct {
	start   remote.LaneStart
	runs    bool
	left    bool             // given up, and not yet free again
	limit   uint32           // chunks that the far executor permits
	shown   uint32           // chunks that the application may move
	sent    uint32           // of a write: chunks that are sent, or are being sent
	acked   remote.Arrived   // of a write: chunks whose memory may be filled again
	arrived remote.Arrived   // of a read
	moved   uint32           // that the application has moved, of a read
	placing int              // of a read: chunks that are being read
	pos     *remote.Position // of a read
}

// bulkFrom is the size in bytes of blocking transfers that take a lane. One of less is
// sent with its request: a lane costs one more round trip, and with so little there is
// nothing to overlap.
const bulkFrom = 1<<20 + 1

// wideFrom is the size in bytes of transfers whose chunks go on streams of their own.
const wideFrom = 8 << 20

func laneMemory(split uint64, n uint32) uint64 {
	return (split+wire.LaneChunk-1)&^(wire.LaneChunk-1) + uint64(n)*wire.LaneChunk*wire.LaneChunks
}

func (c *carrier) chunk(n, i uint32, size uint64) ([]byte, error) {
	return c.arena.Range(laneMemory(c.split, n)+uint64(i%wire.LaneChunks)*wire.LaneChunk, size)
}

func parseLane(head []byte) (n, run, third uint32, err error) {
	var a, b, x uint64
	if err := remote.ParseWords(head, &a, &b, &x); err != nil {
		return 0, 0, 0, err
	}
	if a >= wire.LaneCount || b > 1<<32-1 || x > 1<<32-1 {
		return 0, 0, 0, fmt.Errorf("lane %d, run %d, %d: %w", a, b, x, errHostile)
	}
	return uint32(a), uint32(b), uint32(x), nil
}

// widen makes the connections of the streams of chunks. A far host that takes none of them
// may not know these streams.
func (c *carrier) widen() {
	for i, st := range c.chunks {
		first := make(chan error, 1)
		handle := func(f link.Frame) error { return c.chunkFrame(1+i, f) }
		go c.keep(remote.Chunks+remote.Role(i), st, handle, first)
		go func() {
			select {
			case err := <-first:
				if err != nil {
					c.log.Debug("no connection for chunks", "stream", i, "err", err)
					return
				}
				c.mu.Lock()
				c.joined = append(c.joined, st)
				c.mu.Unlock()
			case <-c.ctx.Done():
			}
		}()
	}
}

// placeBulk returns where a chunk on the stream of bulk transfers belongs.
func (c *carrier) placeBulk(kind uint16, head []byte, n int) ([]byte, error) {
	return c.placeChunk(0, kind, head, n)
}

// placeChunk returns where a chunk on a stream belongs, that of bulk transfers being 0. On
// another one it may come before the begin of its run, which is waited for.
func (c *carrier) placeChunk(stream int, kind uint16, head []byte, n int) ([]byte, error) {
	if kind != remote.KindLaneChunk || n > wire.LaneChunk {
		return nil, fmt.Errorf("frame of kind %d with %d bytes: %w", kind, n, errHostile)
	}
	ln, run, i, err := parseLane(head)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.placed(stream) // it comes again, on a new connection
	l := &c.lanes[ln]
	for stream > 0 && int32(run-l.start.Run) > 0 && !c.over() {
		c.changed.Wait()
	}
	if !l.runs || l.start.Run != run { // it was given up meanwhile
		return make([]byte, n), nil
	}
	if l.start.Write || i >= l.moved+wire.LaneChunks || l.arrived.Has(i) {
		return nil, fmt.Errorf("chunk %d of lane %d: %w", i, ln, errHostile)
	}
	if _, size, ok := l.pos.Chunk(i); !ok || size != uint64(n) {
		return nil, fmt.Errorf("chunk %d of %d bytes in lane %d: %w", i, n, ln, errHostile)
	}
	c.placing[stream] = l
	l.placing++
	return c.chunk(ln, i, uint64(n))
}

// placed notes that a stream is not reading a chunk, or not any more. The caller holds c.mu.
func (c *carrier) placed(stream int) {
	if l := c.placing[stream]; l != nil {
		c.placing[stream] = nil
		l.placing--
	}
}

// chunkFrame takes a frame of one of the streams of chunks.
func (c *carrier) chunkFrame(stream int, f link.Frame) error {
	switch f.Kind {
	case remote.KindLaneChunk:
		n, run, i, err := parseLane(f.Head)
		if err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.placed(stream)
		l := &c.lanes[n]
		if !l.runs || l.start.Run != run {
			return nil
		}
		// One without bytes has not been given a place.
		if _, size, ok := l.pos.Chunk(i); l.start.Write || !ok || size != uint64(len(f.Body)) || !l.arrived.Add(i) {
			return fmt.Errorf("chunk %d of %d bytes in lane %d: %w", i, len(f.Body), n, errHostile)
		}
		if to := l.arrived.Count(); to > l.shown {
			l.shown = to
			c.ring.RaiseLane(int(n), l.shown)
			c.ringCallers()
		}
		return nil
	case remote.KindSynced:
		return c.gotSync(c.chunks[stream-1], f.Head)
	}
	return fmt.Errorf("frame of kind %d among chunks: %w", f.Kind, errHostile)
}

// bulkFrame takes a frame of the bulk stream.
func (c *carrier) bulkFrame(f link.Frame) error {
	switch f.Kind {
	case remote.KindLaneStart:
		l, err := remote.ParseLaneStart(f.Head)
		if err != nil {
			return err
		}
		return c.startLane(l)
	case remote.KindLaneChunk:
		return c.chunkFrame(0, f)
	case remote.KindLaneRaise, remote.KindLaneEnd:
		n, run, x, err := parseLane(f.Head)
		if err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		l := &c.lanes[n]
		if !l.runs || l.start.Run != run {
			return nil
		}
		switch f.Kind {
		case remote.KindLaneRaise:
			if !l.start.Write || x < l.limit {
				return fmt.Errorf("limit %d of lane %d: %w", x, n, errHostile)
			}
			l.limit = x
			c.showRoom(n)
		default:
			return c.endLane(n, x)
		}
		return nil
	case remote.KindRing:
		var slot uint64
		if err := remote.ParseWords(f.Head, &slot); err != nil {
			return err
		}
		if slot < wire.SlotCount {
			c.mu.Lock()
			c.callers[slot] = struct{}{}
			if len(c.callers) > 64 { // calls that have ended since
				clear(c.callers)
				c.callers[slot] = struct{}{}
			}
			c.mu.Unlock()
			c.ring.RingCaller(uint16(slot))
		} else {
			c.ring.RingMovers()
		}
		return nil
	case remote.KindSynced:
		return c.gotSync(c.bulk, f.Head)
	}
	return fmt.Errorf("bulk frame of kind %d: %w", f.Kind, errHostile)
}

// ringCallers makes all who may move chunks look at the lanes. The caller holds c.mu.
func (c *carrier) ringCallers() {
	c.ring.RingMovers()
	for slot := range c.callers {
		c.ring.RingCaller(uint16(slot))
	}
}

func (c *carrier) startLane(s remote.LaneStart) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.marked < s.After && !c.over() { // the answers that came before it are on the other stream
		c.changed.Wait()
	}
	l := &c.lanes[s.Lane]
	if l.runs || l.left || !c.ring.LaneFree(int(s.Lane)) {
		return fmt.Errorf("lane %d is not free: %w", s.Lane, errHostile)
	}
	*l = lane{start: s, runs: true, limit: s.Limit, pos: remote.NewPosition(s.Cut, s.From), placing: l.placing}
	if s.Write {
		l.shown = min(s.Limit, wire.LaneChunks)
	}
	c.ring.StartLane(int(s.Lane), shm.Lane{Word: s.Word, From: s.From, Limit: l.shown})
	c.ringCallers()
	c.changed.Broadcast()
	c.watching.Go(func() { c.watchLane(s) })
	if s.Cut.Total-s.From >= wideFrom {
		c.widening.Do(c.widen)
	}
	return nil
}

// showRoom lets the application fill the chunks that are permitted and whose memory is free.
// The caller holds c.mu.
func (c *carrier) showRoom(n uint32) {
	l := &c.lanes[n]
	if !l.runs {
		return
	}
	if to := min(l.limit, l.acked.Count()+wire.LaneChunks); to > l.shown {
		l.shown = to
		c.ring.RaiseLane(int(n), to)
		c.ringCallers()
	}
}

// endLane ends a run. The caller holds c.mu.
func (c *carrier) endLane(n, state uint32) error {
	if state != wire.LaneFree && state != wire.LaneLeft {
		return fmt.Errorf("state %d of lane %d: %w", state, n, errHostile)
	}
	l := &c.lanes[n]
	l.runs = false
	if state == wire.LaneFree && c.region.Load32(laneWord(n)+wire.LaneDone) < l.shown {
		state = wire.LaneLeft // the application may be moving a chunk
	}
	l.left = state == wire.LaneLeft
	c.ring.EndLane(int(n), state)
	c.ringCallers()
	return nil
}

func laneWord(n uint32) uint64 { return wire.LaneOff + uint64(n)*wire.LaneSize }

// watchLane follows what the application moves in one run.
func (c *carrier) watchLane(s remote.LaneStart) {
	pos := remote.NewPosition(s.Cut, s.From)
	for seen := uint32(0); ; {
		done := c.ring.WaitLane(int(s.Lane), seen, 20*time.Millisecond)
		c.mu.Lock()
		l := &c.lanes[s.Lane]
		current := l.runs && l.start.Run == s.Run
		valid := done > seen && done <= l.shown // the application can write any number
		if current && valid && !s.Write {
			l.moved = done
		}
		c.mu.Unlock()
		switch {
		case !current || c.over():
			return
		case !valid:
			if done != seen {
				time.Sleep(time.Millisecond)
			}
			continue
		case !s.Write:
			seen = done
			if c.send(c.bulk, remote.KindLaneDone, remote.Words(uint64(s.Lane), uint64(s.Run), uint64(done)), nil, nil) != nil {
				return
			}
			continue
		}
		for ; seen < done; seen++ {
			if c.sendChunk(s, pos, seen) != nil {
				return
			}
		}
	}
}

func (c *carrier) sendChunk(s remote.LaneStart, pos *remote.Position, i uint32) error {
	_, n, ok := pos.Chunk(i)
	if !ok {
		return errProtocol
	}
	b, err := c.chunk(s.Lane, i, n)
	if err != nil {
		return err
	}
	c.mu.Lock()
	l, st := &c.lanes[s.Lane], remote.StreamOf(i, c.joined, c.bulk)
	if l.start.Run != s.Run {
		c.mu.Unlock()
		return errProtocol
	}
	l.sent = i + 1
	c.mu.Unlock()
	send := func() error {
		return c.send(st, remote.KindLaneChunk, remote.Words(uint64(s.Lane), uint64(s.Run), uint64(i)), b, func() {
			// The stream calls this with its lock: it must not wait.
			_ = c.outbox.add(func(context.Context) {
				c.mu.Lock()
				defer c.mu.Unlock()
				if l.start.Run == s.Run {
					l.acked.Add(i)
					c.showRoom(s.Lane)
				}
			})
		})
	}
	if st == c.bulk {
		return send()
	}
	c.watching.Go(func() { _ = send() }) // the next chunk goes on another connection meanwhile
	return nil
}

// freeLanes tells the far executor of lanes that the application has left, and, before the
// carrier serves, of those that it has not. It reports whether there were any.
func (c *carrier) freeLanes(first bool) (said bool, err error) {
	c.mu.Lock()
	var kinds [wire.LaneCount]uint16
	for n := range c.lanes {
		l := &c.lanes[n]
		free := c.ring.LaneFree(n)
		switch {
		case first && !free:
			l.left = true
			kinds[n] = remote.KindLaneBusy
		case l.left && free && l.placing == 0 && l.acked.Count() == l.sent: // nothing of it is under way
			l.left = false
			kinds[n] = remote.KindLaneFree
		}
	}
	c.mu.Unlock()
	for n, kind := range kinds {
		if kind == 0 {
			continue
		}
		if err := c.send(c.bulk, kind, remote.Words(uint64(n)), nil, nil); err != nil {
			return said, err
		}
		said = true
	}
	return said, nil
}
