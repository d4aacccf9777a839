package executor

import (
	"io"
	"sync/atomic"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/internal/wide"
)

// transfers has one queue for each context. The queues move contents into and out of the
// device.
type transfers struct {
	queues map[*clContext]cl.Queue
}

func (t *transfers) queue(c *clContext) (cl.Queue, cl.Status) {
	if q := t.queues[c]; q != 0 {
		return q, cl.Success
	}
	q, st := cl.CreateCommandQueue(c.vendor, c.devices[0].vendor, 0)
	if st == cl.Success {
		t.queues[c] = q
	}
	return q, st
}

func (t *transfers) forget(c *clContext) {
	if q := t.queues[c]; q != 0 {
		cl.ReleaseCommandQueue(q)
		delete(t.queues, c)
	}
}

// populate makes the kernel allocate the pages of b. It zeroes about 2 GiB a second with
// one processor.
func populate(b []byte) {
	const page = 4096
	wide.Do(len(b), 32<<20, func(off, end int) {
		for i := off; i < end; i += page {
			atomic.AddUint32((*uint32)(unsafe.Pointer(&b[i])), 0)
		}
	})
}

// copyWide copies with several processors. One processor copies 5 to 11 GB/s.
func copyWide(dst, src []byte) {
	wide.Do(len(dst), 2<<20, func(off, end int) { copy(dst[off:end], src[off:end]) })
}

// readWide reads from a file with several processors.
func readWide(f io.ReaderAt, b []byte, at int64) error {
	return wide.Try(len(b), 2<<20, func(off, end int) error {
		_, err := f.ReadAt(b[off:end], at+int64(off))
		return err
	})
}

// writeWide writes to a file with several processors.
func writeWide(f io.WriterAt, b []byte, at int64) error {
	return wide.Try(len(b), 2<<20, func(off, end int) error {
		_, err := f.WriteAt(b[off:end], at+int64(off))
		return err
	})
}

// piece is a part of one object's content: bytes of a buffer, or whole rows of an image. An
// image's rows are numbered through all slices.
type piece struct {
	m      *mem
	ID     uint32
	serial uint64 // the object's serial number in a state file
	Off, N uint64
	At     uint64 // where the bytes are: an offset in the arena or in a file
	ptr    unsafe.Pointer
}

// padded returns the space that a piece takes in a window.
func (p *piece) padded() uint64 { return (p.bytes() + 127) &^ 127 }

func (p *piece) bytes() uint64 {
	if p.m.kind == memImage {
		return p.N * p.m.rowBytes()
	}
	return p.N
}

func (m *mem) rowBytes() uint64 { return m.desc.Width * m.elem }

// rows returns the number of an image's rows in all slices.
func (m *mem) rows() uint64 {
	r := m.region()
	return r[1] * r[2]
}

// box converts a range of rows to an origin and a region. The range is within one slice, or
// it consists of whole slices.
func (m *mem) box(row, n uint64) (o, r [3]uint64) {
	reg := m.region()
	o = [3]uint64{0, row % reg[1], row / reg[1]}
	if n >= reg[1] {
		return [3]uint64{0, 0, o[2]}, [3]uint64{reg[0], reg[1], n / reg[1]}
	}
	return o, [3]uint64{reg[0], n, 1}
}

func (p *piece) read(q cl.Queue, dst unsafe.Pointer, ev *cl.Event) cl.Status {
	if p.m.kind == memImage {
		o, r := p.m.box(p.Off, p.N)
		return cl.EnqueueReadImage(q, p.m.vendor, false, &o, &r, 0, 0, dst, nil, ev)
	}
	return cl.EnqueueReadBuffer(q, p.m.vendor, false, p.Off, p.N, dst, nil, ev)
}

func (p *piece) write(q cl.Queue, src unsafe.Pointer, ev *cl.Event) cl.Status {
	if p.m.kind == memImage {
		o, r := p.m.box(p.Off, p.N)
		return cl.EnqueueWriteImage(q, p.m.vendor, false, &o, &r, 0, 0, src, nil, ev)
	}
	return cl.EnqueueWriteBuffer(q, p.m.vendor, false, p.Off, p.N, src, nil, ev)
}

// cut divides the written parts of an object into pieces of at most most bytes, or of one
// row of an image if that is more. written is like m.dirty.
func (m *mem) cut(most uint64, written []bool) []piece {
	var ps []piece
	if m.kind == memImage {
		if !anyOf(written) {
			return nil
		}
		perSlice := m.region()[1]
		n := max(most/max(m.rowBytes(), 1), 1)
		if n >= perSlice {
			n -= n % perSlice
		}
		for row := uint64(0); row < m.rows(); {
			k := min(n, m.rows()-row)
			if n < perSlice {
				k = min(n, perSlice-row%perSlice)
			}
			ps = append(ps, piece{m: m, ID: m.id, Off: row, N: k})
			row += k
		}
		return ps
	}
	for i := uint64(0); i < uint64(len(written)); i++ {
		if !written[i] {
			continue
		}
		for off, end := i*dirtyChunk, min((i+1)*dirtyChunk, m.size); off < end; {
			n := min(end-off, most)
			if k := len(ps); k > 0 && ps[k-1].Off+ps[k-1].N == off && ps[k-1].N+n <= most {
				ps[k-1].N += n
			} else {
				ps = append(ps, piece{m: m, ID: m.id, Off: off, N: n})
			}
			off += n
		}
	}
	return ps
}

func anyOf(b []bool) bool {
	for _, x := range b {
		if x {
			return true
		}
	}
	return false
}

// dirtyBytes returns how many bytes an export would move now.
func (s *session) dirtyBytes() uint64 {
	var n uint64
	s.each(func(_ uint32, _ uint64, o any) {
		m, ok := o.(*mem)
		if !ok || m.parent != nil {
			return
		}
		if m.kind == memImage {
			if anyOf(m.dirty) {
				n += m.size
			}
			return
		}
		for i, d := range m.dirty {
			if d {
				n += min(dirtyChunk, m.size-uint64(i)*dirtyChunk)
			}
		}
	})
	return n
}
