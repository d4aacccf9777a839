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

// Profile is a profile of virtual GPUs on one card.
type Profile struct {
	Name      string
	Kind      Kind
	Memory    uint64 // bytes; 0: unknown
	Max       uint32 // on an empty card; 0: unknown
	Existing  uint32 // existing instances
	Scheduled uint32 // instances that are promised and do not exist yet
	Free      uint32 // further instances that are possible
	Why       string // why no more are possible; empty if Free is not 0
	// Apart is a label: instances whose profiles have different labels cannot exist
	// together on one card. An empty label excludes nothing.
	Apart string
}

// apart returns the label of a type for Profile.Apart; see free.
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

// rules has the limits of one card.
type rules struct {
	types  map[string]catalog.VGPUType
	memory uint64 // of the card, bytes; 0: unknown
	mixed  bool   // sizes may differ
}

// free returns how many more instances of t are possible beside those in use, given by
// name, and why there are none.
//
// With time-slicing, all vGPUs of a GPU have the same size, unless the GPU is in the mode
// for mixed sizes, which permits fewer of each. Types of different series with one size
// can be combined. In MIG slices, sizes may differ, and time-sliced vGPUs cannot exist
// beside them.
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

// take subtracts count times each from what is left; -1: it was not enough.
func take(left int64, each uint64, count int64) int64 {
	switch {
	case left < 0 || each == 0:
		return left
	case each > uint64(left) || count > left/int64(each):
		return -1
	}
	return left - int64(each)*count
}

// total returns the memory that virtual GPUs share: the largest sum of a type's
// instances, as vendors define it, otherwise the card's memory.
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

// slices returns how many compute slices the GPU has: those of its largest profile.
func (r rules) slices() int64 {
	most := 0
	for _, t := range r.types {
		most = max(most, slicesOf(t.MIG))
	}
	return int64(most)
}

// slicesOf returns the number of compute slices of a MIG profile, such as 3 for "3g.40gb"
// or "1c.3g.40gb"; 0: there is none.
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

// sum adds counts, and does not overflow.
func sum(counts map[string]uint32) uint32 {
	total := uint64(0)
	for _, n := range counts {
		total = min(total+uint64(n), math.MaxUint32)
	}
	return uint32(total)
}

// plain returns a type's name without the vendor: "NVIDIA A40-8Q" and "GRID T4-2Q" are
// "A40-8Q" and "T4-2Q".
func plain(name string) string {
	for _, prefix := range []string{"NVIDIA ", "GRID "} {
		name = strings.TrimPrefix(name, prefix)
	}
	return name
}
