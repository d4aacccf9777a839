package executor

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/internal/exact"
)

// sink receives exported contents.
type sink interface {
	// place sets where the bytes of a batch are to be read to (At and ptr of each piece),
	// and waits until that memory is free.
	place(ps []piece) error
	// accept takes a batch whose bytes are in that memory.
	accept(ps []piece) error
	// close waits until the receiver has everything that was accepted.
	close() error
	// knows reports whether the receiver has space for the object. A new object, which the
	// receiver does not have yet, is part of a later export.
	knows(id uint32, serial uint64, m *mem) bool
	// takes reports whether this receiver gets objects that the application has mapped, or
	// those that it has not.
	takes(mapped bool) bool
	// shares reports whether the receiver uses contents in the arena where they are, so
	// that they need not be moved.
	shares() bool
	// inPlace reports whether the receiver can read the object in the arena itself.
	inPlace(m *mem) bool
	// chunk is the largest size of a batch in bytes.
	chunk() uint64
}

// windowChunk is the largest size in bytes of a batch within the VM. windowDepth is the
// number of batches that may be in progress.
const (
	windowChunk = 32 << 20
	windowDepth = 4
	batchPieces = 4096
)

// contents lists what an export must move, and marks it as clean.
func (s *session) contents(final bool, out sink) []piece {
	var ps []piece
	s.each(func(id uint32, serial uint64, o any) {
		m, ok := o.(*mem)
		switch {
		case !ok || m.parent != nil || m.vendor == 0:
			return
		case m.isMapped() && !final:
			return // the application writes it without a call
		case !out.knows(id, serial, m), !out.takes(m.isMapped()):
			return
		case m.isMapped():
			m.markAll()
		}
		if !m.unified || !out.shares() {
			for _, p := range m.cut(out.chunk(), m.dirty) {
				p.ID, p.serial = id, serial
				m.users++
				ps = append(ps, p)
			}
		}
		clear(m.dirty)
		m.known = id
	})
	return ps
}

