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

// Kind is the kind of a card's virtual GPUs.
type Kind string

// Kinds.
const (
	None   Kind = ""       // it has none, or not now
	SRIOV  Kind = "sriov"  // virtual functions that are used as they are
	Mdev   Kind = "mdev"   // mediated devices
	Vendor Kind = "vendor" // NVIDIA's types on virtual functions
	Slice  Kind = "mig"    // used in Profile only: made through NVML, not by this package
)

// Errors.
var (
	// ErrFull means that there is no room for another instance. The message contains why.
	ErrFull = errors.New("no room on the card")
	// ErrInUse means that virtual functions or instances exist, so the card or their
	// number must not be changed.
	ErrInUse = errors.New("virtual GPUs are out")
	// ErrProfile means that the card does not have the profile.
	ErrProfile = errors.New("no such profile")
	// ErrNoFunctions means that the card has no virtual functions yet, but could have
	// some.
	ErrNoFunctions = errors.New("it has no virtual functions yet")
	// ErrReadBack means that the kernel has accepted a write, but shows another value.
	ErrReadBack = sriov.ErrReadBack
)

// VirtualFunction is the profile of a card that has only virtual functions.
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
	ID       string // UUID of a mediated device; otherwise the function's address
	Kind     Kind
	Profile  string
	Function pci.Address // function for a VM; for a mediated device, its parent
}

// Use is what the caller knows about a card in addition to the kernel.
type Use struct {
	Scheduled map[string]uint32 // instances that are promised and do not exist yet, by profile
	Held      []string          // ids of instances in use
	Profiles  map[string]string // profiles of instances in use, by id, as far as they are known
	Mixed     bool              // the GPU is in the mode for vGPUs of several sizes (from NVML)
}

func (u Use) held(id string) bool { return slices.Contains(u.Held, id) }

// Option is an option of New.
type Option func(*Manager)

// WithSwitch sets a function that sets the number of virtual functions of cards for which
// the kernel's file cannot be used, such as sriov-manage of NVIDIA's software. ok is
// false if the file can be used.
func WithSwitch(f func(ctx context.Context, pf pci.Address, n int) (ok bool, err error)) Option {
	return func(m *Manager) { m.enable = f }
}

// WithTypeName sets a function that returns the names of NVIDIA's types by their ids,
// from NVML: the driver's table does not contain types that a full card cannot create any
// more. Empty: unknown.
func WithTypeName(f func(id uint32) string) Option {
	return func(m *Manager) { m.name = f }
}

// Manager manages the virtual GPUs of one host's cards. One card must not be changed by
// two goroutines at the same time.
type Manager struct {
	root   sysfs.Root
	models func(*pci.Device) (catalog.Entry, bool)
	enable func(context.Context, pci.Address, int) (bool, error)
	name   func(uint32) string

	mu   sync.Mutex
	seen map[uint32]string // names of types by id
}

// New returns a Manager. models is the catalogue's Lookup.
func New(root sysfs.Root, models func(*pci.Device) (catalog.Entry, bool), opts ...Option) *Manager {
	m := &Manager{root: root, models: models, seen: map[uint32]string{}}
	for _, o := range opts {
		o(m)
	}
	return m
}

// Kind returns which kind of virtual GPUs the card can have now: with its present driver
// and its present virtual functions.
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

// List returns the card's profiles, and how many more instances of each are possible.
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

// Instances returns the virtual GPUs of the card. A virtual function without an instance
// is not one, unless the card has only virtual functions.
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

// Pick chooses the instance for Make: its function and its UUID. The instance itself must
// not count as scheduled: the caller removes it from use before. A mediated device gets
// id as its UUID, or a new one if id is empty. Errors wrap ErrFull, ErrProfile or
// ErrNoFunctions: then one is possible after the card has virtual functions (Resize).
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

// Make creates an instance that was picked. Delete deletes it, also what is left after an
// error. A virtual function that is used as it is exists already.
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

// Create picks and makes an instance of a profile. If the card needs virtual functions
// and has none, it gets the highest number. undo deletes the instance, and the functions
// that were made for it. undo may be called after errors as well, and does nothing if
// nothing is to be undone.
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

// Delete deletes an instance. It must not be in use: if a mediated device is open, the
// kernel waits until it is closed. If the instance does not exist, there is no error.
func (m *Manager) Delete(ctx context.Context, i Instance) error {
	switch i.Kind {
	case Vendor:
		return m.deleteVendor(ctx, i)
	case Mdev:
		return m.deleteMdev(ctx, i)
	}
	return nil // a virtual function is removed with the others
}

// Whole returns an error that wraps ErrInUse while virtual functions or mediated devices
// exist. Then the card itself must not be given to a VM, reset or taken from its driver.
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

// physical returns the function of the card that can have virtual functions.
func (m *Manager) physical(card *pci.Card) *pci.Device {
	for _, f := range card.Functions {
		if m.device(f.Address).Most() > 0 {
			return f
		}
	}
	return nil
}

// functions returns the card's own functions and then its present virtual functions.
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

// vfs returns the virtual functions of a function, sorted by index.
func (m *Manager) vfs(pf pci.Address) []pci.Address {
	functions := m.device(pf).Functions()
	var out []pci.Address
	for _, i := range slices.Sorted(maps.Keys(functions)) {
		out = append(out, functions[i])
	}
	return out
}

// rules returns the limits of the card, from the catalogue.
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
