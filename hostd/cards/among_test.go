package cards

import (
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/query"
	"github.com/gpuctl/gpuctl/internal/reason"
)

// What an operator asks for chooses among the GPUs that the VM may get, and adds none.
func TestAnExpressionChoosesNoOtherGPU(t *testing.T) {
	gpu := func(name string) *clusterv1.Object {
		return &clusterv1.Object{Object: &clusterv1.Object_Gpu{Gpu: &clusterv1.GPU{Id: "h/" + name, Name: name, Host: "h", Rank: 3}}}
	}
	for more, fits := range map[string]bool{
		"": true, "rank > 2": true, "rank > 2 // or higher": true, "rank > 3": false, "rank > 3 || rank > 2": true, "rank > 3) || (rank > 2": false, "true) || (true": false,
	} {
		e, err := Among([]string{"a", "b"}, more)
		if err != nil {
			if fits || !reason.Is(err, reason.Invalid) {
				t.Errorf("%q: %v", more, err)
			}
			continue
		}
		q, err := query.Compile(clusterv1.Kind_KIND_GPU, e)
		if err != nil {
			t.Errorf("%q: %v", more, err)
			continue
		}
		for name, want := range map[string]bool{"a": fits, "other": false} {
			if got, err := q.Match(gpu(name)); got != want || err != nil {
				t.Errorf("%q of %s: %v, %v", more, name, got, err)
			}
		}
	}
}
