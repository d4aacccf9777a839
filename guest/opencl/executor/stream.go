package executor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unsafe"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/statestream"
)

// A session's contents leave the VM as a stream: a head, then for each piece its position
// and its bytes, then a tail with the number of pieces. Nothing is read twice, and only two
// small chunks of the window are used: if the VM had memory for the state, the session
// would be suspended in the VM. Package guest/statestream makes sure that what is received
// is what was sent. Here it is checked that it fits the objects, because a vendor's library
// does not check that.

const (
	streamMagic = 0x315453584c435047
	streamHead  = 32 // bytes of a piece's position, and of head and tail
	streamChunk = 4 << 20
	streamDepth = 2
)

// streamSink is a sink that writes a stream.
type streamSink struct {
	s      *session
	w      io.Writer
	next   uint64 // the next chunk of the window
	pieces uint64
}

func (o *streamSink) knows(uint32, uint64, *mem) bool { return true }

func (o *streamSink) takes(bool) bool { return true }

func (o *streamSink) shares() bool      { return false }
func (o *streamSink) inPlace(*mem) bool { return false }
func (o *streamSink) close() error      { return nil }
func (o *streamSink) chunk() uint64     { return streamChunk }

// place makes the device write into the next chunk of the window. The former bytes of that
// chunk were sent, because accept returns only after that.
func (o *streamSink) place(ps []piece) error {
	if err := o.s.openWindow(streamChunk * streamDepth); err != nil {
		return err
	}
	at := o.s.window + o.next%streamDepth*streamChunk
	o.next++
	for i := range ps {
		x := &ps[i]
		if x.m.unified {
			x.ptr = o.s.arena.Pointer(x.m.arena + x.Off)
			continue
		}
		x.ptr = o.s.arena.Pointer(at)
		at += x.padded()
	}
	return nil
}

func (o *streamSink) accept(ps []piece) error {
	for i := range ps {
		x := &ps[i]
		if err := o.head(uint64(x.ID), x.Off, x.N, x.bytes()); err != nil {
			return err
		}
		if _, err := o.w.Write(unsafe.Slice((*byte)(x.ptr), x.bytes())); err != nil {
			return err
		}
		o.pieces++
	}
	return nil
}

func (o *streamSink) head(v ...uint64) error {
	b := make([]byte, 0, streamHead)
	for _, x := range v {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	_, err := o.w.Write(b)
	return err
}

// Send streams the contents of the frozen session.
func (c *controller) Send(ctx context.Context, _ *connect.Request[gpuctlv1.SendRequest], out *connect.ServerStream[gpuctlv1.StateChunk]) error {
	c.op.Lock()
	defer c.op.Unlock()
	s := c.s
	defer s.does("contents are being read")()
	if !s.isFrozen() {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("send the contents of a running session: %w", ErrState))
	}
	if err := s.send(ctx, statestream.NewWriter(out.Send)); err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	return nil
}

// send writes all contents. They also stay here until the session ends.
func (s *session) send(ctx context.Context, w *statestream.Writer) error {
	s.dropState()
	o := &streamSink{s: s, w: w}
	if err := o.head(streamMagic, 0, 0, 0); err != nil {
		return err
	}
	if err := s.export(ctx, "away", true, true, o, func(string, uint64, uint64) {}); err != nil {
		return err
	}
	if err := o.head(0, o.pieces, 0, 0); err != nil {
		return err
	}
	if _, err := w.End(""); err != nil {
		return err
	}
	s.mu.Lock()
	s.sent = true
	s.mu.Unlock()
	return nil
}

// Receive reads a stream into the prepared objects.
func (c *controller) Receive(_ context.Context, in *connect.ClientStream[gpuctlv1.StateChunk]) (*connect.Response[gpuctlv1.ReceiveResponse], error) {
	c.op.Lock()
	defer c.op.Unlock()
	s := c.s
	defer s.does("contents are being loaded")()
	if s.active.Load() || !s.prepared {
		return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("receive into an executor that is not prepared: %w", ErrState))
	}
	n, err := s.receiveState(statestream.NewReader(func() (*gpuctlv1.StateChunk, error) {
		if !in.Receive() {
			return nil, errors.Join(in.Err(), io.EOF)
		}
		return in.Msg(), nil
	}))
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&gpuctlv1.ReceiveResponse{Bytes: n}), nil
}

