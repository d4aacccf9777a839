package holders

import (
	"cmp"
	"maps"
	"slices"
)

// Job is a set of holders that belong together, and the process at its root.
type Job struct {
	Root    *Process
	Holders []*Holder // by pid
}

// Has reports whether a holder is in the job.
func (j *Job) Has(pid int) bool {
	return slices.ContainsFunc(j.Holders, func(h *Holder) bool { return h.PID == pid })
}

// Jobs puts holders together. Two belong together if one has started the other, directly or
// not; if they are of one process group, as those of a pipeline or of a script; or if
// one process that is no shell at a terminal has started both as one user in one control
// group, as a launcher does its workers.
func (l *Look) Jobs() []*Job {
	group := map[int]int{}
	for pid := range l.Holders {
		group[pid] = pid
	}
	var find func(int) int
	find = func(pid int) int {
		if group[pid] != pid {
			group[pid] = find(group[pid])
		}
		return group[pid]
	}
	join := func(a, b int) { group[find(a)] = find(b) }

	groups, launchers := map[int]int{}, map[launched]int{}
	for pid, h := range l.Holders {
		for _, a := range l.Ancestors(pid) {
			if _, ok := l.Holders[a.PID]; ok {
				join(pid, a.PID)
			}
		}
		if first, ok := groups[h.Group]; ok && h.Group > 0 {
			join(pid, first)
		}
		groups[h.Group] = pid
		if p := l.Processes[h.Parent]; p != nil && launches(p) {
			key := launched{p.PID, h.UID, h.Cgroup}
			if first, ok := launchers[key]; ok {
				join(pid, first)
			}
			launchers[key] = pid
		}
	}
	jobs := map[int]*Job{}
	for _, pid := range slices.Sorted(maps.Keys(l.Holders)) {
		j := jobs[find(pid)]
		if j == nil {
			j = &Job{}
			jobs[find(pid)] = j
		}
		j.Holders = append(j.Holders, l.Holders[pid])
	}
	out := slices.SortedFunc(maps.Values(jobs), func(a, b *Job) int { return cmp.Compare(a.Holders[0].PID, b.Holders[0].PID) })
	for _, j := range out {
		j.Root = l.root(j)
	}
	return out
}

// launched is what the workers of a launcher have in common. A daemon may start programs of
// many users.
type launched struct {
	by     int
	uid    uint32
	cgroup string
}

// launches reports whether a process may be a launcher of workers: not the first process of
// the system, nor gpuguest, nor a shell at a terminal, which starts things that have nothing in common.
func launches(p *Process) bool {
	return p.PID > 1 && !p.own && (p.Terminal == 0 || p.Session != p.PID)
}

// Ancestors returns the processes that a process descends from, its parent first, without
// the first process of the system.
func (l *Look) Ancestors(pid int) []*Process {
	var as []*Process
	p := l.Processes[pid]
	for p != nil && p.Parent > 1 && len(as) < 1024 {
		if p = l.Processes[p.Parent]; p != nil {
			as = append(as, p)
		}
	}
	return as
}

// root returns the process that all of a job descend from, or if there is none but the
// system's first, the job's holder that started first.
func (l *Look) root(j *Job) *Process {
	oldest := slices.MinFunc(j.Holders, func(a, b *Holder) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.PID, b.PID))
	})
	root := &oldest.Process
	if len(j.Holders) == 1 {
		return root
	}
	for _, candidate := range append([]*Process{root}, l.Ancestors(root.PID)...) {
		if !launches(candidate) {
			break
		}
		if !slices.ContainsFunc(j.Holders, func(h *Holder) bool { return !l.Descends(h.PID, candidate.PID) }) {
			return candidate
		}
	}
	return root
}

// Descends reports whether a process is another one, or descends from it.
func (l *Look) Descends(pid, from int) bool {
	return pid == from || slices.ContainsFunc(l.Ancestors(pid), func(p *Process) bool { return p.PID == from })
}

// JobOf returns the job of a process: the one that it is in, or those that descend from it,
// as one. It is nil if neither the process nor a descendant holds a node.
func (l *Look) JobOf(pid int) *Job {
	var of *Job
	for _, j := range l.Jobs() {
		if !slices.ContainsFunc(j.Holders, func(h *Holder) bool { return l.Descends(h.PID, pid) }) {
			continue
		}
		if of == nil {
			of = j
			continue
		}
		of.Holders = append(of.Holders, j.Holders...)
		slices.SortFunc(of.Holders, func(a, b *Holder) int { return cmp.Compare(a.PID, b.PID) })
	}
	if p := l.Processes[pid]; of != nil && p != nil && !slices.ContainsFunc(of.Holders, func(h *Holder) bool { return !l.Descends(h.PID, pid) }) {
		of.Root = p
	}
	return of
}
