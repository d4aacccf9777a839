package session

import (
	"fmt"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// Reasons returns every reason why a device with these limits can't serve a session with
// this usage up to now. Limits of zero are unknown and not compared. Dependencies on
// extensions, language versions and IL are in the session's graph; the target's executor
// checks them.
func Reasons(usage *gpuctlv1.Usage, limits *gpuctlv1.Limits) []*gpuctlv1.Reason {
	if usage == nil || limits == nil {
		return nil
	}
	var rs []*gpuctlv1.Reason
	add := func(code, format string, args ...any) {
		rs = append(rs, &gpuctlv1.Reason{Code: code, Message: fmt.Sprintf(format, args...)})
	}
	over := func(code string, need, limit uint64, format string) {
		if limit != 0 && need > limit {
			add(code, format, formatBytes(need), formatBytes(limit))
		}
	}
	over("memory", usage.Memory, limits.GlobalMemory,
		"the session's memory objects take %s, the GPU has %s")
	over("max_alloc", usage.LargestAlloc, limits.MaxAlloc,
		"the largest memory object has %s, the GPU allows %s")
	over("local_memory", usage.LocalMemory, limits.LocalMemory,
		"a kernel uses %s of local memory, the GPU has %s")
	if m := limits.MaxWorkGroupSize; m != 0 && usage.LargestWorkGroup > m {
		add("work_group_size", "the largest work-group launched has %d work-items, the GPU allows %d",
			usage.LargestWorkGroup, m)
	}
	for i, n := range usage.WorkItemSizes {
		switch {
		case len(limits.MaxWorkItemSizes) == 0:
		case i >= len(limits.MaxWorkItemSizes):
			add("work_item_sizes", "kernels are launched in %d dimensions, the GPU allows %d",
				len(usage.WorkItemSizes), len(limits.MaxWorkItemSizes))
			return append(rs, imageReasons(usage, limits)...)
		case n > limits.MaxWorkItemSizes[i]:
			add("work_item_sizes", "a work-group has %d work-items in dimension %d, the GPU allows %d",
				n, i, limits.MaxWorkItemSizes[i])
		}
	}
	return append(rs, imageReasons(usage, limits)...)
}

func imageReasons(usage *gpuctlv1.Usage, limits *gpuctlv1.Limits) []*gpuctlv1.Reason {
	if usage.Images == 0 || limits.Images {
		return nil
	}
	return []*gpuctlv1.Reason{{
		Code:    "images",
		Message: fmt.Sprintf("the session has %d images, the GPU supports none", usage.Images),
	}}
}

// formatBytes formats a number of bytes for people. The text is exact if it can be short.
func formatBytes(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	div, exp := uint64(1024), 0
	for n/div >= 1024 {
		div *= 1024
		exp++
	}
	if n%div == 0 {
		return fmt.Sprintf("%d %ciB", n/div, units[exp])
	}
	return fmt.Sprintf("%.2f %ciB", float64(n)/float64(div), units[exp])
}
