package carrier

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"io"
	"net"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/link"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// farEnd plays the far executor's end of the stream of commands, and keeps an arena.
type farEnd struct {
	arena []byte
	bytes int // in blocks
	st    *link.Stream
}

// attach gives a carrier a far end that stores what it gets.
func attach(t *testing.T, c *carrier) *farEnd {
	t.Helper()
	f := &farEnd{arena: make([]byte, 8<<20)}
	f.st = link.New(link.Options{ID: c.dialer.Hello.Carrier, MaxHead: remote.MaxHead, MaxBody: remote.MaxBody})
	a, b := net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() {
		done <- c.commands.Serve(ctx, a, func(link.Frame) error { return nil })
	}()
	go func() {
		done <- f.st.Serve(ctx, b, func(fr link.Frame) error {
			if fr.Kind != remote.KindBlock {
				return nil
			}
			x, err := remote.ParseBlock(fr.Head, uint64(len(f.arena)))
			if err != nil {
				return err
			}
			if x.Size() != uint64(len(fr.Body)) {
				return errors.New("another size")
			}
			x.Store(f.arena, fr.Body)
			f.bytes += len(fr.Body)
			return nil
		})
	}()
	t.Cleanup(func() { cancel(); <-done; <-done })
	return f
}

// show plays a map command: the far executor tells of the mapping, and shows a range of its
// arena in blocks of a megabyte.
func (f *farEnd) show(t *testing.T, c *carrier, mem, id uint32, x remote.Block, writes bool) {
	t.Helper()
	m := remote.Mapping{Mem: mem, ID: id, Writes: writes, Comes: true, Block: x}
	if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
		t.Fatal(err)
	}
	f.blocks(t, c, x)
}

func (f *farEnd) blocks(t *testing.T, c *carrier, x remote.Block) {
	t.Helper()
	err := x.Split(1<<20, func(x remote.Block) error {
		return c.giveCommand(remote.KindBlock, x.Append(nil), x.Bytes(f.arena))
	})
	if err != nil {
		t.Fatal(err)
	}
}

// unmap plays the application's call, and waits until the far end has what comes before it.
func (f *farEnd) unmap(t *testing.T, c *carrier, mem, id uint32) (sent int) {
	t.Helper()
	before := f.bytes
	tb := &batch{}
	u := &wire.Unmap{Mem: mem, Map: id}
	if err := c.take(tb, shm.Record{Op: wire.OpUnmap, Slot: wire.NoSlot, Body: u.Append(nil)}); err != nil {
		t.Fatal(err)
	}
	if err := c.flush(tb); err != nil {
		t.Fatal(err)
	}
	if err := c.commands.Drain(testkit.Context(t)); err != nil {
		t.Fatal(err)
	}
	return f.bytes - before
}

// ended plays the end of a read.
func (f *farEnd) ended(t *testing.T, c *carrier, pend uint32) {
	t.Helper()
	if err := c.giveCommand(remote.KindPend, remote.Words(uint64(pend), wire.PendDone), nil); err != nil {
		t.Fatal(err)
	}
}

func TestOnlyWhatWasChangedIsSent(t *testing.T) {
	const at, n = 1 << 20, 3<<20 + 100
	x := remote.Range(at, n)
	for name, v := range map[string]struct {
		change []uint64 // offsets in the region
		sent   int
	}{
		"nothing":          {nil, 0},
		"the first byte":   {[]uint64{0}, sumPage},
		"the last byte":    {[]uint64{n - 1}, 100},
		"two pages apart":  {[]uint64{5 * sumPage, 9*sumPage + 7}, 2 * sumPage},
		"neighbours":       {[]uint64{5*sumPage - 1, 5 * sumPage}, 2 * sumPage},
		"across megabytes": {[]uint64{1<<20 - 1, 1 << 20, n - 1}, 2*sumPage + 100},
	} {
		c := newCarrier(t)
		f := attach(t, c)
		for i := range f.arena {
			f.arena[i] = byte(i * 7)
		}
		f.show(t, c, 3, 4, x, true)
		if !bytes.Equal(c.arena.Bytes()[at:at+n], f.arena[at:at+n]) {
			t.Fatal("the region is not shown")
		}
		for _, o := range v.change {
			c.arena.Bytes()[at+o] ^= 0x55
		}
		if sent := f.unmap(t, c, 3, 4); sent != v.sent {
			t.Errorf("%s: %d bytes were sent, not %d", name, sent, v.sent)
		}
		if !bytes.Equal(c.arena.Bytes()[at:at+n], f.arena[at:at+n]) {
			t.Errorf("%s: the far executor has other bytes", name)
		}
		if len(c.shown) != 0 || c.sums != 0 || c.awaited != 0 || len(c.awaits) != 0 {
			t.Errorf("%s: %d regions are kept, with %d sums, %d awaited", name, len(c.shown), c.sums, c.awaited)
		}
	}
}

