package carrier

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/v1/gpuctlv1connect"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// farHost takes a carrier's connections for contents.
type farHost struct {
	gpuctlv1connect.UnimplementedExecutorServiceHandler
	conns  chan net.Conn // complete
	stays  bool          // it knows connections that stay
	peers  []string      // of the exports that were asked for
	out    net.Conn      // of the last export
	begun  bool          // sizesMark was sent on it
	refuse error         // of the next export, after its contents
}

func newFarHost(t *testing.T, c *carrier) *farHost {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &farHost{conns: make(chan net.Conn, 16)}
	go h.accept(l)
	mux := httptest.NewServer(second(gpuctlv1connect.NewExecutorServiceHandler(h)))
	t.Cleanup(func() { l.Close(); mux.Close() })
	c.dialer.Addresses, c.dialer.Plain = []string{l.Addr().String()}, true
	c.far = gpuctlv1connect.NewExecutorServiceClient(mux.Client(), mux.URL)
	return h
}

func second[A, B any](_ A, b B) B { return b }

func (h *farHost) accept(l net.Listener) {
	a := remote.Acceptor{Plain: true, Parts: wire.ArenaParts}
	parts := &remote.Gatherer{}
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			p, err := remote.ReadPreamble(conn)
			if err != nil {
				return
			}
			if conn, _, err = a.Accept(conn, p.Role); err != nil {
				return
			}
			if remote.Answer(conn, nil) != nil {
				return
			}
			if p.Role == remote.Part {
				conn, _, _ = parts.Add(conn)
			}
			if conn != nil {
				h.conns <- conn
			}
		}()
	}
}

func (h *farHost) next(t *testing.T) net.Conn {
	t.Helper()
	select {
	case conn := <-h.conns:
		t.Cleanup(func() { conn.Close() })
		return conn
	case <-testkit.Context(t).Done():
		t.Fatal("no connection has come")
		return nil
	}
}

// Export implements ExecutorService: it sends one piece of four bytes at 4096.
func (h *farHost) Export(_ context.Context, r *connect.Request[gpuctlv1.ExportRequest], _ *connect.ServerStream[gpuctlv1.Progress]) error {
	h.peers = append(h.peers, r.Msg.Peer)
	if r.Msg.Peer == remote.ExportPeer {
		h.out, h.begun = <-h.conns, false
		var hello [greetingSize]byte
		if _, err := io.ReadFull(h.out, hello[:]); err != nil {
			return err
		}
		h.stays = h.stays && hello[helloStays] == 1
	}
	b := []byte{}
	if !h.begun {
		b, h.begun = binary.LittleEndian.AppendUint64(b, sizesMark), true
	}
	if _, err := h.out.Write(append(append(b, batchOf(4096)...), "gpu!"...)); err != nil {
		return err
	}
	var ack [4]byte
	if _, err := io.ReadFull(h.out, ack[:]); err != nil {
		return err
	}
	if err := h.refuse; err != nil {
		return err
	}
	if !h.stays {
		return h.out.Close()
	}
	_, err := h.out.Write(binary.LittleEndian.AppendUint64(nil, endMark))
	return err
}

// batchOf is a batch with one piece of four bytes at a place of the arena.
func batchOf(at uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, 1)
	for _, v := range []uint64{1, 0, 4, at, 4} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func greetingOf(stays bool) []byte {
	b := binary.LittleEndian.AppendUint32(nil, greeting)
	b = append(b, 0, 0, 0, 0)
	if stays {
		b[helloStays] = 1
	}
	return b
}

// localTarget is an executor of this host that takes contents: it acknowledges each batch.
func localTarget(t *testing.T) (path string, got chan []byte) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "import")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	got = make(chan []byte, 16)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write(greetingOf(false))
			for {
				b := make([]byte, 8+pieceSize-8)
				if _, err := io.ReadFull(conn, b); err != nil {
					break
				}
				got <- b
				_, _ = conn.Write(make([]byte, 4))
			}
			conn.Close()
		}
	}()
	return path, got
}

type noProgress struct{}

func (noProgress) Send(*gpuctlv1.Progress) error { return nil }

// busyHost is a far host whose application does something while its contents are copied.
type busyHost struct {
	*farHost
	does func()
}

// Export implements ExecutorService.
func (h *busyHost) Export(ctx context.Context, r *connect.Request[gpuctlv1.ExportRequest], out *connect.ServerStream[gpuctlv1.Progress]) error {
	h.does()
	return h.farHost.Export(ctx, r, out)
}

