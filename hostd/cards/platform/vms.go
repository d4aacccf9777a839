package platform

import (
	"context"
	"errors"
	"fmt"

	"libvirt.org/go/libvirtxml"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/internal/suggest"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// vms are the VMs that libvirt has as its domains.
type vms struct{ client *virt.Client }

// stateWord returns gpuctl's name of a domain's state.
func stateWord(s virt.State) string {
	switch s {
	case virt.Running, virt.Blocked: // Xen calls a VM blocked that has no work at the moment
		return "running"
	case virt.ShutOff, virt.NoState:
		return "shutoff"
	case virt.ShuttingDown:
		return "shutdown"
	default:
		return s.String()
	}
}

func (m vms) List(ctx context.Context) ([]vm.Info, error) {
	all, err := m.client.Domains(ctx)
	if err != nil {
		return nil, err
	}
	var out []vm.Info
	for _, d := range all {
		if m.client.Driver() == virt.Xen && d.ID == 0 {
			continue // dom0
		}
		one, err := m.describe(ctx, d)
		if errors.Is(err, virt.ErrNotFound) {
			continue // it has ended since it was listed
		}
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

func (m vms) describe(ctx context.Context, d virt.Domain) (vm.Info, error) {
	state, why, err := m.client.StateReason(ctx, d)
	if err != nil {
		return vm.Info{}, err
	}
	if inName, err := m.client.PausedInName(ctx, d, state, why); err != nil {
		return vm.Info{}, err
	} else if inName {
		state = virt.Running
	}
	text, err := m.client.XML(ctx, d, 0)
	if err != nil {
		return vm.Info{}, err
	}
	var x libvirtxml.Domain
	if err := x.Unmarshal(string(text)); err != nil {
		return vm.Info{}, fmt.Errorf("vm %s: its definition: %w", d.Name, err)
	}
	out := vm.Info{VM: vm.VM{UUID: d.UUID.String(), Name: d.Name}, State: stateWord(state), Type: kind(&x)}
	if x.Memory != nil {
		out.Memory = inBytes(uint64(x.Memory.Value), x.Memory.Unit)
	}
	if x.VCPU != nil {
		out.CPUs = uint32(x.VCPU.Value)
	}
	out.Persistent, err = m.client.Persistent(ctx, d)
	return out, err
}

// inBytes converts an amount of memory from libvirt's XML to bytes.
func inBytes(n uint64, unit string) uint64 {
	switch unit {
	case "b", "bytes":
		return n
	case "MiB", "M":
		return n << 20
	case "GiB", "G":
		return n << 30
	}
	return n << 10
}

func kind(x *libvirtxml.Domain) string {
	if x.Type != "xen" {
		return "kvm"
	}
	if x.OS == nil || x.OS.Type == nil {
		return ""
	}
	switch x.OS.Type.Type {
	case "hvm":
		return "hvm"
	case "xenpvh":
		return "pvh"
	}
	return "pv"
}

func (m vms) Find(ctx context.Context, ref string) (vm.Info, error) {
	if ref == "" {
		return vm.Info{}, fmt.Errorf("vm: %w: say which", cards.ErrInvalid)
	}
	d, err := m.find(ctx, ref)
	if err != nil {
		return vm.Info{}, err
	}
	return m.describe(ctx, d)
}

func (m vms) find(ctx context.Context, ref string) (virt.Domain, error) {
	d, err := m.client.Lookup(ctx, ref)
	if !errors.Is(err, virt.ErrNotFound) {
		return d, err
	}
	all, listErr := m.client.Domains(ctx)
	if listErr != nil {
		return virt.Domain{}, listErr
	}
	var names []string
	for _, d := range all {
		names = append(names, d.Name)
	}
	return virt.Domain{}, reason.Detail(fmt.Errorf("vm %q: %w on this host%s", ref, cards.ErrNotFound, suggest.Hint(ref, names))).On("vm", ref).Do("gpuctl vms lists them")
}

func (m vms) Check(ctx context.Context, uuid string) ([]*gpuctlv1.Reason, error) {
	d, err := m.find(ctx, uuid)
	if err != nil {
		return nil, err
	}
	doc, err := document(ctx, m.client, d, 0)
	if err != nil {
		return nil, err
	}
	var out []*gpuctlv1.Reason
	for _, p := range doc.Check(domxml.Use{HotPlug: true}) {
		if p.Fatal {
			out = append(out, &gpuctlv1.Reason{Code: string(p.Kind), Message: p.Message})
		}
	}
	return out, nil
}

func device(f pci.Address) domxml.HostDevice {
	return domxml.HostDevice{Source: domxml.Source{PCI: f}}
}

func (m vms) Attach(ctx context.Context, uuid string, f pci.Address, at *pci.Address) error {
	d, err := m.find(ctx, uuid)
	if err != nil {
		return err
	}
	h := device(f)
	if at != nil && m.client.Driver() == virt.QEMU { // the libxl driver tells libxl of no address (libxl_conf.c, libxlMakePCI)
		doc, err := document(ctx, m.client, d, 0)
		if err != nil {
			return err
		}
		h.Guest = place(doc, *at)
	}
	return m.client.Attach(ctx, d, h.XML(), virt.Live)
}

// place returns the address in the VM that a device is to get; nil: libvirt chooses one, as
// something else is there, or it is a part of a device of several functions, which can't be
// plugged in one after the other.
func place(doc *domxml.Document, at pci.Address) *pci.Address {
	if at.Function != 0 || doc.Occupied(at) {
		return nil
	}
	return &at
}

func (m vms) Detach(ctx context.Context, uuid string, f pci.Address) error {
	d, text, err := m.entry(ctx, uuid, f)
	if errors.Is(err, domxml.ErrNotFound) {
		text, err = device(f).XML(), nil // libvirt may have changed the VM nevertheless
	}
	if err != nil {
		return err
	}
	return m.client.Detach(ctx, d, text, virt.Live)
}

func (m vms) Listed(ctx context.Context, uuid string, f pci.Address) (bool, error) {
	_, _, err := m.entry(ctx, uuid, f)
	if errors.Is(err, domxml.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// entry returns the running VM's definition, and the XML of a function in it. If the
// function is not in it, the error wraps domxml.ErrNotFound.
func (m vms) entry(ctx context.Context, uuid string, f pci.Address) (d virt.Domain, text []byte, err error) {
	if d, err = m.find(ctx, uuid); err != nil {
		return d, nil, err
	}
	doc, err := document(ctx, m.client, d, 0)
	if err != nil {
		return d, nil, err
	}
	text, err = doc.DeviceXML(domxml.Source{PCI: f})
	return d, text, err
}

// edit changes a stored definition.
func (m vms) edit(ctx context.Context, uuid string, change func(*domxml.Document) error) error {
	d, err := m.find(ctx, uuid)
	if err != nil {
		return err
	}
	doc, err := document(ctx, m.client, d, virt.XMLInactive|virt.XMLSecure)
	if err != nil {
		return err
	}
	before := string(doc.Bytes())
	if err := change(doc); err != nil {
		return fmt.Errorf("vm %s: %w", d.Name, err)
	}
	if string(doc.Bytes()) == before {
		return nil
	}
	_, err = m.client.Define(ctx, doc.Bytes())
	return err
}

func (m vms) Store(ctx context.Context, uuid string, functions []pci.Address) error {
	return m.edit(ctx, uuid, func(doc *domxml.Document) error { return store(doc, functions) })
}

// store adds functions to a definition; the VM has them from its next start on.
func store(doc *domxml.Document, functions []pci.Address) error {
	for _, f := range functions {
		if err := doc.Add(device(f)); err != nil && !errors.Is(err, domxml.ErrExists) {
			return err
		}
	}
	if doc.Xen() && !doc.Passthrough() {
		if err := doc.EnablePassthrough(); err != nil {
			return err
		}
	}
	var errs []error
	for _, p := range doc.Check(domxml.Use{}) {
		if p.Fatal {
			errs = append(errs, fmt.Errorf("%w: %s", cards.ErrRefused, p.Message))
		}
	}
	return errors.Join(errs...)
}

func (m vms) Unstore(ctx context.Context, uuid string, functions []pci.Address) error {
	return m.edit(ctx, uuid, func(doc *domxml.Document) error {
		for _, f := range functions {
			if err := doc.Remove(domxml.Source{PCI: f}); err != nil && !errors.Is(err, domxml.ErrNotFound) {
				return err
			}
		}
		return nil
	})
}

// noVMs is the VMs of a host without libvirt.
type noVMs struct{ why string }

func (n noVMs) err() error {
	return fmt.Errorf("%w: this host has no VMs that hostd knows of (%s)", cards.ErrRefused, n.why)
}

func (n noVMs) List(context.Context) ([]vm.Info, error) { return nil, nil }

func (n noVMs) Find(context.Context, string) (vm.Info, error) {
	return vm.Info{}, n.err()
}

func (n noVMs) Check(context.Context, string) ([]*gpuctlv1.Reason, error) { return nil, n.err() }
func (n noVMs) Attach(context.Context, string, pci.Address, *pci.Address) error {
	return n.err()
}
func (n noVMs) Detach(context.Context, string, pci.Address) error         { return n.err() }
func (n noVMs) Listed(context.Context, string, pci.Address) (bool, error) { return false, n.err() }
func (n noVMs) Store(context.Context, string, []pci.Address) error        { return n.err() }
func (n noVMs) Unstore(context.Context, string, []pci.Address) error      { return n.err() }
