package size

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Binary units, in bytes.
const (
	KiB = 1 << 10
	MiB = 1 << 20
	GiB = 1 << 30
	TiB = 1 << 40
)

// Parse parses an amount such as "512MiB", "1.5 GiB" or "4096", and returns bytes. K, M,
// G and T, with or without B or iB, are binary units.
func Parse(s string) (uint64, error) {
	text := strings.TrimSpace(s)
	number := strings.TrimRight(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
	var unit float64
	switch strings.ToLower(strings.TrimSpace(text[len(number):])) {
	case "", "b":
		unit = 1
	case "k", "kb", "kib":
		unit = KiB
	case "m", "mb", "mib":
		unit = MiB
	case "g", "gb", "gib":
		unit = GiB
	case "t", "tb", "tib":
		unit = TiB
	default:
		return 0, fmt.Errorf("size %q: unknown unit (use KiB, MiB, GiB or TiB)", s)
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsNaN(v) || v < 0 || v*unit >= 1<<63 {
		return 0, fmt.Errorf("size %q: want a number with a unit, such as 512MiB", s)
	}
	return uint64(v * unit), nil
}

// Format formats n bytes in the largest unit in which it is at least 1.
func Format(n uint64) string {
	for _, u := range []struct {
		bytes uint64
		name  string
	}{{TiB, "TiB"}, {GiB, "GiB"}, {MiB, "MiB"}, {KiB, "KiB"}} {
		if n < u.bytes {
			continue
		}
		if n%u.bytes == 0 {
			return fmt.Sprintf("%d %s", n/u.bytes, u.name)
		}
		return fmt.Sprintf("%.1f %s", float64(n)/float64(u.bytes), u.name)
	}
	return fmt.Sprintf("%d B", n)
}
