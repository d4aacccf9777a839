package executor

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/gpuctl/gpuctl/guest/opencl/cl"
	"github.com/gpuctl/gpuctl/guest/opencl/portable"
	"github.com/gpuctl/gpuctl/guest/opencl/wire"
)

// ErrRefused is returned when this device cannot provide what the session's graph requires.
var ErrRefused = errors.New("the device cannot take the session")

// progress reports how far a step of a preparation is.
type progress func(step string, done, total uint64)

// markMapped marks the objects whose host memory the application has mapped, through the
// object itself or through a sub-buffer of it.
func (g *graph) markMapped() {
	at := map[uint32]int{}
	for i := range g.Mems {
		at[g.Mems[i].ID] = i
	}
	for i := range g.Mems {
		if len(g.Mems[i].Maps) == 0 {
			continue
		}
		g.Mems[i].mapped = true
		if p, ok := at[g.Mems[i].Parent]; ok && g.Mems[i].Kind == memSub {
			g.Mems[p].mapped = true
		}
	}
}

// restore makes the executor's objects equal to those of the graph: it creates the missing
// ones and releases those that the graph no longer has. It may be called again with a newer
// graph of the same session. The last graph is the final one: it has events and parked
// calls, too. The caller holds s.mu, and the session serves no requests yet.
func (s *session) restore(g *graph, report progress) error {
	s.info, s.usage, s.ghostID, s.calls = g.Info, g.Usage, g.GhostID, g.Calls
	g.markMapped()
	s.follow(g)
	s.dropStale(g)
	// First reserve the memory that is in use, so that nothing new is placed there.
	if err := s.host.begin(g.Part, g.Held); err != nil {
		return fmt.Errorf("executor %d: %w", g.Generation, err)
	}
	for i := range g.Mems {
		for _, x := range g.Mems[i].keeps(g.Final) {
			if err := s.host.inherit(x.Off, x.Size); err != nil {
				return fmt.Errorf("memory object %d: %w", g.Mems[i].ID, err)
			}
		}
	}
	if !s.swept {
		s.host.sweep(s.host.own)
		s.swept = true
	}
	for _, d := range g.nested() {
		if err := s.restoreDevice(d); err != nil {
			return err
		}
	}
	for _, c := range g.Contexts {
		if s.have(c.ID, c.Serial) {
			continue
		}
		ds, vs, ok := s.vendorDevices(c.Devices)
		if !ok {
			return fmt.Errorf("context %d: device missing: %w", c.ID, ErrRefused)
		}
		v, st := cl.CreateContext(vs)
		if st != cl.Success {
			return fmt.Errorf("context %d: %w: %w", c.ID, st, ErrRefused)
		}
		s.set(c.ID, c.Serial, &clContext{id: c.ID, devices: ds, vendor: v})
	}
	for _, q := range g.Queues {
		if err := s.restoreQueue(q); err != nil {
			return err
		}
	}
	total := uint64(len(g.Mems) + len(g.Programs) + len(g.Kernels))
	mems := g.mems()
	for i, m := range sorted(g.Mems, func(m *gMem) uint64 { return uint64(m.Kind)<<48 | m.views(mems)<<32 | uint64(m.ID) }) {
		if err := s.restoreMem(m, g.Final); err != nil {
			return err
		}
		if i%64 == 0 {
			report("objects", uint64(i), total)
		}
	}
	for _, x := range g.Samplers {
		if s.have(x.ID, x.Serial) {
			continue
		}
		c := lookup[clContext](s, x.Context)
		if c == nil {
			return fmt.Errorf("sampler %d: context missing: %w", x.ID, ErrRefused)
		}
		v, st := cl.CreateSampler(c.vendor, x.Normalized != 0, x.Addr, x.Filt)
		if st != cl.Success {
			return fmt.Errorf("sampler %d: %w: %w", x.ID, st, ErrRefused)
		}
		s.set(x.ID, x.Serial, &sampler{id: x.ID, ctx: c, normalized: x.Normalized, addr: x.Addr, filt: x.Filt, vendor: v, dead: x.Dead})
	}
	if err := s.restorePrograms(g.Programs, report); err != nil {
		return err
	}
	for i := range g.Kernels {
		if err := s.restoreKernel(&g.Kernels[i]); err != nil {
			return err
		}
	}
	if g.Final {
		return s.restoreFinal(g)
	}
	return nil
}

