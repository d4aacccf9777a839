package property

import (
	"fmt"
	"slices"
)

// bring reads to a mapped region and unmaps it at once.
func (g *generator) bring(th int) {
	m, ok := pick(g, g.maps, func(m *mapping) bool { return m.o.root.owner == th && m.write && m.size > 0 })
	if !ok || !g.ready(th, m) {
		return
	}
	from, ok := g.object(th, m.o.ctx, false, func(o *object) bool { return isBuffer(o) && o.flags&(hostWriteOnly|hostNone) == 0 })
	if !ok {
		return
	}
	q, ok := g.queue(th, m.o.ctx, nil)
	if !ok {
		return
	}
	if m.fresh {
		g.line(th, "mw %d %d 1", m.id, g.n(1000))
		m.fresh = false
	}
	size := g.between(1, min(from.size, m.size))
	if g.command(th, q, false, []*root{from.root}, []*root{m.o.root}, "bring %d %d %d %d %d", q.id, from.id, g.n(from.size-size+1), size, m.id) {
		g.unmapped(m)
	}
}

// region draws rows within a mapped region and a buffer: where they begin in either, how many there
// are, how long each is, and how far they are apart in the region.
func (g *generator) region(m *mapping, o *object) (moff, off, rows, row, pitch int) {
	rows = g.between(1, 3)
	if rows > min(m.size, o.size) {
		rows = 1
	}
	row = g.between(1, min(m.size, o.size)/rows)
	pitch = g.between(row, m.size/rows)
	if g.n(2) == 0 {
		return 0, 0, rows, row, pitch
	}
	return g.n(m.size - rows*pitch + 1), g.n(o.size - rows*row + 1), rows, row, pitch
}

// into reads to a part of a mapped region, which stays mapped.
func (g *generator) into(th int) {
	m, ok := pick(g, g.maps, func(m *mapping) bool { return m.o.root.owner == th && m.write && m.size > 0 && !m.fresh })
	if ok {
		g.exchange(th, m, true)
	}
}

// from writes a part of a mapped region to a buffer.
func (g *generator) from(th int) {
	m, ok := pick(g, g.maps, func(m *mapping) bool { return m.o.root.owner == th && m.size > 0 && !m.fresh })
	if ok && g.ready(th, m) {
		g.exchange(th, m, false)
	}
}

// exchange moves bytes between a part of a mapped region and a buffer.
func (g *generator) exchange(th int, m *mapping, into bool) {
	word, bad := "from", hostReadOnly|hostNone
	if into {
		word, bad = "into", hostWriteOnly|hostNone
	}
	o, ok := g.object(th, m.o.ctx, !into, func(o *object) bool { return isBuffer(o) && o.flags&bad == 0 })
	if !ok {
		return
	}
	q, ok := g.queue(th, m.o.ctx, nil)
	if !ok {
		return
	}
	reads, writes := []*root{m.o.root}, []*root{o.root}
	if into {
		reads, writes = writes, reads
	}
	moff, off, rows, row, pitch := g.region(m, o)
	g.moved(th, m, q, reads, writes, word+" %d %d %d %d %d %d %d %d", q.id, o.id, off, m.id, moff, rows, row, pitch)
}

// moved adds a transfer between a buffer and a mapped region, which the application then uses when
// that has ended.
func (g *generator) moved(th int, m *mapping, q *queue, reads, writes []*root, format string, args ...any) {
	block := g.n(2)
	var extra []*event
	if !m.ready && m.event != nil && !m.event.gone && g.visible(m.event, th) {
		extra = []*event{m.event}
	} else if !g.ready(th, m) {
		return
	}
	e, ok := g.enqueue(th, q, block == 1, extra, reads, writes, format+" %d", append(args, block)...)
	if !ok || block == 1 {
		m.ready = m.ready || ok
		return
	}
	if e == nil {
		r := ref{queue: q}
		g.mark(th, &r)
		e = r.event
	}
	m.ready, m.event = false, e
}

