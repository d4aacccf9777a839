package property

import (
	"fmt"
)

func (g *generator) bufferImage(th int) {
	p, ok := g.object(th, -1, true, func(o *object) bool {
		return isBuffer(o) && !o.sub && o.flags&(memWriteOnly|memReadOnly|hostWriteOnly|hostReadOnly|hostNone) == 0
	})
	if !ok {
		return
	}
	w := min(p.size/4, 1024)
	o := &object{id: g.next.mem, ctx: p.ctx, size: w * 4, flags: p.flags, root: p.root, sub: true, image: 1, format: 1, region: [3]int{w, 1, 1}}
	g.next.mem++
	g.objs = append(g.objs, o)
	g.line(th, "imgb %d %d %d", o.id, p.id, w)
}

func (g *generator) imageTransfer(th int) {
	kind := g.n(3)
	o, ok := g.object(th, -1, kind > 0, func(o *object) bool { return o.image > 1 && o.flags&(hostWriteOnly|hostReadOnly|hostNone) == 0 })
	if !ok {
		return
	}
	q, ok := g.queue(th, o.ctx, nil)
	if !ok {
		return
	}
	a, s := g.part(o)
	where := fmt.Sprintf("%d %d %d %d %d %d %d %d", q.id, o.id, a[0], a[1], a[2], s[0], s[1], s[2])
	block := g.n(2)
	switch kind {
	case 0:
		g.command(th, q, block == 1, []*root{o.root}, nil, "imgrd %s %d %d", where, block, g.result())
	case 1:
		g.command(th, q, block == 1, nil, []*root{o.root}, "imgwr %s %d %d", where, block, g.n(1000))
	case 2:
		g.command(th, q, false, nil, []*root{o.root}, "imgfill %s %d", where, g.n(1<<20))
	}
}

func (g *generator) imageCopy(th int) {
	a, b, q, ok := g.pair(th, func(a, b *object) bool {
		return a.image > 1 && b.image > 1 && a.image == b.image && a.format == b.format ||
			a.image > 1 && isBuffer(b) && !b.sub || b.image > 1 && isBuffer(a) && !a.sub // PoCL 3.1 crashes with sub-buffers
	})
	if !ok {
		return
	}
	rs, ws := []*root{a.root}, []*root{b.root}
	switch {
	case isBuffer(b):
		at, s := g.part(a)
		if s[0]*s[1]*s[2]*4 <= b.size {
			g.command(th, q, false, rs, ws, "i2b %d %d %d %d %d %d %d %d %d 0", q.id, a.id, b.id, at[0], at[1], at[2], s[0], s[1], s[2])
		}
	case isBuffer(a):
		at, s := g.part(b)
		if s[0]*s[1]*s[2]*4 <= a.size {
			g.command(th, q, false, rs, ws, "b2i %d %d %d %d %d %d %d %d %d 0", q.id, b.id, a.id, at[0], at[1], at[2], s[0], s[1], s[2])
		}
	default:
		at, s := g.part(a)
		for i := range s {
			s[i] = min(s[i], b.region[i])
		}
		g.command(th, q, false, rs, ws, "imgcopy %d %d %d %d %d %d 0 0 0 %d %d %d", q.id, a.id, b.id, at[0], at[1], at[2], s[0], s[1], s[2])
	}
}
