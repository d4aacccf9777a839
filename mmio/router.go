package mmio

import (
	"errors"
	"fmt"
	"math/bits"
	"sync"
)

// Errors of [Router.Attach].
var (
	ErrAttached = errors.New("the VM has a device already")
	ErrFunction = errors.New("no such PCI function can be")
)

// Router gives each access to the device of its VM, after refusing what is
// malformed: an unknown VM, a BAR that isn't, a size that is not 1, 2, 4 or 8, an
// offset that is not a multiple of the size, and what is not wholly in the BAR. A device
// behind it sees none of these. Its zero value is ready.
type Router struct {
	mu    sync.RWMutex
	ports map[VM]*port
	lost  Stats // of VMs that have no device
}

type port struct {
	device   Device
	function Function
	stats    *Stats
	reset    sync.RWMutex // for writing: a reset is under way
	detached bool         // guarded by reset
}

// Attach routes the accesses of a VM to a device, as that function. Stats may
// be shared with the device; nil means that the router makes its own. Errors
// wrap [ErrAttached] or [ErrFunction].
func (r *Router) Attach(vm VM, d Device, f Function, stats *Stats) error {
	for i, w := range f.BARs {
		if w.Size != 0 && (bits.OnesCount64(w.Size) != 1 || w.Size < 16) {
			return fmt.Errorf("BAR%d of %d bytes: %w: take a power of two from 16 on", i, w.Size, ErrFunction)
		}
	}
	if d == nil {
		return fmt.Errorf("VM %d: no device: %w", vm, ErrFunction)
	}
	if stats == nil {
		stats = &Stats{}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ports[vm] != nil {
		return fmt.Errorf("VM %d: %w: detach that first", vm, ErrAttached)
	}
	if r.ports == nil {
		r.ports = map[VM]*port{}
	}
	r.ports[vm] = &port{device: d, function: f, stats: stats}
	return nil
}

// Detach ends that, and returns when no access of the VM is under way.
func (r *Router) Detach(vm VM) {
	r.mu.Lock()
	p := r.ports[vm]
	delete(r.ports, vm)
	r.mu.Unlock()
	if p != nil {
		p.reset.Lock() // waits for those under way
		p.detached = true
		p.reset.Unlock()
	}
}

// Stats returns the counters of a VM, and reports whether it has a device.
func (r *Router) Stats(vm VM) (*Stats, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if p := r.ports[vm]; p != nil {
		return p.stats, true
	}
	return &r.lost, false
}

// check finds the port of an access, or the reason to refuse it.
func (r *Router) check(a Access) (*port, *Stats, Reason) {
	r.mu.RLock()
	p := r.ports[a.VM]
	r.mu.RUnlock()
	if p == nil {
		return nil, &r.lost, NoDevice
	}
	if a.BAR >= MaxBARs || p.function.BARs[a.BAR].Size == 0 {
		return nil, p.stats, NoBAR
	}
	if a.Size != 1 && a.Size != 2 && a.Size != 4 && a.Size != 8 {
		return nil, p.stats, BadSize
	}
	if a.Offset%uint64(a.Size) != 0 {
		return nil, p.stats, Unaligned
	}
	if a.Offset >= p.function.BARs[a.BAR].Size { // aligned: its end is in the BAR, too
		return nil, p.stats, OutOfBAR
	}
	if !p.reset.TryRLock() {
		return nil, p.stats, Resetting
	}
	if p.detached { // after it was found
		p.reset.RUnlock()
		return nil, p.stats, NoDevice
	}
	return p, p.stats, 0
}

// Read implements [Device].
func (r *Router) Read(a Access) uint64 {
	a.Write, a.Data = false, 0
	p, stats, reason := r.check(a)
	stats.Exit(a)
	if reason != 0 {
		stats.Refuse(reason)
		return Ones(a.Size)
	}
	defer p.reset.RUnlock()
	return p.device.Read(a) & Ones(a.Size)
}

// Write implements [Device].
func (r *Router) Write(a Access) {
	a.Write = true
	p, stats, reason := r.check(a)
	stats.Exit(a)
	if reason != 0 {
		stats.Refuse(reason)
		return
	}
	defer p.reset.RUnlock()
	a.Data &= Ones(a.Size)
	p.device.Write(a)
}

// Reset resets the device of a VM, if it is a [Resetter]. Accesses that come
// meanwhile are refused.
func (r *Router) Reset(vm VM) {
	r.mu.RLock()
	p := r.ports[vm]
	r.mu.RUnlock()
	if p == nil {
		return
	}
	p.reset.Lock()
	defer p.reset.Unlock()
	if d, ok := p.device.(Resetter); ok && !p.detached {
		d.Reset(vm)
	}
}
