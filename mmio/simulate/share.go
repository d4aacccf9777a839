package simulate

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/mediate"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

// load is a VM that launches a kernel, waits for it, thinks and launches the next.
type load struct {
	vm     mmio.VM
	d      *guestdriver.Driver
	length time.Duration // of its commands, within 20 %
	at     time.Duration // when it launches next; -1: it waits for the GPU
	before time.Duration // what it had had at the start of the window
}

// shareWindow is the windows that shares are looked at in.
const shareWindow = 500 * time.Millisecond

// Share runs n VMs for a time, every second one with commands of 1 ms and the others with long ones,
// lengths within 20 % and an exponential think time of 0.2 ms, through their drivers and the mediator. It
// returns the mean of Jain's index over windows of 500 ms and the part of the time that the GPU was busy.
func Share(policy timeshare.Config, n int, long, length time.Duration) (jain, busy float64, err error) {
	m, err := New(32*MiB, 8*MiB, policy, nil)
	if err != nil {
		return 0, 0, err
	}
	rnd := rand.New(rand.NewPCG(1, uint64(n))) //nolint:gosec // think times, no secret
	think := func() time.Duration { return time.Duration(200 * float64(time.Microsecond) * rnd.ExpFloat64()) }
	var all []*load
	for i := range n {
		l := &load{vm: mmio.VM(i + 1), length: []time.Duration{time.Millisecond, long}[i%2]}
		v, err := m.Add(mediate.Request{VM: l.vm, Name: fmt.Sprint("vm", l.vm), Memory: 2 * MiB, Channels: 1, Mode: mediate.Lazy, Tables: 64})
		if err != nil {
			return 0, 0, err
		}
		if l.d, err = m.Open(v, l.vm, 0); err != nil {
			return 0, 0, err
		}
		all = append(all, l)
	}
	m.Settle()
	begin, busyBefore := m.Clock, m.GPU.Totals().Busy
	for _, l := range all {
		l.at, l.before = begin+think(), m.used(l.vm)
	}
	window, windows := begin+shareWindow, 0
	for m.Clock < begin+length {
		next := window
		for _, l := range all {
			if l.at >= 0 {
				next = min(next, l.at)
			}
		}
		m.TickTo(next)
		for _, l := range all {
			switch {
			case l.at < 0 && l.d.Done():
				l.at = m.Clock + think()
			case l.at >= 0 && m.Clock >= l.at:
				l.at = -1
				us := uint32(l.length.Seconds() * 1e6 * (0.8 + 0.4*rnd.Float64()))
				if err := l.d.LaunchNext(nvc0.KernelLoop, guestdriver.Buffer{}, guestdriver.Buffer{}, guestdriver.Buffer{}, us, 1); err != nil {
					return 0, 0, err
				}
			}
		}
		if m.Clock >= window {
			jain += m.jain(all)
			windows++
			window += shareWindow
		}
	}
	return jain / float64(windows), float64(m.GPU.Totals().Busy-busyBefore) / float64(m.Clock-begin), nil
}

// used is how long a VM has had the GPU.
func (m *Machine) used(vm mmio.VM) time.Duration {
	u, err := m.GPU.Usage(vm)
	if err != nil {
		return 0
	}
	return u.Busy
}

// jain is the index of what each had since it was called last.
func (m *Machine) jain(all []*load) float64 {
	var sum, squares float64
	for _, l := range all {
		now := m.used(l.vm)
		x := (now - l.before).Seconds()
		l.before, sum, squares = now, sum+x, squares+x*x
	}
	if squares == 0 {
		return 1
	}
	return sum * sum / squares / float64(len(all))
}
