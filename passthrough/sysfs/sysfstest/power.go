package sysfstest

import (
	"slices"
	"strings"
	"syscall"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Outcome is the result of a reset of a device.
type Outcome struct {
	Err   error // error of the kernel; after ENOTTY it tries the next method
	Kills bool  // the device reads as all ones afterwards, for ever
	Hangs bool  // the kernel does not return until OnReset changes that
}

// OnReset sets the outcome of a function's reset by a method. By default, a reset
// succeeds if the device answers or the method brings it back.
func (m *Machine) OnReset(a pci.Address, method string, o Outcome) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.must(a).outcomes[method] = o
	m.settle()
}

// Resets returns the methods by which a function was reset successfully, oldest first.
// "d3cold" means that it had no power.
func (m *Machine) Resets(a pci.Address) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.must(a).resets)
}

// PowersOff makes the platform able to switch a function's power off.
func (m *Machine) PowersOff(a pci.Address) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.must(a).canCold = true
}

func (m *Machine) resetStore(d *device, s string) error {
	if trim(s) != "1" {
		return syscall.EINVAL
	}
	if guest := m.owners[d.addr]; guest != "" {
		m.violate("%s was reset while %s had it", d.addr, guest)
	}
	for _, method := range d.enabled {
		if err := m.reset(d, method); err != syscall.ENOTTY { //nolint:errorlint // the kernel compares so
			return err
		}
	}
	return syscall.ENOTTY
}

func (m *Machine) reset(d *device, method string) error {
	// The secondary bus is reset only if the function is alone on it. A device that was
	// found before its siblings has the method in its list nevertheless.
	if method == "bus" && (d.parent == nil || len(m.onBus(d)) > 1) {
		return syscall.ENOTTY
	}
	o := d.outcomes[method]
	switch {
	case o.Hangs:
		return errWait
	case o.Err != nil:
		return kernel(o.Err)
	case d.dead && !slices.Contains(d.heals, method):
		return syscall.ENOTTY // the device does not come back, so the kernel returns this
	}
	d.resets = append(d.resets, method)
	d.dead = o.Kills
	if o.Kills {
		d.heals = nil
	}
	return nil
}

func (m *Machine) onBus(d *device) []*device {
	var out []*device
	for _, other := range m.sorted() {
		if other.addr.Domain == d.addr.Domain && other.addr.Bus == d.addr.Bus && other.pf == nil {
			out = append(out, other)
		}
	}
	return out
}

func (d *device) setMethods(s string) error {
	switch trim(s) {
	case "":
		d.enabled = nil
		return nil
	case "default":
		d.enabled = slices.Clone(d.methods)
		return nil
	}
	list := strings.Fields(s)
	for i, method := range list {
		if !slices.Contains(d.methods, method) || slices.Contains(list[:i], method) {
			return syscall.EINVAL
		}
	}
	d.enabled = list
	return nil
}

// idle reports whether a function may sleep.
func (d *device) idle(m *Machine) bool {
	if d.control != "auto" || m.owners[d.addr] != "" {
		return false
	}
	if d.driver == nil {
		return true
	}
	return d.driver.VFIO && !slices.ContainsFunc(d.vfioNodes(), func(name string) bool { return m.holder(name) != nil })
}

// repower lets the functions of the slot sleep, or wakes this one. Power is switched off
// only for all of them.
func (d *device) repower(m *Machine) {
	if !d.idle(m) {
		d.resume(m)
		return
	}
	if d.state == "D3cold" {
		return
	}
	all := true
	var slot []*device
	for _, f := range m.sorted() {
		if f.addr.Slot() == d.addr.Slot() && f.pf == nil {
			slot = append(slot, f)
			all = all && f.idle(m) && f.allowCold
		}
	}
	d.state = "D3hot"
	if !all || !slices.ContainsFunc(slot, func(f *device) bool { return f.canCold }) {
		return
	}
	for _, f := range slot {
		o := f.outcomes["d3cold"]
		f.state = "D3cold"
		f.resets = append(f.resets, "d3cold")
		switch {
		case o.Kills:
			f.dead, f.heals = true, nil
		case f.dead && slices.Contains(f.heals, "d3cold"):
			f.dead = false
		}
	}
}

// resume wakes all functions of the slot, because they get power together.
func (d *device) resume(m *Machine) {
	cold := d.state == "D3cold"
	d.state = "D0"
	if !cold {
		return
	}
	for _, f := range m.devices {
		if f.addr.Slot() == d.addr.Slot() && f.state == "D3cold" {
			f.state = "D3hot"
		}
	}
}

func (d *device) suspend(m *Machine) {
	if d.idle(m) {
		d.repower(m)
	}
}
