package xen_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/testkit"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/pciconf"
	"github.com/gpuctl/gpuctl/mmio/xen"
	"github.com/gpuctl/gpuctl/mmio/xen/xentest"
)

const (
	slot = 0xe
	bar0 = 0xf0000000
	bar1 = 0xe0000000
)

// registers is a device that keeps what is written to it, and a log.
type registers struct {
	mu   sync.Mutex
	now  map[uint64]uint64
	log  []mmio.Access
	hold chan struct{} // not nil: a read of register 0xff8 says so, and waits for its end
}

func (r *registers) Read(a mmio.Access) uint64 {
	if r.hold != nil && a.Offset == 0xff8 {
		r.hold <- struct{}{}
		<-r.hold
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = append(r.log, a)
	return r.now[uint64(a.BAR)<<32|a.Offset]
}

func (r *registers) Write(a mmio.Access) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log = append(r.log, a)
	if r.now == nil {
		r.now = map[uint64]uint64{}
	}
	r.now[uint64(a.BAR)<<32|a.Offset] = a.Data
}

func (r *registers) take() []mmio.Access {
	r.mu.Lock()
	defer r.mu.Unlock()
	log := r.log
	r.log = nil
	return log
}

func config() xen.Config {
	return xen.Config{
		Domain: 7, VM: 3, Slot: slot, Memory: 16 << 12,
		Function: mmio.Function{
			Vendor: 0x10de, Device: 0x06d8, Class: 0x030000, MSI: true,
			BARs: [6]mmio.Window{0: {Size: 1 << 20}, 1: {Size: 1 << 24, Prefetchable: true}},
		},
	}
}

