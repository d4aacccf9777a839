package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strings"
)

const classNet = "sys/class/net"

// NIC describes an interface, and its device if it has one.
type NIC struct {
	Link
	Address string // PCI address such as 0000:65:00.0; empty: no device, as for a bond
	Driver  string
}

// NICs lists the interfaces of hardware devices. Virtual functions and the host's ends of
// VMs' interfaces are left out.
func (h *Host) NICs(ctx context.Context) ([]NIC, error) {
	all, err := whole(ctx, h.k.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	t := topology{h: h}
	var out []NIC
	for _, l := range all {
		name := l.Attrs().Name
		if !isName(name) || !t.device(l) || h.exists(path.Join(h.dir(name), "physfn")) {
			continue
		}
		n, err := h.NIC(ctx, name)
		if errors.Is(err, ErrNoLink) {
			continue // removed since it was listed
		}
		if err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b NIC) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// NIC describes an interface of any kind. Errors wrap ErrNoLink if it does not exist.
func (h *Host) NIC(ctx context.Context, name string) (NIC, error) {
	if !isName(name) {
		return NIC{}, fmt.Errorf("%w: %q", ErrNoLink, name)
	}
	link, err := h.Link(ctx, name)
	if err != nil {
		return NIC{}, err
	}
	return NIC{Link: link, Address: h.target(h.dir(name)), Driver: h.target(path.Join(h.dir(name), "driver"))}, nil
}

// Toward returns the name of the interface by which packets to an address leave.
func (h *Host) Toward(ctx context.Context, to netip.Addr) (string, error) {
	name, err := h.toward(ctx, to.Unmap())
	if err != nil {
		return "", fmt.Errorf("way to %s: %w", to, err)
	}
	return name, nil
}

// dir returns the sysfs folder of an interface's device.
func (h *Host) dir(name string) string { return path.Join(classNet, name, "device") }

func (h *Host) exists(name string) bool {
	_, err := fs.Stat(h.root, name)
	return err == nil
}

// target returns the last element of a symbolic link's destination; empty: there is no
// such link.
func (h *Host) target(link string) string {
	to, err := fs.ReadLink(h.root, link)
	if err != nil {
		return ""
	}
	return path.Base(to)
}

// isName reports whether a name is a single path element.
func isName(s string) bool {
	return s != "" && s != "." && s != ".." && !strings.ContainsAny(s, "/\x00")
}