func sorted[T any, K ~uint32 | ~uint64](in []T, key func(*T) K) []*T {
	out := make([]*T, len(in))
	for i := range in {
		out[i] = &in[i]
	}
	slices.SortStableFunc(out, func(a, b *T) int { return cmp.Compare(key(a), key(b)) })
	return out
}

// have reports whether the object with this id and serial number exists already.
func (s *session) have(id uint32, serial uint64) bool {
	if id > wire.MaxID {
		return s.ghosts[id] != nil
	}
	return int(id) < len(s.objs) && s.objs[id] != nil && s.serials[id] == serial
}

func (s *session) set(id uint32, serial uint64, o any) {
	if id > wire.MaxID {
		s.ghosts[id] = o
		switch o := o.(type) {
		case *mem:
			o.ghost = id
		case *program:
			o.ghost, o.dead = id, true
		case *event:
			o.ghost = id
		case *clContext:
			s.leaving = append(s.leaving, o)
		}
		return
	}
	s.grow(id)
	s.objs[id], s.serials[id] = o, serial
	s.serial = max(s.serial, serial)
}

// dropStale releases the objects that the newer graph does not have. An object is released
// before those that it uses.
func (s *session) dropStale(g *graph) {
	keep := map[uint32]uint64{}
	for _, x := range g.Devices {
		keep[x.ID] = x.Serial
	}
	for _, x := range g.Contexts {
		keep[x.ID] = x.Serial
	}
	for _, x := range g.Queues {
		keep[x.ID] = x.Serial
	}
	for _, x := range g.Mems {
		keep[x.ID] = x.Serial
	}
	for _, x := range g.Samplers {
		keep[x.ID] = x.Serial
	}
	for _, x := range g.Programs {
		keep[x.ID] = x.Serial
	}
	for _, x := range g.Kernels {
		keep[x.ID] = x.Serial
	}
	rank := func(o any) int {
		switch o := o.(type) {
		case *event:
			return 0
		case *kernel:
			return 1
		case *program, *sampler:
			return 2
		case *mem:
			return 5 - int(o.kind)
		case *queue:
			return 6
		case *clContext:
			return 7
		}
		return 8
	}
	object := func(id uint32) any {
		if id > wire.MaxID {
			return s.ghosts[id]
		}
		return s.objs[id]
	}
	moved := s.movedParts(g)
	var stale []uint32
	for id, o := range s.ghosts {
		if _, ok := keep[id]; ok && !moved[o] {
			s.hold(o, 1)
			defer s.hold(o, -1)
			continue
		}
		if m, ok := o.(*mem); ok {
			m.callback = 0 // the executor that serves the session has made the callback
		}
		stale = append(stale, id)
	}
	for id, o := range s.objs {
		if o == nil || id < wire.FirstID {
			continue
		}
		if n, ok := keep[uint32(id)]; !ok || n != s.serials[id] || moved[o] {
			stale = append(stale, uint32(id))
		}
	}
	slices.SortStableFunc(stale, func(a, b uint32) int { return cmp.Compare(rank(object(a)), rank(object(b))) })
	for _, id := range stale {
		if id <= wire.MaxID {
			_ = s.release(id, 0)
			continue
		}
		o := s.ghosts[id]
		delete(s.ghosts, id)
		switch o := o.(type) { // the objects that used it were released before it
		case *mem:
			s.dropMem(o)
		case *queue:
			s.dropQueue(o)
		case *sampler:
			s.dropSampler(o)
		case *program:
			s.dropProgram(o)
		}
	}
	s.endLeft()
}

// movedParts finds sub-buffers and images whose parent has another id now. The application
// has released the parent since, so the graph has it under another id, and it is created
// again.
func (s *session) movedParts(g *graph) map[any]bool {
	parents := map[uint32]gMem{}
	for _, m := range g.Mems {
		parents[m.ID] = m
	}
	same := func(m *mem, x gMem) bool { return x.ID != 0 && lookup[mem](s, x.ID) == m && s.have(x.ID, x.Serial) }
	moved := map[any]bool{}
	s.each(func(id uint32, _ uint64, o any) {
		m, ok := o.(*mem)
		if !ok {
			return
		}
		for x := parents[id]; m.parent != nil; m, x = m.parent, parents[x.Parent] {
			if !same(m.parent, parents[x.Parent]) {
				moved[o] = true
				return
			}
		}
	})
	return moved
}

