package access

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuctl/gpuctl/internal/excerpt"
)

const (
	maxText   = 128
	maxDepth  = 3
	maxItems  = 8
	maxFields = 64
	hidden    = "(hidden)"
)

// secret reports whether a field must not be in the trail.
func secret(fd protoreflect.FieldDescriptor) bool {
	if fd.Kind() == protoreflect.BytesKind {
		return true
	}
	name := string(fd.Name())
	if fd.Kind() != protoreflect.StringKind || name == "token_id" {
		return false // a number with the name token is a fencing token
	}
	return slices.ContainsFunc([]string{"token", "secret", "key", "password", "csr"}, func(part string) bool { return strings.Contains(name, part) })
}

// summary returns a message's fields for the trail, without secrets.
func summary(m proto.Message) map[string]any {
	if m == nil {
		return nil
	}
	left := maxFields
	return summarize(m.ProtoReflect(), maxDepth, &left)
}

func summarize(m protoreflect.Message, depth int, left *int) map[string]any {
	if !m.IsValid() {
		return nil
	}
	out := map[string]any{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if !m.Has(fd) {
			continue
		}
		if *left--; *left < 0 {
			out["…"] = "more"
			break
		}
		name := string(fd.Name())
		switch v := m.Get(fd); {
		case fd.IsMap():
			out[name] = summarizeMap(fd, v.Map())
		case fd.IsList():
			out[name] = summarizeList(fd, v.List(), depth, left)
		default:
			out[name] = scalar(fd, v, depth, left)
		}
	}
	return out
}

func summarizeMap(fd protoreflect.FieldDescriptor, m protoreflect.Map) any {
	if m.Len() > maxItems || fd.MapValue().Message() != nil || secret(fd.MapValue()) {
		return fmt.Sprintf("%d entries", m.Len())
	}
	out := map[string]any{}
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		out[excerpt.Of(k.String(), maxText)] = scalar(fd.MapValue(), v, 0, nil)
		return true
	})
	return out
}

func summarizeList(fd protoreflect.FieldDescriptor, l protoreflect.List, depth int, left *int) any {
	if secret(fd) {
		return hidden
	}
	var out []any
	for i := range min(l.Len(), maxItems) {
		out = append(out, scalar(fd, l.Get(i), depth, left))
	}
	if more := l.Len() - maxItems; more > 0 {
		out = append(out, fmt.Sprintf("%d more", more))
	}
	return out
}

func scalar(fd protoreflect.FieldDescriptor, v protoreflect.Value, depth int, left *int) any {
	switch {
	case fd.Message() != nil:
		if depth <= 1 {
			return "…"
		}
		return summarize(v.Message(), depth-1, left)
	case secret(fd):
		return hidden
	case fd.Kind() == protoreflect.StringKind:
		return excerpt.Of(v.String(), maxText)
	case fd.Kind() == protoreflect.EnumKind:
		if e := fd.Enum().Values().ByNumber(v.Enum()); e != nil {
			return string(e.Name())
		}
		return int32(v.Enum())
	case fd.Kind() == protoreflect.DoubleKind || fd.Kind() == protoreflect.FloatKind:
		return fmt.Sprint(v.Float()) // JSON has no NaN
	}
	return v.Interface()
}

// object returns the name of the object that a call is about.
func object(m proto.Message) string {
	if m == nil {
		return ""
	}
	r := m.ProtoReflect()
	if !r.IsValid() {
		return ""
	}
	for _, name := range []protoreflect.Name{"session", "gpu", "model", "claim", "host", "token_id", "id", "name"} {
		fd := r.Descriptor().Fields().ByName(name)
		switch {
		case fd == nil || !r.Has(fd) || fd.IsList() || fd.IsMap():
		case fd.Kind() == protoreflect.StringKind:
			return excerpt.Of(r.Get(fd).String(), maxText)
		case fd.Message() != nil:
			return object(r.Get(fd).Message().Interface())
		}
	}
	return ""
}
