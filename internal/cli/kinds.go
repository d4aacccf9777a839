package cli

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/suggest"
)

// kind describes a kind of objects in the cluster's inventory.
type kind struct {
	kind    clusterv1.Kind
	one     string
	many    string
	short   []string // other names
	what    string
	key     protoreflect.Name // the field that contains the object's name
	message proto.Message
	columns []column
	about   func(proto.Message) string // description for completion
}

func (a *app) kinds() []kind {
	return []kind{
		{clusterv1.Kind_KIND_HOST, "host", "hosts", []string{"h"}, "machines with a hostd", "name", &clusterv1.Host{}, a.hostColumns(), about(func(h *clusterv1.Host) string { return view.Word(h.GetState()) + ", " + h.GetAddress() })},
		{clusterv1.Kind_KIND_GPU, "gpu", "gpus", []string{"g"}, "GPUs of all hosts", "id", &clusterv1.GPU{}, a.gpuColumns(), about(func(g *clusterv1.GPU) string { return g.GetModel() + ", " + clusterGPUState(g) })},
		{clusterv1.Kind_KIND_MODEL, "model", "models", []string{"mo"}, "models of GPU, with their order", "name", &clusterv1.Model{}, a.modelColumns(), about(func(m *clusterv1.Model) string { return fmt.Sprintf("%d of %d free", m.GetFree(), m.GetGpus()) })},
		{clusterv1.Kind_KIND_VGPU, "vgpu", "vgpus", []string{"v"}, "slices of GPUs that are in use", "id", &clusterv1.VGPU{}, a.vgpuColumns(), about(func(v *clusterv1.VGPU) string { return view.Word(v.GetKind()) + ", " + view.Word(v.GetResidence()) })},
		{clusterv1.Kind_KIND_CLAIM, "claim", "claims", []string{"c"}, "what VMs and sessions need", "id", &clusterv1.Claim{}, a.claimColumns(), about(func(c *clusterv1.Claim) string { return view.Word(c.GetState()) + " " + c.GetHolder() })},
		{clusterv1.Kind_KIND_ASSIGNMENT, "assignment", "assignments", []string{"as"}, "claims bound to slices of GPUs", "id", &clusterv1.Assignment{}, a.assignmentColumns(), about(func(s *clusterv1.Assignment) string { return s.GetGpu() + ", " + view.Word(s.GetResidence()) })},
		{clusterv1.Kind_KIND_SESSION, "session", "sessions", []string{"s"}, "applications that use a GPU", "id", &clusterv1.Session{}, a.sessionColumns(), about(func(s *clusterv1.Session) string { return s.GetCommand() + " on " + strings.Join(s.GetGpus(), ",") })},
		{clusterv1.Kind_KIND_MIGRATION, "migration", "migrations", []string{"mi"}, "long operations on VMs and sessions", "id", &clusterv1.Migration{}, a.migrationColumns(), about(func(m *clusterv1.Migration) string {
			return m.GetVerb() + " of " + movedObject(m) + ", " + view.Word(m.GetState())
		})},
		{clusterv1.Kind_KIND_RESERVATION, "reservation", "reservations", []string{"r"}, "capacity held for an operation that has not decided", "id", &clusterv1.Reservation{}, a.reservationColumns(), about(func(r *clusterv1.Reservation) string { return r.GetGpu() + " for " + r.GetOwner() })},
		{clusterv1.Kind_KIND_LINK, "link", "links", []string{"l"}, "what hosts have measured of the network between them", "id", &clusterv1.Link{}, a.linkColumns(), about(func(l *clusterv1.Link) string { return linkRate(l) + ", " + linkRTT(l) })},
	}
}

func about[T proto.Message](f func(T) string) func(proto.Message) string {
	return func(m proto.Message) string {
		if t, ok := m.(T); ok {
			return f(t)
		}
		return ""
	}
}

// kind finds a kind by its singular, plural or short name.
func (a *app) kind(name string) (kind, error) {
	var names []string
	for _, k := range a.kinds() {
		for _, n := range append([]string{k.one, k.many}, k.short...) {
			if strings.EqualFold(n, name) {
				return k, nil
			}
		}
		names = append(names, k.many)
	}
	return kind{}, cmdutil.Usage(fmt.Errorf("there is no kind %q%s; the kinds are %s", name, suggest.Hint(name, names), strings.Join(names, ", ")))
}

