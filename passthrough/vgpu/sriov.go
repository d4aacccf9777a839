package vgpu

import (
	"context"
	"fmt"
	"path"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sriov"
)

// vfProfile returns the profile of a card that has only virtual functions. It assumes
// that they share the card's memory equally. If there are none yet, the card's highest
// number is possible.
func (m *Manager) vfProfile(card *pci.Card, use Use) Profile {
	vfs, total := m.VFs(card)
	p := Profile{Name: VirtualFunction, Kind: SRIOV, Max: uint32(len(vfs)), Scheduled: use.Scheduled[VirtualFunction]}
	if len(vfs) == 0 {
		p.Max = uint32(min(total, maxTypes))
	}
	for _, a := range vfs {
		if use.held(a.String()) {
			p.Existing++
		}
	}
	if p.Max > 0 {
		p.Memory = m.rules(card, use).memory / uint64(p.Max)
	}
	p.Free = p.Max
	p.limit(int64(p.Max)-int64(p.Existing)-int64(p.Scheduled), "all virtual functions are out or scheduled")
	return p
}

// VFs returns the card's present virtual functions, and the highest number; 0: it cannot
// have any.
func (m *Manager) VFs(card *pci.Card) (vfs []pci.Address, total int) {
	pf := m.physical(card)
	if pf == nil {
		return nil, 0
	}
	return m.vfs(pf.Address), m.device(pf.Address).Most()
}

// Resize sets the number of the card's virtual functions. The kernel changes it only from
// 0 and to 0, so all existing functions are removed. The error wraps ErrInUse and names
// the function if one has an instance, is in use, or is bound to a driver for VMs. If the
// new functions cannot be made, the former number is restored.
func (m *Manager) Resize(ctx context.Context, card *pci.Card, n int, use Use) error {
	pf := m.physical(card)
	if pf == nil {
		return fmt.Errorf("%s has no virtual functions: is SR-IOV switched on in the firmware?", card.Address)
	}
	vfs, total := m.VFs(card)
	if n < 0 || n > total {
		return fmt.Errorf("%s: %d virtual functions are not from 0 to %d", pf.Address, n, total)
	}
	before := len(vfs)
	if n == before {
		return nil
	}
	for _, a := range vfs {
		if err := m.idle(a, use); err != nil {
			return fmt.Errorf("%s: change %d virtual functions to %d: %w", pf.Address, before, n, err)
		}
	}
	return m.device(pf.Address).Resize(ctx, n)
}

// device returns a function for package sriov.
func (m *Manager) device(pf pci.Address) sriov.Device {
	d := sriov.Device{Root: m.root, Dir: m.at(pf, "")}
	if m.enable != nil {
		d.Write = func(ctx context.Context, n int) (bool, error) { return m.enable(ctx, pf, n) }
	}
	return d
}

// idle returns an error if a virtual function must not be removed.
func (m *Manager) idle(a pci.Address, use Use) error {
	if use.held(a.String()) {
		return fmt.Errorf("%w: %s is held", ErrInUse, a)
	}
	if target, err := m.root.ReadLink(m.at(a, "driver")); err == nil {
		switch driver := path.Base(target); driver {
		case "pciback", "xen-pciback", "vfio-pci":
			return fmt.Errorf("%w: %s is bound to %s; return it first", ErrInUse, a, driver)
		}
	}
	if m.exists(m.at(a, typeFile)) {
		if now, err := m.currentType(a); err != nil {
			return err
		} else if now != 0 {
			return fmt.Errorf("%w: %s has a vGPU of type %d", ErrInUse, a, now)
		}
	}
	entries, err := m.root.ReadDir(m.at(a, ""))
	if err != nil {
		return fmt.Errorf("%s: %w", a, err)
	}
	for _, e := range entries {
		if IsUUID(e.Name()) {
			return fmt.Errorf("%w: %s has the mediated device %s", ErrInUse, a, e.Name())
		}
	}
	return nil
}
