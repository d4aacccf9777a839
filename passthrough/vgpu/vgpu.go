package vgpu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"

	"github.com/gpuctl/gpuctl/passthrough/catalog"
	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sriov"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

// Kind is a way of cutting a card.
type Kind string

// Kinds.
const (
	None   Kind = ""       // cannot be cut, or not now
	SRIOV  Kind = "sriov"  // virtual functions as they come
	Mdev   Kind = "mdev"   // mediated devices
	Vendor Kind = "vendor" // NVIDIA's types on virtual functions
	Slice  Kind = "mig"    // only of Profile: by NVML, not by this package
)

// Errors.
var (
	// ErrFull says that there is no room for another instance; the message says why.
	ErrFull = errors.New("no room on the card")
	// ErrInUse says that virtual functions or instances are out, whose card or
	// number must not change.
	ErrInUse = errors.New("virtual GPUs are out")
	// ErrProfile says that the card does not know the profile.
	ErrProfile = errors.New("no such profile")
	// ErrNoFunctions says that the card has no virtual functions yet, and could.
	ErrNoFunctions = errors.New("it has no virtual functions yet")
	// ErrReadBack says that the kernel took what was written and shows
	// something else.
	ErrReadBack = sriov.ErrReadBack
)

// VirtualFunction is the profile of a card that has nothing but virtual functions.
const VirtualFunction = "vf"

const (
	devices  = "sys/bus/pci/devices"
	mdevs    = "sys/bus/mdev/devices"
	maxText  = 64 << 10
	maxName  = 64
	maxTypes = 4096
)

// Instance is one virtual GPU.
type Instance struct {
	ID       string // UUID of a mediated device, else the function's address
	Kind     Kind
	Profile  string
	Function pci.Address // to be given to a VM; of a mediated device its parent
}

// Use is what the caller knows of a card beyond what the kernel shows.
type Use struct {
	Scheduled map[string]uint32 // instances by profile that are promised and do not exist yet
	Held      []string          // ids of instances that somebody has
	Profiles  map[string]string // of those, by id, as far as they are known
	Mixed     bool              // the GPU is in the mode for vGPUs of several sizes (NVML)
}

func (u Use) held(id string) bool { return slices.Contains(u.Held, id) }

// Option changes a Manager.
type Option func(*Manager)

// WithSwitch gives the way to set the number of virtual functions of cards for
// which the kernel's file is not enough, as sriov-manage of NVIDIA's software.
// ok is false where the file is.
func WithSwitch(f func(ctx context.Context, pf pci.Address, n int) (ok bool, err error)) Option {
	return func(m *Manager) { m.enable = f }
}

// WithTypeName gives names of NVIDIA's types by their numbers, as NVML has them:
// the driver's table leaves out what a full card cannot make any more. Empty:
// not known.
func WithTypeName(f func(id uint32) string) Option {
	return func(m *Manager) { m.name = f }
}

// Manager cuts the cards of one machine. One card must not be changed from two
// goroutines at a time.
type Manager struct {
	root   sysfs.Root
	models func(*pci.Device) (catalog.Entry, bool)
	enable func(context.Context, pci.Address, int) (bool, error)
	name   func(uint32) string

	mu   sync.Mutex
	seen map[uint32]string // names of types
}

// New returns a Manager; models is the catalogue's Lookup.
func New(root sysfs.Root, models func(*pci.Device) (catalog.Entry, bool), opts ...Option) *Manager {
	m := &Manager{root: root, models: models, seen: map[uint32]string{}}
	for _, o := range opts {
		o(m)
	}
	return m
}

// Kind says how the card can be cut as it is now: with the driver that it has
// and the virtual functions that are there.
func (m *Manager) Kind(card *pci.Card) Kind {
	functions := m.functions(card)
	for _, a := range functions {
		if m.exists(m.at(a, typeFile)) {
			return Vendor
		}
	}
	for _, a := range functions {
		if m.exists(m.at(a, "mdev_supported_types")) {
			return Mdev
		}
	}
	if m.physical(card) != nil {
		return SRIOV
	}
	return None
}

// List says what the card can be cut into and how much of it is left.
func (m *Manager) List(card *pci.Card, use Use) ([]Profile, error) {
	switch m.Kind(card) {
	case Vendor:
		return m.vendorProfiles(card, use)
	case Mdev:
		return m.mdevProfiles(card, use)
	case SRIOV:
		return []Profile{m.vfProfile(card, use)}, nil
	}
	return nil, nil
}

// Instances are the virtual GPUs that the card has. Virtual functions without
// one are none, unless the card has nothing else.
func (m *Manager) Instances(card *pci.Card) ([]Instance, error) {
	switch m.Kind(card) {
	case Vendor:
		return m.vendorInstances(card)
	case Mdev:
		return m.mdevInstances(card)
	case SRIOV:
		var out []Instance
		for _, a := range m.vfs(m.physical(card).Address) {
			out = append(out, Instance{a.String(), SRIOV, VirtualFunction, a})
		}
		return out, nil
	}
	return nil, nil
}

