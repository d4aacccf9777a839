// Package scripted tests the application's library, which is C, with an executor that answers when the test wants.
package scripted

import (
	"os/exec"
	"path/filepath"
	"testing"
)

func TestThreadsGoOnAndDataKeepsItsOrderWhileMapsAreAskedFor(t *testing.T) {
	program := filepath.Join(t.TempDir(), "maps")
	sources, err := filepath.Glob("../*.c")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	args := append([]string{
		"-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize=alignment",
		"-Wl,--wrap=gx_connect", "-o", program, "testdata/maps.c",
	}, sources...)
	if out, err := exec.Command("cc", append(args, "-pthread")...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err := exec.Command(program).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
