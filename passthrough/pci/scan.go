package pci

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
)

const (
	devicesDir = "sys/bus/pci/devices"
	groupsDir  = "sys/kernel/iommu_groups"
	maxFile    = 64 << 10
	maxVFs     = 4096
	maxDepth   = 64 // most bridges above a device

	flagIO       = 0x100
	flagMemory   = 0x200
	flagPrefetch = 0x2000
	flag64       = 0x100000
	romIndex     = 6
)

// Scan returns the cards of the host whose files are in root, sorted by address. A host
// without PCI has none.
func Scan(root fs.FS) ([]*Card, error) { return NewScanner(root).Scan() }

// look scans. A device for which also returns true is a GPU whatever its class. names
// finds the names of ids.
func look(root fs.FS, also func(*Device) bool, names func(want map[id]bool) map[id]string) ([]*Card, error) {
	s := &scan{root: root, also: also, all: map[Address]*node{}}
	entries, err := fs.ReadDir(root, devicesDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list PCI devices: %w", err)
	}
	for _, e := range entries {
		a, err := ParseAddress(e.Name())
		if err != nil {
			continue
		}
		if n := s.node(a); n != nil {
			s.all[a] = n
		}
	}
	cards := s.cards()
	s.isolate(cards)
	want := map[id]bool{}
	for _, c := range cards {
		for d := range c.all {
			want[id{vendor: d.VendorID}] = true
			want[id{vendor: d.VendorID, device: d.DeviceID}] = true
			want[id{d.VendorID, d.DeviceID, d.SubVendorID, d.SubDeviceID}] = true
		}
	}
	if len(cards) > 0 {
		found := names(want)
		for _, c := range cards {
			for d := range c.all {
				d.name(found)
			}
		}
	}
	return cards, nil
}

// all yields the functions and then the virtual functions.
func (c *Card) all(yield func(*Device) bool) {
	for _, d := range c.Functions {
		if !yield(d) {
			return
		}
	}
	for _, d := range c.VFs {
		if !yield(d) {
			return
		}
	}
}

type scan struct {
	root fs.FS
	also func(*Device) bool
	all  map[Address]*node
}

// node is what is read of every device. The rest is read only of cards.
type node struct {
	address Address
	class   uint32
	named   bool
	pf      *Address
	above   []Address // bridges, the root port first
	iommu   int

	config     Config // read when needed
	configRead bool
}

// node returns nil if the device has vanished.
func (s *scan) node(a Address) *node {
	f := s.files(a)
	class, ok := f.hex("class")
	if !ok {
		return nil
	}
	n := &node{address: a, class: uint32(class) & 0xffffff, iommu: f.group()}
	if s.also != nil && !(&Device{Class: n.class}).Managed() {
		d := &Device{}
		n.named = f.identify(d) && s.also(d)
	}
	if pf, err := ParseAddress(f.link("physfn")); err == nil {
		n.pf = &pf
	}
	// The link leads to the device's place in the tree of buses.
	target, err := fs.ReadLink(s.root, f.dir)
	if err != nil {
		return n
	}
	for part := range strings.SplitSeq(target, "/") {
		if bridge, err := ParseAddress(part); err == nil && bridge != a && len(n.above) < maxDepth {
			n.above = append(n.above, bridge)
		}
	}
	return n
}

func (s *scan) config(a Address) Config {
	n := s.all[a]
	if n == nil {
		return Config{Port: PortConventional}
	}
	if !n.configRead {
		n.config, n.configRead = s.files(a).config(), true
	}
	return n.config
}

func (s *scan) cards() []*Card {
	byPlace := func(a, b *node) int { return a.address.Compare(b.address) }
	nodes := slices.SortedFunc(maps.Values(s.all), byPlace)
	slots := map[Address]*Card{}
	var cards []*Card
	managed := func(n *node) bool { return (&Device{Class: n.class, Named: n.named}).Managed() }
	for _, n := range nodes {
		slot := n.address.Slot()
		switch {
		case !managed(n) || slots[slot] != nil:
		case n.pf != nil && s.all[*n.pf] != nil && managed(s.all[*n.pf]): // it belongs to that card
		case n.pf != nil: // its physical function is not managed
			if d := s.device(n); d != nil {
				cards = append(cards, &Card{Address: n.address, Functions: []*Device{d}})
			}
		default:
			slots[slot] = &Card{Address: n.address}
			cards = append(cards, slots[slot])
		}
	}
	for _, n := range nodes {
		if n.pf != nil {
			if card := slots[n.pf.Slot()]; card != nil {
				if d := s.device(n); d != nil {
					card.VFs = append(card.VFs, d)
				}
			}
		} else if card := slots[n.address.Slot()]; card != nil && n.class>>16 != baseBridge {
			if d := s.device(n); d != nil {
				card.Functions = append(card.Functions, d)
			}
		}
	}
	// The main function may have vanished since it was listed.
	return slices.DeleteFunc(cards, func(c *Card) bool { return c.Main() == nil })
}

