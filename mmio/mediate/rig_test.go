package mediate

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/guestdriver"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

const mib = 1 << 20

// fataler is what rigs need of testing.T and rapid.T.
type fataler interface {
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
	Helper()
}

// guest is a VM's own memory.
type guest struct {
	mu    sync.Mutex
	bytes []byte
	size  uint64 // what it says it has, 0: all of bytes
	reads int
	after func(*guest) // a read: what a hostile VM does then
	ups   int          // how often its interrupt came up
}

var errNoMemory = errors.New("no such memory")

func (g *guest) ReadMemory(gpa uint64, p []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if gpa > uint64(len(g.bytes)) || uint64(len(p)) > uint64(len(g.bytes))-gpa {
		return errNoMemory
	}
	copy(p, g.bytes[gpa:])
	g.reads++
	if g.after != nil {
		g.after(g)
	}
	return nil
}

func (g *guest) WriteMemory(gpa uint64, p []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if gpa > uint64(len(g.bytes)) || uint64(len(p)) > uint64(len(g.bytes))-gpa {
		return errNoMemory
	}
	copy(g.bytes[gpa:], p)
	return nil
}

func (g *guest) MemorySize() uint64 {
	if g.size > 0 {
		return g.size
	}
	return uint64(len(g.bytes))
}

func (g *guest) Interrupt(up bool) {
	if up {
		g.ups++
	}
}

// rig is a mediated GPU on a clock of its own. Whatever reaches memory that it must
// not fails the test.
type rig struct {
	t      fataler
	hw     *nvc0.GPU
	gpu    *GPU
	router *mmio.Router
	clock  time.Duration
	events []Event
	guests map[mmio.VM]*guest
}

type rigOption func(*Config)

func newRig(t fataler, options ...rigOption) *rig {
	t.Helper()
	return newRigOf(t, 32*mib, 8*mib, options...)
}

// newRigOf has a GPU with so much memory, of which the mediator has its reserve.
func newRigOf(t fataler, memory, reserve uint64, options ...rigOption) *rig {
	t.Helper()
	r := &rig{t: t, router: &mmio.Router{}, guests: map[mmio.VM]*guest{}}
	var err error
	r.hw, err = nvc0.New(nvc0.Config{
		VRAM: memory, Mediated: true,
		Violated: func(v nvc0.Violation) { r.t.Errorf("violation: %v", v) },
		Bus: func(on nvc0.Owner, addr uint64, p []byte, write bool) bool {
			ok := r.gpu.DMA(on, addr, p, write)
			for vm, v := range r.gpu.vgpus { // P1 for system memory: an address is in its VM's part, or nothing is there
				if ok && v.owner == on && addr>>windowBits != v.window64>>windowBits {
					r.t.Errorf("violation: VM %d reached bus address %#x", vm, addr)
				}
			}
			return ok
		},
	})
	if err != nil {
		t.Fatalf("%v", err)
	}
	policy := timeshare.DefaultConfig(timeshare.Fair)
	policy.Overdue = 20 * ms
	c := Config{
		Hardware: r.hw, Clock: func() time.Duration { return r.clock }, Policy: policy, Reserve: reserve,
		Events: func(e Event) { r.events = append(r.events, e) },
	}
	for _, o := range options {
		o(&c)
	}
	if r.gpu, err = New(c); err != nil {
		t.Fatalf("%v", err)
	}
	return r
}

// add creates a VGPU of 4 MiB with 4 channels.
func (r *rig) add(vm mmio.VM, mode Mode, change ...func(*Request)) *VGPU {
	r.t.Helper()
	g := &guest{bytes: make([]byte, mib)}
	q := Request{VM: vm, Name: fmt.Sprint("vm", vm), Memory: 4 * mib, Channels: 4, Mode: mode, Tables: 256, Guest: g}
	for _, c := range change {
		c(&q)
	}
	v, err := r.gpu.Create(q)
	if err != nil {
		r.t.Fatalf("%v", err)
	}
	r.guests[vm] = g
	r.router.Detach(vm)
	if err := r.router.Attach(vm, r.gpu, r.gpu.Function(), v.Stats()); err != nil {
		r.t.Fatalf("%v", err)
	}
	return v
}

// tick lets time go on to what happens next, or a little.
func (r *rig) tick() {
	at, ok := r.gpu.Next()
	if !ok {
		at = r.clock
	}
	r.clock = max(at, r.clock+time.Microsecond)
	r.gpu.Poll()
}

