package executor

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/shm"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// A session is suspended and resumed while the application has something mapped, on devices that have
// memory of their own and such that have not, in turns. Nobody else is there when an executor begins, so it
// may get the part in which the application's memory is.
func TestMappedMemoryOutlivesSuspensionsOnDevicesOfBothKinds(t *testing.T) {
	const size = 1 << 20
	for _, first := range []bool{true, false} {
		c := newClient(t)
		own := first
		s := c.executor(1)
		s.unified = !own
		s.activate()
		ctx, q, _ := c.setup(0)
		b := c.buffer(ctx, size)
		c.fill(q, b, size, 1)
		at := binary.LittleEndian.Uint64(c.call(&wire.MapBuffer{Queue: q, Mem: b, Blocking: 1, Flags: cl.MapWriteInvalidateRegion, Map: 1, Size: size}))
		mapped := c.arena.Bytes()[at : at+size]
		written := bytes.Repeat([]byte{9, 0, 0, 0}, size/4)
		copy(mapped, written)
		for generation := uint32(2); generation < 8; generation++ {
			g, all := sendAway(t, s)
			s.closed.Store(true)
			s.retire()
			s.host.end()
			own = !own
			s = c.executor(generation)
			s.unified = !own
			s.mu.Lock()
			err := s.restore(g, noProgress)
			s.mu.Unlock()
			if err != nil {
				t.Fatalf("resumed as %d: %v", generation, err)
			}
			if _, err := s.receiveState(reader(all)); err != nil {
				t.Fatalf("resumed as %d: %v", generation, err)
			}
			s.ring.(*shm.Ring).SetOwner(generation)
			s.activate()
			if !bytes.Equal(mapped, written) {
				t.Fatalf("resumed as %d, which has memory of its own: %v: what the application has written to its mapping is gone", generation, own)
			}
		}
		c.post(&wire.Unmap{Queue: q, Mem: b, Map: 1})
		equal(t, c.read(q, b, size), 9)
	}
}
