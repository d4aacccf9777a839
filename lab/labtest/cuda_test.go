package labtest

import (
	"strings"
	"testing"
)

// loopOutput is what the program says with the fake on this machine, after five rounds.
const loopOutput = "ready 7\nround 1\nround 2\nround 3\nround 4\nround 5\nok 5 da299400\n"

func TestLoopCheck(t *testing.T) {
	if n, err := checkLoop(loopOutput); err != nil || n != 5 || rounds(loopOutput) != 5 {
		t.Errorf("%d %v", n, err)
	}
	for name, out := range map[string]string{
		"another result": strings.Replace(loopOutput, "ok 5 da299400", "ok 5 00000000", 1),
		"other rounds":   strings.Replace(loopOutput, "ok 5", "ok 4", 1),
		"wrong":          strings.Replace(loopOutput, "ok 5 da299400", "bad 5 da299400 00000001", 1),
		"not the last":   loopOutput + "Killed\n",
		"none":           "ready 7\nround 1\n",
	} {
		if n, err := checkLoop(out); err == nil {
			t.Errorf("%s: taken for right after %d rounds", name, n)
		}
	}
}
