package expr

import (
	"errors"
	"strings"
	"testing"
)

func gpu() map[string]any {
	return map[string]any{
		"id": "pocl-basic", "model": "basic", "vendor": "pocl", "type": "cpu",
		"memory": int64(4 << 30), "free_memory": int64(4 << 30), "max_alloc": int64(1 << 30), "local_memory": int64(1 << 19),
		"compute_units": int64(2), "clock_mhz": int64(2000), "max_work_group_size": int64(4096),
		"images": true, "fp64": true, "free": true,
		"runtime": "pocl", "driver": "3.1", "version": "OpenCL 3.0", "rank": int64(1), "pci_address": "", "uuid": "", "engines": []string{"portable"},
		"extensions": []string{"cl_khr_fp64"},
	}
}

func TestMatch(t *testing.T) {
	for source, want := range map[string]bool{
		"":                                  true,
		"memory >= 4*GiB && free":           true,
		"memory > 4*GiB":                    false,
		`"cl_khr_fp64" in extensions`:       true,
		`id.startsWith("pocl")`:             true,
		`type == "gpu" || model == "basic"`: true,
		"max_alloc == 1024*MiB":             true,
		"gpu.type == 'cpu'":                 true,
		`"driver" in engines`:               false,
	} {
		e, err := Compile(source, GPU())
		if err != nil {
			t.Errorf("%s: %v", source, err)
			continue
		}
		if got, err := e.Match(t.Context(), gpu()); err != nil || got != want {
			t.Errorf("%s = %v, %v; want %v", source, got, err, want)
		}
	}
}

func TestWrongExpressionsSayWhatIsWrong(t *testing.T) {
	for source, part := range map[string]string{
		"memry > 1":               "did you mean memory",
		"zzz == 1":                "fields: ",
		"memory":                  "not true or false",
		"memory > \"1\"":          "no matching overload",
		"memory >":                "yntax error",
		strings.Repeat("!", 5000): "longer than",
	} {
		_, err := Compile(source, GPU())
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), part) {
			t.Errorf("%.20s: %v; want %q in it", source, err, part)
		}
	}
}

func TestAnExpensiveExpressionEnds(t *testing.T) {
	e, err := Compile("extensions.all(a, extensions.all(b, extensions.all(c, extensions.all(d, a == a))))", GPU())
	if err != nil {
		t.Fatal(err)
	}
	object := gpu()
	object["extensions"] = make([]string, 100)
	if _, err := e.Match(t.Context(), object); err == nil {
		t.Error("10^8 comparisons were allowed")
	}
}
