package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// cable is a connection that breaks after a number of bytes, which arrive in part.
type cable struct {
	net.Conn
	mu   sync.Mutex
	left int
}

func (c *cable) Write(b []byte) (int, error) {
	c.mu.Lock()
	n := min(len(b), c.left)
	c.left -= n
	c.mu.Unlock()
	w, err := c.Conn.Write(b[:n])
	if err == nil && n < len(b) {
		c.Close()
		err = io.ErrClosedPipe
	}
	return w, err
}

func pair(t *testing.T, o Options) (a, b *Stream) {
	a, b = New(o), New(o)
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// connect serves both ends over connections that make gives, until both streams have ended.
func connect(t *testing.T, a, b *Stream, handleA, handleB func(Frame) error, dial func() (net.Conn, net.Conn)) (wait func()) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() {
		for a.Err() == nil && b.Err() == nil {
			x, y := dial()
			var both sync.WaitGroup
			both.Go(func() { _ = a.Serve(t.Context(), x, handleA) })
			both.Go(func() { _ = b.Serve(t.Context(), y, handleB) })
			both.Wait()
		}
	})
	return wg.Wait
}

func pipe() (net.Conn, net.Conn) { return net.Pipe() }

// Every frame arrives once, in order and whole, in both directions, whatever breaks.
func TestFramesSurviveBrokenConnections(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 1))
		a, b := pair(t, Options{Unacked: 200 << 10})
		const frames = 300
		body := func(i int) []byte {
			n := []int{0, 1, 100, copied, copied + 1, 50 << 10}[i%6]
			return bytes.Repeat([]byte{byte(i), byte(i >> 8)}, n)[:n]
		}
		handler := func(other *Stream, got *int) func(Frame) error {
			return func(f Frame) error {
				i := int(binary.LittleEndian.Uint32(f.Head))
				if i != *got || int(f.Kind) != i%7 || !bytes.Equal(f.Body, body(i)) {
					t.Errorf("seed %d: frame %d of %d bytes, want %d", seed, i, len(f.Body), *got)
				}
				*got++
				return nil
			}
		}
		var gotA, gotB int
		wait := connect(t, a, b, handler(b, &gotA), handler(a, &gotB), func() (net.Conn, net.Conn) {
			x, y := net.Pipe()
			return &cable{Conn: x, left: random.IntN(300 << 10)}, &cable{Conn: y, left: random.IntN(300 << 10)}
		})
		var senders sync.WaitGroup
		var acked [2]int
		for n, s := range []*Stream{a, b} {
			senders.Go(func() {
				for i := range frames {
					own := body(i)
					f := Frame{Kind: uint16(i % 7), Head: binary.LittleEndian.AppendUint32(nil, uint32(i)), Body: own}
					if err := s.Send(t.Context(), f, func() { clear(own); acked[n]++ }); err != nil {
						t.Error(err)
						return
					}
				}
				if err := s.Drain(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		senders.Wait()
		a.Close()
		b.Close()
		wait()
		if gotA != frames || gotB != frames || acked != [2]int{frames, frames} {
			t.Fatalf("seed %d: %d and %d frames of %d came, %v were acknowledged", seed, gotA, gotB, frames, acked)
		}
	}
}

// Both ends send more than connections hold, and nobody reads while it writes.
func TestBothEndsMaySendALot(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, b := pair(t, Options{Unacked: 64 << 20})
	take := func(Frame) error { return nil }
	wait := connect(t, a, b, take, take, func() (net.Conn, net.Conn) {
		x, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Error(err)
		}
		y, err := l.Accept()
		if err != nil {
			t.Error(err)
		}
		return x, y
	})
	body := make([]byte, 4<<20)
	var senders sync.WaitGroup
	for _, s := range []*Stream{a, b, a, b} {
		senders.Go(func() {
			for range 32 {
				if err := s.Send(t.Context(), Frame{Body: body}, nil); err != nil {
					t.Error(err)
				}
			}
			if err := s.Drain(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	senders.Wait()
	a.Close()
	b.Close()
	wait()
}

func TestSendWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t, Options{Unacked: 1000})
		if err := a.Send(t.Context(), Frame{Body: make([]byte, 5000)}, nil); err != nil {
			t.Fatal(err) // the only frame may be larger
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := a.Send(ctx, Frame{}, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		held := make(chan struct{})
		wait := connect(t, a, b, func(Frame) error { return nil }, func(Frame) error { <-held; return nil }, pipe)
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := a.Send(ctx, Frame{}, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err) // it has come, but nobody has taken it
		}
		close(held)
		if err := errors.Join(a.Send(t.Context(), Frame{}, nil), a.Drain(t.Context())); err != nil {
			t.Fatal(err)
		}
		a.Close()
		b.Close()
		wait()
		if err := a.Send(t.Context(), Frame{}, nil); !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	})
}

// A peer that vanishes without a word is noticed, and one that has nothing to say is not
// taken for one.
func TestSilenceIsABreak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t, Options{Silence: 15 * time.Second})
		x, y := net.Pipe()
		done := make(chan error, 2)
		take := func(Frame) error { return nil }
		go func() { done <- a.Serve(t.Context(), x, take) }()
		ctx, pull := context.WithCancel(t.Context())
		go func() { done <- b.Serve(ctx, y, take) }()
		time.Sleep(time.Hour)
		select {
		case err := <-done:
			t.Fatal("an idle connection ended:", err)
		default:
		}
		pull()
		for range 2 {
			if err := <-done; !errors.Is(err, ErrBroken) && !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
		}
		x, y = net.Pipe() // nobody is at the other end
		defer y.Close()
		begin := time.Now()
		go func() { _, _ = io.CopyN(io.Discard, y, helloSize); _, _ = y.Write(newHello(ID{}, 1)) }()
		if err := a.Serve(t.Context(), x, take); !errors.Is(err, ErrBroken) {
			t.Fatal(err)
		}
		if d := time.Since(begin); d < 15*time.Second || d > 25*time.Second {
			t.Fatalf("noticed after %v", d)
		}
		if a.Err() != nil {
			t.Fatal(a.Err())
		}
	})
}

