package remote

import (
	"fmt"

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
}

// Append encodes it.
func (l LaneStart) Append(b []byte) []byte {
	w := uint64(0)
	if l.Write {
		w = 1
	}
	return append(b, Words(uint64(l.Lane)|uint64(l.Run)<<32, uint64(l.Word)|w<<32, l.From, l.Cut.Row, l.Cut.Slice, l.Cut.Total, uint64(l.Limit))...)
}

// ParseLaneStart decodes and checks it.
func ParseLaneStart(b []byte) (l LaneStart, err error) {
	var lane, word, limit uint64
	if err := ParseWords(b, &lane, &word, &l.From, &l.Cut.Row, &l.Cut.Slice, &l.Cut.Total, &limit); err != nil {
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

// Position finds the chunks of a run, in their order.
type Position struct {
	cut     Cut
	next    uint32
	at      uint64
	last, n uint64 // place and size of chunk next-1
}

// NewPosition begins at a byte of the transfer.
func NewPosition(c Cut, from uint64) *Position { return &Position{cut: c, at: from} }

// Chunk returns where chunk i begins in the transfer, and its size. It reports false unless
// that is the next chunk, or the last one again.
func (p *Position) Chunk(i uint32) (at, n uint64, ok bool) {
	switch {
	case i == p.next && p.at < p.cut.Total:
		p.last, p.n = p.at, p.cut.At(p.at)
		p.at += p.n
		p.next++
	case p.next == 0 || i != p.next-1:
		return 0, 0, false
	}
	return p.last, p.n, true
}

// Last reports whether all chunks were found.
func (p *Position) Last() bool { return p.at >= p.cut.Total }
