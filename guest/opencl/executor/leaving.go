package executor

import (
	"slices"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// An application may release its context, and all else, while its last commands wait to be launched,
// or run. The context, and the sub-devices that it has, live on until these have ended, under ids that no
// application can choose: a graph names them, and their former ids may be those of other objects.

// leave releases a context, at once if nothing uses it.
func (s *session) leave(c *clContext) {
	s.leaving = append(s.leaving, c)
	if s.endLeft(); slices.Contains(s.leaving, c) {
		c.id = s.ghostOf(c)
	}
}

// leaveDevice releases a sub-device, at once if no released context has it.
func (s *session) leaveDevice(d *device) {
	if !s.leavingHas(d) {
		cl.ReleaseDevice(d.vendor)
		return
	}
	s.renameDevice(d, s.ghostOf(d))
}

func (s *session) renameDevice(d *device, id uint32) {
	old := d.id
	d.id = id
	s.each(func(_ uint32, _ uint64, o any) {
		if p, ok := o.(*program); ok && p.built[old] != nil && slices.Contains(p.devices, d) {
			p.built[d.id] = p.built[old]
			delete(p.built, old)
		}
	})
}

// follow gives contexts and sub-devices, of a target that has had an earlier graph, the ids that they have
// in g: the application has released them since. What they still have would be in another
// context than what is created now, and the commands of both would be refused.
func (s *session) follow(g *graph) {
	is := func(id uint32, serial uint64, context uint32) {
		if !s.have(id, serial) {
			return
		}
		c := contextOf(s.object(id))
		if c != nil && s.moveGhost(c.id, context, c) {
			c.id = context
			if !slices.Contains(s.leaving, c) {
				s.leaving = append(s.leaving, c)
			}
		}
	}
	for _, x := range g.Queues {
		is(x.ID, x.Serial, x.Context)
	}
	for i := range g.Mems {
		is(g.Mems[i].ID, g.Mems[i].Serial, g.Mems[i].Context)
	}
	for _, x := range g.Samplers {
		is(x.ID, x.Serial, x.Context)
	}
	for i := range g.Programs {
		is(g.Programs[i].ID, g.Programs[i].Serial, g.Programs[i].Context)
	}
	parents := g.parents()
	for _, x := range g.Contexts {
		c := lookup[clContext](s, x.ID)
		if c == nil || !s.have(x.ID, x.Serial) || len(c.devices) != len(x.Devices) {
			continue
		}
		for i, id := range x.Devices {
			for d := c.devices[i]; d != nil && d.parent != nil; d, id = d.parent, parents[id] {
				if s.moveGhost(d.id, id, d) {
					s.renameDevice(d, id)
				}
			}
		}
	}
}

// moveGhost makes an object a ghost with that id, if it is a ghost's that no other has.
func (s *session) moveGhost(from, id uint32, o any) (moved bool) {
	if from == id || id <= wire.MaxID || s.ghosts[id] != nil {
		return false
	}
	if from > wire.MaxID {
		delete(s.ghosts, from)
	} else if s.objs[from] == o {
		s.objs[from] = nil
	}
	s.ghosts[id] = o
	return true
}

// parents returns the sub-devices' parents by id.
func (g *graph) parents() map[uint32]uint32 {
	parents := map[uint32]uint32{}
	for _, d := range g.Devices {
		parents[d.ID] = d.Parent
	}
	return parents
}

// nested lists the sub-devices in an order in which they can be created. Their ids do not tell it: an application's
// may be used again, and those that it has released have got theirs as they were released.
func (g *graph) nested() []*gDevice {
	const deepest = 64
	parents := g.parents()
	return sorted(g.Devices, func(d *gDevice) uint64 {
		depth := uint64(0)
		for id, ok := d.Parent, true; ok && depth < deepest; depth++ {
			id, ok = parents[id]
		}
		return depth<<32 | uint64(d.ID)
	})
}

// ghostOf gives a released object an id that no application can choose.
func (s *session) ghostOf(o any) uint32 {
	s.ghostID++
	s.ghosts[wire.MaxID+s.ghostID] = o
	return wire.MaxID + s.ghostID
}

// contextOf returns the context in which an object was created; nil: it is in none, or is a kernel.
func contextOf(o any) *clContext {
	switch o := o.(type) {
	case *queue:
		return o.ctx
	case *mem:
		return o.ctx
	case *sampler:
		return o.ctx
	case *program:
		return o.ctx
	case *event:
		return o.ctx
	}
	return nil
}

func (s *session) leavingHas(d *device) bool {
	return slices.ContainsFunc(s.leaving, func(c *clContext) bool {
		return slices.ContainsFunc(c.devices, func(x *device) bool {
			for x != nil && x != d {
				x = x.parent
			}
			return x == d
		})
	})
}

// endLeft gives back the released contexts that nothing uses any more.
func (s *session) endLeft() {
	if len(s.leaving) == 0 {
		return
	}
	used := map[*clContext]bool{}
	for _, o := range s.ghosts {
		used[contextOf(o)] = true
	}
	s.leaving = slices.DeleteFunc(s.leaving, func(c *clContext) bool {
		if len(c.queues) > 0 || used[c] {
			return false
		}
		cl.ReleaseContext(c.vendor)
		s.xfer.forget(c)
		s.pins.forget(c)
		delete(s.ghosts, c.id)
		return true
	})
	for id, o := range s.ghosts {
		if d, ok := o.(*device); ok && !s.leavingHas(d) {
			cl.ReleaseDevice(d.vendor)
			delete(s.ghosts, id)
		}
	}
}
