package sysfstest

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"syscall"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// ErrCrashed is returned to a process that has crashed. It must return. Only what it
// leaves on disk and in the machine counts.
var ErrCrashed = errors.New("the process under test has crashed")

// errWait means that a driver waits for something.
var errWait = errors.New("waits")

type fault struct {
	err                     error
	hang                    <-chan struct{}
	crashBefore, crashAfter bool
}

type refusal struct {
	driver  string
	address pci.Address
}

// count1 counts a write or step, and returns its fault.
func (m *Machine) count1(what string) (fault, error) {
	if m.crashed {
		return fault{}, ErrCrashed
	}
	m.count++
	f := m.faults[m.count]
	delete(m.faults, m.count)
	if f.crashBefore {
		m.crashed = true
		return f, ErrCrashed
	}
	m.writes = append(m.writes, what)
	return f, nil
}

// Step counts a step of the process under test that is not a write to the machine, such
// as writing a journal, so that it can crash or fail there. A crash happens before the
// step; a crash after it is a crash before the next one.
func (m *Machine) Step(what string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	f, err := m.count1(what)
	if err == nil {
		m.crashed = f.crashAfter
		err = f.err
	}
	return err
}

func (m *Machine) fault(n int, f fault) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n < 1 {
		panic("sysfstest: writes are counted from 1")
	}
	m.faults[m.count+n] = f
}

// FailWrite makes the nth write from now fail without an effect; 1 is the next one.
func (m *Machine) FailWrite(n int, err error) { m.fault(n, fault{err: err}) }

// CrashBefore crashes the process under test before its nth write from now. Everything it
// does after that fails with ErrCrashed, until Restart.
func (m *Machine) CrashBefore(n int) { m.fault(n, fault{crashBefore: true}) }

// CrashAfter crashes it after the kernel has done the nth write.
func (m *Machine) CrashAfter(n int) { m.fault(n, fault{crashAfter: true}) }

// HangWrite makes the nth write from now hang in the kernel, with its device locked,
// until release is called. Then it takes effect.
func (m *Machine) HangWrite(n int) (release func()) {
	c := make(chan struct{})
	m.fault(n, fault{hang: c})
	return sync.OnceFunc(func() {
		close(c)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.settle()
	})
}

// Hasty makes writes that hang return sysfs.ErrStuck at once, as if their time were over.
func (m *Machine) Hasty() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hasty = true
}

// Faults returns the number of faults that have not happened yet, and of writes that
// hang.
func (m *Machine) Faults() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.faults) + len(m.pending)
}

// Restart restarts the process under test. Faults that have not happened are removed.
func (m *Machine) Restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.crashed = false
	clear(m.faults)
}

// Crashed reports whether the process under test has crashed.
func (m *Machine) Crashed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.crashed
}

// Writes returns the writes and steps so far, the oldest first.
func (m *Machine) Writes() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.writes)
}

// Violations returns what must never happen and did: a guest's device was taken, or a
// driver was bound to a function that a guest has.
func (m *Machine) Violations() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.violations)
}

func (m *Machine) violate(format string, args ...any) {
	m.violations = append(m.violations, fmt.Sprintf(format, args...))
}

// RefuseProbe makes a driver refuse a function with err; nil ends that.
func (m *Machine) RefuseProbe(driver string, a pci.Address, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		delete(m.refusals, refusal{driver, a})
		return
	}
	m.refusals[refusal{driver, a}] = err
}

// FallOff makes a function fall off the bus: its configuration space reads as all ones. A
// reset in heals, with its name in reset_method, or "d3cold", brings it back. If heals is
// empty, nothing does.
func (m *Machine) FallOff(a pci.Address, heals ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.must(a)
	d.dead, d.heals = true, heals
}

// unwrapPath returns the kernel's part of an error.
func unwrapPath(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// kernel converts errors of functions that tests provide.
func kernel(err error) error {
	var e syscall.Errno
	if err != nil && !errors.As(err, &e) {
		return fmt.Errorf("%w (%w)", syscall.EIO, err)
	}
	return err
}
