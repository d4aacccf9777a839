package view_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
	"pgregory.net/rapid"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cli/view"
)

func TestGolden(t *testing.T) {
	g := &clusterv1.GPU{
		Id: "h1/a", Health: clusterv1.Health_HEALTH_DEGRADED, NumaNode: -1, UsedMemory: 1<<64 - 1, Cordoned: true,
		Limits: &gpuctlv1.Limits{GlobalMemory: 1 << 53}, Processes: []*clusterv1.Process{{Pid: 7, Name: "x"}},
	}
	data, err := json.Marshal(view.Of(g))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`{"id":"h1/a",`, `"health":"degraded"`, `"numa_node":-1`, `"used_memory":18446744073709551615`, `"cordoned":true`,
		`"limits":{"global_memory":9007199254740992,`, `"processes":[{"pid":7,"name":"x"}]`, `"profiles":[]`, `"uuid":""`,
	} {
		if !bytes.Contains(data, []byte(want)) {
			t.Errorf("no %s in %s", want, data)
		}
	}
	host, err := json.Marshal(view.Of(&clusterv1.Host{Labels: map[string]string{"b": "2", "a": "1"}}))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"labels":{"a":"1","b":"2"}`, `"state":""`, `"nics":[]`} {
		if !bytes.Contains(host, []byte(want)) {
			t.Errorf("no %s in %s", want, host)
		}
	}
	facts, err := json.Marshal(view.Of(&clusterv1.GPUFacts{Gpu: "a", Power: new(uint32(0))}))
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"gpu":"a","power":0,"sessions":[],"health":"","health_reason":""}`; string(facts) != want {
		t.Errorf("unset optionals: %s, want %s", facts, want)
	}
	if data, _ := json.Marshal(view.List[*clusterv1.GPU](nil)); string(data) != "[]" {
		t.Errorf("an empty list is %s", data)
	}
}

// TestSameAsProtoJSON compares the view of every message of the cluster's API,
// randomly filled, with what protobuf's own JSON says of it.
func TestSameAsProtoJSON(t *testing.T) {
	var all []protoreflect.MessageDescriptor
	protoregistry.GlobalFiles.RangeFilesByPackage("gpuctl.cluster.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Messages().Len() {
			all = append(all, f.Messages().Get(i))
		}
		return true
	})
	if len(all) < 60 {
		t.Fatalf("only %d messages", len(all))
	}
	rapid.Check(t, func(t *rapid.T) {
		d := rapid.SampledFrom(all).Draw(t, "message")
		m := dynamicpb.NewMessage(d)
		fill(t, m, 2)
		data, err := json.Marshal(view.Of(m))
		if err != nil {
			t.Fatal(err)
		}
		var got any
		decode(t, data, &got)
		ref, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var want any
		decode(t, ref, &want)
		if diff := cmp.Diff(expected(d, want), got); diff != "" {
			t.Fatalf("%s (-protojson +view):\n%s", d.Name(), diff)
		}
	})
}

func decode(t *rapid.T, data []byte, v any) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	if err := dec.Decode(v); err != nil {
		t.Fatalf("%s: %v", data, err)
	}
}

// expected turns protobuf's JSON into ours: 64-bit numbers are numbers there as
// strings, bytes base64, enums full names.
func expected(d protoreflect.MessageDescriptor, v any) any {
	in, _ := v.(map[string]any)
	out := map[string]any{}
	for name, value := range in {
		f := d.Fields().ByTextName(name)
		switch {
		case f.IsMap():
			m := map[string]any{}
			for k, e := range value.(map[string]any) {
				m[k] = one(f.MapValue(), e)
			}
			out[name] = m
		case f.IsList():
			l := []any{}
			for _, e := range value.([]any) {
				l = append(l, one(f, e))
			}
			out[name] = l
		default:
			out[name] = one(f, value)
		}
	}
	return out
}

func one(f protoreflect.FieldDescriptor, v any) any {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return expected(f.Message(), v)
	case protoreflect.BytesKind:
		data, _ := base64.StdEncoding.DecodeString(v.(string))
		return hex.EncodeToString(data)
	case protoreflect.EnumKind:
		if n, ok := v.(json.Number); ok {
			return n.String()
		}
		zero := string(f.Enum().Values().Get(0).Name())
		if v == zero {
			return ""
		}
		return strings.ToLower(strings.TrimPrefix(v.(string), strings.TrimSuffix(zero, "UNSPECIFIED")))
	case protoreflect.Int64Kind, protoreflect.Uint64Kind:
		return json.Number(v.(string))
	}
	return v
}

