package sessions

import (
	"context"
	"errors"
	"strings"
	"testing"

	"connectrpc.com/connect"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/expr"
)

func TestClaimWithACostlyExpressionIsRefused(t *testing.T) {
	f := newFixture(t, t.TempDir()+"/state.json")
	defer f.close()
	for _, e := range []string{
		`("a"` + strings.Repeat(`.replace("a", "aaaaaaaaaa")`, 9) + `).size() > 0`,
		`[[1]]` + strings.Repeat(`.map(x, [x, x])`, 8) + `.size() == 1`,
		`extensions.join(model) != ""`,
	} {
		_, err := f.CreateClaim(t.Context(), connect.NewRequest(&gpuctlv1.CreateClaimRequest{Expr: e}))
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "not available in these expressions") {
			t.Errorf("%.40s: %v", e, err)
		}
	}
	if f.claim(&gpuctlv1.CreateClaimRequest{Expr: `id == "mid"`}) == nil {
		t.Error("a plain expression is refused")
	}
}

// Whose caller has left is not judged any more.
func TestGPUsAreNotJudgedForACallerWhoHasLeft(t *testing.T) {
	e, err := expr.Compile("memory > 0", expr.GPU())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := matching(ctx, []*gpuctlv1.GPU{{Id: "g"}}, e); !errors.Is(err, context.Canceled) {
		t.Errorf("judged: %v", err)
	}
}
