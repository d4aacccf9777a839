package xentest

import (
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
)

// Domain is a domain. Its methods are what its vCPUs do, each at most one thing at a time.
type Domain struct {
	h       *Hypervisor
	id      uint16
	memory  []byte
	vcpus   []*sync.Mutex // held by who uses a vCPU
	servers map[uint16]*server
	paused  bool
	bare    bool // its vCPUs are not made yet
	running *sync.Cond

	interrupts []Interrupt
	dirty      map[uint64]bool // frames that were written behind Xen's back, and told
}

// Interrupt is an interrupt that a domain has got: INTx of a slot, or an MSI.
type Interrupt struct {
	Slot    uint8
	Up      bool
	Address uint64
	Data    uint32
}

// Request is what Xen puts into the page. Its fields may be anything.
type Request struct {
	Addr, Data  uint64
	Count, Size uint32
	Read        bool
	Pointer     bool
	Backwards   bool
	Type        uint8 // 1: memory, 2: configuration
}

// Memory returns the domain's memory. It must not be used while its device uses it.
func (d *Domain) Memory() []byte { return d.memory }

// Dirty reports whether Xen was told that a frame was written.
func (d *Domain) Dirty(frame uint64) bool {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	return d.dirty[frame]
}

// Interrupts returns the interrupts that the domain has got.
func (d *Domain) Interrupts() []Interrupt {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	return slices.Clone(d.interrupts)
}

// Servers returns how many servers the domain has.
func (d *Domain) Servers() int {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	return len(d.servers)
}

// Make makes the vCPUs of a domain that was made without. Servers get their event channels then.
func (d *Domain) Make() {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	d.bare = false
	for _, s := range d.servers {
		s.number()
		s.tellPorts()
	}
}

// Pause makes vCPUs take no answers until Unpause.
func (d *Domain) Pause() {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	d.paused = true
}

// Unpause ends Pause.
func (d *Domain) Unpause() {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	d.paused = false
	d.running.Broadcast()
}

// find returns the server of an access. Xen looks at the highest id first.
func (d *Domain) find(r Request) *server {
	want := span{1, r.Addr, r.Addr}
	switch {
	case r.Type == 2:
		want = span{2, r.Addr >> 32, r.Addr >> 32}
	case r.Size > 0 && r.Count > 0 && r.Count < 1<<20:
		n := uint64(r.Size) * uint64(r.Count)
		want.end = r.Addr + n - 1
		if r.Backwards {
			want = span{1, r.Addr - (n - uint64(r.Size)), r.Addr + uint64(r.Size) - 1}
		}
	}
	for id := range slices.Backward(make([]struct{}, mostServer)) {
		s := d.servers[uint16(id)]
		if s == nil || !s.enabled {
			continue
		}
		for has := range s.ranges {
			if has.kind == want.kind && has.start <= want.start && want.end <= has.end {
				return s
			}
		}
	}
	return nil
}

// Do makes a vCPU do an access, and returns what a read reads. ok is false if it is for no
// server. It returns when the server has answered.
func (d *Domain) Do(vcpu int, r Request) (data uint64, ok bool) {
	d.h.mu.Lock()
	s := d.find(r)
	d.h.mu.Unlock()
	if s == nil {
		return ^uint64(0), false
	}
	return d.Ask(vcpu, s.id, r), true
}

// Ask puts a request into the page of a server, even one that Xen would not put there.
func (d *Domain) Ask(vcpu int, id uint16, r Request) uint64 {
	d.vcpus[vcpu].Lock()
	defer d.vcpus[vcpu].Unlock()
	d.h.mu.Lock()
	s := d.servers[id]
	slot, c := s.slot(vcpu), s.ports[vcpu]
	le := binary.LittleEndian
	le.PutUint64(slot[0:], r.Addr)
	le.PutUint64(slot[8:], r.Data)
	le.PutUint32(slot[16:], r.Count)
	le.PutUint32(slot[20:], r.Size)
	w := uint32(r.Type)<<24 | ready<<16
	for bit, set := range map[int]bool{20: r.Pointer, 21: r.Read, 22: r.Backwards} {
		if set {
			w |= 1 << bit
		}
	}
	atomic.StoreUint32(word(slot), w)
	if c.remote != nil {
		select {
		case c.remote.pending <- struct{}{}:
		default:
		}
	}
	d.h.mu.Unlock()
	for {
		<-c.event
		if stateOf(slot) == answered {
			break
		}
	}
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	for d.paused {
		d.running.Wait()
	}
	data := le.Uint64(slot[8:])
	if now := atomic.LoadUint32(word(slot)); now&^0xf0000 != w&^0xf0000 {
		d.h.tb.Errorf("xentest: the answer to %#x is %#x: its server has changed what it may not", w, now)
	}
	atomic.StoreUint32(word(slot), w&^0xf0000)
	return data
}

// Event sends an event to a server without a request.
func (d *Domain) Event(vcpu int, id uint16) {
	d.h.mu.Lock()
	defer d.h.mu.Unlock()
	if c := d.servers[id].ports[vcpu].remote; c != nil {
		select {
		case c.pending <- struct{}{}:
		default:
		}
	}
}

// Load makes a vCPU read memory.
func (d *Domain) Load(vcpu int, addr uint64, size int) uint64 {
	v, _ := d.Do(vcpu, Request{Addr: addr, Count: 1, Size: uint32(size), Read: true, Type: 1})
	if size < 8 {
		v &= 1<<(8*size) - 1
	}
	return v
}

// Store makes a vCPU write memory.
func (d *Domain) Store(vcpu int, addr uint64, size int, v uint64) {
	d.Do(vcpu, Request{Addr: addr, Data: v, Count: 1, Size: uint32(size), Type: 1})
}

// Config makes a vCPU read a configuration register of a slot.
func (d *Domain) Config(vcpu int, slot uint8, register, size int) uint64 {
	v, _ := d.Do(vcpu, Request{Addr: uint64(slot)<<35 | uint64(register), Count: 1, Size: uint32(size), Read: true, Type: 2})
	if size < 8 {
		v &= 1<<(8*size) - 1
	}
	return v
}

// SetConfig makes a vCPU write a configuration register of a slot.
func (d *Domain) SetConfig(vcpu int, slot uint8, register, size int, v uint64) {
	d.Do(vcpu, Request{Addr: uint64(slot)<<35 | uint64(register), Data: v, Count: 1, Size: uint32(size), Type: 2})
}
