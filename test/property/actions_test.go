package property

import (
	"fmt"
	"slices"
	"strings"

	"pgregory.net/rapid"
)

// actions are the steps of a script, by name; each draws its thread. One that
// is not legal now adds nothing.
func (g *generator) actions() map[string]func(*rapid.T) {
	byThread := func(f func(th int)) func(*rapid.T) {
		return func(t *rapid.T) { g.t = t; f(g.n(g.threads)) }
	}
	all := map[string]func(th int){
		"barrier":   func(int) { g.barrier() },
		"pause":     func(th int) { g.pause(th) },
		"sleep":     func(th int) { g.line(th, "sleep %d", g.n(20000)) },
		"buffer":    func(th int) { g.newBuffer(th, g.n(g.ctxs)) },
		"sub":       g.subBuffer,
		"image":     func(th int) { g.newImage(th, g.n(g.ctxs)) },
		"bufimage":  g.bufferImage,
		"queue":     func(th int) { g.newQueueLate(th) },
		"program":   g.program,
		"kernel":    g.newKernel,
		"clone":     g.clone,
		"args":      g.args,
		"run":       g.run,
		"run2":      g.run,
		"run3":      g.run,
		"launch":    func(th int) { g.newKernel(th); g.args(th); g.run(th) },
		"launch2":   func(th int) { g.newKernel(th); g.args(th); g.run(th) },
		"fill":      g.fill,
		"copy":      g.copy,
		"crect":     g.copyRect,
		"write":     g.write,
		"read":      g.read,
		"rect":      g.rect,
		"pass":      g.pass,
		"bring":     g.bring,
		"pass2":     g.pass,
		"bring2":    g.bring,
		"into":      g.into,
		"into2":     g.into,
		"from":      g.from,
		"imagerw":   g.imageTransfer,
		"imagecopy": g.imageCopy,
		"map":       g.mapMemory,
		"map2":      g.mapMemory,
		"mapped":    g.mapped,
		"mapped2":   g.mapped,
		"unmap":     func(th int) { g.unmapAny(th) },
		"user":      g.user,
		"held":      g.held,
		"held2":     g.held,
		"doomed":    g.doomed,
		"setuser":   g.setAny,
		"marker":    g.marker,
		"migrate":   g.migrateObject,
		"wait":      g.wait,
		"finish":    g.finish,
		"callback":  g.callback,
		"info":      func(th int) { g.line(th, "info %d", g.result()) },
		"release":   g.release,
	}
	out := make(map[string]func(*rapid.T), len(all))
	for name, f := range all {
		out[name] = byThread(f)
	}
	return out
}

func (g *generator) result() int { g.next.result++; return g.next.result - 1 }

// object chooses one that the thread may use.
func (g *generator) object(th, c int, write bool, ok func(*object) bool) (*object, bool) {
	return pick(g, g.objs, func(o *object) bool {
		r := o.root
		return !o.gone && (c < 0 || o.ctx == c) && r.wmaps == 0 && (r.owner == th || !write && r.owner == shared) &&
			(!write || r.rmaps == 0) && (ok == nil || ok(o))
	})
}

func isBuffer(o *object) bool { return o.image == 0 }

// span draws a part of n bytes, aligned.
func (g *generator) span(n, align int) (off, size int) {
	k := n / align
	a := g.n(k)
	return a * align, g.between(1, k-a) * align
}

func (g *generator) newQueueLate(th int) {
	if g.next.queue < 8 {
		g.newQueue(th, g.n(g.ctxs))
	}
}

func (g *generator) subBuffer(th int) {
	p, ok := g.object(th, -1, true, func(o *object) bool { return isBuffer(o) && !o.sub && o.size >= 4096 })
	if !ok {
		return
	}
	off, size := g.span(p.size, 1024)
	o := &object{id: g.next.mem, ctx: p.ctx, size: size, flags: p.flags, root: p.root, sub: true}
	g.next.mem++
	g.objs = append(g.objs, o)
	g.line(th, "sub %d %d %d %d", o.id, p.id, off, size)
}

