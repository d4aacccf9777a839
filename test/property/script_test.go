package property

import (
	"fmt"
	"slices"
	"strings"

	"pgregory.net/rapid"
)

// OpenCL's flags, as far as scripts use them.
const (
	memReadWrite, memWriteOnly, memReadOnly = 1, 2, 4
	memUseHost, memAllocHost, memCopyHost   = 8, 16, 32
	hostWriteOnly, hostReadOnly, hostNone   = 128, 256, 512
	mapRead, mapWrite, mapInvalidate        = 1, 2, 4
	outOfOrder, profiling                   = 1, 2
	image2D, image3D, image2DArray          = 0x10F1, 0x10F2, 0x10F3
	image1D                                 = 0x10F4
)

// kernelTypes are those of script.c: program, name, kinds of arguments, which
// objects are written, and least words of each object.
var kernelTypes = []struct {
	prog         int
	args, access string
	words        []int
}{
	{0, "ou", "w", []int{64}},
	{0, "oouu", "wr", []int{64, 16}},
	{0, "ool", "rw", []int{64, 16}},
	{0, "orvw", "w", []int{64}},
	{0, "oo", "wr", []int{64, 16}},
	{0, "oo", "ww", []int{64, 64}},
	{1, "oou", "rw", nil},
	{1, "oso", "rw", nil},
	{1, "oo", "rw", nil},
	{1, "oo", "rw", nil},
	{1, "oo", "rw", nil},
	{2, "ou", "w", []int{64}},
}

type user struct {
	event *event
	ctx   int
	fails bool
	set   bool
	soon  bool // set at the beginning of this phase
}

type event struct {
	id     int
	ctx    int
	queue  *queue // nil: of a user event
	gates  []*user
	doomed bool
	gone   bool // released
}

// ref is a command that touches memory.
type ref struct {
	queue *queue
	event *event // nil: none; then the queue is in order
}

// root is memory that objects may share.
type root struct {
	owner        int // thread, or shared
	write        *ref
	reads        []ref
	rmaps, wmaps int
}

const shared = -1

type object struct {
	id, ctx, size int
	flags         int
	root          *root
	sub           bool
	image         int // its type, 0: a buffer, 1: made from a buffer
	format        int
	region        [3]int
	gone          bool
}

type queue struct {
	id, ctx, owner int
	props          int
	gates          []*user
	unflushed      bool
	gone           bool
}

type kernel struct {
	id, ctx, owner, typ int
	prog                *program
	args                []*object
	gone                bool
}

type program struct {
	id, ctx, owner, kind, kernels int
	gone                          bool
}

type mapping struct {
	id         int
	o          *object
	size       int // of a buffer's, in bytes
	write, inv bool
	fresh      bool // invalidated and not yet written
	ready      bool
	event      *event
}

type generator struct {
	t       *rapid.T
	lines   []string
	plan    []action
	threads int
	ctxs    int
	objs    []*object
	queues  []*queue
	kernels []*kernel
	progs   []*program
	users   []*user
	events  []*event
	maps    []*mapping
	next    struct{ event, mem, queue, kern, prog, mapping, result, cb, samp int }
}

func (g *generator) n(k int) int          { return rapid.IntRange(0, k-1).Draw(g.t, "") }
func (g *generator) odds(of int) bool     { return g.n(of) == of-1 }
func (g *generator) between(a, b int) int { return rapid.IntRange(a, b).Draw(g.t, "") }

func pick[T any](g *generator, from []T, ok func(T) bool) (v T, found bool) {
	var c []T
	for _, x := range from {
		if ok(x) {
			c = append(c, x)
		}
	}
	if len(c) == 0 {
		return v, false
	}
	return c[g.n(len(c))], true
}

func (g *generator) line(th int, format string, args ...any) {
	g.lines = append(g.lines, fmt.Sprintf("%d ", th)+fmt.Sprintf(format, args...))
}

// begin makes contexts, queues and programs.
func (g *generator) begin() {
	g.threads, g.ctxs = g.between(1, 4), g.between(1, 2)
	g.lines = append(g.lines, fmt.Sprintf("threads %d", g.threads))
	for c := range g.ctxs {
		g.line(0, "ctx %d", c)
		g.newQueue(0, c)
		g.newProgram(0, c, 0)
	}
	for range g.between(0, 3) {
		g.newQueue(0, g.n(g.ctxs))
	}
	for range g.between(2, 4) {
		g.newBuffer(0, g.n(g.ctxs))
	}
	g.barrier()
}

func (g *generator) newQueue(th, c int) {
	q := &queue{id: g.next.queue, ctx: c, owner: th, props: g.n(4)}
	g.next.queue++
	g.queues = append(g.queues, q)
	g.line(th, "queue %d %d %d", q.id, c, q.props)
}

func (g *generator) newProgram(th, c, kind int) {
	p := &program{id: g.next.prog, ctx: c, owner: th, kind: kind}
	g.next.prog++
	g.progs = append(g.progs, p)
	g.line(th, "prog %d %d %d %d", p.id, c, kind, 0)
}