// Contents that are copied while the session runs may come after a region of theirs was mapped,
// written and unmapped. What was written is sent from there, maybe later, as the connection takes it, or
// when there is one again; and the application may still write if the unmap waits for an event of its
// own. What it has not seen it has not written.
func TestContentsThatAreCopiedDoNotOverwriteWhatWasUnmapped(t *testing.T) {
	region := remote.Range(4096, 64<<10)
	newer := bytes.Repeat([]byte{7}, 64<<10)
	for name, x := range map[string]struct{ shown, keeps bool }{"shown": {true, true}, "not shown yet": {false, false}} {
		c := newCarrier(t)
		h := &busyHost{farHost: newFarHost(t, c)}
		srv := httptest.NewServer(second(gpuctlv1connect.NewExecutorServiceHandler(h)))
		t.Cleanup(srv.Close)
		c.far = gpuctlv1connect.NewExecutorServiceClient(srv.Client(), srv.URL)
		h.does = func() {
			m := remote.Mapping{Mem: 3, ID: 4, Writes: true, Comes: !x.shown, Block: region}
			if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
				t.Error(err)
			}
			if x.shown {
				copy(c.arena.Bytes()[region.At:], newer)
			}
			b := &batch{}
			u := &wire.Unmap{Mem: 3, Map: 4}
			if err := errors.Join(c.take(b, shm.Record{Op: wire.OpUnmap, Slot: wire.NoSlot, Body: u.Append(nil)}), c.flush(b)); err != nil {
				t.Error(err)
			}
		}
		target, _ := localTarget(t)
		export := func() {
			if err := c.export(testkit.Context(t), &gpuctlv1.ExportRequest{Peer: target}, noProgress{}); err != nil {
				t.Fatal(err)
			}
		}
		export()
		far := attach(t, c) // the connection is back
		if err := c.commands.Drain(testkit.Context(t)); err != nil {
			t.Fatal(err)
		}
		if sent := far.arena[region.At:region.End()]; x.shown && !bytes.Equal(sent, newer) {
			t.Errorf("%s: the far executor got %q, and not what the application has written", name, sent[:4])
		}
		if here := c.arena.Bytes()[region.At:region.End()]; bytes.Equal(here, newer) != x.keeps {
			t.Errorf("%s: the region has %q", name, here[:4])
		}
		h.does = func() {} // the next copy is of what the far executor has now
		if export(); string(c.arena.Bytes()[region.At:region.At+4]) != "gpu!" {
			t.Errorf("%s: the next copy has not come", name)
		}
	}
}

// A buffer that was unmapped while contents are copied may be released before they come. Its memory
// is free then, and the far executor may send other contents there.
func TestContentsThatAreCopiedComeToFreedMemoryOfWhatWasUnmapped(t *testing.T) {
	c := newCarrier(t)
	attach(t, c)
	h := &busyHost{farHost: newFarHost(t, c)}
	srv := httptest.NewServer(second(gpuctlv1connect.NewExecutorServiceHandler(h)))
	t.Cleanup(srv.Close)
	c.far = gpuctlv1connect.NewExecutorServiceClient(srv.Client(), srv.URL)
	h.does = func() {
		m := remote.Mapping{Mem: 3, ID: 4, Writes: true, Block: remote.Range(4096, 64<<10)}
		if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
			t.Error(err)
		}
		b, u := &batch{}, &wire.Unmap{Mem: 3, Map: 4}
		if err := errors.Join(c.take(b, shm.Record{Op: wire.OpUnmap, Slot: wire.NoSlot, Body: u.Append(nil)}), c.flush(b)); err != nil {
			t.Error(err)
		}
		if err := c.giveCommand(remote.KindFreed, remote.Words(0, 128<<10), nil); err != nil {
			t.Error(err)
		}
	}
	target, _ := localTarget(t)
	if err := c.export(testkit.Context(t), &gpuctlv1.ExportRequest{Peer: target}, noProgress{}); err != nil {
		t.Fatal(err)
	}
	if here := c.arena.Bytes()[4096:4100]; string(here) != "gpu!" {
		t.Errorf("the target finds %q, and not what the far executor has sent", here)
	}
}