// A region whose content at the far executor is not known is sent as a whole, and one that
// the application has not seen yet is not sent at all.
func TestWhatTheApplicationMayHaveWrittenIsSent(t *testing.T) {
	const at, n = 1 << 20, 64 << 10
	x := remote.Range(at, n)
	mapped := func(c *carrier, comes bool) {
		m := remote.Mapping{Mem: 1, ID: 1, Writes: true, Comes: comes, Block: x}
		if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
			t.Fatal(err)
		}
	}
	for name, v := range map[string]struct {
		show func(f *farEnd, c *carrier)
		sent int
	}{
		"a mapping from before a swap, or of a region that is all written": {func(_ *farEnd, c *carrier) { mapped(c, false) }, n},
		"parts of a page": {func(f *farEnd, c *carrier) {
			mapped(c, true)
			f.blocks(t, c, remote.Range(at, 100))
			f.blocks(t, c, remote.Range(at+100, n-100))
		}, n},
		// The application has not been told that it may write.
		"nothing": {func(_ *farEnd, c *carrier) { mapped(c, true) }, 0},
		"a part":  {func(f *farEnd, c *carrier) { mapped(c, true); f.blocks(t, c, remote.Range(at, n/2)) }, 0},
		"an older mapping of the same region": {func(f *farEnd, c *carrier) {
			m := remote.Mapping{Mem: 9, ID: 9, Writes: true, Comes: true, Block: x}
			_ = c.giveCommand(remote.KindMapped, m.Append(nil), nil)
			f.show(t, c, 1, 1, x, true) // the block is the older mapping's
		}, 0},
	} {
		c := newCarrier(t)
		f := attach(t, c)
		v.show(f, c)
		c.arena.Bytes()[at] ^= 1
		if sent := f.unmap(t, c, 1, 1); sent != v.sent {
			t.Errorf("%s: %d bytes were sent, not %d", name, sent, v.sent)
		}
	}
}

// A far host that tells of mappings again and again makes a carrier keep no more for it.
// The library sends a region to which a read brings data when the read has ended. What the
// carrier sends before would be older than what the read has put into the far executor's arena.
func TestRegionToWhichAReadBringsDataIsNotSentBefore(t *testing.T) {
	c := newCarrier(t)
	f := attach(t, c)
	const at, n = 1 << 20, 2624
	read := func(slot uint16, pend uint32, off uint64) {
		r := &wire.ReadBuffer{Mode: wire.DataStaged, StageOff: off, StageLen: 64, Size: 64, Pend: pend}
		if err := c.take(&batch{}, shm.Record{Op: wire.OpReadBuffer, Slot: slot, Body: r.Append(nil)}); err != nil {
			t.Fatal(err)
		}
	}
	for _, v := range []struct {
		name string
		slot uint16
		pend uint32
		off  uint64
		sent int
	}{
		{"begins in it", wire.NoSlot, 7, at + n - 1, 0},
		{"ends in it", wire.NoSlot, 7, at - 63, 0},
		{"before it", wire.NoSlot, 7, at - 64, n},
		{"after it", wire.NoSlot, 7, at + n, n},
		{"blocking, of other bytes of a row", 3, 0, at, n}, // the library does not count it
	} {
		t.Run(v.name, func(t *testing.T) {
			f.show(t, c, 1, 1, remote.Range(at, n), true)
			read(v.slot, v.pend, v.off)
			if sent := f.unmap(t, c, 1, 1); sent != v.sent {
				t.Errorf("%d bytes were sent, not %d", sent, v.sent)
			}
			if v.pend != 0 {
				f.ended(t, c, v.pend)
				f.show(t, c, 1, 1, remote.Range(at, n), true)
				if sent := f.unmap(t, c, 1, 1); sent != n {
					t.Errorf("%d bytes were sent when the read had ended, not %d", sent, n)
				}
			}
		})
	}
}

