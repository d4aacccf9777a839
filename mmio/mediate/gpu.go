package mediate

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/regs"
)

// GPU shares one GPU among VMs. It is a monitor: its methods may be called by
// several goroutines, and one is at work at a time. It is an [mmio.Device] and an
// [mmio.Resetter] for all of its VMs.
type GPU struct {
	config Config
	table  *regs.Table
	zeros  []byte
	wake   chan struct{} // tells Run that something is to be done

	sending sync.Mutex // of interrupts

	mu       sync.Mutex
	hw       Hardware
	sched    *timeshare.Scheduler
	vgpus    map[mmio.VM]*VGPU
	changing map[mmio.VM]bool // VMs whose VGPU is being made, reset or destroyed
	byOwner  map[nvc0.Owner]*VGPU
	byID     map[timeshare.OwnerID]*VGPU
	shadow   pool // frames of the reserve
	memory   pool // megabytes of the rest
	channels pool
	windows  pool      // of the GPU's bus addresses
	listed   [2]HostPA // the hardware's playlist, in two halves in turns
	half     int
	owners   nvc0.Owner // the last one given

	running  *command      // on the hardware
	started  time.Duration // in the hardware's time, as all that the scheduler is told
	signals  []signal
	inside   [64]signal
	lastTime time.Duration
}

// signal is an interrupt to be sent when the GPU is unlocked.
type signal struct {
	guest mmio.Guest
	up    bool
}

// New returns a GPU without VMs. Errors wrap [ErrConfig].
func New(c Config) (*GPU, error) {
	if c.Hardware == nil || c.Clock == nil {
		return nil, fmt.Errorf("no hardware or no clock: %w", ErrConfig)
	}
	size := c.Hardware.Size()
	if c.Reserve%megabyte != 0 || c.Reserve < megabyte || c.Reserve >= size {
		return nil, fmt.Errorf("%d bytes of %d for the mediator: %w: take a multiple of 1 MiB, and less than all", c.Reserve, size, ErrConfig)
	}
	if c.Work <= 0 {
		c.Work = DefaultWork
	}
	c.Policy.MaxPending = timeshare.DefaultConfig(timeshare.Fair).MaxPending + nvc0.Channels
	sched, err := timeshare.New(c.Policy)
	if err != nil {
		return nil, fmt.Errorf("policy of sharing: %w: %w", ErrConfig, err)
	}
	table, err := regs.New()
	if err != nil {
		return nil, err
	}
	g := &GPU{
		config: c, table: table, zeros: make([]byte, megabyte), hw: c.Hardware, sched: sched, wake: make(chan struct{}, 1),
		vgpus: map[mmio.VM]*VGPU{}, changing: map[mmio.VM]bool{}, byOwner: map[nvc0.Owner]*VGPU{}, byID: map[timeshare.OwnerID]*VGPU{}, owners: nvc0.Mediator,
	}
	g.signals = g.inside[:0]
	if err := g.hw.Tag(0, c.Reserve, nvc0.Nobody, nvc0.Mediator, nvc0.Table); err != nil {
		return nil, fmt.Errorf("the mediator's memory: %w", err)
	}
	g.zero(nvc0.Mediator, 0, c.Reserve)
	g.shadow.give(1, int(c.Reserve/nvc0.PageSize)-1) // 0 means that there is no table
	g.memory.give(int(c.Reserve/megabyte), int((size-c.Reserve)/megabyte))
	g.channels.give(0, nvc0.Channels)
	g.windows.give(0, maxWindows)
	for i := range g.listed {
		at, ok := g.shadow.take(1)
		if !ok {
			return nil, fmt.Errorf("no memory for the playlist: %w", ErrConfig)
		}
		g.listed[i] = HostPA(at) * nvc0.PageSize
	}
	return g, nil
}

// Function is the PCI function that a VM with a VGPU sees.
func (g *GPU) Function() mmio.Function {
	return mmio.Function{
		Vendor: 0x10de, Device: 0x06d8, Subvendor: 0x10de, Subsystem: 0x06d8, Revision: 0xa3, Class: 0x030000, MSI: true,
		BARs: [mmio.MaxBARs]mmio.Window{
			0:           {Size: regs.Size},
			barData:     {Size: barDataSize, Prefetchable: true},
			barControl:  {Size: barControlSize, Prefetchable: true},
			barParallel: {Size: nvc0.PageSize},
		},
	}
}

// lock takes the monitor, and returns what gives it back and sends the interrupts
// that came up.
func (g *GPU) lock() func() {
	g.mu.Lock()
	return g.unlock
}