// settle lets time go on until nothing is left to do.
func (r *rig) settle() {
	r.t.Helper()
	for range 1 << 20 {
		if _, ok := r.gpu.Next(); !ok {
			return
		}
		r.tick()
	}
	r.t.Fatalf("the GPU never comes to rest")
}

func (r *rig) open(vm mmio.VM, change ...func(*guestdriver.Options)) *guestdriver.Driver {
	r.t.Helper()
	o := guestdriver.Options{VM: vm, Device: r.router, Idle: r.tick}
	if v, _ := r.gpu.VGPU(vm); v.Mode() == Para {
		o.Calls, o.Slots = r.guests[vm], 0x10000
	}
	for _, c := range change {
		c(&o)
	}
	d, err := guestdriver.Open(o)
	if err != nil {
		r.t.Fatalf("VM %d: %v", vm, err)
	}
	return d
}

// get and set are a VM's accesses of BAR0.
func (r *rig) get(vm mmio.VM, at uint32) uint32 {
	return uint32(r.router.Read(mmio.Access{VM: vm, Size: 4, Offset: uint64(at)}))
}

func (r *rig) set(vm mmio.VM, at, w uint32) {
	r.router.Write(mmio.Access{VM: vm, Size: 4, Offset: uint64(at), Data: uint64(w)})
}

func (r *rig) store(vm mmio.VM, bar uint8, at uint64, size uint8, w uint64) {
	r.router.Write(mmio.Access{VM: vm, BAR: bar, Size: size, Offset: at, Data: w})
}

func (r *rig) load(vm mmio.VM, bar uint8, at uint64, size uint8) uint64 {
	return r.router.Read(mmio.Access{VM: vm, BAR: bar, Size: size, Offset: at})
}

// poke writes a VM's GPU memory through PRAMIN.
func (r *rig) poke(vm mmio.VM, at, w uint64) {
	r.set(vm, 0x1700, uint32(at>>16))
	r.store(vm, 0, 0x700000+at&0xffff, 8, w)
}

func (r *rig) peek(vm mmio.VM, at uint64) uint64 {
	r.set(vm, 0x1700, uint32(at>>16))
	return r.load(vm, 0, 0x700000+at&0xffff, 8)
}

func (r *rig) refused(vm mmio.VM, reason mmio.Reason) uint64 {
	s, _ := r.router.Stats(vm)
	return s.Total().Refused[reason]
}

// work runs each kernel and a copy, and checks the results.
func work(t fataler, d *guestdriver.Driver, seed uint32) {
	t.Helper()
	const n = 128
	var bufs [4]guestdriver.Buffer
	for i := range bufs {
		var err error
		if bufs[i], err = d.Alloc(4 * n * n / 8); err != nil {
			t.Fatalf("%v", err)
		}
	}
	a, b := make([]uint32, n), make([]uint32, n)
	for i := range a {
		a[i], b[i] = seed*uint32(i+1)*2654435761, seed^uint32(i*i)
	}
	d.Phase(mmio.Copy)
	d.Write(bufs[0], a)
	d.Write(bufs[1], b)
	d.Phase(mmio.Launch)
	for _, k := range []struct {
		number, x uint32
		n, out    int
	}{
		{nvc0.KernelFill, seed, n, n},
		{nvc0.KernelAdd, 0, n, n},
		{nvc0.KernelMadd, seed, n, n},
		{nvc0.KernelMmul, 8, 64, 64},
		{nvc0.KernelSum, 0, n, 1},
		{nvc0.KernelMix, 5, n, n},
		{nvc0.KernelLoop, 50, 1, 0},
		{nvc0.KernelNop, 0, 1, 0},
	} {
		if err := d.Launch(k.number, bufs[2], bufs[0], bufs[1], k.x, k.n); err != nil {
			t.Fatalf("kernel %d: %v", k.number, err)
		}
		if err := d.Copy(bufs[3], bufs[2], 4*n); err != nil {
			t.Fatalf("%v", err)
		}
		if err := d.Wait(); err != nil {
			t.Fatalf("kernel %d: %v", k.number, err)
		}
		want := nvc0.Compute(k.number, a[:k.n], b[:k.n], k.x, k.n)[:k.out]
		if have := d.Read(bufs[3], k.out); fmt.Sprint(have) != fmt.Sprint(want) {
			t.Fatalf("kernel %d: %v, want %v", k.number, have, want)
		}
	}
}

const (
	ms  = time.Millisecond
	sec = time.Second
)
