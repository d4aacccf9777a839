package suggest

import (
	"slices"
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
