package xen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuctl/gpuctl/passthrough/pci"
)

// fakeXen answers control hypercalls as Xen 4.17 does. It takes addresses for
// what they are and refuses those outside of the memory that is lent to it.
type fakeXen struct {
	memory  []byte
	base    uint64
	domains []fakeDomain
	nodes   map[pci.Address]uint32
	groups  map[pci.Address]int
	log     string
	iommu   bool
	refuse  bool // another version of the interface
	preempt int  // devices that one call gets through
	calls   int
}

type fakeDomain struct {
	id      uint16
	flags   uint32
	emul    uint32
	handle  byte
	time    uint64 // of its vCPUs, ns
	devices []pci.Address
}

func (x *fakeXen) privcmd() *Privcmd {
	x.memory, x.base = make([]byte, memorySize), 0x7f1200340000
	return &Privcmd{memory: x.memory, base: x.base, call: x.hypercall, close: func() error { return nil }}
}

// at is guest memory of n bytes; nil where there is none.
func (x *fakeXen) at(address uint64, n int) []byte {
	if address < x.base || address+uint64(n) > x.base+uint64(len(x.memory)) {
		return nil
	}
	return x.memory[address-x.base:][:n]
}

func (x *fakeXen) hypercall(op, arg uint64) error {
	x.calls++
	head := x.at(arg, 144)
	if head == nil {
		return syscall.EFAULT
	}
	if le.Uint32(head[4:]) != 0x15 || x.refuse {
		return syscall.EACCES
	}
	switch cmd := le.Uint32(head[0:]); {
	case op == 36 && cmd == 50:
		return x.group(le.Uint16(head[8:]), head[16:])
	case op == 35 && cmd == 6:
		return x.list(head[8:])
	case op == 35 && cmd == 3:
		if x.iommu {
			le.PutUint32(head[8+28:], 1<<2|1)
		}
		return nil
	case op == 35 && cmd == 22:
		return x.topology(head[8:])
	case op == 35 && cmd == 1:
		start := min(int(le.Uint32(head[8+4:])), len(x.log))
		n := min(int(le.Uint32(head[8+16:])), len(x.log)-start, 1000)
		copy(x.at(le.Uint64(head[8+8:]), n), x.log[start:start+n])
		le.PutUint32(head[8+4:], uint32(start+n))
		le.PutUint32(head[8+16:], uint32(n))
		return nil
	}
	return syscall.ENOSYS
}

func (x *fakeXen) list(b []byte) error {
	first, most, n := le.Uint16(b[0:]), int(le.Uint32(b[4:])), 0
	buffer := x.at(le.Uint64(b[8:]), most*112)
	if buffer == nil {
		return syscall.EFAULT
	}
	for _, d := range x.domains {
		if d.id < first || n == most {
			continue
		}
		info := buffer[n*112:][:112]
		clear(info)
		le.PutUint16(info[0:], d.id)
		le.PutUint32(info[4:], d.flags)
		le.PutUint64(info[56:], d.time)
		info[76] = d.handle
		le.PutUint32(info[104:], d.emul)
		n++
	}
	le.PutUint32(b[16:], uint32(n))
	return nil
}

func (x *fakeXen) group(domain uint16, b []byte) error {
	i := slices.IndexFunc(x.domains, func(d fakeDomain) bool { return d.id == domain })
	if i < 0 {
		return syscall.ESRCH
	}
	sbdf, most, n := le.Uint32(b[0:]), int(le.Uint32(b[4:])), 0
	out := x.at(le.Uint64(b[16:]), most*4)
	for _, a := range x.domains[i].devices {
		asked := machineBDF(a) == sbdf
		own := x.groups[a]
		if asked || a.Domain != sbdf>>16 || own == 0 || n == most {
			continue
		}
		for other, g := range x.groups {
			if machineBDF(other) == sbdf && g == own {
				if out == nil {
					return syscall.EFAULT
				}
				le.PutUint32(out[4*n:], uint32(a.Bus)<<16|uint32(a.Device<<3|a.Function)<<8)
				n++
			}
		}
	}
	le.PutUint32(b[8:], uint32(n))
	return nil
}

func (x *fakeXen) topology(b []byte) error {
	n := int(le.Uint32(b[0:]))
	devices, nodes := x.at(le.Uint64(b[8:]), 4*n), x.at(le.Uint64(b[16:]), 4*n)
	if devices == nil || nodes == nil {
		return syscall.EFAULT
	}
	if x.preempt > 0 {
		n = min(n, x.preempt)
	}
	for i := range n {
		a := pci.Address{Domain: uint32(le.Uint16(devices[4*i:])), Bus: devices[4*i+2], Device: devices[4*i+3] >> 3, Function: devices[4*i+3] & 7}
		node, ok := x.nodes[a]
		if !ok {
			node = invalidDevice
		}
		le.PutUint32(nodes[4*i:], node)
	}
	le.PutUint32(b[0:], uint32(n))
	return nil
}

func addr(s string) pci.Address {
	a, err := pci.ParseAddress(s)
	if err != nil {
		panic(err)
	}
	return a
}

func TestRunningByHypercall(t *testing.T) {
	x := &fakeXen{domains: []fakeDomain{{id: 0}, {id: 3, flags: domainHVM, emul: 0x5ff, handle: 0xab}, {id: 4, flags: domainHVM | domainPaused, emul: 1, time: 1}, {id: 9, flags: domainDying}}}
	got, err := x.privcmd().Running(t.Context())
	want := []Running{
		{ID: 0, Type: TypePV},
		{ID: 3, Type: TypeHVM, UUID: "ab000000-0000-0000-0000-000000000000"},
		{ID: 4, Type: TypePVH, Paused: true, Ran: true},
		{ID: 9, Type: TypePV, Dying: true},
	}
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Error(d, err)
	}
	x = &fakeXen{}
	for i := range 300 {
		x.domains = append(x.domains, fakeDomain{id: uint16(i * 3)})
	}
	if got, err := x.privcmd().Running(t.Context()); err != nil || len(got) != 300 || x.calls != 3 {
		t.Errorf("%d domains in %d calls (%v)", len(got), x.calls, err)
	}
}

