package executor

import (
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/remote"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// graph describes a session: the objects that exist, and how to create each of them again.
// Its size depends on the objects that exist, never on the number of calls. Executors
// exchange it as CBOR, with a decoder that is made for untrusted bytes: the executor that
// sends a graph has run an application's kernels. Fields that one side does not know are
// ignored.
type graph struct {
	Version    int
	Generation uint32
	Part       int    // the part of the arena that the executor owns
	Held       []span // ranges outside of that part that the executor uses
	Unified    bool
	Info       []byte // device properties that the application has read
	Clock      uint64 // the latest timestamp that the application has read
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

// graphVersion is 3 since graphs are CBOR. Versions 1 and 2 were gobs.
const graphVersion = 3

// Limits of a graph. The memory that a decoded graph takes depends on its length: an
// element has at least one byte, and the largest takes some hundred bytes of memory.
const (
	maxGraph    = 1 << 30
	maxElements = wire.MaxID + 1 // of one list
	maxNesting  = 4*portable.MaxDepth + 8
)

// errGraph is returned for a graph that no executor can have written.
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

	mapped bool // the application has mapped it or a part of it
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
	Spec        []portable.SpecConstant // of the build, or of the next one if it is not built
	Next        []portable.SpecConstant // of the next one; none: the same
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
		UTF8: cbor.UTF8DecodeInvalid, // options and logs have the bytes that an application or a compiler wrote
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

// check refuses values that no executor writes and that restore does not check itself.
// Whether the objects exist that others name is checked when they are created.
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
	for i := range g.Mems {
		id("memory object", g.Mems[i].ID)
	}
	mems := g.mems()
	for i := range g.Mems {
		m := &g.Mems[i]
		if err := m.check(mems[m.Parent]); err != nil {
			errs = append(errs, fmt.Errorf("memory object %d: %w", m.ID, err))
		}
		if m.views(mems) > maxViews {
			errs = append(errs, fmt.Errorf("memory object %d is an image of more than %d images", m.ID, maxViews))
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

func (g *graph) mems() map[uint32]*gMem {
	mems := make(map[uint32]*gMem, len(g.Mems))
	for i := range g.Mems {
		mems[g.Mems[i].ID] = &g.Mems[i]
	}
	return mems
}

// maxViews is how many images may be made one of the other.
const maxViews = 64

// views returns of how many images an image is made, one of the other: these are created before it.
func (m *gMem) views(mems map[uint32]*gMem) (n uint64) {
	for p := mems[m.Parent]; p != nil && p.Kind == memImage && n <= maxViews; p = mems[p.Parent] {
		n++
	}
	return n
}

// shows reports whether an image may be made of another one, whose pixels it has with another meaning.
func (m *gMem) shows(parent *gMem) bool {
	return m.Kind == memImage && m.Desc.Type == cl.MemObjectImage2d && parent.Desc.Type == cl.MemObjectImage2d && m.Size == parent.Size
}

// check compares an object with the one that it is a part of; parent is nil if there is
// none.
func (m *gMem) check(parent *gMem) error {
	d := &m.Desc
	switch {
	case m.Kind > memImage:
		return fmt.Errorf("kind %d", m.Kind)
	case m.Kind == memBuffer && m.Parent != 0, m.Kind == memSub && (parent == nil || parent.Kind != memBuffer), parent != nil && parent.Kind == memImage && !m.shows(parent):
		return fmt.Errorf("kind %d with parent %d", m.Kind, m.Parent)
	case m.Kind == memSub && (m.Origin > parent.Size || m.Size > parent.Size-m.Origin):
		return fmt.Errorf("%d bytes at %d of a buffer of %d", m.Size, m.Origin, parent.Size)
	case m.Kind == memImage && (m.Elem == 0 || m.Elem > maxPixel || m.Size != m.pixels()*m.Elem || max(d.RowPitch, d.SlicePitch) > maxExtent):
		return fmt.Errorf("%d bytes of an image of %d x %d x %d (%d), %d bytes each", m.Size, d.Width, d.Height, d.Depth, d.ArraySize, m.Elem)
	}
	return nil
}

// pixels returns the number of an image's pixels; 0 if there are none or too many.
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

// each calls f for every object, with its id in the graph. That includes released objects
// that parked calls still use.
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

// graph describes the session. If final is set, the device is idle, and the graph has
// events and parked calls, too.
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
			p := gProgram{ID: id, Context: o.ctx.id, Serial: serial, Content: o.content, Spec: o.constants(), Next: o.spec, Built: map[uint32]build{}, Loaded: o.loaded, Told: o.told}
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

// memGraph describes a memory object, and records the id under which the receiver has it.
// ref returns the id of an object, or of the ghost that it has become.
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
		x := *mp
		if mp.failed() { // another executor cannot ask
			x.Flags &^= cl.MapWrite
		}
		m.Maps = append(m.Maps, x)
	}
	return m
}

// parkedGraph describes a parked call; for ref, see memGraph.
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

// eventGraph describes an event. The device is idle, so the vendor's events have ended, and
// only their status and times are needed.
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

// StagedRead is a read that is parked in a graph: it will write a range of the arena.
type StagedRead struct {
	Slot     uint16
	Pend     uint32
	Off, Len uint64
}

// ParkedReads returns the reads that are parked in a graph. Carriers need them: they let a
// far executor write only where something is expected.
func ParkedReads(b []byte) ([]StagedRead, error) {
	g, err := decodeGraph(b)
	if err != nil {
		return nil, err
	}
	var out []StagedRead
	for _, p := range g.Parked {
		m := wire.New(wire.Op(p.Op))
		if m == nil || m.Decode(p.Body) != nil {
			continue
		}
		if off, n, pend, ok := remote.Reads(m); ok {
			out = append(out, StagedRead{p.Slot, pend, off, n})
		}
	}
	return out, nil
}
