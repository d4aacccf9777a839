package executor

import (
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// graph is the pruned record of a session: the live objects and how to make
// each of them again. Its size follows the live objects, never the number of
// calls. It travels between executors as CBOR, whose decoder is made for bytes
// of strangers: the executor that a graph comes from has run an application's
// kernels. Fields that one side does not know are left out.
type graph struct {
	Version    int
	Generation uint32
	Part       int    // of the arena, that the executor has
	Held       []span // what it holds outside of that part
	Unified    bool
	Info       []byte // what the application was told of its device
	Clock      uint64 // latest timestamp that the application saw
	Usage      usage
	Calls      uint64
	GhostID    uint32
	Final      bool

	Devices  []gDevice
	Contexts []gContext
	Queues   []gQueue
	Mems     []gMem
	Samplers []gSampler
	Programs []gProgram
	Kernels  []gKernel
	Events   []gEvent
	Parked   []gParked
	Watches  []gWatch
	Replies  map[uint32][]byte
}

// graphVersion is 3 since graphs are CBOR; gobs were 1 and 2.
const graphVersion = 3

// Bounds of a graph. What a decoded one takes follows its length: an element is
// one byte at least, and the largest takes some hundred.
const (
	maxGraph    = 1 << 30
	maxElements = wire.MaxID + 1 // of one list
	maxNesting  = 4*portable.MaxDepth + 8
)

// errGraph is returned for a graph that no executor made.
var errGraph = errors.New("malformed session graph")

type gDevice struct {
	ID, Parent uint32
	Serial     uint64
	Part       []uint64
	Index      int
}

type gContext struct {
	ID      uint32
	Serial  uint64
	Devices []uint32
}

type gQueue struct {
	ID, Context, Device uint32
	Serial, Props       uint64
	Failed              int32
	Dead                bool
}

type gMem struct {
	ID, Context, Parent uint32
	Serial              uint64
	Kind                memKind
	Flags, Size, Origin uint64
	Format              cl.ImageFormat
	Desc                cl.ImageDesc
	Elem                uint64
	Arena               uint64
	HasArena, Unified   bool
	Extra               []span
	Maps                []mapping
	Dead                bool
	Callback            uint32

	mapped bool // the application has a mapping of it or of a part of it
}

type gSampler struct {
	ID, Context            uint32
	Serial                 uint64
	Normalized, Addr, Filt uint32
	Dead                   bool
}

type gProgram struct {
	ID, Context uint32
	Serial      uint64
	Content     portable.Program
	Spec        []portable.SpecConstant
	Devices     []uint32
	Built       map[uint32]build
	Loaded      bool
	Told        told
}

type gKernel struct {
	ID, Program uint32
	Serial      uint64
	Name        string
	Group       uint64
	Args        []gArg
}

type gArg struct {
	Set    bool
	Kind   uint32
	Size   uint64
	Object uint32
	Value  []byte
}

type gEvent struct {
	ID, Context, Queue uint32
	State              eventState
	User               bool
	Status             int32
	Times              [5]uint64
	Timed              bool
	Dead               bool
}

type gParked struct {
	Op     uint16
	Slot   uint16
	Body   []byte
	Queue  uint32
	Event  uint32
	Kernel *gKernel
	Wait   []uint32
	Uses   []uint32
	Alias  map[uint32]uint32
}

type gWatch struct {
	Event uint32
	Type  int32
	Token uint32
}

func (g *graph) encode() ([]byte, error) {
	b, err := cbor.Marshal(g)
	if err != nil {
		return nil, fmt.Errorf("encode session graph: %w", err)
	}
	return b, nil
}

func decodeGraph(b []byte) (*graph, error) {
	if len(b) > maxGraph {
		return nil, fmt.Errorf("session graph of %d bytes, more than %d: %w", len(b), maxGraph, errGraph)
	}
	mode, err := cbor.DecOptions{
		MaxArrayElements: maxElements, MaxMapPairs: maxElements, MaxNestedLevels: maxNesting,
		IndefLength: cbor.IndefLengthForbidden, TagsMd: cbor.TagsForbidden, DupMapKey: cbor.DupMapKeyEnforcedAPF,
		UTF8: cbor.UTF8DecodeInvalid, // options and logs are an application's and a compiler's bytes
	}.DecMode()
	if err != nil {
		return nil, fmt.Errorf("decode session graph: %w", err)
	}
	g := &graph{}
	if err := mode.Unmarshal(b, g); err != nil {
		return nil, fmt.Errorf("%w: %w", errGraph, err)
	}
	if g.Version != graphVersion {
		return nil, fmt.Errorf("session graph of version %d, this executor knows %d", g.Version, graphVersion)
	}
	if err := g.check(); err != nil {
		return nil, fmt.Errorf("%w: %w", errGraph, err)
	}
	return g, nil
}

// check finds what no executor writes and restore takes for granted. Whether
// objects exist that others name is seen when they are made.
func (g *graph) check() error {
	var errs []error
	seen := map[uint32]bool{}
	id := func(what string, id uint32) {
		switch {
		case id < wire.FirstID:
			errs = append(errs, fmt.Errorf("%s has id %d, which is a device's", what, id))
		case seen[id]:
			errs = append(errs, fmt.Errorf("%s has id %d, which another object has", what, id))
		}
		seen[id] = true
	}
	for _, x := range g.Devices {
		id("sub-device", x.ID)
		if x.Index < 0 {
			errs = append(errs, fmt.Errorf("sub-device %d is part %d", x.ID, x.Index))
		}
	}
	for _, x := range g.Contexts {
		id("context", x.ID)
		if len(x.Devices) == 0 {
			errs = append(errs, fmt.Errorf("context %d has no device", x.ID))
		}
	}
	for _, x := range g.Queues {
		id("queue", x.ID)
	}
	mems := make(map[uint32]*gMem, len(g.Mems))
	for i := range g.Mems {
		id("memory object", g.Mems[i].ID)
		mems[g.Mems[i].ID] = &g.Mems[i]
	}
	for i := range g.Mems {
		if err := g.Mems[i].check(mems[g.Mems[i].Parent]); err != nil {
			errs = append(errs, fmt.Errorf("memory object %d: %w", g.Mems[i].ID, err))
		}
		if len(errs) > 0 {
			break
		}
	}
	for _, x := range g.Samplers {
		id("sampler", x.ID)
	}
	for _, x := range g.Programs {
		id("program", x.ID)
	}
	for _, x := range g.Kernels {
		id("kernel", x.ID)
	}
	for _, x := range g.Events {
		id("event", x.ID)
		if x.State > eventDone || x.State == eventVendor {
			errs = append(errs, fmt.Errorf("event %d is in state %d", x.ID, x.State))
		}
	}
	if len(errs) > 0 {
		return errs[0]
	}
	return nil
}

// check holds an object against the one that it is a part of; nil: none.
func (m *gMem) check(parent *gMem) error {
	d := &m.Desc
	switch {
	case m.Kind > memImage:
		return fmt.Errorf("kind %d", m.Kind)
	case m.Kind == memBuffer && m.Parent != 0, m.Kind == memSub && (parent == nil || parent.Kind != memBuffer), parent != nil && parent.Kind == memImage:
		return fmt.Errorf("kind %d with parent %d", m.Kind, m.Parent)
	case m.Kind == memSub && (m.Origin > parent.Size || m.Size > parent.Size-m.Origin):
		return fmt.Errorf("%d bytes at %d of a buffer of %d", m.Size, m.Origin, parent.Size)
	case m.Kind == memImage && (m.Elem == 0 || m.Elem > maxPixel || m.Size != m.pixels()*m.Elem || max(d.RowPitch, d.SlicePitch) > maxExtent):
		return fmt.Errorf("%d bytes of an image of %d x %d x %d (%d), %d bytes each", m.Size, d.Width, d.Height, d.Depth, d.ArraySize, m.Elem)
	}
	return nil
}

// pixels of an image, 0 if they are none or too many.
func (m *gMem) pixels() uint64 {
	n := uint64(1)
	for _, v := range (&mem{desc: m.Desc}).region() {
		if v == 0 || v > maxExtent/n {
			return 0
		}
		n *= v
	}
	return n
}

func (s *session) kernelGraph(k *kernel, serial uint64) gKernel {
	prog := k.prog.id
	if k.prog.ghost != 0 {
		prog = k.prog.ghost
	}
	g := gKernel{ID: k.id, Program: prog, Serial: serial, Name: k.name, Group: k.group}
	for i := range k.args {
		a := &k.args[i]
		g.Args = append(g.Args, gArg{a.set && !s.argGone(a), a.kind, a.size, a.object, append([]byte(nil), a.value...)})
	}
	return g
}

// each calls f for every object, the released ones that parked calls still use
// included, with the id that the graph knows it by.
func (s *session) each(f func(id uint32, serial uint64, o any)) {
	for id, o := range s.objs {
		if o != nil {
			f(uint32(id), s.serials[id], o)
		}
	}
	for id, o := range s.ghosts {
		f(id, uint64(id)<<32, o)
	}
}

// graph records the session. When it is final, the device is idle, and events
// and parked calls count too.
func (s *session) graph(final bool) *graph {
	g := &graph{
		Version: graphVersion, Generation: s.cfg.Generation, Part: s.host.own, Held: s.host.held(), Unified: s.unified, Info: s.info, Clock: s.clock.last,
		Usage: s.usage, Calls: s.calls, GhostID: s.ghostID, Final: final, Replies: s.replies,
	}
	ghostOf := map[any]uint32{}
	for id, o := range s.ghosts {
		ghostOf[o] = id
	}
	ref := func(o any, id uint32) uint32 {
		if n := ghostOf[o]; n != 0 {
			return n
		}
		return id
	}
	s.each(func(id uint32, serial uint64, o any) {
		switch o := o.(type) {
		case *device:
			if o.parent != nil {
				g.Devices = append(g.Devices, gDevice{id, o.parent.id, serial, o.part, o.index})
			}
		case *clContext:
			c := gContext{ID: id, Serial: serial}
			for _, d := range o.devices {
				c.Devices = append(c.Devices, d.id)
			}
			g.Contexts = append(g.Contexts, c)
		case *queue:
			g.Queues = append(g.Queues, gQueue{id, o.ctx.id, o.dev.id, serial, o.props, int32(o.failed), o.dead})
		case *mem:
			g.Mems = append(g.Mems, memGraph(id, serial, o, ref))
		case *sampler:
			g.Samplers = append(g.Samplers, gSampler{id, o.ctx.id, serial, o.normalized, o.addr, o.filt, o.dead})
		case *program:
			if o.building && !final {
				return
			}
			p := gProgram{ID: id, Context: o.ctx.id, Serial: serial, Content: o.content, Spec: o.spec, Built: map[uint32]build{}, Loaded: o.loaded, Told: o.told}
			for _, d := range o.devices {
				p.Devices = append(p.Devices, d.id)
			}
			for d, b := range o.built {
				p.Built[d] = *b
			}
			g.Programs = append(g.Programs, p)
		case *kernel:
			g.Kernels = append(g.Kernels, s.kernelGraph(o, serial))
		case *event:
			if final {
				g.Events = append(g.Events, s.eventGraph(id, o))
			}
		}
	})
	if !final {
		return g
	}
	for _, p := range s.parked {
		g.Parked = append(g.Parked, s.parkedGraph(p, ref))
	}
	for _, w := range s.watches {
		g.Watches = append(g.Watches, gWatch{ref(w.e, w.e.id), w.typ, w.token})
	}
	return g
}

// memGraph records a memory object, and notes the id that the receiver knows it
// by. ref is the id of an object, or of the ghost that it is.
func memGraph(id uint32, serial uint64, o *mem, ref func(o any, id uint32) uint32) gMem {
	if o.known != id && o.known != 0 {
		o.markAll() // the receiver has the content of another object
	}
	o.known = id
	m := gMem{
		ID: id, Context: o.ctx.id, Serial: serial, Kind: o.kind, Flags: o.flags, Size: o.size, Origin: o.origin,
		Format: o.format, Desc: o.desc, Elem: o.elem, Arena: o.arena, HasArena: o.hasArena, Unified: o.unified, Extra: o.extra, Dead: o.dead, Callback: o.callback,
	}
	if o.parent != nil {
		m.Parent = ref(o.parent, o.parent.id)
	}
	for _, mp := range o.maps {
		m.Maps = append(m.Maps, *mp)
	}
	return m
}

// parkedGraph records a parked call; ref is as memGraph has it.
func (s *session) parkedGraph(p *parkedCall, ref func(o any, id uint32) uint32) gParked {
	x := gParked{Op: uint16(p.op), Slot: p.slot, Body: p.body, Alias: p.alias}
	if p.q != nil {
		x.Queue = ref(p.q, p.q.id)
	}
	if p.e != nil {
		x.Event = ref(p.e, p.e.id)
	}
	if p.kernel != nil {
		k := s.kernelGraph(p.kernel, 0)
		x.Kernel = &k
	}
	for _, e := range p.wait {
		x.Wait = append(x.Wait, ref(e, e.id))
	}
	for _, o := range p.drops {
		if m, ok := o.(*mem); ok {
			x.Uses = append(x.Uses, ref(m, m.id))
		}
	}
	return x
}

// eventGraph records an event. The device is idle, so one that the vendor had
// is over: its status and times are all that is left of it.
func (s *session) eventGraph(id uint32, e *event) gEvent {
	g := gEvent{ID: id, Context: e.ctx.id, State: e.state, User: e.user, Status: e.status, Times: e.times, Timed: e.timed, Dead: e.dead}
	if e.q != nil && e.q.vendor != 0 {
		g.Queue = e.q.id
	}
	if e.state == eventVendor {
		g.State, g.Status = eventDone, min(s.poll(e), 0)
		if t, st := s.stamps(e); st == cl.Success {
			g.Times, g.Timed = t, true
		}
	}
	return g
}