// A peer is not silent while nobody listens to it: the handler may take its time, and what this end
// sends meanwhile arrives.
func TestConnectionOutlivesAFrameThatTakesLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t, Options{Silence: 15 * time.Second})
		x, y := net.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		begun, may := make(chan struct{}), make(chan struct{})
		got := make(chan struct{}, 1)
		done := make(chan error, 2)
		go func() { done <- a.Serve(ctx, x, func(Frame) error { close(begun); <-may; return nil }) }()
		go func() { done <- b.Serve(ctx, y, func(Frame) error { got <- struct{}{}; return nil }) }()
		if err := b.Send(t.Context(), Frame{}, nil); err != nil {
			t.Fatal(err)
		}
		<-begun
		time.Sleep(time.Hour)
		if err := a.Send(t.Context(), Frame{}, nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case <-got:
		default:
			t.Error("the connection is broken: what is sent does not arrive")
		}
		close(may)
		cancel()
		<-done
		<-done
	})
}

// talk serves a stream that says hello to bytes of a peer, and returns how that ended.
func talk(t testing.TB, s *Stream, handle func(Frame) error, peer []byte) error {
	x, y := net.Pipe()
	go func() {
		greeted := make(chan struct{})
		go func() {
			_, _ = io.CopyN(io.Discard, y, helloSize)
			close(greeted)
			_, _ = io.Copy(io.Discard, y)
		}()
		_, _ = y.Write(peer)
		<-greeted
		y.Close()
	}()
	return s.Serve(t.Context(), x, handle)
}

func TestWhatNoPeerSays(t *testing.T) {
	hello := newHello(ID{}, 1)
	frame := func(h header, rest ...byte) []byte {
		return append(h.appendTo(bytes.Clone(hello)), rest...)
	}
	for name, c := range map[string]struct {
		said []byte
		want error
	}{
		"nothing":                   {nil, ErrBroken},
		"half a hello":              {hello[:20], ErrBroken},
		"another protocol":          {bytes.Repeat([]byte("GET "), 8), ErrProtocol},
		"another version":           {append(bytes.Clone(hello[:4]), append([]byte{2, 0, 0, 0}, hello[8:]...)...), ErrProtocol},
		"another stream":            {newHello(ID{1}, 1), ErrOtherStream},
		"expects nothing":           {newHello(ID{}, 0), ErrProtocol},
		"expects what was not sent": {newHello(ID{}, 2), ErrProtocol},
		"acknowledges a future":     {frame(header{ack: 1}), ErrProtocol},
		"leaves one out":            {frame(header{number: 2}), ErrProtocol},
		"acknowledgement with body": {frame(header{body: 1}, 1), ErrProtocol},
		"long head":                 {frame(header{number: 1, head: 64<<10 + 1}), ErrProtocol},
		"long body":                 {frame(header{number: 1, body: 1 << 31}), ErrProtocol},
		"cut":                       {frame(header{number: 1, head: 4, body: 4}, 1, 2, 3, 4, 5), ErrBroken},
		"cut head":                  {frame(header{number: 1, head: 4}, 1), ErrBroken},
		"whole":                     {frame(header{number: 1, head: 1, body: 1}, 1, 2), ErrBroken},
	} {
		t.Run(name, func(t *testing.T) {
			s := New(Options{})
			defer s.Close()
			n := 0
			err := talk(t, s, func(Frame) error { n++; return nil }, c.said)
			if !errors.Is(err, c.want) || (n == 1) != (name == "whole") {
				t.Fatal(n, err)
			}
			if fatal := !errors.Is(c.want, ErrBroken); (s.Err() != nil) != fatal {
				t.Fatal(s.Err())
			}
		})
	}
}

