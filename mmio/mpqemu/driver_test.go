package mpqemu_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/mmiotest"
	"github.com/gpuctl/gpuctl/mmio/mpqemu"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// bases is where the machine has the BARs of the mediated GPU.
var bases = [6]uint64{0xe0000000, 0xd0000000, 0, 0xd8000000, 0, 0xe8000000}

// Read makes the machine a device: an access of a driver is one of QEMU's tester.
func (m *machine) Read(a mmio.Access) uint64 {
	return m.get("read%s %#x", letter(a.Size), bases[a.BAR]+a.Offset) & mmio.Ones(a.Size)
}

func (m *machine) Write(a mmio.Access) {
	m.do("write%s %#x %#x", letter(a.Size), bases[a.BAR]+a.Offset, a.Data)
}

func letter(size uint8) string { return map[uint8]string{1: "b", 2: "w", 4: "l", 8: "q"}[size] }

// TestDriverComputesThroughRealQEMU lets two machines compute on one mediated GPU, each
// through a QEMU of its own, and checks every result.
func TestDriverComputesThroughRealQEMU(t *testing.T) {
	gpu, err := server.NewGPU(server.Model{Memory: 16 << 20, Parts: 4, Policy: timeshare.Fair}, func(e mediate.Event) {
		if e.Reason != 0 || e.Name == "hardware" {
			t.Error(e)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	worked := make(chan struct{})
	go func() { defer close(worked); gpu.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-worked })
	router := &mmio.Router{}
	for i := range 2 {
		vm := mmio.VM(i + 1)
		ours, theirs := pair(t)
		s, err := mpqemu.New(ours, vm, gpu.Function())
		if err != nil {
			t.Fatal(err)
		}
		stats := &mmio.Stats{}
		_, err = gpu.Create(mediate.Request{
			VM: vm, Name: fmt.Sprint("vm", i), Memory: 4 << 20, Channels: 4, Mode: mediate.Lazy, Tables: 1024, Guest: s.Guest(), Stats: stats,
		})
		if err == nil {
			err = router.Attach(vm, gpu, gpu.Function(), stats)
		}
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() { defer close(ended); _ = s.Serve(ctx, router) }()
		t.Cleanup(func() { cancel(); <-ended })
		m := start(t, theirs)
		for bar, at := range bases {
			if at != 0 {
				m.setConfig(uint32(0x10+4*bar), uint32(at))
			}
		}
		m.setConfig(4, 6)
		if err := mmiotest.ComputeWith(guestdriver.Options{Device: m, Fresh: true}, uint64(i), 16); err != nil {
			t.Errorf("machine %d: %v", i, err)
		}
		if c := stats.Total(); c.Doorbells == 0 || c.Refusals() != 0 {
			t.Errorf("machine %d: %+v", i, c)
		}
	}
}
