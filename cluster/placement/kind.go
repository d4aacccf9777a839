package placement

import (
	clusterv1 "github.com/gpuctl/gpuctl/api/gpuctl/cluster/v1"
	"github.com/gpuctl/gpuctl/cluster/state"
)

// ways returns the ways in which a GPU is given away, the one with the least between user
// and GPU first.
func ways() []string {
	return []string{state.KindPassthrough, state.KindSlice, state.KindRemote, state.KindMediated}
}

// way returns how the claim would get what was found.
func (m *member) way() string {
	switch {
	case m.gpu.class.mediated:
		return state.KindMediated
	case m.profile != "":
		return state.KindSlice
	case m.kind == clusterv1.VGPUKind_VGPU_KIND_SHARE, m.gpu.class.like.GetRuntime() != "":
		return state.KindRemote
	}
	return state.KindPassthrough
}

// wayWords returns what a way means for its user.
func wayWords(way string) string {
	switch way {
	case state.KindMediated:
		return "the host checks each access to a register, and memory is a software GPU's"
	case state.KindSlice:
		return "the hardware separates it from its neighbours"
	case state.KindRemote:
		return "applications compute through its runtime, and may move"
	}
	return "a VM has all of the card, at its own speed"
}
