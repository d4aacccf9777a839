package mediate

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"time"

	"github.com/gpuctl/gpuctl/internal/timeshare"
	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/regs"
)

// VGPU is what a VM has of a GPU.
type VGPU struct {
	g        *GPU
	request  Request
	owner    nvc0.Owner
	id       timeshare.OwnerID
	base     HostPA // of the partition
	size     uint64
	first    int // physical channel
	window64 uint64
	stats    *mmio.Stats
	told     [mmio.Reasons]uint64
	tables   int // frames that its shadows take
	left     int // entries of page tables that the exit at work may still look at
	gone     bool

	registers
	channels []channel
	spaces   map[GuestPA]*space // by the VM's page directory, or by its number (Para)
	paused   bool
	waiting  []command // that are not ready, in order
	ready    []command // that the scheduler knows, in order
	asserted bool      // its interrupt line
}

// registers is what a VM's registers are.
type registers struct {
	plain       [regs.IDs][]uint32 // of those that only keep what is written
	window      uint32
	bar         [2]uint32 // instances of BAR1 and BAR3
	playlist    uint32
	kicked      uint32
	tlbSpace    uint32
	contextData uint32
	contextInst uint32
	intr        uint32 // PFIFO
	graphIntr   uint32
	source      uint32 // of faults
	listIntr    uint32
	faults      [128]uint32
	epoch       time.Duration // of its PTIMER
	slots       uint32        // Para: the page of the shared slots
	mapped      bool
}

// channel is a VM's.
type channel struct {
	value   uint32  // CHAN_INST as the VM wrote it
	inst    GuestPA // if valid
	valid   bool
	listed  bool
	dead    bool // stopped until it is bound again
	space   *space
	shadow  HostPA // its instance block
	userd   HostPA
	put     uint32 // as the VM last wrote it
	unlist  bool   // there was a doorbell while it was not listed
	context uint32 // STATE
}

// Partition is where a VM's memory is on the GPU. For tests and displays.
func (v *VGPU) Partition() (at HostPA, size uint64) { return v.base, v.size }

// Channels is which physical channels the VM has.
func (v *VGPU) Channels() (first, n int) { return v.first, len(v.channels) }

// Owner is how the hardware tells the VM's frames.
func (v *VGPU) Owner() nvc0.Owner { return v.owner }

// Stats is what was counted for the VM.
func (v *VGPU) Stats() *mmio.Stats { return v.stats }

// Mode is how its shadows are kept.
func (v *VGPU) Mode() Mode { return v.request.Mode }

// Tables is how many frames its shadows take.
func (v *VGPU) Tables() int {
	defer v.g.lock()()
	return v.tables
}

// clear makes the state of a new VGPU.
func (v *VGPU) clear() {
	v.registers = registers{epoch: v.g.now()}
	for _, r := range v.g.table.Rows() {
		if r.Class == regs.Virtual && r.Write {
			v.plain[r.ID] = make([]uint32, r.Count)
		}
	}
	v.channels = make([]channel, v.request.Channels)
	v.spaces = map[GuestPA]*space{}
	v.waiting, v.ready = nil, nil
}

// wipe stops all that a VM does and takes all away that it had, but for its memory, which
// scrub clears.
func (v *VGPU) wipe() {
	g := v.g
	for i := range v.channels {
		v.channels[i].listed = false
		g.hw.Stop(v.first + i)
	}
	g.writePlaylist()
	if g.running != nil && g.running.v == v {
		g.finish()
	}
	if !v.paused && (len(v.ready) > 0 || len(v.waiting) > 0) {
		v.rejoin()
	}
	for i := range v.channels {
		v.unbind(&v.channels[i])
	}
	for _, s := range v.spaces {
		v.drop(s)
	}
	v.waiting, v.ready = nil, nil
}

// scrub clears a VM's memory. The GPU is not locked all the while: others go on. Nobody may
// reach the VGPU.
func (v *VGPU) scrub() {
	for done := uint64(0); done < v.size; done += megabyte {
		v.g.mu.Lock()
		v.g.zero(v.owner, v.base+HostPA(done), megabyte) //check:scrub-memory
		v.g.unlock()
	}
}

// host makes a hardware's address of n bytes at a VM's. It is the only place that
// does.
func (v *VGPU) host(at GuestPA, n uint64) (HostPA, bool) {
	if uint64(at) >= v.size || n > v.size-uint64(at) { //check:partition
		return 0, false
	}
	return v.base + HostPA(at), true
}

// load reads the VM's GPU memory for the VM.
func (v *VGPU) load(at GuestPA, p []byte) bool {
	pa, ok := v.host(at, uint64(len(p)))
	if ok {
		v.g.hw.Load(v.owner, pa, p)
	}
	return ok
}

func (v *VGPU) load64(at GuestPA) (uint64, bool) {
	var b [8]byte
	ok := v.load(at, b[:])
	return binary.LittleEndian.Uint64(b[:]), ok
}

// store writes it, and brings what the mediator made of that memory up to date: an instance block has a
// shadow.
func (v *VGPU) store(at GuestPA, p []byte) bool {
	pa, ok := v.host(at, uint64(len(p)))
	if !ok {
		return false
	}
	v.g.hw.Store(v.owner, pa, p)
	for i := range v.channels {
		if c := &v.channels[i]; c.valid && at < c.inst+nvc0.PageSize && c.inst < at+GuestPA(len(p)) {
			v.bind(i) //check:barrier
		}
	}
	return true
}

// refuse counts something that a VM may not do, and tells of it now and then: what it
// was about, and an address, number or value.
func (v *VGPU) refuse(r mmio.Reason, what string, at uint64) {
	v.stats.Refuse(r)
	v.told[r]++
	if n := v.told[r]; v.g.config.Events != nil && bits.OnesCount64(n) == 1 {
		v.g.config.Events(Event{VM: v.request.VM, Name: v.request.Name, Reason: r, Text: fmt.Sprintf("%s %#x", what, at), Count: n})
	}
}

func (v *VGPU) tell(text string) {
	if v.g.config.Events != nil {
		v.g.config.Events(Event{VM: v.request.VM, Name: v.request.Name, Text: text})
	}
}

// interrupts sets the line as the VM's registers have it.
func (v *VGPU) interrupts() {
	v.line(v.pmcIntr() != 0 && v.plain[regs.PMCIntrEnable][0] != 0)
}

func (v *VGPU) line(up bool) {
	if v.asserted != up {
		v.asserted = up
		v.g.signals = append(v.g.signals, signal{v.request.Guest, up})
	}
}

func (v *VGPU) pmcIntr() (w uint32) {
	if v.intr&v.plain[regs.PFIFOIntrEnable][0] != 0 {
		w |= 1 << 8
	}
	if v.graphIntr != 0 {
		w |= 1 << 12
	}
	return w
}
