package celenv_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/cel-go/cel"

	"github.com/gpuctl/gpuctl/internal/celenv"
)

func environment(t testing.TB) *celenv.Env {
	t.Helper()
	env, err := celenv.New("gpu",
		cel.Variable("gpu.model", cel.StringType), cel.Variable("gpu.memory", cel.IntType), cel.Variable("gpu.seen", cel.TimestampType),
		cel.Variable("gpu.extensions", cel.ListType(cel.StringType)), cel.Variable("gpu.labels", cel.MapType(cel.StringType, cel.StringType)))
	if err != nil {
		t.Fatal(err)
	}
	return env
}

func gpu() map[string]any {
	var extensions []string
	for i := range 64 {
		extensions = append(extensions, fmt.Sprintf("cl_khr_%d", i))
	}
	return map[string]any{
		"gpu.model": "NVIDIA L40S", "gpu.memory": int64(48 << 30), "gpu.extensions": extensions,
		"gpu.labels": map[string]string{"zone": "a"}, "gpu.seen": time.Unix(0, 0),
	}
}

// evaluate returns what is wrong with an expression, or with its evaluation.
func evaluate(ctx context.Context, env *celenv.Env, source string) (bool, error) {
	checked, issues := env.Compile(source)
	if issues.Err() != nil {
		return false, issues.Err()
	}
	p, err := env.Program(checked)
	if err != nil {
		return false, err
	}
	return p.Match(ctx, gpu())
}

func TestWhatPeopleWriteIsThere(t *testing.T) {
	env := environment(t)
	for _, source := range []string{
		`model == "NVIDIA L40S" && memory >= 40*1024*1024*1024`,
		`model.startsWith("NVIDIA") && !model.contains("T4") && model.endsWith("S")`,
		`model.matches("^NVIDIA (L40S?|H100)$")`,
		`"cl_khr_3" in extensions && model in ["NVIDIA L40S", "Tesla T4"]`,
		`extensions.exists(e, e.startsWith("cl_khr_6")) && extensions.all(e, size(e) > 4)`,
		`extensions.filter(e, e.endsWith("0")).size() == 7`,
		`extensions.map(e, e.lowerAscii()).exists_one(e, e == "cl_khr_1")`,
		`"zone" in labels && labels["zone"] == "a" && has(labels.zone) && labels.exists(k, labels[k] == "a")`,
		`model.lowerAscii().substring(7, 10) == "l40" && model.indexOf("L") == 7 && model.trim().charAt(0) == "N"`,
		`labels["zone"] + "/" + model == "a/NVIDIA L40S"`,
		`string(memory).size() > 3 && int("7") < memory && (memory > 5 ? true : false)`,
		`timestamp("2026-01-01T00:00:00Z").getFullYear() == 2026 && duration("2h") > duration("1h")`,
		`{"a": 1, "b": 2}["b"] == 2 && [1, 2, 3][1] == 2 && -memory < 0 && memory % 2 == 0 && 1.5 < 2.0`,
	} {
		if ok, err := evaluate(t.Context(), env, source); !ok || err != nil {
			t.Errorf("%s: %v, %v", source, ok, err)
		}
	}
}

