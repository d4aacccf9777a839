package executor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/arena"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// model builds the runtime of testdata/model.c for this run, and returns its path.
func model(t testing.TB) string {
	t.Helper()
	lib := filepath.Join(t.TempDir(), "model.so")
	out, err := exec.Command("cc", "-O2", "-g", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-o", lib, filepath.Join("testdata", "model.c"), "-lpthread").CombinedOutput()
	if err != nil {
		t.Fatalf("build the model: %v\n%s", err, out)
	}
	return lib
}

// modelled opens sessions over the client's memory with the model as the runtime. It starts
// none of a session's background goroutines.
type modelled struct {
	*client
	library string
}

func newModelled(t testing.TB) *modelled {
	return &modelled{newClient(t), model(t)}
}

func (c *modelled) open(t testing.TB, generation uint32) *session {
	s, err := open(Config{
		Generation: generation, Runtime: &gpuctlv1.Runtime{Library: c.library}, Logger: slog.New(slog.DiscardHandler),
	}, dup(t, c.ring), dup(t, c.arena), dup(t, c.state))
	if err != nil {
		t.Fatal(err)
	}
	s.active.Store(generation == 1)
	t.Setenv("GPUCTL_MODEL_ARENA", fmt.Sprintf("%x %x", s.arena.Pointer(0), s.arena.Size()))
	return s
}

// shut releases everything that a session has, as the end of its process does. It returns
// when no goroutine of the session runs any more.
func (c *modelled) shut(t testing.TB, s *session) {
	for s.inflight.Load() > 0 {
		runtime.Gosched()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parked, s.watches, s.redo = nil, nil, nil
	s.active.Store(false)
	for _, o := range s.ghosts {
		s.discard(o)
	}
	for id, o := range slices.Backward(s.objs) {
		if o != nil && id >= wire.FirstID {
			s.discard(o)
		}
	}
	for _, q := range s.xfer.queues {
		cl.ReleaseCommandQueue(q)
	}
	s.host.end()
	if err := errors.Join(s.arena.Close(), s.state.Close(), s.ring.(*shm.Ring).Close()); err != nil {
		t.Fatal(err)
	}
}

// discard releases only the vendor's object.
func (*session) discard(o any) {
	switch o := o.(type) {
	case *device:
		cl.ReleaseDevice(o.vendor)
	case *clContext:
		cl.ReleaseContext(o.vendor)
	case *queue:
		for _, p := range o.pends {
			if cl.ReleaseEvent(p.ev); p.keep != nil {
				p.keep.Unpin()
			}
		}
		if o.vendor != 0 {
			cl.ReleaseCommandQueue(o.vendor)
		}
	case *mem:
		if o.vendor != 0 {
			cl.ReleaseMemObject(o.vendor)
		}
	case *sampler:
		cl.ReleaseSampler(o.vendor)
	case *program:
		if o.vendor != 0 {
			cl.ReleaseProgram(o.vendor)
		}
	case *kernel:
		cl.ReleaseKernel(o.vendor)
	case *event:
		if o.vendor != 0 {
			cl.ReleaseEvent(o.vendor)
		}
	}
}

// Ids of the objects in the scene.
const (
	sceneContext = wire.FirstID + iota
	sceneQueue
	sceneLoose // an out-of-order queue with profiling
	sceneBuffer
	sceneSub
	sceneImage
	sceneSampler
	sceneProgram
	sceneKernel
	sceneImageKernel
	sceneEvent // a user event
	sceneNext
)

// scene returns the requests with which an application creates one object of each type,
// before the fuzzer's requests.
func scene() []wire.Request {
	one := binary.LittleEndian.AppendUint32(nil, 1)
	return []wire.Request{
		&wire.CreateContext{ID: sceneContext, Devices: []uint32{1}},
		&wire.CreateQueue{ID: sceneQueue, Context: sceneContext, Device: 1},
		&wire.CreateQueue{ID: sceneLoose, Context: sceneContext, Device: 1, Props: cl.QueueOutOfOrderExecModeEnable | cl.QueueProfilingEnable},
		&wire.CreateBuffer{ID: sceneBuffer, Context: sceneContext, Flags: cl.MemReadWrite, Size: 4096},
		&wire.CreateSubBuffer{ID: sceneSub, Parent: sceneBuffer, Flags: cl.MemReadWrite, Origin: 1024, Size: 1024},
		&wire.CreateImage{ID: sceneImage, Context: sceneContext, Flags: cl.MemReadWrite, Order: 0x10B5, Type: 0x10D2, ImageType: 0x10F1, Width: 8, Height: 4},
		&wire.CreateSampler{ID: sceneSampler, Context: sceneContext},
		&wire.CreateProgramSource{ID: sceneProgram, Context: sceneContext, Mode: wire.DataInline, Source: []byte("kernel void mp(global uint *a, uint n) {}")},
		&wire.BuildProgram{Program: sceneProgram},
		&wire.CreateKernel{ID: sceneKernel, Program: sceneProgram, Name: []byte("mp")},
		&wire.CreateKernel{ID: sceneImageKernel, Program: sceneProgram, Name: []byte("isl")},
		&wire.CreateUserEvent{ID: sceneEvent, Context: sceneContext},
		&wire.SetArg{Kernel: sceneKernel, Index: 0, Kind: wire.ArgMem, Object: sceneBuffer, Size: 8},
		&wire.SetArg{Kernel: sceneKernel, Index: 1, Kind: wire.ArgPlain, Size: 4, Value: one},
	}
}

// plays returns requests of applications that use the objects of the scene.
func plays() [][]wire.Request {
	const stage = testSplit
	one := []uint64{1, 1, 1}
	zero := []uint64{0, 0, 0}
	box := []uint64{8, 4, 1}
	return [][]wire.Request{
		{
			&wire.Ndrange{Queue: sceneQueue, Kernel: sceneKernel, Dims: 1, Glob0: 64, Event: sceneNext},
			&wire.EventCallback{Event: sceneNext, Type: 0, Callback: 5},
			&wire.ReadBuffer{Queue: sceneQueue, Mem: sceneBuffer, Blocking: 1, Size: 64, Mode: wire.DataStaged, StageOff: stage, StageLen: 64},
			&wire.Release{ID: sceneNext}, &wire.Finish{Queue: sceneQueue},
		},
		{ // parked behind the user event; their objects are released in the meantime
			&wire.Ndrange{Queue: sceneQueue, Kernel: sceneKernel, Dims: 1, Glob0: 64, Event: sceneNext, Wait: []uint32{sceneEvent}},
			&wire.FillBuffer{Queue: sceneQueue, Mem: sceneBuffer, Size: 64, Pattern: []byte{1, 2, 3, 4}},
			&wire.Finish{Queue: sceneQueue},
			&wire.Release{ID: sceneSub}, &wire.Release{ID: sceneBuffer, Callback: 9}, &wire.Release{ID: sceneKernel},
			&wire.SetUserEvent{Event: sceneEvent, Status: 0},
		},
		{
			&wire.WriteBuffer{Queue: sceneLoose, Mem: sceneSub, Size: 16, Mode: wire.DataInline, Content: make([]byte, 16)},
			&wire.WriteBuffer{Queue: sceneLoose, Mem: sceneBuffer, Size: 128, Mode: wire.DataStaged, StageOff: stage, StageLen: 128, Pend: 3},
			&wire.CopyBuffer{Queue: sceneLoose, Src: sceneBuffer, Dst: sceneSub, Size: 16, SrcOff: 8},
			&wire.ReadBufferRect{Queue: sceneLoose, Mem: sceneBuffer, Blocking: 1, Mode: wire.DataStaged, StageOff: stage, StageLen: 64, Origin: zero, Region: box, RowPitch: 16},
			&wire.WriteBufferRect{Queue: sceneLoose, Mem: sceneBuffer, Mode: wire.DataStaged, StageOff: stage, StageLen: 64, Origin: one, Region: box, Pend: 4},
			&wire.CopyBufferRect{Queue: sceneLoose, Src: sceneBuffer, Dst: sceneBuffer, SrcOrigin: zero, DstOrigin: one, Region: box},
			&wire.Barrier{Queue: sceneLoose}, &wire.Marker{Queue: sceneLoose, Event: sceneNext, Wait: []uint32{sceneEvent}},
			&wire.Flush{Queue: sceneLoose}, &wire.EventStatus{Event: sceneNext}, &wire.EventProfiling{Event: sceneNext},
		},
		{
			&wire.WriteImage{Queue: sceneQueue, Image: sceneImage, Blocking: 1, Mode: wire.DataStaged, StageOff: stage, StageLen: 128, Origin: zero, Region: box},
			&wire.ReadImage{Queue: sceneQueue, Image: sceneImage, Blocking: 1, Mode: wire.DataStaged, StageOff: stage, StageLen: 128, Origin: zero, Region: box},
			&wire.FillImage{Queue: sceneQueue, Image: sceneImage, Color: make([]byte, 16), Origin: zero, Region: box},
			&wire.CopyImage{Queue: sceneQueue, Src: sceneImage, Dst: sceneImage, SrcOrigin: zero, DstOrigin: zero, Region: one},
			&wire.CopyImageToBuffer{Queue: sceneQueue, Src: sceneImage, Dst: sceneBuffer, Origin: zero, Region: box},
			&wire.CopyBufferToImage{Queue: sceneQueue, Src: sceneBuffer, Dst: sceneImage, Origin: zero, Region: box},
			&wire.SetArg{Kernel: sceneImageKernel, Index: 0, Kind: wire.ArgImage, Object: sceneImage, Size: 8},
			&wire.SetArg{Kernel: sceneImageKernel, Index: 1, Kind: wire.ArgSampler, Object: sceneSampler, Size: 8},
			&wire.SetArg{Kernel: sceneImageKernel, Index: 2, Kind: wire.ArgLocal, Size: 64},
			&wire.CloneKernel{ID: sceneNext, Kernel: sceneImageKernel},
			&wire.Ndrange{Queue: sceneQueue, Kernel: sceneNext, Dims: 2, Glob0: 8, Glob1: 4, Loc0: 8, Loc1: 1},
		},
		{
			&wire.MapBuffer{Queue: sceneQueue, Mem: sceneSub, Map: 1, Blocking: 1, Flags: cl.MapWrite, Size: 64},
			&wire.MapImage{Queue: sceneQueue, Image: sceneImage, Map: 2, Blocking: 1, Flags: cl.MapRead, Origin: zero, Region: box},
			&wire.Unmap{Queue: sceneQueue, Mem: sceneSub, Map: 1}, &wire.Unmap{Queue: sceneQueue, Mem: sceneImage, Map: 2},
			&wire.MapBuffer{Queue: sceneQueue, Mem: sceneBuffer, Map: 3, Flags: cl.MapWrite, Size: 64, Wait: []uint32{sceneEvent}, Event: sceneNext},
			&wire.Migrate{Queue: sceneLoose, Mems: []uint32{sceneBuffer, sceneImage}},
		},
		{
			&wire.CreateSubDevices{Parent: 1, Props: []uint64{0x1086, 1, 0}, IDs: []uint32{sceneNext, sceneNext + 1}},
			&wire.CreateContext{ID: sceneNext + 2, Devices: []uint32{sceneNext}},
			&wire.CreateQueue{ID: sceneNext + 3, Context: sceneNext + 2, Device: sceneNext},
			&wire.CreateProgramSource{ID: sceneNext + 4, Context: sceneContext, Mode: wire.DataInline, Source: []byte("x")},
			&wire.CompileProgram{Program: sceneNext + 4, Options: []byte("-D A\x00")},
			&wire.LinkProgram{ID: sceneNext + 5, Context: sceneContext, Inputs: []uint32{sceneNext + 4}},
			&wire.ProgramInfo{Program: sceneNext + 5, Param: cl.ProgramBinaries}, &wire.BuildInfo{Program: sceneProgram, Device: 1, Param: cl.ProgramBuildLog},
			&wire.CreateImage{ID: sceneNext + 6, Context: sceneContext, Buffer: sceneBuffer, Order: 0x10B5, Type: 0x10D2, ImageType: 0x10F1, Width: 8, Height: 4, RowPitch: 32},
			&wire.ImageFormats{Context: sceneContext, ImageType: 0x10F1}, &wire.SessionInfo{}, &wire.Fetch{Token: 1}, &wire.DeviceTimer{Device: 1},
			&wire.KernelInfo{Kernel: sceneKernel, Param: cl.KernelFunctionName}, &wire.KernelArgInfo{Kernel: sceneKernel, Param: cl.KernelArgName},
			&wire.KernelWgInfo{Kernel: sceneKernel, Device: 1, Param: cl.KernelWorkGroupSize}, &wire.WaitEvents{Wait: []uint32{sceneEvent}},
		},
	}
}

// script encodes requests as the fuzzer's input. Each has its operation number, a slot or
// none, the length of its fields, and the fields.
func script(ms ...wire.Request) []byte {
	var b []byte
	for i, m := range ms {
		body := m.Append(nil)
		b = append(b, byte(m.Op()), byte(i))
		b = binary.LittleEndian.AppendUint16(b, uint16(len(body)))
		b = append(b, body...)
	}
	return b
}

// mostID bounds the ids of new objects. The executor's table has an entry for each id up to
// the largest, and to allocate a table of 400 MB in each run takes too long.
const mostID = 4096

// play runs a script as the ring's reader would, until the client violates the protocol. It
// skips bulk transfers, because the application takes part in them.
func (s *session) play(b []byte) error {
	for len(b) >= 4 {
		op, slot, n := wire.Op(b[0]), uint16(b[1]), int(binary.LittleEndian.Uint16(b[2:]))
		if slot%4 == 3 {
			slot = wire.NoSlot
		}
		b = b[4:]
		n = min(n, len(b))
		body := slices.Clone(b[:n])
		b = b[n:]
		if m := wire.New(op); m != nil && m.Decode(body) == nil {
			v := reflect.ValueOf(m).Elem()
			if mode := v.FieldByName("Mode"); mode.IsValid() && mode.Uint() == wire.DataBulk {
				continue
			}
			for _, name := range []string{"ID", "Event"} {
				if id := v.FieldByName(name); id.IsValid() {
					id.SetUint(id.Uint() % mostID)
				}
			}
			if ids := v.FieldByName("IDs"); ids.IsValid() {
				for i := range ids.Len() {
					ids.Index(i).SetUint(ids.Index(i).Uint() % mostID)
				}
			}
			body = m.Append(nil)
		}
		s.mu.Lock()
		after, err := s.dispatch(call{op, slot, body})
		s.mu.Unlock()
		if err != nil {
			return err
		}
		if after != nil {
			after(func() {})
		}
	}
	return nil
}

// FuzzDispatch simulates an application. Whatever it requests, the executor must not crash,
// and must not give the driver a released object or memory outside of the range that is
// meant. Afterwards the session must be movable: another executor restores its graph, or
// refuses it with ErrRefused.
func FuzzDispatch(f *testing.F) {
	c := newModelled(f)
	for _, p := range plays() {
		f.Add(script(p...))
	}
	before := script(scene()...)
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > wire.MaxRequest {
			t.Skip()
		}
		s := c.open(t, 1)
		defer c.shut(t, s)
		if err := s.play(before); err != nil {
			t.Fatal(err)
		}
		if err := s.play(in); err != nil {
			return // a violation of the protocol, which ends the session
		}
		for s.inflight.Load() > 0 {
			runtime.Gosched()
		}
		s.mu.Lock()
		s.settleAll()
		b, err := s.graph(true).encode()
		s.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		g, err := decodeGraph(b)
		if err != nil {
			t.Fatalf("the graph of a session is refused: %v", err)
		}
		to := c.open(t, 2)
		defer c.shut(t, to)
		to.mu.Lock()
		defer to.mu.Unlock()
		if err := to.restore(g, noProgress); err != nil && !errors.Is(err, ErrRefused) {
			t.Fatalf("a session cannot move: %v", err)
		}
	})
}

