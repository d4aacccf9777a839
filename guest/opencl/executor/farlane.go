package executor

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
)

// farLane is one lane at the far end. Its fields are protected by farEnd.mu.
type farLane struct {
	start  remote.LaneStart
	direct bool
	base   uint64 // arena offset of the transfer's byte 0, if direct
	state  uint32 // wire.Lane*
	busy   bool   // a thread of the client may still be in an earlier run
	limit  uint32
	done   uint32           // chunks that the client has moved, or that have arrived of it
	came   remote.Arrived   // of a write
	pos    *remote.Position // of a write
	news   chan struct{}    // done has changed
	more   chan struct{}    // of a read: limit or done have changed, or the run has ended
}

// at returns where a chunk is in the arena.
func (l *farLane) at(split uint64, i uint32, pos uint64) uint64 {
	if l.direct {
		return l.base + pos
	}
	first := (split + wire.LaneChunk - 1) &^ (wire.LaneChunk - 1)
	return first + uint64(l.start.Lane)*laneBytes + uint64(i%wire.LaneChunks)*wire.LaneChunk
}

// LaneFree implements transport.
func (f *farEnd) LaneFree(n int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lanes[n].state == wire.LaneFree && !f.lanes[n].busy
}

// StartLane implements transport.
func (f *farEnd) StartLane(n int, x shm.Lane) {
	f.mu.Lock()
	l := &f.lanes[n]
	l.start = remote.LaneStart{
		Lane: uint32(n), Run: l.start.Run + 1, Word: x.Word, Write: x.Write, From: x.From, Limit: x.Limit,
		Cut: remote.Cut{Row: x.Row, Slice: x.Slice, Total: x.Total},
	}
	l.state = wire.LaneStream
	l.direct, l.base, l.limit, l.done, l.came = x.Direct, x.At, x.Limit, 0, remote.Arrived{}
	l.pos = remote.NewPosition(l.start.Cut, x.From)
	l.more = make(chan struct{}, 1)
	f.marks++
	l.start.After = f.marks
	start, more := l.start, l.more
	f.mu.Unlock()
	f.say(remote.KindMark, start.After)
	f.send(f.bulk, remote.KindLaneStart, start.Append(nil), nil)
	if !x.Write {
		go f.sendChunks(l, start, more)
	}
}

// sendChunks sends the chunks of a read as the device fills them, and not more than the
// client has room for.
func (f *farEnd) sendChunks(l *farLane, start remote.LaneStart, more <-chan struct{}) {
	pos := remote.NewPosition(start.Cut, start.From)
	for i := uint32(0); !pos.Last(); i++ {
		for {
			f.mu.Lock()
			current := l.start.Run == start.Run && (l.state == wire.LaneStream)
			due := i < l.limit && i < l.done+wire.LaneChunks
			f.mu.Unlock()
			if !current {
				return
			}
			if due {
				break
			}
			select {
			case <-more:
			case <-f.ctx.Done():
				return
			}
		}
		p, n, _ := pos.Chunk(i)
		f.mu.Lock()
		at, st := l.at(f.hello.ArenaSplit, i, p), remote.StreamOf(i, f.joined, f.bulk)
		f.mu.Unlock()
		b, err := f.arena.Range(at, n)
		if err != nil {
			f.log.Error("bulk transfer", "err", err)
			return
		}
		send := func() {
			f.send(st, remote.KindLaneChunk, remote.Words(uint64(start.Lane), uint64(start.Run), uint64(i)), b)
		}
		if st == f.bulk {
			send()
		} else {
			go send() // the next chunk goes on another connection meanwhile
		}
	}
}

// join notes that a stream of chunks has been connected, and that the carrier knows it. One that has
// lost the answer may not come again, and would never get what is sent there.
func (f *farEnd) join(st *link.Stream) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Contains(f.joined, st) {
		f.joined = append(f.joined, st)
	}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// RaiseLane implements transport.
func (f *farEnd) RaiseLane(n int, limit uint32) {
	f.mu.Lock()
	l := &f.lanes[n]
	l.limit = limit
	start := l.start
	poke(l.more)
	f.mu.Unlock()
	if start.Write {
		f.sayBulk(remote.KindLaneRaise, uint64(n), uint64(start.Run), uint64(limit))
	}
}

// EndLane implements transport.
func (f *farEnd) EndLane(n int, state uint32) {
	f.mu.Lock()
	l := &f.lanes[n]
	l.state = state
	if state == wire.LaneLeft {
		l.state, l.busy = wire.LaneFree, true
	}
	poke(l.more)
	run := l.start.Run
	f.mu.Unlock()
	f.sayBulk(remote.KindLaneEnd, uint64(n), uint64(run), uint64(state))
}

