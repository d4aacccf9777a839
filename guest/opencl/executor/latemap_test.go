package executor

import (
	"testing"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// A request to unmap may be parked behind the command that maps the region. The application has not
// seen the region then, so contents that come to this host belong there.
func TestRegionThatIsNotMappedYetIsNoLateUnmap(t *testing.T) {
	const id, ghost = wire.FirstID, wire.MaxID + 1
	maps := func() []mapping {
		return []mapping{{ID: 1, Flags: cl.MapWrite, At: 1 << 16, Size: 64}, {ID: 2, Flags: cl.MapWrite, At: 2 << 16, Size: 64}}
	}
	alias := map[uint32]uint32{id: ghost} // what was released, and had the same id
	parked := func(op wire.Op, m wire.Request, alias map[uint32]uint32) gParked {
		return gParked{Op: uint16(op), Body: m.Append(nil), Alias: alias}
	}
	g := &graph{
		Version: graphVersion,
		Mems:    []gMem{{ID: id, Size: 1 << 20, Maps: maps()}, {ID: ghost, Size: 1 << 20, Maps: maps()}},
		Parked: []gParked{
			parked(wire.OpMapBuffer, &wire.MapBuffer{Mem: id, Map: 1, Flags: cl.MapWrite, Size: 64}, nil),
			parked(wire.OpUnmap, &wire.Unmap{Mem: id, Map: 1}, nil),
			parked(wire.OpUnmap, &wire.Unmap{Mem: id, Map: 2}, nil),
			parked(wire.OpMapBuffer, &wire.MapBuffer{Mem: id, Map: 2, Flags: cl.MapWrite, Size: 64}, alias),
			parked(wire.OpUnmap, &wire.Unmap{Mem: id, Map: 2}, alias),
		},
	}
	b, err := g.encode()
	if err != nil {
		t.Fatal(err)
	}
	late, err := LateUnmaps(b)
	if err != nil || len(late) != 1 || late[0].At != 2<<16 {
		t.Errorf("%v, %v", late, err)
	}
}
