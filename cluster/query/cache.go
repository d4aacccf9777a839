package query

import (
	"iter"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// blockSize is how many objects share their columns. A change costs a copy of
// that many values of each column in use.
const blockSize = 512

// Cache makes queries over views of one store fast. It is safe for concurrent
// use: who reads never waits but for a view to be read in.
type Cache struct {
	mu        sync.Mutex
	languages map[clusterv1.Kind]*language
	tables    map[clusterv1.Kind]*cachedTable
}

// cachedTable is the newest table of a kind.
type cachedTable struct {
	mu      sync.Mutex // of those who read a view in
	current atomic.Pointer[table]
}

// NewCache returns an empty cache: it reads in what queries ask for.
func NewCache() *Cache {
	return &Cache{languages: map[clusterv1.Kind]*language{}, tables: map[clusterv1.Kind]*cachedTable{}}
}

// Compile is the function Compile, without making its environment each time.
func (c *Cache) Compile(kind clusterv1.Kind, where string) (*Query, error) {
	c.mu.Lock()
	l := c.languages[kind]
	if l == nil {
		l = newLanguage(kind)
		if len(l.fields) > 0 {
			c.languages[kind] = l
		}
	}
	c.mu.Unlock()
	return l.compile(where)
}

// List is Query.List with the help of the cache. A view that is older than
// what the cache has is read directly.
func (c *Cache) List(q *Query, v *state.View, after string, limit int) ([]*clusterv1.Object, bool, error) {
	if len(q.keys) > 0 {
		// GPUs of a model are often a large part of all; the scan of a cache is
		// faster than an index with that many.
		if _, ok := q.keys["model"]; !ok || len(q.keys) > 1 {
			return q.List(v, after, limit)
		}
	}
	t := c.table(q.kind, v)
	if t == nil {
		return q.List(v, after, limit)
	}
	return t.list(q, after, limit)
}

// Refresh reads a view's objects of a kind in, so that the next query need not.
func (c *Cache) Refresh(kind clusterv1.Kind, v *state.View) { c.table(kind, v) }

// Latest is the newest view whose objects of a kind have been read in; nil
// before the first. Who may answer with what is a little old lists that one:
// reading in a large inventory takes longer than a query.
func (c *Cache) Latest(kind clusterv1.Kind) *state.View {
	c.mu.Lock()
	ct := c.tables[kind]
	c.mu.Unlock()
	if ct == nil {
		return nil
	}
	if t := ct.current.Load(); t != nil {
		return t.view
	}
	return nil
}

// table of a view; nil if the cache has a later one, or there is no such kind.
func (c *Cache) table(kind clusterv1.Kind, v *state.View) *table {
	c.mu.Lock()
	ct := c.tables[kind]
	if ct == nil {
		ct = &cachedTable{}
		c.tables[kind] = ct
	}
	c.mu.Unlock()
	if t := ct.current.Load(); t.serves(v) {
		return t
	}
	ct.mu.Lock()
	defer ct.mu.Unlock()
	old := ct.current.Load()
	if old.serves(v) {
		return old
	}
	if old != nil && v.Index() < old.view.Index() {
		return nil
	}
	// Asked before the objects are read: a change between the two is seen twice,
	// never not at all.
	changed := v.Changed(kind)
	t := &table{view: v, changed: changed}
	ok := false
	if old != nil {
		t.blocks, ok = old.follow(kind, v)
	}
	if !ok {
		if t.blocks, ok = readIn(kind, v, old); !ok {
			return nil
		}
	}
	ct.current.Store(t)
	return t
}

// table is one kind's objects as of a view.
type table struct {
	view    *state.View
	changed <-chan struct{} // closed when the kind has changed after the view
	blocks  []*block        // by name
}

// serves reports whether the table is what a view has: it is that view's, or
// nothing has changed since.
func (t *table) serves(v *state.View) bool {
	if t == nil {
		return false
	}
	if t.view == v {
		return true
	}
	if v.Index() < t.view.Index() {
		return false
	}
	select {
	case <-t.changed:
		return false
	default:
		return true
	}
}

// block is some of a kind's objects, in order of their names.
type block struct {
	names   []string
	stored  []any // what the view has, to tell what is still the same
	objects []object
	columns []atomic.Pointer[column] // by field; made when they are first asked for
}

func newBlock(fields int, names []string, stored []any, objects []object) *block {
	return &block{names, stored, objects, make([]atomic.Pointer[column], fields)}
}

func (b *block) column(fields []field, number int) column {
	if c := b.columns[number].Load(); c != nil {
		return *c
	}
	f := &fields[number]
	c := f.column(len(b.objects))
	for i, o := range b.objects {
		f.put(c, i, o)
	}
	compact(c.texts)
	b.columns[number].Store(&c) // another reader may have made the same
	return c
}

// compact makes equal texts one and puts all of them side by side in memory: a
// scan then waits for few of them.
func compact(texts []string) {
	places := make(map[string]int, 64)
	size := 0
	for _, s := range texts {
		if _, ok := places[s]; !ok {
			places[s] = size
			size += len(s)
		}
	}
	var all strings.Builder
	all.Grow(size)
	clear(places)
	for _, s := range texts {
		if _, ok := places[s]; !ok {
			places[s] = all.Len()
			all.WriteString(s)
		}
	}
	joined := all.String()
	for i, s := range texts {
		at := places[s]
		texts[i] = joined[at : at+len(s)]
	}
}

// list is Query.List over the table.
func (t *table) list(q *Query, after string, limit int) ([]object, bool, error) {
	first := 0
	if after != "" {
		first = sort.Search(len(t.blocks), func(i int) bool {
			names := t.blocks[i].names
			return names[len(names)-1] > after
		})
	}
	var out []object
	var left []candidate // buffer
	r := make(rows, len(q.used))
	for _, b := range t.blocks[first:] {
		for slot, number := range q.used {
			r[slot] = b.column(q.fields, number)
		}
		i := 0
		if after != "" {
			i = sort.Search(len(b.names), func(i int) bool { return b.names[i] > after })
		}
		left = q.sift(r, i, len(b.objects), left)
		if err := q.context().Err(); err != nil {
			return nil, false, q.over(err)
		}
		for _, c := range left {
			o := b.objects[c.row]
			if c.failed || q.program != nil && !q.exact {
				ok, err := q.interpret(o)
				if err != nil {
					return nil, false, err
				}
				if !ok {
					continue
				}
			}
			if limit > 0 && len(out) == limit {
				return out, true, nil
			}
			out = append(out, o)
		}
	}
	return out, false, nil
}

// readIn makes the blocks of a view, with those of an earlier one where they
// are the same.
func readIn(kind clusterv1.Kind, v *state.View, old *table) ([]*block, bool) {
	fields := fieldsOf(kind)
	var blocks []*block
	if old != nil {
		blocks = old.blocks
	}
	switch kind {
	case clusterv1.Kind_KIND_HOST:
		return merge(v.Hosts(), (*clusterv1.Host).GetName, wrapHost, fields, blocks), true
	case clusterv1.Kind_KIND_GPU:
		return merge(v.GPUs(), (*clusterv1.GPU).GetId, wrapGPU, fields, blocks), true
	case clusterv1.Kind_KIND_MODEL:
		return merge(v.Models(), (*clusterv1.Model).GetName, wrapModel, fields, blocks), true
	case clusterv1.Kind_KIND_VGPU:
		return merge(v.VGPUs(), (*clusterv1.VGPU).GetId, wrapVGPU, fields, blocks), true
	case clusterv1.Kind_KIND_CLAIM:
		return merge(v.Claims(), (*clusterv1.Claim).GetId, wrapClaim, fields, blocks), true
	case clusterv1.Kind_KIND_ASSIGNMENT:
		return merge(v.Assignments(), (*clusterv1.Assignment).GetId, wrapAssignment, fields, blocks), true
	case clusterv1.Kind_KIND_SESSION:
		return merge(v.Sessions(), (*clusterv1.Session).GetId, wrapSession, fields, blocks), true
	case clusterv1.Kind_KIND_MIGRATION:
		return merge(v.Migrations(), (*clusterv1.Migration).GetId, wrapMigration, fields, blocks), true
	case clusterv1.Kind_KIND_RESERVATION:
		return merge(v.Reservations(), (*clusterv1.Reservation).GetId, wrapReservation, fields, blocks), true
	case clusterv1.Kind_KIND_UNSPECIFIED:
	}
	return nil, false
}

// merger goes along the old blocks while it is given the new objects.
type merger struct {
	fields []field
	old    []*block
	block  int // of old
	row    int // of that block
	out    []*block

	// What the current old block becomes; empty while it is the same.
	differs    bool
	structural bool // other names, not only other objects
	replaced   []int
	names      []string
	stored     []any
	objects    []object
}

// merge compares what a view has with old blocks. Objects never change, so one
// that is the same pointer is the same; only of others are the names read.
func merge[T any](all iter.Seq[*T], name func(*T) string, wrap func(*T) object, fields []field, old []*block) []*block {
	m := &merger{fields: fields, old: old}
	for x := range all {
		if m.same(x) {
			continue
		}
		n := name(x)
		for m.block < len(m.old) && m.old[m.block].names[m.row] < n {
			m.drop()
		}
		if m.block < len(m.old) && m.old[m.block].names[m.row] == n {
			m.replace(n, x, wrap(x))
		} else {
			m.insert(n, x, wrap(x))
		}
	}
	for m.block < len(m.old) {
		m.drop()
	}
	m.flush()
	return m.out
}

func (m *merger) same(x any) bool {
	if m.block >= len(m.old) {
		return false
	}
	b := m.old[m.block]
	if b.stored[m.row] != x {
		return false
	}
	if m.differs {
		m.names = append(m.names, b.names[m.row])
		m.stored = append(m.stored, x)
		m.objects = append(m.objects, b.objects[m.row])
	}
	m.next()
	return true
}

func (m *merger) next() {
	m.row++
	if m.row < len(m.old[m.block].names) {
		return
	}
	m.flush()
	m.block++
	m.row = 0
}

// differ begins a changed copy of the current block.
func (m *merger) differ() {
	if m.differs {
		return
	}
	m.differs = true
	if m.block < len(m.old) {
		b := m.old[m.block]
		m.names = append(make([]string, 0, len(b.names)+1), b.names[:m.row]...)
		m.stored = append(make([]any, 0, len(b.names)+1), b.stored[:m.row]...)
		m.objects = append(make([]object, 0, len(b.names)+1), b.objects[:m.row]...)
	}
}

func (m *merger) drop() {
	m.differ()
	m.structural = true
	m.next()
}

func (m *merger) replace(name string, x any, o object) {
	m.differ()
	m.replaced = append(m.replaced, len(m.names))
	m.names = append(m.names, name)
	m.stored = append(m.stored, x)
	m.objects = append(m.objects, o)
	m.next()
}

// insert adds to the current block, or after the last.
func (m *merger) insert(name string, x any, o object) {
	m.differ()
	m.structural = true
	m.names = append(m.names, name)
	m.stored = append(m.stored, x)
	m.objects = append(m.objects, o)
}

// flush ends the current block.
func (m *merger) flush() {
	switch {
	case !m.differs:
		if m.block < len(m.old) && m.row == len(m.old[m.block].names) {
			m.out = append(m.out, m.old[m.block])
		}
		return
	case !m.structural:
		m.out = append(m.out, m.old[m.block].patched(m.fields, m.stored, m.objects, m.replaced))
	default:
		m.split()
	}
	m.differs, m.structural, m.replaced = false, false, nil
	m.names, m.stored, m.objects = nil, nil, nil
}

// patched is a block with other objects of the same names, which differ in the
// rows that are replaced.
func (b *block) patched(fields []field, stored []any, objects []object, replaced []int) *block {
	out := newBlock(len(fields), b.names, stored, objects)
	for number := range fields {
		c := b.columns[number].Load()
		if c == nil {
			continue
		}
		f := &fields[number]
		patched := c.clone()
		for _, i := range replaced {
			f.put(patched, i, objects[i])
		}
		out.columns[number].Store(&patched)
	}
	return out
}

// split makes blocks of bearable size, together with a small one before.
func (m *merger) split() {
	if len(m.out) > 0 && len(m.names) > 0 {
		if last := m.out[len(m.out)-1]; len(last.names)+len(m.names) <= blockSize {
			m.out = m.out[:len(m.out)-1]
			m.names = append(last.names[:len(last.names):len(last.names)], m.names...)
			m.stored = append(last.stored[:len(last.stored):len(last.stored)], m.stored...)
			m.objects = append(last.objects[:len(last.objects):len(last.objects)], m.objects...)
		}
	}
	for len(m.names) > 0 {
		n := len(m.names)
		if n > 2*blockSize {
			n = blockSize
		}
		m.out = append(m.out, newBlock(len(m.fields), m.names[:n:n], m.stored[:n:n], m.objects[:n:n]))
		m.names, m.stored, m.objects = m.names[n:], m.stored[n:], m.objects[n:]
	}
}
