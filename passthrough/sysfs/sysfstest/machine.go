package sysfstest

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"syscall"

	"github.com/gpuctl/gpuctl/passthrough/pci"
	"github.com/gpuctl/gpuctl/passthrough/sysfs"
)

const sysDevices, pciDrivers, pciDevices = "sys/devices", "sys/bus/pci/drivers", "sys/bus/pci/devices"

// Machine is a machine: see the package documentation. It is safe for concurrent use.
// Wrong calls, such as adding a device twice, panic, because the test is wrong.
type Machine struct {
	mu         sync.Mutex
	root       *node
	devices    map[pci.Address]*device
	gone       map[pci.Address]*device // removed devices that a rescan finds again
	drivers    []*driver               // in the order in which they were loaded
	autoprobe  bool
	boot       int
	groups     int                    // next free IOMMU group
	opened     int                    // next free number of a VFIO device
	owners     map[pci.Address]string // guests by function
	processes  map[int]*process
	violations []string
	refusals   map[refusal]error
	mdevs      map[string]*mdev

	faults  map[int]fault // by number of the write
	count   int           // number of writes and steps
	writes  []string
	crashed bool
	hasty   bool
	pending []*op
}

var _ sysfs.Root = (*Machine)(nil)

// New returns a machine without devices and drivers.
func New() *Machine {
	m := &Machine{
		root: newFolder(nil), devices: map[pci.Address]*device{}, gone: map[pci.Address]*device{}, autoprobe: true, owners: map[pci.Address]string{},
		processes: map[int]*process{}, refusals: map[refusal]error{}, mdevs: map[string]*mdev{}, faults: map[int]fault{},
	}
	m.root.folder(pciDevices)
	m.root.folder(pciDrivers)
	m.root.folder("proc")
	m.root.put("sys/bus/pci/drivers_probe", &node{store: m.driversProbe})
	m.root.put("sys/bus/pci/drivers_autoprobe", &node{
		show:  func() (string, error) { return digit(m.autoprobe) + "\n", nil },
		store: func(s string) error { return parseBool(s, &m.autoprobe) },
	})
	m.root.put("sys/bus/pci/rescan", &node{store: m.rescan})
	m.root.put("proc/sys/kernel/random/boot_id", shows(func() string { return fmt.Sprintf("00000000-0000-4000-8000-%012d\n", m.boot) }))
	return m
}

// File makes or replaces a read-only file.
func (m *Machine) File(name, content string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.root.put(name, text(content))
}

// Attr makes or replaces a file of the kernel that this package does not simulate. If a
// function is nil, the file cannot be read, or written. The functions are called with the
// machine locked, and must not call it.
func (m *Machine) Attr(name string, show func() (string, error), store func(data string) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.root.put(name, &node{show: show, store: store})
}

// Link makes a symbolic link.
func (m *Machine) Link(name, target string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.root.put(name, &node{link: target})
}

// Remove removes a file, link or folder.
func (m *Machine) Remove(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.root.drop(name)
}

// Write stores data as a write(2) does.
func (m *Machine) Write(ctx context.Context, name, data string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	m.mu.Lock()
	o := &op{name: name, data: data, done: make(chan struct{})}
	m.begin(o)
	hasty := m.hasty
	m.mu.Unlock()
	stuck := func(why error) error {
		return fmt.Errorf("write %.40q to %s: %w (%w)", data, name, sysfs.ErrStuck, why)
	}
	if hasty {
		select {
		case <-o.done:
		default:
			return stuck(context.DeadlineExceeded)
		}
	}
	select {
	case <-o.done:
		if o.err != nil {
			return &fs.PathError{Op: "write", Path: name, Err: o.err}
		}
		return nil
	case <-ctx.Done():
		return stuck(context.Cause(ctx))
	}
}

// op is a write to the kernel.
type op struct {
	name, data string
	device     *device
	hang       <-chan struct{} // it hangs until this is closed
	crash      bool            // crash afterwards
	done       chan struct{}
	err        error
}

func (m *Machine) begin(o *op) {
	f, err := m.count1(fmt.Sprintf("%s = %q", o.name, o.data))
	if err != nil {
		o.finish(err)
		return
	}
	n, err := m.lookup("write", o.name, false)
	if err != nil {
		o.finish(unwrapPath(err))
		return
	}
	if f.err != nil {
		o.finish(f.err)
		return
	}
	o.hang, o.crash = f.hang, f.crashAfter
	o.device = n.device
	if a, err := pci.ParseAddress(trim(o.data)); err == nil && m.devices[a] != nil {
		o.device = m.devices[a]
	}
	m.pending = append(m.pending, o)
	m.settle()
}

// settle continues the operations that can continue.
func (m *Machine) settle() {
	for again := true; again; {
		again = false
		held := map[*device]bool{}
		for i, o := range m.pending {
			if o.blocked() || (o.device != nil && held[o.device]) || !m.perform(o) {
				held[o.device] = true
				continue
			}
			m.pending = slices.Delete(m.pending, i, i+1)
			again = true
			break
		}
	}
}

func (o *op) blocked() bool {
	if o.hang == nil {
		return false
	}
	select {
	case <-o.hang:
		return false
	default:
		return true
	}
}

func (o *op) finish(err error) {
	o.err = err
	close(o.done)
}

// perform executes an operation. It returns false if the kernel must wait.
func (m *Machine) perform(o *op) bool {
	n, err := m.root.find(o.name, false)
	switch {
	case err != nil:
	case n.isDir():
		err = syscall.EISDIR
	case n.store == nil:
		err = syscall.EACCES
	default:
		err = n.store(o.data)
	}
	if err == errWait { //nolint:errorlint // it is never wrapped
		return false
	}
	if o.crash {
		m.crashed = true
		err = ErrCrashed
	}
	o.finish(err)
	return true
}
