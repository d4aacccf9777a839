package cli_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/internal/cmdutil"
)

// Hosts count milliseconds, and take none for their default: a time that is negative, or
// too short, would become ten seconds or for ever. What is asked for with a plan alone must
// not move anything.
func TestFlagsThatWouldMeanSomethingElseAreRefusedBeforeAnyHostIsAsked(t *testing.T) {
	t.Setenv("GPUCTL_HOST", "/nowhere/hostd.sock")
	for line, want := range map[string]string{
		"migrate s-1 --to big --freeze-timeout -5s":   "--freeze-timeout -5s: want a time",
		"migrate s-1 --to big --freeze-timeout 500us": "--freeze-timeout 500µs: want a time",
		"upgrade s-1 --timeout 0s":                    "--timeout 0s: want a time",
		"suspend s-1 --freeze-timeout -1ms":           "--freeze-timeout -1ms: want a time",
		"resume s-1 --timeout -1h":                    "--timeout -1h0m0s: want a time",
		"drain h1 --move --deadline 1us":              "--deadline 1µs: want a time",
		"migrate s-1 --to big --build":                "--build is for --plan",
	} {
		var out, stderr bytes.Buffer
		err := gpuctl(t.Context(), strings.Fields(line), cmdutil.Stdio{Out: &out, Err: &stderr, In: strings.NewReader("")})
		if cmdutil.Code(err) != cmdutil.BadUse || !strings.Contains(err.Error(), want) {
			t.Errorf("gpuctl %s: %v, exit status %d", line, err, cmdutil.Code(err))
		}
	}
}
