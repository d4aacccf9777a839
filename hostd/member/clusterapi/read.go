package clusterapi

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// read returns a view of the state. It is linearizable, unless stale is set.
func (a *API) read(ctx context.Context, stale bool) (*state.View, error) {
	l, err := a.replicated()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	v, err := l.Read(ctx, stale)
	return v, reason.Coded(err)
}

func known(kind clusterv1.Kind) error {
	if kind == clusterv1.Kind_KIND_UNSPECIFIED || clusterv1.Kind_name[int32(kind)] == "" {
		return reason.Coded(fmt.Errorf("%w: kind %d is not one", errInvalid, kind))
	}
	return nil
}

// List returns the objects of a kind for which an expression is true.
func (a *API) List(ctx context.Context, req *connect.Request[clusterv1.ListRequest]) (*connect.Response[clusterv1.ListResponse], error) {
	m := req.Msg
	if err := known(m.GetKind()); err != nil {
		return nil, err
	}
	q, err := a.cache.Compile(m.GetKind(), m.GetWhere())
	if err != nil {
		return nil, reason.Coded(err)
	}
	bound, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	q = q.Within(bound)
	v, err := a.read(ctx, m.GetStale())
	if err != nil {
		return nil, err
	}
	res := &clusterv1.ListResponse{Index: v.Index()}
	if m.GetName() != "" {
		o, err := a.one(v, m.GetKind(), m.GetName())
		if err != nil {
			return nil, err
		}
		match, err := q.Match(o)
		if err != nil {
			return nil, reason.Coded(unanswerable(err))
		}
		if match {
			res.Objects = []*clusterv1.Object{o}
		}
		return connect.NewResponse(res), nil
	}
	res.Objects, res.More, err = a.cache.List(q, v, m.GetAfter(), int(m.GetLimit()))
	if err != nil {
		return nil, reason.Coded(unanswerable(err))
	}
	return connect.NewResponse(res), nil
}

// unanswerable wraps the error of an expression that has no value for some object, such
// as one about a label that the object does not have.
func unanswerable(err error) error { return fmt.Errorf("%w: %w", errInvalid, err) }

// one returns the object with this name. The beginning of the name is enough if it is
// unique.
func (a *API) one(v *state.View, kind clusterv1.Kind, name string) (*clusterv1.Object, error) {
	if o := v.Object(kind, name); o != nil {
		return o, nil
	}
	var found []*clusterv1.Object
	var names []string
	const most = 20_000 // with more names, similar ones are not searched for
	for o := range v.Objects(kind, "") {
		n := state.Name(o)
		if name != "" && strings.HasPrefix(n, name) {
			found = append(found, o)
		}
		if len(names) < most {
			names = append(names, n)
		}
	}
	what := query.KindName(kind)
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return nil, reason.Coded(reason.Detail(fmt.Errorf("%w: no %s %q%s", errNotFound, what, name, suggest.Hint(name, names))).On(what, name).Do("gpuctl get %ss lists them", what))
	}
	return nil, reason.Coded(reason.Errorf(reason.Ambiguous, "%w: %s %q can be %s or %s", errInvalid, what, name, state.Name(found[0]), state.Name(found[1])).On(what, name))
}

// Watch streams changes, after all objects that exist. A client that reads slowly misses
// intermediate states, but never the last one.
func (a *API) Watch(ctx context.Context, req *connect.Request[clusterv1.WatchRequest], stream *connect.ServerStream[clusterv1.WatchResponse]) error {
	const pace = 50 * time.Millisecond // limits how often the state is scanned if the log is busy
	m := req.Msg
	if err := known(m.GetKind()); err != nil {
		return err
	}
	q, err := a.cache.Compile(m.GetKind(), m.GetWhere())
	if err != nil {
		return reason.Coded(err)
	}
	q = q.Within(ctx)
	v, err := a.read(ctx, false)
	if err != nil {
		return err
	}
	sent := map[string]*clusterv1.Object{}
	for synced := false; ; synced = true {
		now, err := a.matching(q, v, m.GetName())
		if err != nil {
			return reason.Coded(unanswerable(err))
		}
		for _, o := range now {
			name := state.Name(o)
			if old := sent[name]; old != nil && state.Revision(old) == state.Revision(o) {
				continue
			}
			sent[name] = o
			if err := stream.Send(&clusterv1.WatchResponse{Object: o, Index: v.Index()}); err != nil {
				return err
			}
		}
		if len(sent) > len(now) {
			if err := sendGone(stream, v, sent, now); err != nil {
				return err
			}
		}
		if !synced {
			if err := stream.Send(&clusterv1.WatchResponse{Synced: true, Index: v.Index()}); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-v.Changed(m.GetKind()):
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pace):
		}
		l, err := a.replicated()
		if err != nil {
			return err
		}
		v = l.State().View()
	}
}

func (a *API) matching(q *query.Query, v *state.View, name string) ([]*clusterv1.Object, error) {
	if name == "" {
		all, _, err := a.cache.List(q, v, "", 0)
		return all, err
	}
	o := v.Object(q.Kind(), name)
	if o == nil {
		return nil, nil
	}
	if match, err := q.Match(o); err != nil || !match {
		return nil, err
	}
	return []*clusterv1.Object{o}, nil
}

