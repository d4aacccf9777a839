package executor

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// connected returns the two ends of a TCP connection.
func connected(t testing.TB) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// apart are two executors of one session on two hosts: each has memory of its own.
type apart struct {
	t        *testing.T
	at, away *client
	from, to *session
	out, in  *fetches
}

const fetchOf = "the fetch"

func newApart(t *testing.T, unified bool) *apart {
	t.Helper()
	x := &apart{t: t, at: newClient(t), away: newClient(t), out: newFetches(), in: newFetches()}
	x.from = x.at.executor(1)
	x.away.executor(1) // their carriers have different parts of the session's arena
	x.to = x.away.executor(2)
	if !unified {
		discrete(x.from, x.to)
	}
	x.from.activate()
	a, b := connected(t)
	x.out.out.offer(fetchOf, a)
	if err := x.in.begin(x.to, b); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.out.out.drop(); x.in.end() })
	return x
}

// prepare makes the objects of the session on the target.
func (x *apart) prepare(final bool) {
	x.t.Helper()
	x.from.mu.Lock()
	b, err := x.from.graph(final).encode()
	x.from.mu.Unlock()
	if err != nil {
		x.t.Fatal(err)
	}
	g, err := decodeGraph(b)
	if err != nil {
		x.t.Fatal(err)
	}
	x.to.mu.Lock()
	defer x.to.mu.Unlock()
	if err := x.to.restore(g, noProgress); err != nil {
		x.t.Fatal(err)
	}
}

// send exports straight, and returns how many bytes that were.
func (x *apart) send(all, final bool) (n uint64) {
	x.t.Helper()
	err := x.out.export(testkit.Context(x.t), x.from, fetchOf, all, final, func(_ string, done, _ uint64) { n = done })
	if err != nil {
		x.t.Fatal(err)
	}
	return n
}

// moved makes the target serve, as after a swap.
func (x *apart) moved() {
	x.t.Helper()
	x.in.end()
	r, err := shm.NewRing(x.away.ring)
	if err != nil {
		x.t.Fatal(err)
	}
	r.SetOwner(2)
	x.to.activate()
}

// Objects whose contents are in the arena, and such as are on a device, get there, also when
// the program changes them meanwhile. What is mapped does not go this way.
func TestContentsGoStraight(t *testing.T) {
	for name, unified := range map[string]bool{"unified": true, "discrete": false} {
		t.Run(name, func(t *testing.T) {
			x := newApart(t, unified)
			const size = 3<<20 + 4096 // several chunks of what is known to be written
			ctx, q, k := x.at.setup(0)
			a, b, mapped := x.at.buffer(ctx, size), x.at.buffer(ctx, 4096), x.at.buffer(ctx, 4096)
			x.at.fill(q, a, size, 7)
			x.at.fill(q, b, 4096, 1)
			x.at.fill(q, mapped, 4096, 5)
			x.at.call(&wire.MapBuffer{Queue: q, Mem: mapped, Map: 1, Blocking: 1, Flags: cl.MapWrite, Size: 64})
			x.prepare(false)
			if n := x.send(true, false); n != size+4096 {
				t.Errorf("%d bytes went, of %d that are not mapped", n, size+4096)
			}
			x.at.launch(q, k, b, 2, 1024, 0)
			x.at.call(&wire.Finish{Queue: q})
			if n := x.send(false, false); n != 4096 {
				t.Errorf("%d bytes went, of 4096 that had changed", n)
			}
			x.at.launch(q, k, a, 3, size/4, 0)
			x.at.call(&wire.Finish{Queue: q})
			if _, err := x.from.freeze(testkit.Context(t), time.Minute); err != nil {
				t.Fatal(err)
			}
			x.prepare(true)
			if n := x.send(false, true); n != size {
				t.Errorf("%d bytes went at the end, of %d that had changed", n, size)
			}
			x.from.mu.Lock()
			left := lookup[mem](x.from, mapped).dirty
			x.from.mu.Unlock()
			if !slices.Contains(left, true) {
				t.Error("what is mapped counts as sent")
			}
			x.moved()
			equal(t, x.away.read(q, a, size), 10)
			equal(t, x.away.read(q, b, 4096), 3)
			if !slices.ContainsFunc(x.away.read(q, mapped, 4096), func(v uint32) bool { return v != 5 }) {
				t.Error("what is mapped came straight, without what the application has written there")
			}
		})
	}
}

