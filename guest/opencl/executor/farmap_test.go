package executor

import (
	"context"
	"log/slog"
	stdmaps "maps"
	"net"
	"slices"
	"testing"
	"unsafe"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// hears has a carrier listen to the far executor until the test ends.
func (f *farEnd) hears(t *testing.T, handle func(link.Frame) error) {
	peer := link.New(link.Options{ID: link.ID{1}, MaxHead: remote.MaxHead, MaxBody: remote.MaxBody})
	a, b := net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { done <- f.commands.Serve(ctx, a, func(link.Frame) error { return nil }) }()
	go func() { done <- peer.Serve(ctx, b, handle) }()
	t.Cleanup(func() { cancel(); <-done; <-done })
}

// After a swap, a new carrier is told of mappings whose content is still to come: if the
// application unmaps such a region without waiting, the bytes that it has there are older
// than those of the far executor, and must not be sent.
func TestRestoredMappingsThatAreYetToRunCome(t *testing.T) {
	f := testFarEnd(t)
	got := map[uint32]remote.Mapping{}
	all := make(chan struct{})
	f.hears(t, func(fr link.Frame) error {
		m, err := remote.ParseMapping(fr.Head, farSplit)
		if got[m.ID] = m; len(got) == 5 {
			close(all)
		}
		return err
	})

	park := func(m wire.Request, op wire.Op, alias map[uint32]uint32) *parkedCall {
		return &parkedCall{call: call{op, wire.NoSlot, m.Append(nil)}, alias: alias}
	}
	const old = wire.MaxID + 1 // another object that was released, and had the same id
	mem1 := &mem{id: wire.FirstID, size: 1 << 20, maps: map[uint32]*mapping{}}
	ghost := &mem{id: wire.FirstID, size: 1 << 20, maps: map[uint32]*mapping{}}
	for id, flags := range map[uint32]uint64{1: cl.MapWrite, 2: cl.MapRead | cl.MapWrite, 3: cl.MapWriteInvalidateRegion, 4: cl.MapWrite} {
		mem1.maps[id] = &mapping{ID: id, Flags: flags, At: uint64(id) << 16, Size: 1 << 16}
	}
	ghost.maps[5] = &mapping{ID: 5, Flags: cl.MapWrite, At: 5 << 16, Size: 1 << 16}
	s := &session{
		far: f, log: slog.New(slog.DiscardHandler), objs: make([]any, wire.FirstID+1), serials: make([]uint64, wire.FirstID+1), ghosts: map[uint32]any{old: ghost},
		parked: []*parkedCall{
			park(&wire.MapBuffer{Mem: wire.FirstID, Map: 2, Flags: cl.MapRead | cl.MapWrite}, wire.OpMapBuffer, nil),
			park(&wire.MapBuffer{Mem: wire.FirstID, Map: 3, Flags: cl.MapWriteInvalidateRegion}, wire.OpMapBuffer, nil),
			park(&wire.MapBuffer{Mem: wire.FirstID, Map: 5, Flags: cl.MapWrite}, wire.OpMapBuffer, map[uint32]uint32{wire.FirstID: old}),
			park(&wire.MapBuffer{Mem: wire.FirstID, Map: 1, Flags: cl.MapWrite}, wire.OpMapBuffer, map[uint32]uint32{wire.FirstID: old}),
		},
	}
	s.objs[wire.FirstID] = mem1
	s.mu.Lock()
	s.tellMaps()
	s.mu.Unlock()
	select {
	case <-all:
	case <-testkit.Context(t).Done():
		t.Fatalf("told of %v", got)
	}
	for id, comes := range map[uint32]bool{
		1: false, // it ran before; what is parked maps another object
		2: true,
		3: false, // the application writes all of it
		4: false, // it ran before: the application may have written it
		5: true,
	} {
		if m := got[id]; m.Comes != comes || !m.Writes {
			t.Errorf("mapping %d: %+v, want comes %v", id, m, comes)
		}
	}
	if u := (&wire.Unmap{Mem: wire.FirstID, Map: 4}); s.reads(park(u, wire.OpUnmap, nil)).Row == 0 {
		t.Error("what the application may have written is not fetched")
	}
	if u := (&wire.Unmap{Mem: wire.FirstID, Map: 2}); s.reads(park(u, wire.OpUnmap, nil)).Row != 0 {
		t.Error("older bytes of the application are fetched")
	}
}

// withMappings returns a session that has a buffer with three regions mapped for writing, 64 KiB each, and
// calls that are parked.
func withMappings(f *farEnd, parked ...*parkedCall) *session {
	m := &mem{id: wire.FirstID, size: 1 << 20, maps: map[uint32]*mapping{}}
	for id := range uint32(3) {
		m.maps[id] = &mapping{ID: id, Flags: cl.MapWrite, At: uint64(id) << 16, Size: 1 << 16}
	}
	s := &session{
		far: f, log: slog.New(slog.DiscardHandler), objs: make([]any, wire.FirstID+1), serials: make([]uint64, wire.FirstID+1), parked: parked,
	}
	s.objs[wire.FirstID] = m
	return s
}

func park(m wire.Request, op wire.Op) *parkedCall {
	return &parkedCall{call: call{op, wire.NoSlot, m.Append(nil)}}
}

// A request to unmap that is parked was read before the swap. The next carrier does not see it, so
// it is not told of the mapping: it would take it for one that never ends.
func TestRestoredMappingsThatAreYetToEndAreNotTold(t *testing.T) {
	f := testFarEnd(t)
	told := map[uint32]bool{}
	all := make(chan struct{})
	f.hears(t, func(fr link.Frame) error {
		if fr.Kind != remote.KindMapped {
			close(all)
			return nil
		}
		m, err := remote.ParseMapping(fr.Head, farSplit)
		told[m.ID] = true
		return err
	})
	s := withMappings(f,
		park(&wire.Unmap{Mem: wire.FirstID, Map: 1}, wire.OpUnmap),
		park(&wire.MapBuffer{Mem: wire.FirstID, Map: 2, Flags: cl.MapWrite}, wire.OpMapBuffer),
		park(&wire.Unmap{Mem: wire.FirstID, Map: 2}, wire.OpUnmap),
	)
	s.mu.Lock()
	s.tellMaps()
	s.mu.Unlock()
	f.say(remote.KindSync, 1)
	select {
	case <-all:
	case <-testkit.Context(t).Done():
		t.Fatal("nothing has come")
	}
	// The first lasts, and the third is still to be shown.
	if want := map[uint32]bool{0: true, 2: true}; !stdmaps.Equal(told, want) {
		t.Errorf("told of %v, not %v", told, want)
	}
	if x := s.reads(s.parked[0]); x.At != 1<<16 {
		t.Errorf("what the application has written is not fetched: %+v", x)
	}
}

// A write from a mapped region may be parked with the map command. What the client has there is older: on a
// device that computes in the arena it would replace the object's own content.
func TestWritesFromRegionsThatAreToBeShownAreNotFetched(t *testing.T) {
	f := testFarEnd(t)
	need := []uint64{}
	f.hears(t, func(fr link.Frame) error {
		switch fr.Kind {
		case remote.KindNeed:
			x, err := remote.ParseBlock(fr.Head, farArena)
			need = append(need, x.At)
			return err
		case remote.KindSync:
			go func() { _ = f.giveCommand(remote.KindSynced, fr.Head, nil) }()
		}
		return nil
	})
	from := func(at uint64) *parkedCall {
		return park(&wire.WriteBuffer{Mem: wire.FirstID + 1, Size: 4096, Mode: wire.DataStaged, StageOff: at, StageLen: 4096}, wire.OpWriteBuffer)
	}
	s := withMappings(f,
		park(&wire.MapBuffer{Mem: wire.FirstID, Map: 2, Flags: cl.MapWrite}, wire.OpMapBuffer),
		from(1<<16), from(2<<16+4096), from(farSplit),
	)
	if err := f.own(testkit.Context(t), s); err != nil {
		t.Fatal(err)
	}
	if want := []uint64{1 << 16, farSplit}; !slices.Equal(need, want) {
		t.Errorf("fetched from %#x, not %#x", need, want)
	}
}

// pieces is a receiver that takes contents.
type pieces struct {
	*peerSink
	window []byte
	placed []uint32 // objects whose bytes went through the window
	got    []uint32 // objects
}

func (p *pieces) place(ps []piece) error {
	for i := range ps {
		ps[i].ptr = unsafe.Pointer(&p.window[0])
		p.placed = append(p.placed, ps[i].ID)
	}
	return nil
}

func (p *pieces) accept(ps []piece) error {
	for i := range ps {
		p.got = append(p.got, ps[i].ID)
	}
	return nil
}

// A carrier is not told that a map command has failed, and goes on to keep contents from where the
// mapping would be. So those of the object do not go there.
func TestContentsAfterAMapThatFailedGoThroughTheWindow(t *testing.T) {
	f := testFarEnd(t)
	const first, second = wire.FirstID, wire.FirstID + 1
	s := &session{far: f, ring: f, arena: f.arena, split: farSplit, log: slog.New(slog.DiscardHandler), objs: make([]any, second+1), serials: make([]uint64, second+1)}
	for id := uint32(first); id <= second; id++ {
		s.objs[id] = &mem{id: id, size: 4096, unified: true, hasArena: true, arena: uint64(id) << 16, vendor: 1, dirty: make([]bool, 1)}
	}
	s.arenaBytes(first<<16, 4096)[0] = 7
	s.mu.Lock()
	defer s.mu.Unlock()
	out, err := s.mapBuffer(call{op: wire.OpMapBuffer, slot: 1}, &wire.MapBuffer{Queue: wire.FirstID + 9, Mem: first, Map: 1, Flags: cl.MapWrite, Size: 4096})
	if err != nil || out.status != cl.InvalidCommandQueue {
		t.Fatal(out, err)
	}
	to := &pieces{peerSink: &peerSink{bytes: true}, window: make([]byte, 4096)}
	if !lookup[mem](s, first).dirty[0] {
		t.Error("what was on its way is not sent again")
	}
	ps := []piece{{m: lookup[mem](s, first), ID: first, N: 4096}, {m: lookup[mem](s, second), ID: second, N: 4096}}
	if err := s.pump(t.Context(), ps, to, func(uint64) {}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(to.got, []uint32{first, second}) || !slices.Equal(to.placed, []uint32{first}) || to.window[0] != 7 {
		t.Errorf("of the objects %v, %v went through the window, which has %d", to.got, to.placed, to.window[0])
	}
}