// graphs returns graphs of real sessions.
func graphs(t testing.TB, c *modelled) (out [][]byte) {
	t.Helper()
	for _, p := range append(plays(), nil) {
		s := c.open(t, 1)
		for _, b := range [][]byte{script(scene()...), script(p...)} {
			if err := s.play(b); err != nil {
				t.Fatal(err)
			}
		}
		s.mu.Lock()
		s.settleAll()
		for _, final := range []bool{false, true} {
			b, err := s.graph(final).encode()
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, b)
		}
		s.mu.Unlock()
		c.shut(t, s)
	}
	return out
}

// allocated returns how many bytes f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// graphGrowth is how many bytes may be allocated for one byte of a graph. One byte can
// encode the largest element, which is in memory twice while its list grows.
const graphGrowth = 1024

// FuzzGraph decodes graphs. A graph that is accepted is complete: encoded and decoded again,
// it is the same. The memory that it takes is bounded by its length.
func FuzzGraph(f *testing.F) {
	for _, b := range graphs(f, newModelled(f)) {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var g *graph
		var err error
		if len(in) < 512 { // not measured, because ReadMemStats stops the world
			g, err = decodeGraph(in)
		} else if n := allocated(func() { g, err = decodeGraph(in) }); n > graphGrowth*uint64(len(in))+1<<20 {
			t.Fatalf("%d bytes take %d", len(in), n)
		}
		if err != nil {
			return
		}
		b, err := g.encode()
		if err != nil {
			t.Fatal(err)
		}
		if late, err := LateUnmaps(b); err != nil {
			t.Errorf("%d unmaps: %v", len(late), err)
		}
		again, err := decodeGraph(b)
		if err != nil {
			t.Fatalf("what was taken is refused: %v", err)
		}
		if !reflect.DeepEqual(g, again) {
			t.Fatal(cmp.Diff(g, again, cmp.Exporter(func(reflect.Type) bool { return true })))
		}
	})
}