func (g *generator) program(th int) {
	if g.next.prog > 10 {
		return
	}
	p, ok := pick(g, g.progs, func(p *program) bool { return !p.gone && p.owner == th && p.kernels == 0 })
	switch {
	case ok && p.kind == 0 && g.odds(3):
		g.line(th, "rebuild %d %d", p.id, 3+2*g.n(4))
	case g.odds(3):
		from, ok := pick(g, g.progs, func(p *program) bool { return !p.gone && p.owner == th })
		if !ok {
			return
		}
		c := g.n(g.ctxs)
		n := &program{id: g.next.prog, ctx: c, owner: th, kind: from.kind}
		g.next.prog++
		g.progs = append(g.progs, n)
		g.line(th, "progbin %d %d %d", n.id, c, from.id)
	default:
		g.newProgram(th, g.n(g.ctxs), g.n(3))
	}
}

func (g *generator) newKernel(th int) {
	p, ok := pick(g, g.progs, func(p *program) bool { return !p.gone && p.owner == th })
	if !ok {
		return
	}
	var types []int
	for i, k := range kernelTypes {
		if k.prog == p.kind {
			types = append(types, i)
		}
	}
	k := &kernel{id: g.next.kern, ctx: p.ctx, owner: th, typ: types[g.n(len(types))], prog: p}
	g.next.kern++
	p.kernels++
	g.kernels = append(g.kernels, k)
	g.line(th, "kern %d %d %d", k.id, p.id, k.typ)
}

// kernel prefers new ones.
func (g *generator) kernel(th int, ok func(*kernel) bool) (*kernel, bool) {
	fit := func(k *kernel) bool { return !k.gone && k.owner == th && ok(k) }
	if n := len(g.kernels); n > 0 && fit(g.kernels[n-1]) && g.n(2) == 0 {
		return g.kernels[n-1], true
	}
	return pick(g, g.kernels, fit)
}

func (g *generator) clone(th int) {
	from, ok := g.kernel(th, func(k *kernel) bool { return k.args != nil })
	if !ok {
		return
	}
	k := *from
	k.id = g.next.kern
	g.next.kern++
	k.prog.kernels++
	g.kernels = append(g.kernels, &k)
	g.line(th, "clone %d %d", k.id, from.id)
}

// shape is what the kernel's nth object has to be.
func shape(typ, n int, write bool, o *object) bool {
	if write && o.flags&memReadOnly != 0 || o.flags&memWriteOnly != 0 {
		return false // kernels read what they write
	}
	want := 0
	switch {
	case typ == 6 || typ == 7 && n == 0:
		want = image2D
	case typ == 8 && n == 0:
		want = image3D
	case typ == 9 && n == 0:
		want = image2DArray
	case typ == 10 && n == 0:
		want = 1
	}
	words := 64
	if w := kernelTypes[typ].words; n < len(w) {
		words = w[n]
	}
	return o.image == want && (want != 0 || o.size >= words*4)
}

func (g *generator) args(th int) {
	k, ok := g.kernel(th, func(*kernel) bool { return true })
	if !ok {
		return
	}
	t := kernelTypes[k.typ]
	text := fmt.Sprintf("args %d", k.id)
	var args []*object
	samp := -1
	for _, c := range t.args {
		switch c {
		case 'o':
			n := len(args)
			o, ok := g.object(th, k.ctx, t.access[n] == 'w', func(o *object) bool {
				return shape(k.typ, n, t.access[n] == 'w', o) && !slices.ContainsFunc(args, func(a *object) bool { return a.root == o.root })
			})
			if !ok {
				return
			}
			args = append(args, o)
			text += fmt.Sprintf(" %d", o.id)
		case 's':
			samp = g.next.samp
			g.next.samp++
			g.line(th, "samp %d %d", samp, k.ctx)
			text += fmt.Sprintf(" %d", samp)
		case 'u':
			v := g.n(1 << 16)
			if k.typ == 1 && len(text) > 0 { // blend's n
				v = args[1].size / 4
			}
			text += fmt.Sprintf(" %d", v)
		default:
			text += fmt.Sprintf(" %d", g.n(1<<12))
		}
	}
	k.args = args
	g.line(th, "%s", text)
	if samp >= 0 && g.odds(2) {
		g.line(th, "relsamp %d", samp) // the kernel keeps it
	}
}

