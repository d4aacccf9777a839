package executor

import (
	"encoding/binary"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// What an image in a buffer shows when it is mapped is memory of its own. A program may make and
// release such images as often as it likes.
func TestMappedImageOfABufferLeavesNoMemoryBehind(t *testing.T) {
	const width = 4096
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b := c.buffer(ctx, 4*width)
	c.fill(q, b, 4*width, 7)
	c.call(&wire.Finish{Queue: q})
	held := func() (n uint64) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.host.all.Live(func(_, size uint64) { n += size })
		return n
	}
	before := held()
	for range 4 {
		img := c.id()
		c.call(&wire.CreateImage{ID: img, Context: ctx, Order: 0x10B0, Type: 0x10DC, ImageType: cl.MemObjectImage1dBuffer, Width: width, Buffer: b})
		c.call(&wire.MapImage{Queue: q, Image: img, Blocking: 1, Flags: cl.MapRead, Map: 1, Origin: []uint64{0, 0, 0}, Region: []uint64{width, 1, 1}})
		c.post(&wire.Unmap{Queue: q, Mem: img, Map: 1})
		c.post(&wire.Release{ID: img})
		c.call(&wire.Finish{Queue: q})
	}
	if after := held(); after != before {
		t.Errorf("%d bytes were held before four images were mapped and released, %d are now", before, after)
	}
	equal(t, c.read(q, b, 4*width), 7)
}

// A map command that waits for an event of the application fails with it. The application has the
// pointer all the same, and gives it back.
func TestRegionWhoseMapFailedIsUnmapped(t *testing.T) {
	const size = 1 << 20
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b, gate, mapped := c.buffer(ctx, size), c.id(), c.id()
	c.fill(q, b, size, 3)
	c.post(&wire.CreateUserEvent{ID: gate, Context: ctx})
	c.call(&wire.MapBuffer{Queue: q, Mem: b, Flags: cl.MapRead | cl.MapWrite, Size: size, Map: 1, Event: mapped, Wait: []uint32{gate}})
	c.post(&wire.SetUserEvent{Event: gate, Status: -7})
	c.post(&wire.Unmap{Queue: q, Mem: b, Map: 1})
	if st, _ := c.answer(c.start(&wire.Finish{Queue: q})); st != cl.Success {
		t.Errorf("finish after a region was unmapped whose map failed: %v", st)
	}
	equal(t, c.read(q, b, size), 3)
	inside(s, b, func(m *mem) {
		if m.isMapped() {
			t.Error("the buffer counts as mapped")
		}
	})
}

// An event that has failed is an error of the call only if that waits: a call that does not
// returns the pointer, and its own event fails.
func TestMapThatNeedNotWaitIsAnsweredAfterAnEventHasFailed(t *testing.T) {
	const size = 1 << 20
	c := newClient(t)
	s := c.executor(1)
	s.activate()
	ctx, q, _ := c.setup(0)
	b, gate, mapped := c.buffer(ctx, size), c.id(), c.id()
	c.fill(q, b, size, 3)
	c.post(&wire.CreateUserEvent{ID: gate, Context: ctx})
	c.post(&wire.SetUserEvent{Event: gate, Status: -7})
	m := wire.MapBuffer{Queue: q, Mem: b, Blocking: 1, Flags: cl.MapRead | cl.MapWrite, Size: size, Map: 1, Wait: []uint32{gate}}
	if st, _ := c.answer(c.start(&m)); st != cl.ExecStatusErrorForEventsInWaitList {
		t.Errorf("a map that waits for an event which has failed: %v", st)
	}
	m.Blocking, m.Event, m.Map = 0, mapped, 2
	at := le64(c.call(&m))
	inside(s, b, func(m *mem) {
		if at != m.arena {
			t.Errorf("the region is at %#x, not at %#x", at, m.arena)
		}
	})
	if st := int32(cl.Uint32(c.call(&wire.EventStatus{Event: mapped}))); st != int32(cl.ExecStatusErrorForEventsInWaitList) {
		t.Errorf("the event of the map has status %d", st)
	}
	c.post(&wire.Unmap{Queue: q, Mem: b, Map: 2})
	c.call(&wire.Finish{Queue: q})
	equal(t, c.read(q, b, size), 3)
}