// largest returns the largest id that is not the id of a ghost.
func (g *graph) largest() (id uint32) {
	v := reflect.ValueOf(g).Elem()
	for i := range v.NumField() {
		if l := v.Field(i); l.Kind() == reflect.Slice && l.Type().Elem().Kind() == reflect.Struct {
			for j := range l.Len() {
				if x := l.Index(j).FieldByName("ID"); x.IsValid() && x.Uint() <= wire.MaxID {
					id = max(id, uint32(x.Uint()))
				}
			}
		}
	}
	return id
}

// FuzzPrepare makes an executor restore a session's objects from a graph, twice, as a swap
// does. The executor must not crash, and must not give the driver objects that do not exist.
func FuzzPrepare(f *testing.F) {
	c := newModelled(f)
	for _, b := range graphs(f, c) {
		f.Add(b)
	}
	from := c.open(f, 1) // the graphs name its part of the arena
	f.Cleanup(func() { c.shut(f, from) })
	f.Fuzz(func(t *testing.T, in []byte) {
		g, err := decodeGraph(in)
		if err != nil || g.largest() > mostID {
			return
		}
		s := c.open(t, 2)
		defer c.shut(t, s)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.restore(g, noProgress) == nil {
			g.Events, g.Parked, g.Watches = nil, nil, nil // these are restored only once
			_ = s.restore(g, noProgress)
		}
	})
}

