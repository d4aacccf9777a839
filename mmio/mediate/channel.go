package mediate

import (
	"encoding/binary"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
)

const (
	instPage   = 0x0fffffff // bits of an instance register that are the page
	instTarget = 3 << 28
)

// setChannel is a write of CHAN_INST: it binds a channel to an instance block, or
// unbinds it.
func (v *VGPU) setChannel(i, w uint32) {
	if i >= uint32(len(v.channels)) { //check:channel-number
		v.refuse(mmio.BadChannel, "channel", uint64(i))
		return
	}
	c := &v.channels[i]
	if w&nvc0.ChannelValid == 0 {
		v.unbind(c)
		c.value = w
		return
	}
	if w&instTarget != 0 { //check:instance-target
		v.refuse(mmio.BadTarget, "instance block of a channel", uint64(w))
		return
	}
	inst := GuestPA(w&instPage) << 12
	if _, ok := v.host(inst, nvc0.PageSize); !ok { //check:instance-range
		v.refuse(mmio.OutOfPartition, "instance block of a channel", uint64(inst))
		return
	}
	if c.valid && c.inst != inst {
		v.unbind(c)
	}
	if c.shadow == 0 && !v.allocate(c) {
		v.refuse(mmio.OverQuota, "instance block of channel", uint64(i))
		return
	}
	if c.dead { // the hardware forgets what it was about
		v.g.hw.WriteRegister(nvc0.RegChannel+8*uint32(v.first)+8*i, 0)
	}
	if c.dead || !c.valid {
		c.put = 0
	}
	c.value, c.inst, c.valid, c.dead = w, inst, true, false
	v.bind(int(i))
	v.g.hw.WriteRegister(nvc0.RegChannel+8*uint32(v.first)+8*i, nvc0.ChannelValid|1<<30|uint32(c.shadow>>12))
}

// allocate takes the frames of a channel.
func (v *VGPU) allocate(c *channel) bool {
	var ok bool
	if c.shadow, ok = v.frames(1, nvc0.Table); !ok {
		return false
	}
	if c.userd, ok = v.frames(1, nvc0.Userd); !ok {
		v.release(c.shadow, 1, nvc0.Table)
		c.shadow = 0
		return false
	}
	return true
}

// unbind takes a channel's instance block and commands away, which also takes it off the
// engines, and gives its frames back.
func (v *VGPU) unbind(c *channel) {
	if c.shadow == 0 {
		return
	}
	i := v.index(c)
	v.g.hw.WriteRegister(nvc0.RegChannel+8*uint32(v.first+i), 0) //check:scrub-channel
	v.forget(i)
	v.leave(c.space)
	v.release(c.shadow, 1, nvc0.Table)
	v.release(c.userd, 1, nvc0.Userd)
	*c = channel{listed: c.listed, context: c.context}
}

func (v *VGPU) index(c *channel) int {
	for i := range v.channels {
		if &v.channels[i] == c {
			return i
		}
	}
	return -1
}

// template is what the mediator writes into an instance block for itself: what a
// driver for this hardware always writes. Nothing of the VM's is copied but the
// few fields below.
var template = [...][2]uint32{ //nolint:gochecknoglobals // a table
	{0x010, 0x0000face},
	{0x030, 0xfffff902},
	{0x054, 2},
	{0x084, 0x20400000},
	{0x094, 0x30000001},
	{0x09c, 0x100},
	{0x0a4, 0x1f1f1f1f},
	{0x0a8, 0x1f1f1f1f},
	{0x0ac, 0x1f},
	{0x0b8, 0xf8000000},
	{0x0f8, 0x10003080},
	{0x0fc, 0x10000010},
}

// bind makes the shadow of a channel's instance block anew: the template, the ring's
// virtual address, and the mediator's own USERD page and page directory.
func (v *VGPU) bind(i int) {
	c := &v.channels[i]
	var from [0x210]byte
	v.load(c.inst, from[:])
	word := func(off int) uint32 { return binary.LittleEndian.Uint32(from[off:]) }
	var to [nvc0.PageSize]byte
	put := func(off int, w uint32) { binary.LittleEndian.PutUint32(to[off:], w) }
	for _, t := range template {
		put(int(t[0]), t[1])
	}
	put(nvc0.InstUserd, uint32(c.userd))
	put(nvc0.InstUserdHigh, uint32(c.userd>>32))
	put(nvc0.InstRing, word(nvc0.InstRing)&^7)
	put(nvc0.InstRingHigh, word(nvc0.InstRingHigh)&0xff|min(word(nvc0.InstRingHigh)>>16&0x1f, nvc0.MaxRingOrder)<<16)
	put(nvc0.InstLimit, word(nvc0.InstLimit))
	put(nvc0.InstLimitHigh, word(nvc0.InstLimitHigh)&0xff)
	old := c.space
	if v.request.Mode != Para {
		c.space = v.directory(word(nvc0.InstDirectory), word(nvc0.InstDirHigh))
		if c.space != nil {
			c.space.users++
		}
	}
	if c.space != nil {
		put(nvc0.InstDirectory, uint32(c.space.shadow)|1)
		put(nvc0.InstDirHigh, uint32(c.space.shadow>>32))
	} else { // a page directory without entries: everything faults
		put(nvc0.InstLimit, 0)
		put(nvc0.InstLimitHigh, 0)
	}
	v.g.hw.Store(nvc0.Mediator, c.shadow, to[:])
	v.g.hw.WriteRegister(nvc0.RegKick, uint32(v.first+i)) // so that it is loaded anew, before the old directory is gone
	if v.request.Mode != Para {
		v.leave(old)
	}
}

