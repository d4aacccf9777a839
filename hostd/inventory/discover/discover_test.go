package discover

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

func ptr[T any](v T) *T { return &v }

func cards(t *testing.T, build func(*pcitest.Tree)) []*pci.Card {
	t.Helper()
	tree := pcitest.New(t)
	build(tree)
	out, err := pci.Scan(tree.FS())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func nvidia(t *testing.T) []*pci.Card {
	return cards(t, func(tree *pcitest.Tree) { tree.Add(pcitest.NVIDIACard("0000:65:00", "", 24, 1)...) })
}

const digits = "734814f7e8f54d3aac7086ea56f83ef3"

func answer() *nvml.Response {
	return &nvml.Response{Status: nvml.OK, Driver: "550.54", GPUs: []nvml.GPU{{
		UUID: "GPU-734814f7-e8f5-4d3a-ac70-86ea56f83ef3", Name: "Quadro RTX 4000", PCIAddress: "0000:65:00.0", Memory: ptr(uint64(8 << 30)), NUMANode: ptr(0),
		Processes: []nvml.Process{{PID: 7, Name: "ours"}, {PID: 8, Name: "theirs"}},
		MIG:       &nvml.MIG{Enabled: true, Profiles: []nvml.MIGProfile{{Name: "1g.2gb", Memory: 2 << 30, Max: 4}}, Instances: []nvml.MIGInstance{{UUID: "MIG-11111111-e8f5-4d3a-ac70-86ea56f83ef3"}}},
	}}}
}

func runtime(id, address, uuid string) *gpuctlv1.GPU {
	return &gpuctlv1.GPU{
		Id: id, Model: "Quadro RTX 4000", Vendor: "NVIDIA Corporation", Type: "gpu", RuntimeName: "nvidia", Platform: "NVIDIA CUDA", Driver: "550.54",
		Uuid: uuid, PciAddress: address, Limits: &gpuctlv1.Limits{GlobalMemory: 7 << 30, ComputeUnits: 36}, Rank: 2,
	}
}

// One card that every source knows, each in its way of writing, is one GPU.
func TestMergeOneCard(t *testing.T) {
	want := &clusterv1.GPU{
		Id: "hosta/nvidia-0", Host: "hosta", Name: "nvidia-0", Model: "Quadro RTX 4000", Vendor: "NVIDIA Corporation", Type: "gpu",
		Limits: &gpuctlv1.Limits{GlobalMemory: 7 << 30, ComputeUnits: 36}, Runtime: "nvidia", Platform: "NVIDIA CUDA", Driver: "nvidia",
		Uuid: "GPU-734814f7-e8f5-4d3a-ac70-86ea56f83ef3", PciAddress: "0000:65:00.0", NumaNode: 1, IsolationGroup: "iommu-24", Health: clusterv1.Health_HEALTH_OK,
		Rank: 2, Present: true, RuntimeKey: "k", Kinds: []string{"passthrough", "slice", "remote"}, Processes: []*clusterv1.Process{{Pid: 8, Name: "theirs"}},
		Profiles: []*clusterv1.Profile{{Name: "1g.2gb", Memory: 2 << 30, MaxInstances: 4}},
	}
	for name, r := range map[string]*gpuctlv1.GPU{
		"by its address": runtime("nvidia-0", "00000000:65:00.0", ""), "by its UUID": runtime("nvidia-0", "", digits), "by a slice": runtime("nvidia-0", "", "11111111e8f54d3aac7086ea56f83ef3"),
	} {
		got, warnings := Merge(Input{
			Host: "hosta", Cards: nvidia(t), NVML: answer(), Runtimes: []*gpuctlv1.GPU{r},
			RuntimeKey: func(*gpuctlv1.GPU) string { return "k" }, Ours: func(pid uint32) bool { return pid == 7 },
		})
		if d := cmp.Diff([]*clusterv1.GPU{want}, got, protocmp.Transform()); d != "" || len(warnings) != 0 {
			t.Errorf("%s: %v\n%s", name, warnings, d)
		}
	}
}

// Where OpenCL has no runtime for it, the card is what NVML says, and sessions of CUDA can
// use it.
func TestMergeCardOfTheDriverAlone(t *testing.T) {
	r := &gpuctlv1.GPU{
		Id: "0000:65:00.0", Model: "model", RuntimeName: "cuda", Rank: 3, PciAddress: "0000:65:00.0", Limits: &gpuctlv1.Limits{GlobalMemory: 1},
		DriverGpu: &gpuctlv1.DriverGPU{Uuid: "GPU-1"},
	}
	got, warnings := Merge(Input{
		Host: "h", Cards: nvidia(t), NVML: answer(), Runtimes: []*gpuctlv1.GPU{r}, RuntimeKey: func(*gpuctlv1.GPU) string { return "k" },
	})
	if len(got) != 1 || len(warnings) != 0 {
		t.Fatalf("%v %v", got, warnings)
	}
	g := got[0]
	if g.GetName() != "0000:65:00.0" || g.GetModel() != "Quadro RTX 4000" || g.GetLimits().GetGlobalMemory() != 8<<30 || g.GetRank() != 3 ||
		g.GetRuntimeKey() != "k" || !slices.Equal(g.GetEngines(), []string{"driver"}) {
		t.Errorf("%v", g)
	}
}

func TestMergeHealth(t *testing.T) {
	unhealthy := fmt.Errorf("%w: no answer in 30s", nvml.ErrUnhealthy)
	for _, c := range []struct {
		name   string
		change func(*Input)
		health clusterv1.Health
		why    string
	}{
		{"nobody was asked", func(*Input) {}, clusterv1.Health_HEALTH_OK, ""},
		{"NVML is released", func(in *Input) { in.NVMLErr = nvml.ErrReleased }, clusterv1.Health_HEALTH_OK, ""},
		{"NVML hangs", func(in *Input) { in.NVMLErr = unhealthy }, clusterv1.Health_HEALTH_DEGRADED, "its health is not known: NVML does not work: no answer in 30s"},
		{"NVML hangs now", func(in *Input) { in.NVML, in.NVMLErr = answer(), unhealthy }, clusterv1.Health_HEALTH_DEGRADED, "NVML does not work: no answer in 30s"},
		{"no library", func(in *Input) { in.NVMLErr = nvml.ErrNoDriver }, clusterv1.Health_HEALTH_DEGRADED, "its health is not known: no NVIDIA driver"},
		{"NVML does not list it", func(in *Input) { in.NVML = &nvml.Response{} }, clusterv1.Health_HEALTH_FAILED, "the NVIDIA driver is bound but does not list it"},
		{"NVML lists a fault", func(in *Input) {
			in.NVML = answer()
			in.NVML.GPUs[0].Xids = []nvml.Xid{{Code: 79, Count: 1}}
		}, clusterv1.Health_HEALTH_FAILED, "Xid 79"},
		{"no driver", func(in *Input) { in.Cards[0].Main().Driver = "" }, clusterv1.Health_HEALTH_DEGRADED, "no driver is bound"},
		{"held for a VM", func(in *Input) { in.Cards[0].Main().Driver, in.NVMLErr = "pciback", nvml.ErrNoDriver }, clusterv1.Health_HEALTH_OK, ""},
		{"dead", func(in *Input) { in.Cards[0].Main().Config.Dead = true }, clusterv1.Health_HEALTH_FAILED, "its configuration space reads all ones: it does not answer"},
		{"asleep", func(in *Input) {
			in.Cards[0].Main().Config.Dead, in.Cards[0].Main().PowerState = true, "D3cold"
		}, clusterv1.Health_HEALTH_OK, ""},
		{"a function is dead", func(in *Input) { in.Cards[0].Functions[1].Config.Dead = true }, clusterv1.Health_HEALTH_DEGRADED, "function 0000:65:00.1 does not answer"},
		{"dead and not listed", func(in *Input) {
			in.Cards[0].Main().Config.Dead, in.NVML = true, &nvml.Response{}
		}, clusterv1.Health_HEALTH_FAILED, "its configuration space reads all ones: it does not answer; the NVIDIA driver is bound but does not list it"},
	} {
		in := Input{Host: "h", Cards: nvidia(t)}
		c.change(&in)
		got, _ := Merge(in)
		if len(got) != 1 || got[0].GetHealth() != c.health || got[0].GetHealthReason() != c.why {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestMergeNames(t *testing.T) {
	amd := cards(t, func(tree *pcitest.Tree) {
		tree.Write("usr/share/misc/pci.ids", "1002  Advanced Micro Devices, Inc. [AMD/ATI]\n\t744c  Navi 31 [Radeon RX 7900 XTX]\n")
		tree.Add(pcitest.Port("0000:00:03.1", "", 5, pci.PortRoot, nil))
		tree.Add(pcitest.AMDCard("0000:0a", "0000:0b", "0000:0c", "0000:00:03.1", 17, nil)...)
		tree.Add(pcitest.SRIOVAccelerator("0000:17", "", 40, 0, 16, 3)...)
		console := pcitest.NVIDIACard("0000:02:00", "", 3, 0)[0]
		console.Vendor = 0x1a03
		tree.Add(console)
		emulated := console
		emulated.Address, emulated.Vendor, emulated.Class = "0000:03:00.0", 0x1234, 0x038000
		tree.Add(emulated) // no VGA: taken
	})
	pocl := &gpuctlv1.GPU{Id: "pocl-cpu", Model: "cpu", Type: "cpu", RuntimeName: "pocl", Driver: "3.1", Uuid: "00000000-0000-0000-0000-000000000000", Limits: &gpuctlv1.Limits{GlobalMemory: 1}}
	small := &gpuctlv1.GPU{Id: "small", Model: "cpu", Type: "cpu", Uuid: pocl.GetUuid()}
	lone := answer()
	lone.GPUs[0].PCIAddress = "0000:99:00.0" // NVML knows a card that sysfs does not show
	got, warnings := Merge(Input{Host: "h", Cards: amd, NVML: lone, Runtimes: []*gpuctlv1.GPU{
		pocl, small, runtime("nvidia-0", "0000:17:00.0", ""), runtime("other", "0000:17:00.5", ""), runtime("nvidia-0", "0000:50:00.0", ""),
	}})
	var lines []string
	for _, g := range got {
		lines = append(lines, fmt.Sprintf("%s|%s|%s|%s|%s|%d|%s", g.GetId(), g.GetModel(), g.GetType(), g.GetDriver(), g.GetPciAddress(), g.GetLimits().GetGlobalMemory()>>20, g.GetIsolationGroup()))
	}
	want := []string{
		"h/0000:03:00.0|1234:1eb1|gpu|nvidia|0000:03:00.0|0|iommu-3",
		"h/0000:0c:00.0|Radeon RX 7900 XTX|gpu|amdgpu|0000:0c:00.0|24560|iommu-17",
		"h/0000:99:00.0|Quadro RTX 4000|gpu|nvidia|0000:99:00.0|8192|",
		"h/nvidia-0|Quadro RTX 4000|gpu|nvidia|0000:17:00.0|7168|iommu-40",
		"h/pocl-cpu|cpu|cpu|3.1||0|",
		"h/small|cpu|cpu|||0|",
	}
	if d := cmp.Diff(want, lines); d != "" {
		t.Error(d)
	}
	for _, part := range []string{"gpu other is the same card as nvidia-0", "gpu nvidia-0: there is another of that name"} {
		if !slices.ContainsFunc(warnings, func(w string) bool { return strings.Contains(w, part) }) {
			t.Errorf("no warning %q in %q", part, warnings)
		}
	}
	if len(warnings) != 2 {
		t.Errorf("warnings: %q", warnings)
	}
}

func TestMergeConsoleWithARuntime(t *testing.T) {
	c := cards(t, func(tree *pcitest.Tree) {
		f := pcitest.NVIDIACard("0000:02:00", "", 3, 0)[0]
		f.Vendor = 0x1a03
		tree.Add(f)
	})
	if got, _ := Merge(Input{Cards: c}); len(got) != 0 {
		t.Errorf("got %v", got)
	}
	if got, _ := Merge(Input{Cards: c, Runtimes: []*gpuctlv1.GPU{runtime("x", "0000:02:00.0", "")}}); len(got) != 1 {
		t.Errorf("got %v", got)
	}
}

func TestMergeNothing(t *testing.T) {
	if got, warnings := Merge(Input{Host: "h", NVMLErr: errors.New("x")}); len(got)+len(warnings) != 0 {
		t.Errorf("got %v, %v", got, warnings)
	}
}

func TestFacts(t *testing.T) {
	a := answer()
	a.GPUs[0].Utilization = ptr(uint32(93))
	gpus := []*clusterv1.GPU{
		{Id: "h/a", PciAddress: "0000:65:00.0"}, {Id: "h/b", Uuid: digits}, {Id: "h/c"}, {Id: "h/d", PciAddress: "0000:66:00.0"},
	}
	got := Facts(gpus, a)
	if len(got) != 2 || got[0].GetGpu() != "h/a" || got[1].GetGpu() != "h/b" || got[0].GetUtilization() != 93 {
		t.Errorf("got %v", got)
	}
	if got := Facts(gpus, nil); len(got) != 0 {
		t.Errorf("got %v", got)
	}
}

// What VMs can be given of a card and what MIG makes of it are its profiles;
// of one name the former counts.
func TestMergeProfiles(t *testing.T) {
	in := Input{Host: "hosta", Cards: nvidia(t), NVML: answer(), Profiles: func(c *pci.Card) []*clusterv1.Profile {
		return []*clusterv1.Profile{{Name: "RTX4000-2Q", Memory: 2 << 30, MaxInstances: 4, Apart: "time 2GiB"}}
	}}
	gpus, _ := Merge(in)
	want := []*clusterv1.Profile{
		{Name: "RTX4000-2Q", Memory: 2 << 30, MaxInstances: 4, Apart: "time 2GiB"},
		{Name: "1g.2gb", Memory: 2 << 30, MaxInstances: 4, Apart: "mig"},
	}
	if d := cmp.Diff(want, gpus[0].GetProfiles(), protocmp.Transform()); d != "" {
		t.Error(d)
	}
	in.Profiles = func(*pci.Card) []*clusterv1.Profile { return []*clusterv1.Profile{{Name: "1g.2gb", MaxInstances: 1}} }
	if gpus, _ = Merge(in); len(gpus[0].GetProfiles()) != 1 || gpus[0].GetProfiles()[0].GetMaxInstances() != 1 {
		t.Errorf("%v", gpus[0].GetProfiles())
	}
}
