package executor

import (
	"fmt"
	"slices"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// What a client on another host writes into a mapped region comes with the request that
// unmaps it. Two cases are different. The client may write after that request, if an event
// of its own keeps it from running: the bytes are fetched when it is its turn. And it cannot
// have written before it was shown the region: what it has there is older then.

// shownFirst reports whether a mapping is shown to the client before it may be written.
func (mp *mapping) shownFirst() bool { return mp.Flags&cl.MapWriteInvalidateRegion == 0 }

func (mp *mapping) writes() bool {
	return mp.Flags&(cl.MapWrite|cl.MapWriteInvalidateRegion) != 0
}

// showsMap is shows for a mapping.
func (s *session) showsMap(x *cmd, m *mem, mp *mapping) {
	s.shows(x, m.block(mp))
	if s.far != nil {
		x.of, x.mapping, mp.unseen = m, mp, true
	}
}

// unmapped returns the mapping that a parked request unmaps, if the client may have written
// there.
func (s *session) unmapped(p *parkedCall, u *wire.Unmap) (*mem, *mapping) {
	m := lookupFor[mem](s, p, u.Mem)
	if m == nil {
		return nil, nil
	}
	mp := m.maps[u.Map]
	if mp == nil || !mp.writes() || mp.unseen || s.isToMap(m, mp) {
		return nil, nil
	}
	return m, mp
}

// isToMap reports whether the command that shows a mapping to the client is parked.
func (s *session) isToMap(m *mem, mp *mapping) bool {
	return slices.ContainsFunc(s.parked, func(p *parkedCall) bool {
		object, id, ok := maps(p.op, p.body)
		return ok && id == mp.ID && lookupFor[mem](s, p, object) == m
	})
}

// isToShow reports whether a range is in mapped regions that are still to be shown to the client, and in no
// other: what the client has there is older than what is here, or will be.
func (s *session) isToShow(x *remote.Block) bool {
	found, seen := false, false
	s.each(func(_ uint32, _ uint64, o any) {
		m, ok := o.(*mem)
		if !ok {
			return
		}
		for _, mp := range m.maps {
			if b := m.block(mp); b.At < x.End() && x.At < b.End() {
				found, seen = true, seen || !mp.unseen
			}
		}
	})
	return found && !seen
}

// toBeMapped returns the mappings whose commands are parked. The session serves nobody yet.
func (s *session) toBeMapped() map[*mapping]bool {
	out := map[*mapping]bool{}
	for _, p := range s.parked {
		object, id, ok := maps(p.op, p.body)
		if !ok {
			continue
		}
		m := lookup[mem](s, object)
		if ghost, ok := p.alias[object]; ok {
			m, _ = s.ghosts[ghost].(*mem)
		}
		if m != nil && m.maps[id] != nil {
			out[m.maps[id]] = true
		}
	}
	return out
}

// lookupFor finds an object as a parked request names it.
func lookupFor[T any](s *session, p *parkedCall, id uint32) *T {
	was := s.redo
	s.redo = p
	defer func() { s.redo = was }()
	return lookup[T](s, id)
}

// maps returns the object and the mapping that a request makes, if it makes one.
func maps(op wire.Op, body []byte) (object, id uint32, ok bool) {
	if op != wire.OpMapBuffer && op != wire.OpMapImage {
		return 0, 0, false
	}
	m := wire.New(op)
	if m.Decode(body) != nil {
		return 0, 0, false
	}
	switch m := m.(type) {
	case *wire.MapBuffer:
		return m.Mem, m.Map, true
	case *wire.MapImage:
		return m.Image, m.Map, true
	}
	return 0, 0, false
}

// fetched reports whether what the client has written into the region that a parked request
// unmaps is here. If not, it is fetched, and the request is looked at again. The caller holds
// s.mu.
func (s *session) fetched(p *parkedCall) bool {
	if s.far == nil || p.op != wire.OpUnmap || p.fetch == fetchDone {
		return true
	}
	if p.fetch == fetchBegun {
		return false
	}
	x := s.reads(p)
	if x.Row == 0 || x.Check(s.arena.Size()) != nil {
		p.fetch = fetchDone
		return true
	}
	p.fetch = fetchBegun
	go func() {
		s.far.send(s.far.commands, remote.KindNeed, x.Append(nil), nil)
		err := s.far.sync(s.far.ctx)
		s.mu.Lock()
		defer s.mu.Unlock()
		if err != nil {
			s.log.Warn("mapped region", "err", err) // the executor ends
			return
		}
		p.fetch = fetchDone
		s.advance()
	}()
	return false
}

// Where the content of a region stands that a parked request unmaps.
const (
	fetchNone = iota
	fetchBegun
	fetchDone
)

// LateUnmaps returns the regions that the application may still write though it has asked to
// unmap them: the requests are parked in the graph. Carriers need them: contents do not
// overwrite those regions. One whose map command is parked, too, it has not seen yet.
func LateUnmaps(b []byte) ([]remote.Block, error) {
	g, err := decodeGraph(b)
	if err != nil {
		return nil, fmt.Errorf("graph of the far executor: %w", err)
	}
	mems := map[uint32]*gMem{}
	for i := range g.Mems {
		mems[g.Mems[i].ID] = &g.Mems[i]
	}
	named := func(p *gParked, id uint32) uint32 {
		if ghost, ok := p.Alias[id]; ok {
			return ghost
		}
		return id
	}
	toMap := map[[2]uint32]bool{}
	for i := range g.Parked {
		p := &g.Parked[i]
		if object, id, ok := maps(wire.Op(p.Op), p.Body); ok {
			toMap[[2]uint32{named(p, object), id}] = true
		}
	}
	var out []remote.Block
	for i := range g.Parked {
		var u wire.Unmap
		p := &g.Parked[i]
		if wire.Op(p.Op) != wire.OpUnmap || u.Decode(p.Body) != nil {
			continue
		}
		id := named(p, u.Mem)
		if g := mems[id]; g != nil && !toMap[[2]uint32{id, u.Map}] {
			m := &mem{kind: g.Kind, size: g.Size, elem: g.Elem, desc: g.Desc}
			for k := range g.Maps {
				if mp := &g.Maps[k]; mp.ID == u.Map && mp.writes() {
					out = append(out, m.block(mp))
				}
			}
		}
	}
	return out, nil
}
