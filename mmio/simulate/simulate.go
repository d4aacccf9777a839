// Package simulate is a mediated GPU in software with its VMs, all in one process and on
// a clock that goes only when it is told to. The demonstration and the benchmarks use it;
// what they measure in time is the model's, and the same in each run.
//
// Not here: a mediated GPU for VMs, whose clock is the host's.
package simulate

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// MiB is 1048576 bytes.
const MiB = 1 << 20

// Machine is the GPU and its VMs. It is not safe for use by several goroutines.
type Machine struct {
	Hardware *nvc0.GPU
	GPU      *mediate.GPU
	Router   mmio.Router
	Clock    time.Duration

	Violations []nvc0.Violation // accesses that reached what they must not
	guests     map[mmio.VM]*Memory
}

// Memory is a VM's own.
type Memory struct {
	mu    sync.Mutex
	bytes []byte
}

var errOutside = errors.New("no such memory")

func (m *Memory) part(gpa uint64, n int) ([]byte, error) {
	if gpa > uint64(len(m.bytes)) || uint64(n) > uint64(len(m.bytes))-gpa {
		return nil, fmt.Errorf("%d bytes at %#x: %w", n, gpa, errOutside)
	}
	return m.bytes[gpa : gpa+uint64(n)], nil
}

// ReadMemory implements [mmio.Guest].
func (m *Memory) ReadMemory(gpa uint64, p []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.part(gpa, len(p))
	copy(p, b)
	return err
}

// WriteMemory implements [mmio.Guest].
func (m *Memory) WriteMemory(gpa uint64, p []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, err := m.part(gpa, len(p))
	copy(b, p)
	return err
}

// MemorySize implements [mmio.Guest].
func (m *Memory) MemorySize() uint64 { return uint64(len(m.bytes)) }

// Interrupt implements [mmio.Guest]. Drivers here poll.
func (m *Memory) Interrupt(bool) {}

// New returns a machine without VMs whose GPU has so much memory, of which the mediator keeps a part.
func New(vram, reserve uint64, policy timeshare.Config, events func(mediate.Event)) (*Machine, error) {
	m := &Machine{guests: map[mmio.VM]*Memory{}}
	var err error
	m.Hardware, err = nvc0.New(nvc0.Config{
		VRAM: vram, Mediated: true,
		Violated: func(v nvc0.Violation) { m.Violations = append(m.Violations, v) },
		Bus:      func(on nvc0.Owner, addr uint64, p []byte, write bool) bool { return m.GPU.DMA(on, addr, p, write) },
	})
	if err != nil {
		return nil, err
	}
	m.GPU, err = mediate.New(mediate.Config{
		Hardware: m.Hardware, Clock: func() time.Duration { return m.Clock }, Policy: policy, Reserve: reserve, Events: events,
	})
	return m, err
}

// Add gives a VM with 1 MiB of its own memory a VGPU.
func (m *Machine) Add(q mediate.Request) (*mediate.VGPU, error) {
	g := &Memory{bytes: make([]byte, MiB)}
	q.Guest = g
	v, err := m.GPU.Create(q)
	if err != nil {
		return nil, err
	}
	m.guests[q.VM] = g
	return v, m.Router.Attach(q.VM, m.GPU, m.GPU.Function(), v.Stats())
}

// Open opens a VM's driver; batch is as in [guestdriver.Options].
func (m *Machine) Open(v *mediate.VGPU, vm mmio.VM, batch int) (*guestdriver.Driver, error) {
	o := guestdriver.Options{VM: vm, Device: &m.Router, Idle: m.Tick}
	if v.Mode() == mediate.Para {
		o.Calls, o.Slots, o.Batch = m.guests[vm], 0x10000, batch
	}
	return guestdriver.Open(o)
}

// Tick lets time go on to what happens next, or by a microsecond.
func (m *Machine) Tick() { m.TickTo(m.Clock + time.Hour) }

// TickTo does not go beyond a time.
func (m *Machine) TickTo(most time.Duration) {
	at, ok := m.GPU.Next()
	if !ok {
		at = 0
		if most < m.Clock+time.Hour {
			at = most
		}
	}
	m.Clock = max(min(at, most), m.Clock+time.Microsecond)
	m.GPU.Poll()
}

// Settle lets time go on until the GPU has nothing to do.
func (m *Machine) Settle() {
	for {
		if _, ok := m.GPU.Next(); !ok {
			return
		}
		m.Tick()
	}
}
