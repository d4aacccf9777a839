package xentest

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuctl/gpuctl/internal/vchan"
	"github.com/gpuctl/gpuctl/mmio/xen"
)

const (
	pageSize   = 4096
	slotSize   = 32
	mostServer = 8
	mostRanges = 256
	firstPort  = 16

	none, ready, answered = 0, 1, 3
)

// Hypervisor is Xen as one process of dom0 sees it. It implements xen.Hypervisor.
type Hypervisor struct {
	tb testing.TB

	mu      sync.Mutex
	domains map[uint16]*Domain
	open    map[*Process]bool
}

// Process is a process of dom0. It implements xen.Hypervisor.
type Process struct {
	h      *Hypervisor
	ports  map[*port]bool
	memory map[*memory]bool
	killed bool
}

// New returns a hypervisor without domains. At the end of the test, no process may have
// anything open.
func New(tb testing.TB) *Hypervisor {
	h := &Hypervisor{tb: tb, domains: map[uint16]*Domain{}, open: map[*Process]bool{}}
	tb.Cleanup(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		for p := range h.open {
			if len(p.ports) > 0 || len(p.memory) > 0 {
				tb.Errorf("xentest: a process still has %d event channels and %d mappings", len(p.ports), len(p.memory))
			}
		}
	})
	return h
}

// Process returns a new process of dom0.
func (h *Hypervisor) Process() *Process {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := &Process{h: h, ports: map[*port]bool{}, memory: map[*memory]bool{}}
	h.open[p] = true
	return p
}

// Kill ends a process as SIGKILL does: the kernel closes its channels and mappings. Xen's
// objects stay.
func (p *Process) Kill() {
	p.h.mu.Lock()
	defer p.h.mu.Unlock()
	p.killed = true
	for c := range p.ports {
		c.end()
	}
	clear(p.memory)
}

// Domain returns a domain, and makes it if there is none.
func (h *Hypervisor) Domain(id uint16, vcpus, pages int) *Domain {
	h.mu.Lock()
	defer h.mu.Unlock()
	d := h.domains[id]
	if d == nil {
		d = &Domain{h: h, id: id, memory: make([]byte, pages*pageSize), servers: map[uint16]*server{}, dirty: map[uint64]bool{}}
		d.running = sync.NewCond(&h.mu)
		for range vcpus {
			d.vcpus = append(d.vcpus, &sync.Mutex{})
		}
		h.domains[id] = d
	}
	return d
}

// Bare returns a new domain whose vCPUs are not made yet (XEN_DOMCTL_max_vcpus): Xen knows how
// many there will be, and has no event channels for them.
func (h *Hypervisor) Bare(id uint16, vcpus, pages int) *Domain {
	d := h.Domain(id, vcpus, pages)
	h.mu.Lock()
	defer h.mu.Unlock()
	d.bare = true
	return d
}

// server is Xen's object.
type server struct {
	id      uint16
	enabled bool
	ranges  map[span]bool
	page    []byte // nil: never mapped
	ports   []*local
}

type span struct {
	kind       uint32
	start, end uint64
}

// local is Xen's end of an event channel of a vCPU.
type local struct {
	vcpu   uint32
	number uint32 // 0: none yet
	event  chan struct{}
	remote *port
}

func (s *server) slot(vcpu int) []byte { return s.page[vcpu*slotSize:][:slotSize] }

func word(slot []byte) *uint32 { return (*uint32)(unsafe.Pointer(&slot[28])) }

func stateOf(slot []byte) uint32 { return atomic.LoadUint32(word(slot)) >> 16 & 0xf }