func TestShownRegionsAreBounded(t *testing.T) {
	c := newCarrier(t)
	for i := range 3 * mostShown {
		m := remote.Mapping{Mem: uint32(i % 7), ID: 1, Writes: true, Comes: true, Block: remote.Range(uint64(i%5)<<20, leastSums)}
		if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
			t.Fatal(err)
		}
	}
	if c.awaited > mostShown || len(c.shown) > mostShown {
		t.Errorf("%d awaited, %d shown", c.awaited, len(c.shown))
	}
}

// The two ways to find what has changed: a sum of each page, and a copy.
func BenchmarkFindChanges(b *testing.B) {
	const n = 64 << 20
	mem, keep, sums := make([]byte, n), make([]byte, n), make([]uint64, n/sumPage)
	for i := range mem {
		mem[i] = byte(i * 31)
	}
	seed := maphash.MakeSeed()
	b.Run("sums", func(b *testing.B) {
		b.SetBytes(n)
		for range b.N {
			for i := range sums {
				sums[i] = maphash.Bytes(seed, mem[i*sumPage:(i+1)*sumPage])
			}
			for i := range sums {
				if sums[i] != maphash.Bytes(seed, mem[i*sumPage:(i+1)*sumPage]) {
					b.Fatal("another sum")
				}
			}
		}
	})
	b.Run("copy", func(b *testing.B) {
		b.SetBytes(n)
		for range b.N {
			copy(keep, mem)
			for i := range sums {
				if !bytes.Equal(keep[i*sumPage:(i+1)*sumPage], mem[i*sumPage:(i+1)*sumPage]) {
					b.Fatal("other bytes")
				}
			}
		}
	})
}

// Whatever the far host shows of a region, an unmap ends it, and nothing of it is kept.
func FuzzShownRegion(f *testing.F) {
	page := make([]byte, 2*sumPage)
	whole := remote.Range(0, 2*sumPage)
	f.Add(whole.Append(nil), whole.Append(nil), page, remote.Range(0, 1).Append(nil), byte(1))
	f.Add(whole.Append(nil), remote.Range(0, sumPage).Append(nil), page[:sumPage], remote.Range(sumPage, sumPage).Append(nil), byte(0))
	f.Add(remote.Block{At: 100, Row: 10, Rows: 3, Slices: 2, RowPitch: 20, SlicePitch: 100}.Append(nil), remote.Range(100, 10).Append(nil), page[:10], remote.Range(120, 10).Append(nil), byte(3))
	f.Fuzz(func(t *testing.T, region, first, body, second []byte, change byte) {
		x, err := remote.ParseBlock(region, arenaSplit)
		if err != nil || x.Size() > 1<<20 {
			t.Skip()
		}
		c := newCarrier(t)
		defer func() { _, _ = c.region.Close(), c.arena.Close() }()
		if err := c.giveCommand(remote.KindMapped, remote.Mapping{Mem: 1, ID: 1, Writes: true, Comes: true, Block: x}.Append(nil), nil); err != nil {
			t.Fatal(err)
		}
		_ = c.giveCommand(remote.KindBlock, first, body)
		_ = c.giveCommand(remote.KindBlock, second, body)
		c.arena.Bytes()[x.At] ^= change
		u := &wire.Unmap{Mem: 1, Map: 1}
		if err := c.take(&batch{}, shm.Record{Op: wire.OpUnmap, Slot: wire.NoSlot, Body: u.Append(nil)}); err != nil {
			t.Error(err)
		}
		if len(c.shown) != 0 || c.sums != 0 || len(c.mappings) != 0 || c.awaited > 1 {
			t.Errorf("%d regions are kept, with %d sums, %d awaited", len(c.shown), c.sums, c.awaited)
		}
	})
}