// Pick says which instance Make is to make: on which function, with which UUID.
// What is being made does not count as scheduled: the caller takes it out of
// use before. A mediated device gets id as its UUID, or a new one where it is
// empty. ErrNoFunctions: there could be one once the card has virtual functions
// (Resize).
func (m *Manager) Pick(card *pci.Card, profile, id string, use Use) (Instance, error) {
	profiles, err := m.List(card, use)
	if err != nil {
		return Instance{}, err
	}
	n := slices.IndexFunc(profiles, func(p Profile) bool { return p.Name == profile })
	if n < 0 {
		return Instance{}, fmt.Errorf("%s: %w: %q", card.Address, ErrProfile, profile)
	}
	if p := profiles[n]; p.Free == 0 {
		return Instance{}, fmt.Errorf("%s for %s: %w: %s", profile, card.Address, ErrFull, p.Why)
	}
	switch profiles[n].Kind {
	case Vendor:
		return m.pickVendor(card, profile, use)
	case Mdev:
		return m.pickMdev(card, profile, id)
	}
	vfs := m.vfs(m.physical(card).Address)
	if len(vfs) == 0 {
		return Instance{}, fmt.Errorf("%s for %s: %w", profile, card.Address, ErrNoFunctions)
	}
	for _, a := range vfs {
		if !use.held(a.String()) {
			return Instance{a.String(), SRIOV, VirtualFunction, a}, nil
		}
	}
	return Instance{}, fmt.Errorf("%s for %s: %w: all virtual functions are out", profile, card.Address, ErrFull)
}

// Make makes an instance that was picked. Delete takes it away, also what an
// error has left of it. A virtual function that is a device as it comes is
// there already.
func (m *Manager) Make(ctx context.Context, i Instance) error {
	switch i.Kind {
	case Vendor:
		return m.makeVendor(ctx, i)
	case Mdev:
		return m.makeMdev(ctx, i)
	}
	if !m.exists(m.at(i.Function, "")) {
		return fmt.Errorf("%s on %s: %w: there is no such function any more", i.Profile, i.Function, ErrReadBack)
	}
	return nil
}

// Create picks and makes an instance of the profile; a card without virtual
// functions that has no other way gets as many as it can have. undo takes the
// instance away again, and the functions that were made for it; it is valid
// after errors as well, and does nothing where nothing is left to be undone.
func (m *Manager) Create(ctx context.Context, card *pci.Card, profile, id string, use Use) (Instance, func(context.Context) error, error) {
	undo := func(context.Context) error { return nil }
	i, err := m.Pick(card, profile, id, use)
	switch {
	case errors.Is(err, ErrNoFunctions):
		undo = func(ctx context.Context) error { return m.Resize(ctx, card, 0, use) }
		_, total := m.VFs(card)
		if err = m.Resize(ctx, card, total, use); err == nil {
			i, err = m.Pick(card, profile, id, use)
		}
	case err == nil:
		undo = func(ctx context.Context) error { return m.Delete(ctx, i) }
	}
	if err == nil {
		err = m.Make(ctx, i)
	}
	if err != nil {
		return Instance{}, undo, err
	}
	return i, undo, nil
}

// Delete takes an instance away. Nobody may have it: of a mediated device that
// is open the kernel waits for who has it. One that is not there any more is
// no error.
func (m *Manager) Delete(ctx context.Context, i Instance) error {
	switch i.Kind {
	case Vendor:
		return m.deleteVendor(ctx, i)
	case Mdev:
		return m.deleteMdev(ctx, i)
	}
	return nil // a virtual function goes with the others
}

// Whole reports whether the card itself may be given away, reset or taken from its
// driver: ErrInUse while virtual functions or mediated devices are out.
func (m *Manager) Whole(card *pci.Card) error {
	instances, err := m.Instances(card)
	if err != nil {
		return err
	}
	if pf := m.physical(card); pf != nil {
		if n := len(m.vfs(pf.Address)); n > 0 {
			return fmt.Errorf("%s: %w: %d virtual functions exist; set their number to 0 first", card.Address, ErrInUse, n)
		}
	}
	if len(instances) > 0 {
		return fmt.Errorf("%s: %w: %s of profile %s exists; delete it first", card.Address, ErrInUse, instances[0].ID, instances[0].Profile)
	}
	return nil
}

// physical is the function of the card that has virtual ones.
func (m *Manager) physical(card *pci.Card) *pci.Device {
	for _, f := range card.Functions {
		if m.device(f.Address).Most() > 0 {
			return f
		}
	}
	return nil
}

// functions are the card's own and then the virtual ones, as they are now.
func (m *Manager) functions(card *pci.Card) []pci.Address {
	var out []pci.Address
	for _, f := range card.Functions {
		out = append(out, f.Address)
	}
	for _, f := range card.Functions {
		out = append(out, m.vfs(f.Address)...)
	}
	return out
}

// vfs are the virtual functions of a function, in the order of their numbers.
func (m *Manager) vfs(pf pci.Address) []pci.Address {
	functions := m.device(pf).Functions()
	var out []pci.Address
	for _, i := range slices.Sorted(maps.Keys(functions)) {
		out = append(out, functions[i])
	}
	return out
}

// rules are what the catalogue knows of the card, for a kernel's names.
func (m *Manager) rules(card *pci.Card, use Use) rules {
	r := rules{types: map[string]catalog.VGPUType{}, mixed: use.Mixed}
	main := card.Main()
	if main == nil {
		return r
	}
	e, ok := m.models(main)
	r.memory, _ = catalog.Memory(main, e, ok)
	for _, t := range e.VGPU {
		r.types[t.Name] = t
	}
	return r
}

func (m *Manager) at(a pci.Address, name string) string {
	return path.Join(devices, a.String(), name)
}

func (m *Manager) exists(name string) bool {
	_, err := m.root.Lstat(name)
	return err == nil
}

func (m *Manager) text(name string) string {
	data, err := m.root.ReadFile(name)
	if err != nil || len(data) > maxText {
		return ""
	}
	return strings.TrimSpace(string(data))
}
