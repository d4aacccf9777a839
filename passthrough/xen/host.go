package xen

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"

	"github.com/gpuctl/gpuctl/internal/excerpt"
	"github.com/gpuctl/gpuctl/passthrough/pci"
)

var (
	// ErrNotControl means that this is not a control domain of Xen.
	ErrNotControl = errors.New("not a control domain of Xen")
	// ErrUnsupported means that hypercalls or xl do not provide this.
	ErrUnsupported = errors.New("not told by this Xen")
)

// State is the known state of a switch.
type State uint8

// States of a switch.
const (
	Unknown State = iota
	Off
	On
)

func (s State) String() string { return [...]string{"unknown", "off", "on"}[s%3] }

// Store is xenstore; *xenstore.Client implements it.
type Store interface {
	Read(ctx context.Context, path string) (string, error)
	List(ctx context.Context, path string) ([]string, error)
}

// Hypervisor provides what Xen itself knows, by hypercalls or the program xl. If one of
// them does not provide something, the error wraps ErrUnsupported.
type Hypervisor interface {
	// Running returns the existing domains, sorted by id, including those that are
	// ending. Names are in xenstore.
	Running(ctx context.Context) ([]Running, error)
	// IOMMU returns whether devices can be given to guests behind an IOMMU.
	IOMMU(ctx context.Context) (State, error)
	// Group returns the devices that the IOMMU cannot distinguish from this one.
	Group(ctx context.Context, a pci.Address) ([]pci.Address, error)
	// Nodes returns the NUMA nodes of the devices, as far as they are known.
	Nodes(ctx context.Context, devices []pci.Address) (map[pci.Address]int, error)
	// Log returns the hypervisor's log, as far as its ring still contains it.
	Log(ctx context.Context) (string, error)
	// Close releases all resources.
	Close() error
}

// Open returns the Hypervisor of the host whose files are in root: hypercalls through the
// devices in dev, such as /dev/xen, or otherwise the program xl. why is the reason for
// using xl, which provides less.
func Open(root fs.FS, dev string) (hv Hypervisor, why error) {
	v, err := ReadVersion(root)
	if err != nil {
		return &XL{}, err
	}
	p, err := OpenPrivcmd(dev, v)
	if err != nil {
		return &XL{}, err
	}
	return p, nil
}

// Running is a domain that exists.
type Running struct {
	ID     uint16
	UUID   string // empty: not provided
	Type   Type
	Dying  bool // it is ending, or cannot end because its memory is still mapped
	Paused bool
	Ran    bool // one of its vCPUs has run; xl tells that only of what took 0.1 s
}

// Type is the type of a domain.
type Type string

// Kinds of domains.
const (
	TypeUnknown Type = ""
	TypePV      Type = "pv"
	TypePVH     Type = "pvh"
	TypeHVM     Type = "hvm"
)

// Host is a control domain.
type Host struct {
	root  fs.FS
	store Store
	hv    Hypervisor
}

// New returns the host whose files are in root.
func New(root fs.FS, store Store, hv Hypervisor) *Host { return &Host{root, store, hv} }

// Detect returns ErrNotControl unless root contains the files of a control domain.
func Detect(root fs.FS) error {
	if kind := text(root, "sys/hypervisor/type"); kind != "xen" {
		return fmt.Errorf("%w: sys/hypervisor/type says %q", ErrNotControl, kind)
	}
	if caps := text(root, "proc/xen/capabilities"); !strings.Contains(caps, "control_d") {
		return fmt.Errorf("%w: proc/xen/capabilities says %q (in a control domain, mount xenfs at /proc/xen)", ErrNotControl, caps)
	}
	return nil
}

// Version is a release of Xen.
type Version struct {
	Major, Minor int
	Extra        string // for example ".7" or ".7-1-pre"
}

func (v Version) String() string { return fmt.Sprintf("%d.%d%s", v.Major, v.Minor, v.Extra) }

// ReadVersion returns the running release.
func ReadVersion(root fs.FS) (Version, error) {
	major, err1 := strconv.Atoi(text(root, "sys/hypervisor/version/major"))
	minor, err2 := strconv.Atoi(text(root, "sys/hypervisor/version/minor"))
	if err := errors.Join(err1, err2); err != nil {
		return Version{}, fmt.Errorf("release of Xen in sys/hypervisor/version: %w", err)
	}
	return Version{major, minor, text(root, "sys/hypervisor/version/extra")}, nil
}

const (
	maxFile = 1 << 20
	maxText = 256
)

func read(root fs.FS, name string) []byte {
	f, err := root.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil && len(data) == 0 {
		return nil
	}
	return data
}

func text(root fs.FS, name string) string { return clean(string(read(root, name))) }

// clean returns a text from outside as one short printable line.
func clean(s string) string { return excerpt.Line(s, maxText) }