// The images of a one-dimensional array are a slice apart, also where a part of each is mapped.
func TestMappedPartOfAnArrayOfLinesIsWhereTheApplicationLooks(t *testing.T) {
	const width, images = 40, 9
	c := newClient(t)
	c.executor(1).activate()
	ctx, q, _ := c.setup(0)
	img := c.id()
	c.call(&wire.CreateImage{ID: img, Context: ctx, Flags: cl.MemReadWrite, Order: 0x10B0, Type: 0x10DC, ImageType: cl.MemObjectImage1dArray, Width: width, ArraySize: images})
	for i := range width * images {
		binary.LittleEndian.PutUint32(c.arena.Bytes()[c.stage+4*uint64(i):], uint32(i))
	}
	whole := []uint64{width, images, 1}
	c.call(&wire.WriteImage{Queue: q, Image: img, Blocking: 1, Origin: []uint64{0, 0, 0}, Region: whole, Mode: wire.DataStaged, StageOff: c.stage, StageLen: 4 * width * images})

	b := c.call(&wire.MapImage{Queue: q, Image: img, Blocking: 1, Flags: cl.MapRead | cl.MapWrite, Map: 1, Origin: []uint64{5, 2, 0}, Region: []uint64{30, 5, 1}})
	at, slice := le64(b), le64(b[16:])
	for y := range uint64(5) {
		for x := range uint64(30) {
			p := c.arena.Bytes()[at+y*slice+4*x:]
			if got, want := binary.LittleEndian.Uint32(p), uint32((2+y)*width+5+x); got != want {
				t.Fatalf("pixel %d of image %d is %d where it is mapped, not %d", 5+x, 2+y, got, want)
			}
			binary.LittleEndian.PutUint32(p, uint32(1000*y+x))
		}
	}
	c.post(&wire.Unmap{Queue: q, Mem: img, Map: 1})
	c.call(&wire.ReadImage{Queue: q, Image: img, Blocking: 1, Origin: []uint64{0, 0, 0}, Region: whole, Mode: wire.DataStaged, StageOff: c.stage, StageLen: 4 * width * images})
	for i := range uint64(width * images) {
		x, y, want := i%width, i/width, uint32(i)
		if x >= 5 && x < 35 && y >= 2 && y < 7 {
			want = uint32(1000*(y-2) + x - 5)
		}
		if got := binary.LittleEndian.Uint32(c.arena.Bytes()[c.stage+4*i:]); got != want {
			t.Fatalf("pixel %d of image %d is %d after the part was unmapped, not %d", x, y, got, want)
		}
	}
}

// An image can be made of another one, which is created first elsewhere, whatever their ids are.
func TestImageMadeOfAnImageGoesAlong(t *testing.T) {
	const width, size = 16, 4 * 16 * 16
	c, library := newClient(t), model(t)
	t.Setenv("GPUCTL_MODEL_ARENA", "0 0")
	from := c.executorOf(1, library)
	from.activate()
	ctx, q, view, whole := c.id(), c.id(), c.id(), c.id()
	c.call(&wire.CreateContext{ID: ctx, Devices: []uint32{1}})
	c.call(&wire.CreateQueue{ID: q, Context: ctx, Device: 1})
	image := wire.CreateImage{ID: whole, Context: ctx, Flags: cl.MemReadWrite, Order: 0x10B5, Type: 0x10D2, ImageType: cl.MemObjectImage2d, Width: width, Height: width}
	c.call(&image)
	image.ID, image.Buffer = view, whole
	c.call(&image)
	staged := c.arena.Bytes()[c.stage:][:size]
	for i := range staged {
		staged[i] = byte(3 * i)
	}
	region := []uint64{width, width, 1}
	c.call(&wire.WriteImage{Queue: q, Image: whole, Blocking: 1, Origin: []uint64{0, 0, 0}, Region: region, Mode: wire.DataStaged, StageOff: c.stage, StageLen: size})
	c.swap(from, c.executorOf(2, library))
	clear(staged)
	c.call(&wire.ReadImage{Queue: q, Image: view, Blocking: 1, Origin: []uint64{0, 0, 0}, Region: region, Mode: wire.DataStaged, StageOff: c.stage, StageLen: size})
	for i, v := range staged {
		if v != byte(3*i) {
			t.Fatalf("byte %d of the image is %d, not %d", i, v, byte(3*i))
		}
	}
}

// A region whose content the device has failed to bring is not written back when it is unmapped, also if the session has
// been swapped in between: what is there is from before.
func TestRegionThatFailedToComeIsNotWrittenAfterASwap(t *testing.T) {
	const width, size = 16, 4 * 16 * 16
	c, library := newClient(t), withIL(t)
	s := c.executorOf(1, library)
	s.activate()
	ctx, q, _ := c.setup(0)
	img, mapped := c.id(), c.id()
	c.call(&wire.CreateImage{ID: img, Context: ctx, Flags: cl.MemReadWrite, Order: 0x10B5, Type: 0x10DA, ImageType: cl.MemObjectImage2d, Width: width, Height: width})
	staged := c.arena.Bytes()[c.stage:][:size]
	for i := range staged {
		staged[i] = 7
	}
	origin, region := []uint64{0, 0, 0}, []uint64{width, width, 1}
	c.call(&wire.WriteImage{Queue: q, Image: img, Blocking: 1, Origin: origin, Region: region, Mode: wire.DataStaged, StageOff: c.stage, StageLen: size})
	during(t, "FAIL_READS", func() {
		c.call(&wire.MapImage{Queue: q, Image: img, Flags: cl.MapRead | cl.MapWrite, Map: 1, Event: mapped, Origin: origin, Region: region})
		if st, _ := c.answer(c.start(&wire.WaitEvents{Wait: []uint32{mapped}})); st != cl.ExecStatusErrorForEventsInWaitList {
			t.Fatal(st)
		}
	})
	c.swap(s, c.executorOf(2, library))
	c.post(&wire.Unmap{Queue: q, Mem: img, Map: 1})
	clear(staged)
	c.call(&wire.ReadImage{Queue: q, Image: img, Blocking: 1, Origin: origin, Region: region, Mode: wire.DataStaged, StageOff: c.stage, StageLen: size})
	for i, v := range staged {
		if v != 7 {
			t.Fatalf("byte %d of the image is %d, not 7", i, v)
		}
	}
}
