package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
)

// Contents go straight from one far executor to another over one connection, in as many
// exports as there are. The source has accepted it, and sends what its carrier asks for; the
// target has connected, and takes what comes until it serves the session. What the
// application has mapped does not come this way: the newest of it is on the application's
// host.

// fetches are the connections of a far executor with others. A source has out, a target has
// in.
type fetches struct {
	out *outlet

	mu   sync.Mutex
	in   net.Conn
	done chan struct{} // closed when nothing is taken from in any more
	over bool          // nothing is fetched any more
}

func newFetches() *fetches { return &fetches{out: newOutlet()} }

// export sends to the far executor that fetches what is not mapped and has changed since the
// last time. After an error the connection is of no more use.
func (x *fetches) export(ctx context.Context, s *session, name string, all, final bool, report progress) error {
	return x.out.use(ctx, outletUse{name: name, patience: remote.GreetTimeout, greet: s.greetStraight}, func(p *peerSink) error {
		return s.export(ctx, "fetch:"+name, all, final, p, report)
	})
}

func (s *session) greetStraight(conn net.Conn) (*peerSink, error) {
	p, err := s.greeted(conn, remote.GreetTimeout)
	if err != nil {
		return nil, fmt.Errorf("the other far executor: %w", err)
	}
	p.unif, p.asks, p.sizes, p.bytes, p.stays, p.some = false, false, true, true, true, unmapped
	return p, nil
}

// begin makes a target take what comes on conn, until end.
func (x *fetches) begin(s *session, conn net.Conn) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.over || x.in != nil {
		conn.Close()
		return fmt.Errorf("nothing more is to be fetched: %w", ErrState)
	}
	x.in, x.done = conn, make(chan struct{})
	go func() {
		defer close(x.done)
		defer conn.Close()
		if err := s.takeStraight(conn); err != nil {
			s.log.Warn("fetch", "err", err)
		}
	}()
	return nil
}

// end ends what is taken, and what could begin to be. When it returns, nothing is written any
// more that came this way.
func (x *fetches) end() {
	x.mu.Lock()
	x.over = true
	in, done := x.in, x.done
	x.mu.Unlock()
	if in != nil {
		in.Close()
		<-done
	}
}

// endFetch is end for any executor.
func (f *farEnd) endFetch() {
	if f != nil {
		f.fetches.end()
	}
}

// dropOutlets ends what is sent on connections that are kept, of any executor.
func (f *farEnd) dropOutlets() {
	if f != nil {
		f.fetches.out.drop()
		f.home.drop()
	}
}

// takeStraight takes batches from another far executor, and acknowledges each when its bytes are in
// the device. The other one decides which bytes of which objects come, and nothing else:
// bytes of an object that is in the arena are read to where it is, those of others to a
// window of this executor.
func (s *session) takeStraight(conn net.Conn) error {
	greeting := binary.LittleEndian.AppendUint32(nil, importMagic)
	if _, err := conn.Write(append(greeting, 0, 0, 0, 0)); err != nil {
		return err
	}
	from := remote.NewReader(conn)
	acks, acknowledged := acknowledge(conn, func(error) { conn.Close() }) // the reader ends, too
	defer func() {
		acknowledged()
		s.mu.Lock()
		s.closeWindow()
		s.mu.Unlock()
	}()
	var busy [windowDepth]chan struct{} // by chunk of the window: the batch that was there last
	for n := 0; ; n++ {
		pieces, err := readBatch(from)
		if err != nil || pieces == nil {
			return err
		}
		chunk := n % windowDepth
		if busy[chunk] != nil {
			<-busy[chunk]
		}
		b := landing{done: make(chan struct{})}
		busy[chunk] = b.done
		at := uint64(chunk) * windowChunk
		end := at + windowChunk
		for ; err == nil && len(pieces) > 0; pieces = pieces[40:] {
			at, err = s.takePiece(from, pieces[:40], at, end, &b)
		}
		if err != nil {
			b.st = cl.OutOfResources
		}
		acks <- b // also with an error: its events are waited for
		if err != nil {
			return err
		}
	}
}

// readBatch reads the places of a batch of contents; nil: there are no more.
func readBatch(from io.Reader) ([]byte, error) {
	var head [8]byte
	if _, err := io.ReadFull(from, head[:]); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
			return nil, nil
		}
		return nil, err
	}
	n := binary.LittleEndian.Uint64(head[:])
	if n == 0 || n > batchPieces {
		return nil, fmt.Errorf("batch of %d pieces: %w", n, errHostile)
	}
	b := make([]byte, 40*n)
	_, err := io.ReadFull(from, b)
	return b, err
}

// takePiece takes one piece. at is where the window is free, up to end; what is left of it
// is returned.
func (s *session) takePiece(from io.Reader, b []byte, at, end uint64, l *landing) (uint64, error) {
	p := piece{Off: le64(b[8:]), N: le64(b[16:])}
	id, n := le64(b), le64(b[32:])
	if p.ID = uint32(id); uint64(p.ID) != id || n == 0 || n > windowChunk {
		return at, fmt.Errorf("%d bytes of object %d: %w", n, id, errHostile)
	}
	object := func() *mem { // the caller holds s.mu
		m := lookup[mem](s, p.ID)
		if m == nil || m.parent != nil || m.vendor == 0 {
			return nil
		}
		return m
	}
	s.mu.Lock()
	active := s.active.Load()
	p.m = object()
	fits := p.m != nil && p.fits() && p.bytes() == n
	unified := fits && p.m.unified
	if unified {
		p.ptr = s.arena.Pointer(p.m.arena + p.Off)
	}
	s.mu.Unlock()
	switch {
	case active:
		return at, fmt.Errorf("contents for an executor that serves the session: %w", ErrState)
	case p.m == nil: // released in the meantime: the next graph does not have it
		_, err := io.CopyN(io.Discard, from, int64(n))
		return at, err
	case !fits:
		return at, fmt.Errorf("object %d has no bytes %d at %d: %w", p.ID, p.N, p.Off, errHostile)
	case !unified:
		if n > end-at {
			return at, fmt.Errorf("a batch of more than %d bytes: %w", windowChunk, errHostile)
		}
		if err := s.openWindow(windowChunk * windowDepth); err != nil {
			return at, err
		}
		p.ptr = s.arena.Pointer(s.window + at)
		at = min(at+p.padded(), end)
	}
	if _, err := io.ReadFull(from, unsafe.Slice((*byte)(p.ptr), n)); err != nil {
		return at, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.active.Load():
		return at, fmt.Errorf("contents for an executor that serves the session: %w", ErrState)
	case unified || object() != p.m: // it is there already, or was released
		return at, nil
	}
	ev, err := s.take(&p)
	if err != nil {
		return at, err
	}
	if ev != 0 {
		l.evs = append(l.evs, ev)
	}
	return at, nil
}
