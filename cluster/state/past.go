package state

import (
	"slices"
	"sort"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// keepChanges is how many changes of a kind are known at least. For a view that is older,
// reading all objects is as fast.
const keepChanges = 8192

const kinds = int(clusterv1.Kind_KIND_LINK) + 1

// past has the names of recently changed objects. It is not a part of the state: hosts
// that have restored a snapshot know fewer changes than others.
type past struct {
	restored uint64 // how often a snapshot has replaced the state
	trails   [kinds]trail
}

// trail has the changes of one kind, oldest first.
type trail struct {
	since   uint64 // it is complete after this entry
	changes []change
}

type change struct {
	index uint64
	name  string
}

// touch is an object that an entry has stored or deleted.
type touch struct {
	kind clusterv1.Kind
	name string
}

// with returns a past with an entry's changes added. The old past stays valid: both share
// an array, but the old one does not read its end. So only the newest past may be
// extended.
func (p *past) with(index uint64, touched []touch, keep int) *past {
	next := *p
	for _, x := range touched {
		t := &next.trails[x.kind]
		if n := len(t.changes); n >= 2*keep {
			t.since = t.changes[n-keep-1].index
			t.changes = append(make([]change, 0, 2*keep), t.changes[n-keep:]...)
		}
		t.changes = append(t.changes, change{index, x.name})
	}
	return &next
}

// after returns the names of what has changed after an entry, sorted. It returns false if
// not all changes are known.
func (t *trail) after(index uint64) ([]string, bool) {
	if index < t.since {
		return nil, false
	}
	from := sort.Search(len(t.changes), func(i int) bool { return t.changes[i].index > index })
	names := make([]string, 0, len(t.changes)-from)
	for _, c := range t.changes[from:] {
		names = append(names, c.name)
	}
	slices.Sort(names)
	return slices.Compact(names), true
}

// ChangedSince returns the names of the objects of a kind that were made, changed or
// deleted after an older view and up to this one, sorted. Its time is proportional to the
// number of changes. It returns false if not all changes are known: a snapshot was
// restored in between, there were too many changes, or old is not an older view of the
// same store.
func (v *View) ChangedSince(old *View, kind clusterv1.Kind) (names []string, ok bool) {
	if kind <= 0 || int(kind) >= kinds || old == nil || old.store != v.store || old.epoch > v.epoch || old.past.restored != v.past.restored {
		return nil, false
	}
	return v.past.trails[kind].after(old.Index())
}