// costly are expressions that take, or would take, far more than their length.
func costly() map[string]string {
	nest := func(depth int, shape string) string { // [[x, x]].exists(a, [[a, a]].exists(b, …
		open, last := "", "model"
		for i := range depth {
			name := fmt.Sprintf("v%d", i)
			open += strings.ReplaceAll(shape, "X", last) + ".exists(" + name + ", "
			last = name
		}
		return open + last + " == " + last + strings.Repeat(")", depth)
	}
	return map[string]string{
		"nine chained replace":      `("a"` + strings.Repeat(`.replace("a", "aaaaaaaaaa")`, 9) + `).size() > 0`,
		"replace of nothing":        `model.replace("", model).replace("", model).replace("", model) != ""`,
		"join":                      `extensions.join(model) != ""`,
		"split":                     `model.split("").size() > 0`,
		"format":                    `"%1000000000d".format([1]) != ""`,
		"quote":                     `strings.quote(model) != ""`,
		"reverse":                   `model.reverse() != ""`,
		"a list in a list":          `[[model]] == [[model]]`,
		"doubled lists":             `[[1]]` + strings.Repeat(`.map(x, [x, x])`, 40) + ` == [[1]]` + strings.Repeat(`.map(x, [x, x])`, 40),
		"more doubled lists":        `[[1]]` + strings.Repeat(`.map(x, [x, x])`, 8) + `.size() == 1`,
		"doubled lists by exists":   nest(8, "[[X, X]]"),
		"doubled texts by exists":   nest(8, "[X + X + X + X]"),
		"doubled texts by map":      `[model]` + strings.Repeat(`.map(x, x + x + x + x + x)`, 8) + `.size() == 1`,
		"a list and itself":         `(extensions + extensions) == extensions`,
		"doubled lists by addition": strings.Repeat("(", 20) + "extensions" + strings.Repeat(" + extensions)", 20) + ".size() > 0",
		"bytes":                     `bytes(model) + bytes(model) == b""`,
		"anything":                  `dyn(extensions) == dyn(extensions)`,
		"mixed list":                `[1, "a"] == [1, "a"]`,
		"a type":                    `type(extensions) == type(extensions)`,
		"a message":                 `google.protobuf.Struct{fields: {"a": google.protobuf.Value{string_value: "b"}}} == google.protobuf.Struct{}`,
		"a pattern from data":       `model.matches(model)`,
		"a long pattern":            `model.matches("` + strings.Repeat("a?", 400) + `")`,
		"a large pattern":           `model.matches("` + strings.Repeat(`(\\pL{1000})?`, 30) + `")`,
		"a pattern of repetitions":  `model.matches("((a{10}){10}){10}")`,
		"time zones":                `extensions.all(a, timestamp("2026-01-01T00:00:00Z").getFullYear("Europe/Berlin") > 0)`,
		"loops in loops":            `extensions.all(a, extensions.all(b, extensions.all(c, extensions.all(d, a == a))))`,
		"searches in searches":      `extensions.all(a, extensions.all(b, extensions.all(c, (a + b + c).indexOf(c + b) < 99)))`,
		"the accumulator":           `[1, 2].map(x, __result__).size() == 2`,
		"doubled types":             nest(16, "[{X: {X: {X: {X: X}}}}]"),
		"doubled types by maps":     nest(16, "[{X: X}]"),
		"lists of a variable":       nest(12, "[extensions].map(y, X)"),
		"depth":                     strings.Repeat("[", 1000) + "1" + strings.Repeat("]", 1000) + ".size() > 0",
		"a long chain":              strings.Repeat("model + ", 400) + `model == ""`,
	}
}

// Whether it is refused or given up, memory and time stay small. Time is
// measured in what is evaluated, not in seconds, so that a busy machine does
// not decide: without the limits most of these end by no deadline.
func TestCostlyExpressionsAreRefusedOrEndSoon(t *testing.T) {
	env := environment(t)
	for name, source := range costly() {
		if len(source) > celenv.MaxLength {
			t.Errorf("%s: %d bytes", name, len(source))
			continue
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := evaluate(t.Context(), env, source)
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%s: evaluated", name)
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 32<<20 {
			t.Errorf("%s: %d MiB were allocated (%v)", name, used>>20, err)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: only the clock ended it", name)
		}
	}
}

// A refusal names what is to be left out.
func TestRefusalsNameWhatIsLeftOut(t *testing.T) {
	env := environment(t)
	for source, part := range map[string]string{
		`model.replace("a", "b") == ""`:             "replace()",
		`extensions + extensions == []`:             "a list added to a list",
		`model.matches(model)`:                      "not a constant",
		`model.matches("(a{500}b{500})")`:           "states: at most",
		`extensions.map(e, extensions).size() == 0`: "a value of type list(list(string))",
		`timestamp(0).getHours("UTC") == 0`:         "times are in UTC",
	} {
		_, err := evaluate(t.Context(), env, source)
		if !errors.Is(err, celenv.ErrRefused) || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v, want %q", source, err, part)
		}
	}
}

func TestEvaluationEndsWithItsContext(t *testing.T) {
	env := environment(t)
	checked, issues := env.Compile(`extensions.all(a, extensions.all(b, a != b || true))`)
	if issues.Err() != nil {
		t.Fatal(issues.Err())
	}
	p, err := env.Program(checked)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Match(ctx, gpu()); !errors.Is(err, context.Canceled) {
		t.Errorf("evaluated for nobody: %v", err)
	}
	// In the middle: the first look at a variable ends the context.
	ctx, cancel = context.WithCancel(t.Context())
	vars := gpu()
	extensions := vars["gpu.extensions"]
	vars["gpu.extensions"] = func() any { cancel(); return extensions }
	if _, err := p.Match(ctx, vars); !errors.Is(err, context.Canceled) {
		t.Errorf("it went on: %v", err)
	}
}

func FuzzProgram(f *testing.F) {
	for _, source := range costly() {
		f.Add(source)
	}
	f.Add(`extensions.filter(e, e in extensions).map(e, e + e).size() > 1 || labels["zone"].matches("a+")`)
	env := environment(f)
	f.Fuzz(func(t *testing.T, source string) {
		if len(source) > celenv.MaxLength {
			return
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := evaluate(t.Context(), env, source)
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > 128<<20 || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d MiB for %q: %v", used>>20, source, err)
		}
	})
}
