package cli

import (
	"bytes"
	"strings"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// A card's slices stand below it.
func TestPrintSlices(t *testing.T) {
	res := &gpuctlv1.ListCardsResponse{Host: "h1", Cards: []*gpuctlv1.Card{{
		Gpu: "a10-0", Address: "0000:65:00.0", Model: "A10", Memory: 24 << 30, Phase: gpuctlv1.CardPhase_CARD_PHASE_FREE,
		Functions: []*gpuctlv1.Function{{Address: "0000:65:00.0", Driver: "nvidia"}},
		Profiles:  []*gpuctlv1.SliceProfile{{Name: "A10-8Q", Kind: "vendor", Memory: 8 << 30, Max: 3, Existing: 1, Free: 2}, {Name: "A10-4Q", Why: "one size"}},
		Slices: []*gpuctlv1.Slice{{
			Id: "4d1e6f2a-0000-4000-8000-000000000001", Profile: "A10-8Q", Kind: "vendor", Function: "0000:65:00.4", Phase: gpuctlv1.CardPhase_CARD_PHASE_ATTACHED,
			MachineName: "web1", Claim: "vm-1", Message: "a detach failed",
		}},
	}}}
	for output, want := range map[string][]string{
		"": {
			"GPU       MODEL                                 MEMORY  DRIVER  PHASE                       VM",
			"a10-0     A10                                   24 GiB  nvidia  free                        -",
			"  A10-8Q  4d1e6f2a-0000-4000-8000-000000000001  8 GiB   vendor  attached (a detach failed)  web1",
		},
		"wide": {"A10-8Q×2,A10-4Q×0", "web1  0000:65:00.4"},
		"json": {`"slices": [`, `"function": "0000:65:00.4"`, `"phase": "attached"`},
	} {
		var out bytes.Buffer
		a := &app{Stdio: cmdutil.Stdio{Out: &out, Err: &out}, output: output}
		if err := a.printCards(res); err != nil {
			t.Fatal(err)
		}
		for _, line := range want {
			if !strings.Contains(out.String(), line) {
				t.Errorf("-o %q: no %q in\n%s", output, line, out.String())
			}
		}
	}
}
