package inventory

import (
	"slices"
	"strings"
	"testing"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/pci/pcitest"
)

func uuid(last string) string { return "GPU-734814f7-e8f5-4d3a-ac70-86ea56f83e" + last }

// A card that OpenCL and NVIDIA's driver have is in the list once.
func TestCardOfBothIsOneGPU(t *testing.T) {
	memory := uint64(80 << 30)
	for name, opencl := range map[string]*gpuctlv1.GPU{
		"by address": {Id: "nvidia-0", Model: "NVIDIA H100", PciAddress: "0000:65:00.0", Runtime: &gpuctlv1.Runtime{Library: "x"}, Limits: &gpuctlv1.Limits{GlobalMemory: 79 << 30}},
		"by uuid":    {Id: "nvidia-0", Model: "NVIDIA H100", Uuid: "734814f7e8f54d3aac7086ea56f83e01", Runtime: &gpuctlv1.Runtime{Library: "x"}, Limits: &gpuctlv1.Limits{GlobalMemory: 79 << 30}},
	} {
		t.Run(name, func(t *testing.T) {
			tree := pcitest.New(t)
			tree.Add(pcitest.NVIDIACard("0000:65:00", "", 24, 1)...)
			cards, err := pci.Scan(tree.FS())
			if err != nil {
				t.Fatal(err)
			}
			pocl := &gpuctlv1.GPU{Id: "pocl", Model: "cpu", Limits: &gpuctlv1.Limits{GlobalMemory: 900 << 30}}
			answer := &nvml.Response{Driver: "580.1", GPUs: []nvml.GPU{
				{UUID: uuid("01"), Name: "NVIDIA H100", PCIAddress: "0000:65:00.0", Memory: &memory},
				{UUID: uuid("02"), Name: "NVIDIA H100", PCIAddress: "00000000:E5:00.0", Memory: &memory},
				{UUID: uuid("03"), Name: "NVIDIA H100", PCIAddress: "0000:f5:00.0", Memory: &memory, MIG: &nvml.MIG{Enabled: true}},
				{UUID: uuid("04"), Name: "NVIDIA H100", PCIAddress: "0000:f6:00.0", Lost: true},
			}}
			gpus, warnings := WithDriver([]*gpuctlv1.GPU{opencl, pocl}, answer, cards, nil)
			byID := map[string]*gpuctlv1.GPU{}
			for _, g := range gpus {
				byID[g.GetId()] = g
			}
			both, alone := byID["nvidia-0"], byID["0000:e5:00.0"]
			if len(gpus) != 3 || both.GetDriverGpu().GetUuid() != uuid("01") || both.GetPciAddress() != "0000:65:00.0" || both.GetRuntime() == nil || both.GetLimits().GetGlobalMemory() != 79<<30 {
				t.Fatalf("%v", gpus)
			}
			if id := both.GetDriverGpu().GetPciDevice(); id&0xffff != 0x10de || id>>16 == 0 {
				t.Errorf("PCI ids %#x", id)
			}
			if alone.GetRuntimeName() != CUDA || alone.GetRuntime() != nil || alone.GetLimits().GetGlobalMemory() != memory || alone.GetDriverGpu().GetPciAddress() != "0000:e5:00.0" {
				t.Errorf("%v", alone)
			}
			if pocl.GetDriverGpu() != nil || pocl.GetRank() != 1 {
				t.Errorf("%v", pocl)
			}
			if len(warnings) != 1 || !strings.Contains(warnings[0], "0000:f5:00.0 is partitioned (MIG)") {
				t.Error(warnings)
			}
		})
	}
}

// Cards with one UUID and different addresses are different cards: nothing is known to be
// the same that is not.
func TestAddressCountsMoreThanAUUID(t *testing.T) {
	g := &gpuctlv1.GPU{Id: "a", Model: "m", PciAddress: "0000:01:00.0", Uuid: uuid("01"), Limits: &gpuctlv1.Limits{}}
	gpus, _ := WithDriver([]*gpuctlv1.GPU{g}, &nvml.Response{GPUs: []nvml.GPU{{UUID: uuid("01"), PCIAddress: "0000:02:00.0"}}}, nil, nil)
	if len(gpus) != 2 || g.GetDriverGpu() != nil {
		t.Errorf("%v", gpus)
	}
	if gpus, warnings := WithDriver([]*gpuctlv1.GPU{g}, nil, nil, nil); !slices.Equal(gpus, []*gpuctlv1.GPU{g}) || warnings != nil {
		t.Errorf("%v %v", gpus, warnings)
	}
}
