// Package fuzz has the fuzz target of the application's library, which is C:
// what it takes from its executor. make fuzz-c runs it.
package fuzz

import (
	"testing"

	"github.com/gpuctl/gpuctl/internal/testkit"
)

// Each of these once made the library read or write where it must not: a
// mapping whose rows end outside of the arena, pixels larger than the
// application's memory has room for, a description that ends early, twice.
func TestAHostileExecutorsRepliesDoNotTouchTheApplicationsMemory(t *testing.T) {
	testkit.Replay(t, 4, "GPUCTL_QUIET=1")
}
