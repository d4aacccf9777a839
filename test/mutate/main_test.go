package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const module = "module example.org/x\n\ngo 1.26\n\nrequire pgregory.net/rapid v1.3.0\n"

const source = `package x

func calls(n *int) { *n++ }

func F(n int) int {
	if n > 9 { //check:large
		return -1
	}
	switch {
	case n == 7: //check:seven
		return -7
	}
	switch n {
	case 3:
		return 1
	default: //check:others
		n = 5
	}
	calls(&n) //check:call
	return n
}
`

const tests = `package x

import (
	"testing"

	"pgregory.net/rapid"
)

var _ = rapid.Check

func TestF(t *testing.T) {
	for n, want := range map[int]int{WANT} {
		if have := F(n); have != want {
			t.Errorf("%d: %d", n, have)
		}
	}
}
`

// in writes a package whose tests look at these results.
func in(t *testing.T, want string) string {
	t.Helper()
	dir := t.TempDir()
	sums, err := os.ReadFile("../../go.sum")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"go.mod": module, "go.sum": string(sums), "x.go": source, "x_test.go": strings.ReplaceAll(tests, "WANT", want)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	return dir
}

func TestNoticedChecksAreTold(t *testing.T) {
	var out strings.Builder
	if err := run(t.Context(), []string{in(t, "10: -1, 7: -7, 3: 1, 4: 6")}, &out); err != nil {
		t.Fatal(err, out.String())
	}
	if !strings.Contains(out.String(), "4 of 4 removed checks were noticed") || strings.Count(out.String(), "TestF") != 4 {
		t.Error(out.String())
	}
}

func TestSurvivorFailsTheRun(t *testing.T) {
	err := run(t.Context(), []string{in(t, "10: -1, 3: 1, 4: 6")}, io.Discard)
	if !errors.Is(err, errSurvived) || !strings.Contains(err.Error(), "seven") {
		t.Errorf("%v", err)
	}
}

func TestTestsThatFailAnywayAreNoMutationRun(t *testing.T) {
	if err := run(t.Context(), []string{in(t, "10: 4")}, io.Discard); err == nil || errors.Is(err, errSurvived) {
		t.Errorf("%v", err)
	}
}
