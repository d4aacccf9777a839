package member

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzIdentity reads node.json. What is taken is written as it was read.
func FuzzIdentity(f *testing.F) {
	dir := f.TempDir()
	if err := (&identity{Host: "node1", ID: "h1", Address: "192.0.2.1:7443", Cluster: "c1", Found: true}).write(dir); err != nil {
		f.Fatal(err)
	}
	seed, err := os.ReadFile(identityPath(dir))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if err := os.WriteFile(identityPath(dir), in, 0o600); err != nil {
			t.Fatal(err)
		}
		id, err := readIdentity(dir)
		if err != nil {
			return
		}
		if id == nil || id.Version != identityVersion {
			t.Fatalf("%+v", id)
		}
		before := *id
		b, err := id.encode()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(identityPath(dir), b, 0o600); err != nil {
			t.Fatal(err)
		}
		again, err := readIdentity(dir)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(&before, again); diff != "" {
			t.Fatal(diff)
		}
	})
}
