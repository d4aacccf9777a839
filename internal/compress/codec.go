package compress

import (
	"errors"
	"fmt"

	"github.com/klauspost/compress/zstd"
)

// ErrPacket is returned for a packet that no correct peer sends. The connection is of no use
// then.
var ErrPacket = errors.New("malformed packet")

// mostLong is the most bytes that one compressed packet expands to. Longer pieces are cut.
const mostLong = 1 << 20

// shortener compresses. Its memory is that of a window of mostLong bytes.
type shortener struct {
	z    *zstd.Encoder
	long []byte // a copy: somebody else may write what is sent
	out  []byte
}

func newShortener() (*shortener, error) {
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(mostLong), zstd.WithLowerEncoderMem(true), zstd.WithEncoderCRC(true),
		zstd.WithSingleSegment(true)) // so that every frame has its size
	if err != nil {
		return nil, fmt.Errorf("compress: %w", err)
	}
	return &shortener{z: z}, nil
}

// shorten compresses pieces as if they were one. The result is the shortener's until the next
// call.
func (s *shortener) shorten(pieces ...[]byte) []byte {
	s.long = s.long[:0]
	for _, p := range pieces {
		s.long = append(s.long, p...)
	}
	s.out = s.z.EncodeAll(s.long, s.out[:0])
	return s.out
}

// expander expands.
type expander struct {
	z   *zstd.Decoder
	out []byte
}

func newExpander() (*expander, error) {
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxMemory(mostLong), zstd.WithDecoderMaxWindow(mostLong), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		return nil, fmt.Errorf("expand: %w", err)
	}
	return &expander{z: z}, nil
}

// expand returns the n bytes that a packet has been before. They are the expander's until the
// next call. n is at most mostLong: what the packet says of itself must agree with it before
// any of it is expanded.
func (x *expander) expand(short []byte, n int) ([]byte, error) {
	var h zstd.Header
	if err := h.Decode(short); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPacket, err)
	}
	if h.Skippable || !h.HasFCS || h.FrameContentSize != uint64(n) || h.DictionaryID != 0 || !h.HasCheckSum {
		return nil, fmt.Errorf("%d bytes that are to expand to %d have other marks: %w", len(short), n, ErrPacket)
	}
	if cap(x.out) < n {
		x.out = make([]byte, 0, n)
	}
	out, err := x.z.DecodeAll(short, x.out[:0:n])
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPacket, err)
	}
	if len(out) != n {
		return nil, fmt.Errorf("%d bytes expand to %d, not %d: %w", len(short), len(out), n, ErrPacket)
	}
	return out, nil
}
