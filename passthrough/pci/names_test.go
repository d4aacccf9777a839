package pci

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func FuzzParseNames(f *testing.F) {
	f.Add("10de  NVIDIA\n\t1eb1  Quadro\n\t\t1028 129f  Dell\nC 03  x\n")
	f.Add("\t\t\t\n\n#\n10de")
	f.Fuzz(func(t *testing.T, s string) {
		want := map[id]bool{{vendor: 0x10de}: true, {vendor: 0x10de, device: 0x1eb1}: true, {0x10de, 0x1eb1, 0x1028, 0x129f}: true}
		for at, name := range parseNames(strings.NewReader(s), want) {
			if !want[at] || len(name) > maxName || !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
				t.Fatalf("%v: %q", at, name)
			}
		}
	})
}

func FuzzParseResource(f *testing.F) {
	f.Add([]byte("0x00000000b8000000 0x00000000b8ffffff 0x0000000000040200\n"))
	f.Add([]byte("0x0 0xffffffffffffffff 0x200\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		bars, _ := parseResource(data)
		if len(bars) > 6 {
			t.Fatalf("%d BARs", len(bars))
		}
		for _, b := range bars {
			if b.Size == 0 || b.Start+b.Size-1 < b.Start {
				t.Fatalf("%+v", b)
			}
		}
	})
}