// DeviceOp implements xen.Hypervisor.
func (p *Process) DeviceOp(domain uint16, op, more []byte) error {
	p.h.mu.Lock()
	defer p.h.mu.Unlock()
	d := p.h.domains[domain]
	if d == nil || p.killed {
		return unix.ESRCH
	}
	le := binary.LittleEndian
	if len(op) < 32 || le.Uint32(op[4:]) != 0 || (le.Uint32(op) == 11) != (len(more) > 0) {
		return unix.EINVAL
	}
	number, b := le.Uint32(op), op[8:]
	zero := func(from, to int) bool {
		for _, x := range b[from:to] {
			if x != 0 {
				return false
			}
		}
		return true
	}
	s := d.servers[le.Uint16(b)]
	switch number {
	case 1:
		if b[0] != 0 || !zero(1, 4) {
			return unix.EINVAL
		}
		return d.create(b)
	case 3, 4:
		if !zero(2, 4) {
			return unix.EINVAL
		}
		return s.change(number == 3, span{le.Uint32(b[4:]), le.Uint64(b[8:]), le.Uint64(b[16:])})
	case 5:
		if !zero(3, 4) || b[2] > 1 {
			return unix.EINVAL
		}
		return s.enable(b[2] == 1)
	case 6:
		if !zero(2, 4) {
			return unix.EINVAL
		}
		return d.destroy(s)
	case 8:
		if le.Uint16(b) != 0 || b[3] > 31 || b[4] > 3 || b[5] > 1 {
			return unix.EINVAL
		}
		d.interrupts = append(d.interrupts, Interrupt{Slot: b[3], Up: b[5] == 1})
		return nil
	case 11:
		return d.modify(b, more)
	case 14:
		if !zero(4, 8) {
			return unix.EINVAL
		}
		d.interrupts = append(d.interrupts, Interrupt{Address: le.Uint64(b[8:]), Data: le.Uint32(b)})
		return nil
	case 20:
		le.PutUint32(b, uint32(len(d.vcpus)))
		return nil
	}
	return unix.EOPNOTSUPP
}

// modify logs frames as written.
func (d *Domain) modify(b, extents []byte) error {
	le := binary.LittleEndian
	if le.Uint32(b) != 1 || le.Uint32(b[4:]) != 0 || len(extents) != 16 || le.Uint32(extents[12:]) != 0 {
		return unix.EINVAL
	}
	first, n := le.Uint64(extents), uint64(le.Uint32(extents[8:]))
	if all := uint64(len(d.memory) / pageSize); first >= all || n > all-first {
		return unix.EINVAL
	}
	for f := range n {
		d.dirty[first+f] = true
	}
	return nil
}

func (d *Domain) create(b []byte) error {
	for id := range uint16(mostServer) {
		if d.servers[id] != nil {
			continue
		}
		s := &server{id: id, ranges: map[span]bool{}}
		for v := range d.vcpus {
			s.ports = append(s.ports, &local{vcpu: uint32(v), event: make(chan struct{}, 1)})
		}
		if !d.bare {
			s.number()
		}
		d.servers[id] = s
		binary.LittleEndian.PutUint16(b[4:], id)
		return nil
	}
	return unix.ENOSPC
}

// number gives the vCPUs their event channels.
func (s *server) number() {
	for _, c := range s.ports {
		c.number = firstPort + uint32(s.id)*1000 + c.vcpu
	}
}

func (s *server) change(add bool, r span) error {
	switch {
	case s == nil:
		return unix.ENOENT
	case r.kind > 2 || r.start > r.end:
		return unix.EINVAL
	case !add && !s.ranges[r]:
		return unix.ENOENT
	case !add:
		delete(s.ranges, r)
		return nil
	case len(s.ranges) == mostRanges:
		return unix.ENOSPC
	}
	for other := range s.ranges {
		if other.kind == r.kind && other.start <= r.end && r.start <= other.end {
			return unix.EEXIST
		}
	}
	s.ranges[r] = true
	return nil
}

func (s *server) enable(on bool) error {
	if s == nil {
		return unix.ENOENT
	}
	s.enabled = on
	s.tellPorts()
	return nil
}

// tellPorts writes the channels into the page, as Xen does as soon as it has one.
func (s *server) tellPorts() {
	if !s.enabled || s.page == nil {
		return
	}
	for v, c := range s.ports {
		binary.LittleEndian.PutUint32(s.slot(v)[24:], c.number)
	}
}

func (d *Domain) destroy(s *server) error {
	if s == nil {
		return unix.ENOENT
	}
	for v := range d.vcpus {
		if s.page != nil && stateOf(s.slot(v)) != none {
			d.h.tb.Errorf("xentest: ioreq server %d of domain %d was destroyed while vCPU %d waits for it: it waits for good", s.id, d.id, v)
		}
	}
	delete(d.servers, s.id)
	return nil
}

// memory implements xen.Memory.
type memory struct {
	of    *Process
	bytes []byte
	into  [][]byte // pages to copy into at Close; nil: shared memory
}

// Bytes implements xen.Memory.
func (m *memory) Bytes() []byte { return m.bytes }

// Close implements xen.Memory.
func (m *memory) Close() error {
	m.of.h.mu.Lock()
	defer m.of.h.mu.Unlock()
	if !m.of.memory[m] {
		if !m.of.killed {
			m.of.h.tb.Error("xentest: memory was unmapped twice")
		}
		return unix.EINVAL
	}
	delete(m.of.memory, m)
	for i, page := range m.into {
		copy(page, m.bytes[i*pageSize:])
	}
	return nil
}

