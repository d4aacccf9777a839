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

// blockSize is how many objects share their columns. A change copies that many values of
// each column in use.
const blockSize = 512

// Cache makes queries over views of one store fast. It is safe for concurrent use. A
// reader waits only while a new view is being read in.
type Cache struct {
	mu        sync.Mutex
	languages map[clusterv1.Kind]*language
	tables    map[clusterv1.Kind]*cachedTable
}

// cachedTable is the newest table of a kind.
type cachedTable struct {
	mu      sync.Mutex // held while a view is being read in
	current atomic.Pointer[table]
}

// NewCache returns an empty cache. It reads in what queries need.
func NewCache() *Cache {
	return &Cache{languages: map[clusterv1.Kind]*language{}, tables: map[clusterv1.Kind]*cachedTable{}}
}

// Compile does the same as the function Compile, but makes the CEL environment of each
// kind only once.
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

// List does the same as Query.List, using the cache. A view that is older than that of
// the cache is read without it.
func (c *Cache) List(q *Query, v *state.View, after string, limit int) ([]*clusterv1.Object, bool, error) {
	if len(q.keys) > 0 {
		// The GPUs of one model are often a large part of all. A scan of the cache is
		// then faster than the index.
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

// Refresh reads in a view's objects of a kind, so that the next query need not do it.
func (c *Cache) Refresh(kind clusterv1.Kind, v *state.View) { c.table(kind, v) }

// Latest returns the newest view whose objects of a kind have been read in, or nil if
// there is none. Callers that accept a slightly old answer list that view: reading in a
// large inventory takes longer than a query.
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

// table returns the table of a view; nil if the cache has a later view, or there is no
// such kind.
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
	// Get the channel before the objects are read, so that no change is missed. A change
	// between the two is seen twice.
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

// table has the objects of one kind in a view.
type table struct {
	view    *state.View
	changed <-chan struct{} // closed when an object of the kind has changed after the view
	blocks  []*block        // by name
}

// serves reports whether the table is valid for a view: it was made from that view, or no
// object of the kind has changed since.
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

// block has some objects of a kind, in the order of their names.
type block struct {
	names   []string
	stored  []any // pointers of the state's objects, to detect which ones have changed
	objects []object
	columns []atomic.Pointer[column] // by field; made when a query needs them first
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
	b.columns[number].Store(&c) // another reader may have stored the same column
	return c
}

// compact replaces equal texts by one, and puts all texts next to each other in memory. A
// scan then has fewer cache misses.
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

// list does the same as Query.List, over the table.
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

// readIn makes the blocks of a view. Blocks that have not changed are taken from an
// earlier table.
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
	case clusterv1.Kind_KIND_LINK:
		return merge(v.Links(), (*clusterv1.Link).GetId, wrapLink, fields, blocks), true
	case clusterv1.Kind_KIND_UNSPECIFIED:
	}
	return nil, false
}

// merger compares new objects with the old blocks, in order.
type merger struct {
	fields []field
	old    []*block
	block  int // index of the current old block
	row    int // row in that block
	out    []*block

	// Replacement of the current old block; empty while nothing has changed.
	differs    bool
	structural bool // names have changed, not only objects
	replaced   []int
	names      []string
	stored     []any
	objects    []object
}

// merge compares a view's objects with old blocks. Objects never change, so the same
// pointer is the same object; names are read only of other objects.
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

// insert adds an object to the current block, or after the last one.
func (m *merger) insert(name string, x any, o object) {
	m.differ()
	m.structural = true
	m.names = append(m.names, name)
	m.stored = append(m.stored, x)
	m.objects = append(m.objects, o)
}

// flush completes the current block.
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

// patched returns a copy of a block with other objects of the same names. They differ in
// the rows that are replaced.
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

// split divides a block that is too large, and joins a small one with the one before it.
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