// hold adds n to the number of users of a released object that the graph still has. Some of
// its users are not restored yet. Without this, the release of a stale user would release
// the object.
func (s *session) hold(o any, n int) {
	switch o := o.(type) {
	case *mem:
		o.users += n
	case *program:
		o.kernels += n
	}
}

func (s *session) restoreDevice(d *gDevice) error {
	if s.have(d.ID, d.Serial) {
		return nil
	}
	parent := lookup[device](s, d.Parent)
	if parent == nil {
		return fmt.Errorf("sub-device %d: parent missing: %w", d.ID, ErrRefused)
	}
	parts, st := cl.CreateSubDevices(parent.vendor, d.Part)
	if st != cl.Success || d.Index >= len(parts) {
		return fmt.Errorf("sub-device %d: the device cannot be partitioned alike (%w, %d parts): %w", d.ID, st, len(parts), ErrRefused)
	}
	for i, v := range parts {
		if i != d.Index {
			cl.ReleaseDevice(v)
		}
	}
	s.set(d.ID, d.Serial, &device{id: d.ID, parent: parent, part: d.Part, index: d.Index, vendor: parts[d.Index]})
	return nil
}

func (s *session) restoreQueue(q gQueue) error {
	if s.have(q.ID, q.Serial) {
		if x := lookup[queue](s, q.ID); x != nil {
			x.failed = cl.Status(q.Failed) // it may have failed since, or its error was reported since
		}
		return nil
	}
	c, d := lookup[clContext](s, q.Context), lookup[device](s, q.Device)
	if c == nil || d == nil {
		return fmt.Errorf("queue %d: context or device missing: %w", q.ID, ErrRefused)
	}
	v, st := newQueue(c, d, q.Props)
	if st != cl.Success {
		return fmt.Errorf("queue %d with properties %#x: %w: %w", q.ID, q.Props, st, ErrRefused)
	}
	x := &queue{id: q.ID, ctx: c, dev: d, props: q.Props, vendor: v, failed: cl.Status(q.Failed), dead: q.Dead}
	c.queues = append(c.queues, x)
	s.set(q.ID, q.Serial, x)
	return nil
}

func (s *session) restoreMem(g *gMem, final bool) (err error) {
	if s.have(g.ID, g.Serial) {
		m := lookup[mem](s, g.ID)
		if m == nil || m.kind != g.Kind || m.size != g.Size {
			return fmt.Errorf("memory object %d is another one than before: %w", g.ID, errGraph)
		}
		m.dead, m.callback = g.Dead, g.Callback
		m.adoptMaps(g, final)
		return nil
	}
	c := lookup[clContext](s, g.Context)
	if c == nil {
		return fmt.Errorf("memory object %d: context missing: %w", g.ID, ErrRefused)
	}
	stored := false
	m := &mem{
		id: g.ID, ctx: c, kind: g.Kind, flags: g.Flags, size: g.Size, origin: g.Origin,
		format: g.Format, desc: g.Desc, elem: g.Elem, dead: g.Dead, callback: g.Callback,
	}
	if g.Parent != 0 {
		if m.parent = lookup[mem](s, g.Parent); m.parent == nil {
			return fmt.Errorf("memory object %d: parent %d missing: %w", g.ID, g.Parent, ErrRefused)
		}
		m.parent.users++
		if m.kind == memSub {
			m.parent.subs = append(m.parent.subs, m)
		}
	} else {
		if g.Size > s.limits.MaxAlloc && g.Kind == memBuffer {
			return fmt.Errorf("memory object %d has %d bytes, the device allocates at most %d: %w", g.ID, g.Size, s.limits.MaxAlloc, ErrRefused)
		}
		if !s.takeMemory(g.Size) {
			return fmt.Errorf("memory object %d: %d bytes needed, %d of %d are taken, or by other sessions of its claim: %w", g.ID, g.Size, s.memory, s.memoryLimit(), ErrRefused)
		}
		defer func() {
			if err != nil && !stored {
				s.giveMemory(g.Size)
			}
		}()
	}
	// Content that the session has in the arena stays where it is: the application may have
	// pointers into it, and a move is not needed.
	if g.Unified {
		m.arena, m.hasArena, m.inArena = g.Arena, true, true
	}
	var st cl.Status
	switch g.Kind {
	case memBuffer:
		st = s.createVendorBuffer(m)
	case memSub:
		st = m.createVendorSub()
	case memImage:
		st = m.createVendorImage()
	}
	if st != cl.Success {
		return fmt.Errorf("memory object %d (%d bytes): %w: %w", g.ID, g.Size, st, ErrRefused)
	}
	if m.parent == nil {
		m.initDirty()
	}
	stored = true
	s.set(g.ID, g.Serial, m)
	m.adoptMaps(g, final)
	return nil
}

