package executor

import (
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/arena"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// card makes a session behave as on a device with memory of its own, for which the driver
// pins host memory.
func card(s *session) {
	discrete(s)
	s.pins.wanted = true
}

func (p *pins) ranges() (out []span) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.held {
		out = append(out, x.span)
	}
	return out
}

func meet(a, b span) bool { return a.Off < b.Off+b.Size && b.Off < a.Off+a.Size }

// A source may free the pages of its contents in the arena at any time. A target that had
// pinned these pages continued to read and write the old pages, which no other process saw
// any more. So a target does not pin them.
func TestTargetPinsNothingThatItsSourceMayGiveBack(t *testing.T) {
	c := newClient(t)
	first := c.executor(1)
	first.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 1<<20)
	c.fill(q, b, 1<<20, 5)
	second := c.executor(2) // its content is in the part of the first one
	c.swap(first, second)
	target := c.executor(3)
	card(target)
	peer := prepared(t, target)
	prepare(t, second, target, peer)
	c.launch(q, k, b, 1, 1<<18, 0)
	for _, x := range target.pins.ranges() {
		t.Errorf("%#x bytes at %#x are pinned, and what is there is the source's", x.Size, x.Off)
	}
	finish(t, second, target, peer)
	for _, x := range target.pins.ranges() {
		t.Errorf("%#x bytes at %#x are pinned", x.Size, x.Off)
	}
	equal(t, c.read(q, b, 1<<20), 6)
}

// A source whose device has memory of its own sends the position of its window. The target
// pins the window and nothing else, until it serves the session. If the source opens another
// window at the same place, the target pins it again.
func TestTargetPinsItsSourcesWindowUntilItServes(t *testing.T) {
	c := newClient(t)
	source := c.executor(1)
	card(source)
	source.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 1<<20)
	c.fill(q, b, 1<<20, 5)
	target := c.executor(2)
	card(target)
	peer := prepared(t, target)
	prepare(t, source, target, peer)
	source.mu.Lock()
	window := span{source.window, source.windowSize}
	source.mu.Unlock()
	if got := target.pins.ranges(); len(got) != 1 || got[0] != window {
		t.Fatalf("pinned %v, want the window %v", got, window)
	}
	source.mu.Lock()
	source.closeWindow()
	source.mu.Unlock()
	c.launch(q, k, b, 1, 1<<18, 0)
	c.call(&wire.Finish{Queue: q})
	prepare(t, source, target, peer)
	if got := target.pins.ranges(); len(got) != 1 || got[0] != window || target.peerWindow.number != 2 {
		t.Fatalf("pinned %v for window %d, not %v for the second one", got, target.peerWindow.number, window)
	}
	finish(t, source, target, peer)
	if got := target.pins.ranges(); len(got) != 0 {
		t.Fatalf("pinned %v", got)
	}
	equal(t, c.read(q, b, 1<<20), 6)
}

// Before pages are freed, every pin of them is removed, whatever pinned them and wherever the
// pinned range begins.
func TestMemoryIsNotPinnedWhenItsPagesAreGivenBack(t *testing.T) {
	c := newClient(t)
	s := c.executor(1)
	card(s)
	s.activate()
	ctx, q, _ := c.setup(0)
	s.mu.Lock()
	x := lookup[clContext](s, ctx)
	a, _ := s.host.alloc(arena.Page)
	b, err := s.host.alloc(4 * arena.Page)
	if err != nil {
		t.Fatal(err)
	}
	around, inside := span{a, b + 2*arena.Page - a}, span{b + arena.Page, arena.Page}
	s.pins.add(x, around.Off, around.Size)
	s.pins.add(x, inside.Off, inside.Size)
	s.pins.add(x, a, arena.Page)
	s.host.free(b)
	s.mu.Unlock()
	if got := s.pins.ranges(); len(got) != 1 || got[0] != (span{a, arena.Page}) {
		t.Fatalf("pinned %v", got)
	}
	// The same by requests of an application: a mapping's memory is freed with its buffer.
	m := c.id()
	c.call(&wire.CreateBuffer{Context: ctx, ID: m, Flags: cl.MemReadWrite | cl.MemAllocHostPtr, Size: pinMin})
	c.call(&wire.MapBuffer{Queue: q, Mem: m, Blocking: 1, Flags: cl.MapWriteInvalidateRegion, Size: pinMin, Map: 1})
	s.mu.Lock()
	shadow := span{lookup[mem](s, m).arena, pinMin}
	s.mu.Unlock()
	if got := s.pins.ranges(); len(got) != 2 || !meet(got[1], shadow) {
		t.Fatalf("pinned %v, not the mapping's memory %v", got, shadow)
	}
	c.post(&wire.Unmap{Queue: q, Mem: m, Map: 1})
	c.post(&wire.Release{ID: m})
	c.call(&wire.Finish{Queue: q})
	for _, x := range s.pins.ranges() {
		if meet(x, shadow) {
			t.Fatalf("%v is pinned, of %v", x, shadow)
		}
	}
}
