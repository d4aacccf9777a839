package stash

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// FuzzRead reads what is said of a kept state. What is taken is of this folder
// and as long as its file.
func FuzzRead(f *testing.F) {
	dir := filepath.Join(f.TempDir(), "vm", "s1")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		f.Fatal(err)
	}
	const size = 5
	if err := os.WriteFile(filepath.Join(dir, "a1"+bodyEnd), make([]byte, size), 0o600); err != nil {
		f.Fatal(err)
	}
	seed, err := json.Marshal(meta{Machine: "vm", Session: "s1", Migration: "m", ID: "a1", Size: size, Digest: make([]byte, 32), KeptMS: 9})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"machine":"vm","session":"s1","id":"../../x"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if err := os.WriteFile(filepath.Join(dir, metaFile), in, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := read(dir)
		if err == nil && (s.Machine != "vm" || s.Session != "s1" || s.Mark.ID != "a1" || s.Mark.Size != size) {
			t.Fatalf("%+v", s)
		}
	})
}