func (g *gMem) shadowSize() uint64 {
	m := mem{kind: g.Kind, size: g.Size, desc: g.Desc, elem: g.Elem}
	return m.shadowSize()
}

// keeps lists the object's ranges in the arena that are taken over. Content always is, and it
// never moves. A shadow (memory that has only a copy of mapped regions) and the ranges of
// mappings from before a swap are taken over only if the application has the object mapped,
// and only from the final graph: before that, their owner may free them and put something
// else there.
func (g *gMem) keeps(final bool) (out []span) {
	mapped := final && g.mapped
	if g.HasArena && (g.Unified || mapped) {
		out = append(out, span{g.Arena, g.shadowSize()})
	}
	if mapped {
		out = append(out, g.Extra...)
	}
	return out
}

// adoptMaps takes over the application's mappings. With the final graph, after which
// nothing changes any more, it also takes over the memory of the mappings, which is reserved
// already.
func (m *mem) adoptMaps(g *gMem, final bool) {
	if m.maps == nil || len(m.maps)+len(g.Maps) > 0 {
		m.maps = map[uint32]*mapping{}
	}
	for i := range g.Maps {
		mp := g.Maps[i]
		m.maps[mp.ID] = &mp
	}
	if !final || !g.mapped {
		return
	}
	m.extra = slices.Clone(g.Extra)
	if g.HasArena && !g.Unified {
		if m.kind == memBuffer && m.unified || m.hasArena {
			m.extra = append(m.extra, span{g.Arena, g.shadowSize()})
		} else {
			m.arena, m.hasArena = g.Arena, true
		}
	}
}

// restorePrograms builds the programs that are built in the graph, several at once, because
// compilers take most of the time of a preparation.
func (s *session) restorePrograms(gs []gProgram, report progress) error {
	type job struct {
		g gProgram
		p *program
	}
	var jobs []job
	for _, g := range gs {
		next := g.Next
		if len(next) == 0 {
			next = g.Spec
		}
		if s.have(g.ID, g.Serial) {
			if p := lookup[program](s, g.ID); p != nil && len(next) > 0 { // they may have been set since
				p.spec = next
				if st := p.ready(); st != cl.Success {
					return fmt.Errorf("constants of program %d: %w: %w", g.ID, st, ErrRefused)
				}
			}
			continue
		}
		if len(g.Content.IL) > 0 && len(g.Content.SpecConstants) == 0 { // executors once had them beside the content only
			g.Content.SpecConstants = g.Spec
		}
		c := lookup[clContext](s, g.Context)
		ds, _, ok := s.vendorDevices(g.Devices)
		if c == nil || !ok {
			return fmt.Errorf("program %d: context or device missing: %w", g.ID, ErrRefused)
		}
		jobs = append(jobs, job{g, &program{id: g.ID, ctx: c, content: g.Content, spec: next, devices: ds, built: map[uint32]*build{}, loaded: g.Loaded, told: g.Told}})
	}
	var (
		mu   sync.Mutex
		errs []error
		wg   sync.WaitGroup
		n    uint64
		sem  = make(chan struct{}, runtime.NumCPU())
	)
	for _, j := range jobs {
		wg.Add(1)
		sem <- struct{}{}
		go func() {
			defer func() { <-sem; wg.Done() }()
			err := s.remake(j.p, &j.g)
			mu.Lock()
			defer mu.Unlock()
			n++
			report("programs", n, uint64(len(jobs)))
			if err != nil {
				errs = append(errs, err)
			}
		}()
	}
	wg.Wait()
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	for _, j := range jobs {
		s.set(j.p.id, j.g.Serial, j.p)
		if s.quirk.dearBinaries && j.p.desc != nil && !j.p.recalled {
			s.keep(j.p, j.g.Serial)
		}
	}
	return nil
}

// remake creates a program in the state that it had. What the application has read about
// its builds does not change.
func (s *session) remake(p *program, g *gProgram) error {
	ok, failed := false, false
	for id, b := range g.Built {
		x := b
		p.built[id] = &x
		ok = ok || b.Status == cl.BuildSuccess
		failed = failed || b.Status == cl.BuildError
	}
	if ok && s.recall(p, g.Serial) {
		return nil
	}
	if err := s.rebuild(p, g, ok, failed); err != nil {
		return err
	}
	if st := p.ready(); st != cl.Success {
		return fmt.Errorf("constants of program %d: %w: %w", p.id, st, ErrRefused)
	}
	return nil
}

