package carrier

import (
	"bytes"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
	"github.com/gpuctl/gpuctl/internal/testkit"
)

// tell plays a map command that is still to run.
func (f *farEnd) tell(t *testing.T, c *carrier, id uint32, x remote.Block) {
	t.Helper()
	m := remote.Mapping{Mem: 1, ID: id, Writes: true, Comes: true, Block: x}
	if err := c.giveCommand(remote.KindMapped, m.Append(nil), nil); err != nil {
		t.Fatal(err)
	}
}

// named plays the end of a map command: the far executor names the mapping, and shows it.
func (f *farEnd) named(t *testing.T, c *carrier, id uint32, x remote.Block) {
	t.Helper()
	if err := c.giveCommand(remote.KindShown, remote.Words(remote.MappingName(1, id)), nil); err != nil {
		t.Fatal(err)
	}
	f.blocks(t, c, x)
}

// writeFrom plays a write whose source is in the arena.
func (f *farEnd) writeFrom(t *testing.T, c *carrier, off, n uint64) (sent int) {
	t.Helper()
	before := f.bytes
	b := &batch{}
	w := &wire.WriteBuffer{Mode: wire.DataStaged, StageOff: off, StageLen: n, Size: n}
	if err := c.take(b, shm.Record{Op: wire.OpWriteBuffer, Slot: wire.NoSlot, Body: w.Append(nil)}); err != nil {
		t.Fatal(err)
	}
	if err := c.flush(b); err != nil {
		t.Fatal(err)
	}
	if err := c.commands.Drain(testkit.Context(t)); err != nil {
		t.Fatal(err)
	}
	return f.bytes - before
}

// An application enqueues a read into a mapped region, to unmap it, and to map it again. What the
// read brings comes before the content of the second mapping, to the same place.
func TestWhatAReadBringsIsNotTakenForTheContentOfAMapping(t *testing.T) {
	const at, n = 1 << 20, 64 << 10
	x := remote.Range(at, n)
	for name, read := range map[string]uint64{"a part": 256, "all": n} {
		for _, before := range []bool{false, true} { // the far executor has named one
			c := newCarrier(t)
			f := attach(t, c)
			if before {
				f.tell(t, c, 7, remote.Range(2<<20, n))
				f.named(t, c, 7, remote.Range(2<<20, n))
			}
			f.tell(t, c, 2, x)
			for i := range n {
				f.arena[at+i] = 3
			}
			f.blocks(t, c, remote.Range(at, read))
			for i := range n {
				f.arena[at+i] = 5 // by what ran between the two
			}
			f.named(t, c, 2, x)
			for i := range n { // the application writes what the read had brought
				c.arena.Bytes()[at+i] = 3
			}
			if sent := f.unmap(t, c, 1, 2); sent != n {
				t.Errorf("%s, named before %v: %d bytes were sent, not %d", name, before, sent, n)
			}
			if !bytes.Equal(c.arena.Bytes()[at:at+n], f.arena[at:at+n]) {
				t.Errorf("%s, named before %v: the far executor has other bytes", name, before)
			}
			if c.awaited != 0 || len(c.awaits) != 0 {
				t.Errorf("%d are awaited", c.awaited)
			}
		}
	}
}

// The application makes a page again what it was when it was shown. The far executor has something else
// there meanwhile: what a read has brought, or what was sent to be written to another object.
func TestPageThatTheApplicationRestoresIsSent(t *testing.T) {
	const at, n, page = 1 << 20, 64 << 10, 5 * sumPage
	x := remote.Range(at, n)
	for name, change := range map[string]func(*farEnd, *carrier){
		"a read": func(f *farEnd, c *carrier) {
			f.arena[at+page+8] = 1
			f.blocks(t, c, remote.Range(at+page+8, 100))
		},
		"a write from it": func(f *farEnd, c *carrier) {
			c.arena.Bytes()[at+page+8] = 1
			f.writeFrom(t, c, at+page+8, 100)
		},
	} {
		for _, names := range []bool{false, true} {
			c := newCarrier(t)
			f := attach(t, c)
			f.tell(t, c, 1, x)
			if names {
				f.named(t, c, 1, x)
			} else {
				f.blocks(t, c, x)
			}
			change(f, c)
			c.arena.Bytes()[at+page+8] = 0
			if sent := f.unmap(t, c, 1, 1); sent != sumPage {
				t.Errorf("%s, named %v: %d bytes were sent, not %d", name, names, sent, sumPage)
			}
			if !bytes.Equal(c.arena.Bytes()[at:at+n], f.arena[at:at+n]) {
				t.Errorf("%s, named %v: the far executor has other bytes", name, names)
			}
		}
	}
}

// A write from a mapped region may be enqueued before its map command has run. Where the far executor
// computes in its arena, what is here before would replace the object's content.
func TestRegionThatIsStillToBeShownIsNotSentWithAWriteFromIt(t *testing.T) {
	const at, n = 1 << 20, 64 << 10
	x := remote.Range(at, n)
	c := newCarrier(t)
	f := attach(t, c)
	f.tell(t, c, 1, x)
	if sent := f.writeFrom(t, c, at+100, 1000); sent != 0 {
		t.Errorf("%d bytes were sent before the region was shown", sent)
	}
	f.named(t, c, 1, x)
	f.tell(t, c, 2, x) // waits until the first is unmapped
	if sent := f.writeFrom(t, c, at+100, 1000); sent != 1000 {
		t.Errorf("%d bytes were sent of a region that the application has seen", sent)
	}
}