// Xen looks for the group among the devices of one domain: all are asked.
func TestGroupByHypercall(t *testing.T) {
	x := &fakeXen{
		domains: []fakeDomain{
			{id: 0, devices: []pci.Address{addr("0000:05:01.0"), addr("0000:05:02.1"), addr("0000:65:00.0"), addr("0001:05:03.0")}},
			{id: 5, devices: []pci.Address{addr("0000:05:1f.7")}},
		},
		groups: map[pci.Address]int{addr("0000:05:01.0"): 1, addr("0000:05:02.1"): 1, addr("0000:05:1f.7"): 1, addr("0000:65:00.0"): 2, addr("0001:05:03.0"): 1},
	}
	p := x.privcmd()
	for a, want := range map[string][]string{"0000:05:01.0": {"0000:05:02.1", "0000:05:1f.7"}, "0000:65:00.0": nil, "0000:99:00.0": nil} {
		got, err := p.Group(t.Context(), addr(a))
		var names []string
		for _, a := range got {
			names = append(names, a.String())
		}
		if d := cmp.Diff(want, names); d != "" || err != nil {
			t.Errorf("%s: %v %s", a, err, d)
		}
	}
	if _, err := p.Group(t.Context(), addr("10000:05:00.0")); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a domain that the hypervisor cannot address: %v", err)
	}
}

func TestNodesByHypercall(t *testing.T) {
	x := &fakeXen{nodes: map[pci.Address]uint32{}, preempt: 100}
	var devices []pci.Address
	want := map[pci.Address]int{}
	for i := range 1500 {
		a := pci.Address{Bus: uint8(i >> 8), Device: uint8(i >> 3 & 0x1f), Function: uint8(i & 7)}
		devices = append(devices, a)
		switch i % 3 {
		case 0:
			x.nodes[a], want[a] = uint32(i%2), i%2
		case 1:
			x.nodes[a] = invalidNode
		}
	}
	got, err := x.privcmd().Nodes(t.Context(), devices)
	if err != nil || !maps.Equal(want, got) {
		t.Errorf("%d of %d nodes (%v)", len(got), len(want), err)
	}
}

func TestLogByHypercall(t *testing.T) {
	x := &fakeXen{}
	for i := range 500 {
		x.log += fmt.Sprintf("(XEN) line %d\n", i)
	}
	got, err := x.privcmd().Log(t.Context())
	if err != nil || got != x.log {
		t.Errorf("%d of %d bytes (%v)", len(got), len(x.log), err)
	}
}

func TestIOMMUByHypercall(t *testing.T) {
	for on, want := range map[bool]State{true: On, false: Off} {
		x := &fakeXen{iommu: on}
		if got, err := x.privcmd().IOMMU(t.Context()); err != nil || got != want {
			t.Errorf("%v: %v, %v", on, got, err)
		}
	}
}

func TestOtherVersionsAreNotAsked(t *testing.T) {
	p := (&fakeXen{refuse: true}).privcmd()
	if _, err := p.Running(t.Context()); !errors.Is(err, ErrVersion) {
		t.Errorf("got %v", err)
	}
	_, err := OpenPrivcmd(t.TempDir(), Version{Major: 4, Minor: 18, Extra: ".2"})
	if !errors.Is(err, ErrVersion) {
		t.Errorf("got %v", err)
	}
	want := "unknown control interface of Xen: this is Xen 4.18.2 and only that of 4.17 is known: device groups are not read, and everything else is asked of the program xl"
	if err.Error() != want {
		t.Errorf("got %q", err)
	}
	if _, err := OpenPrivcmd(t.TempDir(), Version{Major: 4, Minor: 17}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without devices: %v", err)
	}
	root := fstest.MapFS{"sys/hypervisor/version/major": {Data: []byte("4\n")}, "sys/hypervisor/version/minor": {Data: []byte("19\n")}}
	hv, why := Open(root, t.TempDir())
	if _, ok := hv.(*XL); !ok || !errors.Is(why, ErrVersion) {
		t.Errorf("got %T, %v", hv, why)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	x := &fakeXen{}
	if _, err := x.privcmd().Running(done); !errors.Is(err, context.Canceled) || x.calls != 0 {
		t.Errorf("%d calls, %v", x.calls, err)
	}
}

// A hypervisor that answers more than it was asked for reads and writes nothing
// beyond the memory.
func TestNonsenseFromTheHypervisor(t *testing.T) {
	ones := bytes.Repeat([]byte{0xff}, memorySize)
	for _, n := range []uint32{1 << 31, 5000, 0xffffffff} {
		p := &Privcmd{memory: make([]byte, memorySize), base: 1 << 40}
		calls := 0
		p.call = func(_, _ uint64) error {
			if calls++; calls > 1000 {
				return syscall.EINTR
			}
			for at := 8; at < 144; at += 4 {
				le.PutUint32(p.memory[at:], n)
			}
			copy(p.memory[dataOffset:], ones)
			return nil
		}
		_, _ = p.Running(t.Context())
		_, _ = p.Group(t.Context(), addr("0000:01:00.0"))
		_, _ = p.Nodes(t.Context(), []pci.Address{addr("0000:01:00.0")})
		if s, _ := p.Log(t.Context()); len(s) > maxLog+memorySize {
			t.Errorf("a log of %d bytes", len(s))
		}
	}
}