// WaitLane implements transport.
func (f *farEnd) WaitLane(n int, old uint32, timeout time.Duration) uint32 {
	var end <-chan time.Time
	for {
		f.mu.Lock()
		l := &f.lanes[n]
		done, news := l.done, l.news
		f.mu.Unlock()
		if done != old || timeout <= 0 {
			return done
		}
		if end == nil {
			t := time.NewTimer(timeout)
			defer t.Stop()
			end = t.C
		}
		select {
		case <-news:
		case <-end:
			timeout = 0
		}
	}
}

// RingMovers implements transport.
func (f *farEnd) RingMovers() { f.sayBulk(remote.KindRing, wire.NoSlot) }

// RingCaller implements transport.
func (f *farEnd) RingCaller(slot uint16) {
	if slot < wire.SlotCount {
		f.sayBulk(remote.KindRing, uint64(slot))
	}
}

func (f *farEnd) sayBulk(kind uint16, v ...uint64) { f.send(f.bulk, kind, remote.Words(v...), nil) }

// placeBulk returns where a chunk belongs. It is asked again after a connection broke.
func (f *farEnd) placeBulk(kind uint16, head []byte, n int) ([]byte, error) {
	if kind != remote.KindLaneChunk {
		return nil, fmt.Errorf("frame of kind %d with a body: %w", kind, errHostile)
	}
	lane, run, i, err := parseLane(head)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	l := &f.lanes[lane]
	if l.start.Run != run || l.state != wire.LaneStream { // it was given up meanwhile
		if n > wire.LaneChunk {
			return nil, fmt.Errorf("chunk of %d bytes: %w", n, errHostile)
		}
		return make([]byte, n), nil
	}
	if !l.start.Write || i >= l.limit || l.came.Has(i) {
		return nil, fmt.Errorf("chunk %d of %d in lane %d: %w", i, l.limit, lane, errHostile)
	}
	pos, size, ok := l.pos.Chunk(i)
	if !ok || size != uint64(n) {
		return nil, fmt.Errorf("chunk %d of %d bytes, not %d, in lane %d: %w", i, n, size, lane, errHostile)
	}
	return f.arena.Range(l.at(f.hello.ArenaSplit, i, pos), size)
}

func parseLane(head []byte) (lane, run, third uint32, err error) {
	var a, b, c uint64
	if err := remote.ParseWords(head, &a, &b, &c); err != nil {
		return 0, 0, 0, err
	}
	if a >= wire.LaneCount || b > 1<<32-1 || c > 1<<32-1 {
		return 0, 0, 0, fmt.Errorf("lane %d, run %d, %d: %w", a, b, c, errHostile)
	}
	return uint32(a), uint32(b), uint32(c), nil
}

// chunkFrame takes a frame of a stream of chunks.
func (f *farEnd) chunkFrame(st *link.Stream, fr link.Frame) error {
	switch fr.Kind {
	case remote.KindLaneChunk:
		return f.bulkFrame(fr)
	case remote.KindSync:
		f.sayDone(st, fr.Head)
		return nil
	}
	return fmt.Errorf("frame of kind %d among chunks from a carrier: %w", fr.Kind, errHostile)
}

// bulkFrame takes a frame of the bulk stream.
func (f *farEnd) bulkFrame(fr link.Frame) error {
	switch fr.Kind {
	case remote.KindLaneChunk, remote.KindLaneDone:
		lane, run, n, err := parseLane(fr.Head)
		if err != nil {
			return err
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		l := &f.lanes[lane]
		switch {
		case l.start.Run != run || l.state != wire.LaneStream:
			return nil
		case (fr.Kind == remote.KindLaneChunk) != l.start.Write:
			return fmt.Errorf("frame of kind %d for lane %d: %w", fr.Kind, lane, errHostile)
		case fr.Kind == remote.KindLaneChunk:
			// One without bytes has not been given a place.
			if _, size, ok := l.pos.Chunk(n); !ok || size != uint64(len(fr.Body)) || !l.came.Add(n) {
				return fmt.Errorf("chunk %d of %d bytes in lane %d: %w", n, len(fr.Body), lane, errHostile)
			}
			n = l.came.Count()
		}
		if n < l.done || n > l.limit {
			return fmt.Errorf("%d chunks moved of %d: %w", n, l.limit, errHostile)
		}
		l.done = n
		poke(l.news)
		poke(l.more)
		return nil
	case remote.KindLaneFree, remote.KindLaneBusy:
		var n uint64
		if err := remote.ParseWords(fr.Head, &n); err != nil {
			return err
		}
		if n >= wire.LaneCount {
			return fmt.Errorf("lane %d: %w", n, errHostile)
		}
		f.mu.Lock()
		f.lanes[n].busy = fr.Kind == remote.KindLaneBusy
		f.mu.Unlock()
		return nil
	case remote.KindTaken:
		var callbacks, printed uint64
		if err := remote.ParseWords(fr.Head, &callbacks, &printed); err != nil {
			return err
		}
		return f.taken(callbacks, printed)
	case remote.KindSync:
		f.sayDone(f.bulk, fr.Head)
		return nil
	}
	return fmt.Errorf("bulk frame of kind %d from a carrier: %w", fr.Kind, errHostile)
}
