package placement

import (
	"slices"
	"strconv"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/internal/size"
)

// short is a limit of a GPU that is lower than needed.
type short struct {
	code string // code of the reason
	what string // text of the reason
	need string
	has  string
}

// shortfalls returns the limits that are lower than the least that a claim permits.
// Limits of 0 in least are not checked. Neither is memory, which is checked elsewhere if
// only a part is assigned.
func shortfalls(has, least *gpuctlv1.Limits) []short {
	if least == nil {
		return nil
	}
	var out []short
	amount := func(code, what string, has, need uint64) {
		if has < need {
			out = append(out, short{code, what, size.Format(need), size.Format(has)})
		}
	}
	number := func(code, what string, has, need uint64) {
		if has < need {
			out = append(out, short{code, what, strconv.FormatUint(need, 10), strconv.FormatUint(has, 10)})
		}
	}
	truth := func(code, what string, has, need bool) {
		if need && !has {
			out = append(out, short{code, what, "it", "none"})
		}
	}
	version := func(code, what, has, need string) {
		if need != "" && older(has, need) {
			out = append(out, short{code, what, need, strconv.Quote(has)})
		}
	}
	all := func(code, what string, has, need []string) {
		for _, n := range need {
			if !slices.Contains(has, n) {
				out = append(out, short{code, what, n, "not it"})
			}
		}
	}
	amount("memory", "memory", has.GetGlobalMemory(), least.GetGlobalMemory())
	amount("max_alloc", "memory of one object", has.GetMaxAlloc(), least.GetMaxAlloc())
	amount("local_memory", "local memory", has.GetLocalMemory(), least.GetLocalMemory())
	number("work_group_size", "work-items of a group", has.GetMaxWorkGroupSize(), least.GetMaxWorkGroupSize())
	for i, n := range least.GetMaxWorkItemSizes() {
		var have uint64
		if sizes := has.GetMaxWorkItemSizes(); i < len(sizes) {
			have = sizes[i]
		}
		number("work_item_sizes", "work-items in dimension "+strconv.Itoa(i), have, n)
	}
	amount("constant_buffer", "constant memory", has.GetMaxConstantBuffer(), least.GetMaxConstantBuffer())
	amount("parameter_size", "kernel parameters", has.GetMaxParameterSize(), least.GetMaxParameterSize())
	truth("images", "images", has.GetImages(), least.GetImages())
	number("image", "width of an image", has.GetImage2DMaxWidth(), least.GetImage2DMaxWidth())
	number("image", "height of an image", has.GetImage2DMaxHeight(), least.GetImage2DMaxHeight())
	number("image", "width of a 3D image", has.GetImage3DMaxWidth(), least.GetImage3DMaxWidth())
	number("image", "height of a 3D image", has.GetImage3DMaxHeight(), least.GetImage3DMaxHeight())
	number("image", "depth of a 3D image", has.GetImage3DMaxDepth(), least.GetImage3DMaxDepth())
	number("image", "size of an image of a buffer", has.GetImageMaxBufferSize(), least.GetImageMaxBufferSize())
	number("image", "images of an array", has.GetImageMaxArraySize(), least.GetImageMaxArraySize())
	number("samplers", "samplers", uint64(has.GetMaxSamplers()), uint64(least.GetMaxSamplers()))
	number("compute_units", "compute units", uint64(has.GetComputeUnits()), uint64(least.GetComputeUnits()))
	number("clock", "MHz", uint64(has.GetClockMhz()), uint64(least.GetClockMhz()))
	version("version", "version", has.GetVersion(), least.GetVersion())
	version("version", "version of the language", has.GetCVersion(), least.GetCVersion())
	all("extension", "extension", has.GetExtensions(), least.GetExtensions())
	all("feature", "feature", has.GetCFeatures(), least.GetCFeatures())
	all("il", "intermediate language", has.GetIlVersions(), least.GetIlVersions())
	truth("out_of_order", "out-of-order queues", has.GetOutOfOrder(), least.GetOutOfOrder())
	truth("fp64", "double precision", has.GetFp64(), least.GetFp64())
	number("sub_devices", "sub-devices", has.GetMaxSubDevices(), least.GetMaxSubDevices())
	// A sub-buffer whose offset is aligned for one device may not be aligned for a device
	// with a larger alignment. The session relies on least.
	if n := least.GetMemBaseAddrAlignBits(); n > 0 && has.GetMemBaseAddrAlignBits() > n {
		out = append(out, short{"alignment", "bits of alignment, at most,", strconv.Itoa(int(n)), strconv.Itoa(int(has.GetMemBaseAddrAlignBits()))})
	}
	return out
}

// older compares the version numbers in texts such as "OpenCL 3.0 vendor's own" and
// "OpenCL C 1.2".
func older(a, b string) bool {
	return slices.Compare(numbers(a), numbers(b)) < 0
}

func numbers(version string) []int {
	for _, word := range strings.Fields(version) {
		major, minor, ok := strings.Cut(word, ".")
		m, errMajor := strconv.Atoi(major)
		n, errMinor := strconv.Atoi(minor)
		if ok && errMajor == nil && errMinor == nil {
			return []int{m, n}
		}
	}
	return nil
}

// least returns how much memory a part of a GPU must have for a claim, in bytes.
func least(c *clusterv1.Claim) uint64 {
	if c.GetMinMemory() == 0 {
		return 0
	}
	return max(c.GetMinMemory(), c.GetMinLimits().GetGlobalMemory(), c.GetMinLimits().GetMaxAlloc())
}