// FuzzReceive reads an arbitrary stream into an executor, which must not crash. A stream
// that it accepts as complete has exactly the bytes that were sent.
func FuzzReceive(f *testing.F) {
	c := newModelled(f)
	s := c.open(f, 1)
	if err := s.play(script(scene()...)); err != nil {
		f.Fatal(err)
	}
	s.frozen = true
	s.pins.wanted = false
	g, all := sendFrozen(f, s)
	stream, err := io.ReadAll(reader(all))
	if err != nil {
		f.Fatal(err)
	}
	to := c.open(f, 2) // before the other executor gives up its part of the arena
	c.shut(f, s)
	to.mu.Lock()
	err = to.restore(g, noProgress)
	to.mu.Unlock()
	if err != nil {
		f.Fatal(err)
	}
	to.pins.wanted = false // to pin pages with a driver takes milliseconds
	f.Add(stream)
	f.Add(stream[:70])
	f.Add(stream[:len(stream)-streamHead])
	f.Fuzz(func(t *testing.T, in []byte) {
		n, err := to.receiveState(bytes.NewReader(in))
		if err == nil && n != 4096+128 {
			t.Fatalf("%d bytes are all of it", n)
		}
	})
}

// FuzzStateIndex reads the index of a state file. No entry may be outside of the file, and
// no object may be in it twice.
func FuzzStateIndex(f *testing.F) {
	c := newModelled(f)
	s := c.open(f, 1)
	f.Cleanup(func() { c.shut(f, s) })
	if err := s.play(script(scene()...)); err != nil {
		f.Fatal(err)
	}
	s.frozen = true
	file, err := os.Create(filepath.Join(f.TempDir(), "state"))
	if err != nil {
		f.Fatal(err)
	}
	defer file.Close()
	w := newStateFile(s, file, false)
	if err := errors.Join(w.reserve(), s.export(f.Context(), "file", true, true, w, noProgress), w.finish()); err != nil {
		f.Fatal(err)
	}
	w.release()
	whole, err := os.ReadFile(file.Name())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole[w.end:], w.end) // contents do not matter: they are a hole here
	f.Add(whole[w.end:], uint64(0))
	f.Fuzz(func(t *testing.T, tail []byte, before uint64) {
		before %= 1 << 40
		size := before + uint64(len(tail))
		found, err := s.readIndex(hole{tail, int64(before)}, size)
		if err != nil {
			return
		}
		if len(found)*entrySize+24 > len(tail) {
			t.Fatalf("%d objects in %d bytes", len(found), len(tail))
		}
		for m, e := range found {
			if m.parent != nil || e.N != m.size || e.At > size || e.N > size-e.At {
				t.Fatalf("object %d: %d bytes at %d of %d", m.id, e.N, e.At, size)
			}
		}
	})
}

