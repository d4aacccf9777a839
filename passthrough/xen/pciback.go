package xen

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

const (
	pcibackDir    = "sys/bus/pci/drivers/pciback"
	pcibackDriver = "pciback"
)

// Pciback is the state of pciback, the kernel's backend for PCI devices.
type Pciback struct {
	Loaded     bool
	Bound      []pci.Address          // devices that are bound to it
	Slots      []pci.Address          // addresses in its list of slots, with or without a device
	Interrupts map[pci.Address]string // devices with an interrupt handler: "on" or "off"
}

// Pciback reads the state of pciback. Loaded is false without the module.
func (h *Host) Pciback() (Pciback, error) {
	entries, err := fs.ReadDir(h.root, pcibackDir)
	if isNotExist(err) {
		return Pciback{}, nil
	} else if err != nil {
		return Pciback{}, fmt.Errorf("devices of pciback: %w", err)
	}
	p := Pciback{Loaded: true, Slots: parseSlots(read(h.root, pcibackDir+"/slots"))}
	p.Interrupts = parseHandlers(read(h.root, pcibackDir+"/irq_handlers"))
	for _, e := range entries {
		if a, err := pci.ParseAddress(e.Name()); err == nil {
			p.Bound = append(p.Bound, a)
		}
	}
	slices.SortFunc(p.Bound, pci.Address.Compare)
	return p, nil
}

// Assignable returns the devices that a domain could get: they are bound to pciback, and
// no domain has them.
func (h *Host) Assignable(ctx context.Context) ([]pci.Address, error) {
	p, err := h.Pciback()
	if err != nil {
		return nil, err
	}
	taken, err := h.Assigned(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(p.Bound, func(a pci.Address) bool {
		return slices.ContainsFunc(taken, func(d Assigned) bool { return d.Device == a })
	}), nil
}

// NativeDriver returns the driver from which libxl has taken a device ("xl
// pci-assignable-add"); empty if libxl has stored none.
func (h *Host) NativeDriver(ctx context.Context, a pci.Address) (string, error) {
	// Node names must not contain colons and dots.
	name := strings.NewReplacer(":", "-", ".", "-").Replace(a.String())
	driver, err := h.optional(ctx, "/libxl/pciback/"+name+"/driver_path")
	if err != nil {
		return "", fmt.Errorf("native driver of %s: %w", a, err)
	}
	return driver[strings.LastIndexByte(driver, '/')+1:], nil
}

// parseSlots parses one address in each line.
func parseSlots(data []byte) []pci.Address {
	var out []pci.Address
	for line := range strings.Lines(string(data)) {
		if a, err := pci.ParseAddress(strings.TrimSpace(line)); err == nil {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, pci.Address.Compare)
	return slices.Compact(out)
}

// parseHandlers parses lines such as "0000:65:00.0:on:acking:12".
func parseHandlers(data []byte) map[pci.Address]string {
	out := map[pci.Address]string{}
	for line := range strings.Lines(string(data)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 5)
		if len(fields) < 4 {
			continue
		}
		if a, err := pci.ParseAddress(strings.Join(fields[:3], ":")); err == nil && (fields[3] == "on" || fields[3] == "off") {
			out[a] = fields[3]
		}
	}
	return out
}

// hidden is a list of devices that pciback takes at boot, from its parameter hide:
// "(0000:65:00.0)(66:00.*)".
type hidden []pattern

// pattern has -1 for "any".
type pattern struct {
	domain, bus      uint32
	device, function int
}

func (h hidden) has(a pci.Address) bool {
	return slices.ContainsFunc(h, func(p pattern) bool {
		return p.domain == a.Domain && p.bus == uint32(a.Bus) &&
			(p.device < 0 || p.device == int(a.Device)) && (p.function < 0 || p.function == int(a.Function))
	})
}

// parseHidden parses up to the first error. The kernel would refuse the whole text.
func parseHidden(s string) hidden {
	var out hidden
	for {
		rest, ok := strings.CutPrefix(strings.TrimLeft(s, ", "), "(")
		if !ok {
			return out
		}
		one, rest, ok := strings.Cut(rest, ")")
		p, ok2 := parsePattern(one)
		if !ok || !ok2 {
			return out
		}
		out = append(out, p)
		s = rest
	}
}

func parsePattern(s string) (pattern, bool) {
	var p pattern
	parts := strings.Split(s, ":")
	if len(parts) == 3 {
		n, err := strconv.ParseUint(parts[0], 16, 32)
		if err != nil {
			return p, false
		}
		p.domain, parts = uint32(n), parts[1:]
	}
	if len(parts) != 2 {
		return p, false
	}
	bus, err := strconv.ParseUint(parts[0], 16, 8)
	if err != nil {
		return p, false
	}
	p.bus = uint32(bus)
	device, function, found := strings.Cut(parts[1], ".")
	d, ok1 := wild(device, 0x1f)
	f, ok2 := wild(function, 7)
	p.device, p.function = d, f
	return p, found && ok1 && ok2
}

func wild(s string, most uint64) (int, bool) {
	if s == "*" {
		return -1, true
	}
	n, err := strconv.ParseUint(s, 16, 8)
	return int(n), err == nil && n <= most
}
