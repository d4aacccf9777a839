package virt

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/digitalocean/go-libvirt"
	"libvirt.org/go/libvirtxml"
)

// NodeDevice is a PCI function as libvirt sees it.
type NodeDevice struct {
	// Name is libvirt's, as pci_0000_65_00_0.
	Name string
	// Path is its folder below /sys.
	Path string
	// Address is DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as sysfs writes it.
	Address string
	Driver  string
	// Vendor, Product and Class are the PCI ids, zero when unknown.
	Vendor, Product uint16
	Class           uint32
	// IOMMUGroup and NUMA are -1 when there is none.
	IOMMUGroup, NUMA int
	// VirtualFunctions counts those that are enabled, MaxVirtualFunctions those
	// that could be.
	VirtualFunctions, MaxVirtualFunctions int
	// MDevTypes are the types of mediated devices that it offers.
	MDevTypes []string
}

// NodeDevices lists the host's PCI functions as libvirt knows them. A function
// that vanishes meanwhile is left out.
func (c *Client) NodeDevices(ctx context.Context) ([]NodeDevice, error) {
	names, err := do(ctx, c, c.query("nodedev-list", ""), func(rpc *libvirt.Libvirt) ([]libvirt.NodeDevice, error) {
		names, _, err := rpc.ConnectListAllNodeDevices(1, uint32(libvirt.ConnectListNodeDevicesCapPciDev))
		return names, err
	})
	if err != nil {
		return nil, err
	}
	devices := make([]NodeDevice, 0, len(names))
	for _, name := range names {
		xml, err := c.NodeDeviceXML(ctx, name.Name)
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		d, err := ParseNodeDevice(xml)
		if err != nil {
			return nil, fmt.Errorf("node device %s: %w", name.Name, err)
		}
		devices = append(devices, d)
	}
	return devices, nil
}

// NodeDeviceXML is the XML of a node device.
func (c *Client) NodeDeviceXML(ctx context.Context, name string) ([]byte, error) {
	return do(ctx, c, c.query("nodedev-dumpxml", name), func(rpc *libvirt.Libvirt) ([]byte, error) {
		s, err := rpc.NodeDeviceGetXMLDesc(name, 0)
		return []byte(s), err
	})
}

// ParseNodeDevice reads the XML of a PCI node device.
func ParseNodeDevice(xml []byte) (NodeDevice, error) {
	var raw libvirtxml.NodeDevice
	if err := raw.Unmarshal(string(xml)); err != nil {
		return NodeDevice{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	p := raw.Capability.PCI
	if p == nil {
		return NodeDevice{}, fmt.Errorf("%w: it is no PCI function", ErrInvalid)
	}
	if p.Domain == nil || p.Bus == nil || p.Slot == nil || p.Function == nil ||
		uint64(*p.Domain) > math.MaxUint32 || *p.Bus > 0xff || *p.Slot > 0x1f || *p.Function > 7 {
		return NodeDevice{}, fmt.Errorf("%w: it has no PCI address", ErrInvalid)
	}
	d := NodeDevice{
		Name: raw.Name, Path: raw.Path, IOMMUGroup: -1, NUMA: -1,
		Address: fmt.Sprintf("%04x:%02x:%02x.%x", *p.Domain, *p.Bus, *p.Slot, *p.Function),
		Vendor:  id[uint16](p.Vendor.ID, 16), Product: id[uint16](p.Product.ID, 16), Class: id[uint32](p.Class, 24),
	}
	if raw.Driver != nil {
		d.Driver = raw.Driver.Name
	}
	if p.IOMMUGroup != nil {
		d.IOMMUGroup = p.IOMMUGroup.Number
	}
	if p.NUMA != nil {
		d.NUMA = p.NUMA.Node
	}
	for _, s := range p.Capabilities {
		if s.VirtFunctions != nil {
			d.VirtualFunctions, d.MaxVirtualFunctions = len(s.VirtFunctions.Address), s.VirtFunctions.MaxCount
		}
		if s.MDevTypes != nil {
			for _, t := range s.MDevTypes.Types {
				d.MDevTypes = append(d.MDevTypes, t.ID)
			}
		}
	}
	return d, nil
}

// gone says that what was asked for is not there any more.
func gone(err error) bool { return errors.Is(err, ErrNotFound) }

// id reads 0x… of so many bits; zero when it is none.
func id[T uint16 | uint32](s string, bits int) T {
	n, err := strconv.ParseUint(strings.TrimPrefix(s, "0x"), 16, bits)
	if err != nil {
		return 0
	}
	return T(n)
}
