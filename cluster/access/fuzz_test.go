package access

import (
	"encoding/json"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// FuzzSummary sums up requests of every type. A summary is short, can be
// written, and has no secret in it, wherever in the message it is.
func FuzzSummary(f *testing.F) {
	var types []protoreflect.MessageType
	for _, file := range []protoreflect.FileDescriptor{
		clusterv1.File_gpuctl_cluster_v1_service_proto, clusterv1.File_gpuctl_cluster_v1_command_proto, gpuctlv1.File_gpuctl_v1_host_proto, gpuctlv1.File_gpuctl_v1_migrate_proto,
	} {
		for i := range file.Messages().Len() {
			typ, err := protoregistry.GlobalTypes.FindMessageByName(file.Messages().Get(i).FullName())
			if err != nil {
				f.Fatal(err)
			}
			types = append(types, typ)
		}
	}
	const planted = "c0ffee-of-nobody-else"
	for i, typ := range types { // each with one of everything in it
		m := typ.New()
		fill(m, "text", 3)
		b, err := proto.Marshal(m.Interface())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint16(i), b)
	}
	f.Fuzz(func(t *testing.T, which uint16, in []byte) {
		m := types[int(which)%len(types)].New().Interface()
		if proto.Unmarshal(in, m) != nil {
			return
		}
		hide(m.ProtoReflect(), planted)
		b, err := json.Marshal(summary(m))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), planted) {
			t.Fatalf("a secret of %s is in its summary: %s", m.ProtoReflect().Descriptor().FullName(), b)
		}
		// Each field has maxItems texts at most; JSON writes a byte as six.
		if most := maxFields * 2 * maxItems * (6*maxText + 64); len(b) > most {
			t.Fatalf("%d bytes of summary", len(b))
		}
		if name := object(m); len(name) > maxText+len("…") {
			t.Fatalf("an object's name of %d bytes", len(name))
		}
	})
}

// hide writes the text into every field that is set and holds a secret.
func hide(m protoreflect.Message, text string) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			if fd.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool { hide(v.Message(), text); return true })
			}
		case fd.IsList():
			for i := range v.List().Len() {
				switch {
				case fd.Message() != nil:
					hide(v.List().Get(i).Message(), text)
				case secretName(fd):
					v.List().Set(i, value(fd, text))
				}
			}
		case fd.Message() != nil:
			hide(v.Message(), text)
		case secretName(fd):
			m.Set(fd, value(fd, text))
		}
		return true
	})
}

// secretName is said here again, so that a field that secret no longer knows is noticed.
func secretName(fd protoreflect.FieldDescriptor) bool {
	name := string(fd.Name())
	return fd.Kind() == protoreflect.BytesKind || fd.Kind() == protoreflect.StringKind &&
		(name == "token" || name == "secret" || name == "password" || strings.HasSuffix(name, "_key"))
}

func value(fd protoreflect.FieldDescriptor, text string) protoreflect.Value {
	if fd.Kind() == protoreflect.BytesKind {
		return protoreflect.ValueOfBytes([]byte(text))
	}
	return protoreflect.ValueOfString(text)
}

// fill sets every text and message.
func fill(m protoreflect.Message, text string, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		switch fd := fields.Get(i); {
		case fd.IsMap():
		case fd.Message() != nil && depth > 0 && fd.IsList():
			fill(m.Mutable(fd).List().AppendMutable().Message(), text, depth-1)
		case fd.Message() != nil && depth > 0:
			fill(m.Mutable(fd).Message(), text, depth-1)
		case fd.Kind() == protoreflect.StringKind || fd.Kind() == protoreflect.BytesKind:
			if fd.IsList() {
				m.Mutable(fd).List().Append(value(fd, text))
			} else {
				m.Set(fd, value(fd, text))
			}
		}
	}
}
