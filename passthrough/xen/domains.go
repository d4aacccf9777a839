package xen

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Domain is a domain, from the hypervisor and xenstore.
type Domain struct {
	ID     uint16
	Name   string // empty: xenstore has none, as for a domain that cannot end
	UUID   string // empty: unknown
	Type   Type
	Dying  bool
	Paused bool
	Ran    bool // one of its vCPUs has run
}

// Domains returns the domains, sorted by id. The hypervisor lists them, and xenstore has
// their names.
func (h *Host) Domains(ctx context.Context) ([]Domain, error) {
	running, err := h.hv.Running(ctx)
	if err != nil {
		return nil, fmt.Errorf("list domains: %w", err)
	}
	out := make([]Domain, 0, len(running))
	for _, r := range running {
		d := Domain{ID: r.ID, UUID: r.UUID, Type: r.Type, Dying: r.Dying, Paused: r.Paused, Ran: r.Ran}
		id := strconv.Itoa(int(r.ID))
		if d.Name, err = h.optional(ctx, "/local/domain/"+id+"/name"); err != nil {
			return nil, err
		}
		if d.UUID == "" {
			vm, err := h.optional(ctx, "/local/domain/"+id+"/vm")
			if err != nil {
				return nil, err
			}
			d.UUID = strings.TrimPrefix(vm, "/vm/")
		}
		if d.Type == TypeUnknown {
			t, err := h.optional(ctx, "/libxl/"+id+"/type")
			if err != nil {
				return nil, err
			}
			switch t := Type(t); t {
			case TypePV, TypePVH, TypeHVM:
				d.Type = t
			}
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b Domain) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// optional reads a node that need not exist.
func (h *Host) optional(ctx context.Context, node string) (string, error) {
	s, err := h.store.Read(ctx, node)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return clean(s), err
}

func (h *Host) children(ctx context.Context, node string) ([]string, error) {
	names, err := h.store.List(ctx, node)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return names, err
}

// Assigned is a device that a domain has, or is about to get or lose.
type Assigned struct {
	Device  pci.Address
	Domain  uint16
	Slot    int    // in the guest, device and function in one byte; -1: unknown
	State   string // state of the handshake with a PV guest; for HVM guests it stays "initialised"
	Options string // for example msitranslate=0,power_mgmt=0,permissive=0,rdm_policy=strict
}

const (
	backendPCI  = "/local/domain/0/backend/pci"
	maxAssigned = 256 // of one domain
)

// Assigned returns the devices that toolstacks have given to domains, sorted by address,
// from the nodes of the PCI backend, which libxl writes for all kinds of guests. A device
// that two domains have is listed twice.
func (h *Host) Assigned(ctx context.Context) ([]Assigned, error) {
	domains, err := h.children(ctx, backendPCI)
	if err != nil {
		return nil, fmt.Errorf("list devices of domains: %w", err)
	}
	var out []Assigned
	for _, domain := range domains {
		id, err := strconv.ParseUint(domain, 10, 16)
		if err != nil {
			continue
		}
		instances, err := h.children(ctx, path.Join(backendPCI, domain))
		if err != nil {
			return nil, fmt.Errorf("list devices of domain %d: %w", id, err)
		}
		for _, instance := range instances {
			devices, err := h.backend(ctx, path.Join(backendPCI, domain, instance))
			if err != nil {
				return nil, fmt.Errorf("list devices of domain %d: %w", id, err)
			}
			for _, d := range devices {
				d.Domain = uint16(id)
				out = append(out, d)
			}
		}
	}
	slices.SortStableFunc(out, func(a, b Assigned) int {
		return cmp.Or(a.Device.Compare(b.Device), cmp.Compare(a.Domain, b.Domain))
	})
	return out, nil
}

// backend reads a backend's devices. Their numbers may have gaps. A device that is
// removed meanwhile is left out.
func (h *Host) backend(ctx context.Context, dir string) ([]Assigned, error) {
	names, err := h.children(ctx, dir)
	if err != nil {
		return nil, err
	}
	var out []Assigned
	for _, name := range names {
		n, ok := strings.CutPrefix(name, "dev-")
		if !ok || len(out) == maxAssigned {
			continue
		}
		s, err := h.optional(ctx, path.Join(dir, name))
		if err != nil {
			return nil, err
		}
		a, err := pci.ParseAddress(s)
		if err != nil {
			continue
		}
		d := Assigned{Device: a, Slot: -1}
		state, err := h.optional(ctx, path.Join(dir, "state-"+n))
		if err != nil {
			return nil, err
		}
		d.State = busState(state)
		if d.Options, err = h.optional(ctx, path.Join(dir, "opts-"+n)); err != nil {
			return nil, err
		}
		slot, err := h.optional(ctx, path.Join(dir, "vdevfn-"+n))
		if err != nil {
			return nil, err
		}
		if v, err := strconv.ParseUint(strings.TrimPrefix(slot, "0x"), 16, 8); err == nil {
			d.Slot = int(v)
		}
		out = append(out, d)
	}
	return out, nil
}

// busState returns the name of a state (xen/include/public/io/xenbus.h).
func busState(s string) string {
	n, err := strconv.Atoi(s)
	names := [...]string{"unknown", "initialising", "waiting", "initialised", "connected", "closing", "closed", "reconfiguring", "reconfigured"}
	if err != nil || n < 0 || n >= len(names) {
		return names[0]
	}
	return names[n]
}