// Contents that are copied while the session runs come on a connection of their own, so they may
// be older than what is shown of a region meanwhile. They don't overwrite that, and a read-only
// region that is not shown yet has them.
func TestContentsAreOlderThanWhatIsShown(t *testing.T) {
	const size = 64
	region := remote.Range(128, size)
	older, newer := bytes.Repeat([]byte{2}, size), bytes.Repeat([]byte{7}, size)
	for _, writes := range []bool{false, true} {
		mapped := func(t *testing.T) *carrier {
			c := newCarrier(t)
			m := remote.Mapping{Mem: 70, ID: 1, Writes: writes, Comes: true, Block: region}
			if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
				t.Fatal(err)
			}
			return c
		}
		show := func(c *carrier, from, to uint64) error {
			return c.giveCommand(remote.KindBlock, remote.Range(region.At+from, to-from).Append(nil), newer[from:to])
		}
		holds := func(t *testing.T, c *carrier, want []byte) {
			t.Helper()
			if got := c.arena.Bytes()[region.At:region.End()]; !bytes.Equal(got, want) {
				t.Errorf("mapped for writing %v: the region holds %d, not %d", writes, got, want)
			}
		}

		c := mapped(t)
		if err := c.store(bytes.NewReader(older), region.At, size); err != nil {
			t.Fatal(err)
		}
		holds(t, c, older)
		if err := show(c, 0, size); err != nil {
			t.Fatal(err)
		}
		holds(t, c, newer)

		c = mapped(t)
		if err := show(c, 0, 16); err != nil {
			t.Fatal(err)
		}
		if err := c.store(bytes.NewReader(older), region.At, size); err != nil {
			t.Fatal(err)
		}
		holds(t, c, append(bytes.Clone(newer[:16]), older[16:]...))

		// A block, or a mapping whose content does not come, meets contents that are being read.
		for name, bring := range map[string]func(c *carrier) error{
			"block": func(c *carrier) error { return show(c, 0, size) },
			"mapping": func(c *carrier) error {
				m := remote.Mapping{Mem: 70, ID: 2, Writes: true, Block: region}
				if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
					return err
				}
				copy(c.arena.Bytes()[region.At:], newer) // the application writes it
				return nil
			},
		} {
			c := mapped(t)
			in, out := io.Pipe()
			stored, brought := make(chan error, 1), make(chan error, 1)
			go func() { stored <- c.store(in, region.At, size) }()
			if _, err := out.Write(older[:8]); err != nil {
				t.Fatal(err)
			}
			go func() { brought <- bring(c) }()
			testkit.Parked(t, "carrier.(*carrier).awaitStored", 1)
			if _, err := out.Write(older[8:]); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(<-stored, <-brought); err != nil {
				t.Fatal(name, err)
			}
			holds(t, c, newer)
		}

		// Contents meet a block that is being read.
		c = mapped(t)
		b, err := c.placeCommand(remote.KindBlock, region.Append(nil), size)
		if err != nil {
			t.Fatal(err)
		}
		copy(b, newer)
		stored := make(chan error, 1)
		go func() { stored <- c.store(bytes.NewReader(older), region.At, size) }()
		testkit.Parked(t, "carrier.(*carrier).awaitShown", 1)
		if err := errors.Join(c.command(link.Frame{Kind: remote.KindBlock, Head: region.Append(nil), Body: b}), <-stored); err != nil {
			t.Fatal(err)
		}
		holds(t, c, newer)
	}
}