// device reads everything of a function; nil if it has vanished.
func (s *scan) device(n *node) *Device {
	f := s.files(n.address)
	d := &Device{Address: n.address, Class: n.class, Named: n.named, IOMMUGroup: n.iommu, PF: n.pf, NUMANode: -1}
	if !f.identify(d) {
		return nil
	}
	revision, _ := f.hex("revision")
	d.Revision = uint8(revision)
	d.Driver = clean(f.link("driver"))
	if d.DriverOverride = f.text("driver_override"); d.DriverOverride == "(null)" {
		d.DriverOverride = ""
	}
	if node, err := strconv.Atoi(f.text("numa_node")); err == nil && node >= 0 && node < 1<<16 {
		d.NUMANode = node
	}
	d.LocalCPUs = f.text("local_cpulist")
	d.BARs, d.ROM = parseResource(f.read("resource"))
	d.Link = Link{
		parseSpeed(f.text("current_link_speed")), parseSpeed(f.text("max_link_speed")),
		parseWidth(f.text("current_link_width")), parseWidth(f.text("max_link_width")),
	}
	d.Removable = f.text("removable")
	d.D3cold = f.text("d3cold_allowed") == "1"
	d.PowerState = f.text("power_state")
	d.ResetMethods = strings.Fields(f.text("reset_method"))
	enabled, err := strconv.Atoi(f.text("enable"))
	d.Enabled = err == nil && enabled > 0
	d.BootVGA = f.text("boot_vga") == "1"
	d.VideoMemory, _ = strconv.ParseUint(f.text("mem_info_vram_total"), 10, 64)
	d.SRIOV = f.sriov()
	d.Config = s.config(n.address)
	for _, a := range n.above {
		d.Upstream = append(d.Upstream, Bridge{a, s.config(a)})
	}
	return d
}

// identify reads the ids. It returns false if the device has vanished.
func (f files) identify(d *Device) bool {
	vendor, ok := f.hex("vendor")
	device, _ := f.hex("device")
	subVendor, _ := f.hex("subsystem_vendor")
	subDevice, _ := f.hex("subsystem_device")
	d.VendorID, d.DeviceID, d.SubVendorID, d.SubDeviceID = uint16(vendor), uint16(device), uint16(subVendor), uint16(subDevice)
	return ok
}

// files reads the files of one device. What cannot be read is empty.
type files struct {
	root fs.FS
	dir  string
}

func (s *scan) files(a Address) files { return files{s.root, path.Join(devicesDir, a.String())} }

func (f files) read(name string) []byte {
	file, err := f.root.Open(path.Join(f.dir, name))
	if err != nil {
		return nil
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxFile))
	if err != nil && len(data) == 0 {
		return nil
	}
	return data
}

func (f files) text(name string) string { return clean(string(f.read(name))) }

func (f files) hex(name string) (uint64, bool) {
	digits, ok := strings.CutPrefix(f.text(name), "0x")
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 16, 64)
	return n, err == nil
}

// link returns the last element of a symbolic link's destination.
func (f files) link(name string) string {
	target, err := fs.ReadLink(f.root, path.Join(f.dir, name))
	if err != nil {
		return ""
	}
	return path.Base(target)
}

func (f files) group() int {
	n, err := strconv.Atoi(f.link("iommu_group"))
	if err != nil || n < 0 {
		return -1
	}
	return n
}

func (f files) config() Config {
	return ParseConfig(f.read("config"))
}

func (f files) sriov() *SRIOV {
	total, err := strconv.Atoi(f.text("sriov_totalvfs"))
	if err != nil || total <= 0 {
		return nil
	}
	v := &SRIOV{TotalVFs: total}
	if n, err := strconv.Atoi(f.text("sriov_numvfs")); err == nil && n > 0 {
		v.NumVFs = n
	}
	for i := range min(v.NumVFs, v.TotalVFs, maxVFs) {
		if a, err := ParseAddress(f.link("virtfn" + strconv.Itoa(i))); err == nil {
			v.VFs = append(v.VFs, a)
		}
	}
	return v
}

// parseResource parses lines of start, end and flags, one for each range: six BARs, the
// ROM, and others, which are ignored.
func parseResource(data []byte) (bars []BAR, rom uint64) {
	index := -1
	for line := range strings.Lines(string(data)) {
		index++
		if index > romIndex {
			break
		}
		fields := strings.Fields(line)
		if len(fields) != 3 {
			continue
		}
		var n [3]uint64
		ok := true
		for i, field := range fields {
			var err error
			n[i], err = strconv.ParseUint(strings.TrimPrefix(field, "0x"), 16, 64)
			ok = ok && err == nil
		}
		start, end, flags := n[0], n[1], n[2]
		size := end - start + 1
		if !ok || flags == 0 || end < start || end == 0 || size == 0 {
			continue
		}
		if index == romIndex {
			rom = size
			continue
		}
		bars = append(bars, BAR{
			Index: index, Start: start, Size: size,
			IO:   flags&flagIO != 0 && flags&flagMemory == 0,
			Is64: flags&flag64 != 0, Prefetchable: flags&flagPrefetch != 0,
		})
	}
	return bars, rom
}

// parseSpeed parses "16.0 GT/s PCIe" or "2.5 GT/s".
func parseSpeed(s string) uint32 {
	number, _, ok := strings.Cut(s, " GT/s")
	if !ok {
		return 0
	}
	gt, err := strconv.ParseFloat(number, 64)
	if err != nil || math.IsNaN(gt) || gt <= 0 || gt > 1e4 {
		return 0
	}
	return uint32(gt*1000 + 0.5)
}

func parseWidth(s string) uint32 {
	n, err := strconv.ParseUint(s, 10, 8)
	if err != nil || n > 32 { // 63 and 255 mean that the link is down
		return 0
	}
	return uint32(n)
}
