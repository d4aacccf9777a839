package inventory

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"pgregory.net/rapid"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/config"
)

func machine() fstest.MapFS {
	file := func(text string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(text)} }
	return fstest.MapFS{
		"etc/OpenCL/vendors/pocl.icd":                file("libpocl.so.2.10.0"),
		"etc/OpenCL/vendors/gpuctl.icd":              file("/usr/lib/gpuctl/libgpuctl-opencl.so\n"),
		"etc/OpenCL/vendors/nvidia.icd":              file("libnvidia-opencl.so.1\n"),
		"etc/OpenCL/vendors/empty.icd":               file(""),
		"opt/vendors/extra.icd":                      file("/opt/extra/libextra.so"),
		"usr/lib/x86_64-linux-gnu/libpocl.so.2.10.0": file(""),
		"usr/lib/x86_64-linux-gnu/libpocl.so.2":      file(""),
		"usr/lib/oclgrind/liboclgrind-rt-icd.so":     file(""),
		"proc/meminfo":                               file("MemTotal:       16314332 kB\nMemFree: 1 kB\n"),
	}
}

func TestLibraries(t *testing.T) {
	want := []Library{
		{"/opt/extra/libextra.so", "extra"},
		{"libnvidia-opencl.so.1", "nvidia"},
		{"/usr/lib/oclgrind/liboclgrind-rt-icd.so", "oclgrind"},
		{"/usr/lib/x86_64-linux-gnu/libpocl.so.2.10.0", "pocl"},
	}
	if got := Libraries(machine(), []string{"/opt/vendors"}); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := Libraries(fstest.MapFS{}, nil); len(got) != 0 {
		t.Errorf("an empty machine has %v", got)
	}
}

type probes func(*gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error)

func (p probes) Probe(_ context.Context, r *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
	return p(r)
}

func devices(names ...string) *gpuctlv1.ProbeResponse {
	r := &gpuctlv1.ProbeResponse{Platform: "test"}
	for i, n := range names {
		name, pci, _ := strings.Cut(n, "@")
		r.Devices = append(r.Devices, &gpuctlv1.ProbedDevice{Index: uint32(i), Name: name, PciAddress: pci, Limits: &gpuctlv1.Limits{GlobalMemory: uint64(i+1) << 30}})
	}
	return r
}

func TestDiscover(t *testing.T) {
	c := config.Default()
	c.GPUs = []config.GPU{
		{ID: "small", Runtime: "pocl", Env: map[string]string{"POCL_MEMORY_LIMIT": "1"}},
		{ID: "duo", Runtime: "pocl", Env: map[string]string{"POCL_DEVICES": "basic pthread"}, Devices: []uint32{1, 0, 7}},
		{ID: "none", Runtime: "pcol"},
		{ID: "oclgrind", Library: "/broken.so"},
	}
	gpus, warnings, err := Discover(t.Context(), machine(), c, nil, probes(func(r *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
		switch {
		case strings.Contains(r.GetLibrary(), "pocl"):
			if limit := r.GetEnv()["POCL_MEMORY_LIMIT"]; limit != "7" && limit != "1" { // 1: fixed, or after it offered less
				t.Errorf("PoCL's limit is %q", limit)
			}
			if r.GetEnv()["POCL_DEVICES"] != "" {
				return devices("basic-x", "pthread-x"), nil
			}
			return devices("pthread-x"), nil
		case strings.Contains(r.GetLibrary(), "nvidia"):
			return devices("NVIDIA H200@0000:19:00.0", "NVIDIA H200@0000:3b:00.0"), nil
		case strings.Contains(r.GetLibrary(), "oclgrind"):
			return devices("Oclgrind"), nil
		}
		return nil, errors.New("it crashed")
	}))
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, g := range gpus {
		ids = append(ids, g.GetId()+"/"+g.GetModel())
	}
	want := []string{
		"duo-0/pthread-x 2 GiB", "duo-1/basic-x", "nvidia-0/NVIDIA H200 1 GiB", "nvidia-1/NVIDIA H200 2 GiB", "oclgrind-2/Oclgrind",
		"pocl-pthread/pthread-x 1 GiB", "small/pthread-x 1 GiB",
	}
	if !slices.Equal(ids, want) {
		t.Errorf("got  %v\nwant %v", ids, want)
	}
	for _, part := range []string{`gpu none: no runtime "pcol"`, "gpu oclgrind: it crashed", "gpu duo: it has no device 7"} {
		if !slices.ContainsFunc(warnings, func(w string) bool { return strings.Contains(w, part) }) {
			t.Errorf("no warning %q in %q", part, warnings)
		}
	}
}

