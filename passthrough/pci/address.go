package pci

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ErrAddress means that a text is not a PCI address.
var ErrAddress = errors.New("not a PCI address")

// Address is the address of a function. Addresses can be compared with ==.
type Address struct {
	Domain                uint32
	Bus, Device, Function uint8
}

// ParseAddress parses DOMAIN:BUS:DEVICE.FUNCTION with hexadecimal digits of either case.
// The domain has four to eight digits, as sysfs, NVML or VMD write it, or is omitted and
// zero, as in lspci. Errors wrap ErrAddress.
func ParseAddress(s string) (Address, error) {
	var a Address
	rest := s
	if strings.Count(s, ":") == 2 {
		domain, after, _ := strings.Cut(s, ":")
		n, ok := hex(domain, 4, 8)
		if !ok {
			return Address{}, fmt.Errorf("%w: %.40q", ErrAddress, s)
		}
		a.Domain, rest = n, after
	}
	bus, rest, ok1 := strings.Cut(rest, ":")
	device, function, ok2 := strings.Cut(rest, ".")
	b, ok3 := hex(bus, 2, 2)
	d, ok4 := hex(device, 2, 2)
	f, ok5 := hex(function, 1, 1)
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 || d > 0x1f || f > 7 {
		return Address{}, fmt.Errorf("%w: %.40q", ErrAddress, s)
	}
	a.Bus, a.Device, a.Function = uint8(b), uint8(d), uint8(f)
	return a, nil
}

// hex parses a number of least to most hexadecimal digits.
func hex(s string, least, most int) (uint32, bool) {
	if len(s) < least || len(s) > most || strings.ContainsAny(s, "+-_") {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 16, 32)
	return uint32(n), err == nil
}

// String returns the address as sysfs writes it: 0000:65:00.0.
func (a Address) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.Domain, a.Bus, a.Device, a.Function)
}

// Compare compares addresses by domain, bus, device and function.
func (a Address) Compare(b Address) int {
	return cmp.Or(cmp.Compare(a.Domain, b.Domain), cmp.Compare(a.Bus, b.Bus), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Function, b.Function))
}

// Slot returns the address of function 0 of the same device.
func (a Address) Slot() Address {
	a.Function = 0
	return a
}

// MarshalText returns String, for JSON.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText does the same as ParseAddress.
func (a *Address) UnmarshalText(text []byte) error {
	parsed, err := ParseAddress(string(text))
	if err == nil {
		*a = parsed
	}
	return err
}
