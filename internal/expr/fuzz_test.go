package expr

import (
	"errors"
	"testing"
)

// FuzzCompile reads users' expressions and evaluates those that hold. One that
// does not is an error of its own kind.
func FuzzCompile(f *testing.F) {
	for _, s := range []string{
		"memory >= 4*GiB && free", `"cl_khr_fp64" in extensions`, `id.startsWith("pocl") || gpu.type == 'cpu'`, "", "memry > 1", "memory",
		"extensions.all(a, extensions.all(b, a == b))", `model.matches("^b.*c$") ? rank > 1 : true`, `has(gpu.id)`, "[1,2].map(x, x*x).exists(y, y == rank)",
	} {
		f.Add(s)
	}
	object := gpu()
	f.Fuzz(func(t *testing.T, source string) {
		e, err := Compile(source, GPU())
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("%q: %v", source, err)
			}
			return
		}
		_, _ = e.Match(t.Context(), object)
	})
}