func (g *generator) newBuffer(th, c int) {
	words := []int{64, 256, 1024, 4096, 65536}[g.n(5)]
	flags := []int{memReadWrite, 0, memWriteOnly, memReadOnly}[g.n(4)]
	host := []int{0, memUseHost, memAllocHost, memCopyHost, memCopyHost | memAllocHost}[g.n(5)]
	flags |= host | []int{0, 0, 0, hostWriteOnly, hostReadOnly, hostNone}[g.n(6)]
	o := &object{id: g.next.mem, ctx: c, size: words * 4, flags: flags, root: &root{owner: th}}
	q, ok := g.queue(th, c, nil)
	if !ok {
		return
	}
	g.next.mem++
	g.objs = append(g.objs, o)
	g.line(th, "buf %d %d %d %d %d", o.id, c, flags, o.size, g.n(1000))
	if host&(memUseHost|memCopyHost) == 0 {
		g.command(th, q, false, nil, []*root{o.root}, "fill %d %d %d %d %d %d", q.id, o.id, 0, o.size, g.n(1000), 4)
	}
}

func (g *generator) newImage(th, c int) {
	typ := []int{image2D, image3D, image2DArray, image1D}[g.n(4)]
	region := [3]int{4, 4, 4}
	switch typ {
	case image2D:
		region = [3]int{8 * g.between(1, 2), 8, 1}
	case image1D:
		region = [3]int{64, 1, 1}
	}
	flags := memReadWrite | []int{0, memUseHost, memAllocHost, memCopyHost}[g.n(4)]
	o := &object{id: g.next.mem, ctx: c, size: region[0] * region[1] * region[2] * 4, flags: flags, root: &root{owner: th}, image: typ, format: g.n(2), region: region}
	q, ok := g.queue(th, c, nil)
	if !ok {
		return
	}
	g.next.mem++
	g.objs = append(g.objs, o)
	g.line(th, "img %d %d %d %d %d %d %d %d %d", o.id, c, flags, typ, o.format, region[0], region[1], region[2], g.n(1000))
	if flags&(memUseHost|memCopyHost) == 0 {
		g.command(th, q, false, nil, []*root{o.root}, "imgfill %d %d 0 0 0 %d %d %d %d", q.id, o.id, region[0], region[1], region[2], g.n(1<<20))
	}
}

// queue chooses one of the thread's queues.
func (g *generator) queue(th, c int, ok func(*queue) bool) (*queue, bool) {
	return pick(g, g.queues, func(q *queue) bool {
		return !q.gone && q.owner == th && q.ctx == c && (ok == nil || ok(q))
	})
}

// open lists the gates that a thread must not wait for.
func open(gates []*user) (out []*user) {
	for _, u := range gates {
		if !u.set && !u.soon && !slices.Contains(out, u) {
			out = append(out, u)
		}
	}
	return out
}

// unset lists the gates whose user event is not set yet.
func unset(gates []*user) (out []*user) {
	for _, u := range gates {
		if !u.set && !slices.Contains(out, u) {
			out = append(out, u)
		}
	}
	return out
}

// mark gives a ref without an event one, by a marker in its queue.
func (g *generator) mark(th int, r *ref) bool {
	if r.event != nil {
		return true
	}
	if r.queue.owner != th || r.queue.gone {
		return false
	}
	r.event = g.newEvent(r.queue, r.queue.gates)
	g.line(th, "marker %d > %d", r.queue.id, r.event.id)
	r.queue.unflushed = true
	return true
}

func (g *generator) newEvent(q *queue, gates []*user) *event {
	e := &event{id: g.next.event, queue: q, gates: unset(gates)}
	if q != nil {
		e.ctx = q.ctx
	}
	g.next.event++
	g.events = append(g.events, e)
	return e
}

// command adds one that reads and writes memory, after what it has to wait
// for, if it is legal. A blocking one is over when the line is.
func (g *generator) command(th int, q *queue, blocking bool, reads, writes []*root, format string, args ...any) bool {
	_, ok := g.enqueue(th, q, blocking, nil, reads, writes, format, args...)
	return ok
}

