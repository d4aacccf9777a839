package remote

import (
	"fmt"
	"math/bits"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// Cut is how a bulk transfer is cut into chunks.
type Cut struct {
	Row, Slice, Total uint64 // bytes of a row, of a slice, and of the transfer
}

// At returns the size in bytes of the chunk that begins at pos: a part of a row, some rows of
// a slice, or some slices. The client computes the same.
func (c Cut) At(pos uint64) uint64 {
	switch {
	case pos%c.Row != 0 || c.Row > wire.LaneChunk:
		return min(c.Row-pos%c.Row, wire.LaneChunk)
	case pos%c.Slice != 0 || c.Slice > wire.LaneChunk:
		return min((c.Slice-pos%c.Slice)/c.Row, wire.LaneChunk/c.Row) * c.Row
	}
	return min((c.Total-pos)/c.Slice, wire.LaneChunk/c.Slice) * c.Slice
}

// LaneStart is the begin of a run in a lane.
type LaneStart struct {
	Lane, Run uint32
	Word      uint32 // the transfer's completion word
	Write     bool   // the client sends
	From      uint64 // the transfer's byte at which the run begins
	Cut       Cut
	Limit     uint32 // chunks that may be moved at first
	After     uint64 // a mark on the stream of commands: what a write sends may depend on what came before it
}

// Append encodes it.
func (l LaneStart) Append(b []byte) []byte {
	w := uint64(0)
	if l.Write {
		w = 1
	}
	return append(b, Words(uint64(l.Lane)|uint64(l.Run)<<32, uint64(l.Word)|w<<32, l.From, l.Cut.Row, l.Cut.Slice, l.Cut.Total, uint64(l.Limit), l.After)...)
}

// ParseLaneStart decodes and checks it.
func ParseLaneStart(b []byte) (l LaneStart, err error) {
	var lane, word, limit uint64
	if err := ParseWords(b, &lane, &word, &l.From, &l.Cut.Row, &l.Cut.Slice, &l.Cut.Total, &limit, &l.After); err != nil {
		return l, err
	}
	l.Lane, l.Run, l.Word, l.Write, l.Limit = uint32(lane), uint32(lane>>32), uint32(word), word>>32 == 1, uint32(limit)
	c := l.Cut
	const most = 1 << 44
	if l.Lane >= wire.LaneCount || l.Word == 0 || l.Word >= wire.PendCount || word>>32 > 1 || limit > wire.LaneAhead ||
		c.Row == 0 || c.Slice < c.Row || c.Slice%c.Row != 0 || c.Total < c.Slice || c.Total%c.Slice != 0 || c.Total > most || l.From >= c.Total {
		return l, fmt.Errorf("lane %+v: %w", l, ErrFrame)
	}
	return l, nil
}

// Position finds the chunks of a run. The size of a chunk depends on where it begins, so all
// before it are found as well.
type Position struct {
	cut   Cut
	next  uint32
	at    uint64
	found [wire.LaneAhead][2]uint64 // places and sizes of the last chunks
}

// NewPosition begins at a byte of the transfer.
func NewPosition(c Cut, from uint64) *Position { return &Position{cut: c, at: from} }

// Chunk returns where chunk i begins in the transfer, and its size. It reports false for one
// behind the transfer's end, and for one that is not among the last wire.LaneAhead that were
// found or the next so many.
func (p *Position) Chunk(i uint32) (at, n uint64, ok bool) {
	if i >= p.next && i-p.next >= wire.LaneAhead {
		return 0, 0, false
	}
	for ; p.next <= i; p.next++ {
		if p.at >= p.cut.Total {
			return 0, 0, false
		}
		n := p.cut.At(p.at)
		p.found[p.next%wire.LaneAhead] = [2]uint64{p.at, n}
		p.at += n
	}
	if p.next-i > wire.LaneAhead {
		return 0, 0, false
	}
	x := p.found[i%wire.LaneAhead]
	return x[0], x[1], true
}

// Last reports whether all chunks were found.
func (p *Position) Last() bool { return p.at >= p.cut.Total }

// Arrived counts the chunks of a run that have arrived, in any order, as long as they are
// not more than wire.LaneAhead apart.
type Arrived struct {
	count uint32 // of those before the first that is missing
	more  uint64 // which have arrived after that, from chunk count
}

// Count returns how many have arrived without one missing.
func (a *Arrived) Count() uint32 { return a.count }

// Has reports whether a chunk has arrived.
func (a *Arrived) Has(i uint32) bool {
	return i < a.count || i-a.count < wire.LaneAhead && a.more>>(i-a.count)&1 == 1
}

// Add notes that a chunk has arrived. It reports false for one that has arrived before, or
// that is too far ahead.
func (a *Arrived) Add(i uint32) bool {
	if a.Has(i) || i-a.count >= wire.LaneAhead {
		return false
	}
	a.more |= 1 << (i - a.count)
	n := bits.TrailingZeros64(^a.more)
	a.count += uint32(n)
	a.more >>= n
	return true
}
