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
	"time"

	"github.com/vishvananda/netlink"

	"github.com/gpuctl/gpuctl/internal/reason"
	"github.com/gpuctl/gpuctl/passthrough/sriov"
)

const (
	classNet    = "sys/class/net"
	carrierTime = 10 * time.Second // most time for a card to have its link again
)

// NIC describes an interface, and its device if it has one.
type NIC struct {
	Link
	Address   string // PCI address such as 0000:65:00.0; empty: no device, as for a bond
	Driver    string
	SRIOV     bool // it can have virtual functions
	Most      int  // most virtual functions; 0: the driver does not report it
	Functions []Function
}

// Function describes a virtual function that exists.
type Function struct {
	VF        // only Index is set if the card's driver does not report the rest
	Address   string
	Driver    string // driver that it is bound to; empty: none
	Interface string // its interface on this host; empty: none
	// InUse says in words why the function must not be removed; empty: it may be.
	InUse string
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
		return NIC{}, reason.Detail(fmt.Errorf("%w: %q", ErrNoLink, name)).On("nic", name)
	}
	link, err := h.Link(ctx, name)
	if err != nil {
		return NIC{}, err
	}
	out := NIC{Link: link, Address: h.target(h.dir(name)), Driver: h.target(path.Join(h.dir(name), "driver"))}
	d := sriov.Device{Root: h.root, Dir: h.dir(name)}
	now, ok := d.Now()
	if !ok {
		return out, nil
	}
	out.SRIOV, out.Most = true, d.Most()
	set, err := h.VFs(ctx, name)
	if err != nil {
		return NIC{}, err
	}
	addresses := d.Functions()
	for i := range now {
		f := Function{VF: VF{Index: i}}
		if at := slices.IndexFunc(set, func(v VF) bool { return v.Index == i }); at >= 0 {
			f.VF = set[at]
		}
		if a, ok := addresses[i]; ok {
			f.Address = a.String()
			if err := h.inspect(ctx, path.Join(d.Dir, fmt.Sprintf("virtfn%d", i)), &f); err != nil {
				return NIC{}, err
			}
		}
		out.Functions = append(out.Functions, f)
	}
	return out, nil
}

// inspect finds out what a virtual function is used for. If its interface is in another
// network namespace, it is in use there, as a VM's function is.
func (h *Host) inspect(ctx context.Context, dir string, f *Function) error {
	f.Driver = h.target(path.Join(dir, "driver"))
	found, err := h.root.ReadDir(path.Join(dir, "net"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("interface of %s: %w", f.Address, err)
	}
	for _, e := range found {
		f.Interface = e.Name()
	}
	switch {
	case f.Driver == "":
		return nil
	case f.Interface == "":
		f.InUse = fmt.Sprintf("driver %s has it without an interface on this host: a VM, a container or a program uses it", f.Driver)
		return nil
	}
	f.InUse, err = h.used(ctx, f.Interface)
	return err
}

// used returns in words what an interface is used for; empty: it is not in use.
func (h *Host) used(ctx context.Context, name string) (string, error) {
	l, err := h.link(ctx, name)
	if errors.Is(err, ErrNoLink) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	all, err := whole(ctx, h.k.LinkList)
	if err != nil {
		return "", fmt.Errorf("list interfaces: %w", err)
	}
	for _, up := range all {
		if a := up.Attrs(); a.Index == l.Attrs().MasterIndex || stacked(up) && a.ParentIndex == l.Attrs().Index {
			return fmt.Sprintf("its interface %s is below %s", name, a.Name), nil
		}
	}
	addresses, err := whole(ctx, func() ([]netlink.Addr, error) { return h.k.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return "", fmt.Errorf("addresses of %s: %w", name, err)
	}
	for _, a := range addresses {
		if !a.IP.IsLinkLocalUnicast() {
			return fmt.Sprintf("its interface %s has the address %s", name, a.IP), nil
		}
	}
	return "", nil
}

// Refusal contains the reasons why the number of an interface's virtual functions cannot
// be changed.
type Refusal struct {
	Reasons []string // in words
	invalid bool
}

func (r *Refusal) Error() string { return r.Unwrap().Error() + ": " + strings.Join(r.Reasons, "; ") }

// Unwrap returns ErrInvalid if the number is impossible, otherwise ErrInUse.
func (r *Refusal) Unwrap() error {
	if r.invalid {
		return ErrInvalid
	}
	return ErrInUse
}

// Resizable returns the reasons why the number of virtual functions cannot be changed to
// the given one, or nil. A change removes all existing functions, so none of them may be
// in use.
func (n NIC) Resizable(to int) *Refusal {
	r := &Refusal{}
	switch {
	case !n.SRIOV:
		r.invalid = true
		r.Reasons = append(r.Reasons, n.Name+" can have no virtual functions: it has no SR-IOV, or it is switched off in the firmware")
	case to == len(n.Functions):
		return nil
	case to < 0 || n.Most > 0 && to > n.Most:
		r.invalid = true
		r.Reasons = append(r.Reasons, fmt.Sprintf("%s can have 0 to %d virtual functions, not %d", n.Name, n.Most, to))
	}
	for _, f := range n.Functions {
		if f.InUse != "" {
			r.Reasons = append(r.Reasons, fmt.Sprintf("all virtual functions go when their number changes, and number %d of %s (%s) is in use: %s", f.Index, n.Name, f.Address, f.InUse))
		}
	}
	if len(r.Reasons) == 0 {
		return nil
	}
	return r
}

// Resize sets the number of an interface's virtual functions, and reads it back. The
// kernel requires 0 in between, so all functions are made again. If that fails, the
// former number is restored, or the error contains that this failed, too. The functions
// lose their settings in any case.
func (h *Host) Resize(ctx context.Context, pf string, n int) error {
	h.sizing.Lock()
	defer h.sizing.Unlock()
	nic, err := h.NIC(ctx, pf)
	if err != nil {
		return err
	}
	if against := nic.Resizable(n); against != nil {
		return against
	}
	if n == len(nic.Functions) {
		return nil
	}
	if err := (sriov.Device{Root: h.root, Dir: h.dir(pf)}).Resize(ctx, n); err != nil {
		return fmt.Errorf("%s: %w", pf, err)
	}
	if nic.Carrier {
		h.awaitCarrier(ctx, pf)
	}
	return nil
}

// awaitCarrier waits until a card has its link again, at most carrierTime. Drivers reset
// the link when the number of functions changes, and some refuse to set rates without a
// link. A missing link is no error here: Link reports it.
func (h *Host) awaitCarrier(ctx context.Context, name string) {
	ctx, cancel := context.WithTimeout(ctx, carrierTime)
	defer cancel()
	every := time.NewTicker(carrierTime / 100)
	defer every.Stop()
	for {
		if l, err := h.link(ctx, name); err != nil || carrier(l) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
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
	to, err := h.root.ReadLink(link)
	if err != nil {
		return ""
	}
	return path.Base(to)
}

// isName reports whether a name is a single path element.
func isName(s string) bool {
	return s != "" && s != "." && s != ".." && !strings.ContainsAny(s, "/\x00")
}
