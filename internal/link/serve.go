package link

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"
)

// heard is a connection that counts what was heard.
type heard struct {
	net.Conn
	n      atomic.Int64
	taking atomic.Bool // the handler has a frame, and nobody listens
}

func (h *heard) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	h.n.Add(int64(n))
	return n, err
}

// Serve uses a connection until it is broken, the context ends, or the stream does; then it
// closes it. It takes the place of a connection that is served already. Frames of the peer go
// to handle one after the other; what they refer to is the handler's. A handler must not
// wait for Send: the acknowledgements that make room come after it. Its error ends the
// stream. Serve returns ErrBroken, the context's error or the stream's.
func (s *Stream) Serve(ctx context.Context, conn net.Conn, handle func(Frame) error) error {
	defer conn.Close()
	s.mu.Lock()
	s.cut()
	s.mu.Unlock()
	s.serving.Lock()
	defer s.serving.Unlock()

	c := &heard{Conn: conn}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	err := s.greet(c)
	if err == nil {
		err = s.read(c, handle)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == c {
		s.cut()
	}
	switch {
	case s.err != nil:
		return s.err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return err
}

// greet agrees with the peer on where each goes on.
func (s *Stream) greet(c *heard) error {
	_ = c.SetDeadline(time.Now().Add(s.o.Silence))
	s.mu.Lock()
	hello := newHello(s.o.ID, s.taken+1)
	s.mu.Unlock()
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(hello)
		wrote <- err
	}()
	var b [helloSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		_ = c.Close()
		<-wrote
		return fmt.Errorf("%w: hello: %w", ErrBroken, err)
	}
	if err := <-wrote; err != nil {
		return fmt.Errorf("%w: hello: %w", ErrBroken, err)
	}
	expected, err := parseHello(b[:], s.o.ID)
	if err != nil {
		return s.fail(err)
	}
	_ = c.SetDeadline(time.Time{})

	s.mu.Lock()
	for s.writing { // to the former connection, which is closed
		s.changed.Wait()
	}
	if s.err != nil {
		s.mu.Unlock()
		return s.err
	}
	if expected < s.first || expected == 0 {
		err = fmt.Errorf("frame %d is expected, which was acknowledged: %w", expected, ErrProtocol)
	} else {
		err = s.acknowledge(expected - 1)
	}
	if err != nil {
		s.mu.Unlock()
		return s.fail(err)
	}
	s.conn, s.written, s.said, s.unsaid = c, expected, s.taken, 0
	s.flushAside()
	s.mu.Unlock()
	if s.o.Greeted != nil {
		s.o.Greeted()
	}
	return nil
}

func (s *Stream) fail(err error) error {
	s.end(err)
	return err
}

func (s *Stream) read(c *heard, handle func(Frame) error) error {
	over := make(chan struct{})
	defer close(over)
	go s.listen(c, over)
	in := bufio.NewReaderSize(c, 64<<10)
	var hb [headerSize]byte
	for {
		if _, err := io.ReadFull(in, hb[:]); err != nil {
			return fmt.Errorf("%w: %w", ErrBroken, err)
		}
		h, err := parseHeader(hb[:])
		if err != nil {
			return s.fail(err)
		}
		s.mu.Lock()
		err = s.acknowledge(h.ack)
		expected := s.taken + 1
		s.mu.Unlock()
		switch {
		case err != nil:
		case h.number == 0:
			continue
		case h.number != expected:
			err = fmt.Errorf("frame %d came, %d is expected: %w", h.number, expected, ErrProtocol)
		case int64(h.head) > int64(s.o.MaxHead) || int64(h.body) > int64(s.o.MaxBody):
			err = fmt.Errorf("frame %d has %d and %d bytes, %d and %d are allowed: %w", h.number, h.head, h.body, s.o.MaxHead, s.o.MaxBody, ErrProtocol)
		}
		if err != nil {
			return s.fail(err)
		}
		f, err := s.contents(in, h)
		if errors.Is(err, ErrBroken) {
			return err
		}
		if err == nil {
			c.taking.Store(true)
			err = handle(f)
			c.taking.Store(false)
		}
		if err != nil {
			return s.fail(fmt.Errorf("frame %d of kind %d: %w", h.number, h.kind, err))
		}
		s.took(headerSize + int(h.head) + int(h.body))
	}
}

// contents reads a frame behind its header.
func (s *Stream) contents(in io.Reader, h header) (Frame, error) {
	f := Frame{Kind: h.kind, Head: make([]byte, h.head)}
	if _, err := io.ReadFull(in, f.Head); err != nil {
		return f, fmt.Errorf("%w: %w", ErrBroken, err)
	}
	if h.body == 0 {
		return f, nil
	}
	if s.o.Place == nil {
		f.Body = make([]byte, h.body)
	} else {
		var err error
		if f.Body, err = s.o.Place(h.kind, f.Head, int(h.body)); err != nil {
			return f, err
		}
		if len(f.Body) != int(h.body) {
			return f, fmt.Errorf("%d bytes are the place of %d", len(f.Body), h.body)
		}
	}
	if _, err := io.ReadFull(in, f.Body); err != nil {
		return f, fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return f, nil
}

// took notes that the handler has taken a frame of n bytes.
func (s *Stream) took(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken++
	s.unsaid += n
	if s.unsaid >= min(s.o.Unacked/4, 1<<20) {
		s.say = true
		s.flushAside()
		return
	}
	switch {
	case s.ackTimer == nil:
		s.ackTimer = time.AfterFunc(ackDelay, s.ackLate)
	case !s.ackDue:
		s.ackTimer.Reset(ackDelay)
	}
	s.ackDue = true
}

// ackLate acknowledges what no frame has gone with.
func (s *Stream) ackLate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ackDue = false
	if s.said != s.taken {
		s.say = true
		s.flushAside()
	}
}

// listen closes the connection when nothing was heard for too long, and lets the peer hear
// something.
func (s *Stream) listen(c *heard, over <-chan struct{}) {
	tick := time.NewTicker(s.o.Silence / 3)
	defer tick.Stop()
	last, silent := c.n.Load(), 0
	for {
		select {
		case <-over:
			return
		case <-tick.C:
		}
		if n := c.n.Load(); n != last || c.taking.Load() {
			last, silent = n, 0
		} else if silent++; silent >= 3 {
			_ = c.Close()
			return
		}
		s.mu.Lock()
		if s.conn == c {
			s.ping = true
			s.flushAside()
		}
		s.mu.Unlock()
	}
}

// flush passes frames to the connection until frame upTo has been passed, unless somebody
// does so already. A goroutine passes what others have added meanwhile. The caller holds
// s.mu, which is free while it writes.
func (s *Stream) flush(upTo uint64) {
	if s.writing {
		return
	}
	s.writing = true
	for s.due() && s.written <= upTo {
		s.pass()
	}
	s.writing = false
	s.flushAside()
	s.changed.Broadcast()
}

// flushAside is flush for a caller that must not wait for the connection. The caller holds
// s.mu.
func (s *Stream) flushAside() {
	if s.writing || !s.due() {
		return
	}
	s.writing = true
	go func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for s.due() {
			s.pass()
		}
		s.writing = false
		s.changed.Broadcast()
	}()
}

