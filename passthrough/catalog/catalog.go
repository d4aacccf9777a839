package catalog

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	gpuctlv1 "github.com/gpuctl/gpuctl/api/gpuctl/v1"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/reset"
)

// ErrInvalid is wrapped by all errors about a file's content.
var ErrInvalid = errors.New("invalid catalogue")

// ID is a PCI id: VENDOR:DEVICE, or with a subsystem VENDOR:DEVICE:SUBVENDOR:SUBDEVICE.
type ID struct {
	Vendor, Device       uint16
	SubVendor, SubDevice uint16
	Subsystem            bool // SubVendor and SubDevice are set
}

// ParseID parses an id of two or four groups of four hexadecimal digits in lower case.
// Errors wrap ErrInvalid.
func ParseID(s string) (ID, error) {
	parts := strings.Split(s, ":")
	if len(parts) != 2 && len(parts) != 4 {
		return ID{}, fmt.Errorf("%.40q is no PCI id (want \"10de:2235\" or \"10de:2235:10de:145a\")", s)
	}
	var n [4]uint16
	for i, p := range parts {
		v, err := strconv.ParseUint(p, 16, 16)
		if err != nil || len(p) != 4 || strings.ToLower(p) != p || strings.ContainsAny(p, "+-_") {
			return ID{}, fmt.Errorf("%.40q is no PCI id: %.10q is not four hexadecimal digits in lower case", s, p)
		}
		n[i] = uint16(v)
	}
	return ID{n[0], n[1], n[2], n[3], len(parts) == 4}, nil
}

// String returns the id in the form of the files.
func (id ID) String() string {
	if id.Subsystem {
		return fmt.Sprintf("%04x:%04x:%04x:%04x", id.Vendor, id.Device, id.SubVendor, id.SubDevice)
	}
	return fmt.Sprintf("%04x:%04x", id.Vendor, id.Device)
}

// Verdict is what happens with a reset method that does not work.
type Verdict string

// Verdicts.
const (
	Hangs    Verdict = "hangs"     // the device, its bus or the host may hang
	NoEffect Verdict = "no-effect" // it reports success, but changes nothing
)

// BadReset is a reset method that does not work with a model.
type BadReset struct {
	Method  reset.Method
	Verdict Verdict
	Reason  string
}

// VGPUType is a type of virtual GPU that the vendor's software can create on a model.
type VGPUType struct {
	Name   string
	Memory uint64 // framebuffer, bytes
	Max    uint32 // on a GPU, if all have the same size
	Mixed  uint32 // on a GPU, if sizes differ; 0: unknown, or not permitted
	MIG    string // profile of the MIG slice that it needs; empty: it is time-sliced
}

// Entry is what is known about a model.
type Entry struct {
	Model    string
	Memory   uint64           // nominal, bytes; 0: unknown, or different from card to card
	Rank     uint32           // the higher, the better
	Limits   *gpuctlv1.Limits // zero fields are unknown
	VGPU     []VGPUType
	Resets   []BadReset
	Emulated bool   // not a GPU: a device that represents one in a lab
	AnyClass bool   // its devices are GPUs although their class is another one
	File     string // the last file that has described the model
}

// Avoid returns the reset methods that reset.Resetter must not use, and why.
func (e *Entry) Avoid() []reset.Avoid {
	var out []reset.Avoid
	for _, b := range e.Resets {
		out = append(out, reset.Avoid{Method: b.Method, Why: fmt.Sprintf("%s %s: %s", e.Model, b.Verdict, b.Reason)})
	}
	return out
}

// VGPUType returns a type by its name, such as "A40-8Q".
func (e *Entry) VGPUType(name string) (VGPUType, bool) {
	i := slices.IndexFunc(e.VGPU, func(t VGPUType) bool { return t.Name == name })
	if i < 0 {
		return VGPUType{}, false
	}
	return e.VGPU[i], true
}

