package statestream

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// ChunkSize is the most bytes in one chunk.
const ChunkSize = 128 << 10

// MaxID is the most bytes in a state's id.
const MaxID = 64

var (
	// ErrTruncated says that a stream ended before its mark.
	ErrTruncated = errors.New("the state was cut off")
	// ErrCorrupt says that what came is not what was sent.
	ErrCorrupt = errors.New("the state is damaged")
	// ErrStale says that it is another state than the one that is wanted.
	ErrStale = errors.New("it is another state")
)

// Mark tells one state from every other.
type Mark struct {
	ID     string
	Size   uint64 // bytes
	Digest [sha256.Size]byte
}

func (m Mark) String() string {
	return fmt.Sprintf("state %s of %d bytes, %s", m.ID, m.Size, hex.EncodeToString(m.Digest[:6]))
}

// Proto is the mark as the API has it.
func (m Mark) Proto() *gpuctlv1.StateMark {
	return &gpuctlv1.StateMark{Id: m.ID, Size: m.Size, Digest: m.Digest[:]}
}

// MarkOf is a mark that somebody said. An error wraps ErrCorrupt.
func MarkOf(p *gpuctlv1.StateMark) (Mark, error) {
	m := Mark{ID: p.GetId(), Size: p.GetSize()}
	if len(m.ID) > MaxID || len(p.GetDigest()) != len(m.Digest) {
		return Mark{}, fmt.Errorf("a mark with an id of %d bytes and a digest of %d: %w", len(m.ID), len(p.GetDigest()), ErrCorrupt)
	}
	copy(m.Digest[:], p.GetDigest())
	return m, nil
}

// Writer makes a stream. It keeps less than a chunk.
type Writer struct {
	send func(*gpuctlv1.StateChunk) error
	buf  []byte
	hash hash.Hash
	size uint64
	err  error
}

// NewWriter returns a Writer that sends chunks. A chunk is its own again as
// soon as send has returned.
func NewWriter(send func(*gpuctlv1.StateChunk) error) *Writer {
	return &Writer{send: send, buf: make([]byte, 0, ChunkSize), hash: sha256.New()}
}

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (n int, err error) {
	for len(p) > 0 && w.err == nil {
		k := copy(w.buf[len(w.buf):cap(w.buf)], p)
		w.buf = w.buf[:len(w.buf)+k]
		p, n = p[k:], n+k
		if len(w.buf) == cap(w.buf) {
			w.flush()
		}
	}
	return n, w.err
}

// flush sends what is in the buffer: the copy, which nobody can change between
// its sum and its way out.
func (w *Writer) flush() {
	if len(w.buf) == 0 || w.err != nil {
		return
	}
	_, _ = w.hash.Write(w.buf)
	w.size += uint64(len(w.buf))
	w.err = w.send(&gpuctlv1.StateChunk{Data: w.buf})
	w.buf = w.buf[:0]
}

// End ends the stream as the state of that id, which may be empty.
func (w *Writer) End(id string) (Mark, error) {
	w.flush()
	m := Mark{ID: id, Size: w.size}
	w.hash.Sum(m.Digest[:0])
	if w.err == nil {
		w.err = w.send(&gpuctlv1.StateChunk{Mark: m.Proto()})
	}
	return m, w.err
}

// Check follows a stream that passes by.
type Check struct {
	hash hash.Hash
	size uint64
	mark *Mark
}

// NewCheck returns a Check of a stream that has not begun.
func NewCheck() *Check { return &Check{hash: sha256.New()} }

// Size is how many bytes have passed.
func (c *Check) Size() uint64 { return c.size }

// Take looks at the next chunk. end says that it was the last and that all
// before it is as it was sent.
func (c *Check) Take(chunk *gpuctlv1.StateChunk) (end bool, err error) {
	data, mark := chunk.GetData(), chunk.GetMark()
	switch {
	case c.mark != nil:
		return false, fmt.Errorf("more after the end: %w", ErrCorrupt)
	case (len(data) == 0) == (mark == nil), len(data) > ChunkSize:
		return false, fmt.Errorf("a chunk of %d bytes: %w", len(data), ErrCorrupt)
	case mark == nil:
		_, _ = c.hash.Write(data)
		c.size += uint64(len(data))
		return false, nil
	}
	m, err := MarkOf(mark)
	if err != nil {
		return false, err
	}
	var got Mark
	c.hash.Sum(got.Digest[:0])
	if m.Size != c.size || m.Digest != got.Digest {
		return false, fmt.Errorf("%d bytes came of %s: %w", c.size, m, ErrCorrupt)
	}
	c.mark = &m
	return true, nil
}

// Mark of the stream, once Take has said that it ended.
func (c *Check) Mark() Mark {
	if c.mark == nil {
		return Mark{}
	}
	return *c.mark
}

// Reader reads a stream. It returns io.EOF only when all was as it was sent.
type Reader struct {
	recv  func() (*gpuctlv1.StateChunk, error)
	check *Check
	rest  []byte
	err   error
}

// NewReader returns a Reader of the chunks that recv returns, whose io.EOF ends
// them. A chunk is used until the next call.
func NewReader(recv func() (*gpuctlv1.StateChunk, error)) *Reader {
	return &Reader{recv: recv, check: NewCheck()}
}

// Read implements io.Reader. Errors wrap ErrTruncated or ErrCorrupt, or are recv's.
func (r *Reader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 && r.err == nil {
		chunk, err := r.recv()
		end := false
		if err == nil {
			end, err = r.check.Take(chunk)
		}
		switch {
		case errors.Is(err, io.EOF):
			r.err = ErrTruncated
		case err != nil:
			r.err = err
		case end:
			r.err = io.EOF
		default:
			r.rest = chunk.GetData()
		}
	}
	if len(r.rest) == 0 {
		return 0, r.err
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Mark of the stream, once Read has returned io.EOF.
func (r *Reader) Mark() Mark { return r.check.Mark() }
