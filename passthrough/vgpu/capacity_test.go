package vgpu

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/gpuctl/gpuctl/passthrough/catalog"
)

const gib = 1 << 30

func TestFree(t *testing.T) {
	types := map[string]catalog.VGPUType{}
	for _, v := range []catalog.VGPUType{
		{Name: "48Q", Memory: 48 * gib, Max: 1, Mixed: 1},
		{Name: "24Q", Memory: 24 * gib, Max: 2, Mixed: 2},
		{Name: "16Q", Memory: 16 * gib, Max: 3, Mixed: 2},
		{Name: "16C", Memory: 16 * gib, Max: 3, Mixed: 2},
		{Name: "4Q", Memory: 4 * gib, Max: 12, Mixed: 8},
		{Name: "1Q", Memory: gib, Max: 32},
		{Name: "1-10C", Memory: 10 * gib, Max: 4, MIG: "1g.10gb"},
		{Name: "3-24C", Memory: 24 * gib, Max: 2, MIG: "3g.24gb"},
		{Name: "7-48C", Memory: 48 * gib, Max: 1, MIG: "7g.48gb"},
		{Name: "untold"},
	} {
		types[v.Name] = v
	}
	for _, c := range []struct {
		profile string
		used    map[string]uint32
		mixed   bool
		want    uint32
		why     string
	}{
		{"16Q", nil, false, 3, ""},
		{"16Q", nil, true, 2, ""},
		{"16Q", map[string]uint32{"16Q": 1, "16C": 1}, false, 1, ""},
		{"16Q", map[string]uint32{"16C": 3}, false, 0, "there are 3, and 3 is the most"},
		{"16Q", map[string]uint32{"4Q": 1}, false, 0, "4 GiB each: all vGPUs of the GPU must have one size"},
		{"16Q", map[string]uint32{"4Q": 1}, true, 2, ""},
		{"24Q", map[string]uint32{"16Q": 1}, true, 1, ""},
		{"24Q", map[string]uint32{"16Q": 2}, true, 0, "24 GiB is more than what is left"},
		{"4Q", map[string]uint32{"24Q": 1, "16Q": 1}, true, 2, ""},
		{"1Q", nil, true, 0, "where sizes differ"},
		{"1Q", map[string]uint32{"48Q": 0}, false, 32, ""},
		{"4Q", map[string]uint32{"B7": 1}, false, 0, "size is not known"},
		{"4Q", map[string]uint32{"1-10C": 1}, false, 0, "do not go together"},
		{"1-10C", map[string]uint32{"4Q": 1}, true, 0, "do not go together"},
		{"1-10C", map[string]uint32{"3-24C": 1}, false, 2, ""},
		{"3-24C", map[string]uint32{"1-10C": 2}, false, 1, ""},
		{"7-48C", map[string]uint32{"1-10C": 1}, false, 0, "more than what is left"},
		{"4Q", map[string]uint32{"4Q": 1<<32 - 1, "48Q": 1<<32 - 1}, true, 0, "is the most"},
		{"untold", nil, false, 1, ""},
		{"untold", map[string]uint32{"B7": 1<<32 - 1}, false, 0, "4294967295 others"},
		{"untold", map[string]uint32{"B7": 1<<32 - 1, "untold": 1}, false, 0, "4294967295 others"}, // a sum that wraps around would be none
	} {
		r := rules{types: types, mixed: c.mixed}
		n, why := r.free(types[c.profile], c.used)
		if n != c.want || !strings.Contains(why, c.why) || (why == "") != (n > 0) {
			t.Errorf("%s beside %v (mixed %v): %d, %q; want %d, %q", c.profile, c.used, c.mixed, n, why, c.want, c.why)
		}
	}
}

// For types and uses of any size: never more than the most, never room that the
// memory has not, and less or the same when more is used.
func TestFreeNeverOverflows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		types := map[string]catalog.VGPUType{}
		names := []string{"a", "b", "c", "d"}
		for _, n := range names {
			types[n] = catalog.VGPUType{
				Name: n, Memory: rapid.Uint64().Draw(t, "memory"), Max: rapid.Uint32().Draw(t, "max"),
				Mixed: rapid.Uint32().Draw(t, "mixed"), MIG: rapid.SampledFrom([]string{"", "", "1g.5gb", "3g", "g", "99999999999999999999g"}).Draw(t, "slice"),
			}
		}
		used := map[string]uint32{}
		for _, n := range append(names, "unknown") {
			if rapid.Bool().Draw(t, "is used") {
				used[n] = rapid.Uint32().Draw(t, "used")
			}
		}
		r := rules{types: types, memory: rapid.Uint64().Draw(t, "card"), mixed: rapid.Bool().Draw(t, "differ")}
		ty := types[rapid.SampledFrom(names).Draw(t, "type")]
		n, why := r.free(ty, used)
		if (why == "") != (n > 0) || n > max(ty.Max, 1) {
			t.Fatalf("%+v beside %v: %d, %q", ty, used, n, why)
		}
		more := map[string]uint32{}
		for name, n := range used {
			more[name] = n
		}
		name := rapid.SampledFrom(names).Draw(t, "one more")
		if more[name]++; more[name] == 0 {
			return
		}
		if again, _ := r.free(ty, more); again > n {
			t.Fatalf("%+v: %d beside %v, %d beside %v", ty, n, used, again, more)
		}
	})
}

func FuzzParseDescription(f *testing.F) {
	f.Add("num_heads=4, frl_config=60, framebuffer=8192M, max_instance=6")
	f.Add("low_gm_size: 128MB\nfence: 4\nframebuffer=,,=:")
	f.Fuzz(func(t *testing.T, s string) {
		if v := parseDescription(s); v.Memory > 1<<50 || v.Max > maxTypes {
			t.Fatalf("%+v", v)
		}
	})
}