func create(t *testing.T, p *xentest.Process, c xen.Config) *xen.Server {
	t.Helper()
	s, err := xen.Create(p, c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve serves a device until the returned function is called.
func serve(t *testing.T, s *xen.Server, d mmio.Device) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, d) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("Serve: %v", err)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func destroy(t *testing.T, s *xen.Server) {
	t.Helper()
	if err := s.Destroy(context.Background()); err != nil {
		t.Error(err)
	}
}

// up makes a domain with a function whose BARs are enabled.
func up(t *testing.T, d mmio.Device, vcpus int) (*xentest.Domain, *xen.Server, *xentest.Process) {
	t.Helper()
	h := xentest.New(t)
	dom := h.Domain(7, vcpus, 16)
	p := h.Process()
	s := create(t, p, config())
	t.Cleanup(func() { destroy(t, s) })
	serve(t, s, d)
	enable(dom)
	return dom, s, p
}

func enable(dom *xentest.Domain) {
	dom.SetConfig(0, slot, 0x10, 4, bar0)
	dom.SetConfig(0, slot, 0x14, 4, bar1)
	dom.SetConfig(0, slot, 4, 2, 6)
}

func TestVMFindsItsFunctionAndUsesItsBARs(t *testing.T) {
	d := &registers{}
	dom, s, _ := up(t, d, 1)
	if v := dom.Config(0, slot, 0, 4); v != 0x06d810de {
		t.Errorf("ids %#x", v)
	}
	if v := dom.Config(0, slot+1, 0, 4); v != 0xffffffff {
		t.Errorf("the next slot has %#x", v)
	}
	dom.Store(0, bar0+0x1704, 4, 0xc0001234)
	dom.Store(0, bar1+0xfffff8, 8, 0x1122334455667788)
	if v := dom.Load(0, bar0+0x1704, 4); v != 0xc0001234 {
		t.Errorf("BAR 0: %#x", v)
	}
	if v := dom.Load(0, bar1+0xfffff8, 8); v != 0x1122334455667788 {
		t.Errorf("BAR 1: %#x", v)
	}
	want := mmio.Access{VM: 3, BAR: 0, Size: 4, Write: true, Offset: 0x1704, Data: 0xc0001234}
	if log := d.take(); len(log) != 4 || log[0] != want {
		t.Errorf("accesses %v", log)
	}
	if c := s.Counts(); c.Refused != 0 || c.Requests < 8 {
		t.Errorf("counts %+v", c)
	}
}

func TestBARFollowsItsAddress(t *testing.T) {
	d := &registers{}
	dom, _, _ := up(t, d, 1)
	dom.Store(0, bar0, 4, 5)
	dom.SetConfig(0, slot, 0x10, 4, 0xd0000000)
	if v := dom.Load(0, 0xd0000000, 4); v != 5 {
		t.Errorf("at its new address: %#x", v)
	}
	if v := dom.Load(0, bar0, 4); v != 0xffffffff {
		t.Errorf("at its old address: %#x", v)
	}
	dom.SetConfig(0, slot, 4, 2, 0)
	if v := dom.Load(0, 0xd0000000, 4); v != 0xffffffff {
		t.Errorf("while it is not enabled: %#x", v)
	}
}

func TestVCPUsDoNotWaitForEachOther(t *testing.T) {
	d := &registers{hold: make(chan struct{})}
	dom, _, _ := up(t, d, 2)
	dom.Store(1, bar0+8, 4, 9)
	first := make(chan uint64)
	go func() { first <- dom.Load(0, bar0+0xff8, 4) }()
	<-d.hold
	if v := dom.Load(1, bar0+8, 4); v != 9 {
		t.Errorf("the second vCPU read %#x", v)
	}
	d.hold <- struct{}{}
	if v := <-first; v != 0 {
		t.Errorf("the first vCPU read %#x", v)
	}
}

func TestRepeatedAccesses(t *testing.T) {
	d := &registers{}
	dom, s, _ := up(t, d, 1)
	// rep stos: the same value at rising addresses
	dom.Do(0, xentest.Request{Addr: bar0 + 0x100, Data: 7, Count: 3, Size: 4, Type: 1})
	for i := range uint64(3) {
		if v := dom.Load(0, bar0+0x100+4*i, 4); v != 7 {
			t.Errorf("word %d: %#x", i, v)
		}
	}
	// rep movs from memory, downwards
	copy(dom.Memory()[0x1ffc:], []byte{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0})
	d.take()
	dom.Do(0, xentest.Request{Addr: bar0 + 0x208, Data: 0x2004, Count: 3, Size: 4, Pointer: true, Backwards: true, Type: 1})
	log := d.take()
	for i, a := range log {
		if want := (mmio.Access{VM: 3, Size: 4, Write: true, Offset: uint64(0x208 - 4*i), Data: uint64(3 - i)}); a != want {
			t.Errorf("access %d: %v, want %v", i, a, want)
		}
	}
	if len(log) != 3 {
		t.Errorf("%d accesses", len(log))
	}
	// rep movs to memory, upwards, across a page
	dom.Do(0, xentest.Request{Addr: bar0 + 0x200, Data: 0x2ffa, Count: 3, Size: 4, Read: true, Pointer: true, Type: 1})
	if got, want := dom.Memory()[0x2ff9:0x3007], []byte{0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0}; !bytes.Equal(got, want) {
		t.Errorf("memory % x, want % x", got, want)
	}
	if c := s.Counts(); c.Refused != 0 {
		t.Errorf("%d were refused", c.Refused)
	}
}

func TestRequestsThatCannotBeAreRefusedAndCounted(t *testing.T) {
	d := &registers{}
	dom, s, _ := up(t, d, 1)
	dom.Store(0, bar0, 4, 1)
	d.take()
	good := xentest.Request{Addr: bar0, Count: 1, Size: 4, Read: true, Type: 1}
	for name, change := range map[string]func(*xentest.Request){
		"size 0":                    func(r *xentest.Request) { r.Size = 0 },
		"size 3":                    func(r *xentest.Request) { r.Size = 3 },
		"size 16":                   func(r *xentest.Request) { r.Size = 16 },
		"size 2^31":                 func(r *xentest.Request) { r.Size = 1 << 31 },
		"count 0":                   func(r *xentest.Request) { r.Count = 0 },
		"count 2^32-1":              func(r *xentest.Request) { r.Count = 1<<32 - 1 },
		"between two BARs":          func(r *xentest.Request) { r.Addr = 0x1000 },
		"at the end of all":         func(r *xentest.Request) { r.Addr = ^uint64(0) },
		"half beyond the BAR":       func(r *xentest.Request) { r.Addr = bar0 + 1<<20 - 2 },
		"ports":                     func(r *xentest.Request) { r.Type = 0 },
		"an unknown type":           func(r *xentest.Request) { r.Type = 9 },
		"another slot":              func(r *xentest.Request) { r.Type, r.Addr = 2, 3<<35 },
		"no register":               func(r *xentest.Request) { r.Type, r.Addr = 2, slot<<35|0x100 },
		"a crooked register":        func(r *xentest.Request) { r.Type, r.Addr = 2, slot<<35|0x41 },
		"eight bytes of config":     func(r *xentest.Request) { r.Type, r.Addr, r.Size = 2, slot<<35, 8 },
		"config many times":         func(r *xentest.Request) { r.Type, r.Addr, r.Count = 2, slot<<35, 2 },
		"config with pointer":       func(r *xentest.Request) { r.Type, r.Addr, r.Pointer = 2, slot<<35, true },
		"pointer outside":           func(r *xentest.Request) { r.Pointer, r.Data = true, 16<<12 },
		"pointer at the end":        func(r *xentest.Request) { r.Pointer, r.Data = true, ^uint64(0)-1 },
		"pointer half outside":      func(r *xentest.Request) { r.Pointer, r.Data = true, 16<<12-2 },
		"pointer below the start":   func(r *xentest.Request) { r.Pointer, r.Backwards, r.Count, r.Data = true, true, 3, 4 },
		"write, pointer outside":    func(r *xentest.Request) { r.Read, r.Pointer, r.Data = false, true, 1<<47 },
		"write outside, downwards":  func(r *xentest.Request) { r.Read, r.Addr, r.Count, r.Backwards = false, 0, 2, true },
		"write beyond, many times":  func(r *xentest.Request) { r.Read, r.Addr, r.Count = false, bar0+1<<20-4, 4096 },
		"read beyond, with pointer": func(r *xentest.Request) { r.Addr, r.Count, r.Pointer, r.Data = bar0+1<<20-4, 2, true, 0 },
	} {
		r := good
		change(&r)
		before := s.Counts()
		got := dom.Ask(0, s.ID(), r)
		after := s.Counts()
		if after.Refused != before.Refused+1 || after.Requests != before.Requests+1 {
			t.Errorf("%s: counts %+v, before %+v", name, after, before)
		}
		if r.Read && !r.Pointer && uint32(got)|uint32(^mmio.Ones(uint8(min(r.Size, 4)))) != 0xffffffff {
			t.Errorf("%s: read %#x", name, got)
		}
		for _, a := range d.take() {
			if a.BAR != 0 || a.Offset+uint64(a.Size) > 1<<20 {
				t.Errorf("%s: the device got %v", name, a)
			}
		}
	}
	if v := dom.Load(0, bar0, 4); v != 1 {
		t.Errorf("afterwards the VM reads %#x", v)
	}
}

func TestEventWithoutRequestIsCounted(t *testing.T) {
	dom, s, _ := up(t, &registers{}, 1)
	before := s.Counts().Spurious
	dom.Event(0, s.ID())
	testkit.Until(t, "a count", func() error { return testkit.Want(s.Counts().Spurious == before+1, s.Counts()) })
}

func TestInterrupts(t *testing.T) {
	dom, s, _ := up(t, &registers{}, 1)
	s.Interrupt(true)
	s.Interrupt(false)
	dom.SetConfig(0, slot, 0x44, 4, 0xfee00000)
	dom.SetConfig(0, slot, 0x4c, 2, 0x41)
	dom.SetConfig(0, slot, 0x42, 2, 1)
	s.Interrupt(true)
	s.Interrupt(false)
	want := []xentest.Interrupt{{Slot: slot, Up: true}, {Slot: slot}, {Address: 0xfee00000, Data: 0x41}}
	got := dom.Interrupts()
	if len(got) != len(want) {
		t.Fatalf("interrupts %+v", got)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("interrupt %d: %+v, want %+v", i, got[i], want[i])
		}
	}
	dom.SetConfig(0, slot, 0x42, 2, 0)
	dom.SetConfig(0, slot, 4, 2, 6|1<<10)
	if s.Interrupt(true); len(dom.Interrupts()) != len(want) {
		t.Error("a VM that wants no interrupt has got one")
	}
	// The pin follows what the VM enables while the device asks for an interrupt.
	dom.SetConfig(0, slot, 4, 2, 6)
	dom.SetConfig(0, slot, 4, 2, 6)
	dom.SetConfig(0, slot, 4, 2, 6|1<<10)
	got = dom.Interrupts()[len(want):]
	if !slices.Equal(got, []xentest.Interrupt{{Slot: slot, Up: true}, {Slot: slot}}) {
		t.Errorf("pin %+v", got)
	}
	// Who comes from another host may have brought a pin that is up.
	if err := s.Restore(s.Config()); err != nil {
		t.Fatal(err)
	}
	if got = dom.Interrupts()[len(want)+2:]; !slices.Equal(got, []xentest.Interrupt{{Slot: slot}}) {
		t.Errorf("after a migration %+v", got)
	}
}

