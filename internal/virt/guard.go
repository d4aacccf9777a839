package virt

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"github.com/digitalocean/go-libvirt"
)

// guard is a connection to libvirtd that passes on only what go-libvirt can process.
// go-libvirt allocates as much memory as a length says, panics if it is negative, blocks
// for ever if a call is answered twice, and takes an error without a code for success. So
// each frame is first read as a whole and checked: its size, that it answers a waiting
// call, and that its body has the form of such an answer. In the code of an error it marks
// which part of libvirt the error is from. Events are not passed to go-libvirt, which cannot
// decode all of them, but to event.
type guard struct {
	net.Conn
	event func(proc uint32, payload []byte) // called by the reading goroutine; may be nil

	// returned is closed when go-libvirt's ConnectToURI has returned. Until then, nothing
	// is read after the answer to its last call: if go-libvirt noticed the connection's
	// end at that moment, it would have a data race.
	returned chan struct{}
	opened   bool   // used by the reading goroutine only
	in       []byte // checked, but not yet read; used by the reading goroutine only

	mu      sync.Mutex
	head    [headerLen]byte // header of the frame being written
	headLen int
	skip    int               // remaining bytes of its body
	frames  int               // number of frames of which a byte was written
	waiting map[uint32]uint32 // procedure by serial
	err     error             // why the connection has ended
	dead    chan struct{}
}

func newGuard(conn net.Conn, event func(uint32, []byte)) *guard {
	return &guard{
		Conn: conn, event: event,
		returned: make(chan struct{}), dead: make(chan struct{}), waiting: map[uint32]uint32{},
	}
}

// end closes the connection for a reason. The first reason is kept.
func (g *guard) end(why error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = why
		close(g.dead)
		g.Conn.Close()
	}
}

// Close ends the connection.
func (g *guard) Close() error {
	g.end(net.ErrClosed)
	return nil
}

// why returns why the connection has ended, or nil.
func (g *guard) why() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

// written returns how many frames have at least begun to be sent.
func (g *guard) written() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.frames
}

// Write records which calls are sent.
func (g *guard) Write(p []byte) (int, error) {
	if err := g.note(p); err != nil {
		return 0, err
	}
	n, err := g.Conn.Write(p)
	if err != nil {
		g.end(fmt.Errorf("%w: %w", ErrDisconnected, err))
	}
	return n, err
}

func (g *guard) note(p []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return g.err
	}
	for len(p) > 0 {
		if g.skip > 0 {
			n := min(g.skip, len(p))
			g.skip, p = g.skip-n, p[n:]
			continue
		}
		if g.headLen == 0 {
			g.frames++
		}
		n := copy(g.head[g.headLen:], p)
		g.headLen, p = g.headLen+n, p[n:]
		if g.headLen == headerLen {
			h := parseHeader(g.head[:])
			g.skip, g.headLen = max(0, int(h.length)-headerLen), 0
			g.waiting[h.serial] = h.procedure
		}
	}
	return nil
}

// Read returns the bytes of checked frames.
func (g *guard) Read(p []byte) (int, error) {
	for len(g.in) == 0 {
		if g.opened {
			<-g.returned
		}
		frame, err := g.next()
		if err != nil {
			if !errors.Is(err, ErrProtocol) {
				err = fmt.Errorf("%w: %w", ErrDisconnected, err)
			}
			g.end(err)
			return 0, io.EOF
		}
		g.in = frame
	}
	n := copy(p, g.in)
	g.in = g.in[n:]
	return n, nil
}

type header struct {
	length, program, version, procedure, kind, serial, status uint32
}

func parseHeader(b []byte) header {
	word := func(i int) uint32 { return binary.BigEndian.Uint32(b[4*i:]) }
	return header{word(0), word(1), word(2), word(3), word(4), word(5), word(6)}
}

// next reads one frame, and returns it if it is for go-libvirt.
func (g *guard) next() ([]byte, error) {
	head := make([]byte, headerLen)
	if _, err := io.ReadFull(g.Conn, head[:4]); err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(head)
	if length < headerLen || length > maxFrame {
		return nil, fmt.Errorf("%w: a message of %d bytes", ErrProtocol, length)
	}
	if _, err := io.ReadFull(g.Conn, head[4:]); err != nil {
		return nil, noEOF(err)
	}
	h := parseHeader(head)
	frame := head
	if length > headerLen {
		frame = make([]byte, length)
		copy(frame, head)
		if _, err := io.ReadFull(g.Conn, frame[headerLen:]); err != nil {
			return nil, noEOF(err)
		}
	}
	body := frame[headerLen:]
	switch {
	case h.kind == frameMessage:
		if h.program == remoteProgram && g.event != nil {
			g.event(h.procedure, body)
		}
		return nil, nil
	case h.kind != frameReply || h.program != remoteProgram || h.version != 1:
		return nil, fmt.Errorf("%w: message of kind %d, program %#x, version %d", ErrProtocol, h.kind, h.program, h.version)
	}
	if err := g.reply(h, body); err != nil {
		return nil, fmt.Errorf("%w: answer to procedure %d: %w", ErrProtocol, h.procedure, err)
	}
	g.opened = g.opened || h.procedure == procOpen && h.status == statusOK
	return frame, nil
}

// reply checks an answer.
func (g *guard) reply(h header, body []byte) error {
	g.mu.Lock()
	proc, ok := g.waiting[h.serial]
	delete(g.waiting, h.serial)
	g.mu.Unlock()
	if !ok || proc != h.procedure {
		return fmt.Errorf("no call %d waits for it", h.serial)
	}
	switch h.status {
	case statusOK:
		s, ok := shape(proc)
		if !ok {
			return errors.New("it is none of gpuctl's")
		}
		return follows(body, s)
	case statusError:
		if err := follows(body, shapeError); err != nil {
			return err
		}
		x := &xdr{b: body}
		code, from, text := x.uint32(), x.uint32(), x.uint32()
		if code == 0 || text == 0 {
			return errors.New("an error without code or text")
		}
		binary.BigEndian.PutUint32(body, mark(code, from))
		return nil
	default:
		return fmt.Errorf("status %d", h.status)
	}
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// given is a go-libvirt dialer that returns an existing connection.
type given struct{ net.Conn }

func (d given) Dial() (net.Conn, error) { return d.Conn, nil }

// link is a connection over which libvirt was opened.
type link struct {
	*guard
	rpc *libvirt.Libvirt
}