// directory finds the address space of a page directory, or makes it; nil if there can
// be none.
func (v *VGPU) directory(low, high uint32) *space {
	if low == 0 && high == 0 {
		return nil
	}
	if low&3 != 1 && low&3 != 0 { //check:directory-target
		v.refuse(mmio.BadTarget, "page directory", uint64(low))
		return nil
	}
	at := GuestPA(low&^0xfff) | GuestPA(high&0xff)<<32
	if _, ok := v.host(at, nvc0.DirectorySize); !ok { //check:directory-range
		v.refuse(mmio.OutOfPartition, "page directory", uint64(at))
		return nil
	}
	if s := v.spaces[at]; s != nil {
		return s
	}
	s, ok := v.newSpace(at)
	if !ok {
		v.refuse(mmio.OverQuota, "page directory", uint64(at))
		return nil
	}
	s.dirty = true
	if v.request.Mode == Eager {
		v.scan(s)
	}
	return s
}

// leave ends a channel's use of a space. One of the VM's tables that nobody uses is dropped.
func (v *VGPU) leave(s *space) {
	if s == nil {
		return
	}
	if s.users--; s.users == 0 && v.request.Mode != Para {
		v.drop(s)
	}
}

// setPlaylist is a write of PLAYLIST_LEN: it reads the VM's playlist.
func (v *VGPU) setPlaylist(w uint32) {
	n := w & nvc0.PlaylistLimit
	if v.playlist&instTarget != 0 { //check:playlist-target
		v.refuse(mmio.BadTarget, "playlist", uint64(v.playlist))
		return
	}
	if n > nvc0.Channels {
		v.refuse(mmio.OverQuota, "entries of a playlist", uint64(n))
		return
	}
	list := make([]byte, 8*n)
	if at := GuestPA(v.playlist&instPage) << 12; n > 0 && !v.load(at, list) {
		v.refuse(mmio.OutOfPartition, "playlist", uint64(at))
		return
	}
	for i := range v.channels {
		v.channels[i].listed = false
	}
	for ; len(list) > 0; list = list[8:] {
		i := binary.LittleEndian.Uint32(list)
		if i >= uint32(len(v.channels)) { //check:playlist-channel
			v.refuse(mmio.BadChannel, "playlist's channel", uint64(i))
			continue
		}
		v.channels[i].listed = true
	}
	v.g.writePlaylist()
	v.listIntr |= 1 << 28
	v.intr |= 1 << 30
	v.interrupts()
	for i := range v.channels {
		if c := &v.channels[i]; c.listed && c.unlist {
			c.unlist = false
			v.submit(i, c.put)
		}
	}
}

// writePlaylist makes the hardware's list of all VMs' channels anew, in the other half
// of its memory, so that the hardware never sees one that is half written.
func (g *GPU) writePlaylist() {
	var list [nvc0.PageSize]byte
	n := 0
	for p := range nvc0.Channels { // in the order of channels, whatever the order of VMs is
		for _, v := range g.vgpus {
			if i := p - v.first; i >= 0 && i < len(v.channels) && v.channels[i].listed && v.channels[i].valid {
				binary.LittleEndian.PutUint32(list[8*n:], uint32(p))
				binary.LittleEndian.PutUint32(list[8*n+4:], 4)
				n++
			}
		}
	}
	g.half = 1 - g.half
	g.hw.Store(nvc0.Mediator, g.listed[g.half], list[:8*n])
	g.hw.WriteRegister(nvc0.RegPlaylistAddress, uint32(g.listed[g.half]>>12))
	g.hw.WriteRegister(nvc0.RegPlaylistLength, uint32(n)|0x1f<<20)
}

// kick takes a channel off the GPU. If it is still listed it goes on at once, as on
// hardware.
func (v *VGPU) kick(w uint32) {
	if w >= uint32(len(v.channels)) { //check:kick-channel
		v.refuse(mmio.BadChannel, "kicked channel", uint64(w))
		return
	}
	v.g.hw.WriteRegister(nvc0.RegKick, uint32(v.first)+w)
	v.kicked = w
}

// bindContext is the command BIND of CTXCTL: a use of the VM's tables.
func (v *VGPU) bindContext(command uint32) {
	if command != 3 {
		v.refuse(mmio.BadCommand, "command of CTXCTL", uint64(command))
		return
	}
	inst := GuestPA(v.contextData&instPage) << 12
	for i := range v.channels {
		if c := &v.channels[i]; c.valid && c.inst == inst && v.contextData>>31 == 1 {
			v.contextInst = v.contextData & instPage
			if c.space != nil && c.space.dirty {
				v.scan(c.space)
			}
			return
		}
	}
	v.refuse(mmio.BadChannel, "instance block that no channel has", uint64(inst))
}
