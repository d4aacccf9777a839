package executor

import (
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/arena"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// card makes a session behave as on a device with memory of its own, for which
// memory is pinned.
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

// Contents that a source has in the arena lie among memory that it gives back
// whenever it likes. A target that pinned them read and wrote pages from then on
// that nobody else saw.
func TestTargetPinsNothingThatItsSourceMayGiveBack(t *testing.T) {
	c := newClient(t)
	first := c.executor(1)
	first.activate()
	ctx, q, k := c.setup(0)
	b := c.buffer(ctx, 1<<20)
	c.fill(q, b, 1<<20, 5)
	second := c.executor(2) // has the content in the first one's part
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

// A source with memory of its own says where its window is. The target pins that
// and nothing else, until it serves the session; and a window that is another
// one at the same place anew.
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

// Whatever pins memory, and wherever its range begins: before pages are given
// back they are pinned no more.
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
	// As the application does it: a mapping's memory goes with its buffer.
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