// Exports to one target use one connection with the far host, so that none is made while the
// application stands still. A far host of an earlier version closes it each time.
func TestExportsToOneTargetUseOneConnection(t *testing.T) {
	for name, x := range map[string]struct {
		stays bool
		peers []string
	}{
		"it stays":                              {true, []string{remote.ExportPeer, remote.ExportKept, remote.ExportKept, remote.ExportPeer, remote.ExportPeer, remote.ExportPeer}},
		"the far host is of an earlier version": {false, []string{remote.ExportPeer, remote.ExportPeer, remote.ExportPeer, remote.ExportPeer, remote.ExportPeer, remote.ExportPeer}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCarrier(t)
			h := newFarHost(t, c)
			h.stays = x.stays
			target, got := localTarget(t)
			export := func(to string) error {
				clear(c.arena.Bytes()[4096:4100])
				err := c.export(testkit.Context(t), &gpuctlv1.ExportRequest{Peer: to}, noProgress{})
				if err == nil && string(c.arena.Bytes()[4096:4100]) != "gpu!" {
					t.Error("nothing has come to the arena")
				}
				return err
			}
			for range 3 {
				if err := export(target); err != nil {
					t.Fatal(err)
				}
				if b := <-got; !bytes.Equal(b, batchOf(4096)[:len(b)]) {
					t.Errorf("the target got %x", b)
				}
			}
			other, _ := localTarget(t)
			h.refuse = errors.New("the device is lost")
			if err := export(other); err == nil {
				t.Error("an export that failed was done")
			}
			h.refuse = nil
			for range 2 {
				if err := export(other); err != nil {
					t.Fatal(err)
				}
				c.exports.drop() // as when the session goes on where it is
			}
			if fmt.Sprint(h.peers) != fmt.Sprint(x.peers) {
				t.Errorf("exports by %v, not %v", h.peers, x.peers)
			}
		})
	}
}

// source sends the contents of one export, as an executor of this host does. It returns when they are
// acknowledged.
func source(conn net.Conn, batches int) error {
	defer conn.Close()
	var hello [greetingSize]byte
	if _, err := io.ReadFull(conn, hello[:]); err != nil {
		return err
	}
	if hello[helloSizes] != 1 || hello[helloStays] != 0 {
		return fmt.Errorf("greeted by %x", hello)
	}
	b := binary.LittleEndian.AppendUint64(nil, sizesMark)
	for range batches {
		b = append(b, batchOf(8192)...)
	}
	if _, err := conn.Write(b); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 4*batches))
	return err
}

// importing runs one export of a source to the carrier.
func importing(t *testing.T, c *carrier, batches int) (sent, passed chan error) {
	t.Helper()
	a, b := net.Pipe()
	sent, passed = make(chan error, 1), make(chan error, 1)
	go func() { sent <- source(a, batches) }()
	go func() {
		err := c.importFrom(b)
		b.Close()
		passed <- err
	}()
	return sent, passed
}

