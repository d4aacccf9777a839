package platform

import (
	"context"
	"fmt"

	"github.com/gpuctl/gpuctl/hostd/cards/libvirthook"
	"github.com/gpuctl/gpuctl/internal/hook/wire"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Hook decides about libvirt's events. It never calls libvirt, because libvirtd waits for
// its answer.
func (r *Runner) Hook(ctx context.Context, e libvirthook.Event) (libvirthook.Answer, error) {
	switch e.Operation {
	case wire.Prepare:
		doc, functions, err := assigned(e)
		if err != nil {
			return libvirthook.Answer{}, err
		}
		m := vm.VM{UUID: canonical(doc.UUID()), Name: e.Domain}
		if err := r.Parts.PrepareStart(ctx, m); err != nil || len(functions) == 0 {
			return libvirthook.Answer{}, err
		}
		return libvirthook.Answer{}, r.Keeper.PrepareStart(ctx, m, functions)
	case wire.Release:
		if doc, _, err := assigned(e); err == nil {
			r.Keeper.Stopped(canonical(doc.UUID()))
			return libvirthook.Answer{}, nil
		}
		r.Keeper.Kick() // without the XML, Reconcile finds out what has ended
	case wire.Migrate:
		return r.incoming(e)
	case wire.Started:
		r.Keeper.Kick()
		return libvirthook.Answer{}, r.arrived(ctx, e)
	case wire.Stopped, wire.Reconnect, wire.Attach:
		r.Keeper.Kick()
	}
	return libvirthook.Answer{}, nil
}

// arrived is called when a domain is complete. One that a migration has brought is still paused
// then: libxl's driver lets it run when its source has said the last word.
func (r *Runner) arrived(ctx context.Context, e libvirthook.Event) error {
	doc, _, err := assigned(e)
	if err != nil { // nobody knows which VM it is, and it may run
		r.log.Warn("it is not seen to that a VM that has arrived is complete", "machine", e.Domain, "err", err)
		return nil
	}
	return r.Parts.Arrived(ctx, vm.VM{UUID: canonical(doc.UUID()), Name: e.Domain})
}

// assigned returns the PCI functions in the XML of an event.
func assigned(e libvirthook.Event) (*domxml.Document, []pci.Address, error) {
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

// incoming writes this host's cards into the XML of a VM that arrives. It can do so only
// if the driver passes the XML to the hook. qemu's does. libxl's of libvirt 9.0 does not;
// there, cards are attached after the arrival.
func (r *Runner) incoming(e libvirthook.Event) (libvirthook.Answer, error) {
	if len(e.XML) == 0 {
		return libvirthook.Answer{}, nil
	}
	doc, functions, err := assigned(e)
	if err != nil || len(functions) == 0 {
		return libvirthook.Answer{XML: e.XML}, err
	}
	held := r.Keeper.ReadyFor(canonical(doc.UUID()))
	for i, f := range functions {
		if i >= len(held) {
			return libvirthook.Answer{}, fmt.Errorf("vm %s arrives with %s and this host has no card ready for it: gpuctl migrate prepares one", e.Domain, f)
		}
		if f == held[i] {
			continue
		}
		if err := doc.Replace(domxml.Source{PCI: f}, domxml.Source{PCI: held[i]}); err != nil {
			return libvirthook.Answer{}, fmt.Errorf("vm %s: %w", e.Domain, err)
		}
	}
	return libvirthook.Answer{XML: doc.Bytes()}, nil
}
