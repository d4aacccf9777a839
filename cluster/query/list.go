package query

import (
	"fmt"
	"iter"
	"slices"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// Match reports whether the expression is true for an object. An object of another kind
// does not match.
func (q *Query) Match(o *clusterv1.Object) (bool, error) {
	if state.KindOf(o) != q.kind {
		return false, nil
	}
	return q.Matcher()(o)
}

// Matcher returns a function that matches objects of the query's kind. It is faster than
// Match, and must be used by one goroutine only.
func (q *Query) Matcher() func(o *clusterv1.Object) (bool, error) {
	if q.program == nil {
		return func(object) (bool, error) { return true, nil }
	}
	r := make(rows, len(q.used))
	for slot, number := range q.used {
		r[slot] = q.fields[number].column(1)
	}
	return func(o object) (bool, error) {
		for slot, number := range q.used {
			q.fields[number].put(r[slot], 0, o)
		}
		return q.decide(r, 0, o)
	}
}

// decide returns the answer for one row. It needs the object only if the lowered
// expression does not decide.
func (q *Query) decide(r rows, i int, o object) (bool, error) {
	if err := q.context().Err(); err != nil {
		return false, q.over(err)
	}
	if q.lowered != nil {
		switch q.lowered(r, i) {
		case no:
			return false, nil
		case yes:
			if q.exact {
				return true, nil
			}
		case failed:
		}
	}
	return q.interpret(o)
}

// over wraps the error of a query whose context has ended.
func (q *Query) over(err error) error {
	return fmt.Errorf("expression %q: it was given up: %w", q.source, err)
}

// interpret evaluates the expression with the interpreter. Errors name the object.
func (q *Query) interpret(o object) (bool, error) {
	matched, err := q.ask(o)
	if err != nil {
		return false, fmt.Errorf("%s %s: expression %q: %w", KindName(q.kind), state.Name(o), q.source, err)
	}
	return matched, nil
}

// candidate is a row that the lowered expression does not exclude.
type candidate struct {
	row    int
	failed bool
}

// sift returns the rows of a block, between from and to, that the lowered expression does
// not exclude. It evaluates one part for all remaining rows before the next part: that is
// faster than all parts row by row.
func (q *Query) sift(r rows, from, to int, buf []candidate) []candidate {
	out := buf[:0]
	if len(q.parts) == 0 {
		for i := from; i < to; i++ {
			out = append(out, candidate{i, false})
		}
		return out
	}
	for i := from; i < to; i++ {
		if v := q.parts[0](r, i); v != no {
			out = append(out, candidate{i, v == failed})
		}
	}
	for _, part := range q.parts[1:] {
		if q.context().Err() != nil {
			return nil // the caller checks the context, too
		}
		kept := out[:0]
		for _, c := range out {
			if v := part(r, c.row); v != no {
				kept = append(kept, candidate{c.row, c.failed || v == failed})
			}
		}
		out = kept
	}
	return out
}

// List returns the objects of a view for which the query is true, sorted by name: those
// after the given name, and at most limit if that is above 0. more reports whether there
// are others. The objects are shared and must not be changed.
func (q *Query) List(v *state.View, after string, limit int) (objects []*clusterv1.Object, more bool, err error) {
	if found, ok := q.indexed(v); ok {
		slices.SortFunc(found, func(a, b object) int { return strings.Compare(state.Name(a), state.Name(b)) })
		return q.collect(slices.Values(found), after, limit)
	}
	return q.collect(v.Objects(q.kind, after), after, limit)
}

func (q *Query) collect(from iter.Seq[object], after string, limit int) ([]object, bool, error) {
	match := q.Matcher()
	var out []object
	for o := range from {
		if after != "" && state.Name(o) <= after {
			continue
		}
		ok, err := match(o)
		if err != nil {
			return nil, false, err
		}
		if !ok {
			continue
		}
		if limit > 0 && len(out) == limit {
			return out, true, nil
		}
		out = append(out, o)
	}
	return out, false, nil
}

// indexed returns all objects that can match, from the most selective index of the view.
// It returns false if no index can be used.
func (q *Query) indexed(v *state.View) ([]object, bool) {
	for _, name := range []string{"id", "name", "address", "gpu", "claim", "group", "owner", "host", "state", "model"} {
		if values, ok := q.keys[name]; ok {
			if found, ok := q.lookups(v, name, values); ok {
				return found, true
			}
		}
	}
	return nil, false
}

func (q *Query) lookups(v *state.View, name string, values []string) ([]object, bool) {
	var all []object
	for _, value := range values {
		found, ok := q.lookup(v, name, value)
		if !ok {
			return nil, false
		}
		all = append(all, found...)
	}
	return all, true
}

func (q *Query) lookup(v *state.View, name, value string) ([]object, bool) {
	if value == "" {
		return nil, false // objects with an empty value are in no index
	}
	switch q.kind {
	case clusterv1.Kind_KIND_HOST:
		switch name {
		case "name":
			return one(v.Host(value), wrapHost), true
		case "id":
			return one(v.HostByID(value), wrapHost), true
		case "address":
			return one(v.HostByAddress(value), wrapHost), true
		}
	case clusterv1.Kind_KIND_GPU:
		switch name {
		case "id":
			return one(v.GPU(value), wrapGPU), true
		case "host":
			return many(v.GPUsOfHost(value), wrapGPU), true
		case "model":
			return many(v.GPUsOfModel(value), wrapGPU), true
		}
	case clusterv1.Kind_KIND_MODEL:
		return one(v.Model(value), wrapModel), name == "name"
	case clusterv1.Kind_KIND_VGPU:
		switch name {
		case "id":
			return one(v.VGPU(value), wrapVGPU), true
		case "gpu":
			return many(v.VGPUsOfGPU(value), wrapVGPU), true
		}
	case clusterv1.Kind_KIND_CLAIM:
		switch {
		case name == "id":
			return one(v.Claim(value), wrapClaim), true
		case name == "group":
			return many(v.ClaimsOfGroup(value), wrapClaim), true
		case name == "state" && value == "pending":
			return many(v.PendingClaims(), wrapClaim), true
		}
	case clusterv1.Kind_KIND_ASSIGNMENT:
		switch name {
		case "id":
			return one(v.Assignment(value), wrapAssignment), true
		case "gpu":
			return many(v.AssignmentsOfGPU(value), wrapAssignment), true
		case "claim":
			return many(v.AssignmentsOfClaim(value), wrapAssignment), true
		case "host":
			return many(v.AssignmentsOfHost(value), wrapAssignment), true
		}
	case clusterv1.Kind_KIND_SESSION:
		switch name {
		case "id":
			return one(v.Session(value), wrapSession), true
		case "claim":
			return many(v.SessionsOfClaim(value), wrapSession), true
		case "host":
			return many(v.SessionsOfHost(value), wrapSession), true
		}
	case clusterv1.Kind_KIND_MIGRATION:
		switch name {
		case "id":
			return one(v.Migration(value), wrapMigration), true
		case "claim":
			return many(v.MigrationsOfClaim(value), wrapMigration), true
		}
	case clusterv1.Kind_KIND_RESERVATION:
		switch name {
		case "id":
			return one(v.Reservation(value), wrapReservation), true
		case "gpu":
			return many(v.ReservationsOfGPU(value), wrapReservation), true
		case "owner":
			return many(v.ReservationsOfOwner(value), wrapReservation), true
		}
	case clusterv1.Kind_KIND_LINK:
		if name == "id" {
			return one(v.Link(value), wrapLink), true
		}
	case clusterv1.Kind_KIND_UNSPECIFIED:
	}
	return nil, false
}

func one[T any](x *T, wrap func(*T) object) []object {
	if x == nil {
		return nil
	}
	return []object{wrap(x)}
}

func many[T any](all iter.Seq[*T], wrap func(*T) object) []object {
	var out []object
	for x := range all {
		out = append(out, wrap(x))
	}
	return out
}

func wrapHost(x *clusterv1.Host) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Host{Host: x}}
}