func TestAccessWaitsWhileNobodyServes(t *testing.T) {
	d := &registers{}
	h := xentest.New(t)
	dom, p := h.Domain(7, 1, 16), h.Process()
	s := create(t, p, config())
	stop := serve(t, s, d)
	enable(dom)
	dom.Store(0, bar0, 4, 3)
	stop()
	got := make(chan uint64)
	go func() { got <- dom.Load(0, bar0, 4) }()
	testkit.Parked(t, "xentest.(*Domain).Ask", 1)
	stop = serve(t, s, d)
	if v := <-got; v != 3 {
		t.Errorf("read %#x", v)
	}
	stop()
	destroy(t, s)
}

// TestVMIsToldThatItsDeviceIsGone kills the process that serves: the vCPU waits until
// another one adopts the server, and then reads ones, never an old or half a value.
func TestVMIsToldThatItsDeviceIsGone(t *testing.T) {
	for _, begun := range []bool{false, true} {
		d := &registers{hold: make(chan struct{})}
		h := xentest.New(t)
		dom, p := h.Domain(7, 1, 16), h.Process()
		s := create(t, p, config())
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Serve(ctx, d) }()
		enable(dom)
		dom.Store(0, bar0, 4, 3)
		got := make(chan uint64)
		if begun { // the access is in work when the process dies
			go func() { got <- dom.Load(0, bar0+0xff8, 4) }()
			<-d.hold
			p.Kill()
		} else {
			p.Kill()
			go func() { got <- dom.Load(0, bar0, 4) }()
			testkit.Parked(t, "xentest.(*Domain).Ask", 1)
		}
		second := h.Process()
		a, err := xen.Adopt(second, 7, s.ID())
		if err != nil {
			t.Fatal(err)
		}
		stop := serve(t, a, xen.Gone{})
		if v := <-got; v != 0xffffffff {
			t.Errorf("begun %v: read %#x", begun, v)
		}
		if v := dom.Config(0, slot, 0, 4); v != 0xffffffff {
			t.Errorf("its ids are %#x", v)
		}
		stop()
		destroy(t, a)
		if dom.Servers() != 0 {
			t.Error("the server is still there")
		}
		if begun { // the dead process's goroutine, which in truth is gone
			d.hold <- struct{}{}
		}
		cancel()
		<-ended
	}
}

