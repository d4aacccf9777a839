package suggest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestNames(t *testing.T) {
	among := []string{"pocl-basic", "pocl-pthread", "oclgrind", "nvidia-0"}
	for in, want := range map[string][]string{
		"oclgrnd":   {"oclgrind"},
		"basic":     {"pocl-basic"},
		"NVIDIA-1":  {"nvidia-0"},
		"something": nil,
		"":          nil,
	} {
		if got := Names(in, among); !slices.Equal(got, want) {
			t.Errorf("Names(%q) = %q, want %q", in, got, want)
		}
	}
	if got := distance("kitten", "sitting"); got != 3 {
		t.Errorf("distance = %d, want 3", got)
	}
}

// A viewer may ask for an object by a name of a megabyte, of which there may be 20000. Without
// a bound that takes many minutes, some of them under locks that hostd needs to live.
func TestANameOfAMegabyteIsComparedWithNone(t *testing.T) {
	var among []string
	for i := range 20_000 {
		among = append(among, fmt.Sprintf("host-%d/0000:65:00.0", i))
	}
	if got := Names(strings.Repeat("h", 1<<20), among); got != nil {
		t.Errorf("%q", got)
	}
	if got := Names("hots-7/0000:65:00.0", among); !slices.Contains(got, "host-7/0000:65:00.0") {
		t.Errorf("%q", got)
	}
}