func (g *generator) run(th int) {
	g.launch(th, nil)
}

func (g *generator) launch(th int, extra []*event) {
	k, ok := g.kernel(th, func(k *kernel) bool {
		for i, a := range k.args {
			w := kernelTypes[k.typ].access[i] == 'w'
			if a.gone || a.root.wmaps > 0 || a.root.owner != th && (w || a.root.owner != shared) || w && a.root.rmaps > 0 {
				return false
			}
		}
		return k.args != nil && (len(extra) == 0 || extra[0].ctx == k.ctx)
	})
	if !ok {
		return
	}
	q, ok := g.queue(th, k.ctx, nil)
	if !ok {
		return
	}
	var reads, writes []*root
	for i, a := range k.args {
		if kernelTypes[k.typ].access[i] == 'w' {
			writes = append(writes, a.root)
		} else {
			reads = append(reads, a.root)
		}
	}
	dims, gl, local := 1, [3]int{64, 1, 1}, []int{16, 64, 0}[g.n(3)]
	switch k.typ {
	case 6, 7:
		dims, gl, local = 2, [3]int{8, 8, 1}, 0
	case 8, 9:
		dims, gl, local = 3, [3]int{4, 4, 4}, 0
	case 2:
		local = max(local, 16)
	case 5:
		local = 16
	}
	g.enqueue(th, q, false, extra, reads, writes, "run %d %d %d %d %d %d %d", q.id, k.id, dims, gl[0], gl[1], gl[2], local)
}

func (g *generator) fill(th int) {
	if o, ok := g.object(th, -1, true, isBuffer); ok {
		if q, ok := g.queue(th, o.ctx, nil); ok {
			p := 1 << g.n(8)
			off, size := g.span(o.size, p)
			g.command(th, q, false, nil, []*root{o.root}, "fill %d %d %d %d %d %d", q.id, o.id, off, size, g.n(1000), p)
		}
	}
}

// pair chooses two objects of one context on different memory, and a queue.
func (g *generator) pair(th int, ok func(a, b *object) bool) (a, b *object, q *queue, found bool) {
	b, found = g.object(th, -1, true, nil)
	if !found {
		return a, b, q, found
	}
	a, found = g.object(th, b.ctx, false, func(a *object) bool { return a.root != b.root && ok(a, b) })
	if !found {
		return a, b, q, found
	}
	q, found = g.queue(th, b.ctx, nil)
	return a, b, q, found
}

func bothBuffers(a, b *object) bool { return isBuffer(a) && isBuffer(b) }

func (g *generator) copy(th int) {
	a, b, q, ok := g.pair(th, bothBuffers)
	if !ok {
		return
	}
	n := g.between(1, min(a.size, b.size))
	g.command(th, q, false, []*root{a.root}, []*root{b.root}, "copy %d %d %d %d %d %d", q.id, a.id, b.id, g.n(a.size-n+1), g.n(b.size-n+1), n)
}

func (g *generator) copyRect(th int) {
	a, b, q, ok := g.pair(th, bothBuffers)
	if !ok {
		return
	}
	// Rows of 16 and slices of 4 rows in the source; rows of 32 and slices of 64 bytes in the other.
	w, h, d := g.between(1, 16), g.between(1, 2), g.between(1, 3)
	g.command(th, q, false, []*root{a.root}, []*root{b.root}, "crect %d %d %d 0 %d 0 0 0 %d %d %d %d 16 64 32 64",
		q.id, a.id, b.id, g.n(2), g.n(2), w, h, d)
}

