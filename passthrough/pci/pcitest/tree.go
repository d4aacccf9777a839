package pcitest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// Function is a function to be added to a tree. A zero field has the value that sysfs
// shows for a device without that property, except IOMMUGroup and NUMANode, where -1
// means none.
type Function struct {
	Address              string
	Parent               string // bridge above it; empty: it is on a root bus
	Vendor, Device       uint16
	SubVendor, SubDevice uint16
	Class                uint32 // 24 bits
	Revision             uint8
	Driver               string
	DriverOverride       string
	IOMMUGroup, NUMANode int
	Resource             []string // lines of the file resource
	Config               []byte   // nil: ConfigSpace makes it from the ids
	Reset                string
	Speed, MaxSpeed      string
	Width, MaxWidth      int
	PF                   string // physical function; makes it a virtual function
	TotalVFs             int
	BootVGA              bool
	Files                map[string]string // additional files
}

// Tree is a folder with a host's files.
type Tree struct {
	Root string
	t    testing.TB
	vfs  map[string]int
	at   map[string]string // folder of each function, below sys/devices
}

// New returns a host without devices.
func New(t testing.TB) *Tree {
	t.Helper()
	tree := &Tree{t.TempDir(), t, map[string]int{}, map[string]string{}}
	tree.mkdir("sys/bus/pci/devices")
	tree.mkdir("sys/bus/pci/drivers")
	return tree
}

// FS returns the tree as a file system.
func (tr *Tree) FS() fs.FS { return os.DirFS(tr.Root) }

// Write makes or replaces a file.
func (tr *Tree) Write(name, content string) {
	tr.t.Helper()
	path := filepath.Join(tr.Root, name)
	tr.mkdir(filepath.Dir(name))
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		tr.t.Fatal(err)
	}
}

// Dir returns the folder of a function's files, relative to the root.
func (tr *Tree) Dir(address string) string {
	tr.t.Helper()
	at, ok := tr.at[address]
	if !ok {
		tr.t.Fatalf("pcitest: no function %s", address)
	}
	return filepath.Join("sys/devices", at)
}

// Add adds functions. A parent or physical function must exist already.
func (tr *Tree) Add(functions ...Function) *Tree {
	tr.t.Helper()
	for _, f := range functions {
		tr.add(f)
	}
	return tr
}

func (tr *Tree) add(f Function) {
	tr.t.Helper()
	a, err := pci.ParseAddress(f.Address)
	if err != nil || a.String() != f.Address {
		tr.t.Fatalf("pcitest: address %q: %v", f.Address, err)
	}
	if _, twice := tr.at[f.Address]; twice {
		tr.t.Fatalf("pcitest: %s is there already", f.Address)
	}
	above := fmt.Sprintf("pci%04x:%02x", a.Domain, a.Bus)
	if f.Parent != "" {
		above = strings.TrimPrefix(tr.Dir(f.Parent), "sys/devices/")
	}
	at := filepath.Join(above, f.Address)
	tr.at[f.Address] = at
	dir := tr.Dir(f.Address)
	tr.mkdir(dir)
	tr.link(filepath.Join("sys/bus/pci/devices", f.Address), "../../../devices/"+at)
	write := func(name, format string, args ...any) {
		tr.Write(filepath.Join(dir, name), fmt.Sprintf(format, args...)+"\n")
	}
	write("vendor", "0x%04x", f.Vendor)
	write("device", "0x%04x", f.Device)
	write("subsystem_vendor", "0x%04x", f.SubVendor)
	write("subsystem_device", "0x%04x", f.SubDevice)
	write("class", "0x%06x", f.Class)
	write("revision", "0x%02x", f.Revision)
	write("numa_node", "%d", f.NUMANode)
	write("local_cpulist", "0-15")
	write("enable", "%d", btoi(f.Driver != ""))
	write("d3cold_allowed", "1")
	write("power_state", "D0")
	override := f.DriverOverride
	if override == "" {
		override = "(null)"
	}
	write("driver_override", "%s", override)
	if f.Reset != "" {
		write("reset_method", "%s", f.Reset)
	}
	if f.MaxSpeed != "" {
		write("current_link_speed", "%s", f.Speed)
		write("max_link_speed", "%s", f.MaxSpeed)
		write("current_link_width", "%d", f.Width)
		write("max_link_width", "%d", f.MaxWidth)
	}
	if f.Class>>8 == pci.ClassVGA {
		write("boot_vga", "%d", btoi(f.BootVGA))
	}
	lines := append([]string{}, f.Resource...)
	for len(lines) < 13 {
		lines = append(lines, "0x0000000000000000 0x0000000000000000 0x0000000000000000")
	}
	write("resource", "%s", strings.Join(lines, "\n"))
	config := f.Config
	if config == nil {
		config = ConfigSpace{Vendor: f.Vendor, Device: f.Device, Class: f.Class}.Bytes()
	}
	tr.Write(filepath.Join(dir, "config"), string(config))
	if f.Driver != "" {
		tr.mkdir(filepath.Join("sys/bus/pci/drivers", f.Driver))
		tr.link(filepath.Join(dir, "driver"), up(at)+"bus/pci/drivers/"+f.Driver)
		tr.link(filepath.Join("sys/bus/pci/drivers", f.Driver, f.Address), "../../../../devices/"+at)
	}
	if f.IOMMUGroup >= 0 {
		group := filepath.Join("sys/kernel/iommu_groups", strconv.Itoa(f.IOMMUGroup))
		tr.mkdir(filepath.Join(group, "devices"))
		tr.link(filepath.Join(dir, "iommu_group"), up(at)+"kernel/iommu_groups/"+strconv.Itoa(f.IOMMUGroup))
		tr.link(filepath.Join(group, "devices", f.Address), "../../../../devices/"+at)
	}
	if f.TotalVFs > 0 {
		write("sriov_totalvfs", "%d", f.TotalVFs)
		write("sriov_numvfs", "%d", 0)
	}
	if f.PF != "" {
		pf := tr.Dir(f.PF)
		tr.link(filepath.Join(dir, "physfn"), "../"+f.PF)
		tr.link(filepath.Join(pf, "virtfn"+strconv.Itoa(tr.vfs[f.PF])), "../"+f.Address)
		tr.vfs[f.PF]++
		tr.Write(filepath.Join(pf, "sriov_numvfs"), strconv.Itoa(tr.vfs[f.PF])+"\n")
	}
	for name, content := range f.Files {
		tr.Write(filepath.Join(dir, name), content)
	}
}

// Vanish removes a function's files, but leaves its entry in the list of devices: a
// reader that has just read the list sees that.
func (tr *Tree) Vanish(address string) {
	tr.t.Helper()
	if err := os.RemoveAll(filepath.Join(tr.Root, tr.Dir(address))); err != nil {
		tr.t.Fatal(err)
	}
}

// Bind sets a function's driver; empty: none.
func (tr *Tree) Bind(address, driver string) {
	tr.t.Helper()
	name := filepath.Join(tr.Dir(address), "driver")
	if err := os.Remove(filepath.Join(tr.Root, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		tr.t.Fatal(err)
	}
	if driver != "" {
		tr.link(name, up(tr.at[address])+"bus/pci/drivers/"+driver)
	}
}

func (tr *Tree) mkdir(name string) {
	tr.t.Helper()
	if err := os.MkdirAll(filepath.Join(tr.Root, name), 0o755); err != nil {
		tr.t.Fatal(err)
	}
}

func (tr *Tree) link(name, target string) {
	tr.t.Helper()
	if err := os.Symlink(target, filepath.Join(tr.Root, name)); err != nil {
		tr.t.Fatal(err)
	}
}

// up returns the relative path from a device's folder to sys.
func up(at string) string { return strings.Repeat("../", strings.Count(at, "/")+2) }

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}
