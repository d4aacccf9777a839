package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Errors that end a stream.
var (
	// ErrProtocol means that the peer sends what no correct one does.
	ErrProtocol = errors.New("violation of the link's protocol")
	// ErrOtherStream means that the peer's end is not that of this stream, for example
	// because its process was started anew.
	ErrOtherStream = errors.New("not the other end of this stream")
	// ErrClosed means that Close was called.
	ErrClosed = errors.New("stream closed")
)

// ErrBroken means that a connection has ended. The stream goes on with the next one.
var ErrBroken = errors.New("connection broken")

// BuffersWriter is a connection that writes several pieces in fewer system calls than one for
// each. It may change the slice, but not the pieces.
type BuffersWriter interface {
	WriteBuffers(v *net.Buffers) (int64, error)
}

// Frame is one message.
type Frame struct {
	Kind uint16
	Head []byte // small, and in a form that the user chooses
	Body []byte
	// Stays says that the body is memory that is there anyway. It does not count as unacknowledged,
	// so that who sends it does not wait for the peer's acknowledgements.
	Stays bool
}

// Options of a stream. ID is required; a zero is replaced by the default.
type Options struct {
	ID      ID
	Unacked int           // bytes that may be sent and not acknowledged; more waits in Send. 64 MiB
	MaxHead int           // bytes; the peer must not send more in a head. 64 KiB
	MaxBody int           // bytes; the same of a body. 16 MiB
	Silence time.Duration // a connection on which nothing was heard for so long is broken. 15 s

	// Place returns memory of n bytes for the body of a frame. Without it, the memory is
	// allocated. It is called again for a frame whose connection broke in the middle.
	Place func(kind uint16, head []byte, n int) ([]byte, error)
	// Greeted is called when the peer has said hello on a connection: it serves this stream, too.
	Greeted func()
}

// Stream is one end.
type Stream struct {
	o       Options
	done    chan struct{} // closed at the end
	serving sync.Mutex    // held by the Serve that reads

	mu        sync.Mutex
	changed   *sync.Cond // room, acknowledgements, the end
	err       error
	conn      *heard
	writing   bool
	kept      []*kept // frames that were not acknowledged, in order
	first     uint64  // number of the first of them
	written   uint64  // number of the first that was not passed to conn
	unacked   int     // bytes in kept, without those that stay
	unwritten int     // of them, at most, bytes that were not passed to conn
	taken     uint64  // number of the last frame that the handler has taken
	said      uint64  // the last acknowledgement that was passed to conn
	unsaid    int     // bytes that were taken after that
	say       bool    // an acknowledgement is due now
	ping      bool    // the peer must hear something now
	ackTimer  *time.Timer
	ackDue    bool // ackTimer runs
}

// kept is a frame that may have to be sent again.
type kept struct {
	small []byte // header, head, and the body if it is small
	large []byte
	takes int // bytes of unacked
	done  func()
}

const (
	copied     = 16 << 10             // bytes up to which a body is copied
	ackDelay   = 5 * time.Millisecond // an acknowledgement waits so long for a frame that it can go with
	batchBytes = 1 << 20              // of one write
	posted     = 128 << 10            // bytes that wait for another frame
)

// New returns a stream without a connection.
func New(o Options) *Stream {
	set := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	set(&o.Unacked, 64<<20)
	set(&o.MaxHead, 64<<10)
	set(&o.MaxBody, 16<<20)
	if o.Silence <= 0 {
		o.Silence = 15 * time.Second
	}
	s := &Stream{o: o, done: make(chan struct{}), first: 1, written: 1}
	s.changed = sync.NewCond(&s.mu)
	return s
}

// Send sends a frame. It returns when the stream has taken it, which is before it has
// arrived, and waits for room, with or without a connection. The head is copied. The body
// must not change until done is called, which is when the peer's handler has taken the
// frame; done may be nil, must not block, and is not called for what is left at the stream's
// end. An error other than the context's is the stream's end.
func (s *Stream) Send(ctx context.Context, f Frame, done func()) error {
	return s.add(ctx, f, done, true)
}

// Post is Send for a frame that need not arrive before the next one does: it may wait for
// that, so that both go in one system call. Much does not wait.
func (s *Stream) Post(ctx context.Context, f Frame) error { return s.add(ctx, f, nil, false) }

func (s *Stream) add(ctx context.Context, f Frame, done func(), now bool) error {
	if len(f.Head) > s.o.MaxHead || len(f.Body) > s.o.MaxBody {
		return fmt.Errorf("frame of %d and %d bytes, of %d and %d allowed: %w", len(f.Head), len(f.Body), s.o.MaxHead, s.o.MaxBody, ErrProtocol)
	}
	k := &kept{done: done}
	h := header{kind: f.Kind, head: uint32(len(f.Head)), body: uint32(len(f.Body))}
	size := headerSize + len(f.Head) + len(f.Body)
	if len(f.Body) > copied {
		k.large = f.Body
	}
	k.small = make([]byte, 0, size-len(k.large))
	k.takes = size
	if f.Stays {
		k.takes = cap(k.small)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.await(ctx, func() bool { return s.unacked == 0 || s.unacked+k.takes <= s.o.Unacked }); err != nil {
		return err
	}
	h.number = s.next()
	k.small = append(h.appendTo(k.small), f.Head...)
	if k.large == nil {
		k.small = append(k.small, f.Body...)
	}
	s.kept = append(s.kept, k)
	s.unacked += k.takes
	if s.unwritten += size; now || s.unwritten >= posted {
		s.flush(h.number)
	}
	return nil
}

// Drain waits until the peer's handler has taken everything that was sent.
func (s *Stream) Drain(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flush(s.next() - 1)
	return s.await(ctx, func() bool { return len(s.kept) == 0 })
}

// Close ends the stream. The peer's end is not told.
func (s *Stream) Close() { s.end(ErrClosed) }

// Done is closed at the stream's end.
func (s *Stream) Done() <-chan struct{} { return s.done }

// Err returns why the stream has ended, or nil.
func (s *Stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *Stream) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.err = err
	close(s.done)
	s.cut()
	s.changed.Broadcast()
}

// next returns the number of the next frame. The caller holds s.mu.
func (s *Stream) next() uint64 { return s.first + uint64(len(s.kept)) }

// await waits for a condition. The caller holds s.mu.
func (s *Stream) await(ctx context.Context, ok func() bool) error {
	if s.err == nil && ctx.Err() == nil && !ok() {
		stop := context.AfterFunc(ctx, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.changed.Broadcast()
		})
		defer stop()
		for s.err == nil && ctx.Err() == nil && !ok() {
			s.changed.Wait()
		}
	}
	if s.err != nil {
		return s.err
	}
	return ctx.Err()
}

// cut closes the connection. The caller holds s.mu.
func (s *Stream) cut() {
	if s.conn != nil {
		_ = s.conn.Close()
		s.conn = nil
	}
}

// acknowledge drops what the peer has taken. The caller holds s.mu.
func (s *Stream) acknowledge(number uint64) error {
	if number >= s.next() {
		return fmt.Errorf("frame %d is acknowledged, %d is the next: %w", number, s.next(), ErrProtocol)
	}
	n := 0
	for ; s.first <= number; s.first++ {
		k := s.kept[n]
		s.kept[n] = nil
		s.unacked -= k.takes
		if k.done != nil {
			k.done()
		}
		n++
	}
	if n > 0 {
		s.kept = s.kept[n:]
		s.written = max(s.written, s.first)
		s.changed.Broadcast()
	}
	return nil
}