// export sends to a receiver what has changed since the last export to the same receiver. If
// to is empty, it is a part of what the last receiver gets.
func (s *session) export(ctx context.Context, to string, all, final bool, out sink, report progress) error {
	s.mu.Lock()
	if to != "" && (all || s.exportedTo != to) {
		s.exportedTo = to
		s.each(func(_ uint32, _ uint64, o any) {
			if m, ok := o.(*mem); ok && m.parent == nil {
				m.markAll()
			}
		})
	}
	ps := s.contents(final, out)
	var marks []cl.Event
	before := cl.Success
	if !final && len(ps) > 0 {
		// Commands that were enqueued before this moment must end before the bytes are
		// read. Later commands mark the objects as written again.
		marks, before = s.markers(s.contexts())
	}
	s.mu.Unlock()
	before = cmp.Or(before, await(marks))
	var total, sent uint64
	for i := range ps {
		total += ps[i].bytes()
	}
	err := s.pump(ctx, ps, out, func(n uint64) {
		sent += n
		report("copy", sent, total)
	})
	if e := out.close(); err == nil {
		err = e
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range ps {
		ps[i].m.users--
		if before != cl.Success {
			ps[i].m.markAll() // a command that was to end first may have been running
		}
		s.dropMem(ps[i].m)
	}
	s.endLeft()
	if err != nil {
		s.exportedTo = "" // it is not known what has arrived
	}
	return err
}

// markers enqueues a marker on every busy queue. If one is refused, the others do not tell of all commands.
func (s *session) markers(cs []*clContext) (marks []cl.Event, st cl.Status) {
	for _, c := range cs {
		for _, q := range c.queues {
			if !q.busy() {
				continue
			}
			var e cl.Event
			if x := cl.EnqueueMarkerWithWaitList(q.vendor, nil, &e); x != cl.Success {
				st = x
				continue
			}
			cl.Flush(q.vendor)
			marks = append(marks, e)
		}
	}
	return marks, st
}

// await waits until commands have ended, and gives up their events.
func await(evs []cl.Event) cl.Status {
	st, _ := awaitAll(evs)
	return st
}

// awaitAll is await, and reports whether all have ended.
func awaitAll(evs []cl.Event) (st cl.Status, all bool) {
	all = true
	for _, e := range evs {
		// One after the other: events of several contexts cannot be waited for in one call.
		x, over := ended(e)
		st, all = cmp.Or(x, st), all && over
		cl.ReleaseEvent(e)
	}
	return st, all
}

// refusedMost bounds how long a command is looked at whose wait is refused: a device that is lost may never tell its end.
const refusedMost = time.Minute

// ended waits until a command has ended, also if the runtime refuses to wait: the command may still use memory that
// somebody else is to get, or write what is to be read.
func ended(e cl.Event) (st cl.Status, over bool) {
	st = cl.WaitForEvents([]cl.Event{e})
	if st == cl.Success {
		return st, true
	}
	last := time.Now().Add(refusedMost)
	for nap := 50 * time.Microsecond; time.Now().Before(last); nap = min(2*nap, 10*time.Millisecond) {
		if now, x := cl.EventStatus(e); x != cl.Success || now <= cl.Complete {
			return st, true
		}
		exact.Sleep(nap)
	}
	return st, false
}

// drain waits until the commands of a queue have ended, also if the runtime refuses to wait. A queue that takes no marker
// either is broken, and runs nothing.
func (q *queue) drain() {
	var e cl.Event
	if cl.Finish(q.vendor) != cl.Success && cl.EnqueueMarkerWithWaitList(q.vendor, nil, &e) == cl.Success {
		cl.Flush(q.vendor)
		await([]cl.Event{e})
	}
}

func (m *mem) markAll() {
	for i := range m.dirty {
		m.dirty[i] = true
	}
}

// pump reads pieces from the device in batches. While the receiver takes one, the next is
// read.
func (s *session) pump(ctx context.Context, ps []piece, out sink, sent func(uint64)) error {
	var last []piece
	var lastEvs []cl.Event
	hand := func() error {
		if last == nil {
			return nil
		}
		if st := await(lastEvs); st != cl.Success {
			return fmt.Errorf("read object %d: %w", last[0].ID, st)
		}
		if err := out.accept(last); err != nil {
			return err
		}
		var n uint64
		for i := range last {
			n += last[i].bytes()
		}
		sent(n)
		return nil
	}
	defer func() { await(lastEvs) }()
	here := func(m *mem) bool { return m.unified && out.inPlace(m) }
	for len(ps) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		var n int
		var size uint64
		for n < len(ps) && n < batchPieces && (n == 0 || size+ps[n].padded() <= out.chunk()) && here(ps[n].m) == here(ps[0].m) {
			size += ps[n].padded()
			n++
		}
		b := ps[:n]
		ps = ps[n:]
		var evs []cl.Event
		if here(b[0].m) {
			for k := range b {
				b[k].At = b[k].m.arena + b[k].Off
			}
		} else {
			if err := out.place(b); err != nil {
				return err
			}
			var err error
			if evs, err = s.fetchPieces(b); err != nil {
				await(evs)
				return err
			}
		}
		err := hand()
		last, lastEvs = b, evs
		if err != nil {
			return err
		}
	}
	err := hand()
	lastEvs = nil
	return err
}

// fetchPieces begins to read a batch into its memory.
func (s *session) fetchPieces(b []piece) (evs []cl.Event, err error) {
	for k := range b {
		x := &b[k]
		if x.m.unified {
			copy(unsafe.Slice((*byte)(x.ptr), x.N), s.arenaBytes(x.m.arena+x.Off, x.N))
			continue
		}
		s.mu.Lock()
		q, st := s.xfer.queue(x.m.ctx)
		s.mu.Unlock()
		if st != cl.Success {
			return evs, fmt.Errorf("read object %d: %w", x.ID, st)
		}
		var ev cl.Event
		if st := x.read(q, x.ptr, &ev); st != cl.Success {
			return evs, fmt.Errorf("read object %d: %w", x.ID, st)
		}
		evs = append(evs, ev)
		cl.Flush(q)
	}
	return evs, nil
}

