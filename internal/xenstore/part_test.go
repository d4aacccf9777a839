package xenstore

import "testing"

func FuzzParsePart(f *testing.F) {
	for _, s := range []string{"1\x00a\x00bc\x00", "1\x00a\x00\x00", "1\x00\x00", "1\x00", "", "\x00\x00", "1"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := parsePart(data)
		if err != nil {
			return
		}
		end := 0
		if p.last {
			end = 1
		}
		if len(p.generation)+1+p.size+end != len(data) {
			t.Fatalf("%q: %+v takes another number of bytes", data, p)
		}
		for _, name := range p.names {
			if name == "" {
				t.Fatalf("%q: an empty name", data)
			}
		}
	})
}