func TestDestroyAnswersWhatWaits(t *testing.T) {
	h := xentest.New(t)
	dom, p := h.Domain(7, 1, 16), h.Process()
	s := create(t, p, config())
	stop := serve(t, s, &registers{})
	enable(dom)
	stop()
	got := make(chan uint64)
	go func() { got <- dom.Load(0, bar0, 4) }()
	testkit.Parked(t, "xentest.(*Domain).Ask", 1)
	destroy(t, s)
	if v := <-got; v != 0xffffffff {
		t.Errorf("read %#x", v)
	}
	if v := dom.Load(0, bar0, 4); v != 0xffffffff || dom.Servers() != 0 {
		t.Errorf("afterwards: read %#x, %d servers", v, dom.Servers())
	}
}

func TestDestroyWaitsForAPausedDomain(t *testing.T) {
	h := xentest.New(t)
	dom, p := h.Domain(7, 1, 16), h.Process()
	s := create(t, p, config())
	stop := serve(t, s, &registers{})
	enable(dom)
	stop()
	dom.Pause()
	got := make(chan uint64)
	go func() { got <- dom.Load(0, bar0, 4) }()
	testkit.Parked(t, "xentest.(*Domain).Ask", 1)
	ctx, cancel := context.WithCancel(t.Context())
	destroyed := make(chan error, 1)
	go func() { destroyed <- s.Destroy(ctx) }()
	testkit.Parked(t, "sync.(*Cond).Wait", 1) // the vCPU has its answer and does not take it
	cancel()
	if err := <-destroyed; !errors.Is(err, xen.ErrWaiting) || dom.Servers() != 1 {
		t.Errorf("%v, %d servers", err, dom.Servers())
	}
	dom.Unpause()
	<-got
	destroy(t, s)
}