// receiveState puts the pieces of a stream into their objects as they arrive. If it fails,
// this executor's objects are incomplete and must not be used.
func (s *session) receiveState(r io.Reader) (total uint64, err error) {
	var fly [streamDepth][]cl.Event
	defer func() {
		for _, evs := range fly {
			await(evs)
		}
		s.mu.Lock()
		s.closeWindow()
		s.mu.Unlock()
	}()
	if err := s.openWindow(streamChunk * streamDepth); err != nil {
		return 0, err
	}
	var head [streamHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, fmt.Errorf("head of the state: %w", err)
	}
	if le64(head[:]) != streamMagic {
		return 0, fmt.Errorf("%w: it begins otherwise", errState)
	}
	came := map[*mem]uint64{}
	for pieces := uint64(0); ; pieces++ {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return total, fmt.Errorf("piece %d of the state: %w", pieces, err)
		}
		p := piece{Off: le64(head[8:]), N: le64(head[16:])}
		if id := le64(head[:]); id == 0 {
			if p.Off != pieces {
				return total, fmt.Errorf("%w: %d pieces of %d", errState, pieces, p.Off)
			}
			break
		} else if p.ID = uint32(id); uint64(p.ID) != id {
			return total, fmt.Errorf("%w: object %d", errState, id)
		}
		slot := pieces % streamDepth
		st := await(fly[slot])
		fly[slot] = nil
		if st != cl.Success {
			return total, fmt.Errorf("write contents: %w", st)
		}
		s.mu.Lock()
		p.m = lookup[mem](s, p.ID)
		// The number of bytes of a piece that fits cannot overflow.
		ok := p.m != nil && p.m.parent == nil && p.fits() && p.bytes() > 0 && p.bytes() == le64(head[24:]) && p.bytes() <= streamChunk
		s.mu.Unlock()
		if !ok {
			return total, fmt.Errorf("%w: object %d has no bytes %d at %d", errState, p.ID, p.N, p.Off)
		}
		b := s.arenaBytes(s.window+slot*streamChunk, p.bytes())
		if _, err := io.ReadFull(r, b); err != nil {
			return total, fmt.Errorf("object %d: %w", p.ID, err)
		}
		p.ptr = unsafe.Pointer(&b[0])
		s.mu.Lock()
		ev, err := s.take(&p)
		s.mu.Unlock()
		if err != nil {
			return total, err
		}
		if ev != 0 {
			fly[slot] = []cl.Event{ev}
		}
		came[p.m] += p.bytes()
		total += p.bytes()
	}
	if n, err := r.Read(head[:1]); n != 0 || !errors.Is(err, io.EOF) {
		return total, fmt.Errorf("end of the state: %w", errors.Join(err, errState))
	}
	if err := s.missing(came); err != nil {
		return total, err
	}
	for i, evs := range fly {
		fly[i] = nil
		if st := await(evs); st != cl.Success {
			return total, fmt.Errorf("write contents: %w", st)
		}
	}
	return total, nil
}

// missing returns an error for an object of which a part or everything has not arrived.
func (s *session) missing(came map[*mem]uint64) (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.each(func(id uint32, _ uint64, o any) {
		if m, ok := o.(*mem); ok && m.parent == nil && m.vendor != 0 && came[m] != m.content() {
			err = fmt.Errorf("%w: %d bytes of %d of object %d", errState, came[m], m.content(), id)
		}
	})
	return err
}

// content returns the number of bytes of an object's content.
func (m *mem) content() uint64 {
	if m.kind == memImage {
		return m.rows() * m.rowBytes()
	}
	return m.size
}