func (g *generator) write(th int) {
	o, ok := g.object(th, -1, true, func(o *object) bool { return isBuffer(o) && o.flags&(hostReadOnly|hostNone) == 0 })
	if !ok {
		return
	}
	q, ok := g.queue(th, o.ctx, nil)
	if !ok {
		return
	}
	block := g.n(2)
	off, size := g.span(o.size, []int{1, 4, 64}[g.n(3)])
	g.command(th, q, block == 1, nil, []*root{o.root}, "wr %d %d %d %d %d %d", q.id, o.id, off, size, g.n(1000), block)
}

func (g *generator) read(th int) {
	o, ok := g.object(th, -1, false, func(o *object) bool { return isBuffer(o) && o.flags&(hostWriteOnly|hostNone) == 0 })
	if !ok {
		return
	}
	q, ok := g.queue(th, o.ctx, nil)
	if !ok {
		return
	}
	block := g.n(2)
	off, size := g.span(o.size, []int{1, 4, 64}[g.n(3)])
	g.command(th, q, block == 1, []*root{o.root}, nil, "rd %d %d %d %d %d %d", q.id, o.id, off, size, block, g.result())
}

// pass sends a read's data on, and what lies between its rows.
func (g *generator) pass(th int) {
	a, b, q, ok := g.pair(th, bothBuffers)
	if !ok || a.flags&(hostWriteOnly|hostNone) != 0 || b.flags&(hostReadOnly|hostNone) != 0 {
		return
	}
	rows, apart := g.between(1, 3), g.between(1, 2)
	most := min(a.size, b.size/apart) / rows
	if most < 1 {
		return
	}
	row := g.between(1, most)
	g.command(th, q, false, []*root{a.root}, []*root{b.root}, "pass %d %d %d %d %d %d %d %d",
		q.id, a.id, rows, row, row*apart, b.id, g.n(b.size-rows*row*apart+1), g.n(1000))
}

func (g *generator) rect(th int) {
	write := g.n(2) == 0
	bad := hostWriteOnly | hostNone
	if write {
		bad = hostReadOnly | hostNone
	}
	o, ok := g.object(th, -1, write, func(o *object) bool { return isBuffer(o) && o.flags&bad == 0 })
	if !ok {
		return
	}
	q, ok := g.queue(th, o.ctx, nil)
	if !ok {
		return
	}
	block, w, h, d := g.n(2), g.between(1, 16), g.between(1, 2), g.between(1, 3)
	x, y := g.n(17-w), g.n(2)
	if write {
		g.command(th, q, block == 1, nil, []*root{o.root}, "wrr %d %d %d %d 0 %d %d %d 16 64 %d %d", q.id, o.id, x, y, w, h, d, block, g.n(1000))
	} else {
		g.command(th, q, block == 1, []*root{o.root}, nil, "rdr %d %d %d %d 0 %d %d %d 16 64 %d %d", q.id, o.id, x, y, w, h, d, block, g.result())
	}
}

// part draws a region of an image.
func (g *generator) part(o *object) (at, size [3]int) {
	for i, n := range o.region {
		at[i] = g.n(n)
		size[i] = g.between(1, n-at[i])
	}
	return at, size
}

func (g *generator) user(th int) {
	if len(g.users) > 6 {
		return
	}
	u := &user{ctx: g.n(g.ctxs), fails: g.odds(4)}
	u.event = g.newEvent(nil, nil)
	u.event.ctx, u.event.gates, u.event.doomed = u.ctx, []*user{u}, u.fails
	g.users = append(g.users, u)
	g.line(th, "user %d > %d", u.ctx, u.event.id)
}

