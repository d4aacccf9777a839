package remote

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// ErrFrame is returned for a frame that no correct peer sends.
var ErrFrame = errors.New("malformed frame")

// Kinds of frames. The numbers are of both streams.
const (
	// On the stream of commands.
	KindRecords  = 1 + iota // requests, as in the ring, one behind the other
	KindBlock               // bytes of the arena
	KindSync                // is answered with KindSynced when all before it is done
	KindSynced              //
	KindReply               // Reply
	KindPend                // Words: completion word, state
	KindCallback            // Words: token, status, kind
	KindPrint               // text
	KindState               // Words: state of the session
	KindMapped              // Mapping
	KindFreed               // Words: offset, size: memory of the arena that is not needed
	KindMark                // Words: number: a LaneStart that names it comes after this
	KindNeed                // Block: the far executor needs what the client has there

	// On the bulk stream.
	KindLaneStart // LaneStart
	KindLaneRaise // Words: lane, run, limit
	KindLaneEnd   // Words: lane, run, state
	KindLaneChunk // Words: lane, run, chunk; the bytes
	KindLaneDone  // Words: lane, run, how many chunks the client has moved
	KindLaneFree  // Words: lane: a client has left it
	KindLaneBusy  // Words: lane: a client is still in it
	KindRing      // Words: slot: the client's threads have to look at lanes
	KindTaken     // Words: callbacks, bytes of text: what was taken so far

	// On the stream of commands, for a carrier that has said that it knows them
	// (ActivateRequest.names_shown). Words: ids as of a Mapping.
	KindShown    // the blocks that follow are its content
	KindUnmapped // it is over, and the carrier has not seen the request to unmap it
)

// Limits of frames, for link.Options.
const (
	MaxHead = 256
	MaxBody = 4 << 20
)

// Words encodes numbers.
func Words(v ...uint64) []byte {
	b := make([]byte, 0, 8*len(v))
	for _, x := range v {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

// ParseWords decodes exactly len(v) numbers.
func ParseWords(b []byte, v ...*uint64) error {
	if len(b) != 8*len(v) {
		return fmt.Errorf("head of %d bytes, not %d: %w", len(b), 8*len(v), ErrFrame)
	}
	for i, p := range v {
		*p = binary.LittleEndian.Uint64(b[8*i:])
	}
	return nil
}

// Reply is the answer to a call.
type Reply struct {
	Slot  uint16
	Err   int32
	Token uint32
	Total uint64
}

// Append encodes the reply.
func (r Reply) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, uint64(r.Slot)|uint64(uint32(r.Err))<<32)
	b = binary.LittleEndian.AppendUint64(b, uint64(r.Token))
	return binary.LittleEndian.AppendUint64(b, r.Total)
}

// ParseReply decodes the head of a reply.
func ParseReply(b []byte) (Reply, error) {
	var a, token, total uint64
	if err := ParseWords(b, &a, &token, &total); err != nil {
		return Reply{}, err
	}
	if a>>16&0xffff != 0 || a&0xffff >= wire.SlotCount || token > 1<<32-1 {
		return Reply{}, fmt.Errorf("reply %#x, token %d: %w", a, token, ErrFrame)
	}
	return Reply{uint16(a), int32(uint32(a >> 32)), uint32(token), total}, nil
}

// Block is a range of the arena, or a box of rows in it.
type Block struct {
	At         uint64 // arena offset of the first byte
	Row        uint64 // bytes of a row
	Rows       uint64 // of a slice
	Slices     uint64
	RowPitch   uint64 // bytes
	SlicePitch uint64
}

// Range returns the block of n bytes at an offset.
func Range(at, n uint64) Block { return Block{At: at, Row: n, Rows: 1, Slices: 1} }

// words is the encoding of a block.
func (x *Block) words() []uint64 {
	return []uint64{x.At, x.Row, x.Rows, x.Slices, x.RowPitch, x.SlicePitch}
}

// Append encodes the block.
func (x Block) Append(b []byte) []byte { return append(b, Words(x.words()...)...) }

// ParseBlock decodes a block that is within [0, limit).
func ParseBlock(b []byte, limit uint64) (x Block, err error) {
	if err := ParseWords(b, &x.At, &x.Row, &x.Rows, &x.Slices, &x.RowPitch, &x.SlicePitch); err != nil {
		return x, err
	}
	return x, x.Check(limit)
}

// Check reports an error unless the block is within [0, limit), and its rows do not overlap.
func (x *Block) Check(limit uint64) error {
	if x.check(limit) {
		return nil
	}
	return fmt.Errorf("block %+v outside of %d bytes: %w", *x, limit, ErrFrame)
}

func (x *Block) check(limit uint64) bool {
	const most = 1 << 43 // products of two of them do not overflow when one is below 1<<20
	if x.Row == 0 || x.Rows == 0 || x.Slices == 0 || x.At >= limit || x.Row > limit-x.At || limit > most {
		return false
	}
	left := limit - x.At - x.Row
	if x.Rows > 1 {
		if x.RowPitch < x.Row || x.Rows-1 > left/x.RowPitch {
			return false
		}
		left -= (x.Rows - 1) * x.RowPitch
	}
	if x.Slices > 1 {
		if x.SlicePitch < (x.Rows-1)*x.RowPitch+x.Row || x.Slices-1 > left/x.SlicePitch {
			return false
		}
	}
	return true
}

// Size returns the number of bytes in the block.
func (x *Block) Size() uint64 { return x.Row * x.Rows * x.Slices }

