package executor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// played returns a session with the objects of the scene, and its graph.
func played(t *testing.T, c *modelled) (*session, *graph) {
	t.Helper()
	s := c.open(t, 1)
	t.Cleanup(func() { c.shut(t, s) })
	if err := s.play(script(scene()...)); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s, s.graph(true)
}

func travelled(t *testing.T, g *graph) (*graph, error) {
	t.Helper()
	b, err := g.encode()
	if err != nil {
		t.Fatal(err)
	}
	return decodeGraph(b)
}

func TestAGraphThatNoExecutorMakesIsRefused(t *testing.T) {
	c := newModelled(t)
	_, g := played(t, c)
	if _, err := travelled(t, g); err != nil {
		t.Fatal(err)
	}
	mem := func(g *graph, id uint32) *gMem {
		for i := range g.Mems {
			if g.Mems[i].ID == id {
				return &g.Mems[i]
			}
		}
		t.Fatal("no object", id)
		return nil
	}
	for what, change := range map[string]func(*graph){
		"an object in a device's place":       func(g *graph) { mem(g, sceneBuffer).ID = 1 },
		"two objects of one id":               func(g *graph) { g.Queues[0].ID = sceneBuffer },
		"a part before the first":             func(g *graph) { g.Devices = []gDevice{{ID: 1000, Parent: 1, Index: -1}} },
		"a context without devices":           func(g *graph) { g.Contexts[0].Devices = nil },
		"a part of no buffer":                 func(g *graph) { mem(g, sceneSub).Parent = 0 },
		"a part of a part":                    func(g *graph) { mem(g, sceneSub).Parent = sceneSub },
		"a part larger than the whole":        func(g *graph) { mem(g, sceneSub).Size = 1 << 20 },
		"a kind that there is not":            func(g *graph) { mem(g, sceneBuffer).Kind = 9 },
		"an image whose size overflows":       func(g *graph) { mem(g, sceneImage).Desc.Width = 1 << 63 },
		"an image of less than its pixels":    func(g *graph) { mem(g, sceneImage).Size = 1 },
		"an event that another driver has":    func(g *graph) { g.Events = append(g.Events, gEvent{ID: 1000, State: eventVendor}) },
		"a graph of a version before this":    func(g *graph) { g.Version-- },
		"an object of an id that nobody gave": func(g *graph) { g.Kernels[0].ID = 0 },
	} {
		_, g := played(t, &modelled{newClient(t), c.library})
		change(g)
		if _, err := travelled(t, g); err == nil {
			t.Errorf("%s is taken", what)
		}
	}
}

// The lists of a graph take memory for the elements that they have, not for the length that
// they claim.
func TestAGraphTakesNoMoreMemoryThanItsLengthAllows(t *testing.T) {
	long := []byte{0xa1, 0x64, 'M', 'e', 'm', 's', 0x9b, 0, 0, 0, 0, 0x40, 0, 0, 0} // claims a billion objects, but contains none
	n := allocated(func() {
		if _, err := decodeGraph(long); !errors.Is(err, errGraph) {
			t.Error(err)
		}
	})
	if n > 1<<20 {
		t.Errorf("%d bytes allocated for %d", n, len(long))
	}
}

// A handle is an address in one process. In another process, it is an address that a
// hostile executor may have chosen.
func TestADriversHandleDoesNotTravelInAGraph(t *testing.T) {
	_, g := played(t, newModelled(t))
	for i := range g.Mems {
		g.Mems[i].Desc.MemObject = 0xdead0000
	}
	got, err := travelled(t, g)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range got.Mems {
		if m.Desc.MemObject != 0 {
			t.Errorf("object %d came with handle %#x", m.ID, m.Desc.MemObject)
		}
	}
}

// Transfers take their size from the graph's pixel size, but the driver uses its own.
func TestAnImageWhosePixelsHaveAnotherSizeIsRefused(t *testing.T) {
	c := newModelled(t)
	_, g := played(t, c)
	for i := range g.Mems {
		if m := &g.Mems[i]; m.Kind == memImage {
			m.Elem, m.Size = 1, m.Size/m.Elem
		}
	}
	to := c.open(t, 2)
	defer c.shut(t, to)
	to.mu.Lock()
	defer to.mu.Unlock()
	if err := to.restore(g, noProgress); !errors.Is(err, ErrRefused) {
		t.Errorf("it is made: %v", err)
	}
}

func TestAnObjectIsOnceInAStatesIndex(t *testing.T) {
	s, _ := played(t, newModelled(t))
	entry := stateEntry{ID: sceneBuffer, At: 0, N: 4096}
	file := func(n int) []byte {
		b := make([]byte, 4096)
		for range n {
			b = entry.appendTo(b)
		}
		for _, v := range []uint64{4096, uint64(n * entrySize), stateMagic} {
			b = binary.LittleEndian.AppendUint64(b, v)
		}
		return b
	}
	if _, err := s.readIndex(bytes.NewReader(file(1)), uint64(len(file(1)))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.readIndex(bytes.NewReader(file(2)), uint64(len(file(2)))); !errors.Is(err, errState) {
		t.Errorf("twice: %v", err)
	}
}

// If a later graph has another object under the same id, that is not the object that was
// prepared.
func TestAnObjectThatBecomesAnotherIsRefused(t *testing.T) {
	c := newModelled(t)
	_, g := played(t, c)
	to := c.open(t, 2)
	defer c.shut(t, to)
	to.mu.Lock()
	defer to.mu.Unlock()
	g.Final = false
	if err := to.restore(g, noProgress); err != nil {
		t.Fatal(err)
	}
	for i := range g.Kernels {
		g.Kernels[i].Args = append(g.Kernels[i].Args, gArg{Set: true, Kind: wire.ArgPlain, Size: 4, Value: make([]byte, 4)})
	}
	if err := to.restore(g, noProgress); !errors.Is(err, errGraph) {
		t.Errorf("a kernel with more arguments: %v", err)
	}
}

// A driver reads partition properties up to a 0, which a graph may lack.
func TestASubDeviceOfAGraphWithoutPropertiesIsRefused(t *testing.T) {
	c := newModelled(t)
	_, g := played(t, c)
	g.Devices = []gDevice{{ID: 1000, Parent: 1}}
	to := c.open(t, 2)
	defer c.shut(t, to)
	to.mu.Lock()
	defer to.mu.Unlock()
	if err := to.restore(g, noProgress); !errors.Is(err, ErrRefused) {
		t.Errorf("it is made: %v", err)
	}
}

// An image in a buffer may have rows that lie apart. All of the buffer that it reaches is written
// when it is.
func TestImageInABufferMarksTheBufferToItsLastRow(t *testing.T) {
	buffer := &mem{kind: memBuffer, size: 4 * dirtyChunk}
	image := &mem{
		kind: memImage, parent: buffer, elem: 4,
		desc: cl.ImageDesc{Type: cl.MemObjectImage2d, Width: 1024, Height: 4 * dirtyChunk / 16384, RowPitch: 16384},
	}
	image.size = image.content()
	buffer.initDirty()
	clear(buffer.dirty)
	image.touch(0, image.size)
	for i, written := range buffer.dirty {
		if !written {
			t.Errorf("the image's rows in chunk %d of the buffer would not be copied", i)
		}
	}
}
