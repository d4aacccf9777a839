package channel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// window is the largest number of segments in transit: 32 KiB take half a second at
	// 70 KB/s, and are several round trips at 600 KB/s.
	window    = 16
	maxUnread = 2 * window * maxPayload // most bytes that have arrived and were not read

	firstRTO   = time.Second
	leastRTO   = 300 * time.Millisecond
	mostRTO    = 5 * time.Second
	nakEvery   = 100 * time.Millisecond
	openEvery  = 100 * time.Millisecond // doubled for each attempt
	openSeldom = 500 * time.Millisecond
	perFill    = 2 * maxFrame // approximate number of bytes that one call of fill makes
)

var (
	// ErrDown means that there is no connection to the guest: its agent does not run, or
	// does not answer.
	ErrDown = errors.New("the guest does not answer on its channel")
	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("channel is closed")

	errReplaced  = errors.New("a newer connection took its place")
	errRestarted = errors.New("the guest's agent was started anew")
	errHungUp    = errors.New("the other side hung up")
)

// segment is a part of the stream that is not acknowledged yet.
type segment struct {
	data  []byte
	sent  time.Time
	tries int
}

// link is one end of a connection: a reliable stream over frames. It has no goroutines.
// The reader of the port calls handle, the writer calls fill.
type link struct {
	conn uint64
	from direction
	wake func() // called when something may have to be sent
	done chan struct{}

	mu   sync.Mutex
	cond sync.Cond // signals readers and writers of the stream
	err  error     // why the link has ended

	opened    bool
	instance  uint64 // the guest's instance: sent by the guest, received by the host
	openDue   time.Time
	openWait  time.Duration
	padded    bool
	answerDue bool // guest: kindOpened must be sent
	closeDue  bool
	aliveDue  bool
	ackDue    bool
	nakDue    bool
	nakSent   time.Time

	queue    []segment // unacknowledged segments, oldest first
	una      uint32    // number of the oldest segment
	next     int       // index in queue of the next one to send
	high     uint32    // the number after the highest one that was sent
	timer    time.Time // when the oldest segment is sent again
	wentBack time.Time
	srtt     time.Duration
	rttvar   time.Duration
	rto      time.Duration

	expect  uint32
	in      []byte
	dropped bool // a segment was dropped because there was no room

	heard time.Time // when the last frame arrived
	again uint64    // number of segments that were sent again
}

func newLink(conn uint64, from direction, instance uint64, wake func()) *link {
	now := time.Now()
	l := &link{
		conn: conn, from: from, wake: wake, done: make(chan struct{}), instance: instance,
		rto: firstRTO, heard: now, openWait: openEvery, openDue: now,
	}
	l.cond.L = &l.mu
	if from == fromGuest {
		l.opened, l.answerDue = true, true
	}
	return l
}

// fail ends the link. The first error is kept.
func (l *link) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failLocked(err)
}

func (l *link) failLocked(err error) {
	if l.err != nil {
		return
	}
	l.err = err
	close(l.done)
	l.cond.Broadcast()
}

func (l *link) reason() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// silence returns the time since the last frame.
func (l *link) silence(now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return now.Sub(l.heard)
}

// probe asks the other side for an acknowledgement.
func (l *link) probe() {
	l.mu.Lock()
	l.aliveDue = true
	l.mu.Unlock()
	l.wake()
}

// Read implements io.Reader for the stream.
func (l *link) Read(p []byte) (int, error) {
	l.mu.Lock()
	for len(l.in) == 0 && l.err == nil {
		l.cond.Wait()
	}
	if len(l.in) == 0 {
		defer l.mu.Unlock()
		return 0, l.err
	}
	n := copy(p, l.in)
	l.in = append(l.in[:0], l.in[n:]...)
	wake := l.dropped && len(l.in) <= maxUnread/2
	if wake {
		l.dropped, l.nakDue = false, true
	}
	l.mu.Unlock()
	if wake {
		l.wake()
	}
	return n, nil
}

// Write implements io.Writer. It waits while too much data is in transit.
func (l *link) Write(p []byte) (int, error) {
	n := 0
	for len(p) > 0 {
		l.mu.Lock()
		for l.err == nil && len(l.queue) >= window && l.room() == 0 {
			l.cond.Wait()
		}
		if l.err != nil {
			defer l.mu.Unlock()
			return n, l.err
		}
		room := l.room()
		if room == 0 {
			l.queue = append(l.queue, segment{data: make([]byte, 0, min(len(p), maxPayload))})
			room = maxPayload
		}
		last := &l.queue[len(l.queue)-1]
		k := min(room, len(p))
		last.data = append(last.data, p[:k]...)
		l.mu.Unlock()
		p, n = p[k:], n+k
		l.wake()
	}
	return n, nil
}