// held is a command that waits for a user event.
func (g *generator) held(th int) {
	u, ok := pick(g, g.users, func(u *user) bool { return !u.set && !u.fails && g.visible(u.event, th) })
	if !ok {
		return
	}
	ev := []*event{u.event}
	if g.n(2) == 0 {
		g.launch(th, ev)
		return
	}
	o, ok := g.object(th, u.ctx, true, isBuffer)
	if !ok {
		return
	}
	q, ok := g.queue(th, u.ctx, nil)
	if !ok {
		return
	}
	switch {
	case g.n(2) == 0:
		off, size := g.span(o.size, 4)
		g.enqueue(th, q, false, ev, nil, []*root{o.root}, "fill %d %d %d %d %d %d", q.id, o.id, off, size, g.n(1000), 4)
	case o.flags&(hostReadOnly|hostNone) == 0:
		off, size := g.span(o.size, 1)
		g.enqueue(th, q, false, ev, nil, []*root{o.root}, "wr %d %d %d %d %d 0", q.id, o.id, off, size, g.n(1000))
	default:
		g.enqueue(th, q, false, ev, nil, nil, "marker %d", q.id)
	}
}

// visible reports whether the thread has passed the line that made the event.
func (g *generator) visible(e *event, th int) bool {
	want := fmt.Sprintf("> %d", e.id)
	last := len(g.lines)
	for i := last - 1; i >= 0; i-- {
		l := g.lines[i]
		if l == "barrier" {
			return true
		}
		var by int
		if _, err := fmt.Sscanf(l, "%d", &by); err == nil && by != th && (strings.HasSuffix(l, want) || strings.Contains(l, want+" ")) {
			return false
		}
	}
	return true
}

// doomed is a command that will not run, because what it waits for fails.
func (g *generator) doomed(th int) {
	e, ok := pick(g, g.events, func(e *event) bool { return e.doomed && !e.gone && len(unset(e.gates)) > 0 && g.visible(e, th) })
	if !ok {
		return
	}
	q, ok := g.queue(th, e.ctx, func(q *queue) bool { return q.props&outOfOrder != 0 })
	if !ok {
		return
	}
	n := g.newEvent(q, e.gates)
	n.doomed = true
	o, ok := g.object(th, e.ctx, true, func(o *object) bool { return isBuffer(o) && o.flags&(hostReadOnly|hostWriteOnly|hostNone) == 0 })
	if e.queue != nil && e.queue.unflushed {
		g.line(th, "flush %d", e.queue.id)
		e.queue.unflushed = false
	}
	q.unflushed = true
	switch {
	case !ok:
		g.line(th, "marker %d > %d < %d", q.id, n.id, e.id)
	case g.n(3) == 0:
		g.line(th, "fill %d %d 0 %d 1 4 > %d < %d", q.id, o.id, o.size, n.id, e.id)
	case g.n(2) == 0:
		g.line(th, "wr %d %d 0 %d 1 0 > %d < %d", q.id, o.id, o.size, n.id, e.id)
	default:
		g.line(th, "rd %d %d 0 %d 0 %d > %d < %d", q.id, o.id, o.size, g.result(), n.id, e.id)
	}
}

func (g *generator) setAny(th int) {
	if u, ok := pick(g, g.users, func(u *user) bool { return !u.set && !u.soon && g.visible(u.event, th) }); ok {
		g.setUser(th, u)
		u.set, u.soon = false, true // for the others it may come at any time in this phase
		if g.threads == 1 {
			u.set, u.soon = true, false
		}
	}
}

func (g *generator) marker(th int) {
	q, ok := g.queue(th, g.n(g.ctxs), nil)
	if !ok {
		return
	}
	if q.props&outOfOrder == 0 && g.n(2) == 0 {
		g.enqueue(th, q, false, nil, nil, nil, "barr %d", q.id)
		return
	}
	e, ok := pick(g, g.events, func(e *event) bool {
		return !e.gone && !e.doomed && e.ctx == q.ctx && e.queue != nil && g.visible(e, th)
	})
	if ok {
		g.enqueue(th, q, false, []*event{e}, nil, nil, "marker %d", q.id)
	}
}

