package clitest

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1/clusterv1connect"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// Cluster is the fake. Make one with New.
type Cluster struct {
	clusterv1connect.UnimplementedClusterServiceHandler

	compile Compile

	mu         sync.Mutex
	index      uint64
	next       uint64 // last number used in assignments and tokens
	objects    map[clusterv1.Kind]map[string]proto.Message
	log        []change
	events     []*clusterv1.Event
	tokens     map[string]*clusterv1.JoinToken
	identities map[string]*clusterv1.Identity
	changed    chan struct{} // closed at the next change
	dropped    chan struct{} // closed by Drop

	joined bool
	leader string
	queue  clusterv1.QueuePolicy
	role   clusterv1.Role
}

type change struct {
	index   uint64
	kind    clusterv1.Kind
	name    string
	object  proto.Message
	deleted bool
}

// New returns a cluster with one host, h1, which leads and has no GPU. The caller is an
// administrator.
func New(compile Compile) *Cluster {
	c := &Cluster{
		compile: compile,
		objects: map[clusterv1.Kind]map[string]proto.Message{}, tokens: map[string]*clusterv1.JoinToken{}, identities: map[string]*clusterv1.Identity{},
		changed: make(chan struct{}), dropped: make(chan struct{}), joined: true, leader: "h1", role: clusterv1.Role_ROLE_ADMIN,
	}
	c.Put(&clusterv1.Host{Name: "h1", Id: "id-h1", Address: "h1:7480", State: clusterv1.HostState_HOST_STATE_READY})
	return c
}

// Handler serves ClusterService.
func (c *Cluster) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(clusterv1connect.NewClusterServiceHandler(c))
	return mux
}

// Put stores an object of any kind, and increments its revision.
func (c *Cluster) Put(m proto.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.put(proto.Clone(m))
}

// Delete deletes an existing object.
func (c *Cluster) Delete(kind clusterv1.Kind, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.delete(kind, name)
}

// SetRole sets the caller's role.
func (c *Cluster) SetRole(r clusterv1.Role) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.role = r
}

// SetLeader sets the leader; empty: there is none.
func (c *Cluster) SetLeader(host string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leader = host
}

// SetJoined sets whether the host is in a cluster.
func (c *Cluster) SetJoined(joined bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.joined = joined
}

// Drop breaks all streams, as a daemon does that stops.
func (c *Cluster) Drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.dropped)
	c.dropped = make(chan struct{})
}

// AddIdentity adds an identity.
func (c *Cluster) AddIdentity(i *clusterv1.Identity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.identities[i.GetId()] = proto.CloneOf(i)
}

// KindOf returns the kind of a message.
func KindOf(m proto.Message) clusterv1.Kind {
	switch m.(type) {
	case *clusterv1.Host:
		return clusterv1.Kind_KIND_HOST
	case *clusterv1.GPU:
		return clusterv1.Kind_KIND_GPU
	case *clusterv1.Model:
		return clusterv1.Kind_KIND_MODEL
	case *clusterv1.VGPU:
		return clusterv1.Kind_KIND_VGPU
	case *clusterv1.Claim:
		return clusterv1.Kind_KIND_CLAIM
	case *clusterv1.Assignment:
		return clusterv1.Kind_KIND_ASSIGNMENT
	case *clusterv1.Session:
		return clusterv1.Kind_KIND_SESSION
	case *clusterv1.Migration:
		return clusterv1.Kind_KIND_MIGRATION
	case *clusterv1.Reservation:
		return clusterv1.Kind_KIND_RESERVATION
	case *clusterv1.Link:
		return clusterv1.Kind_KIND_LINK
	}
	panic(fmt.Sprintf("%T is of no kind", m))
}

// Name returns the value of the field that names an object of its kind.
func Name(m proto.Message) string {
	switch m := m.(type) {
	case *clusterv1.Host:
		return m.GetName()
	case *clusterv1.Model:
		return m.GetName()
	case interface{ GetId() string }:
		return m.GetId()
	}
	panic(fmt.Sprintf("%T has no name", m))
}

func envelope(m proto.Message) *clusterv1.Object {
	o := &clusterv1.Object{}
	fields := o.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); f.Message() == m.ProtoReflect().Descriptor() {
			o.ProtoReflect().Set(f, protoreflect.ValueOfMessage(proto.Clone(m).ProtoReflect()))
		}
	}
	return o
}

func (c *Cluster) put(m proto.Message) {
	c.index++
	m.ProtoReflect().Set(m.ProtoReflect().Descriptor().Fields().ByName("revision"), protoreflect.ValueOfUint64(c.index))
	kind := KindOf(m)
	if c.objects[kind] == nil {
		c.objects[kind] = map[string]proto.Message{}
	}
	c.objects[kind][Name(m)] = m
	c.tell(change{c.index, kind, Name(m), m, false})
}

func (c *Cluster) delete(kind clusterv1.Kind, name string) {
	old := c.objects[kind][name]
	if old == nil {
		panic(fmt.Sprintf("there is no %v %s to delete", kind, name))
	}
	c.index++
	delete(c.objects[kind], name)
	c.tell(change{c.index, kind, name, old, true})
}

func (c *Cluster) tell(ch change) {
	c.log = append(c.log, ch)
	close(c.changed)
	c.changed = make(chan struct{})
}

// note records an event.
func (c *Cluster) note(kind clusterv1.Kind, object, what, message string, about ...string) {
	c.index++
	c.events = append(c.events, &clusterv1.Event{
		Index: c.index, UnixMs: time.Now().UnixMilli(), Actor: "ada", Kind: kind, Object: object, Type: what, Message: message, About: about,
	})
	close(c.changed)
	c.changed = make(chan struct{})
}

// sorted returns a kind's objects, sorted by name.
func (c *Cluster) sorted(kind clusterv1.Kind) []proto.Message {
	var out []proto.Message
	for _, name := range slices.Sorted(maps.Keys(c.objects[kind])) {
		out = append(out, c.objects[kind][name])
	}
	return out
}

func all[T proto.Message](c *Cluster, kind clusterv1.Kind) []T {
	var out []T
	for _, m := range c.sorted(kind) {
		if t, ok := m.(T); ok {
			out = append(out, t)
		}
	}
	return out
}

// get returns a copy of an object, which may be changed and stored again.
func get[T proto.Message](c *Cluster, kind clusterv1.Kind, name string) (T, error) {
	if m, ok := c.objects[kind][name].(T); ok {
		return proto.CloneOf(m), nil
	}
	var none T
	return none, reason.Coded(reason.Errorf(reason.NotFound, "there is no %s %q", kindWord(kind), name).On(kindWord(kind), name))
}

func fail(code connect.Code, format string, args ...any) error {
	return connect.NewError(code, fmt.Errorf(format, args...))
}

var errNoLeader = reason.New(reason.NoLeader, "the cluster has no leader")

// may returns an error if there is no cluster, no leader although one is needed, or the
// role does not suffice.
func (c *Cluster) may(stale bool, least clusterv1.Role) error {
	switch {
	case !c.joined:
		return reason.Coded(reason.Errorf(reason.NotJoined, "not a member of a cluster"))
	case c.role < least:
		return reason.Coded(reason.Errorf(reason.RoleTooLow, "ada is a %s, and this takes a %s", roleWord(c.role), roleWord(least)))
	case !stale && c.leader == "":
		return reason.Coded(errNoLeader)
	}
	return nil
}
