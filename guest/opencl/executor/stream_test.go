package executor

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/guest/statestream"
)

// sendAway freezes a session, and returns its graph and the stream of its contents.
func sendAway(t testing.TB, s *session) (g *graph, all []*gpuctlv1.StateChunk) {
	t.Helper()
	if _, err := s.freeze(t.Context(), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	return sendFrozen(t, s)
}

func sendFrozen(t testing.TB, s *session) (g *graph, all []*gpuctlv1.StateChunk) {
	t.Helper()
	s.mu.Lock()
	b, err := s.graph(true).encode()
	s.mu.Unlock()
	if err == nil {
		g, err = decodeGraph(b)
	}
	if err == nil {
		err = s.send(t.Context(), statestream.NewWriter(func(c *gpuctlv1.StateChunk) error { all = append(all, proto.CloneOf(c)); return nil }))
	}
	if err != nil {
		t.Fatal(err)
	}
	return g, all
}

func reader(all []*gpuctlv1.StateChunk) io.Reader {
	return statestream.NewReader(func() (*gpuctlv1.StateChunk, error) {
		if len(all) == 0 {
			return nil, io.EOF
		}
		c := all[0]
		all = all[1:]
		return c, nil
	})
}

func (c *client) prepared(generation uint32, library string, g *graph) *session {
	c.t.Helper()
	s := c.executorOf(generation, library)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.restore(g, noProgress); err != nil {
		c.t.Fatal(err)
	}
	s.prepared = true
	return s
}

// A session's contents leave the VM and come back, to a device that computes in the VM's
// memory and to one that does not. In between, nothing of them is in the VM.
func TestAway(t *testing.T) {
	const grind = "/usr/lib/oclgrind/liboclgrind-rt-icd.so"
	for name, library := range map[string]string{"same": pocl(t), "own memory": grind} {
		t.Run(name, func(t *testing.T) {
			if _, err := os.Stat(library); err != nil {
				t.Fatal("needs the package oclgrind: make setup")
			}
			c := newClient(t)
			s := c.executor(1)
			s.activate()
			ctx, q, k := c.setup(0)
			const large = streamChunk + dirtyChunk + 4096 // so that there are whole and partial pieces
			b, small := c.buffer(ctx, large), c.buffer(ctx, 512)
			c.fill(q, b, large, 5)
			c.launch(q, k, b, 3, 1<<10, 0)
			c.fill(q, small, 512, 9)
			c.call(&wire.Finish{Queue: q})
			g, all := sendAway(t, s)
			for _, chunk := range all {
				if len(chunk.GetData()) > statestream.ChunkSize {
					t.Fatalf("a chunk of %d bytes", len(chunk.GetData()))
				}
			}
			if s.windowSize > 2*streamChunk {
				t.Errorf("a window of %d bytes", s.windowSize)
			}
			s.closed.Store(true)
			s.retire()

			to := c.prepared(2, library, g)
			n, err := to.receiveState(reader(all))
			if err != nil || n != large+512 {
				t.Fatal(n, err)
			}
			to.ring.(*shm.Ring).SetOwner(2)
			to.activate()
			equal(t, c.read(q, small, 512), 9)
			got := c.read(q, b, large)
			equal(t, got[:1<<10], 8)
			equal(t, got[1<<10:], 5)
		})
	}
}

// A stream that fails changes nothing for the session.
func TestAwayFails(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, 1<<20)
	c.fill(q, b, 1<<20, 7)
	c.call(&wire.Finish{Queue: q})
	if _, err := s.freeze(t.Context(), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	n := 0
	err := s.send(t.Context(), statestream.NewWriter(func(*gpuctlv1.StateChunk) error {
		if n++; n == 3 {
			return broken
		}
		return nil
	}))
	if !errors.Is(err, broken) || s.sent {
		t.Fatal(err, s.sent)
	}
	s.thaw()
	equal(t, c.read(q, b, 1<<20), 7)
	if _, all := sendAway(t, s); !s.sent {
		t.Error("nothing was sent")
	} else if got, err := io.ReadAll(reader(all)); err != nil || len(got) < 1<<20 {
		t.Errorf("the second try sent %d bytes, %v", len(got), err)
	}
	s.thaw()
	if s.sent {
		t.Error("it still counts as sent")
	}
	equal(t, c.read(q, b, 1<<20), 7)
}

// awayBench returns a prepared executor, and a stream of the contents that belong to it.
func awayBench(t testing.TB) (to *session, stream []byte, all []*gpuctlv1.StateChunk) {
	t.Helper()
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	c.fill(q, c.buffer(ctx, 4096), 4096, 1)
	c.fill(q, c.buffer(ctx, 100), 100, 2)
	img := c.id()
	c.call(&wire.CreateImage{ID: img, Context: ctx, Flags: cl.MemReadWrite, Order: 0x10B5, Type: 0x10D2, ImageType: 0x10F1, Width: 8, Height: 4})
	c.call(&wire.Finish{Queue: q})
	g, all := sendAway(t, s)
	stream, err := io.ReadAll(reader(all))
	if err != nil {
		t.Fatal(err)
	}
	s.closed.Store(true)
	s.retire()
	return c.prepared(2, pocl(t), g), stream, all
}

func TestAwayDamaged(t *testing.T) {
	to, stream, all := awayBench(t)
	if _, err := to.receiveState(reader(all)); err != nil {
		t.Fatal(err)
	}
	if _, err := to.receiveState(reader(all[:len(all)-1])); !errors.Is(err, statestream.ErrTruncated) {
		t.Errorf("without its mark: %v", err)
	}
	flipped := proto.CloneOf(all[0])
	flipped.Data[40] ^= 1
	if _, err := to.receiveState(reader(append([]*gpuctlv1.StateChunk{flipped}, all[1:]...))); err == nil {
		t.Error("a flipped bit is taken in")
	}
	// A stream that does not fit the objects is refused even if its end mark is correct.
	for n := range len(stream) {
		if _, err := to.receiveState(bytes.NewReader(stream[:n])); err == nil {
			t.Fatalf("%d of %d bytes are taken for all", n, len(stream))
		}
	}
	if _, err := to.receiveState(bytes.NewReader(append(slices.Clone(stream), 0))); err == nil {
		t.Error("more than all is taken in")
	}
	first := streamHead + streamHead + 4096
	if _, err := to.receiveState(bytes.NewReader(slices.Concat(stream[:streamHead], stream[first:]))); err == nil {
		t.Error("a piece less is taken in")
	}
}

// A stream that ends correctly but lacks an object would leave that object's content zero.
func TestAStateWithoutAnObjectIsNotTakenForWhole(t *testing.T) {
	to, stream, _ := awayBench(t)
	// The last piece is the whole image.
	last := len(stream) - 2*streamHead - 8*4*4
	tail := slices.Clone(stream[len(stream)-streamHead:])
	tail[8]--
	if n, err := to.receiveState(bytes.NewReader(slices.Concat(stream[:last], tail))); !errors.Is(err, errState) {
		t.Errorf("%d bytes without the image are taken in: %v", n, err)
	}
	empty := slices.Concat(stream[:streamHead], make([]byte, streamHead))
	if n, err := to.receiveState(bytes.NewReader(empty)); !errors.Is(err, errState) {
		t.Errorf("%d bytes are taken for a state: %v", n, err)
	}
}
