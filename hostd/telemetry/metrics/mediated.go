package metrics

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuctl/gpuctl/mmio/server"
)

type mediatedFamilies struct {
	exits, scans, hypercalls, refused, commands, malformed, busy, lost family
}

func (m *Metrics) mediatedFamilies() mediatedFamilies {
	byPhase := []string{"gpu", "vm", "part", "phase"}
	return mediatedFamilies{
		exits:      m.family("gpuctl_mediated_exits_total", counter, "Accesses of a VM to its part of a mediated GPU that were trapped, by phase of its driver (init, copy, launch, close, other).", byPhase...),
		scans:      m.family("gpuctl_mediated_scans_total", counter, "Shadow updates: address spaces that were read from the VM's page tables.", byPhase...),
		hypercalls: m.family("gpuctl_mediated_hypercalls_total", counter, "Para-virtual calls of the VM's driver.", byPhase...),
		refused:    m.family("gpuctl_mediated_refused_total", counter, "Things that the VM did and may not.", byPhase...),
		commands:   m.family("gpuctl_mediated_commands_total", counter, "Commands that the VM submitted.", byPhase...),
		malformed:  m.family("gpuctl_mediated_malformed_total", counter, "Requests of Xen that cannot be: of a wrong size, count, type or address.", "gpu", "vm", "part"),
		busy:       m.family("gpuctl_mediated_busy_seconds_total", counter, "Time of the GPU that the VM's commands took.", "gpu", "vm", "part"),
		lost:       m.family("gpuctl_mediated_lost", gauge, "1 if the VM's part is lost and reads as ones.", "gpu", "vm", "part"),
	}
}

func (m *Metrics) collectMediated(ch chan<- prometheus.Metric, all map[string][]server.Status) {
	f := m.mediated
	for _, gpu := range slices.Sorted(maps.Keys(all)) {
		for _, s := range all[gpu] {
			for _, phase := range slices.Sorted(maps.Keys(s.Phases)) {
				c := s.Phases[phase]
				f.exits.put(ch, float64(c.Exits), gpu, s.Name, s.ID, phase)
				f.scans.put(ch, float64(c.Scans), gpu, s.Name, s.ID, phase)
				f.hypercalls.put(ch, float64(c.Hypercalls), gpu, s.Name, s.ID, phase)
				f.refused.put(ch, float64(c.Refused), gpu, s.Name, s.ID, phase)
				f.commands.put(ch, float64(c.Commands), gpu, s.Name, s.ID, phase)
			}
			f.malformed.put(ch, float64(s.Malformed), gpu, s.Name, s.ID)
			f.busy.put(ch, s.Busy.Seconds(), gpu, s.Name, s.ID)
			lost := 0.0
			if s.Lost != "" {
				lost = 1
			}
			f.lost.put(ch, lost, gpu, s.Name, s.ID)
		}
	}
}
