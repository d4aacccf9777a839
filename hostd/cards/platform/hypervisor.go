package platform

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/gpuctl/gpuctl/hostd/cards"
	"github.com/gpuctl/gpuctl/internal/virt"
	"github.com/gpuctl/gpuctl/internal/vm"
	"github.com/gpuctl/gpuctl/passthrough/domxml"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/xen"
)

// Drivers that a card is bound to while a VM has it.
const (
	driverXen = "pciback"
	driverKVM = "vfio-pci"
)

// xenHypervisor reads Xen's lists of devices.
type xenHypervisor struct {
	host *xen.Host
	xl   *xen.XL
	log  *slog.Logger
}

func (x xenHypervisor) Driver() string { return driverXen }

func (x xenHypervisor) Owners(ctx context.Context) (map[pci.Address]vm.VM, error) {
	assigned, err := x.host.Assigned(ctx)
	if err != nil || len(assigned) == 0 {
		return nil, err
	}
	domains, err := x.host.Domains(ctx)
	if err != nil {
		return nil, err
	}
	byID := map[uint16]vm.VM{}
	for _, d := range domains {
		name := d.Name
		if name == "" {
			name = fmt.Sprintf("domain %d", d.ID)
		}
		byID[d.ID] = vm.VM{UUID: canonical(d.UUID), Name: name}
	}
	out := map[pci.Address]vm.VM{}
	for _, a := range assigned {
		d, known := byID[a.Domain]
		if !known {
			continue // an entry of a domain that has ended
		}
		out[a.Device] = d
	}
	return out, nil
}

// Building is true from when libxl has begun to make a domain. It gives it devices at the end.
func (x xenHypervisor) Building(ctx context.Context, uuid string) (bool, error) {
	domains, err := x.host.Domains(ctx)
	_, ok := unstarted(domains, uuid)
	return ok, err
}

// unstarted returns the domain of a VM that has never run.
func unstarted(domains []xen.Domain, uuid string) (id uint16, ok bool) {
	i := slices.IndexFunc(domains, func(d xen.Domain) bool { return canonical(d.UUID) == uuid && !d.Ran && !d.Dying })
	if i < 0 {
		return 0, false
	}
	return domains[i].ID, true
}

// GuestAddress returns where libxl has put a device, which it writes to xenstore. HVM guests
// have one bus.
func (x xenHypervisor) GuestAddress(ctx context.Context, uuid string, f pci.Address) (*pci.Address, error) {
	assigned, err := x.host.Assigned(ctx)
	if err != nil || len(assigned) == 0 {
		return nil, err
	}
	id, err := x.domain(ctx, uuid)
	if errors.Is(err, cards.ErrNotFound) {
		return nil, nil //nolint:nilnil // a VM that does not run has no device
	}
	if err != nil {
		return nil, err
	}
	for _, a := range assigned {
		if a.Domain == id && a.Device == f && a.Slot >= 0 {
			return &pci.Address{Device: uint8(a.Slot >> 3), Function: uint8(a.Slot & 7)}, nil
		}
	}
	return nil, nil //nolint:nilnil // it is unknown
}

func (x xenHypervisor) Dom0Access(card *pci.Card) string {
	a, err := x.host.Access(card.Address)
	if err != nil {
		x.log.Debug("access of dom0 is not known", "card", card.Address, "err", err)
		return ""
	}
	return string(a)
}

// HotplugBlocker is about libvirt's libxl driver and cards with several functions. The
// driver resets each function before it attaches it. If the function has no reset of its
// own, the driver resets the bus, and refuses that while another function of the card is
// in use.
func (x xenHypervisor) HotplugBlocker(card *pci.Card) string {
	if len(card.Functions) < 2 {
		return ""
	}
	for _, f := range card.Functions {
		alone := slices.ContainsFunc(f.ResetMethods, func(m string) bool { return m == "flr" || m == "af_flr" || m == "pm" })
		if !alone {
			return fmt.Sprintf("it has %d functions, %s has no reset of its own, and libvirt cannot plug such a card into a running VM of Xen: give it to the VM before it starts (gpuctl attach VM %s --stored)",
				len(card.Functions), f.Address, card.Address)
		}
	}
	return ""
}

// ForceDetach has xl remove a device that the device model (qemu) does not have any more.
func (x xenHypervisor) ForceDetach(ctx context.Context, uuid string, f pci.Address) error {
	id, err := x.domain(ctx, uuid)
	if err != nil {
		return err
	}
	return x.xl.ForceDetach(ctx, id, f)
}

// ForceAttach has xl attach a device, without libvirt.
func (x xenHypervisor) ForceAttach(ctx context.Context, uuid string, f pci.Address) error {
	id, err := x.domain(ctx, uuid)
	if err != nil {
		return err
	}
	return x.xl.Attach(ctx, id, f)
}

