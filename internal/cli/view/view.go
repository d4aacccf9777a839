package view

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Object has a message's fields, in the order of the .proto file.
type Object []Member

// Map has a map's entries, sorted by key. Its JSON is that of an object.
type Map []Member

// MarshalJSON writes the entries in order.
func (m Map) MarshalJSON() ([]byte, error) { return Object(m).MarshalJSON() }

// Member is one field. Its value is a bool, string, int64, uint64, float64,
// Object, Map, []any or nil.
type Member struct {
	Name  string
	Value any
}

// MarshalJSON writes the fields in order.
func (o Object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		for j, v := range []any{m.Name, m.Value} {
			if j > 0 {
				b.WriteByte(':')
			}
			data, err := json.Marshal(v)
			if err != nil {
				return nil, err
			}
			b.Write(data)
		}
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// Get returns the value of a field, or nil.
func (o Object) Get(name string) any {
	for _, m := range o {
		if m.Name == name {
			return m.Value
		}
	}
	return nil
}

// Of converts a message. All fields are included, whether set or not, except unset
// messages and unset optional fields.
func Of(m proto.Message) Object {
	if m == nil {
		return Object{}
	}
	return object(m.ProtoReflect())
}

// List converts messages. It never returns nil.
func List[M proto.Message](all []M) []Object {
	out := make([]Object, 0, len(all))
	for _, m := range all {
		out = append(out, Of(m))
	}
	return out
}

func object(m protoreflect.Message) Object {
	out := Object{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.HasPresence() && !m.Has(f) {
			continue
		}
		out = append(out, Member{f.TextName(), field(f, m.Get(f))})
	}
	return out
}

func field(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch {
	case f.IsMap():
		out := Map{}
		v.Map().Range(func(k protoreflect.MapKey, e protoreflect.Value) bool {
			out = append(out, Member{k.String(), single(f.MapValue(), e)})
			return true
		})
		slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
		return out
	case f.IsList():
		out := make([]any, v.List().Len())
		for i := range out {
			out[i] = single(f, v.List().Get(i))
		}
		return out
	}
	return single(f, v)
}

func single(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return v.Bool()
	case protoreflect.EnumKind:
		return enum(f.Enum(), v.Enum())
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind,
		protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return v.Int()
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind, protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return v.Uint()
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		if n := v.Float(); !math.IsNaN(n) && !math.IsInf(n, 0) {
			return n
		}
		return nil // JSON cannot represent it
	case protoreflect.BytesKind:
		return hex.EncodeToString(v.Bytes())
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return object(v.Message())
	default: // strings
		return v.String()
	}
}

// Word returns an enum's value as a word: HOST_STATE_READY is ready, and the unspecified
// value is empty.
func Word(e protoreflect.Enum) string { return enum(e.Descriptor(), e.Number()) }

func enum(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := d.Values().ByNumber(n)
	if v == nil {
		return strconv.Itoa(int(n)) // a value of a newer hostd
	}
	return word(d, v)
}

func word(d protoreflect.EnumDescriptor, v protoreflect.EnumValueDescriptor) string {
	prefix := strings.TrimSuffix(string(d.Values().Get(0).Name()), "UNSPECIFIED")
	if text := strings.TrimPrefix(string(v.Name()), prefix); text != "UNSPECIFIED" {
		return strings.ToLower(text)
	}
	return ""
}

// Words returns all words of an enum.
func Words(d protoreflect.EnumDescriptor) []string {
	var out []string
	for i := range d.Values().Len() {
		if w := word(d, d.Values().Get(i)); w != "" {
			out = append(out, w)
		}
	}
	return out
}
