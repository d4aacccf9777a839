package remote

import (
	"bufio"
	"io"
	"net"

	"github.com/gpuctl/gpuctl/internal/link"
)

// Parcel is several pieces that go in few system calls, and in few records of TLS. Pieces
// that are small are copied; the others are where they were until Send returns.
type Parcel struct {
	v     net.Buffers
	small []byte
}

// smallPiece is the size in bytes of pieces that are copied, mostSmall that of what is copied
// together.
const (
	smallPiece = 16 << 10
	mostSmall  = 256 << 10
)

// NewParcel begins a parcel with b.
func NewParcel(b []byte) *Parcel { return &Parcel{small: b} }

// Add adds a piece.
func (p *Parcel) Add(b []byte) {
	if len(b) <= smallPiece {
		if len(p.small) >= mostSmall {
			p.flush()
		}
		p.small = append(p.small, b...)
		return
	}
	p.flush()
	p.v = append(p.v, b)
}

func (p *Parcel) flush() {
	if len(p.small) > 0 {
		p.v = append(p.v, p.small)
		p.small = nil
	}
}

// Send sends the pieces in their order.
func (p *Parcel) Send(to io.Writer) error {
	p.flush()
	v := p.v
	p.v = nil
	if w, ok := to.(link.BuffersWriter); ok {
		_, err := w.WriteBuffers(&v)
		return err
	}
	_, err := v.WriteTo(to)
	return err
}

// NewReader returns a reader that gets many small pieces at once. Large ones are read to where
// they belong.
func NewReader(r io.Reader) io.Reader { return bufio.NewReaderSize(r, 64<<10) }
