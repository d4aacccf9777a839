package vchan

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
)

// heap is a domain whose pages are of this program's memory and say what a fuzzer
// likes.
type heap struct {
	page []byte
	open int
}

func (h *heap) Grant(uint16, int) (Memory, error)            { return nil, errors.ErrUnsupported }
func (h *heap) BindUnbound(uint16) (Port, error)             { return nil, errors.ErrUnsupported }
func (h *heap) BindInterdomain(uint16, uint32) (Port, error) { h.open++; return &heapPort{h}, nil }

func (h *heap) Map(_ uint16, refs []uint32, _ bool) (Memory, error) {
	h.open++
	if len(refs) == 1 && refs[0] == 1 {
		return &heapMemory{h, h.page}, nil
	}
	return &heapMemory{h, make([]byte, pageSize*len(refs))}, nil
}

type heapMemory struct {
	h     *heap
	bytes []byte
}

func (m *heapMemory) Bytes() []byte                   { return m.bytes }
func (m *heapMemory) Refs() []uint32                  { return nil }
func (m *heapMemory) NotifyOnUnmap(int, uint32) error { return nil }
func (m *heapMemory) Close() error                    { m.h.open--; return nil }
func (m *heapMemory) Abandon()                        {}

type heapPort struct{ h *heap }

func (p *heapPort) Number() uint32 { return 1 }
func (p *heapPort) Wait() error    { return os.ErrClosed }
func (p *heapPort) Notify() error  { return nil }
func (p *heapPort) Close() error   { p.h.open--; return nil }
func (p *heapPort) Abandon()       {}

// FuzzConn dials a page that says anything and then lets the peer change it
// between reads and writes: two bytes of a script name an offset to change, one a
// length to move.
func FuzzConn(f *testing.F) {
	page := make([]byte, 64)
	binary.LittleEndian.PutUint32(page[offOrders:], 12|11<<16)
	binary.LittleEndian.PutUint32(page[offState:], expected|alive<<shiftServerLive)
	f.Add(page, []byte{0, 1, 2, 0, 0, 9, 200, 12, 0, 7, 3})
	binary.LittleEndian.PutUint32(page[offOrders:], 10|11<<16)
	f.Add(page, []byte("some more of it, to and fro"))
	f.Fuzz(func(t *testing.T, in, script []byte) {
		h := &heap{page: make([]byte, pageSize)}
		copy(h.page, in)
		c, err := join(Addr{}, h, 1, 1)
		if err != nil {
			if !errors.Is(err, ErrProtocol) && !errors.Is(err, ErrNoServer) {
				t.Error(err)
			}
			if h.open != 0 {
				t.Errorf("%d things are still open", h.open)
			}
			return
		}
		p := make([]byte, 300*16)
		for len(script) >= 4 {
			at, v, n := int(binary.LittleEndian.Uint16(script))%(pageSize/4)*4, uint32(script[2]), int(script[3])*16
			script = script[4:]
			atomic.AddUint32(word(h.page, at), v*2654435761>>20)
			for _, err := range []error{
				second(c.step(&c.in, p[:n], (*half).ready, (*half).read, wishWritten, wishRead)),
				second(c.step(&c.out, p[:n], (*half).space, (*half).write, wishRead, wishWritten)),
			} {
				if err != nil && !errors.Is(err, ErrProtocol) && !errors.Is(err, ErrDied) && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, io.EOF) {
					t.Error(err)
				}
			}
		}
		_ = c.Close()
		if h.open != 0 {
			t.Errorf("%d things are still open", h.open)
		}
	})
}

func second(_ int, err error) error { return err }