func wrapGPU(x *clusterv1.GPU) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Gpu{Gpu: x}}
}

func wrapModel(x *clusterv1.Model) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Model{Model: x}}
}

func wrapVGPU(x *clusterv1.VGPU) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Vgpu{Vgpu: x}}
}

func wrapClaim(x *clusterv1.Claim) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Claim{Claim: x}}
}

func wrapAssignment(x *clusterv1.Assignment) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Assignment{Assignment: x}}
}

func wrapSession(x *clusterv1.Session) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Session{Session: x}}
}

func wrapMigration(x *clusterv1.Migration) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Migration{Migration: x}}
}

func wrapReservation(x *clusterv1.Reservation) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Reservation{Reservation: x}}
}

// column returns a column for n values of the field.
func (f *field) column(n int) column {
	switch {
	case f.number != nil:
		return column{numbers: make([]int64, n)}
	case f.text != nil:
		return column{texts: make([]string, n)}
	case f.truth != nil:
		return column{truths: make([]bool, n)}
	case f.list != nil:
		return column{lists: make([][]string, n)}
	case f.labels != nil:
		return column{labels: make([]map[string]string, n)}
	}
	return column{} // expressions with timestamps are never lowered
}

func (f *field) put(c column, i int, o object) {
	switch {
	case f.number != nil:
		c.numbers[i] = f.number(o)
	case f.text != nil:
		c.texts[i] = f.text(o)
	case f.truth != nil:
		c.truths[i] = f.truth(o)
	case f.list != nil:
		c.lists[i] = f.list(o)
	case f.labels != nil:
		c.labels[i] = f.labels(o)
	}
}

func (c column) clone() column {
	return column{
		slices.Clone(c.numbers), slices.Clone(c.texts), slices.Clone(c.truths),
		slices.Clone(c.lists), slices.Clone(c.labels),
	}
}

func wrapLink(x *clusterv1.Link) object {
	return &clusterv1.Object{Object: &clusterv1.Object_Link{Link: x}}
}