// hole is a file in which all bytes before the tail are zero.
type hole struct {
	tail   []byte
	before int64
}

func (h hole) ReadAt(p []byte, off int64) (int, error) {
	for i := range p {
		at := off + int64(i) - h.before
		if at >= int64(len(h.tail)) {
			return i, io.EOF
		}
		p[i] = 0
		if at >= 0 {
			p[i] = h.tail[at]
		}
	}
	return len(p), nil
}

// FuzzImport receives what the session's former executor sends about its window, and about
// contents in the arena.
func FuzzImport(f *testing.F) {
	c := newModelled(f)
	s := c.open(f, 1)
	f.Cleanup(func() { c.shut(f, s) })
	if err := s.play(script(scene()...)); err != nil {
		f.Fatal(err)
	}
	s.pins.wanted = true
	stream := func(numbers ...uint64) (b []byte) {
		for _, v := range numbers {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
		return b
	}
	window := stream(0, testSplit, arena.Page, 1)
	pieces := stream(3, sceneBuffer, 0, 4096, testSplit, sceneImage, 1, 2, testSplit, sceneSub, 0, 1, testArena-1)
	f.Add(window)
	f.Add(pieces)
	f.Add(slices.Concat(window, pieces, pieces[:40]))
	f.Add(slices.Concat(window, window))
	f.Fuzz(func(t *testing.T, in []byte) {
		err := s.receive(struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(in), io.Discard}, 32)
		for _, x := range s.pins.ranges() {
			if x.Size > windowChunk*windowDepth || x.Off+x.Size > testArena {
				t.Fatalf("%d bytes at %#x are pinned: %v", x.Size, x.Off, err)
			}
		}
	})
}
