package cuda

import (
	"slices"

	"github.com/gpuctl/gpuctl/guest/cuda/ask"
)

// Margins of what is checked before.
const (
	hostMargin = 10 // percent that a state may take more in host memory than on the GPUs
	gpuMargin  = 5  // percent that it may take more on the target
	// contextMargin is memory that a driver may want besides, in bytes.
	contextMargin = 64 << 20
)

// mpsServers are programs through which the clients of MPS compute.
func mpsServers() []string {
	return []string{"nvidia-cuda-mps", "nvidia-cuda-mps-server", "nvidia-cuda-mps-control"}
}

// checkMachine checks what is the same for every session: the driver, and that each who has
// a GPU is known.
func (c *machine) checkMachine(rs *reasons) {
	if c.CUDA < 12080 {
		rs.add(ReasonDriver, "the driver %s is of CUDA %d.%d; suspending processes needs 12.8, which is driver 570", c.Driver, c.CUDA/1000, c.CUDA%1000/10)
	}
	for _, p := range c.Processes {
		if c.look.Processes[p.PID] == nil {
			rs.add(ReasonHolder, "pid %d computes on %s, says NVML, and is no process that can be seen here: it is in a container that hides it, or has just ended", p.PID, p.GPU)
		}
	}
	for _, pid := range c.look.Blind {
		rs.add(ReasonHolder, "nobody may see what pid %d has open: run gpuguest as root", pid)
	}
	for _, g := range c.GPUs {
		if g.NoProcs {
			rs.add(ReasonHolder, "the driver does not tell who computes on %s", g.UUID)
		}
	}
}

// checkGPUs checks GPUs from or to which processes go.
func (c *machine) checkGPUs(rs *reasons, uuids []ask.UUID) {
	for _, u := range uuids {
		g := c.gpu(u)
		switch {
		case g == nil:
			rs.add(ReasonGPU, "the driver shows no %s", u)
			continue
		case g.Lost:
			rs.add(ReasonGPU, "the driver does not answer for %s: it may have fallen off the bus", u)
		case g.MIG:
			rs.add(ReasonMIG, "%s (%s) is divided by MIG; the driver can't take states from it", u, g.Name)
		case g.Slice:
			rs.add(ReasonSlice, "%s (%s) is a vGPU; nobody has shown that the driver can take states from one", u, g.Name)
		}
	}
	for _, p := range c.Processes {
		if p.MPS && slices.Contains(uuids, p.GPU) {
			rs.add(ReasonMPS, "pid %d computes on %s through MPS, from which the driver can't take states", p.PID, p.GPU)
		}
	}
	for _, h := range c.look.Holders {
		if slices.Contains(mpsServers(), h.Name) {
			rs.add(ReasonMPS, "pid %d is a server of MPS: its clients' states can't be taken", h.PID)
		}
	}
}

// checkHost checks that the states fit into host memory. Swap is not counted: the driver
// pins what it copies.
func (m *Manager) checkHost(rs *reasons, c *machine, members []*member) {
	var sum uint64
	groups := map[string]uint64{}
	for _, mb := range members {
		var n uint64
		for _, b := range mb.Used {
			n += b
		}
		n += n / 100 * hostMargin
		sum += n
		if h := c.look.Holders[mb.PID]; h != nil {
			groups[h.Cgroup] += n
		}
	}
	have, err := m.availableMemory()
	switch {
	case err != nil:
		rs.add(ReasonMemory, "the machine's memory can't be read: %v", err)
	case sum > have:
		rs.add(ReasonMemory, "the state takes %s of host memory (what is on the GPUs and %d %%), and %s are available without swapping", size(sum), hostMargin, size(have))
	}
	for path, need := range groups {
		if left, limited := groupMemory(m.cfg.Cgroups, path); limited && need > left {
			rs.add(ReasonMemory, "the state takes %s of host memory, and the control group %s may use %s more", size(need), path, size(left))
		}
	}
}

// checkTarget checks that what the members have fits on the GPUs that they go to. from has
// what is known of the GPUs that they were on; away says that they have let go of them.
func (c *machine) checkTarget(rs *reasons, members []*member, from []gpu, to []ask.UUID, away bool) {
	need, frees := map[ask.UUID]uint64{}, map[ask.UUID]uint64{}
	for _, mb := range members {
		for i, u := range mb.Uses {
			dest := to[mb.Slots[i]]
			if dest == u && !away {
				continue
			}
			need[dest] += mb.Used[i]
			if !away {
				frees[u] += mb.Used[i]
			}
		}
	}
	moved := false
	for slot, f := range from {
		g := c.gpu(to[slot])
		if g == nil {
			continue // checkGPUs has said so
		}
		moved = moved || g.UUID != f.UUID
		if !sameChip(f.Chip, g.Chip) {
			rs.add(ReasonChip, "%s is a %s (PCI device %08x); the state is of a %s (%08x), and the driver restores on the same chip only",
				g.UUID, g.Name, g.Chip, f.Name, f.Chip)
		}
		n := need[g.UUID]
		if want := n + n/100*gpuMargin + contextMargin; n > 0 && want > g.Free+frees[g.UUID] {
			rs.add(ReasonFree, "%s needs %s, and %s are free; a restore that runs out of memory would lose the process", g.UUID, size(want), size(g.Free+frees[g.UUID]))
		}
		if g.ComputeMax && (g.UUID != f.UUID || away) && slices.ContainsFunc(c.Processes, func(p ask.Process) bool { return p.GPU == g.UUID }) {
			rs.add(ReasonExclusive, "%s is for one process only, and has one", g.UUID)
		}
	}
	if moved && c.CUDA < 13000 {
		rs.add(ReasonDriver, "the driver %s is of CUDA %d.%d; restoring on another GPU needs 13.0, which is driver 580", c.Driver, c.CUDA/1000, c.CUDA%1000/10)
	}
	if moved && c.CUDA > 13040 {
		rs.add(ReasonDriver, "the arguments of a restore on another GPU are known up to CUDA 13.4, and this driver is of %d.%d: install a newer gpuctl", c.CUDA/1000, c.CUDA%1000/10)
	}
	now := c.uuids()
	for _, mb := range members {
		dest := mb.on(to)
		shown := mb.Shown
		if !away {
			shown = now
		}
		if _, err := pairsFor(mb.Uses, dest, shown, now); err != nil && !slices.ContainsFunc(dest, func(u ask.UUID) bool { return c.gpu(u) == nil }) {
			rs.add(ReasonPairs, "pid %d: %v", mb.PID, err)
		}
	}
}