// due reports whether there is something to write. The caller holds s.mu.
func (s *Stream) due() bool {
	return s.conn != nil && s.err == nil && (s.written < s.next() || s.say || s.ping)
}

// pass writes a batch. The caller holds s.mu, which is free meanwhile, and has set s.writing.
func (s *Stream) pass() {
	c, out := s.conn, s.batch()
	s.mu.Unlock()
	var err error
	if w, ok := c.Conn.(BuffersWriter); ok {
		_, err = w.WriteBuffers(&out)
	} else {
		_, err = out.WriteTo(c.Conn)
	}
	s.mu.Lock()
	if err != nil && s.conn == c {
		s.cut() // its reader finds it closed
	}
}

// batch takes what is written next. The caller holds s.mu.
func (s *Stream) batch() net.Buffers {
	var out net.Buffers
	var small []byte
	size := 0
	for ; s.written < s.next() && size < batchBytes; s.written++ {
		k := s.kept[s.written-s.first]
		binary.LittleEndian.PutUint64(k.small[8:], s.taken)
		small = append(small, k.small...)
		size += len(k.small) + len(k.large)
		if k.large != nil {
			out = append(out, small, k.large)
			small = nil
		}
	}
	if size == 0 {
		h := header{ack: s.taken}
		small = h.appendTo(small)
	}
	s.said, s.unsaid, s.say, s.ping = s.taken, 0, false, false
	if s.written == s.next() {
		s.unwritten = 0
	}
	if small != nil {
		out = append(out, small)
	}
	return out
}