func (p *Process) mapped(b []byte, into [][]byte) *memory {
	m := &memory{of: p, bytes: b, into: into}
	p.memory[m] = true
	return m
}

// MapResource implements xen.Hypervisor.
func (p *Process) MapResource(domain uint16, kind, id, first uint32, frames int) (xen.Memory, error) {
	p.h.mu.Lock()
	defer p.h.mu.Unlock()
	d := p.h.domains[domain]
	if d == nil || p.killed {
		return nil, unix.ESRCH
	}
	s := d.servers[uint16(id)]
	switch {
	case kind != 0 || id > 0xffff || s == nil:
		return nil, unix.EINVAL
	case first == 0: // frame of buffered requests, for which the server was not made
		return nil, unix.ENOENT
	case first != 1 || frames != (len(d.vcpus)*slotSize+pageSize-1)/pageSize:
		return nil, unix.EINVAL
	}
	if s.page == nil {
		words := make([]uint64, frames*pageSize/8) // aligned
		s.page = unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), frames*pageSize)
		s.tellPorts()
	}
	return p.mapped(s.page, nil), nil
}

// MapForeign implements xen.Hypervisor.
func (p *Process) MapForeign(domain uint16, frames []uint64, writable bool) (xen.Memory, error) {
	p.h.mu.Lock()
	defer p.h.mu.Unlock()
	d := p.h.domains[domain]
	if d == nil || p.killed {
		return nil, unix.ESRCH
	}
	b := make([]byte, 0, len(frames)*pageSize)
	var into [][]byte
	for _, f := range frames {
		if f >= uint64(len(d.memory)/pageSize) {
			return nil, fmt.Errorf("frame %#x: %w", f, unix.ENOENT)
		}
		page := d.memory[f*pageSize:][:pageSize]
		b = append(b, page...)
		if writable {
			into = append(into, page)
		}
	}
	return p.mapped(b, into), nil
}

// port is a process's end of an event channel. It implements vchan.Port.
type port struct {
	of      *Process
	xen     *local
	domain  *Domain
	server  *server
	vcpu    int
	pending chan struct{}
	closed  chan struct{}
}

// BindInterdomain implements xen.Hypervisor.
func (p *Process) BindInterdomain(domain uint16, number uint32) (vchan.Port, error) {
	p.h.mu.Lock()
	defer p.h.mu.Unlock()
	d := p.h.domains[domain]
	if d == nil || p.killed {
		return nil, unix.ESRCH
	}
	for _, s := range d.servers {
		for v, l := range s.ports {
			if l.number != number || number == 0 || l.remote != nil {
				continue
			}
			c := &port{of: p, xen: l, domain: d, server: s, vcpu: v, pending: make(chan struct{}, 1), closed: make(chan struct{})}
			l.remote = c
			c.pending <- struct{}{} // Xen does so, as an event may have been lost before
			p.ports[c] = true
			return c, nil
		}
	}
	return nil, unix.EINVAL
}

// Number implements vchan.Port.
func (c *port) Number() uint32 { return c.xen.number }

// Wait implements vchan.Port.
func (c *port) Wait() error {
	select {
	case <-c.closed:
		return os.ErrClosed
	default:
	}
	select {
	case <-c.pending:
		return nil
	case <-c.closed:
		return os.ErrClosed
	}
}

// Notify implements vchan.Port.
func (c *port) Notify() error {
	c.of.h.mu.Lock()
	defer c.of.h.mu.Unlock()
	if !c.of.ports[c] {
		return os.ErrClosed
	}
	if s := stateOf(c.server.slot(c.vcpu)); s != answered && s != none {
		c.of.h.tb.Errorf("xentest: vCPU %d was notified while its request is in state %d", c.vcpu, s)
	}
	select {
	case c.xen.event <- struct{}{}:
	default:
	}
	return nil
}

func (c *port) end() {
	delete(c.of.ports, c)
	c.xen.remote = nil
	close(c.closed)
}

// Close implements vchan.Port.
func (c *port) Close() error {
	c.of.h.mu.Lock()
	defer c.of.h.mu.Unlock()
	if !c.of.ports[c] {
		return os.ErrClosed
	}
	c.end()
	return nil
}

// Abandon implements vchan.Port.
func (c *port) Abandon() {
	c.of.h.tb.Error("xentest: dom0 is not migrated, so it abandons no event channel")
}