func (x xenHypervisor) domain(ctx context.Context, uuid string) (id uint16, err error) {
	domains, err := x.host.Domains(ctx)
	if err != nil {
		return 0, err
	}
	for _, d := range domains {
		if canonical(d.UUID) == uuid {
			return d.ID, nil
		}
	}
	return 0, fmt.Errorf("vm %s: %w", uuid, cards.ErrNotFound)
}

// kvmHypervisor uses libvirt's XML of running VMs.
type kvmHypervisor struct{ client *virt.Client }

func (kvmHypervisor) Driver() string                  { return driverKVM }
func (kvmHypervisor) Dom0Access(*pci.Card) string     { return "" }
func (kvmHypervisor) HotplugBlocker(*pci.Card) string { return "" }

func (kvmHypervisor) ForceDetach(context.Context, string, pci.Address) error { return errOneList }
func (kvmHypervisor) ForceAttach(context.Context, string, pci.Address) error { return errOneList }

// errOneList means that there is only libvirt's list of devices, so there is nothing to
// repair.
var errOneList = errors.New("only Xen keeps a list beside libvirt's")

// Building is false, as Owners has the devices of a VM from the beginning of its start.
func (kvmHypervisor) Building(context.Context, string) (bool, error) { return false, nil }

func (k kvmHypervisor) GuestAddress(ctx context.Context, uuid string, f pci.Address) (*pci.Address, error) {
	d, err := k.client.Lookup(ctx, uuid)
	if errors.Is(err, virt.ErrNotFound) {
		return nil, nil //nolint:nilnil // a VM that does not run has no device
	}
	if err != nil {
		return nil, err
	}
	doc, err := document(ctx, k.client, d, 0)
	if err != nil {
		return nil, err
	}
	return guestAddress(doc, f), nil
}

// guestAddress returns where a domain has a function; nil: it does not have it.
func guestAddress(doc *domxml.Document, f pci.Address) *pci.Address {
	for _, h := range doc.HostDevices() {
		if h.Source == (domxml.Source{PCI: f}) {
			return h.Guest
		}
	}
	return nil
}

func (k kvmHypervisor) Owners(ctx context.Context) (map[pci.Address]vm.VM, error) {
	out := map[pci.Address]vm.VM{}
	err := eachRunning(ctx, k.client, func(m vm.VM, doc *domxml.Document) {
		has := doc.Interfaces()
		for _, h := range doc.HostDevices() {
			if h.Source.MDev == "" {
				has = append(has, h.Source.PCI)
			}
		}
		for _, a := range has {
			out[a] = m
		}
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// eachRunning calls f with each VM that runs, and its definition. One that has ended since it was
// listed is left out.
func eachRunning(ctx context.Context, c *virt.Client, f func(vm.VM, *domxml.Document)) error {
	all, err := c.Domains(ctx)
	if err != nil {
		return err
	}
	for _, d := range all {
		if d.ID < 0 {
			continue
		}
		doc, err := document(ctx, c, d, 0)
		if errors.Is(err, virt.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		f(vm.VM{UUID: d.UUID.String(), Name: d.Name}, doc)
	}
	return nil
}

// noHypervisor is the Hypervisor of a host without VMs.
type noHypervisor struct{}

func (noHypervisor) Driver() string                  { return driverKVM }
func (noHypervisor) Dom0Access(*pci.Card) string     { return "" }
func (noHypervisor) HotplugBlocker(*pci.Card) string { return "" }

func (noHypervisor) ForceDetach(context.Context, string, pci.Address) error { return errOneList }
func (noHypervisor) ForceAttach(context.Context, string, pci.Address) error { return errOneList }

func (noHypervisor) Building(context.Context, string) (bool, error) { return false, nil }

func (noHypervisor) GuestAddress(context.Context, string, pci.Address) (*pci.Address, error) {
	return nil, nil //nolint:nilnil // there are no VMs
}

func (noHypervisor) Owners(context.Context) (map[pci.Address]vm.VM, error) {
	return map[pci.Address]vm.VM{}, nil
}

// canonical returns a UUID as libvirt writes it. Other text is returned unchanged.
func canonical(uuid string) string {
	u, err := virt.ParseUUID(strings.TrimSpace(uuid))
	if err != nil {
		return uuid
	}
	return u.String()
}

func document(ctx context.Context, c *virt.Client, d virt.Domain, flags virt.XMLFlags) (*domxml.Document, error) {
	text, err := c.XML(ctx, d, flags)
	if err != nil {
		return nil, err
	}
	doc, err := domxml.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("vm %s: its definition: %w", d.Name, err)
	}
	return doc, nil
}