// A part of an export that has only what is mapped leaves alone what the rest is compared
// with.
func TestMappedObjectsAreExportedByThemselves(t *testing.T) {
	x := newApart(t, true)
	ctx, q, _ := x.at.setup(0)
	a, mapped := x.at.buffer(ctx, 4096), x.at.buffer(ctx, 4096)
	x.at.fill(q, a, 4096, 7)
	x.at.fill(q, mapped, 4096, 5)
	x.at.call(&wire.MapBuffer{Queue: q, Mem: mapped, Map: 1, Blocking: 1, Flags: cl.MapWrite, Size: 64})
	x.at.call(&wire.Finish{Queue: q})
	x.prepare(false)
	x.send(true, false)
	if _, err := x.from.freeze(testkit.Context(t), time.Minute); err != nil {
		t.Fatal(err)
	}
	p := &peerSink{some: mappedOnly}
	x.from.mu.Lock()
	ps := x.from.contents(true, p)
	for i := range ps {
		ps[i].m.users--
	}
	to := x.from.exportedTo
	x.from.mu.Unlock()
	if len(ps) != 1 || ps[0].ID != mapped || ps[0].N != 4096 {
		t.Errorf("%+v are exported", ps)
	}
	if to != "fetch:"+fetchOf {
		t.Errorf("the rest was exported to %q", to)
	}
}

// batch encodes pieces (object, offset, length, arena offset, size) and their bytes.
func batch(bytes []byte, pieces ...[5]uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(pieces)))
	for _, p := range pieces {
		for _, v := range p {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
	}
	return append(b, bytes...)
}

// greeted reads the greeting of a far executor that fetches.
func greeted(t *testing.T, conn net.Conn) {
	t.Helper()
	var b [8]byte
	if _, err := io.ReadFull(conn, b[:]); err != nil || binary.LittleEndian.Uint32(b[:]) != importMagic {
		t.Fatal(b, err)
	}
}

// fetching is a session with one buffer of 4096 bytes that fetches from the test.
func fetching(t *testing.T) (c *client, s *session, x *fetches, conn net.Conn, q, buffer uint32) {
	t.Helper()
	c = newClient(t)
	s = c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	buffer = c.buffer(ctx, 4096)
	c.fill(q, buffer, 4096, 9)
	c.call(&wire.Finish{Queue: q})
	s.active.Store(false) // as a target is not
	x = newFetches()
	conn, end := connected(t)
	if err := x.begin(s, end); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.end)
	greeted(t, conn)
	return c, s, x, conn, q, buffer
}

// A hostile host says which bytes of which objects come. It cannot choose where they are put,
// nor make the target fail in another way than with the end of the connection.
func TestWhatAHostileHostSendsStraight(t *testing.T) {
	c, s, _, conn, q, buffer := fetching(t)
	id := uint64(buffer)
	some := bytes.Repeat([]byte{1}, 4096)
	// What is released meanwhile is left out, and the place that the other host names is not
	// used: it would be outside of the arena.
	if _, err := conn.Write(batch(append(slices.Clone(some), some[:64]...), [5]uint64{9999, 0, 4096, 0, 4096}, [5]uint64{id, 64, 64, 1 << 62, 64})); err != nil {
		t.Fatal(err)
	}
	var ack [4]byte
	if _, err := io.ReadFull(conn, ack[:]); err != nil || ack != [4]byte{} {
		t.Fatal("it was not taken", ack, err)
	}
	for name, b := range map[string][]byte{
		"no pieces":             batch(nil),
		"many pieces":           binary.LittleEndian.AppendUint64(nil, batchPieces+1),
		"beyond the object":     batch(some, [5]uint64{id, 1, 4096, 0, 4096}),
		"far beyond the object": batch(some[:64], [5]uint64{id, 1 << 63, 1 << 63, 0, 64}),
		"another size":          batch(some, [5]uint64{id, 0, 64, 0, 4096}),
		"nothing":               batch(nil, [5]uint64{id, 0, 0, 0, 0}),
		"without end":           batch(nil, [5]uint64{9999, 0, 1 << 40, 0, 1 << 40}),
		"no object has that id": batch(some, [5]uint64{1<<32 + id, 0, 4096, 0, 4096}),
	} {
		x := newFetches()
		conn, end := connected(t)
		if err := x.begin(s, end); err != nil {
			t.Fatal(err)
		}
		greeted(t, conn)
		if _, err := conn.Write(b); err != nil {
			t.Fatal(name, err)
		}
		if got, err := io.ReadAll(conn); len(got) == 4 && [4]byte(got) == [4]byte{} {
			t.Errorf("%s: it was taken: %v", name, err)
		}
		x.end()
	}
	s.activate()
	got := c.read(q, buffer, 4096)
	for i, v := range got {
		if want := uint32(9); i >= 16 && i < 32 && v != 0x01010101 || (i < 16 || i >= 32) && v != want {
			t.Fatalf("element %d is %#x", i, v)
		}
	}
}