// room returns how many bytes fit into the last segment. A segment that was sent is not
// extended.
func (l *link) room() int {
	i := len(l.queue) - 1
	if i < 0 || l.queue[i].tries > 0 {
		return 0
	}
	return maxPayload - len(l.queue[i].data)
}

// Close ends the connection, and sends that to the other side once.
func (l *link) Close() error {
	l.mu.Lock()
	if l.err == nil {
		l.closeDue = true
		l.failLocked(ErrClosed)
	}
	l.mu.Unlock()
	l.wake()
	return nil
}

// fill appends to b what is to be sent now. If nothing was appended, fill must be called
// again at the returned time; zero: when woken.
func (l *link) fill(now time.Time, b []byte) ([]byte, time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		if l.closeDue {
			l.closeDue = false
			b = l.frame(b, kindClose, nil)
		}
		return b, time.Time{}
	}
	if !l.opened {
		if now.Before(l.openDue) {
			return b, l.openDue
		}
		l.openDue, l.openWait = now.Add(l.openWait), min(2*l.openWait, openSeldom)
		return l.frame(l.pad(b), kindOpen, nil), l.openDue
	}
	if l.answerDue {
		l.answerDue = false
		b = l.frame(l.pad(b), kindOpened, binary.BigEndian.AppendUint64(nil, l.instance))
	}
	if l.next > 0 && !now.Before(l.timer) {
		l.next = 0
		l.rto = min(2*l.rto, mostRTO)
	}
	for l.next < len(l.queue) && len(b) < perFill {
		b = l.sendNext(now, b)
	}
	switch {
	case l.nakDue:
		b = l.frame(b, kindNak, nil)
		l.nakSent = now
	case l.aliveDue && l.from == fromHost:
		b = l.frame(b, kindAlive, nil)
	case l.ackDue:
		b = l.frame(b, kindAck, nil)
	}
	l.nakDue, l.aliveDue, l.ackDue = false, false, false
	if l.next > 0 {
		return b, l.timer
	}
	return b, time.Time{}
}

func (l *link) pad(b []byte) []byte {
	if l.padded {
		return b
	}
	l.padded = true
	return append(b, padding()...)
}

func (l *link) sendNext(now time.Time, b []byte) []byte {
	s := &l.queue[l.next]
	seq := l.una + uint32(l.next)
	if s.tries++; s.tries > 1 {
		l.again++
	}
	s.sent = now
	if l.next == 0 {
		l.timer = now.Add(l.rto)
	}
	l.next++
	if int32(seq+1-l.high) > 0 {
		l.high = seq + 1
	}
	f := frame{kind: kindData, from: l.from, conn: l.conn, seq: seq, ack: l.expect, payload: s.data}
	l.ackDue = false
	return f.appendTo(b)
}

func (l *link) frame(b []byte, k kind, payload []byte) []byte {
	f := frame{kind: k, from: l.from, conn: l.conn, seq: l.high, ack: l.expect, payload: payload}
	return f.appendTo(b)
}

// handle processes a frame that the other side has sent on this connection.
func (l *link) handle(now time.Time, f *frame) {
	l.mu.Lock()
	l.heard = now
	if l.err == nil {
		l.handleLocked(now, f)
	}
	due := l.ackDue || l.nakDue || l.answerDue || l.next < len(l.queue)
	l.mu.Unlock()
	if due {
		l.wake()
	}
}

func (l *link) handleLocked(now time.Time, f *frame) {
	switch f.kind {
	case kindOpen: // the answer was lost
		l.answerDue = l.from == fromGuest
		return
	case kindOpened:
		l.handleOpened(f)
		return
	case kindClose:
		l.failLocked(errHungUp)
		return
	}
	if !l.opened {
		return
	}
	l.acknowledged(now, f.ack, f.kind == kindNak)
	switch f.kind {
	case kindAlive:
		l.ackDue = true
	case kindData:
		l.arrived(now, f)
	}
}

func (l *link) handleOpened(f *frame) {
	if l.from != fromHost || len(f.payload) != 8 {
		return
	}
	instance := binary.BigEndian.Uint64(f.payload)
	if l.opened && instance != l.instance {
		l.failLocked(errRestarted)
		return
	}
	if !l.opened {
		l.opened, l.instance = true, instance
		l.cond.Broadcast()
	}
}

