package sysfstest

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

type process struct {
	comm string
	fds  []string
}

// Node adds a file below dev that a driver makes for a function while it is bound. dir is
// its folder below the function's, such as drm/renderD128, and dev its name, such as
// dri/renderD128.
func (m *Machine) Node(a pci.Address, driver, dir, dev string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.must(a)
	d.nodes = append(d.nodes, devNode{driver, dir, dev})
	if d.driver != nil && d.driver.Name == driver {
		d.dir.put(path.Join(dir, "uevent"), text("MAJOR=226\nMINOR=0\nDEVNAME="+dev+"\n"))
	}
}

// Run starts a process that has files open.
func (m *Machine) Run(pid int, comm string, files ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.processes[pid] != nil {
		panic("sysfstest: there is a process " + strconv.Itoa(pid))
	}
	m.processes[pid] = &process{comm, files}
	dir := m.root.folder("proc/" + strconv.Itoa(pid))
	dir.put("comm", text(comm+"\n"))
	dir.folder("fd")
	for i, f := range files {
		dir.put("fd/"+strconv.Itoa(i+3), &node{link: f})
	}
}

// Exit ends a process. Its files are closed, and operations that have waited for that
// continue.
func (m *Machine) Exit(pid int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.exit(pid)
	m.settle()
}

func (m *Machine) exit(pid int) {
	delete(m.processes, pid)
	m.root.drop("proc/" + strconv.Itoa(pid))
}

func (m *Machine) holder(file string) *process {
	for _, pid := range slices.Sorted(maps.Keys(m.processes)) {
		if p := m.processes[pid]; slices.Contains(p.fds, file) {
			return p
		}
	}
	return nil
}

// vfioNodes returns the files through which processes use the device.
func (d *device) vfioNodes() []string {
	out := []string{"/dev/vfio/" + strconv.Itoa(d.IOMMUGroup)}
	if d.vfio >= 0 {
		out = append(out, "/dev/vfio/devices/vfio"+strconv.Itoa(d.vfio))
	}
	return out
}

// Give gives a function that is bound to pciback to a guest, as Xen does. It fails if the
// function has another driver or another guest.
func (m *Machine) Give(a pci.Address, guest string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.devices[a]
	switch {
	case d == nil:
		return fmt.Errorf("no function %s", a)
	case d.driver == nil || (d.driver.Name != pciback && !d.driver.VFIO):
		return fmt.Errorf("%s has no driver for guests", a)
	case m.owners[a] != "":
		return fmt.Errorf("%s belongs to %s", a, m.owners[a])
	}
	m.owners[a] = guest
	return nil
}

// TakeBack takes it back from its guest.
func (m *Machine) TakeBack(a pci.Address) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.owners, a)
}

// Guest returns the guest that has a function; empty: none.
func (m *Machine) Guest(a pci.Address) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.owners[a]
}