// peerSink sends contents to the target's executor, which reads them in the arena: from a
// window of chunks, or where they are.
type peerSink struct {
	s     *session
	conn  net.Conn
	unif  bool
	asks  bool // the target is still to get the position of the window
	wants bool // of a connection that stays: it is to get that in each export
	next  uint64
	used  int
	fly   []bool // for each batch in progress: it uses a chunk of the window

	sizes bool // the receiver needs the size in bytes of each piece
	bytes bool // and the bytes themselves: it is on another host
	stays bool // the connection is for later exports, too
	ends  bool // the receiver is told when an export has ended
	some  some // objects

	clear   func() error // waits until contents may be stored where this executor has them; nil: they may
	cleared bool         // that is so for all objects of the export, and for the window
}

// some is which objects a receiver gets.
type some uint8

const (
	allObjects some = iota
	unmapped
	mappedOnly
)

// The target begins with this header: importMagic, whether it computes in the arena, and
// whether it requests the position of the source's window. The rest is zeros.
const (
	importMagic  = 0x49525847
	helloUnified = 4
	helloWindow  = 5
	helloSizes   = 6 // it needs the size in bytes of each piece
	helloStays   = 7 // the connection is for later exports, too
)

// sizesMark is the first word for a receiver that needs sizes. Each piece has a fifth word
// then. endMark, in the place of a batch, ends an export over a connection that stays.
const (
	sizesMark = ^uint64(0)
	endMark   = ^uint64(0) - 1
)

