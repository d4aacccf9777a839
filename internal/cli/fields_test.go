package cli

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
	"github.com/gpuctl/gpuctl/internal/rundir"
)

// TestFieldsAreThoseOfQueries keeps what help says about --where true: the names
// and types that we find in the messages are those that the service compiles
// expressions with.
func TestFieldsAreThoseOfQueries(t *testing.T) {
	a := &app{Stdio: cmdutil.Stdio{}, dirs: rundir.FromEnv(os.Getenv), getenv: os.Getenv}
	for _, k := range a.kinds() {
		want, got := map[string]string{}, map[string]string{}
		for _, f := range query.Fields(k.kind) {
			want[f.Name] = f.Type
		}
		for _, f := range k.fields() {
			if _, twice := got[f.Name]; twice {
				t.Errorf("%s: %s is listed twice", k.one, f.Name)
			}
			got[f.Name] = f.Type
			if f.Path == "" {
				continue
			}
			if order, err := ordering(k, f.Name); err != nil || order(k.message, k.message) != 0 {
				t.Errorf("%s: cannot sort by %s: %v", k.one, f.Name, err)
			}
		}
		// CEL writes timestamps by their full name.
		for name, kind := range want {
			if kind == "google.protobuf.Timestamp" {
				want[name] = "timestamp"
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-query +help):\n%s", k.many, diff)
		}
	}
}
