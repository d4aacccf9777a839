package nvml

import (
	"fmt"
	"slices"
	"strings"

	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
)

// Xids after which the card cannot be used until it has been reset. See NVIDIA's document
// "Xid Errors".
const (
	xidDoubleBit   = 48
	xidOffBus      = 79
	xidUncontained = 95
	xidGSPTimeout  = 119
	xidGSPError    = 120
)

// ApplicationXid reports whether an Xid is caused by a program, so that it is not an
// error of the card.
func ApplicationXid(code uint64) bool {
	return slices.Contains([]uint64{13, 31, 43, 45, 68, 109}, code)
}

// Health returns the health of a GPU, with the reason if it is not OK.
func (g *GPU) Health() (clusterv1.Health, string) {
	var failed, degraded []string
	if g.Lost {
		failed = append(failed, "it has fallen off the bus")
	}
	if g.ResetRequired {
		failed = append(failed, "it must be reset")
	}
	for _, x := range g.Xids {
		text := fmt.Sprintf("Xid %d, %d times", x.Code, x.Count)
		if x.Count == 1 {
			text = fmt.Sprintf("Xid %d", x.Code)
		}
		switch x.Code {
		case xidDoubleBit, xidOffBus, xidUncontained, xidGSPTimeout, xidGSPError:
			failed = append(failed, text)
		default:
			degraded = append(degraded, text)
		}
	}
	if e := g.ECC; e != nil {
		if e.RemapFailed {
			failed = append(failed, "rows of its memory could not be remapped")
		}
		if e.RemapPending {
			degraded = append(degraded, "rows of its memory wait for a reset to be remapped")
		}
		if e.RetiredPending {
			degraded = append(degraded, "pages of its memory wait for a reset to be retired")
		}
		if e.Uncorrected != nil && *e.Uncorrected > 0 {
			degraded = append(degraded, fmt.Sprintf("%d uncorrected memory errors", *e.Uncorrected))
		}
	}
	degraded = append(degraded, g.Errors...)
	switch {
	case len(failed) > 0:
		return clusterv1.Health_HEALTH_FAILED, strings.Join(append(failed, degraded...), "; ")
	case len(degraded) > 0:
		return clusterv1.Health_HEALTH_DEGRADED, strings.Join(degraded, "; ")
	}
	return clusterv1.Health_HEALTH_OK, ""
}