func (s *session) rebuild(p *program, g *gProgram, ok, failed bool) error {
	if err := s.lay(&p.content); err != nil {
		return fmt.Errorf("program %d: %w", p.id, err)
	}
	again := s.makeProgram
	if !ok && failed && len(p.content.Inputs) > 0 {
		again = (*program).hollow
	}
	if st := again(p); st != cl.Success {
		return fmt.Errorf("program %d: %w: %w", p.id, st, ErrRefused)
	}
	if !ok || p.content.Kind != portable.Executable {
		return nil
	}
	if len(p.content.Inputs) > 0 {
		p.describeNow()
		s.keepNow(p, g.Serial)
		return nil
	}
	ds := p.builtFor()
	if st := cl.BuildProgram(p.vendor, vendorIDs(ds), s.quirk.options(p.content.Options)); st != cl.Success {
		log := ""
		if b, st := cl.GetProgramBuildInfo(p.vendor, ds[0].vendor, cl.ProgramBuildLog); st == cl.Success {
			log = strings.TrimSpace(readable(cl.CString(b)))
		}
		return fmt.Errorf("program %d does not build (%w): %.400s: %w", p.id, st, log, ErrRefused)
	}
	p.describeNow()
	s.keepNow(p, g.Serial)
	return nil
}

// describeNow describes the kernels of a program that is being prepared. It waits for the
// result.
func (p *program) describeNow() {
	p.desc = &description{done: make(chan struct{})}
	p.desc.find(p.describer())
}

func (s *session) restoreKernel(g *gKernel) error {
	k := lookup[kernel](s, g.ID)
	if !s.have(g.ID, g.Serial) {
		var err error
		if k, err = s.remakeKernel(g); err != nil {
			return err
		}
		s.set(g.ID, g.Serial, k)
	}
	if k == nil || len(k.args) != len(g.Args) {
		return fmt.Errorf("kernel %d is another one than before: %w", g.ID, errGraph)
	}
	return s.rebind(k, g)
}

func (s *session) remakeKernel(g *gKernel) (*kernel, error) {
	p := lookup[program](s, g.Program)
	if p == nil {
		return nil, fmt.Errorf("kernel %s: program %d missing: %w", g.Name, g.Program, ErrRefused)
	}
	k := &kernel{id: g.ID, prog: p, name: g.Name, group: g.Group}
	var st cl.Status
	if k.vendor, st = cl.CreateKernel(p.vendor, g.Name); st != cl.Success {
		return nil, fmt.Errorf("kernel %s of program %d: %w: %w", g.Name, g.Program, st, ErrRefused)
	}
	if err := k.remember(g); err != nil {
		cl.ReleaseKernel(k.vendor)
		return nil, fmt.Errorf("kernel %s of program %d: %w: %w", g.Name, g.Program, err, ErrRefused)
	}
	p.kernels++
	for _, d := range p.devices {
		if b, st := cl.GetKernelWorkGroupInfo(k.vendor, d.vendor, cl.KernelWorkGroupSize); st == cl.Success && len(b) >= 8 && cl.Uint64(b) < g.Group {
			return nil, fmt.Errorf("kernel %s is launched with work-groups of %d, this device takes at most %d: %w", g.Name, g.Group, cl.Uint64(b), ErrRefused)
		}
	}
	return k, nil
}

// remember takes a kernel's arguments from the description that this device's compiler
// gives. The kinds of the arguments must be those of the graph.
func (k *kernel) remember(g *gKernel) error {
	as, err := k.prog.desc.arguments(k.vendor, g.Name)
	if err != nil {
		return err
	}
	if len(as) != len(g.Args) {
		return fmt.Errorf("%d arguments here, not %d: %w", len(as), len(g.Args), errDiffers)
	}
	k.describe(as)
	for i := range g.Args {
		if g.Args[i].Set && g.Args[i].Kind != k.info[i].kind {
			return fmt.Errorf("argument %d is of kind %d here, not %d: %w", i, k.info[i].kind, g.Args[i].Kind, errDiffers)
		}
	}
	return nil
}