// must returns a kind that exists.
func (a *app) must(kind clusterv1.Kind) kind {
	for _, k := range a.kinds() {
		if k.kind == kind {
			return k
		}
	}
	return kindless()
}

// kindless returns a kind for objects that only a newer hostd knows.
func kindless() kind { return kind{one: "object", many: "objects", key: "id"} }

// name returns an object's name.
func (k kind) name(m proto.Message) string {
	if m == nil {
		return ""
	}
	f := m.ProtoReflect().Descriptor().Fields().ByName(k.key)
	if f == nil {
		return ""
	}
	return m.ProtoReflect().Get(f).String()
}

// flat returns the fields of expressions whose path in the message differs from their
// name, as pairs of name and path.
func (k kind) flat() [][2]string {
	switch k.kind {
	case clusterv1.Kind_KIND_GPU:
		out := [][2]string{{"memory", "limits.global_memory"}}
		for _, limit := range []string{
			"max_alloc", "local_memory", "max_work_group_size", "compute_units", "clock_mhz", "images", "fp64", "version", "extensions",
		} {
			out = append(out, [2]string{limit, "limits." + limit})
		}
		return out
	case clusterv1.Kind_KIND_SESSION:
		return [][2]string{{"gpu", "gpus"}}
	default:
		return nil
	}
}

// fields returns the fields that expressions and --sort-by can use.
func (k kind) fields() []view.Field {
	d := k.message.ProtoReflect().Descriptor()
	fields := view.Fields(d)
	for _, f := range k.flat() {
		if field, ok := view.At(d, f[0], f[1]); ok {
			fields = append(fields, field)
		}
	}
	switch k.kind {
	case clusterv1.Kind_KIND_HOST:
		fields = append(fields, view.Field{Name: "nic_speed", Type: "int"}) // speed of the fastest interface
	case clusterv1.Kind_KIND_GPU:
		fields = append(fields, view.Field{Name: "processes", Type: "int", Path: "processes"}, view.Field{Name: "profiles", Type: "list(string)", Path: "profiles"})
		fields = slices.DeleteFunc(fields, func(f view.Field) bool { return f.Name == "runtime_key" })
	case clusterv1.Kind_KIND_SESSION:
		for i := range fields {
			if fields[i].Name == "gpu" {
				fields[i].Type = "string" // all of them, separated by commas
			}
		}
	case clusterv1.Kind_KIND_MIGRATION:
		fields = slices.DeleteFunc(fields, func(f view.Field) bool { return f.Name == "done" })
		fields = append(fields, view.Field{Name: "lost", Type: "int"}) // sessions of the VM that were lost on the way
	}
	slices.SortFunc(fields, func(x, y view.Field) int { return strings.Compare(x.Name, y.Name) })
	return fields
}

// fieldsHelp lists the fields that an expression can use.
func (k kind) fieldsHelp() string {
	width := 0
	for _, f := range k.fields() {
		width = max(width, len(f.Name))
	}
	var b strings.Builder
	for _, f := range k.fields() {
		text := f.Type
		if f.Words != "" {
			text += ": " + f.Words
		}
		fmt.Fprintf(&b, "  %-*s  %s\n", width, f.Name, text)
	}
	return b.String()
}

// inner returns the object in its envelope; nil if its kind is unknown.
func inner(o *clusterv1.Object) proto.Message {
	m := o.ProtoReflect()
	f := m.WhichOneof(m.Descriptor().Oneofs().Get(0))
	if f == nil {
		return nil
	}
	return m.Get(f).Message().Interface()
}

// kindOf returns the kind of the object in an envelope.
func (a *app) kindOf(m proto.Message) kind {
	for _, k := range a.kinds() {
		if m != nil && k.message.ProtoReflect().Descriptor() == m.ProtoReflect().Descriptor() {
			return k
		}
	}
	return kindless()
}

// splitName parses KIND/NAME.
func (a *app) splitName(arg string) (kind, string, error) {
	word, name, ok := strings.Cut(arg, "/")
	if !ok || name == "" {
		return kind{}, "", cmdutil.Usage(fmt.Errorf("object %q: want KIND/NAME, as gpu/h1/0", arg))
	}
	k, err := a.kind(word)
	return k, name, err
}
