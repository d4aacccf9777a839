package executor

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"

	"github.com/gpuctl/gpuctl/guest/handover"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// serveImports receives contents from the executor that serves the session now.
func (s *session) serveImports(l net.Listener) {
	for {
		conn, err := handover.Accept(l.Accept)
		if err != nil {
			return
		}
		if err := s.receive(conn, 32); err != nil {
			s.log.Error("import", "err", err)
		}
		conn.Close()
	}
}

// landing is a batch whose bytes are in this process, but perhaps not in the device yet.
type landing struct {
	evs  []cl.Event
	st   cl.Status
	done chan struct{} // closed when they are; nil: nobody waits for that
}

// acknowledge answers each batch when its bytes are in the device. failed is called when an
// answer cannot be sent. end returns when all batches are answered.
func acknowledge(conn io.Writer, failed func(error)) (acks chan<- landing, end func()) {
	all := make(chan landing, 64)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for l := range all {
			st := l.st
			if x := await(l.evs); st == cl.Success {
				st = x
			}
			if l.done != nil {
				close(l.done)
			}
			var b [4]byte
			binary.LittleEndian.PutUint32(b[:], uint32(int32(st)))
			if _, err := conn.Write(b[:]); err != nil {
				failed(err)
			}
		}
	}()
	return all, func() {
		close(all)
		<-gone
	}
}

// receive takes batches from one connection, and acknowledges each when its bytes are in
// the device. Batches overlap. A piece has size bytes: 32, or 40 if the bytes themselves
// follow the batch, from another host, which may use the connection for several exports.
func (s *session) receive(conn io.ReadWriter, size int) error {
	hello := binary.LittleEndian.AppendUint32(nil, importMagic)
	hello = append(hello, 0, 0, 0, 0)
	if s.unified {
		hello[helloUnified] = 1
	}
	if s.pins.wanted {
		hello[helloWindow] = 1
	}
	if size == 40 {
		hello[helloStays] = 1
	}
	if _, err := conn.Write(hello); err != nil {
		return err
	}
	from := io.Reader(conn)
	if size == 40 {
		from = remote.NewReader(conn)
	}
	acks, end := acknowledge(conn, func(err error) { s.log.Warn("import", "err", err) })
	defer end()
	for {
		var head [8]byte
		if _, err := io.ReadFull(from, head[:]); err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		n := binary.LittleEndian.Uint64(head[:])
		if n == 0 && hello[helloWindow] != 0 {
			var at [24]byte
			if _, err := io.ReadFull(from, at[:]); err != nil {
				return err
			}
			if err := s.pinPeerWindow(peerWindow{span{le64(at[:]), le64(at[8:])}, le64(at[16:])}); err != nil {
				return err
			}
			continue
		}
		if n == 0 || n > batchPieces {
			return fmt.Errorf("batch of %d pieces: %w", n, errHostile)
		}
		b := make([]byte, size*int(n))
		if _, err := io.ReadFull(from, b); err != nil {
			return err
		}
		if size == 40 {
			var err error
			if b, err = s.takeBytes(from, b); err != nil {
				return err
			}
		}
		acks <- s.land(b)
	}
}

// takeBytes reads the bytes of a batch to where its pieces say, and returns the batch without
// sizes.
func (s *session) takeBytes(conn io.Reader, b []byte) ([]byte, error) {
	out := make([]byte, 0, len(b)/40*32)
	for ; len(b) > 0; b = b[40:] {
		at, n := le64(b[24:]), le64(b[32:])
		if _, ok := s.arenaRange(at, n); !ok || at+n > s.split {
			return nil, fmt.Errorf("%d bytes at %#x: %w", n, at, errHostile)
		}
		if _, err := io.ReadFull(conn, s.arenaBytes(at, n)); err != nil {
			return nil, err
		}
		out = append(out, b[:32]...)
	}
	return out, nil
}

func (s *session) land(b []byte) landing {
	s.mu.Lock()
	defer s.mu.Unlock()
	var l landing
	for ; len(b) > 0; b = b[32:] {
		p := piece{ID: uint32(le64(b)), Off: le64(b[8:]), N: le64(b[16:]), At: le64(b[24:])}
		p.m = lookup[mem](s, p.ID)
		if p.m == nil {
			continue // released in the meantime: the next graph does not have it
		}
		if !p.fits() {
			return landing{evs: l.evs, st: cl.InvalidValue}
		}
		ptr, ok := s.arenaRange(p.At, p.bytes())
		if !ok {
			return landing{evs: l.evs, st: cl.InvalidValue}
		}
		p.ptr = ptr
		ev, err := s.take(&p)
		if err != nil {
			s.log.Error("import", "err", err)
			return landing{evs: l.evs, st: cl.OutOfResources}
		}
		if ev != 0 {
			l.evs = append(l.evs, ev)
		}
	}
	return l
}

// peerWindow is a source's window that is pinned here, too. If its size is 0, there is
// none. number distinguishes one window from another at the same place.
type peerWindow struct {
	span
	number uint64
}

// pinPeerWindow pins the source's window in this process, too. The source does not free its
// pages until this executor serves the session or is given up.
func (s *session) pinPeerWindow(at peerWindow) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.arenaRange(at.Off, at.Size); !ok || at.Size > windowChunk*windowDepth || s.active.Load() {
		return fmt.Errorf("window of %d bytes at %#x: %w", at.Size, at.Off, errHostile)
	}
	if s.peerWindow != at {
		s.unpinPeerWindow()
		s.peerWindow = at
	}
	for _, c := range s.contexts() {
		s.pins.add(c, at.Off, at.Size)
	}
	return nil
}

// unpinPeerWindow removes the pin of the source's window, before the source frees the
// pages. The caller holds s.mu.
func (s *session) unpinPeerWindow() {
	if s.peerWindow.Size > 0 {
		s.pins.drop(s.peerWindow.Off, s.peerWindow.Size)
		s.peerWindow = peerWindow{}
	}
}

// fits reports whether a piece fits its object.
func (p *piece) fits() bool {
	if p.m.kind == memImage {
		rows := p.m.rows()
		return p.N > 0 && p.Off <= rows && p.N <= rows-p.Off
	}
	return p.N > 0 && p.Off <= p.m.size && p.N <= p.m.size-p.Off
}

func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }
