package agent

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/guest/vm/profile"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

const (
	devicesDir = "sys/bus/pci/devices"
	slotsDir   = "sys/bus/pci/slots"
	probeFile  = "sys/bus/pci/drivers_probe"
	autoFile   = "sys/bus/pci/drivers_autoprobe"
	maxModules = 4 << 20 // largest list of modules, in bytes
	maxSmall   = 4 << 10 // largest file with one value or a configuration space, in bytes
)

// function is a PCI function in the VM.
type function struct {
	address  pci.Address
	id       profile.ID
	serial   string
	driver   string
	override string
}

// display reports whether it is a display controller or an accelerator, by its class.
func (f *function) display() bool {
	return (&pci.Device{Class: f.id.Class}).Managed()
}

// companion reports whether it may be one of the other functions of a graphics card, such
// as audio.
func (f *function) companion() bool {
	switch f.id.Class >> 8 {
	case pci.ClassAudio, pci.ClassUSB, pci.ClassSerialOther:
		return true
	}
	return false
}

// kernel reads sysfs and procfs.
type kernel struct{ root sysfs.Root }

func deviceFile(a pci.Address, name string) string { return path.Join(devicesDir, a.String(), name) }

// functions returns all functions of the VM, sorted by address. A VM without PCI has
// none.
func (k kernel) functions() ([]function, error) {
	entries, err := k.root.ReadDir(devicesDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	var out []function
	for _, e := range entries {
		a, err := pci.ParseAddress(e.Name())
		if err != nil {
			continue
		}
		if f, ok := k.function(a); ok {
			out = append(out, f)
		}
	}
	slices.SortFunc(out, func(a, b function) int { return a.address.Compare(b.address) })
	return out, nil
}

// function returns the function at an address. It returns false if there is none, or if
// it vanishes meanwhile.
func (k kernel) function(a pci.Address) (function, bool) {
	f := function{address: a}
	vendor, ok1 := k.hex(a, "vendor", 16)
	device, ok2 := k.hex(a, "device", 16)
	class, ok3 := k.hex(a, "class", 32)
	if !ok1 || !ok2 || !ok3 {
		return f, false
	}
	subVendor, _ := k.hex(a, "subsystem_vendor", 16)
	subDevice, _ := k.hex(a, "subsystem_device", 16)
	f.id = profile.ID{
		Vendor: uint16(vendor), Device: uint16(device), SubVendor: uint16(subVendor), SubDevice: uint16(subDevice),
		Class: uint32(class) & 0xffffff,
	}
	f.driver = k.driver(a)
	f.override = k.override(a)
	return f, true
}

// serial returns the device serial number (PCI Express extended capability), in the form
// of lspci.
func (k kernel) serial(a pci.Address) string {
	n := pci.ParseConfig(k.read(deviceFile(a, "config"))).Serial
	if n == 0 {
		return ""
	}
	var parts []string
	for i := 56; i >= 0; i -= 8 {
		parts = append(parts, fmt.Sprintf("%02x", byte(n>>i)))
	}
	return strings.Join(parts, "-")
}

func (k kernel) driver(a pci.Address) string {
	target, err := k.root.ReadLink(deviceFile(a, "driver"))
	if err != nil {
		return ""
	}
	return path.Base(target)
}

func (k kernel) override(a pci.Address) string {
	if s := k.text(deviceFile(a, "driver_override")); s != "(null)" {
		return s
	}
	return ""
}

func (k kernel) autoprobe() (bool, error) {
	switch s := k.text(autoFile); s {
	case "0":
		return false, nil
	case "1":
		return true, nil
	default:
		return false, fmt.Errorf("%s says %.20q, not 0 or 1", autoFile, s)
	}
}

// slot returns the name of the hot-plug slot of a function. Slots without a file "power"
// are only named by the firmware.
func (k kernel) slot(a pci.Address) (string, bool) {
	want := a.Slot().String()
	want = want[:strings.IndexByte(want, '.')]
	for _, name := range k.slots() {
		if k.text(path.Join(slotsDir, name, "address")) == want {
			return name, true
		}
	}
	return "", false
}

func (k kernel) slots() []string {
	entries, err := k.root.ReadDir(slotsDir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		if _, err := fs.Stat(k.root, path.Join(slotsDir, e.Name(), "power")); err == nil {
			out = append(out, e.Name())
		}
	}
	return out
}

func (k kernel) read(name string) []byte {
	f, err := k.root.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSmall))
	if err != nil && len(data) == 0 {
		return nil
	}
	return data
}

func (k kernel) text(name string) string { return strings.TrimSpace(string(k.read(name))) }

func (k kernel) hex(a pci.Address, name string, bits int) (uint64, bool) {
	digits, ok := strings.CutPrefix(k.text(deviceFile(a, name)), "0x")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, bits)
	return n, err == nil
}

// memory returns the VM's memory, and the part that programs can still get, in bytes.
func (k kernel) memory() (total, free uint64) {
	for line := range strings.Lines(string(k.read("proc/meminfo"))) {
		name, rest, _ := strings.Cut(line, ":")
		kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 53)
		if err != nil {
			continue
		}
		switch name {
		case "MemTotal":
			total = kib << 10
		case "MemAvailable":
			free = kib << 10
		}
	}
	return total, free
}

// hasDriver reports whether a kernel driver is loaded or can be loaded.
func (k kernel) hasDriver(name string) bool {
	if _, err := fs.Stat(k.root, path.Join("sys/bus/pci/drivers", name)); err == nil {
		return true
	}
	// File names of modules may have either character; the kernel treats them as equal.
	name = strings.ReplaceAll(name, "-", "_")
	dir := path.Join("lib/modules", k.text("proc/sys/kernel/osrelease"))
	for _, list := range []string{"modules.dep", "modules.builtin"} {
		f, err := k.root.Open(path.Join(dir, list))
		if err != nil {
			continue
		}
		defer f.Close()
		lines := bufio.NewScanner(io.LimitReader(f, maxModules))
		lines.Buffer(nil, maxModules)
		for lines.Scan() {
			file, _, _ := strings.Cut(lines.Text(), ":")
			module, _, _ := strings.Cut(path.Base(file), ".ko")
			if strings.ReplaceAll(module, "-", "_") == name {
				return true
			}
		}
	}
	return false
}

// hasLibrary reports whether a library is in one of the loader's folders.
func (k kernel) hasLibrary(name string) bool {
	if path.IsAbs(name) {
		_, err := fs.Stat(k.root, strings.TrimPrefix(name, "/"))
		return err == nil
	}
	for _, dir := range k.libraryDirs() {
		if _, err := fs.Stat(k.root, path.Join(dir, name)); err == nil {
			return true
		}
	}
	return false
}

// libraryDirs returns the default folders of the dynamic loader, and those of its
// configuration.
func (k kernel) libraryDirs() []string {
	dirs := []string{"lib", "usr/lib", "lib64", "usr/lib64", "usr/local/lib"}
	const more = "etc/ld.so.conf.d"
	entries, err := k.root.ReadDir(more)
	if err != nil {
		return dirs
	}
	for _, e := range entries {
		for line := range strings.Lines(string(k.read(path.Join(more, e.Name())))) {
			if line = strings.TrimSpace(line); path.IsAbs(line) {
				dirs = append(dirs, strings.TrimPrefix(path.Clean(line), "/"))
			}
		}
	}
	return dirs
}

func (k kernel) bootID() string { return k.text("proc/sys/kernel/random/boot_id") }
