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

// ErrCrashed is what a process gets that does not live any more. It has to
// give up; all that counts is what it leaves behind.
var ErrCrashed = errors.New("the process under test has crashed")

// errWait says that a driver waits for something.
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

// count1 counts a write or step and returns what shall become of it.
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

// Step counts among the writes a step of the process under test that is none,
// as writing a journal: a crash or a failure can be set for it. A step is
// crashed before or failed; a crash after it is one before the next.
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

// FailWrite makes the nth write from now fail, 1 being the next; it has no
// effect.
func (m *Machine) FailWrite(n int, err error) { m.fault(n, fault{err: err}) }

// CrashBefore ends the process under test before its nth write from now:
// whatever it tries then is ErrCrashed, until Restart.
func (m *Machine) CrashBefore(n int) { m.fault(n, fault{crashBefore: true}) }

// CrashAfter ends it when the kernel has done the nth write.
func (m *Machine) CrashAfter(n int) { m.fault(n, fault{crashAfter: true}) }

// HangWrite makes the nth write from now hang in the kernel, with its device
// locked, until release is called. It has its effect then.
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

// Hasty makes writes that hang return sysfs.ErrStuck at once, as if their time
// was up.
func (m *Machine) Hasty() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hasty = true
}

// Faults counts the faults that are set and have not happened, and the writes
// that hang.
func (m *Machine) Faults() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.faults) + len(m.pending)
}

// Restart starts the process under test again. Faults that did not happen are
// forgotten.
func (m *Machine) Restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.crashed = false
	clear(m.faults)
}

// Crashed says that the process under test does not live.
func (m *Machine) Crashed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.crashed
}

// Writes are the writes and steps so far, the oldest first.
func (m *Machine) Writes() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.writes)
}

// Violations are the things that must not be and were: a guest's device torn
// away, a driver on a function that a guest has.
func (m *Machine) Violations() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.violations)
}

func (m *Machine) violate(format string, args ...any) {
	m.violations = append(m.violations, fmt.Sprintf(format, args...))
}

// RefuseProbe makes a driver refuse a function with err; nil: no longer.
func (m *Machine) RefuseProbe(driver string, a pci.Address, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		delete(m.refusals, refusal{driver, a})
		return
	}
	m.refusals[refusal{driver, a}] = err
}

// FallOff takes a function off the bus: its configuration space reads all
// ones. One of the resets of heals, of its names in reset_method, or "d3cold",
// brings it back; none of them: it is gone for good.
func (m *Machine) FallOff(a pci.Address, heals ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.must(a)
	d.dead, d.heals = true, heals
}

// unwrapPath is the kernel's part of an error.
func unwrapPath(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// kernel is what errors of functions given by tests become.
func kernel(err error) error {
	var e syscall.Errno
	if err != nil && !errors.As(err, &e) {
		return fmt.Errorf("%w (%w)", syscall.EIO, err)
	}
	return err
}