func (g *generator) migrateObject(th int) {
	if o, ok := g.object(th, -1, true, func(o *object) bool { return !o.sub }); ok {
		if q, ok := g.queue(th, o.ctx, nil); ok {
			g.command(th, q, false, nil, []*root{o.root}, "migr %d %d %d", q.id, o.id, g.n(2))
		}
	}
}

func (g *generator) wait(th int) {
	e, ok := pick(g, g.events, func(e *event) bool {
		return !e.gone && !e.doomed && len(open(e.gates)) == 0 && e.queue != nil && g.visible(e, th)
	})
	if !ok {
		return
	}
	if e.queue.unflushed {
		g.line(th, "flush %d", e.queue.id)
		e.queue.unflushed = false
	}
	g.line(th, "wait < %d", e.id)
}

func (g *generator) finish(th int) {
	q, ok := g.queue(th, g.n(g.ctxs), func(q *queue) bool {
		for _, e := range g.events {
			if e.queue == q && len(open(e.gates)) > 0 {
				return false
			}
		}
		return len(open(q.gates)) == 0
	})
	if ok {
		g.line(th, "finish %d", q.id)
		q.unflushed = false
	}
}

func (g *generator) callback(th int) {
	if g.next.cb > 60 {
		return
	}
	if e, ok := pick(g, g.events, func(e *event) bool { return !e.gone && g.visible(e, th) }); ok {
		g.line(th, "cb %d %d < %d", g.next.cb, []int{0, 0, 1, 2}[g.n(4)], e.id)
		g.next.cb++
	}
}

func (g *generator) release(th int) {
	switch g.n(5) {
	case 0: // memory that commands may still use
		o, ok := g.object(th, -1, true, nil)
		if ok {
			o.gone = true
			g.line(th, "relmem %d", o.id)
		}
	case 1:
		if k, ok := g.kernel(th, func(*kernel) bool { return true }); ok {
			k.gone = true
			k.prog.kernels--
			g.line(th, "relkern %d", k.id)
		}
	case 2:
		if p, ok := pick(g, g.progs, func(p *program) bool { return !p.gone && p.owner == th }); ok {
			p.gone = true
			g.line(th, "relprog %d", p.id)
		}
	case 3: // an event that nothing has to wait for any more
		used := map[*event]bool{}
		for _, r := range g.roots() {
			if r.write != nil {
				used[r.write.event] = true
			}
			for _, x := range r.reads {
				used[x.event] = true
			}
		}
		for _, m := range g.maps {
			used[m.event] = true
		}
		for _, u := range g.users {
			used[u.event] = true
		}
		// Of this thread's, since others may be about to use theirs.
		if e, ok := pick(g, g.events, func(e *event) bool { return !e.gone && !used[e] && g.threads == 1 && e.queue != nil }); ok {
			e.gone = true
			g.line(th, "relevant < %d", e.id)
		}
	case 4:
		// A context keeps one queue, and what runs in the released one has events.
		q, ok := g.queue(th, g.n(g.ctxs), func(q *queue) bool {
			n := 0
			for _, x := range g.queues {
				if x.ctx == q.ctx && !x.gone {
					n++
				}
			}
			return n > 1
		})
		if !ok {
			return
		}
		for _, r := range g.roots() {
			if r.write != nil && r.write.queue == q {
				g.mark(th, r.write)
			}
			for i := range r.reads {
				if r.reads[i].queue == q {
					g.mark(th, &r.reads[i])
				}
			}
		}
		q.gone, q.unflushed = true, false
		g.line(th, "relqueue %d", q.id)
	}
}