// takeBatches reads batches as a far executor does, and acknowledges each.
func takeBatches(t *testing.T, conn net.Conn, n int) {
	t.Helper()
	for range n {
		b := make([]byte, 8+pieceSize+4)
		if _, err := io.ReadFull(conn, b); err != nil {
			t.Fatal(err)
		}
		if want := append(batchOf(8192), "host"...); !bytes.Equal(b, want) {
			t.Fatalf("%x came, not %x", b, want)
		}
		if _, err := conn.Write(make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestContentsForTheFarHostUseOneConnection(t *testing.T) {
	c := newCarrier(t)
	h := newFarHost(t, c)
	copy(c.arena.Bytes()[8192:], "host")
	begin := func(stays bool) net.Conn {
		far := h.next(t)
		if _, err := far.Write(greetingOf(stays)); err != nil {
			t.Fatal(err)
		}
		return far
	}
	round := func(far net.Conn, sent, passed chan error, n int) {
		t.Helper()
		takeBatches(t, far, n)
		if err := errors.Join(<-sent, <-passed); err != nil {
			t.Fatal(err)
		}
	}
	sent, passed := importing(t, c, 2)
	far := begin(true)
	round(far, sent, passed, 2)
	for n := range 3 { // also none
		sent, passed = importing(t, c, n)
		round(far, sent, passed, n)
	}
	// Something is still on its way when a source ends before its contents do: the connection is of
	// no use any more.
	a, b := net.Pipe()
	go func() { passed <- c.importFrom(b); b.Close() }()
	if _, err := io.ReadFull(a, make([]byte, greetingSize)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write(append(binary.LittleEndian.AppendUint64(nil, sizesMark), batchOf(8192)[:20]...)); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if err := <-passed; err == nil {
		t.Error("half a batch was passed on")
	}
	if n, err := far.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the connection stays: %v", err)
	}
	sent, passed = importing(t, c, 1)
	far = begin(false) // an earlier version
	round(far, sent, passed, 1)
	if n, err := far.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the connection stays: %v", err)
	}
	// A far host that is lost ends the export.
	sent, passed = importing(t, c, 1)
	begin(true).Close()
	if err := <-passed; err == nil || <-sent == nil {
		t.Errorf("without a far host: %v", err)
	}
}

// askedFar keeps what it was asked for.
type askedFar struct {
	farStub
	request *gpuctlv1.FreezeRequest
}

func (f *askedFar) Freeze(_ context.Context, r *connect.Request[gpuctlv1.FreezeRequest]) (*connect.Response[gpuctlv1.SnapshotResponse], error) {
	f.request = r.Msg
	return farStub{}.Freeze(context.Background(), r)
}

// A far executor that knows how waits itself for what was sent before a freeze, and says
// unasked when all that it had to say has been said: the carrier waits for no more than its
// answer to the freeze. One that does not is asked before and after.
func TestFreezeWaitsOnceForTheFarHost(t *testing.T) {
	for _, knows := range []bool{true, false} {
		c := newCarrier(t)
		far := &askedFar{}
		c.far = far
		c.active.Store(true)
		c.freezesAfter.Store(knows)
		go c.lead()
		answer := func(n uint64) {
			t.Helper()
			testkit.Until(t, "a question that can be answered", func() error {
				return errors.Join(c.giveCommand(remote.KindSynced, remote.Words(n), nil), c.giveBulk(remote.KindSynced, remote.Words(n), nil))
			})
		}
		done := make(chan error, 1)
		go func() {
			_, err := (&controller{c: c}).Freeze(testkit.Context(t), connect.NewRequest(&gpuctlv1.FreezeRequest{TimeoutMs: 1000}))
			done <- err
		}()
		if !knows {
			answer(1)
		}
		select {
		case err := <-done:
			t.Fatalf("it did not wait for what the far executor had said before: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
		answer(2)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		want := &gpuctlv1.FreezeRequest{TimeoutMs: 1000}
		if knows {
			want.After, want.Streams = 1, 2
		}
		if far.request.After != want.After || far.request.Streams != want.Streams || far.request.TimeoutMs != want.TimeoutMs {
			t.Errorf("asked for %v, not %v", far.request, want)
		}
	}
}

// A network that is gone ends connections in silence. When the streams have found out, no call waits on one that was kept
// from before.
func TestCallsAfterABrokenStreamHaveAConnectionOfTheirOwn(t *testing.T) {
	c := newCarrier(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c.dialer.Addresses, c.dialer.Plain = []string{l.Addr().String()}, true
	calls, streams := make(chan net.Conn), make(chan net.Conn)
	go func() {
		a := remote.Acceptor{Plain: true, Parts: wire.ArenaParts}
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p, err := remote.ReadPreamble(conn)
			if err == nil {
				conn, _, err = a.Accept(conn, p.Role)
			}
			if err != nil || remote.Answer(conn, nil) != nil {
				conn.Close()
				continue
			}
			to := streams
			if p.Role == remote.Control {
				to = calls
			}
			select {
			case to <- conn:
			case <-c.ctx.Done():
				return
			}
		}
	}()
	call := func() {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://far", nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := c.control.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		_ = answer.Body.Close()
	}
	serve := func() (n <-chan int) { // how many calls come on the next connection
		out := make(chan int, 1)
		go func() {
			conn := <-calls
			defer conn.Close()
			in, n := bufio.NewReader(conn), 0
			for {
				if _, err := http.ReadRequest(in); err != nil {
					break
				}
				n++
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
			}
			out <- n
		}()
		return out
	}
	first := make(chan error, 1)
	go c.keep(remote.Commands, c.commands, c.command, first)
	stream := <-streams
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	before := serve()
	call()
	call()
	stream.Close()
	defer (<-streams).Close() // it has connected again
	if n := <-before; n != 2 {
		t.Errorf("%d calls came on one connection", n)
	}
	serve()
	call()
}
