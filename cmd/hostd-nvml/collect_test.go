package main

import (
	"testing"

	driver "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"

	"github.com/gpuctl/gpuctl/hostd/inventory/nvml"
)

// A server of eight A100, one of them sliced. The mock has few functions, so
// that this is also a library that lacks most.
func TestCollectDGX(t *testing.T) {
	dgx := dgxa100.New()
	for i, d := range dgx.Devices {
		d.(*server.Device).GetPciInfoFunc = func() (driver.PciInfo, driver.Return) {
			return driver.PciInfo{Domain: 0, Bus: uint32(0x10 + i)}, driver.SUCCESS
		}
	}
	has := map[string]bool{
		"nvmlSystemGetCudaDriverVersion": true, "nvmlDeviceGetMemoryInfo": true, "nvmlDeviceGetName": true, "nvmlDeviceGetMigMode": true,
		"nvmlDeviceGetGpuInstanceProfileInfo": true,
	}
	opened := 0
	c := newCollector(func() (library, nvml.Status, string) {
		opened++
		return library{dgx, func(symbol string) bool { return has[symbol] }}, nvml.OK, ""
	})
	sliced, ret := dgx.DeviceGetHandleByIndex(3)
	if ret != driver.SUCCESS {
		t.Fatal(ret)
	}
	if ret, _ := sliced.SetMigMode(driver.DEVICE_MIG_ENABLE); ret != driver.SUCCESS {
		t.Fatal(ret)
	}
	answer := c.answer(nvml.Request{Version: nvml.Version, Number: 5, Op: nvml.List})
	if answer.Status != nvml.OK || answer.Number != 5 || answer.Driver != "550.54.15" || answer.CUDA != "12.4" || len(answer.GPUs) != 8 {
		t.Fatalf("got %+v", answer)
	}
	seen := map[string]bool{}
	for i, g := range answer.GPUs {
		if g.UUID == "" || g.Name == "" || seen[g.PCIAddress] || *g.Memory == 0 || g.Temperature != nil || g.Utilization != nil {
			t.Errorf("GPU %d: %+v", i, g)
		}
		seen[g.PCIAddress] = true
		if g.MIG == nil || g.MIG.Enabled != (i == 3) {
			t.Errorf("GPU %d: MIG %+v", i, g.MIG)
		}
	}
	if p := answer.GPUs[3].MIG.Profiles; len(p) == 0 || p[0].Name != "1g.5gb" || p[0].Max != 7 || p[0].Memory == 0 {
		t.Errorf("profiles: %+v", p)
	}
	if again := c.answer(nvml.Request{Version: nvml.Version, Op: nvml.Facts}); len(again.GPUs) != 8 || again.GPUs[0].Name != "" || again.GPUs[0].MIG != nil {
		t.Errorf("facts: %+v", again)
	}
	if opened != 1 {
		t.Errorf("opened %d times", opened)
	}
	if r := c.answer(nvml.Request{Version: nvml.Version, Op: nvml.Release}); r.Status != nvml.OK || c.opened {
		t.Errorf("release: %+v", r)
	}
}

func TestBadRequests(t *testing.T) {
	c := newCollector(func() (library, nvml.Status, string) {
		t.Error("the library was opened")
		return library{}, nvml.Failed, ""
	})
	for _, r := range []nvml.Request{{Version: 99, Op: nvml.List}, {Version: nvml.Version, Op: "reboot"}, {Version: nvml.Version}} {
		if a := c.answer(r); a.Status != nvml.Failed || a.Message == "" {
			t.Errorf("%+v: %+v", r, a)
		}
	}
}

func TestFirstBit(t *testing.T) {
	if firstBit(nil) != nil || firstBit([]uint{0, 0}) != nil || *firstBit([]uint{4}) != 2 || *firstBit([]uint{0, 1}) != 64 {
		t.Error("wrong")
	}
}