func sendGone(stream *connect.ServerStream[clusterv1.WatchResponse], v *state.View, sent map[string]*clusterv1.Object, now []*clusterv1.Object) error {
	still := map[string]bool{}
	for _, o := range now {
		still[state.Name(o)] = true
	}
	var gone []string
	for name := range sent {
		if !still[name] {
			gone = append(gone, name)
		}
	}
	slices.Sort(gone)
	for _, name := range gone {
		if err := stream.Send(&clusterv1.WatchResponse{Object: sent[name], Deleted: true, Index: v.Index()}); err != nil {
			return err
		}
		delete(sent, name)
	}
	return nil
}

// Describe returns one object, with related objects and its events.
func (a *API) Describe(ctx context.Context, req *connect.Request[clusterv1.DescribeRequest]) (*connect.Response[clusterv1.DescribeResponse], error) {
	const events = 50
	m := req.Msg
	if err := known(m.GetKind()); err != nil {
		return nil, err
	}
	v, err := a.read(ctx, m.GetStale())
	if err != nil {
		return nil, err
	}
	o, err := a.one(v, m.GetKind(), m.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&clusterv1.DescribeResponse{
		Object: o, Related: related(v, o), Events: v.Events(m.GetKind(), state.Name(o), events), Index: v.Index(),
	}), nil
}

// related returns the objects that an object consists of or depends on.
func related(v *state.View, o *clusterv1.Object) []*clusterv1.Object {
	var out []*clusterv1.Object
	add := func(kind clusterv1.Kind, names ...string) {
		for _, n := range names {
			if x := v.Object(kind, n); x != nil {
				out = append(out, x)
			}
		}
	}
	switch x := o.GetObject().(type) {
	case *clusterv1.Object_Host:
		for g := range v.GPUsOfHost(x.Host.GetName()) {
			add(clusterv1.Kind_KIND_GPU, g.GetId())
		}
		for as := range v.AssignmentsOfHost(x.Host.GetName()) {
			add(clusterv1.Kind_KIND_ASSIGNMENT, as.GetId())
		}
		for s := range v.SessionsOfHost(x.Host.GetName()) {
			add(clusterv1.Kind_KIND_SESSION, s.GetId())
		}
	case *clusterv1.Object_Gpu:
		add(clusterv1.Kind_KIND_HOST, x.Gpu.GetHost())
		add(clusterv1.Kind_KIND_MODEL, x.Gpu.GetModel())
		for as := range v.AssignmentsOfGPU(x.Gpu.GetId()) {
			add(clusterv1.Kind_KIND_ASSIGNMENT, as.GetId())
			add(clusterv1.Kind_KIND_CLAIM, as.GetClaim())
		}
		for r := range v.ReservationsOfGPU(x.Gpu.GetId()) {
			add(clusterv1.Kind_KIND_RESERVATION, r.GetId())
		}
	case *clusterv1.Object_Model:
		for g := range v.GPUsOfModel(x.Model.GetName()) {
			add(clusterv1.Kind_KIND_GPU, g.GetId())
		}
	case *clusterv1.Object_Vgpu:
		add(clusterv1.Kind_KIND_GPU, x.Vgpu.GetGpu())
		add(clusterv1.Kind_KIND_ASSIGNMENT, x.Vgpu.GetAssignment())
	case *clusterv1.Object_Claim:
		for as := range v.AssignmentsOfClaim(x.Claim.GetId()) {
			add(clusterv1.Kind_KIND_ASSIGNMENT, as.GetId())
			add(clusterv1.Kind_KIND_GPU, as.GetGpu())
		}
		for s := range v.Sessions() {
			if s.GetClaim() == x.Claim.GetId() {
				add(clusterv1.Kind_KIND_SESSION, s.GetId())
			}
		}
	case *clusterv1.Object_Assignment:
		add(clusterv1.Kind_KIND_CLAIM, x.Assignment.GetClaim())
		add(clusterv1.Kind_KIND_GPU, x.Assignment.GetGpu())
		add(clusterv1.Kind_KIND_VGPU, x.Assignment.GetVgpu())
	case *clusterv1.Object_Session:
		add(clusterv1.Kind_KIND_HOST, x.Session.GetHost())
		add(clusterv1.Kind_KIND_CLAIM, x.Session.GetClaim())
		add(clusterv1.Kind_KIND_GPU, x.Session.GetGpus()...)
	case *clusterv1.Object_Migration:
		add(clusterv1.Kind_KIND_SESSION, x.Migration.GetObject())
		add(clusterv1.Kind_KIND_CLAIM, x.Migration.GetClaim())
	case *clusterv1.Object_Link:
		add(clusterv1.Kind_KIND_HOST, x.Link.GetFrom(), x.Link.GetTo())
	case *clusterv1.Object_Reservation:
		add(clusterv1.Kind_KIND_GPU, x.Reservation.GetGpu())
		add(clusterv1.Kind_KIND_CLAIM, x.Reservation.GetOwner())
	}
	return out
}

// Events streams the stored events, and new ones if the request asks for them.
func (a *API) Events(ctx context.Context, req *connect.Request[clusterv1.EventsRequest], stream *connect.ServerStream[clusterv1.Event]) error {
	m := req.Msg
	v, err := a.read(ctx, false)
	if err != nil {
		return err
	}
	last := int(m.GetLast())
	var index uint64
	var part uint32
	for {
		for _, e := range v.Events(m.GetKind(), m.GetObject(), last) {
			if e.GetIndex() < index || e.GetIndex() == index && e.GetPart() <= part {
				continue
			}
			index, part = e.GetIndex(), e.GetPart()
			if err := stream.Send(e); err != nil {
				return err
			}
		}
		last = 0
		if !m.GetFollow() {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-v.Changed():
		}
		l, err := a.replicated()
		if err != nil {
			return err
		}
		v = l.State().View()
	}
}
