package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/guest/vm/profile"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// cudaLibrary is NVIDIA's driver for programs. Where it is, CUDA programs can be sessions
// without any OpenCL runtime.
const cudaLibrary = "libcuda.so.1"

// serviceTimeout is how long a service of the VM may take to stop or start.
const serviceTimeout = 30 * time.Second

// Driver is the engine of sessions of CUDA processes.
type Driver interface {
	// GPUs returns the GPUs that NVIDIA's driver shows, and their memory in bytes.
	GPUs(ctx context.Context) (gpus []*gpuctlv1.DriverGPU, memory []uint64, err error)
}

// Services are the VM's services that watch GPUs, such as nvidia-persistenced. They have
// cards open, and are stopped while a card is away.
type Services interface {
	// Watching returns those that have one of the functions open.
	Watching(ctx context.Context, functions []pci.Address) ([]string, error)
	Stop(ctx context.Context, service string) error
	Start(ctx context.Context, service string) error
}

// withDriver adds to the target of a function, which is nil if no OpenCL runtime works, how
// CUDA programs use it. It returns nil if neither can.
func (a *Agent) withDriver(ctx context.Context, f function, p *profile.Profile, t *gpuctlv1.Target) *gpuctlv1.Target {
	if a.cfg.Driver == nil || !p.CUDA {
		return t
	}
	gpus, memory, err := a.cfg.Driver.GPUs(ctx)
	if err != nil {
		a.log.Warn("ask NVIDIA's driver for its GPUs", "device", f.address, "err", err)
		return t
	}
	i := slices.IndexFunc(gpus, func(g *gpuctlv1.DriverGPU) bool {
		at, err := pci.ParseAddress(g.GetPciAddress())
		return err == nil && at == f.address
	})
	if i < 0 {
		return t
	}
	if t == nil {
		model := p.Model
		if model == "" {
			model = gpus[i].GetModel()
		}
		t = &gpuctlv1.Target{Gpu: gpuID(f.address), Model: model, Limits: &gpuctlv1.Limits{GlobalMemory: memory[i], MaxAlloc: memory[i]}}
	}
	t.Driver = []*gpuctlv1.DriverGPU{gpus[i]}
	return t
}

// awaitsDriver reports whether NVIDIA's driver is installed and does not show the GPU of a
// target yet. It takes a while after the card was plugged in.
func (a *Agent) awaitsDriver(p *profile.Profile, t *gpuctlv1.Target) bool {
	return a.cfg.Driver != nil && p.CUDA && len(t.GetDriver()) == 0 && a.kernel.hasLibrary(cudaLibrary)
}

// quiet stops the services that watch a function. They are journalled before, so that they
// start again when a GPU is there. The caller holds turn.
func (a *Agent) quiet(ctx context.Context, at pci.Address) error {
	if a.cfg.Services == nil {
		return nil
	}
	watching, err := a.cfg.Services.Watching(ctx, []pci.Address{at})
	if err != nil {
		return fmt.Errorf("%s: find out which services watch it: %w", at, err)
	}
	for _, s := range watching {
		if err := a.journal.change(func(d *journalData) {
			if !slices.Contains(d.Stopped, s) {
				d.Stopped = append(slices.Clone(d.Stopped), s)
			}
		}); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, serviceTimeout)
		err := a.cfg.Services.Stop(ctx, s)
		cancel()
		if err != nil {
			return fmt.Errorf("%s: stop %s, which watches it: %w", at, s, err)
		}
		a.log.Info("service stopped", "service", s, "device", at)
	}
	return nil
}

// wakeServices starts what quiet has stopped. One that does not start is tried again at the
// next look. The caller holds turn.
func (a *Agent) wakeServices(ctx context.Context) {
	for _, s := range slices.Clone(a.journal.data.Stopped) {
		ctx, cancel := context.WithTimeout(ctx, serviceTimeout)
		err := a.cfg.Services.Start(ctx, s)
		cancel()
		if err == nil {
			err = a.journal.change(func(d *journalData) {
				d.Stopped = slices.DeleteFunc(slices.Clone(d.Stopped), func(o string) bool { return o == s })
			})
		}
		if err != nil {
			a.log.Warn("service not started again", "service", s, "err", err)
			continue
		}
		a.log.Info("service started", "service", s)
	}
}

// watchable reports whether a GPU that services may watch is there, and none that is
// released.
func (a *Agent) watchable() bool {
	there := false
	for _, d := range a.list() {
		if d.held || d.released {
			return false
		}
		there = there || d.profile != nil && d.profile.CUDA && d.driver != "" && d.profile.Binds(d.driver)
	}
	return there
}