// When a fetch has ended, nothing comes of what is still on its way: other contents may have
// taken its place.
func TestNothingComesAfterAFetchHasEnded(t *testing.T) {
	c, s, x, conn, q, buffer := fetching(t)
	b := batch(bytes.Repeat([]byte{1}, 4096), [5]uint64{uint64(buffer), 0, 4096, 0, 4096})
	if _, err := conn.Write(b[:48]); err != nil { // the rest is on its way
		t.Fatal(err)
	}
	x.end()
	_, _ = conn.Write(b[48:])
	if got, err := io.ReadAll(conn); err == nil && len(got) > 0 {
		t.Errorf("it was answered: %x", got)
	}
	other, end := connected(t)
	if err := x.begin(s, end); !errors.Is(err, ErrState) {
		t.Errorf("another one begins: %v", err)
	}
	if got, err := io.ReadAll(other); err == nil && len(got) > 0 {
		t.Errorf("another one was greeted: %x", got)
	}
	s.activate()
	equal(t, c.read(q, buffer, 4096), 9)
}

// The host that a session has left has no say any more, also if it was not told to stop.
func TestContentsForAnExecutorThatServesAreRefused(t *testing.T) {
	c, s, _, conn, q, buffer := fetching(t)
	s.active.Store(true)
	if _, err := conn.Write(batch(bytes.Repeat([]byte{1}, 4096), [5]uint64{uint64(buffer), 0, 4096, 0, 4096})); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(conn); err == nil && len(got) == 4 && [4]byte(got) == [4]byte{} {
		t.Error("they were taken")
	}
	s.activate()
	equal(t, c.read(q, buffer, 4096), 9)
}

// A source waits for the other far executor for a while, takes the connection of its own
// fetch only, and gives up with the caller.
func TestSourceTakesTheFetchThatItWasToldOf(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	x := newFetches()
	a, b := connected(t)
	x.out.offer("another", a)
	ctx := testkit.Context(t)
	early, cancel := context.WithCancel(ctx)
	got := make(chan error, 1)
	go func() { got <- x.export(early, s, fetchOf, true, false, noProgress) }()
	cancel()
	if err := <-got; err == nil {
		t.Error("it went to another one")
	}
	a2, b2 := connected(t)
	x.out.offer(fetchOf, a2)
	if n, err := b.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Error("the connection of an earlier fetch stays")
	}
	if _, err := b2.Write([]byte("GET / HT")); err != nil {
		t.Fatal(err)
	}
	if err := x.export(ctx, s, fetchOf, true, false, noProgress); !errors.Is(err, errHostile) {
		t.Errorf("who does not greet: %v", err)
	}
	if n, err := b2.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Error("a connection that is of no use stays")
	}
}

// stub is a connection from which bytes come.
type stub struct {
	net.Conn
	io.Reader
}

func (s stub) Read(b []byte) (int, error)  { return s.Reader.Read(b) }
func (s stub) Write(b []byte) (int, error) { return len(b), nil }
func (s stub) Close() error                { return nil }

// FuzzTakeStraight reads what another host sends straight. Nothing is written outside of the
// session's objects, which the model of a runtime sees to.
func FuzzTakeStraight(f *testing.F) {
	c := newModelled(f)
	s := c.open(f, 1)
	f.Cleanup(func() { c.shut(f, s) })
	if err := s.play(script(scene()...)); err != nil {
		f.Fatal(err)
	}
	s.active.Store(false)
	s.pins.wanted = false
	whole := [5]uint64{sceneBuffer, 0, 4096, 0, 4096}
	f.Add(batch(make([]byte, 4096), whole))
	f.Add(batch(make([]byte, 64+4096), [5]uint64{sceneImage, 1, 2, 0, 64}, whole))
	f.Add(batch(make([]byte, 8), [5]uint64{sceneSub, 0, 1, 0, 1}, [5]uint64{sceneEvent, 0, 1, 0, 1}))
	f.Add(batch(nil, [5]uint64{sceneBuffer, 4096, 1, 0, 1}))
	f.Fuzz(func(t *testing.T, in []byte) {
		_ = s.takeStraight(stub{Reader: bytes.NewReader(in)})
		if s.window != 0 {
			t.Fatal("its window stays")
		}
	})
}