// rebind sets the arguments that differ from those of the graph.
func (s *session) rebind(k *kernel, g *gKernel) error {
	for i := range g.Args {
		a, b := &k.args[i], &g.Args[i]
		if !b.Set {
			k.lose(i)
			continue
		}
		to := s.named(b.Kind, b.Object)
		if a.set && a.kind == b.Kind && a.size == b.Size && a.object == b.Object && a.to == to && string(a.value) == string(b.Value) {
			continue
		}
		now := arg{set: true, kind: b.Kind, size: b.Size, object: b.Object, to: to, value: append([]byte(nil), b.Value...)}
		if s.argGone(&now) {
			k.lose(i)
			continue
		}
		if a.refused {
			k.refused--
		}
		*a = now
		if st := s.bindArg(k, i); st != cl.Success {
			return fmt.Errorf("kernel %s, argument %d: %w: %w", k.name, i, st, ErrRefused)
		}
	}
	k.stale = true
	k.local = 0
	for i := range k.args {
		if k.args[i].set && k.args[i].kind == wire.ArgLocal {
			k.local += k.args[i].size
		}
	}
	return nil
}

// restoreFinal restores what only the final graph has: events, and the calls that wait for
// the application.
func (s *session) restoreFinal(g *graph) error {
	for _, e := range g.Events {
		x := &event{id: e.ID, ctx: lookup[clContext](s, e.Context), q: lookup[queue](s, e.Queue), state: e.State, user: e.User, status: e.Status, times: e.Times, timed: e.Timed, dead: e.Dead}
		if x.ctx == nil {
			return fmt.Errorf("event %d: context missing: %w", e.ID, ErrRefused)
		}
		s.set(e.ID, 0, x)
	}
	for i := range g.Parked {
		if err := s.restoreParked(&g.Parked[i]); err != nil {
			return err
		}
	}
	for _, w := range g.Watches {
		e := lookup[event](s, w.Event)
		if e == nil {
			return fmt.Errorf("callback of event %d: event missing: %w", w.Event, ErrRefused)
		}
		e.users++
		s.watches = append(s.watches, &watch{e, w.Type, w.Token})
	}
	s.replies = g.Replies
	if s.replies == nil {
		s.replies = map[uint32][]byte{}
	}
	for t := range s.replies {
		s.token = max(s.token, t)
	}
	s.clock.last = g.Clock
	s.endLeft()
	return nil
}

func (s *session) restoreParked(g *gParked) error {
	p := &parkedCall{call: call{wire.Op(g.Op), g.Slot, g.Body}, alias: g.Alias}
	m := wire.New(p.op)
	if m == nil {
		return fmt.Errorf("parked %s: %w", p.op, wire.ErrUnknownOp)
	}
	if err := m.Decode(p.body); err != nil {
		return fmt.Errorf("parked call: %w", err)
	}
	if g.Queue != 0 {
		if p.q = lookup[queue](s, g.Queue); p.q == nil {
			return fmt.Errorf("parked %s: queue %d missing: %w", p.op, g.Queue, ErrRefused)
		}
	}
	if g.Event != 0 {
		if p.e = lookup[event](s, g.Event); p.e == nil {
			return fmt.Errorf("parked %s: event %d missing: %w", p.op, g.Event, ErrRefused)
		}
	}
	if g.Kernel != nil {
		k, err := s.remakeKernel(g.Kernel)
		if err != nil {
			return err
		}
		if err := s.rebind(k, g.Kernel); err != nil {
			return err
		}
		p.kernel = k
	}
	s.pinAll(p, g.Uses, g.Wait)
	s.enlist(p)
	return nil
}

// copyKernel clones a kernel with its arguments, for a parked launch.
func (s *session) copyKernel(src *kernel) (*kernel, cl.Status) {
	k := &kernel{prog: src.prog, name: src.name, text: src.text, info: src.info, stale: true, local: src.local, group: src.group}
	var st cl.Status
	if k.vendor, st = cl.CreateKernel(src.prog.vendor, src.name); st != cl.Success {
		return nil, st
	}
	k.args = make([]arg, len(src.args))
	for i, a := range src.args {
		a.value = append([]byte(nil), a.value...)
		a.refused = false // the runtime has none
		k.args[i] = a
		if !a.set {
			continue
		}
		if s.argGone(&k.args[i]) { // the application must set it again before a launch
			k.args[i].set = false
			continue
		}
		if st := s.bindArg(k, i); st != cl.Success {
			cl.ReleaseKernel(k.vendor)
			return nil, st
		}
	}
	k.prog.kernels++
	return k, cl.Success
}
