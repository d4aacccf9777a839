// Package fuzz has the fuzz target of the application's library, which is C:
// what it takes from its executor. make fuzz-c runs it.
package fuzz

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// Each of these once made the library read or write where it must not: a
// mapping whose rows end outside of the arena, pixels larger than the
// application's memory has room for, a description that ends early, twice.
func TestAHostileExecutorsRepliesDoNotTouchTheApplicationsMemory(t *testing.T) {
	target := filepath.Join(t.TempDir(), "replies")
	if out, err := exec.Command("./build.sh", "--replay", target).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	seeds, err := filepath.Glob("testdata/seeds/*")
	if err != nil || len(seeds) < 4 {
		t.Fatal(seeds, err)
	}
	cmd := exec.Command(target, seeds...)
	cmd.Env = append(cmd.Environ(), "GPUCTL_QUIET=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