func (g *generator) mapMemory(th int) {
	kind := g.n(4) // read, write, both, invalidate
	write := kind > 0
	o, ok := g.object(th, -1, write, func(o *object) bool {
		bad := hostNone
		if kind == 0 || kind == 2 {
			bad |= hostWriteOnly
		}
		if write {
			bad |= hostReadOnly
		}
		return o.flags&bad == 0 && o.image != 1
	})
	if !ok {
		return
	}
	q, ok := g.queue(th, o.ctx, nil)
	if !ok {
		return
	}
	flags := []int{mapRead, mapWrite, mapRead | mapWrite, mapInvalidate}[kind]
	m := &mapping{id: g.next.mapping, o: o, write: write, inv: kind == 3, fresh: kind == 3}
	block := g.n(2)
	var reads, writes []*root
	if write {
		writes = []*root{o.root}
	} else {
		reads = []*root{o.root}
	}
	var text string
	if o.image != 0 {
		a, s := g.part(o)
		text = fmt.Sprintf("imap %d %d %d %d %d %d %d %d %d %d %d", q.id, o.id, m.id, flags, a[0], a[1], a[2], s[0], s[1], s[2], block)
	} else {
		off, size := g.span(o.size, 64)
		m.size = size
		text = fmt.Sprintf("map %d %d %d %d %d %d %d", q.id, o.id, m.id, flags, off, size, block)
	}
	e, ok := g.enqueue(th, q, block == 1, nil, reads, writes, "%s", text)
	if !ok {
		return
	}
	g.next.mapping++
	m.ready, m.event = block == 1, e
	if block == 0 && e == nil {
		r := ref{queue: q}
		g.mark(th, &r)
		m.event = r.event
	}
	if write {
		o.root.wmaps++
	} else {
		o.root.rmaps++
	}
	g.maps = append(g.maps, m)
}

// ready makes sure that the pointer may be used.
func (g *generator) ready(th int, m *mapping) bool {
	if m.ready {
		return true
	}
	if len(open(m.event.gates)) > 0 || m.event.gone {
		return false
	}
	g.line(th, "wait < %d", m.event.id)
	m.ready = true
	return true
}

func (g *generator) mine(th int) func(*mapping) bool {
	return func(m *mapping) bool { return m.o.root.owner == th }
}

func (g *generator) mapped(th int) {
	m, ok := pick(g, g.maps, g.mine(th))
	if !ok || !g.ready(th, m) {
		return
	}
	switch {
	case m.write && (m.fresh || g.n(2) == 0):
		inv := 0
		if m.fresh {
			inv = 1
		}
		m.fresh = false
		if inv == 0 && m.size > 0 && g.n(2) == 0 {
			off, n := g.span(m.size, 1)
			g.line(th, "mw %d %d 0 %d %d", m.id, g.n(1000), off, n)
			return
		}
		g.line(th, "mw %d %d %d", m.id, g.n(1000), inv)
	default:
		g.line(th, "mr %d %d", m.id, g.result())
	}
}

func (g *generator) unmapAny(th int) {
	if m, ok := pick(g, g.maps, g.mine(th)); ok {
		g.unmap(th, m)
	}
}

func (g *generator) unmap(th int, m *mapping) bool {
	q, ok := g.queue(th, m.o.ctx, nil)
	if !ok {
		return false
	}
	var extra []*event
	if !m.ready && !m.fresh && !m.event.gone && g.visible(m.event, th) && g.n(2) == 0 {
		extra = []*event{m.event}
	} else if !g.ready(th, m) {
		return false
	}
	if m.fresh {
		g.line(th, "mw %d %d 1", m.id, g.n(1000))
		m.fresh = false
	}
	r := m.o.root
	var reads, writes []*root
	if m.write {
		writes = []*root{r}
	} else {
		reads = []*root{r}
	}
	if _, ok := g.enqueue(th, q, false, extra, reads, writes, "unmap %d %d", q.id, m.id); !ok {
		return false
	}
	g.unmapped(m)
	return true
}

func (g *generator) unmapped(m *mapping) {
	if m.write {
		m.o.root.wmaps--
	} else {
		m.o.root.rmaps--
	}
	g.maps = slices.DeleteFunc(g.maps, func(x *mapping) bool { return x == m })
}