func (e *Entry) clone() Entry {
	c := *e
	c.Limits = proto.CloneOf(e.Limits)
	c.VGPU, c.Resets = slices.Clone(e.VGPU), slices.Clone(e.Resets)
	return c
}

// Catalog has the content of all files. It is immutable and safe for concurrent use.
type Catalog struct {
	models map[string]*Entry
	byID   map[ID]string
}

// Lookup returns the model of a device. For a virtual function, it returns the card's
// model without the memory, which depends on the number of slices.
func (c *Catalog) Lookup(d *pci.Device) (Entry, bool) {
	id := ID{d.VendorID, d.DeviceID, d.SubVendorID, d.SubDeviceID, true}
	model, ok := c.byID[id]
	if !ok {
		model, ok = c.byID[ID{Vendor: d.VendorID, Device: d.DeviceID}]
	}
	if !ok {
		return Entry{}, false
	}
	e := c.models[model].clone()
	if d.PF != nil {
		e.Memory, e.Limits.GlobalMemory, e.VGPU = 0, 0, nil
	}
	return e, true
}

// AnyClass returns a function that reports whether a device is a GPU whatever its class;
// nil: no model has such devices.
func (c *Catalog) AnyClass() func(*pci.Device) bool {
	for _, e := range c.models {
		if e.AnyClass {
			return func(d *pci.Device) bool {
				e, ok := c.Lookup(d)
				return ok && e.AnyClass
			}
		}
	}
	return nil
}

// AnyClassIDs returns the vendor and device ids, such as "1b36:0010", of the models whose
// devices are GPUs whatever their class, sorted.
func (c *Catalog) AnyClassIDs() []string {
	var out []string
	for id, model := range c.byID {
		if c.models[model].AnyClass {
			out = append(out, fmt.Sprintf("%04x:%04x", id.Vendor, id.Device))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Model returns a model by its name.
func (c *Catalog) Model(name string) (Entry, bool) {
	e, ok := c.models[name]
	if !ok {
		return Entry{}, false
	}
	return e.clone(), true
}

// Models returns the names of all models, sorted by rank and then by name.
func (c *Catalog) Models() []string {
	names := make([]string, 0, len(c.models))
	for n := range c.models {
		names = append(names, n)
	}
	slices.SortFunc(names, func(a, b string) int {
		if d := int64(c.models[a].Rank) - int64(c.models[b].Rank); d != 0 {
			return int(d)
		}
		return strings.Compare(a, b)
	})
	return names
}

// IDs returns all ids that have a model.
func (c *Catalog) IDs() map[ID]string {
	out := make(map[ID]string, len(c.byID))
	for id, m := range c.byID {
		out[id] = m
	}
	return out
}

// Source is where a value comes from.
type Source string

// Sources of the amount of memory, the most reliable first.
const (
	FromDriver  Source = "driver"
	FromCatalog Source = "catalogue"
	FromBAR     Source = "BAR" // an upper bound, because BARs are powers of two
	Unknown     Source = ""
)

// aperture is the size of a BAR that is only a window onto the memory, as on GPUs without
// a resizable BAR. It does not show the memory's size.
const aperture = 256 << 20

// registers is the size of an emulated device's BAR that contains no memory.
const registers = 1 << 20

// Memory returns how much memory a device has, in bytes, and the source of that. e and ok
// are the results of Lookup. The BAR is used if it contains the whole memory: for devices
// with a resizable BAR, and for emulated ones.
func Memory(d *pci.Device, e Entry, ok bool) (uint64, Source) {
	if d.VideoMemory != 0 {
		return d.VideoMemory, FromDriver
	}
	if ok && e.Memory != 0 {
		return e.Memory, FromCatalog
	}
	if d.PF != nil {
		return 0, Unknown
	}
	var largest uint64
	for _, b := range d.BARs {
		if !b.IO && b.Prefetchable {
			largest = max(largest, b.Size)
		}
	}
	if largest > aperture || ok && e.Emulated && largest > registers {
		return largest, FromBAR
	}
	return 0, Unknown
}
