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
	old := d.id
	d.id = s.ghostOf(d)
	s.each(func(_ uint32, _ uint64, o any) {
		if p, ok := o.(*program); ok && p.built[old] != nil && slices.Contains(p.devices, d) {
			p.built[d.id] = p.built[old]
			delete(p.built, old)
		}
	})
}

// ghostOf gives a released object an id that no application can choose.
func (s *session) ghostOf(o any) uint32 {
	s.ghostID++
	s.ghosts[wire.MaxID+s.ghostID] = o
	return wire.MaxID + s.ghostID
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
		switch o := o.(type) {
		case *queue:
			used[o.ctx] = true
		case *mem:
			used[o.ctx] = true
		case *sampler:
			used[o.ctx] = true
		case *program:
			used[o.ctx] = true
		case *event:
			used[o.ctx] = true
		}
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