// TestCardsKeepTheirNames while VMs have some of them: runtimes number those that are left.
func TestCardsKeepTheirNames(t *testing.T) {
	for name, declared := range map[string][]config.GPU{"nvidia": nil, "pair": {{ID: "pair", Runtime: "nvidia"}}} {
		var names map[string]string
		for _, step := range []struct{ there, want []string }{
			{[]string{"H200@0000:19:00.0", "H200@0000:3b:00.0"}, []string{"-0", "-1"}},
			{[]string{"H200@0000:3b:00.0"}, []string{"-1"}},
			{[]string{"H200@0000:3b:00.0", "H200@0000:9b:00.0"}, []string{"-1", "-1-2"}}, // a new card
			{[]string{"H200@0000:19:00.0", "H200@0000:3b:00.0"}, []string{"-0", "-1"}},
		} {
			c := config.Default()
			c.GPUs, c.Discover = declared, declared == nil
			gpus, _, err := Discover(t.Context(), machine(), c, names, probes(func(r *gpuctlv1.Runtime) (*gpuctlv1.ProbeResponse, error) {
				if !strings.Contains(r.GetLibrary(), "nvidia") {
					return nil, errors.New("it crashed")
				}
				return devices(step.there...), nil
			}))
			if err != nil {
				t.Fatal(err)
			}
			names = Names(gpus, names)
			var ids []string
			for _, g := range gpus {
				ids = append(ids, strings.TrimPrefix(g.GetId(), name))
			}
			if !slices.Equal(ids, step.want) {
				t.Errorf("%s: %v are %v, want %v", name, step.there, ids, step.want)
			}
		}
	}
}

// Ranks follow what a device offers, whatever the order it was found in, and
// what the operator says comes before it.
func TestRankIsAnOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var gpus []*gpuctlv1.GPU
		for i := range rapid.IntRange(1, 8).Draw(t, "gpus") {
			gpus = append(gpus, &gpuctlv1.GPU{
				Id: string(rune('a' + i)), Model: rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "model"),
				PciAddress: rapid.SampledFrom([]string{"", "0000:01:00.0"}).Draw(t, "pci"),
				Limits: &gpuctlv1.Limits{
					GlobalMemory: rapid.Uint64Range(1, 3).Draw(t, "memory"), ComputeUnits: rapid.Uint32Range(1, 2).Draw(t, "units"),
					MaxAlloc: rapid.Uint64Range(1, 2).Draw(t, "alloc"),
				},
			})
		}
		models := []config.Model{{Name: "x", Rank: rapid.IntRange(-1, 1).Draw(t, "rank")}}
		Rank(gpus, models)
		byID := map[string]uint32{}
		for _, g := range gpus {
			byID[g.GetId()] = g.GetRank()
			for _, h := range gpus {
				same := g.GetModel() == h.GetModel() && g.GetPciAddress() == h.GetPciAddress() && g.GetLimits().GetComputeUnits() == h.GetLimits().GetComputeUnits() &&
					g.GetLimits().GetMaxAlloc() == h.GetLimits().GetMaxAlloc()
				if same && g.GetLimits().GetGlobalMemory() > h.GetLimits().GetGlobalMemory() && g.GetRank() <= h.GetRank() {
					t.Fatalf("%v is not above %v", g, h)
				}
				if models[0].Rank > 0 && g.GetModel() == "x" && h.GetModel() != "x" && g.GetRank() <= h.GetRank() {
					t.Fatalf("the operator's order is not kept: %v, %v", g, h)
				}
			}
		}
		Rank(rapid.Permutation(gpus).Draw(t, "shuffled"), models)
		for _, g := range gpus {
			if byID[g.GetId()] != g.GetRank() {
				t.Fatalf("the order of discovery changed the rank of %s", g.GetId())
			}
		}
	})
}