// dialPeer connects to the target of a swap within this host.
func (s *session) dialPeer(ctx context.Context, path string) (*peerSink, error) {
	conn, err := (&net.Dialer{Timeout: remote.GreetTimeout}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("reach the target executor: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	p, err := s.greeted(conn, remote.TargetTimeout)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("target executor at %s: %w", path, err)
	}
	p.stays = false
	return p, nil
}

// greeted reads how the target begins.
func (s *session) greeted(conn net.Conn, within time.Duration) (*peerSink, error) {
	var hello [8]byte
	_ = conn.SetReadDeadline(time.Now().Add(within))
	if _, err := io.ReadFull(conn, hello[:]); err != nil || binary.LittleEndian.Uint32(hello[:]) != importMagic {
		return nil, fmt.Errorf("it does not greet: %w", errors.Join(err, errHostile))
	}
	_ = conn.SetReadDeadline(time.Time{})
	p := &peerSink{s: s, conn: conn, unif: hello[helloUnified] != 0, asks: hello[helloWindow] != 0, sizes: hello[helloSizes] != 0, stays: hello[helloStays] != 0}
	return p, p.begin()
}

// begin tells a receiver that needs sizes that it gets them.
func (p *peerSink) begin() error {
	if !p.sizes {
		return nil
	}
	if _, err := p.conn.Write(binary.LittleEndian.AppendUint64(nil, sizesMark)); err != nil {
		return fmt.Errorf("target executor: %w", err)
	}
	return nil
}

// knows implements sink. The target would lose an object that is newer than its graph.
func (p *peerSink) knows(id uint32, _ uint64, m *mem) bool { return m.known == id }

// takes implements sink.
func (p *peerSink) takes(mapped bool) bool {
	return p.some == allObjects || mapped == (p.some == mappedOnly)
}

func (p *peerSink) shares() bool  { return p.unif }
func (p *peerSink) chunk() uint64 { return windowChunk }

// inPlace implements sink. A carrier stores no contents where it believes that the application has
// something mapped.
func (p *peerSink) inPlace(m *mem) bool { return !p.bytes || !m.mapFailed.Load() }

func (p *peerSink) place(ps []piece) error {
	s := p.s
	before := s.windows
	if err := s.openWindow(windowChunk * windowDepth); err != nil {
		return err
	}
	p.cleared = p.cleared && s.windows == before
	if p.asks {
		p.asks = false
		b := make([]byte, 8, 32) // a batch without pieces
		for _, v := range []uint64{s.window, s.windowSize, s.windows} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
		if _, err := p.conn.Write(b); err != nil {
			return fmt.Errorf("target executor: %w", err)
		}
	}
	for p.used >= windowDepth {
		if err := p.ack(); err != nil {
			return err
		}
	}
	at := s.window + p.next%windowDepth*windowChunk
	p.next++
	p.used++
	for i := range ps {
		ps[i].At, ps[i].ptr = at, s.arena.Pointer(at)
		at += ps[i].padded()
	}
	return nil
}

// openWindow allocates the window, through which contents pass. A window that is large
// enough is used again.
func (s *session) openWindow(size uint64) error {
	if s.windowSize >= size {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeWindow()
	off, err := s.host.alloc(size + 4096)
	if err != nil {
		return err
	}
	s.window, s.windowSize = off+4096, size // 0 means that there is no window
	s.windows++
	if s.pins.wanted {
		populate(s.arenaBytes(s.window, size))
		for _, c := range s.contexts() {
			s.pins.add(c, s.window, size)
		}
	}
	return nil
}

// closeWindow frees the window. The caller holds s.mu.
func (s *session) closeWindow() {
	if s.window == 0 {
		return
	}
	s.host.free(s.window - 4096)
	s.window, s.windowSize = 0, 0
}

func (p *peerSink) ack() error {
	var b [4]byte
	_ = p.conn.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.ReadFull(p.conn, b[:]); err != nil {
		return fmt.Errorf("target executor: %w", err)
	}
	if n := binary.LittleEndian.Uint32(b[:]); n != 0 {
		return fmt.Errorf("target executor refuses contents: %w", cl.Status(int32(n)))
	}
	if p.fly[0] {
		p.used--
	}
	p.fly = p.fly[1:]
	return nil
}

func (p *peerSink) accept(ps []piece) error {
	b := make([]byte, 0, 8+40*len(ps))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(ps)))
	for i := range ps {
		x := &ps[i]
		b = binary.LittleEndian.AppendUint64(b, uint64(x.ID))
		b = binary.LittleEndian.AppendUint64(b, x.Off)
		b = binary.LittleEndian.AppendUint64(b, x.N)
		b = binary.LittleEndian.AppendUint64(b, x.At)
		if p.sizes {
			b = binary.LittleEndian.AppendUint64(b, x.bytes())
		}
	}
	if p.clear != nil && !p.cleared {
		if err := p.clear(); err != nil {
			return err
		}
		p.cleared = true
	}
	parcel := remote.NewParcel(b)
	for i := range ps {
		if p.bytes {
			parcel.Add(p.s.arenaBytes(ps[i].At, ps[i].bytes()))
		}
	}
	if err := parcel.Send(p.conn); err != nil {
		return fmt.Errorf("target executor: %w", err)
	}
	p.fly = append(p.fly, ps[0].ptr != nil)
	for len(p.fly) > 4*windowDepth {
		if err := p.ack(); err != nil {
			return err
		}
	}
	return nil
}

func (p *peerSink) close() error {
	if !p.stays {
		defer p.conn.Close()
	}
	for len(p.fly) > 0 {
		if err := p.ack(); err != nil {
			return err
		}
	}
	if !p.ends {
		return nil
	}
	if _, err := p.conn.Write(binary.LittleEndian.AppendUint64(nil, endMark)); err != nil {
		return fmt.Errorf("target executor: %w", err)
	}
	return nil
}
