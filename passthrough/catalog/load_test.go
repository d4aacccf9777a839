package catalog

import (
	"errors"
	"testing"
)

// FuzzFile loads a file on top of one that is small, for speed.
func FuzzFile(f *testing.F) {
	for _, s := range []string{
		"version: 1\nmodels:\n  - model: X\n    ids: [\"1acc:0001\"]\n    rank: 1\n    memory: 8GiB\n    limits: {fp64: true}\n",
		"version: 1\nfamilies:\n  - name: f\n    resets: [{method: bus, verdict: hangs, reason: r}]\nmodels:\n  - model: Known\n    family: f\n",
		"version: 1\nmodels: &a\n  - model: X\n    vgpu: [{type: A, memory: 1KiB, max: 1, mixed: 1, mig: 1g.5gb}]\n    limits: {x: *a}\n",
		"version: 1\nmodels:\n  - model: X\n    limits: {? {a: b} : c, maxWorkItemSizes: [1, 2, 3], 3: 4}\n",
		"? - 1\n: &x [*x]\n",
		"<<: {version: 1}\nmodels: !!seq []\n",
	} {
		f.Add([]byte(s))
	}
	known := File{"known.yaml", []byte("version: 1\nfamilies: [{name: g, limits: {fp64: true}}]\nmodels: [{model: Known, ids: [\"1acc:0009\"], rank: 3, memory: 4GiB, family: g}]\n")}
	f.Fuzz(func(t *testing.T, data []byte) {
		l := newLoader()
		if err := l.file(known); err != nil {
			t.Fatal(err)
		}
		if err := l.file(File{"fuzz", data}); err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		if l.models["Known"] == nil {
			t.Fatal("a file has taken a model away")
		}
		for name, e := range l.models {
			if e.Model != name || e.Limits == nil || e.Limits.GlobalMemory != e.Memory {
				t.Fatalf("%q: %+v", name, e)
			}
			for _, v := range e.VGPU {
				if v.Max == 0 || v.Memory == 0 || v.Name == "" {
					t.Fatalf("%q: %+v", name, v)
				}
			}
			for _, b := range e.Resets {
				if b.Method == "" || b.Reason == "" {
					t.Fatalf("%q: %+v", name, b)
				}
			}
		}
		for id, m := range l.byID {
			if l.models[m] == nil {
				t.Fatalf("%s is of %q, which is not there", id, m)
			}
		}
	})
}

func BenchmarkLoad(b *testing.B) {
	for b.Loop() {
		if _, err := Load(); err != nil {
			b.Fatal(err)
		}
	}
}
