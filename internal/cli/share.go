package cli

import (
	"fmt"
	"strings"
	"time"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
)

// shareView is what sessions have had of a GPU, in the output for programs. Times are in
// seconds.
type shareView struct {
	Shared  bool    `json:"shared"`
	Waiting bool    `json:"waiting,omitempty"`
	Turns   uint64  `json:"turns"`
	Busy    float64 `json:"busy"`
	Waited  float64 `json:"waited"`
	Lapses  uint64  `json:"lapses,omitempty"`
	Overrun float64 `json:"overrun,omitempty"`
	Keeps   string  `json:"keeps,omitempty"`
}

func viewShare(s *gpuctlv1.Share) *shareView {
	if s == nil {
		return nil
	}
	sec := func(ns int64) float64 { return time.Duration(ns).Seconds() }
	return &shareView{
		Shared: s.GetShared(), Waiting: s.GetWaiting(), Turns: s.GetTurns(), Busy: sec(s.GetBusyNs()), Waited: sec(s.GetWaitedNs()),
		Lapses: s.GetLapses(), Overrun: sec(s.GetOverrunNs()), Keeps: s.GetKeeps(),
	}
}

// shareText returns what a session has had of its GPU in words; empty if it never shared one.
func shareText(s *gpuctlv1.Share) string {
	if s == nil || !s.GetShared() && s.GetTurns() == 0 {
		return ""
	}
	round := func(ns int64) time.Duration { return time.Duration(ns).Round(10 * time.Millisecond) }
	text := fmt.Sprintf("%d turns, %v on the GPU, %v waited", s.GetTurns(), round(s.GetBusyNs()), round(s.GetWaitedNs()))
	if n := s.GetLapses(); n > 0 {
		text += fmt.Sprintf(", %d turns taken back", n)
	}
	if !s.GetShared() {
		text += ", now without turns"
	}
	return text
}

func ownerText(owner string, weight uint32) string {
	if owner == "" {
		return ""
	}
	return fmt.Sprintf("%s, weight %d", owner, weight)
}

// sharedBy lists the owners of a GPU that more than one claim has.
func sharedBy(g *gpuctlv1.GPU) string {
	if len(g.GetOwners()) < 2 {
		return ""
	}
	var all []string
	for _, o := range g.GetOwners() {
		text := ownerText(o.GetOwner(), o.GetWeight())
		if s := shareText(o.GetShare()); s != "" {
			text += ": " + s
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}
