package executor

import (
	"reflect"
	"testing"
	"time"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// A digest says which parts of which objects differ, and leaves everything as it was: what is written, and memory.
func TestDigestTellsWhatDiffers(t *testing.T) {
	const size = dirtyChunk + 4096
	c := newClient(t)
	s := c.executor(1)
	discrete(s)
	s.activate()
	ctx, q, _ := c.setup(0)
	b, small := c.buffer(ctx, size), c.buffer(ctx, 64)
	c.fill(q, b, size, 1)
	c.fill(q, small, 64, 1)
	c.call(&wire.Finish{Queue: q})
	api := &controller{s: s}
	digest := func() map[uint32][]uint32 {
		t.Helper()
		if _, err := s.freeze(t.Context(), 10*time.Second); err != nil {
			t.Fatal(err)
		}
		before := s.dirtyBytes()
		resp, err := api.Digest(t.Context(), connect.NewRequest(&gpuctlv1.DigestRequest{}))
		if err != nil || s.dirtyBytes() != before || s.windowSize != 0 {
			t.Fatal(err, s.windowSize)
		}
		s.thaw()
		sums := map[uint32][]uint32{}
		for _, o := range resp.Msg.Objects {
			sums[o.Id] = o.Sums
		}
		return sums
	}
	if _, err := api.Digest(t.Context(), connect.NewRequest(&gpuctlv1.DigestRequest{})); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Fatalf("digest of a session that runs: %v", err)
	}
	first := digest()
	if again := digest(); len(first) != 2 || len(first[b]) != 2 || !reflect.DeepEqual(first, again) {
		t.Fatal(first, again)
	}
	c.call(&wire.WriteBuffer{Queue: q, Mem: b, Blocking: 1, Offset: dirtyChunk + 8, Size: 4, Mode: wire.DataInline, Content: []byte{2, 0, 0, 0}})
	second := digest()
	if !reflect.DeepEqual(second[small], first[small]) || second[b][0] != first[b][0] || second[b][1] == first[b][1] {
		t.Fatal(first, second)
	}
	// What the application has mapped may change at any time.
	c.call(&wire.MapBuffer{Queue: q, Mem: b, Blocking: 1, Flags: cl.MapRead, Map: 1, Size: 64})
	if third := digest(); len(third) != 1 || third[small] == nil {
		t.Fatal(third)
	}
}