func (g *GPU) unlock() {
	if len(g.signals) == 0 {
		g.mu.Unlock()
		return
	}
	signals := append([]signal(nil), g.signals...)
	g.signals = g.inside[:0]
	g.sending.Lock() // before the GPU is anybody else's, so that the order stays
	g.mu.Unlock()
	defer g.sending.Unlock()
	for _, s := range signals {
		s.guest.Interrupt(s.up)
	}
}

// now is the time, which never goes back.
func (g *GPU) now() time.Duration {
	g.lastTime = max(g.lastTime, g.config.Clock())
	return g.lastTime
}

// Create gives a VM a VGPU, with zeroed memory. Errors wrap [ErrConfig], [ErrExists]
// or [ErrExhausted]; nothing is left of a VGPU that could not be made.
func (g *GPU) Create(r Request) (*VGPU, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	v, err := g.reserve(r)
	if err != nil {
		return nil, err
	}
	v.scrub() // of whoever had it before there was a mediator
	defer g.lock()()
	delete(g.changing, r.VM)
	if err := g.sched.Join(g.hw.Now(), v.id, r.Weight); err != nil {
		g.giveBack(v)
		return nil, fmt.Errorf("VM %d: share of the GPU's time: %w: %w", r.VM, ErrExhausted, err)
	}
	for i := range r.Channels {
		g.hw.SetOwner(v.first+i, v.owner)
	}
	v.clear()
	g.vgpus[r.VM], g.byOwner[v.owner], g.byID[v.id] = v, v, v
	v.tell(fmt.Sprintf("has %d MiB and %d channels", r.Memory/megabyte, r.Channels))
	return v, nil
}

// reserve takes what a VGPU has of the GPU. Until its memory is scrubbed the VM is changing.
func (g *GPU) reserve(r Request) (*VGPU, error) {
	defer g.lock()()
	if g.vgpus[r.VM] != nil || g.changing[r.VM] {
		return nil, fmt.Errorf("VM %d: %w: destroy that first", r.VM, ErrExists)
	}
	mb := int(r.Memory / megabyte)
	at, ok := g.memory.take(mb)
	if !ok {
		return nil, fmt.Errorf("VM %d: %d MiB in one piece: %w: %d MiB are free in all", r.VM, mb, ErrExhausted, g.memory.left())
	}
	first, ok := g.channels.take(r.Channels)
	if !ok {
		g.memory.give(at, mb)
		return nil, fmt.Errorf("VM %d: %d channels: %w: %d are free", r.VM, r.Channels, ErrExhausted, g.channels.left())
	}
	window, ok := g.windows.take(1)
	if !ok {
		g.memory.give(at, mb)
		g.channels.give(first, r.Channels)
		return nil, fmt.Errorf("VM %d: bus addresses: %w: %d VMs have all", r.VM, ErrExhausted, maxWindows)
	}
	g.owners++
	v := &VGPU{
		g: g, request: r, owner: g.owners, base: HostPA(at) * megabyte, size: r.Memory, first: first, stats: r.Stats,
		id: timeshare.OwnerID(fmt.Sprint("vgpu", g.owners)),
	}
	v.window64 = uint64(window) << windowBits
	if err := g.hw.Tag(v.base, v.size, nvc0.Nobody, v.owner, nvc0.Data); err != nil {
		g.memory.give(at, mb)
		g.channels.give(first, r.Channels)
		g.windows.give(window, 1)
		return nil, fmt.Errorf("VM %d: memory: %w", r.VM, err)
	}
	g.changing[r.VM] = true
	return v, nil
}

// giveBack gives back what reserve took. The memory is scrubbed.
func (g *GPU) giveBack(v *VGPU) {
	g.channels.give(v.first, v.request.Channels)
	g.windows.give(int(v.window64>>windowBits), 1)
	if err := g.hw.Tag(v.base, v.size, v.owner, nvc0.Nobody, nvc0.Data); err != nil {
		v.tell("its memory is withdrawn, as it is not its own: " + err.Error())
		return
	}
	g.memory.give(int(v.base/megabyte), int(v.size/megabyte))
}

// Destroy takes a VM's VGPU away. What it had is scrubbed before anybody else can
// get it. Errors wrap [ErrNoVGPU].
func (g *GPU) Destroy(vm mmio.VM) error {
	v, err := g.remove(vm)
	if err != nil {
		return err
	}
	v.scrub()
	defer g.lock()()
	delete(g.changing, vm)
	g.giveBack(v)
	v.tell("is gone")
	g.dispatch()
	return nil
}

