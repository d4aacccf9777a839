package xen

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Log is what the hypervisor's log contains about devices. The log is a ring, so older
// messages may be missing.
type Log struct {
	IOMMU              State
	InterruptRemapping State
	Reserved           []Reserved
	Refused            []Refused
	Faults             map[pci.Address]int // DMA that the IOMMU has blocked
}

// Reserved is memory that the firmware reserves for devices (RMRR). Xen logs it with
// "iommu=verbose". Xen gives no device away that shares such a region.
type Reserved struct {
	Start, End uint64 // inclusive; zeros: not logged
	Devices    []pci.Address
}

// Refused is a device that Xen has refused to assign because it shares reserved memory.
type Refused struct {
	Device pci.Address
	Start  uint64
	Domain string // d7, Dom7
	Risky  bool   // assigned nevertheless, with rdm_policy=relaxed
}

const maxLogFacts = 4096

// ParseLog parses the output of "xl dmesg".
func ParseLog(log string) Log {
	l := Log{Faults: map[pci.Address]int{}}
	var open *Reserved
	for line := range strings.Lines(log) {
		line = message(line)
		switch line {
		case "I/O virtualisation enabled":
			l.IOMMU = On
		case "I/O virtualisation disabled":
			l.IOMMU = Off
		case "Interrupt remapping enabled":
			l.InterruptRemapping = On
		case "Interrupt remapping disabled":
			l.InterruptRemapping = Off
		}
		vtd, isVTD := strings.CutPrefix(line, "[VT-D]")
		vtd = strings.TrimSpace(vtd)
		if isVTD && strings.HasPrefix(vtd, "found ACPI_DMAR_") {
			open = nil
			if strings.HasPrefix(vtd, "found ACPI_DMAR_RMRR") && len(l.Reserved) < maxLogFacts {
				l.Reserved = append(l.Reserved, Reserved{})
				open = &l.Reserved[len(l.Reserved)-1]
			}
			continue
		}
		if isVTD && open != nil && open.add(vtd) {
			continue
		}
		if r, ok := parseRefused(vtd); ok && len(l.Refused) < maxLogFacts && !slices.Contains(l.Refused, r) {
			l.Refused = append(l.Refused, r)
		}
		if a, ok := parseFault(line); ok && (l.Faults[a] > 0 || len(l.Faults) < maxLogFacts) {
			l.Faults[a]++
		}
	}
	slices.SortFunc(l.Refused, func(a, b Refused) int {
		return cmp.Or(a.Device.Compare(b.Device), cmp.Compare(a.Start, b.Start), cmp.Compare(a.Domain, b.Domain))
	})
	return l
}

// message removes "(XEN)" and the time, and what a console may have put before them.
func message(line string) string {
	if _, after, ok := strings.Cut(line, "(XEN)"); ok {
		line = after
	}
	line = strings.TrimSpace(line)
	if strings.HasPrefix(line, "[") && !strings.HasPrefix(line, "[VT-D]") {
		if stamp, after, ok := strings.Cut(line, "]"); ok && strings.Trim(stamp, "[ 0123456789.-:") == "" {
			line = strings.TrimSpace(after)
		}
	}
	return line
}

// add parses a line that belongs to a region of reserved memory.
func (r *Reserved) add(line string) bool {
	if s, ok := strings.CutPrefix(line, "endpoint:"); ok {
		if a, err := pci.ParseAddress(strings.TrimSpace(s)); err == nil && len(r.Devices) < maxLogFacts && !slices.Contains(r.Devices, a) {
			r.Devices = append(r.Devices, a)
		}
		return true
	}
	var start, end string
	if _, s, ok := strings.Cut(line, "RMRR region: base_addr "); ok {
		start, end, _ = strings.Cut(s, " end_addr ")
	} else if _, s, ok := strings.Cut(line, "RMRR: ["); ok {
		start, end, _ = strings.Cut(strings.TrimSuffix(s, "]"), ",")
	} else {
		return false
	}
	from, err1 := strconv.ParseUint(start, 16, 64)
	to, err2 := strconv.ParseUint(strings.TrimSpace(end), 16, 64)
	if err1 == nil && err2 == nil && from <= to {
		r.Start, r.End = from, to
	}
	return true
}

// parseRefused parses "It's disallowed to assign 0000:08:00.0 with shared RMRR at
// 7ba77000 for Dom5."
func parseRefused(line string) (Refused, bool) {
	var r Refused
	_, s, ok := strings.Cut(line, "It's ")
	if !ok {
		return r, false
	}
	if s, ok = strings.CutPrefix(s, "disallowed to assign "); !ok {
		if s, ok = strings.CutPrefix(s, "risky to assign "); !ok {
			return r, false
		}
		r.Risky = true
	}
	address, s, ok := strings.Cut(s, " with shared RMRR at ")
	if !ok {
		return r, false
	}
	at, domain, _ := strings.Cut(s, " for ")
	a, err := pci.ParseAddress(address)
	if err != nil {
		return r, false
	}
	r.Device, r.Domain = a, clean(strings.TrimSuffix(domain, "."))
	r.Start, _ = strconv.ParseUint(at, 16, 64)
	return r, true
}

// parseFault parses "[VT-D]DMAR:[DMA Write] Request device [0000:04:00.4] fault addr
// bdf80000" and "AMD-Vi: IO_PAGE_FAULT: 0000:04:00.4 d1 addr …".
func parseFault(line string) (pci.Address, bool) {
	var s string
	switch {
	case strings.HasPrefix(line, "[VT-D]DMAR:"):
		_, after, ok := strings.Cut(line, "Request device [")
		if !ok {
			return pci.Address{}, false
		}
		s, _, _ = strings.Cut(after, "]")
	case strings.HasPrefix(line, "AMD-Vi: IO_PAGE_FAULT: "):
		s, _, _ = strings.Cut(strings.TrimPrefix(line, "AMD-Vi: IO_PAGE_FAULT: "), " ")
	default:
		return pci.Address{}, false
	}
	a, err := pci.ParseAddress(s)
	return a, err == nil
}