// arrived processes a numbered segment.
func (l *link) arrived(now time.Time, f *frame) {
	switch ahead := int32(f.seq - l.expect); {
	case ahead < 0: // it was sent again, because the acknowledgement was lost
		l.ackDue = true
	case ahead > 0:
		if now.Sub(l.nakSent) >= nakEvery {
			l.nakDue = true
		}
	case len(l.in)+len(f.payload) > maxUnread:
		l.dropped = true
	default:
		l.expect++
		l.ackDue = true
		l.in = append(l.in, f.payload...)
		l.cond.Broadcast()
	}
}

// acknowledged processes the acknowledgement of everything before ack.
func (l *link) acknowledged(now time.Time, ack uint32, lost bool) {
	n := int(int32(ack - l.una))
	if n < 0 || n > int(int32(l.high-l.una)) {
		return // it is old, or of something that was never sent
	}
	if n > 0 {
		if s := l.queue[n-1]; s.tries == 1 {
			l.measured(now.Sub(s.sent))
		}
		l.queue = append(l.queue[:0], l.queue[n:]...)
		clear(l.queue[len(l.queue):cap(l.queue)])
		l.una = ack
		l.next = max(l.next-n, 0)
		l.timer = now.Add(l.rto)
		l.cond.Broadcast()
	}
	if lost && l.next > 0 && (n > 0 || now.Sub(l.wentBack) > max(l.srtt, nakEvery)) {
		l.next, l.wentBack = 0, now
	}
}

// measured updates the retransmission time-out as in RFC 6298.
func (l *link) measured(rtt time.Duration) {
	if l.srtt == 0 {
		l.srtt, l.rttvar = rtt, rtt/2
	} else {
		l.rttvar += ((rtt - l.srtt).Abs() - l.rttvar) / 4
		l.srtt += (rtt - l.srtt) / 8
	}
	l.rto = min(max(l.srtt+4*l.rttvar, leastRTO), mostRTO)
}

// waitOpened returns nil when the other side has answered, or why it will not.
func (l *link) waitOpened() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.opened && l.err == nil {
		l.cond.Wait()
	}
	return l.err
}

// port is one end of a channel, with the goroutines that move its bytes.
type port struct {
	rw   io.ReadWriteCloser
	wake chan struct{}

	mu    sync.Mutex
	link  *link
	stray map[uint64]bool // unknown connections that the other side still uses
}

const maxStray = 8

func newPort(rw io.ReadWriteCloser) *port {
	return &port{rw: rw, wake: make(chan struct{}, 1), stray: map[uint64]bool{}}
}

func (p *port) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *port) current() *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link
}

// use sets the port's link and returns the former one.
func (p *port) use(l *link) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.link
	p.link = l
	delete(p.stray, l.conn)
	return before
}

// disown sends to the other side that it does not know the connection.
func (p *port) disown(conn uint64) {
	p.mu.Lock()
	if len(p.stray) < maxStray {
		p.stray[conn] = true
	}
	p.mu.Unlock()
	p.poke()
}

// read decodes incoming bytes until the port fails. It yields only the frames of the
// other side, not echoes.
func (p *port) read(own direction, yield func(*frame)) error {
	var d decoder
	buf := make([]byte, 4<<10)
	for {
		n, err := p.rw.Read(buf)
		d.feed(buf[:n], func(f frame) {
			if f.from == own.other() {
				yield(&f)
			}
		})
		if err != nil {
			return fmt.Errorf("read the channel: %w", err)
		}
		if n == 0 {
			return fmt.Errorf("read the channel: %w", io.ErrNoProgress)
		}
	}
}

// write sends the link's frames until the port fails or done is closed. When the link is
// closed, it sends that, too.
func (p *port) write(own direction, done <-chan struct{}) error {
	buf := make([]byte, 0, perFill+3*maxFrame)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		var again time.Time
		buf = p.disowned(own, buf[:0])
		if l := p.current(); l != nil {
			buf, again = l.fill(time.Now(), buf)
		}
		if len(buf) > 0 {
			if _, err := p.rw.Write(buf); err != nil {
				return fmt.Errorf("write to the channel: %w", err)
			}
			continue
		}
		wait := time.Hour
		if !again.IsZero() {
			wait = max(time.Until(again), 0)
		}
		timer.Reset(wait)
		select {
		case <-p.wake:
		case <-timer.C:
		case <-done:
			if l := p.current(); l != nil {
				if buf, _ = l.fill(time.Now(), buf); len(buf) > 0 {
					_, _ = p.rw.Write(buf) // the last frame says that the link is closed
				}
			}
			return nil
		}
	}
}

func (p *port) disowned(own direction, b []byte) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.stray {
		f := frame{kind: kindClose, from: own, conn: conn}
		b = f.appendTo(b)
	}
	clear(p.stray)
	return b
}