func (g *generator) enqueue(th int, q *queue, blocking bool, extra []*event, reads, writes []*root, format string, args ...any) (*event, bool) {
	var deps []*ref
	for _, r := range reads {
		if r.owner != th && r.owner != shared {
			return nil, false
		}
		if r.write != nil {
			deps = append(deps, r.write)
		}
	}
	for _, r := range writes {
		if r.owner != th {
			return nil, false
		}
		if r.write != nil {
			deps = append(deps, r.write)
		}
		for i := range r.reads {
			deps = append(deps, &r.reads[i])
		}
	}
	inOrder := q.props&outOfOrder == 0
	gates := slices.Clone(q.gates)
	for _, e := range extra {
		gates = append(gates, e.gates...)
	}
	for _, d := range deps {
		if d.event != nil {
			gates = append(gates, d.event.gates...)
		} else {
			gates = append(gates, d.queue.gates...)
		}
	}
	if blocking && len(open(gates)) > 0 {
		return nil, false
	}
	var wait []int
	for _, e := range extra {
		wait = append(wait, e.id)
		if e.queue != nil && e.queue.unflushed {
			g.line(th, "flush %d", e.queue.id)
			e.queue.unflushed = false
		}
	}
	for _, d := range deps {
		if d.queue == q && inOrder && (d.event == nil || g.n(2) == 0) {
			continue
		}
		if !g.mark(th, d) {
			return nil, false
		}
		if slices.Contains(wait, d.event.id) {
			continue
		}
		wait = append(wait, d.event.id)
		if d.queue != q && d.queue.unflushed {
			g.line(th, "flush %d", d.queue.id)
			d.queue.unflushed = false
		}
	}
	if len(wait) > 60 {
		return nil, false
	}
	text := fmt.Sprintf(format, args...)
	var e *event
	if !(inOrder && g.odds(4)) && !(blocking && g.n(2) == 0) {
		e = g.newEvent(q, gates)
		text += fmt.Sprintf(" > %d", e.id)
	}
	if len(wait) > 0 {
		text += " <" + strings.Trim(strings.ReplaceAll(" "+fmt.Sprint(wait), "[", ""), "]")
	}
	g.line(th, "%s", text)
	q.unflushed = true
	if inOrder {
		q.gates = unset(gates)
	}
	if blocking {
		for _, r := range writes {
			r.write, r.reads = nil, nil
		}
		return e, true
	}
	for _, r := range reads {
		if !slices.Contains(writes, r) {
			r.reads = append(r.reads, ref{q, e})
		}
	}
	for _, r := range writes {
		r.write, r.reads = &ref{q, e}, nil
	}
	return e, true
}

// barrier ends a phase: everything in flight gets an event that other threads
// may wait for, and what threads own is dealt anew.
func (g *generator) barrier() {
	for _, r := range g.roots() {
		if r.write != nil {
			g.mark(r.write.queue.owner, r.write)
		}
		for i := range r.reads {
			g.mark(r.reads[i].queue.owner, &r.reads[i])
		}
	}
	for _, q := range g.queues {
		if q.unflushed && !q.gone {
			g.line(q.owner, "flush %d", q.id)
			q.unflushed = false
		}
	}
	g.lines = append(g.lines, "barrier")
	for _, u := range g.users {
		if u.soon {
			u.set, u.soon = true, false
		}
	}
	for _, q := range g.queues {
		q.owner = g.n(g.threads)
	}
	for _, k := range g.kernels {
		k.owner = g.n(g.threads)
	}
	for _, p := range g.progs {
		p.owner = g.n(g.threads)
	}
	for _, r := range g.roots() {
		r.owner = g.n(g.threads)
		if r.wmaps == 0 && g.odds(3) {
			r.owner = shared
		}
	}
	// Some user events are set before anything else: the others may block on them.
	for _, u := range g.users {
		if u.set || g.n(2) == 0 {
			continue
		}
		th := g.n(g.threads)
		if g.n(2) == 0 {
			g.pause(th)
		}
		g.setUser(th, u)
		u.set, u.soon = false, true
	}
}

func (g *generator) setUser(th int, u *user) {
	code := 0
	if u.fails {
		code = 5
	}
	g.line(th, "setuser %d %d", u.event.id, code)
	u.set = true
}

func (g *generator) roots() (out []*root) {
	for _, o := range g.objs {
		if !slices.Contains(out, o.root) {
			out = append(out, o.root)
		}
	}
	return out
}

func (g *generator) pause(th int) {
	if len(g.plan) >= 5 {
		return
	}
	g.plan = append(g.plan, drawAction(g.t))
	g.line(th, "pause %d", len(g.plan))
}

// end sets what is not set and unmaps what is mapped.
func (g *generator) end() {
	if len(g.plan) == 0 {
		g.pause(0)
	}
	for len(g.users) > 0 && slices.ContainsFunc(g.users, func(u *user) bool { return !u.set && !u.soon }) {
		g.barrier()
		for _, u := range g.users {
			if !u.set && !u.soon {
				g.setUser(0, u)
			}
		}
	}
	g.barrier()
	for len(g.maps) > 0 {
		m := g.maps[0]
		if m.o.root.owner == shared {
			m.o.root.owner = 0 // no other thread goes on
		}
		if !g.unmap(m.o.root.owner, m) {
			// None of the thread's queues will do.
			for _, q := range g.queues {
				if !q.gone && q.ctx == m.o.ctx {
					q.owner = m.o.root.owner
					break
				}
			}
			g.lines = append(g.lines, "barrier")
			if !g.unmap(m.o.root.owner, m) {
				g.t.Fatalf("mapping %d stays", m.id)
			}
		}
	}
	// It waits until whatever has begun is over.
	g.plan = append(g.plan, action{verb: "nothing", after: -1})
	g.line(0, "pause %d", len(g.plan))
}

// script is the whole text; the plan is in its comments.
func (g *generator) script() string {
	var b strings.Builder
	for i, a := range g.plan {
		fmt.Fprintf(&b, "#pause %d %s\n", i+1, a)
	}
	for _, l := range g.lines {
		b.WriteString(l + "\n")
	}
	return b.String()
}
