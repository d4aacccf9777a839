package mediate

import (
	"encoding/binary"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/regs"
)

// The BARs, and their sizes.
const (
	barRegisters = 0
	barData      = 1
	barControl   = 3
	barParallel  = 5

	barDataSize    = 128 << 20
	barControlSize = 64 << 20
)

// Read implements [mmio.Device].
func (g *GPU) Read(a mmio.Access) uint64 {
	defer g.lock()()
	v := g.vgpus[a.VM]
	if v == nil {
		return mmio.Ones(a.Size)
	}
	if r := malformed(a); r != 0 {
		v.refuse(r, "read at", a.Offset)
		return mmio.Ones(a.Size)
	}
	v.enter()
	switch a.BAR {
	case barRegisters:
		if a.Size == 8 && !v.inAperture(a.Offset) {
			return uint64(v.register(uint32(a.Offset), 4)) | uint64(v.register(uint32(a.Offset)+4, 4))<<32
		}
		if v.inAperture(a.Offset) {
			return v.readAperture(a)
		}
		return uint64(v.register(uint32(a.Offset), a.Size))
	case barData:
		if i, off, ok := v.userdPage(a.Offset); ok {
			return v.readUserd(i, off, a.Size)
		}
		return v.readMapped(0, a)
	case barControl:
		return v.readMapped(1, a)
	default:
		return v.readParallel(a)
	}
}

// Write implements [mmio.Device].
func (g *GPU) Write(a mmio.Access) {
	defer g.lock()()
	v := g.vgpus[a.VM]
	if v == nil {
		return
	}
	if r := malformed(a); r != 0 {
		v.refuse(r, "write at", a.Offset)
		return
	}
	v.enter()
	switch a.BAR {
	case barRegisters:
		switch {
		case v.inAperture(a.Offset):
			v.writeAperture(a)
		case a.Size == 8:
			v.setRegister(uint32(a.Offset), uint32(a.Data), 4)
			v.setRegister(uint32(a.Offset)+4, uint32(a.Data>>32), 4)
		default:
			v.setRegister(uint32(a.Offset), uint32(a.Data), a.Size)
		}
	case barData:
		if i, off, ok := v.userdPage(a.Offset); ok {
			v.writeUserd(i, off, a)
			return
		}
		v.writeMapped(0, a)
	case barControl:
		v.writeMapped(1, a)
	default:
		v.writeParallel(a)
	}
}

// malformed is what a router refuses before; a mediator does not rely on there being one.
func malformed(a mmio.Access) mmio.Reason {
	size := uint64(0)
	switch a.BAR {
	case barRegisters:
		size = regs.Size
	case barData:
		size = barDataSize
	case barControl:
		size = barControlSize
	case barParallel:
		size = nvc0.PageSize
	}
	switch {
	case size == 0:
		return mmio.NoBAR
	case a.Size != 1 && a.Size != 2 && a.Size != 4 && a.Size != 8: //check:size
		return mmio.BadSize
	case a.Offset%uint64(a.Size) != 0: //check:aligned
		return mmio.Unaligned
	case a.Offset >= size: //check:bar-end
		return mmio.OutOfBAR
	}
	return 0
}

// enter is at the start of each exit: what the hardware has done meanwhile, and a part of
// what earlier exits left.
func (v *VGPU) enter() {
	v.left = v.g.config.Work
	if v.g.running != nil {
		v.g.pump(pumpExit)
	}
	if v.unread() {
		v.work()
	}
}

func (v *VGPU) inAperture(off uint64) bool { return v.g.table.At(uint32(off)) == regs.Aperture }

// behind is where the PRAMIN window has an offset of BAR0.
func (v *VGPU) behind(off uint64) GuestPA {
	return GuestPA(v.window&0x00ffffff)<<16 + GuestPA(off-uint64(v.g.table.Row(regs.Aperture).Offset))
}

func (v *VGPU) readAperture(a mmio.Access) uint64 {
	var b [8]byte
	if at := v.behind(a.Offset); !v.load(at, b[:a.Size]) {
		v.refuse(mmio.OutOfPartition, "read through PRAMIN", uint64(at))
		return uint64(regs.Refused) & mmio.Ones(a.Size)
	}
	return binary.LittleEndian.Uint64(b[:])
}

func (v *VGPU) writeAperture(a mmio.Access) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], a.Data)
	if at := v.behind(a.Offset); !v.store(at, b[:a.Size]) {
		v.refuse(mmio.OutOfPartition, "write through PRAMIN", uint64(at))
	}
}

// admit finds the row of an access, or refuses it: what the table does not have, what it
// denies, and a size that is not the register's.
func (v *VGPU) admit(off uint32, size uint8, write bool) *regs.Register {
	row := v.g.table.Row(v.g.table.At(off))
	switch {
	case row.ID == regs.None:
		v.refuse(mmio.UnknownRegister, "register", uint64(off))
	case row.Class == regs.Deny: //check:deny
		v.refuse(mmio.DeniedRegister, row.Name+" at", uint64(off))
	case size != 4: //check:register-size
		v.refuse(mmio.BadSize, row.Name+" at", uint64(off))
	case write && !row.Write: //check:read-only
		if row.Class != regs.Const {
			v.refuse(mmio.ReadOnly, row.Name+" at", uint64(off))
		}
	default:
		return row
	}
	return nil
}