func TestFailedCreationLeavesNothing(t *testing.T) {
	h := xentest.New(t)
	dom, p := h.Domain(7, 1, 16), h.Process()
	no := errors.New("no room on the disk")
	c := config()
	c.Created = func(uint16) error { return no }
	if _, err := xen.Create(p, c); !errors.Is(err, no) || dom.Servers() != 0 {
		t.Errorf("%v, %d servers", err, dom.Servers())
	}
	c = config()
	c.Slot, c.Windows = 0, []pciconf.Window{{Start: 0x1000, Size: 0x1000}, {BAR: 1, Start: 0x1800, Size: 0x1000}}
	if _, err := xen.Create(p, c); !errors.Is(err, unix.EEXIST) || dom.Servers() != 0 {
		t.Errorf("windows that overlap: %v, %d servers", err, dom.Servers())
	}
	for range 8 {
		s := create(t, p, config())
		defer destroy(t, s)
	}
	if _, err := xen.Create(p, config()); !errors.Is(err, unix.ENOSPC) || dom.Servers() != 8 {
		t.Errorf("a ninth: %v, %d servers", err, dom.Servers())
	}
}

func TestImpossibleServersAreRefused(t *testing.T) {
	p := xentest.New(t).Process()
	for name, change := range map[string]func(*xen.Config){
		"slot 32":        func(c *xen.Config) { c.Slot = 32 },
		"neither":        func(c *xen.Config) { c.Slot = 0 },
		"both":           func(c *xen.Config) { c.Windows = []pciconf.Window{{Start: 4096, Size: 4096}} },
		"empty window":   func(c *xen.Config) { c.Slot, c.Windows = 0, []pciconf.Window{{Start: 4096}} },
		"no such window": func(c *xen.Config) { c.Slot, c.Windows = 0, []pciconf.Window{{BAR: 6, Start: 4096, Size: 4096}} },
	} {
		c := config()
		change(&c)
		if _, err := xen.Create(p, c); !errors.Is(err, xen.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := xen.Create(p, config()); !errors.Is(err, unix.ESRCH) {
		t.Errorf("a domain that does not exist: %v", err)
	}
	if _, err := xen.Adopt(p, 7, 1); !errors.Is(err, unix.ESRCH) {
		t.Errorf("a server that does not exist: %v", err)
	}
}

func TestWindowsWithoutPCI(t *testing.T) {
	h := xentest.New(t)
	dom, p := h.Domain(7, 1, 16), h.Process()
	c := config()
	c.Slot, c.Windows = 0, []pciconf.Window{{BAR: 0, Start: bar0, Size: 1 << 20}}
	s := create(t, p, c)
	stop := serve(t, s, &registers{})
	dom.Store(0, bar0+4, 4, 6)
	if v := dom.Load(0, bar0+4, 4); v != 6 {
		t.Errorf("read %#x", v)
	}
	stop()
	if s.Config() != nil {
		t.Error("it has a configuration space")
	}
	destroy(t, s)
}

func TestSavedServerGoesOnElsewhere(t *testing.T) {
	d := &registers{}
	h := xentest.New(t)
	dom, p := h.Domain(7, 1, 16), h.Process()
	s := create(t, p, config())
	stop := serve(t, s, d)
	enable(dom)
	dom.Store(0, bar0, 4, 11)
	stop()
	saved := s.Config()
	destroy(t, s)

	h = xentest.New(t)
	dom, p = h.Domain(9, 1, 16), h.Process()
	c := config()
	c.Domain = 9
	s = create(t, p, c)
	if err := s.Restore(saved); err != nil {
		t.Fatal(err)
	}
	stop = serve(t, s, d)
	if v := dom.Load(0, bar0, 4); v != 11 {
		t.Errorf("read %#x", v)
	}
	stop()
	destroy(t, s)
}

func TestGuestMemory(t *testing.T) {
	dom, s, _ := up(t, &registers{}, 1)
	p := bytes.Repeat([]byte{0xa5}, 5000)
	if err := s.WriteMemory(0xffe, p); err != nil || !bytes.Equal(dom.Memory()[0xffe:0xffe+5000], p) || dom.Memory()[0xffd] != 0 {
		t.Error(err)
	}
	q := make([]byte, 5000)
	if err := s.ReadMemory(0xffe, q); err != nil || !bytes.Equal(p, q) {
		t.Error(err)
	}
	for _, at := range []uint64{16<<12 - 1, 1 << 48, ^uint64(0)} {
		if err := s.ReadMemory(at, q); !errors.Is(err, xen.ErrNoMemory) {
			t.Errorf("%#x: %v", at, err)
		}
	}
	if s.MemorySize() != 16<<12 {
		t.Error(s.MemorySize())
	}
}

// TestDomainWithoutVCPUsIsAskedAgain: a server without event channels would answer nobody.
func TestDomainWithoutVCPUsIsAskedAgain(t *testing.T) {
	h := xentest.New(t)
	d := h.Bare(7, 2, 1)
	p := h.Process()
	c := xen.Config{Domain: 7, VM: 1, Windows: []pciconf.Window{{Start: 0xf0000000, Size: 0x1000}}}
	if _, err := xen.Create(p, c); !errors.Is(err, xen.ErrEarly) || d.Servers() != 0 {
		t.Errorf("%v, %d servers", err, d.Servers())
	}
	d.Make()
	s, err := xen.Create(p, c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Destroy(t.Context()); err != nil {
		t.Error(err)
	}
}

func FuzzRequest(f *testing.F) {
	f.Add(uint64(bar0), uint64(0), uint32(1), uint32(4), uint8(1), uint8(1))
	f.Add(uint64(bar0+0x1000), uint64(0x2ffc), uint32(3), uint32(4), uint8(1), uint8(7))
	f.Add(uint64(slot<<35|0x10), uint64(0xc0000000), uint32(1), uint32(4), uint8(2), uint8(0))
	f.Add(uint64(bar0), uint64(4), uint32(4096), uint32(8), uint8(1), uint8(6))
	f.Add(^uint64(0), ^uint64(0), ^uint32(0), ^uint32(0), uint8(8), uint8(7))
	f.Fuzz(func(t *testing.T, addr, data uint64, count, size uint32, kind, flags uint8) {
		d := &registers{}
		dom, s, _ := up(t, d, 1)
		clear(dom.Memory())
		dom.Ask(0, s.ID(), xentest.Request{
			Addr: addr, Data: data, Count: count, Size: size, Type: kind, Read: flags&1 != 0, Pointer: flags&2 != 0, Backwards: flags&4 != 0,
		})
		log := d.take()
		if len(log) > 4096 {
			t.Errorf("%d accesses", len(log))
		}
		for _, a := range log {
			most := uint64(1 << 20)
			if a.BAR == 1 {
				most = 1 << 24
			}
			if a.BAR > 1 || a.Offset+uint64(a.Size) > most || a.Data&^mmio.Ones(a.Size) != 0 || a.Write == (flags&1 != 0) {
				t.Errorf("the device got %v", a)
			}
		}
	})
}

// TestWritesOfTheDeviceAreToldToXen: a live migration would leave them behind otherwise.
func TestWritesOfTheDeviceAreToldToXen(t *testing.T) {
	dom, s, _ := up(t, &registers{}, 1)
	if err := s.ReadMemory(0x5000, make([]byte, 4)); err != nil || dom.Dirty(5) {
		t.Errorf("a read: %v, told: %v", err, dom.Dirty(5))
	}
	if err := s.WriteMemory(0x2ffe, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	if dom.Dirty(1) || !dom.Dirty(2) || !dom.Dirty(3) || dom.Dirty(4) {
		t.Error("Xen was told of other frames than those that were written")
	}
}

// TestVCPUsThatMoveBARsAtOnce: what Xen passes on is what the function decodes in the end.
func TestVCPUsThatMoveBARsAtOnce(t *testing.T) {
	d := &registers{}
	dom, _, _ := up(t, d, 2)
	var wg sync.WaitGroup
	for v := range 2 {
		wg.Go(func() {
			for i := range 300 {
				dom.SetConfig(v, slot, 0x10+4*v, 4, uint64(0xd0000000+v<<27+i%4<<24))
			}
		})
	}
	wg.Wait()
	for bar, at := range []uint64{0xd3000000, 0xdb000000} {
		if _, ok := dom.Do(0, xentest.Request{Addr: at + 8, Count: 1, Size: 4, Read: true, Type: 1}); !ok {
			t.Errorf("BAR %d is not passed on at %#x, where it is", bar, at)
		}
	}
	if n := len(d.take()); n != 2 {
		t.Errorf("%d accesses reached the device", n)
	}
}
