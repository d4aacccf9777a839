package query

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
	"github.com/gpuctl/gpuctl/internal/celenv"
)

func TestNineChainedReplacesAreRefused(t *testing.T) {
	where := `("a"` + strings.Repeat(`.replace("a", "aaaaaaaaaa")`, 9) + `).size() > 0`
	_, err := Compile(gpuKind, where)
	if !errors.Is(err, ErrInvalid) || !errors.Is(err, celenv.ErrRefused) || !strings.Contains(err.Error(), "replace()") {
		t.Errorf("%v", err)
	}
}

// A query for somebody who has left ends, whichever way it is answered.
func TestQueryEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	cache := NewCache()
	v := fleet(t, 20)
	for _, where := range []string{
		`id != "" && !cordoned`,     // lowered
		`id.lowerAscii() == "none"`, // interpreted
	} {
		q, err := cache.Compile(gpuKind, where)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := cache.List(q, v, "", 0); err != nil {
			t.Errorf("%s: %v", where, err)
		}
		bound := q.Within(ctx)
		if _, _, err := cache.List(bound, v, "", 0); !errors.Is(err, context.Canceled) {
			t.Errorf("%s, by the cache: %v", where, err)
		}
		if _, _, err := bound.List(v, "", 0); !errors.Is(err, context.Canceled) {
			t.Errorf("%s, directly: %v", where, err)
		}
		if _, _, err := cache.List(q, v, "", 0); err != nil {
			t.Errorf("%s: its bound is another query's, too: %v", where, err)
		}
	}
}

func fleet(t *testing.T, n int) *state.View {
	t.Helper()
	s := state.New()
	report := &clusterv1.ReportHost{Host: &clusterv1.Host{Name: "n1", Id: "id-n1", Protocol: 1}}
	for i := range n {
		report.Gpus = append(report.Gpus, &clusterv1.GPU{Name: fmt.Sprintf("g%d", i), Model: "m", Type: "gpu"})
	}
	if res := s.Apply(1, &clusterv1.Command{Op: &clusterv1.Command_ReportHost{ReportHost: report}}); res.GetOutcome() != clusterv1.Outcome_OUTCOME_OK {
		t.Fatal(res)
	}
	return s.View()
}
