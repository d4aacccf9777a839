package testkit

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// Replay builds a fuzz target in C by the folder's build.sh and has it play the files in testdata/seeds,
// at least so many; env is added to its environment.
func Replay(t *testing.T, least int, env ...string) {
	t.Helper()
	target := filepath.Join(t.TempDir(), "target")
	if out, err := exec.Command("./build.sh", "--replay", target).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	seeds, err := filepath.Glob("testdata/seeds/*")
	if err != nil || len(seeds) < least {
		t.Fatal(seeds, err)
	}
	cmd := exec.Command(target, seeds...)
	cmd.Env = append(cmd.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