func fill(t *rapid.T, m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !rapid.Bool().Draw(t, "set") {
			continue
		}
		switch {
		case f.IsMap():
			for n := range rapid.IntRange(0, 2).Draw(t, "n") {
				m.Mutable(f).Map().Set(protoreflect.ValueOfString(strconv.Itoa(n)).MapKey(), protoreflect.ValueOfString(rapid.String().Draw(t, "value")))
			}
		case f.IsList():
			for range rapid.IntRange(0, 2).Draw(t, "n") {
				l := m.Mutable(f).List()
				if f.Kind() == protoreflect.MessageKind {
					e := l.NewElement()
					if depth > 0 {
						fill(t, e.Message(), depth-1)
					}
					l.Append(e)
					continue
				}
				l.Append(scalar(t, f))
			}
		case f.Kind() == protoreflect.MessageKind:
			if depth > 0 {
				fill(t, m.Mutable(f).Message(), depth-1)
			}
		default:
			m.Set(f, scalar(t, f))
		}
	}
}

func scalar(t *rapid.T, f protoreflect.FieldDescriptor) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(rapid.Bool().Draw(t, "bool"))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(rapid.IntRange(0, f.Enum().Values().Len()).Draw(t, "enum"))) // the last is unknown
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(rapid.Int32().Draw(t, "int32"))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(rapid.Int64().Draw(t, "int64"))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(rapid.Uint32().Draw(t, "uint32"))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(rapid.Uint64().Draw(t, "uint64"))
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(float64(rapid.IntRange(-1000, 1000).Draw(t, "double")) / 8)
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(rapid.String().Draw(t, "string"))
	}
	t.Fatalf("no value for a %v", f.Kind())
	return protoreflect.Value{}
}

func TestWords(t *testing.T) {
	for _, c := range []struct {
		enum protoreflect.Enum
		want string
	}{
		{clusterv1.HostState_HOST_STATE_READY, "ready"},
		{clusterv1.VGPUKind_VGPU_KIND_WHOLE, "whole"},
		{clusterv1.MigrationState_MIGRATION_STATE_ROLLED_BACK, "rolled_back"},
		{clusterv1.Kind_KIND_UNSPECIFIED, ""},
		{clusterv1.Role(42), "42"},
	} {
		if got := view.Word(c.enum); got != c.want {
			t.Errorf("%v is %q, want %q", c.enum, got, c.want)
		}
	}
}

func TestFields(t *testing.T) {
	got := map[string]view.Field{}
	for _, f := range view.Fields((&clusterv1.Host{}).ProtoReflect().Descriptor()) {
		got[f.Name] = f
	}
	for _, want := range []view.Field{
		{Name: "name", Type: "string", Path: "name"},
		{Name: "state", Type: "string", Words: "ready, draining, down", Path: "state"},
		{Name: "joined", Type: "timestamp", Path: "joined_unix_ms"},
		{Name: "labels", Type: "map(string, string)", Path: "labels"},
		{Name: "memory", Type: "int", Path: "memory"},
		{Name: "draining", Type: "bool", Path: "draining"},
	} {
		if got[want.Name] != want {
			t.Errorf("field %s is %+v, want %+v", want.Name, got[want.Name], want)
		}
	}
	if f, ok := got["nics"]; ok {
		t.Errorf("a list of messages is a field: %+v", f)
	}
	d := (&clusterv1.GPU{}).ProtoReflect().Descriptor()
	f, ok := view.At(d, "memory", "limits.global_memory")
	if want := (view.Field{Name: "memory", Type: "int", Path: "limits.global_memory"}); !ok || f != want {
		t.Errorf("memory is %+v", f)
	}
	for _, path := range []string{"limits.none", "none", "id.x", "limits.global_memory.x"} {
		if f, ok := view.At(d, "x", path); ok {
			t.Errorf("%s is %+v", path, f)
		}
	}
	if v := view.Value(&clusterv1.GPU{Limits: &gpuctlv1.Limits{GlobalMemory: 5}}, f.Path); v != uint64(5) {
		t.Errorf("memory is %v", v)
	}
	if v := view.Value(&clusterv1.GPU{}, f.Path); v != nil {
		t.Errorf("memory of no limits is %v", v)
	}
}

func TestCompare(t *testing.T) {
	for _, c := range []struct {
		a, b any
		want int
	}{
		{uint64(9), uint64(10), -1},
		{int64(-1), int64(0), -1},
		{"b", "a", 1},
		{false, true, -1},
		{nil, uint64(0), -1},
		{nil, nil, 0},
		{[]any{"a", "b"}, []any{"c"}, -1},
		{[]any{"a"}, []any{"a", "b"}, -1},
		{1.5, 1.25, 1},
		{[]any{view.Object{}, view.Object{}}, []any{view.Object{{Name: "z", Value: "z"}}}, 1},
	} {
		if got := view.Compare(c.a, c.b); got != c.want {
			t.Errorf("Compare(%v, %v) = %d, want %d", c.a, c.b, got, c.want)
		}
		if got := view.Compare(c.b, c.a); got != -c.want {
			t.Errorf("Compare(%v, %v) = %d, want %d", c.b, c.a, got, -c.want)
		}
	}
}
