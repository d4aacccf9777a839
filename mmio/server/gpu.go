package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

const (
	mebibyte = 1 << 20
	// tablesPerPart is how many frames of page tables a part may have: those for 1 GiB of
	// small pages, with its directory and room to replace some.
	tablesPerPart = 1024
	overdue       = 10 * time.Second
)

// Model describes a mediated GPU.
type Model struct {
	Memory uint64 // bytes that parts can have in all, a multiple of 1 MiB
	Parts  int    // most parts
	Policy timeshare.Policy
}

// Check returns why there can be no such GPU.
func (m Model) Check() error {
	switch {
	case m.Memory == 0 || m.Memory%mebibyte != 0 || m.Memory > 8<<30:
		return fmt.Errorf("memory of %d bytes: take a multiple of 1 MiB, up to 8 GiB", m.Memory)
	case m.Parts < 1 || m.Parts > MaxParts:
		return fmt.Errorf("%d parts: take 1 to %d", m.Parts, MaxParts)
	case m.Memory/uint64(m.Parts) < mebibyte || m.Memory/uint64(m.Parts) > 1<<30:
		return fmt.Errorf("%d parts of %d bytes: each must have 1 MiB to 1 GiB", m.Parts, m.Memory)
	}
	return nil
}

// Each is the memory of a part: a multiple of 1 MiB.
func (m Model) Each() uint64 { return m.Memory / uint64(m.Parts) / mebibyte * mebibyte }

// Channels is how many channels a part has.
func (m Model) Channels() int { return max(1, nvc0.Channels/m.Parts) }

// NewGPU makes the model and its mediator. events is told what happens to VMs.
func NewGPU(m Model, events func(mediate.Event)) (*mediate.GPU, error) {
	if err := m.Check(); err != nil {
		return nil, err
	}
	reserve := uint64(m.Parts+1) * tablesPerPart * nvc0.PageSize
	var gpu *mediate.GPU
	hw, err := nvc0.New(nvc0.Config{
		VRAM: m.Memory + reserve, Mediated: true,
		Violated: func(v nvc0.Violation) {
			events(mediate.Event{Name: "hardware", Text: fmt.Sprintf("isolation violated: %v", v)})
		},
		Bus: func(on nvc0.Owner, addr uint64, p []byte, write bool) bool {
			return gpu.DMA(on, addr, p, write)
		},
	})
	if err != nil {
		return nil, err
	}
	policy := timeshare.DefaultConfig(m.Policy)
	policy.Overdue = overdue
	epoch := time.Now()
	gpu, err = mediate.New(mediate.Config{
		Hardware: hw, Clock: func() time.Duration { return time.Since(epoch) }, Policy: policy, Reserve: reserve, Events: events,
	})
	return gpu, err
}

// request is what a part is to the mediator.
func (s *Server) request(p *part) mediate.Request {
	mode := mediate.Mode(p.Mode)
	if mode == "" {
		mode = mediate.Lazy
	}
	return mediate.Request{
		VM: p.vm, Name: p.Name, Memory: p.Memory, Channels: s.Model.Channels(), Weight: p.Weight, Mode: mode,
		Tables: tablesPerPart, Guest: p.server, Stats: p.stats,
	}
}

// create gives a VM a part of the GPU.
func (s *Server) create(p *part) error {
	_, err := s.GPU.Create(s.request(p))
	if errors.Is(err, mediate.ErrConfig) || errors.Is(err, mediate.ErrExhausted) {
		err = fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return err
}

// run makes the GPU work until ctx ends.
func (s *Server) run(ctx context.Context) { s.GPU.Run(ctx) }
