package size

import (
	"testing"

	"pgregory.net/rapid"
)

func TestParse(t *testing.T) {
	for in, want := range map[string]uint64{
		"0": 0, "4096": 4096, "1GiB": GiB, "1.5 GiB": GiB + GiB/2, "512m": 512 * MiB, "2T": 2 * TiB, "7 B": 7, "3kb": 3 * KiB,
	} {
		if got, err := Parse(in); err != nil || got != want {
			t.Errorf("Parse(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "GiB", "-1", "1 parsec", "1e30GiB", "NaN", "Inf", "1..2"} {
		if got, err := Parse(in); err == nil {
			t.Errorf("Parse(%q) = %d, want an error", in, got)
		}
	}
}

func TestWhatFormatWritesParseReads(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Uint64Range(0, 1<<50).Draw(t, "n")
		got, err := Parse(Format(n))
		if err != nil {
			t.Fatal(err)
		}
		if diff := max(got, n) - min(got, n); diff > n/10 {
			t.Fatalf("%d became %d by way of %q", n, got, Format(n))
		}
	})
}
