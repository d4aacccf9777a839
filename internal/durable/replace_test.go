package durable_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuctl/gpuctl/internal/durable"
)

func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, want := range []string{"one", "", "three"} {
		if err := durable.Replace(path, []byte(want), 0o640); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want {
			t.Fatalf("%q, %v; want %q", got, err, want)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
}

// What cannot be replaced keeps what it has, and nothing is left beside it.
func TestReplaceFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "folder")
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := durable.Replace(path, []byte("x"), 0o600); err == nil {
		t.Error("a folder was replaced")
	}
	if err := durable.Replace(filepath.Join(dir, "none", "f"), []byte("x"), 0o600); err == nil {
		t.Error("a file was made in a folder that is not there")
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left behind: %v", entries)
	}
}
