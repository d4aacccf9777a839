package install

import (
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	const rest = " S 1 77 77 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 18 0 1234 1 2"
	for in, want := range map[string]string{
		"77 (libvirtd)" + rest: "libvirtd", "77 (a) b (c)" + rest: "a) b (c", "77 ()" + rest: "", "77 libvirtd" + rest: "!", "77 (libvirtd) S 1": "!",
		"77 (x) S 1 77 77 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 18 0 -4 1": "!", ")(": "!",
	} {
		name, started, ok := parseStat(in)
		if !ok {
			name = "!"
		}
		if name != want || ok && started != 12340*time.Millisecond {
			t.Errorf("%q: %q, %v, %v", in, name, started, ok)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("77 (libvirtd) S 1 77 77 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 18 0 1234 1 2")
	f.Add("1 (a) b) R 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 99999999999999999999")
	f.Fuzz(func(t *testing.T, s string) {
		if _, started, ok := parseStat(s); ok && (started < 0 || started > 200*365*24*time.Hour) {
			t.Fatalf("%q: %v", s, started)
		}
	})
}
