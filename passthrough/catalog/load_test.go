package catalog

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

func TestErrorsNameFileAndLine(t *testing.T) {
	model := "version: 1\nmodels:\n  - model: X\n    ids: [\"1acc:0001\"]\n    rank: 1\n"
	for _, tc := range []struct{ name, data, want string }{
		{"empty", "", "site.yaml: empty"},
		{"another version", "version: 2\n", "site.yaml:1: version 2 is not known"},
		{"no version", "models: []\n", "site.yaml:1: version 0"},
		{"unknown field", "version: 1\nmodels:\n  - model: X\n    colour: red\n", "line 4: field colour not found"},
		{"a key twice", "version: 1\nversion: 1\n", "line 2"},
		{"two documents", "version: 1\n---\nversion: 1\n", "more than one document"},
		{"no YAML", "version: [\n", "site.yaml: "},
		{"a model twice", model + "  - model: X\n", "site.yaml:6: model \"X\" twice"},
		{"no name", "version: 1\nmodels:\n  - rank: 3\n", "site.yaml:3: model \"\""},
		{"a name with control characters", "version: 1\nmodels:\n  - model: \"X\\e[31m\"\n", "site.yaml:3: model"},
		{"new without ids", "version: 1\nmodels:\n  - model: X\n    rank: 1\n", "site.yaml:3: model \"X\" is new and has no ids"},
		{"new without rank", "version: 1\nmodels:\n  - model: X\n    ids: [\"1acc:0001\"]\n    fp32: 3\n", "site.yaml:3: model \"X\" needs a rank"},
		{"an id of three groups", model + "  - model: Y\n    rank: 1\n    ids:\n      - \"1acc:0002\"\n      - 1acc:0001:1acc\n", "site.yaml:10: \"1acc:0001:1acc\" is no PCI id"},
		{"an id in capitals", "version: 1\nmodels:\n  - model: X\n    rank: 1\n    ids: [\"1ACC:0001\"]\n", "site.yaml:5: \"1ACC:0001\""},
		{"an id twice", model + "  - model: Y\n    rank: 1\n    ids: [\"1acc:0001\"]\n", "site.yaml:8: id 1acc:0001 is already in line 4"},
		{"an unknown family", model + "    family: ruritania\n", "site.yaml:6: family \"ruritania\""},
		{"no amount", model + "    memory: much\n", "site.yaml:6: memory \"much\""},
		{"no memory at all", model + "    memory: 0\n", "site.yaml:6: memory \"0\""},
		{"infinite", model + "    bandwidth: .inf\n", "site.yaml:6: bandwidth +Inf"},
		{"not a number", model + "    fp32: .nan\n", "site.yaml:6: fp32 NaN"},
		{"an unknown limit", model + "    limits:\n      fp64: true\n      horsePower: 3\n", "site.yaml:8: limit \"horsePower\""},
		{"a limit of another kind", model + "    limits: {computeUnits: many}\n", "site.yaml:6: limit \"computeUnits\""},
		{"memory among the limits", model + "    limits: {globalMemory: 4}\n", "site.yaml:6: globalMemory without memory"},
		{"a vGPU too many", model + "    memory: 8GiB\n    vgpu:\n      - {type: A, memory: 2GiB, max: 4}\n      - {type: B, memory: 2GiB, max: 5}\n", "site.yaml:9: vGPU type B: 5 of 2 GiB are more than the model's 8 GiB"},
		{"no vGPU", model + "    vgpu:\n      - {type: A, memory: 2GiB}\n", "site.yaml:7: vGPU type A: max 0"},
		{"more when mixed", model + "    vgpu:\n      - {type: A, memory: 2GiB, max: 2, mixed: 3}\n", "site.yaml:7: vGPU type A: more fit"},
		{"a type twice", model + "    vgpu:\n      - {type: A, memory: 2GiB, max: 2}\n      - {type: A, memory: 2GiB, max: 2}\n", "site.yaml:8: vGPU type A twice"},
		{"an unknown reset", model + "    resets:\n      - {method: kick, verdict: hangs, reason: x}\n", "site.yaml:7: method \"kick\" is not one of [flr pm bus acpi d3cold vendor]"},
		{"an unknown verdict", model + "    resets:\n      - {method: bus, verdict: bad, reason: x}\n", "site.yaml:7: verdict \"bad\""},
		{"no reason", model + "    resets:\n      - {method: bus, verdict: hangs}\n", "site.yaml:7: bus hangs: the reason is missing"},
		{"too large", "version: 1\n#" + strings.Repeat("x", 1<<20), "larger than"},
	} {
		err := newLoader().file(File{"site.yaml", []byte(tc.data)})
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "site.yaml") {
			t.Errorf("%s: %v; want %q", tc.name, err, tc.want)
		}
		if err != nil && strings.Contains(err.Error(), "YAML ") {
			t.Errorf("%s: names a type of the program: %v", tc.name, err)
		}
	}
}

func TestAnyClass(t *testing.T) {
	odd := "version: 1\nmodels:\n  - {model: Odd, ids: [\"1acc:0001\"], rank: 1, anyClass: true}\n  - {model: Plain, ids: [\"1acc:0002\"], rank: 1}\n"
	c, err := Load(File{"site.yaml", []byte(odd)})
	if err != nil {
		t.Fatal(err)
	}
	for device, want := range map[uint16]bool{1: true, 2: false, 3: false} {
		if got := c.AnyClass()(&pci.Device{VendorID: 0x1acc, DeviceID: device}); got != want {
			t.Errorf("1acc:%04x: %v", device, got)
		}
	}
	if ids := c.AnyClassIDs(); !slices.Equal(ids, []string{"1acc:0001"}) {
		t.Error(ids)
	}
	if c, err = Load(File{"site.yaml", []byte(odd)}, File{"later.yaml", []byte("version: 1\nmodels: [{model: Odd, anyClass: false}]\n")}); err != nil || c.AnyClass() != nil {
		t.Errorf("taken back: %v", err)
	}
}

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
