package compress

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// What is sent is cut into packets. Each begins with its size in bytes and, if it is
// compressed, the number of bytes that it expands to, which is more; otherwise 0. Both are u32,
// little-endian.
const (
	headerSize  = 8
	smallPiece  = 4 << 10 // bytes; a first piece of that size goes with the header
	leastAlways = 64      // bytes of a piece that is compressed always
	readBuffer  = 64 << 10
)

// Counts is what connections have sent, in bytes. Several may have the same.
type Counts struct {
	Plain atomic.Uint64 // as they were
	Long  atomic.Uint64 // compressed: before, and
	Short atomic.Uint64 // after
}

// Options of a connection.
type Options struct {
	Meter  Meter   // nil: nothing is compressed
	Always bool    // what can be compressed is, however fast the connection is: for tests
	Counts *Counts // nil: nobody counts
}

// Conn sends and receives packets. One goroutine reads at a time.
type Conn struct {
	net.Conn
	always bool
	counts *Counts

	mu    sync.Mutex
	judge judge
	short *shortener
	small []byte
	run   net.Buffers // pieces that go as they are
	size  int         // their bytes

	in     *bufio.Reader
	left   int    // bytes of a packet that is not compressed
	ready  []byte // that were expanded
	packet []byte
	expand *expander
}

// New returns a connection over conn. The other end must have one, too.
func New(conn net.Conn, o Options) *Conn {
	c := &Conn{Conn: conn, always: o.Always, counts: o.Counts, in: bufio.NewReaderSize(conn, readBuffer)}
	if c.counts == nil {
		c.counts = &Counts{}
	}
	c.judge = judge{meter: o.Meter, now: time.Now, left: mostTrust}
	return c
}

// Rates returns what the decision goes by, in bytes a second: how fast the connection is, and
// how fast compressing is. 0: it is not known.
func (c *Conn) Rates() (link, speed float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.judge.meter != nil {
		link = c.judge.meter.Rate()
	}
	return link, c.judge.speed
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (int, error) {
	n, err := c.WriteBuffers(&net.Buffers{b})
	return int(n), err
}

// buffersWriter is a connection that writes several pieces at once. It may change the slice,
// but not the pieces.
type buffersWriter interface {
	WriteBuffers(v *net.Buffers) (int64, error)
}

// WriteBuffers implements link.BuffersWriter.
func (c *Conn) WriteBuffers(v *net.Buffers) (n int64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { clear(c.run); c.run, c.size = c.run[:0], 0 }()
	for _, b := range *v {
		n += int64(len(b))
		for len(b) > 0 {
			part := b[:min(len(b), mostLong)]
			b = b[len(part):]
			short, err := c.shorter(part)
			if err != nil {
				return 0, err
			}
			if short == nil {
				c.run = append(c.run, part)
				c.size += len(part)
				continue
			}
			if err := c.send(len(part), short); err != nil {
				return 0, err
			}
		}
	}
	if c.size > 0 {
		err = c.send(0, nil)
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

// shorter returns a piece compressed, or nil if it goes as it is.
func (c *Conn) shorter(b []byte) ([]byte, error) {
	if c.judge.meter == nil && !c.always || len(b) < leastAlways {
		return nil, nil
	}
	if c.short == nil {
		if !c.always && (len(b) < leastLong || c.judge.meter.Rate() == 0) {
			return nil, nil // perhaps it is never needed
		}
		s, err := newShortener()
		if err != nil {
			return nil, err
		}
		c.short = s
	}
	if c.always {
		if short := c.short.shorten(b); len(short) < len(b) {
			return short, nil
		}
		return nil, nil
	}
	if !c.judge.wants(b, c.short.shorten) {
		return nil, nil
	}
	began := c.judge.now()
	short := c.short.shorten(b)
	if !c.judge.did(len(b), len(short), c.judge.now().Sub(began)) {
		return nil, nil
	}
	return short, nil
}

func header(b []byte, size, long int) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(size))
	return binary.LittleEndian.AppendUint32(b, uint32(long))
}

// send sends the pieces that wait, and behind them a compressed one, if there is one.
func (c *Conn) send(long int, short []byte) error {
	out := make(net.Buffers, 0, len(c.run)+3)
	c.small = c.small[:0]
	if c.size > 0 {
		c.small = header(c.small, c.size, 0)
		rest := c.run
		if len(rest[0]) <= smallPiece {
			c.small = append(c.small, rest[0]...)
			rest = rest[1:]
		}
		out = append(append(out, c.small), rest...)
	}
	if short != nil {
		out = append(out, header(make([]byte, 0, headerSize), len(short), long), short)
	}
	c.counts.Plain.Add(uint64(c.size))
	c.counts.Long.Add(uint64(long))
	c.counts.Short.Add(uint64(len(short)))
	clear(c.run)
	c.run, c.size = c.run[:0], 0
	var err error
	if w, ok := c.Conn.(buffersWriter); ok {
		_, err = w.WriteBuffers(&out)
	} else {
		_, err = out.WriteTo(c.Conn)
	}
	return err
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	for len(b) > 0 {
		switch {
		case len(c.ready) > 0:
			n := copy(b, c.ready)
			c.ready = c.ready[n:]
			return n, nil
		case c.left > 0:
			n, err := c.in.Read(b[:min(len(b), c.left)])
			c.left -= n
			if errors.Is(err, io.EOF) && c.left > 0 {
				err = io.ErrUnexpectedEOF
			}
			return n, err
		}
		if err := c.next(); err != nil {
			return 0, err
		}
	}
	return 0, nil
}

// next reads the begin of a packet, and the rest if it is compressed.
func (c *Conn) next() error {
	var h [headerSize]byte
	if _, err := io.ReadFull(c.in, h[:]); err != nil {
		return err
	}
	size, long := binary.LittleEndian.Uint32(h[:]), binary.LittleEndian.Uint32(h[4:])
	switch {
	case size == 0 || size > 1<<31-1 || long > mostLong || long > 0 && size >= long:
		return fmt.Errorf("packet of %d bytes that expands to %d: %w", size, long, ErrPacket)
	case long == 0:
		c.left = int(size)
		return nil
	}
	if c.expand == nil {
		x, err := newExpander()
		if err != nil {
			return err
		}
		c.expand = x
	}
	if uint32(cap(c.packet)) < size {
		c.packet = make([]byte, size)
	}
	p := c.packet[:size]
	if _, err := io.ReadFull(c.in, p); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	var err error
	c.ready, err = c.expand.expand(p, int(long))
	return err
}
