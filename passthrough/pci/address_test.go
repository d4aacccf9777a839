package pci

import (
	"errors"
	"slices"
	"testing"
)

func TestParseAddress(t *testing.T) {
	for _, c := range []struct {
		in, want string
	}{
		{"0000:65:00.0", "0000:65:00.0"},
		{"00000000:65:00.0", "0000:65:00.0"},
		{"0000000A:C1:1F.7", "000a:c1:1f.7"},
		{"10000:01:00.0", "10000:01:00.0"},
		{"FFFFFFFF:FF:1F.7", "ffffffff:ff:1f.7"},
		{"65:00.0", "0000:65:00.0"},
	} {
		a, err := ParseAddress(c.in)
		if err != nil || a.String() != c.want {
			t.Errorf("%q: %v, %v; want %s", c.in, a, err, c.want)
		}
	}
	for _, in := range []string{
		"", "65:00", "0000:65:00", "0000:65:00.8", "0000:65:20.0", "000:65:00.0", "000000000:65:00.0", "0000:6:00.0", "0000:65:0.0",
		"0000:65:00.00", "0000:65:00.0 ", " 0000:65:00.0", "+000:65:00.0", "0000:+5:00.0", "0000:65:00.-", "0000:65:00.0.0", "0:0000:65:00.0", "0x00:65:00.0", "g000:65:00.0",
	} {
		if a, err := ParseAddress(in); !errors.Is(err, ErrAddress) {
			t.Errorf("%q was taken for %v (%v)", in, a, err)
		}
	}
}

func TestAddressesAreOrdered(t *testing.T) {
	want := []string{"0000:02:00.0", "0000:10:00.0", "0000:10:00.1", "0000:10:01.0", "0001:00:00.0"}
	var got []Address
	for _, i := range []int{3, 1, 4, 0, 2} {
		a, err := ParseAddress(want[i])
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, a)
	}
	slices.SortFunc(got, Address.Compare)
	for i, a := range got {
		if a.String() != want[i] {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}

func FuzzParseAddress(f *testing.F) {
	for _, s := range []string{"0000:65:00.0", "00000000:65:00.0", "65:00.0", "10000:e1:1f.7", ":::..", "0000:65:00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParseAddress(s)
		if err != nil {
			if a != (Address{}) {
				t.Fatalf("%q: an address with an error", s)
			}
			return
		}
		again, err := ParseAddress(a.String())
		if err != nil || again != a {
			t.Fatalf("%q became %v and then %v (%v)", s, a, again, err)
		}
	})
}
