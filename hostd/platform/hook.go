package platform

import (
	"context"
	"fmt"

	"github.com/gpuctl/gpuctl/hostd/devices"
	"github.com/gpuctl/gpuctl/hostd/hook"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Hook decides about libvirt's events. It calls libvirt for nothing: libvirtd
// waits for it.
func (p *Platform) Hook(ctx context.Context, e hook.Event) (hook.Answer, error) {
	switch e.Operation {
	case wire.Prepare:
		doc, functions, err := assigned(e)
		if err != nil || len(functions) == 0 {
			return hook.Answer{}, err
		}
		return hook.Answer{}, p.Keeper.Prepare(ctx, devices.Domain{UUID: canonical(doc.UUID()), Name: e.Domain}, functions)
	case wire.Release:
		if doc, _, err := assigned(e); err == nil {
			p.Keeper.Stopped(canonical(doc.UUID()))
			return hook.Answer{}, nil
		}
		p.Keeper.Kick() // without the XML it is found out what has ended
	case wire.Migrate:
		return p.incoming(e)
	case wire.Started, wire.Stopped, wire.Reconnect, wire.Attach:
		p.Keeper.Kick()
	}
	return hook.Answer{}, nil
}

// assigned are the PCI functions in the XML of an event.
func assigned(e hook.Event) (*domxml.Document, []pci.Address, error) {
	doc, err := domxml.Parse(e.XML)
	if err != nil {
		return nil, nil, fmt.Errorf("vm %s: its definition: %w", e.Domain, err)
	}
	var out []pci.Address
	for _, h := range doc.HostDevices() {
		if h.Source.MDev == "" {
			out = append(out, h.Source.PCI)
		}
	}
	return doc, out, nil
}

// incoming puts this host's cards into the XML of a VM that arrives, where the
// driver hands it over (qemu does; libxl of libvirt 9.0 gives nothing, and cards
// are plugged in after the arrival).
func (p *Platform) incoming(e hook.Event) (hook.Answer, error) {
	if len(e.XML) == 0 {
		return hook.Answer{}, nil
	}
	doc, functions, err := assigned(e)
	if err != nil || len(functions) == 0 {
		return hook.Answer{XML: e.XML}, err
	}
	held := p.Keeper.ReadyFor(canonical(doc.UUID()))
	for i, f := range functions {
		if i >= len(held) {
			return hook.Answer{}, fmt.Errorf("vm %s arrives with %s and this host has no card ready for it: gpuctl migrate prepares one", e.Domain, f)
		}
		if f == held[i] {
			continue
		}
		if err := doc.Replace(domxml.Source{PCI: f}, domxml.Source{PCI: held[i]}); err != nil {
			return hook.Answer{}, fmt.Errorf("vm %s: %w", e.Domain, err)
		}
	}
	return hook.Answer{XML: doc.Bytes()}, nil
}