func TestHandlersErrorEndsTheStream(t *testing.T) {
	s := New(Options{})
	wrong := errors.New("wrong")
	one := (&header{number: 1}).appendTo(newHello(ID{}, 1))
	if err := talk(t, s, func(Frame) error { return wrong }, one); !errors.Is(err, wrong) || !errors.Is(s.Err(), wrong) {
		t.Fatal(err, s.Err())
	}
	s = New(Options{Place: func(uint16, []byte, int) ([]byte, error) { return nil, wrong }})
	one = append((&header{number: 1, body: 1}).appendTo(newHello(ID{}, 1)), 1)
	if err := talk(t, s, nil, one); !errors.Is(err, wrong) {
		t.Fatal(err)
	}
	<-s.Done()
	s = New(Options{MaxBody: 10})
	if err := s.Send(t.Context(), Frame{Body: make([]byte, 11)}, nil); !errors.Is(err, ErrProtocol) {
		t.Fatal(err)
	}
}

// A connection takes the place of one that is thought to live.
func TestNewConnectionTakesThePlaceOfTheOld(t *testing.T) {
	a, b := pair(t, Options{})
	x, y := net.Pipe()
	defer y.Close()
	old := make(chan error, 1)
	go func() { old <- a.Serve(t.Context(), x, nil) }()
	_, _ = io.CopyN(io.Discard, y, helloSize)
	_, _ = y.Write(newHello(ID{}, 1))
	got := make(chan Frame, 1)
	wait := connect(t, a, b, nil, func(f Frame) error { got <- f; return nil }, pipe)
	if err := <-old; !errors.Is(err, ErrBroken) {
		t.Fatal(err)
	}
	if err := a.Send(t.Context(), Frame{Kind: 3}, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case f := <-got:
		if f.Kind != 3 {
			t.Fatal(f)
		}
	case <-testkit.Context(t).Done():
		t.Fatal("nothing came")
	}
	a.Close()
	b.Close()
	wait()
}

// FuzzServe lets a peer say anything: nothing that it says makes the stream panic, allocate
// beyond its limits, or hand over frames out of order.
func FuzzServe(f *testing.F) {
	hello := newHello(ID{}, 1)
	two := append((&header{number: 1, kind: 3, head: 2, body: 3}).appendTo(bytes.Clone(hello)), "hhbbb"...)
	two = (&header{number: 2}).appendTo(two)
	f.Add(two)
	f.Add((&header{}).appendTo(bytes.Clone(hello)))
	f.Add(hello)
	f.Fuzz(func(t *testing.T, said []byte) {
		s := New(Options{MaxHead: 1 << 10, MaxBody: 1 << 16})
		defer s.Close()
		size := helloSize
		_ = talk(t, s, func(f Frame) error {
			size += headerSize + len(f.Head) + len(f.Body)
			if size > len(said) {
				t.Fatalf("frames of %d bytes out of %d", size, len(said))
			}
			return nil
		}, said)
	})
}

// What a stream adds to a raw connection: a frame there and one back, and bulk data.
func BenchmarkStream(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	ends := func() (net.Conn, net.Conn) {
		x, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		y, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		return x, y
	}
	const size = 2 << 20
	place := make([]byte, size)
	o := Options{Place: func(uint16, []byte, int) ([]byte, error) { return place, nil }}
	serve := func(s *Stream, c net.Conn, handle func(Frame) error) {
		go func() { _ = s.Serve(b.Context(), c, handle) }()
	}
	b.Run("ping-pong/raw", func(b *testing.B) {
		x, y := ends()
		defer x.Close()
		go func() { _, _ = io.Copy(y, y) }()
		buf := make([]byte, headerSize+8)
		for b.Loop() {
			if _, err := x.Write(buf); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(x, buf); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("ping-pong/stream", func(b *testing.B) {
		x, y := ends()
		s, t := New(o), New(o)
		defer func() { s.Close(); t.Close() }()
		back := make(chan struct{}, 1)
		serve(s, x, func(Frame) error { back <- struct{}{}; return nil })
		serve(t, y, func(f Frame) error { return t.Send(b.Context(), f, nil) }) // there is always room for one
		for b.Loop() {
			if err := s.Send(b.Context(), Frame{Head: place[:8]}, nil); err != nil {
				b.Fatal(err)
			}
			<-back
		}
	})
	b.Run("bulk/raw", func(b *testing.B) {
		x, y := ends()
		defer x.Close()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{y}, make([]byte, size))
		}()
		b.SetBytes(size)
		for b.Loop() {
			if _, err := x.Write(place); err != nil {
				b.Fatal(err)
			}
		}
		x.Close()
		<-done
	})
	b.Run("bulk/stream", func(b *testing.B) {
		x, y := ends()
		s, t := New(o), New(o)
		defer func() { s.Close(); t.Close() }()
		serve(s, x, nil)
		serve(t, y, func(Frame) error { return nil })
		from := make([]byte, size)
		b.SetBytes(size)
		for b.Loop() {
			if err := s.Send(b.Context(), Frame{Body: from}, nil); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.Drain(b.Context()); err != nil {
			b.Fatal(err)
		}
	})
}
