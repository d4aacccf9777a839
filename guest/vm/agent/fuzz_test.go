package agent

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzJournal reads what is released. A journal that is taken is of this boot
// or empty, and is written as it was read.
func FuzzJournal(f *testing.F) {
	const boot = "b1"
	dir := f.TempDir()
	j, err := openJournal(dir, boot)
	if err != nil {
		f.Fatal(err)
	}
	if err := j.change(func(d *journalData) {
		d.Autoprobe = true
		d.Released["0000:01:00.0"] = releasedData{Driver: "nvidia", Override: "vfio-pci"}
	}); err != nil {
		f.Fatal(err)
	}
	seed, err := os.ReadFile(j.path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"version":1,"boot":"b2","released":null}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if err := os.WriteFile(j.path, in, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := openJournal(dir, boot)
		if err != nil {
			return
		}
		if got.data.Boot != boot || got.data.Released == nil || len(got.data.Released) > maxReleased {
			t.Fatalf("%+v", got.data)
		}
		b, err := json.Marshal(got.data)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(j.path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		again, err := openJournal(dir, boot)
		if err != nil {
			t.Fatalf("what was taken is refused: %v", err)
		}
		if diff := cmp.Diff(got.data, again.data); diff != "" {
			t.Fatal(diff)
		}
	})
}