// Tight reports whether the block is one range.
func (x *Block) Tight() bool {
	return (x.Rows == 1 || x.RowPitch == x.Row) && (x.Slices == 1 || x.SlicePitch == x.Row*x.Rows)
}

// End returns the arena offset behind the block.
func (x *Block) End() uint64 {
	return x.At + (x.Slices-1)*x.SlicePitch + (x.Rows-1)*x.RowPitch + x.Row
}

// Split calls f with parts of the block that have at most most bytes each. A row that is
// longer is cut, too.
func (x Block) Split(most uint64, f func(Block) error) error {
	if x.Tight() {
		for at, n := x.At, x.Size(); n > 0; {
			k := min(n, most)
			if err := f(Range(at, k)); err != nil {
				return err
			}
			at, n = at+k, n-k
		}
		return nil
	}
	for z := range x.Slices {
		for y := uint64(0); y < x.Rows; {
			at := x.At + z*x.SlicePitch + y*x.RowPitch
			if x.Row > most {
				if err := Range(at, x.Row).Split(most, f); err != nil {
					return err
				}
				y++
				continue
			}
			k := min(x.Rows-y, max(most/x.Row, 1))
			if err := f(Block{At: at, Row: x.Row, Rows: k, Slices: 1, RowPitch: x.RowPitch}); err != nil {
				return err
			}
			y += k
		}
	}
	return nil
}

// Bytes returns a block's bytes: those of the memory itself if it is one range, else a copy.
func (x *Block) Bytes(mem []byte) []byte {
	if x.Tight() {
		return mem[x.At : x.At+x.Size() : x.At+x.Size()]
	}
	out := make([]byte, 0, x.Size())
	x.rows(func(at uint64) { out = append(out, mem[at:at+x.Row]...) })
	return out
}

// Store stores a block's bytes.
func (x *Block) Store(mem, b []byte) {
	x.rows(func(at uint64) {
		copy(mem[at:at+x.Row], b)
		b = b[x.Row:]
	})
}

func (x *Block) rows(f func(at uint64)) {
	for z := range x.Slices {
		for y := range x.Rows {
			f(x.At + z*x.SlicePitch + y*x.RowPitch)
		}
	}
}

// Mapping is a region that the application has mapped.
type Mapping struct {
	Mem, ID uint32
	Writes  bool // the application may write it
	// Comes: its content will be sent, and before that the application does not know that it may
	// use the region. Otherwise the application has it already, or writes all of it.
	Comes bool
	Block Block
}

// The flags of a Mapping.
const (
	mapWrites = 1 << iota
	mapComes
)

// Append encodes the mapping.
func (m Mapping) Append(b []byte) []byte {
	w := uint64(0)
	if m.Writes {
		w |= mapWrites
	}
	if m.Comes {
		w |= mapComes
	}
	return m.Block.Append(append(b, Words(MappingName(m.Mem, m.ID), w)...))
}

// MappingName names a mapping in a frame.
func MappingName(mem, id uint32) uint64 { return uint64(mem) | uint64(id)<<32 }

// ParseMapping decodes a mapping within [0, limit).
func ParseMapping(b []byte, limit uint64) (m Mapping, err error) {
	if len(b) < 16 {
		return m, fmt.Errorf("mapping of %d bytes: %w", len(b), ErrFrame)
	}
	var ids, w uint64
	if err := ParseWords(b[:16], &ids, &w); err != nil {
		return m, err
	}
	if w&^(mapWrites|mapComes) != 0 {
		return m, fmt.Errorf("mapping with flags %#x: %w", w, ErrFrame)
	}
	m.Mem, m.ID, m.Writes, m.Comes = uint32(ids), uint32(ids>>32), w&mapWrites != 0, w&mapComes != 0
	m.Block, err = ParseBlock(b[16:], limit)
	return m, err
}

// Peers in an ExportRequest to a far executor: a connection that the carrier has made for it,
// or the one that it kept at the end of the last export.
const (
	ExportPeer = "carrier"
	ExportKept = "kept"
)

// StateName is the file of an ExportRequest or LoadRequest to a far executor: a state that
// the carrier gets, or has brought, on a connection of role State. That begins with a u64
// of the carrier's: GetState, or the size in bytes of what follows. To GetState the answer is
// the size, then the state; to a state it is its size.
const (
	StateName = "state"
	GetState  = ^uint64(0)
	MaxState  = 1 << 42 // bytes
)

// Staged returns the range of the arena that a request makes the executor read.
func Staged(m wire.Request) (off, n uint64, ok bool) {
	switch m := m.(type) {
	case *wire.WriteBuffer:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	case *wire.WriteBufferRect:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	case *wire.WriteImage:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	case *wire.CreateBuffer:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	case *wire.CreateImage:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	case *wire.CreateProgramSource:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	case *wire.CreateProgramIL:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	case *wire.CreateProgramBinary:
		return m.StageOff, m.StageLen, m.Mode == wire.DataStaged
	}
	return 0, 0, false
}

// Reads returns the range of the arena that a request makes the executor write.
func Reads(m wire.Request) (off, n uint64, pend uint32, ok bool) {
	switch m := m.(type) {
	case *wire.ReadBuffer:
		return m.StageOff, m.StageLen, m.Pend, m.Mode == wire.DataStaged
	case *wire.ReadBufferRect:
		return m.StageOff, m.StageLen, m.Pend, m.Mode == wire.DataStaged
	case *wire.ReadImage:
		return m.StageOff, m.StageLen, m.Pend, m.Mode == wire.DataStaged
	}
	return 0, 0, 0, false
}