// remove ends all that a VM's VGPU does, and makes it unreachable.
func (g *GPU) remove(vm mmio.VM) (*VGPU, error) {
	defer g.lock()()
	v := g.vgpus[vm]
	if v == nil {
		return nil, fmt.Errorf("VM %d: %w", vm, ErrNoVGPU)
	}
	v.wipe()
	delete(g.vgpus, vm)
	delete(g.byOwner, v.owner)
	delete(g.byID, v.id)
	g.changing[vm] = true
	v.gone = true
	if !v.paused {
		if _, err := g.sched.Leave(g.hw.Now(), v.id); err != nil {
			v.tell("its share of the GPU's time: " + err.Error())
		}
	}
	for i := range v.channels {
		g.hw.SetOwner(v.first+i, nvc0.Nobody)
	}
	g.dispatch()
	return v, nil
}

// Reset brings a VM's VGPU to the state that it was made in. Meanwhile the VM's accesses
// are as if it had none.
func (g *GPU) Reset(vm mmio.VM) {
	unlock := g.lock()
	v := g.vgpus[vm]
	if v == nil {
		unlock()
		return
	}
	v.wipe()
	v.clear()
	v.line(false)
	delete(g.vgpus, vm)
	g.changing[vm] = true
	g.dispatch()
	unlock()
	v.scrub()
	defer g.lock()()
	delete(g.changing, vm)
	g.vgpus[vm] = v
	v.tell("was reset")
}

// VGPU returns that of a VM. Errors wrap [ErrNoVGPU].
func (g *GPU) VGPU(vm mmio.VM) (*VGPU, error) {
	defer g.lock()()
	if v := g.vgpus[vm]; v != nil {
		return v, nil
	}
	return nil, fmt.Errorf("VM %d: %w", vm, ErrNoVGPU)
}

// DMA reads or writes system memory for the hardware, at an address of the GPU's bus on
// behalf of an owner, and reports whether there is any: each VM has a part of these addresses, behind
// which is its own memory. It is called from within [Hardware].
func (g *GPU) DMA(on nvc0.Owner, addr uint64, p []byte, write bool) bool {
	v := g.byOwner[on]
	if v == nil || addr&^(1<<windowBits-1) != v.window64 { //check:dma-window
		return false
	}
	gpa, all := addr&(1<<windowBits-1), v.request.Guest.MemorySize()
	if gpa >= all || uint64(len(p)) > all-gpa { //check:dma-range
		return false
	}
	if write {
		return v.request.Guest.WriteMemory(gpa, p) == nil
	}
	return v.request.Guest.ReadMemory(gpa, p) == nil
}

// Free is what is left: bytes of memory, channels, and frames for shadows.
func (g *GPU) Free() (memory uint64, channels, tables int) {
	defer g.lock()()
	return uint64(g.memory.left()) * megabyte, g.channels.left(), g.shadow.left()
}

// Totals is how the GPU's time was spent.
func (g *GPU) Totals() timeshare.Totals {
	defer g.lock()()
	return g.sched.Totals()
}

// Usage is what a VM has had of the GPU's time.
func (g *GPU) Usage(vm mmio.VM) (timeshare.Usage, error) {
	defer g.lock()()
	v := g.vgpus[vm]
	if v == nil {
		return timeshare.Usage{}, fmt.Errorf("VM %d: %w", vm, ErrNoVGPU)
	}
	return g.sched.Usage(v.id)
}

// Poll does what is due: commands that have ended, the next one, and tables to be
// read. It does at most one exit's work for each VM.
func (g *GPU) Poll() {
	defer g.lock()()
	g.pump(pumpMost)
	for _, v := range g.vgpus {
		v.left = g.config.Work
		v.work()
	}
	g.dispatch()
}

// Next is when to call Poll at the latest; ok is false if only an exit brings
// anything about.
func (g *GPU) Next() (at time.Duration, ok bool) {
	defer g.lock()()
	if at, ok = g.hw.NextEvent(); !ok {
		at = 0
	}
	for _, v := range g.vgpus {
		if v.unread() {
			return g.now(), true
		}
	}
	if d := g.sched.Next(g.hw.Now()); d.Until > 0 && (!ok || d.Until < at) {
		return d.Until, true
	}
	return at, ok
}

// Run calls Poll when it is due, until the context ends. It is for clocks that go
// by themselves.
func (g *GPU) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-g.wake:
		}
		g.Poll()
		if at, ok := g.Next(); ok {
			timer.Reset(max(at-g.config.Clock(), 0))
		}
	}
}

// rouse makes Run look again.
func (g *GPU) rouse() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}
