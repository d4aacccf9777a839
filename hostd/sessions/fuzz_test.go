package sessions

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// FuzzJournal reads hostd's state.json. What is taken has no claim or operation
// that is none, and is written as it was read.
func FuzzJournal(f *testing.F) {
	path := filepath.Join(f.TempDir(), "state.json")
	seed, err := journal{
		Version: journalVersion, Claims: []*claim{{ID: "c2", GPUs: []string{"small"}}, {ID: "c1", Expr: "free"}, {ID: "vm-1", GPUs: []string{"large"}, VM: &forVM{UUID: "u", Name: "web", Migration: "m-1"}}, {ID: "vmgpu-u", Min: 7, GPUs: []string{"large"}, VM: &forVM{UUID: "u", Name: "web", Host: "h1", Persistent: true}}},
		Operations: []*operation{{Session: "s1", Claim: "c1", Kind: "swap", GPUs: []string{"large"}, Record: record{&clusterv1.Migration{Id: "m-2", Verb: "swap", Done: []string{"freeze"}, StartedUnixMs: 1}}}},
		Lent:       []*lent{{ID: "l-1", Claim: "vm-1", GPUs: []string{"large"}, VM: &forVM{UUID: "u", Name: "web", Migration: "m-1"}}},
	}.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"version":1,"claims":[null,null],"operations":[null,null]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if err := os.WriteFile(path, in, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := readJournal(path)
		if err != nil {
			return
		}
		for _, c := range j.Claims {
			_ = c.proto()
			_ = c.forCluster(nil)
			if c.VM != nil {
				_ = c.VM.owner()
			}
		}
		b, err := j.encode()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		again, err := readJournal(path)
		if err != nil {
			t.Fatalf("what was taken is refused: %v", err)
		}
		if b2, err := again.encode(); err != nil || string(b) != string(b2) {
			t.Fatal(err, cmp.Diff(string(b), string(b2)))
		}
	})
}

func TestAStateWithANullClaimIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	for _, text := range []string{`{"version":1,"claims":[null]}`, `{"version":1,"operations":[null]}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if j, err := readJournal(path); err == nil {
			t.Errorf("%s is taken: %+v", text, j)
		}
	}
}
