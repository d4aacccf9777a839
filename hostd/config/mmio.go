package config

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio/server"
)

// MMIO configures mediated GPUs: software GPUs whose registers the host traps.
type MMIO struct {
	GPUs []MediatedGPU `yaml:"gpus,omitempty"`
}

// MediatedGPU is one mediated GPU. Its parts all have the same memory.
type MediatedGPU struct {
	Name   string `yaml:"name"`
	Memory string `yaml:"memory"`           // of all parts together, such as 1GiB
	VMs    int    `yaml:"vms"`              // most VMs that have a part
	Policy string `yaml:"policy,omitempty"` // how VMs share its time: fair (the default), fifo, credit or band
}

// Model returns the GPU as its process makes it.
func (g MediatedGPU) Model() (server.Model, error) {
	n, err := size.Parse(g.Memory)
	if err != nil {
		return server.Model{}, fmt.Errorf("memory: %q is not a size", g.Memory)
	}
	m := server.Model{Memory: n, Parts: g.VMs, Policy: timeshare.Policy(cmp.Or(g.Policy, string(timeshare.Fair)))}
	switch m.Policy {
	case timeshare.Fair, timeshare.FIFO, timeshare.Credit, timeshare.Band:
	default:
		return m, fmt.Errorf("policy: %q is not fair, fifo, credit or band", g.Policy)
	}
	return m, m.Check()
}

func (m MMIO) validate(others []GPU) error {
	var errs []error
	names := map[string]bool{}
	for _, g := range others {
		names[g.ID] = true
	}
	for i, g := range m.GPUs {
		where := fmt.Sprintf("mmio.gpus[%d]", i)
		if !idPattern().MatchString(g.Name) {
			errs = append(errs, fmt.Errorf("%s.name: %q (want lower-case letters, digits, '.', '_' and '-', at most 48)", where, g.Name))
		}
		if names[g.Name] {
			errs = append(errs, fmt.Errorf("%s: there is another GPU %s", where, g.Name))
		}
		names[g.Name] = true
		if _, err := g.Model(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", where, err))
		}
	}
	return errors.Join(errs...)
}