// register reads one. All that a VM can learn of the hardware is here.
func (v *VGPU) register(off uint32, size uint8) uint32 {
	row := v.admit(off, size, false)
	if row == nil {
		return regs.Refused
	}
	i := row.Index(off)
	switch row.ID {
	case regs.PMCID:
		return 0x0c0000a3
	case regs.Units, regs.Controllers:
		return 1
	case regs.MemorySize, regs.MemoryPart:
		return uint32(v.size >> 20)
	case regs.PMCIntr:
		return v.pmcIntr()
	case regs.PFIFOIntr:
		return v.intr
	case regs.GraphIntr:
		return v.graphIntr
	case regs.FaultSource:
		return v.source
	case regs.PlaylistIntr:
		return v.listIntr
	case regs.FaultInfo:
		return v.faults[i%128]
	case regs.Window:
		return v.window
	case regs.BAR1Instance:
		return v.bar[0]
	case regs.BAR3Instance:
		return v.bar[1]
	case regs.PlaylistAddress:
		return v.playlist
	case regs.Kick:
		return v.kicked
	case regs.ChannelInstance, regs.ChannelState:
		return v.channelRegister(row.ID, i)
	case regs.TimeLow:
		return uint32(v.g.now() - v.epoch)
	case regs.TimeHigh:
		return uint32((v.g.now() - v.epoch) >> 32)
	case regs.TLBStatus:
		if v.unread() {
			return 0
		}
		return 0x00ff8000
	case regs.TLBSpace:
		return v.tlbSpace
	case regs.GraphStatus:
		if v.atWork() {
			return 1
		}
	case regs.ContextData:
		return v.contextData
	case regs.ContextStatus:
		return 1
	case regs.ContextCurrent:
		return v.contextInst
	case regs.Phase:
		return uint32(v.stats.Phase())
	default:
		if p := v.plain[row.ID]; int(i) < len(p) {
			return p[i]
		}
	}
	return 0 // triggers, and what is never busy
}

// atWork reports whether a command of the VM's waits or runs.
func (v *VGPU) atWork() bool {
	return len(v.waiting)+len(v.ready) > 0 || v.g.running != nil && v.g.running.v == v
}

func (v *VGPU) channelRegister(id regs.ID, i uint32) uint32 {
	if i >= uint32(len(v.channels)) {
		v.refuse(mmio.BadChannel, "read of channel", uint64(i))
		return regs.Refused
	}
	c := &v.channels[i]
	if id == regs.ChannelInstance {
		return c.value
	}
	w := c.context &^ (1<<12 | 1<<28)
	if r := v.g.running; r != nil && r.v == v && r.channel == int(i) {
		w |= 1 << 12
	}
	return w
}

// setRegister writes one.
func (v *VGPU) setRegister(off, w uint32, size uint8) {
	row := v.admit(off, size, true)
	if row == nil {
		return
	}
	i := row.Index(off)
	switch row.ID {
	case regs.Phase:
		v.stats.SetPhase(mmio.Phase(min(w, 255)))
	case regs.Window:
		if w&^0x00ffffff != 0 { //check:window-target
			v.refuse(mmio.BadTarget, "PRAMIN window", uint64(w))
			return
		}
		v.window = w
	case regs.BAR1Instance, regs.BAR3Instance:
		if w&instTarget != 0 { //check:bar-target
			v.refuse(mmio.BadTarget, "instance block of a BAR", uint64(w))
			return
		}
		if row.ID == regs.BAR1Instance {
			v.bar[0] = w
		} else {
			v.bar[1] = w
		}
	case regs.PlaylistAddress:
		v.playlist = w
	case regs.PlaylistLength:
		v.setPlaylist(w)
	case regs.Kick:
		v.kick(w)
	case regs.ChannelInstance:
		v.setChannel(i, w)
	case regs.ChannelState:
		if i >= uint32(len(v.channels)) {
			v.refuse(mmio.BadChannel, "write of channel", uint64(i))
			return
		}
		v.channels[i].context = w
	case regs.TLBSpace:
		v.tlbSpace = w
	case regs.TLBTrigger:
		v.flushed(w)
	case regs.ContextData:
		v.contextData = w
	case regs.ContextCommand:
		v.bindContext(w)
	case regs.PFIFOIntr:
		v.intr &^= w
	case regs.GraphIntr:
		v.graphIntr &^= w
	case regs.FaultSource:
		v.source &^= w
	case regs.PlaylistIntr:
		v.listIntr &^= w
	default:
		if p := v.plain[row.ID]; int(i) < len(p) {
			p[i] = w
		}
	}
	if row.Class == regs.Virtual {
		v.interrupts()
	}
}
