package wire

import (
	"reflect"
	"testing"
)

// FuzzDecode decodes the fields of every operation, from aligned and unaligned memory. What
// is accepted means the same when it is encoded again, and lists have no more elements than
// there are bytes for.
func FuzzDecode(f *testing.F) {
	for op := range opCount {
		m := New(op)
		if m == nil {
			continue
		}
		v := reflect.ValueOf(m).Elem()
		for i := range v.NumField() {
			switch x := v.Field(i); x.Kind() {
			case reflect.Slice:
				x.Set(reflect.MakeSlice(x.Type(), 3, 3))
			case reflect.Int32:
				x.SetInt(-7)
			default:
				x.SetUint(uint64(i) + 1)
			}
		}
		f.Add(uint16(op), m.Append(nil))
	}
	f.Fuzz(func(t *testing.T, op uint16, in []byte) {
		m := New(Op(op))
		if m == nil {
			if Op(op) < opCount && Op(op) != OpPad {
				t.Fatalf("%s has no request", Op(op))
			}
			return
		}
		shifted := append(make([]byte, 1, len(in)+1), in...)[1:]
		other := New(Op(op))
		err, err2 := m.Decode(in), other.Decode(shifted)
		if (err == nil) != (err2 == nil) {
			t.Fatalf("%s: %v, and elsewhere in memory %v", m.Op(), err, err2)
		}
		if err != nil {
			return
		}
		if !reflect.DeepEqual(m, other) {
			t.Fatalf("%+v\nelsewhere in memory\n%+v", m, other)
		}
		out := m.Append(nil)
		if len(out) > len(in) {
			t.Fatalf("%s: %d bytes were read from %d", m.Op(), len(out), len(in))
		}
		again := New(Op(op))
		if err := again.Decode(out); err != nil || !reflect.DeepEqual(m, again) {
			t.Fatalf("%+v\nagain\n%+v (%v)", m, again, err)
		}
	})
}
