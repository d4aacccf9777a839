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

// ChunkSize is the largest size of a chunk, in bytes.
const ChunkSize = 128 << 10

// MaxID is the largest length of a state's id, in bytes.
const MaxID = 64

var (
	// ErrTruncated means that a stream ended before its mark.
	ErrTruncated = errors.New("the state was cut off")
	// ErrCorrupt means that the data differ from what was sent.
	ErrCorrupt = errors.New("the state is damaged")
	// ErrStale means that it is another state than the wanted one.
	ErrStale = errors.New("it is another state")
)

// Mark identifies one state.
type Mark struct {
	ID     string
	Size   uint64 // bytes
	Digest [sha256.Size]byte
}

func (m Mark) String() string {
	return fmt.Sprintf("state %s of %d bytes, %s", m.ID, m.Size, hex.EncodeToString(m.Digest[:6]))
}

// Proto returns the mark in the API's form.
func (m Mark) Proto() *gpuctlv1.StateMark {
	return &gpuctlv1.StateMark{Id: m.ID, Size: m.Size, Digest: m.Digest[:]}
}

// MarkOf returns the mark in a message. Errors wrap ErrCorrupt.
func MarkOf(p *gpuctlv1.StateMark) (Mark, error) {
	m := Mark{ID: p.GetId(), Size: p.GetSize()}
	if len(m.ID) > MaxID || len(p.GetDigest()) != len(m.Digest) {
		return Mark{}, fmt.Errorf("a mark with an id of %d bytes and a digest of %d: %w", len(m.ID), len(p.GetDigest()), ErrCorrupt)
	}
	copy(m.Digest[:], p.GetDigest())
	return m, nil
}

// Writer makes a stream. It buffers less than a chunk.
type Writer struct {
	send func(*gpuctlv1.StateChunk) error
	buf  []byte
	hash hash.Hash
	size uint64
	err  error
}

// NewWriter returns a Writer that calls send for each chunk. The Writer reuses the chunk
// after send has returned.
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

// flush sends the buffer. The buffer is a copy, which nobody can change between the
// computation of its digest and the sending.
func (w *Writer) flush() {
	if len(w.buf) == 0 || w.err != nil {
		return
	}
	_, _ = w.hash.Write(w.buf)
	w.size += uint64(len(w.buf))
	w.err = w.send(&gpuctlv1.StateChunk{Data: w.buf})
	w.buf = w.buf[:0]
}

// End ends the stream with the mark of the state. id may be empty.
func (w *Writer) End(id string) (Mark, error) {
	w.flush()
	m := Mark{ID: id, Size: w.size}
	w.hash.Sum(m.Digest[:0])
	if w.err == nil {
		w.err = w.send(&gpuctlv1.StateChunk{Mark: m.Proto()})
	}
	return m, w.err
}

// Check checks a stream while its chunks are passed on.
type Check struct {
	hash hash.Hash
	size uint64
	mark *Mark
}

// NewCheck returns a Check for a new stream.
func NewCheck() *Check { return &Check{hash: sha256.New()} }

// Size returns how many bytes were checked so far.
func (c *Check) Size() uint64 { return c.size }

// Take checks the next chunk. end reports that it was the last one, and that all bytes
// are as they were sent. Errors wrap ErrTruncated or ErrCorrupt.
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

// Mark returns the stream's mark. It is valid after Take has returned end.
func (c *Check) Mark() Mark {
	if c.mark == nil {
		return Mark{}
	}
	return *c.mark
}

// Reader reads a stream. It returns io.EOF only if all bytes are as they were sent.
type Reader struct {
	recv  func() (*gpuctlv1.StateChunk, error)
	check *Check
	rest  []byte
	err   error
}

// NewReader returns a Reader for the chunks that recv returns. recv returns io.EOF at the
// end. A chunk is used until the next call of recv.
func NewReader(recv func() (*gpuctlv1.StateChunk, error)) *Reader {
	return &Reader{recv: recv, check: NewCheck()}
}

// Read implements io.Reader. Errors wrap ErrTruncated or ErrCorrupt, or are those of
// recv.
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

// Mark returns the stream's mark. It is valid after Read has returned io.EOF.
func (r *Reader) Mark() Mark { return r.check.Mark() }
