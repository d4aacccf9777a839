package vgpu

import (
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/internal/size"
	"github.com/gpuctl/gpuctl/passthrough/catalog"
)

// Profile is a kind of virtual GPU on one card.
type Profile struct {
	Name      string
	Kind      Kind
	Memory    uint64 // bytes; 0: not known
	Max       uint32 // on an empty card; 0: not known
	Existing  uint32 // instances that there are
	Scheduled uint32 // that are promised and do not exist yet
	Free      uint32 // that there could be besides
	Why       string // there are no more; empty where Free is not 0
	// Apart differs where instances do not go together on one card; those of
	// profiles that have none go with all.
	Apart string
}

// apart tells types from each other that do not go together; see free.
func (r rules) apart(t catalog.VGPUType) string {
	switch {
	case t.Memory == 0:
		return ""
	case t.MIG != "":
		return "mig"
	case r.mixed:
		return "time"
	}
	return "time " + size.Format(t.Memory)
}

// rules are those of one card.
type rules struct {
	types  map[string]catalog.VGPUType
	memory uint64 // of the card, bytes; 0: not known
	mixed  bool   // sizes may differ
}

// free is how many more instances of t fit beside those that are used, by
// name, and why there are none.
//
// By time-slicing all vGPUs of a GPU have one size unless it is in the mode for
// mixed sizes, which allows fewer of each; series of one size go together. In
// MIG slices sizes may differ, and time-sliced ones have no place beside them.
func (r rules) free(t catalog.VGPUType, used map[string]uint32) (n uint32, why string) {
	if t.Memory == 0 || t.Max == 0 {
		if total := sum(used); total > 0 {
			return 0, fmt.Sprintf("it is not known how many %s there may be beside %d others", t.Name, total)
		}
		return 1, ""
	}
	limit, memory, compute := int64(t.Max), r.total(t.MIG != ""), r.slices()
	var alike int64
	for _, name := range slices.Sorted(maps.Keys(used)) {
		count := int64(used[name])
		u, known := r.types[name]
		switch {
		case count == 0:
			continue
		case !known || u.Memory == 0:
			return 0, fmt.Sprintf("there are %d of %s, whose size is not known", count, name)
		case (u.MIG != "") != (t.MIG != ""):
			return 0, fmt.Sprintf("there are %d of %s: slices and sharing by time do not go together", count, name)
		case t.MIG == "" && u.Memory != t.Memory && !r.mixed:
			return 0, fmt.Sprintf("there are %d of %s, with %s each: all vGPUs of the GPU must have one size", count, name, size.Format(u.Memory))
		case t.MIG == "" && u.Memory != t.Memory, t.MIG != "" && name != t.Name:
		default:
			alike += count
		}
		memory = take(memory, u.Memory, count)
		compute = take(compute, uint64(slicesOf(u.MIG)), count)
	}
	if r.mixed && t.MIG == "" {
		if limit = int64(min(t.Mixed, t.Max)); limit == 0 {
			return 0, fmt.Sprintf("it is not known how many %s there may be where sizes differ", t.Name)
		}
	}
	left := min(limit-alike, memory/int64(min(t.Memory, math.MaxInt64)))
	if s := slicesOf(t.MIG); s > 0 {
		left = min(left, compute/int64(s))
	}
	switch {
	case left > 0:
		return uint32(left), ""
	case limit <= alike:
		return 0, fmt.Sprintf("there are %d, and %d is the most", alike, limit)
	default:
		return 0, fmt.Sprintf("%s is more than what is left", size.Format(t.Memory))
	}
}

// take takes count times each from what is left; -1: there was not as much.
func take(left int64, each uint64, count int64) int64 {
	switch {
	case left < 0 || each == 0:
		return left
	case each > uint64(left) || count > left/int64(each):
		return -1
	}
	return left - int64(each)*count
}

// total is the memory that virtual GPUs share: what the largest division of it
// adds up to, as the makers count, else the card's.
func (r rules) total(mig bool) int64 {
	var most uint64
	for _, t := range r.types {
		if (t.MIG != "") == mig {
			if high, low := bits.Mul64(t.Memory, uint64(t.Max)); high == 0 {
				most = max(most, low)
			} else {
				most = math.MaxUint64
			}
		}
	}
	if most == 0 {
		most = r.memory
	}
	return int64(min(most, math.MaxInt64))
}

// slices are how many compute slices the GPU has: as many as its largest.
func (r rules) slices() int64 {
	most := 0
	for _, t := range r.types {
		most = max(most, slicesOf(t.MIG))
	}
	return int64(most)
}

// slicesOf reads the number of compute slices of a MIG profile, as 3 of
// "3g.40gb" or "1c.3g.40gb"; 0: there is none.
func slicesOf(profile string) int {
	for part := range strings.SplitSeq(profile, ".") {
		if digits, ok := strings.CutSuffix(part, "g"); ok {
			n, err := strconv.Atoi(digits)
			if err == nil && n > 0 && n <= 64 {
				return n
			}
		}
	}
	return 0
}

// sum stays at the most that it can be.
func sum(counts map[string]uint32) uint32 {
	total := uint64(0)
	for _, n := range counts {
		total = min(total+uint64(n), math.MaxUint32)
	}
	return uint32(total)
}

// plain is a type's name without the maker's: "NVIDIA A40-8Q" and
// "GRID T4-2Q" are "A40-8Q" and "T4-2Q".
func plain(name string) string {
	for _, prefix := range []string{"NVIDIA ", "GRID "} {
		name = strings.TrimPrefix(name, prefix)
	}
	return name
}
