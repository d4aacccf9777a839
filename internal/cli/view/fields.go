package view

import (
	"cmp"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Field is a field that expressions and --sort-by can use.
type Field struct {
	Name  string
	Type  string // bool, int, string, double, list(…), map(…) or timestamp
	Words string // for an enum: the possible strings
	Path  string // path of its value in the result of Of, dotted; empty: it is not there
}

// Fields returns the fields that expressions can use of a message: those that are not
// messages themselves. Fields with a time have no unit in their name.
func Fields(d protoreflect.MessageDescriptor) []Field {
	var out []Field
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		if f.Kind() == protoreflect.MessageKind && !f.IsMap() {
			continue
		}
		out = append(out, describe(f, f.TextName()))
	}
	return out
}

// At returns the field at a dotted path, with a name of its own. ok reports whether it
// exists.
func At(d protoreflect.MessageDescriptor, name, path string) (field Field, ok bool) {
	parts := strings.Split(path, ".")
	for _, part := range parts[:len(parts)-1] {
		f := d.Fields().ByTextName(part)
		if f == nil || f.Message() == nil {
			return Field{}, false
		}
		d = f.Message()
	}
	f := d.Fields().ByTextName(parts[len(parts)-1])
	if f == nil {
		return Field{}, false
	}
	field = describe(f, path)
	field.Name = name
	return field, true
}

func describe(f protoreflect.FieldDescriptor, path string) Field {
	name, moment := strings.CutSuffix(f.TextName(), "_unix_ms")
	switch {
	case f.IsMap():
		return Field{Name: name, Path: path, Type: fmt.Sprintf("map(%s, %s)", typeName(f.MapKey()), typeName(f.MapValue()))}
	case f.IsList():
		return Field{Name: name, Path: path, Type: "list(" + typeName(f) + ")"}
	case moment:
		return Field{Name: name, Path: path, Type: "timestamp"}
	case f.Enum() != nil:
		return Field{Name: name, Path: path, Type: "string", Words: strings.Join(Words(f.Enum()), ", ")}
	}
	return Field{Name: name, Path: path, Type: typeName(f)}
}

func typeName(f protoreflect.FieldDescriptor) string {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return "bool"
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.EnumKind:
		return "string"
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return "double"
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return "object"
	default:
		return "int"
	}
}

// Value returns the value at a dotted path in a message; nil if it is not set.
func Value(m proto.Message, path string) any {
	var v any = Of(m)
	for part := range strings.SplitSeq(path, ".") {
		o, ok := v.(Object)
		if !ok {
			return nil
		}
		v = o.Get(part)
	}
	return v
}

// Compare compares two values of one field. Unset values come first, and lists of objects
// are compared by their length.
func Compare(a, b any) int {
	if a == nil || b == nil {
		return cmp.Compare(set(a), set(b))
	}
	switch x := a.(type) {
	case int64:
		if y, ok := b.(int64); ok {
			return cmp.Compare(x, y)
		}
	case uint64:
		if y, ok := b.(uint64); ok {
			return cmp.Compare(x, y)
		}
	case float64:
		if y, ok := b.(float64); ok {
			return cmp.Compare(x, y)
		}
	case bool:
		if y, ok := b.(bool); ok {
			return cmp.Compare(set(x), set(y))
		}
	case []any:
		if y, ok := b.([]any); ok {
			return compareLists(x, y)
		}
	}
	return strings.Compare(fmt.Sprint(a), fmt.Sprint(b))
}

func compareLists(a, b []any) int {
	for i := range min(len(a), len(b)) {
		if _, object := a[i].(Object); object {
			break
		}
		if n := Compare(a[i], b[i]); n != 0 {
			return n
		}
	}
	return cmp.Compare(len(a), len(b))
}

func set(v any) int {
	if v == nil || v == false {
		return 0
	}
	return 1
}
