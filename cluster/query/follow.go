package query

import (
	"slices"
	"sort"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// follow makes the blocks of a later view from what has changed since. It returns false
// if that is unknown, or if so much has changed that reading in everything is as fast.
func (t *table) follow(kind clusterv1.Kind, v *state.View) ([]*block, bool) {
	names, ok := v.ChangedSince(t.view, kind)
	if !ok {
		return nil, false
	}
	size := 0
	for _, b := range t.blocks {
		size += len(b.names)
	}
	if len(names) > 64 && len(names) > size/16 {
		return nil, false
	}
	fields := fieldsOf(kind)
	out := slices.Clone(t.blocks)
	// From the end, so that a changed number of blocks does not move those that are still
	// to be processed.
	for len(names) > 0 {
		n := sort.Search(len(out), func(i int) bool { return out[i].names[0] > names[len(names)-1] })
		if n == 0 {
			n = 1 // it is before the first block, so add it to that
		}
		from := 0
		if n > 1 {
			from, _ = slices.BinarySearch(names, out[n-1].names[0])
		}
		if len(out) == 0 {
			return (&block{}).with(kind, v, fields, names), true
		}
		fresh := out[n-1].with(kind, v, fields, names[from:])
		out = slices.Replace(out, n-1, n, fresh...)
		if len(fresh) == 1 && len(fresh[0].names) < blockSize/4 {
			out = join(fields, out, n-1)
		}
		names = names[:from]
	}
	return out, true
}

// join joins a small block with a neighbour that has room.
func join(fields []field, blocks []*block, n int) []*block {
	for _, first := range []int{n, n - 1} {
		if first < 0 || first+1 >= len(blocks) {
			continue
		}
		a, b := blocks[first], blocks[first+1]
		if len(a.names)+len(b.names) <= blockSize {
			both := newBlock(len(fields), slices.Concat(a.names, b.names), slices.Concat(a.stored, b.stored), slices.Concat(a.objects, b.objects))
			return slices.Replace(blocks, first, first+2, both)
		}
	}
	return blocks
}

// with returns the blocks that replace a block after the objects with these names, which
// are sorted, have changed.
func (b *block) with(kind clusterv1.Kind, v *state.View, fields []field, names []string) []*block {
	now := make([]object, len(names))
	rows := make([]int, 0, len(names))
	same := true // whether the names are the same
	for i, n := range names {
		now[i] = v.Object(kind, n)
		row, found := slices.BinarySearch(b.names, n)
		same = same && found == (now[i] != nil)
		if found {
			rows = append(rows, row)
		}
	}
	if same {
		// A name that is in neither was made and deleted again.
		now = slices.DeleteFunc(now, func(o object) bool { return o == nil })
		switch {
		case len(b.names) == 0:
			return nil
		case len(rows) == 0:
			return []*block{b}
		}
		stored, objects := slices.Clone(b.stored), slices.Clone(b.objects)
		for i, row := range rows {
			stored[row], objects[row] = state.Stored(now[i]), now[i]
		}
		return []*block{b.patched(fields, stored, objects, rows)}
	}
	m := &merger{fields: fields}
	row := 0
	keep := func(to int) {
		m.names = append(m.names, b.names[row:to]...)
		m.stored = append(m.stored, b.stored[row:to]...)
		m.objects = append(m.objects, b.objects[row:to]...)
		row = to
	}
	for i, n := range names {
		at, found := slices.BinarySearch(b.names, n)
		keep(at)
		if found {
			row++
		}
		if now[i] != nil {
			m.insert(n, state.Stored(now[i]), now[i])
		}
	}
	keep(len(b.names))
	m.split()
	return m.out
}

// Rows has a query's answers for all objects of a view, in the order of their names.
// Answers are computed on demand, fastest in that order. It must be used by one goroutine
// only.
type Rows struct {
	q      *Query
	blocks []*block
	block  int // current block
	from   int // number of its first row
	rows   rows
}

// Rows returns the answers of a query; nil if the cache has read in a later view, or the
// query has no expression.
func (c *Cache) Rows(q *Query, v *state.View) *Rows {
	if q.program == nil {
		return nil
	}
	t := c.table(q.kind, v)
	if t == nil {
		return nil
	}
	out := &Rows{q: q, blocks: t.blocks, rows: make(rows, len(q.used))}
	out.look(0, 0)
	return out
}

func (r *Rows) look(block, from int) {
	r.block, r.from = block, from
	if block < len(r.blocks) {
		for slot, number := range r.q.used {
			r.rows[slot] = r.blocks[block].column(r.q.fields, number)
		}
	}
}

// Match reports whether the expression is true for the object of a row. An object for
// which it fails does not match. known is false if that row belongs to another object
// than stored, which is the value that state.Stored returns.
func (r *Rows) Match(row int, stored any) (matches, known bool) {
	if row < r.from {
		r.look(0, 0)
	}
	for r.block < len(r.blocks) && row >= r.from+len(r.blocks[r.block].names) {
		block, from := r.block+1, r.from+len(r.blocks[r.block].names)
		for block < len(r.blocks) && row >= from+len(r.blocks[block].names) {
			from += len(r.blocks[block].names)
			block++
		}
		r.look(block, from)
	}
	if row < 0 || r.block >= len(r.blocks) {
		return false, false
	}
	b := r.blocks[r.block]
	if b.stored[row-r.from] != stored {
		return false, false
	}
	ok, err := r.q.decide(r.rows, row-r.from, b.objects[row-r.from])
	return ok && err == nil, true
}
