package mediate

import (
	"encoding/binary"

	"github.com/gpuctl/gpuctl/mmio"
	"github.com/gpuctl/gpuctl/mmio/nvc0"
	"github.com/gpuctl/gpuctl/mmio/regs"
)

// Registers of the para-virtual BAR.
const (
	ParaMap      = 0x0 // write 1: use the slots at that address
	ParaSlotsLow = 0x4 // guest-physical address of the slots
	ParaSlotsHi  = 0x8
	ParaCall     = 0xc // write a slot's number: do what is in it

	// ParaBAR is which BAR that is.
	ParaBAR = barParallel
	// ParaSlots is how many slots there are, of 4 KiB each.
	ParaSlots = 64
	// ParaBatch is how many entries a call may have.
	ParaBatch = 128
)

// A slot is: a status, written by the mediator; the number of dwords of calls; the calls.
// A call is a header, [ParaHeader], and what the operation takes.
const (
	ParaNewSpace  = 1 // number
	ParaFreeSpace = 2 // number
	ParaSetSpace  = 3 // channel, space
	ParaBarSpace  = 4 // 0 for BAR1 or 1 for BAR3, space
	ParaTables    = 5 // space, index in the directory, bit 0: of large pages, 1: of small ones, 8-9: they map 128 MiB >> so much
	ParaMapPages  = 6 // space, address, its upper part with bit 31 for large pages, number, so many entries of 2 dwords
	ParaUnmap     = 7 // space, address, upper part as above, number

	ParaDone    = 1
	ParaRefused = 2 // bits 8-31: the index of the call; those before it are done

	maxSpace    = 1 << 16
	maxUnmap    = 4096
	tableCost   = 8           // of a frame, in entries
	callWork    = DefaultWork // entries that the calls of a slot may cost
	slotHeader  = 2           // dwords
	largeVA     = 1 << 31
	callWordsAt = 16
)

// ParaHeader is the header of a call with so many dwords behind it.
func ParaHeader(op, dwords uint32) uint32 { return op | (dwords+1)<<callWordsAt }

func (v *VGPU) readParallel(a mmio.Access) uint64 {
	if v.request.Mode != Para || a.Size != 4 || a.Offset != ParaMap { //check:para-read
		v.refuse(mmio.UnknownRegister, "para-virtual register", a.Offset)
		return uint64(regs.Refused) & mmio.Ones(a.Size)
	}
	if v.mapped {
		return 1
	}
	return 0
}

func (v *VGPU) writeParallel(a mmio.Access) {
	if v.request.Mode != Para || a.Size != 4 { //check:para-mode
		v.refuse(mmio.UnknownRegister, "para-virtual register", a.Offset)
		return
	}
	w := uint32(a.Data)
	switch a.Offset {
	case ParaSlotsLow:
		v.slots, v.mapped = v.slots&^0xfffff|w>>12, false
	case ParaSlotsHi:
		v.slots, v.mapped = v.slots&0xfffff|w<<20, false
	case ParaMap:
		at, all := uint64(v.slots)<<12, v.request.Guest.MemorySize()
		if at >= all || ParaSlots*nvc0.PageSize > all-at { //check:slots-range
			v.refuse(mmio.OutOfPartition, "shared slots", at)
			return
		}
		v.mapped = w == 1
	case ParaCall:
		v.call(w)
	default:
		v.refuse(mmio.UnknownRegister, "para-virtual register", a.Offset)
	}
}

// call does what is in a slot. The slot is read once: what the VM writes there meanwhile counts for
// nothing.
func (v *VGPU) call(slot uint32) {
	v.stats.Hypercall()
	if !v.mapped || slot >= ParaSlots { //check:slot-number
		v.refuse(mmio.BadCall, "slot", uint64(slot))
		return
	}
	at := uint64(v.slots)<<12 + uint64(slot)*nvc0.PageSize
	var page [nvc0.PageSize]byte
	if err := v.request.Guest.ReadMemory(at, page[:]); err != nil {
		v.refuse(mmio.BadCall, "slot that can't be read", at)
		return
	}
	status := v.calls(page[:])
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], status)
	if err := v.request.Guest.WriteMemory(at, b[:]); err != nil {
		v.refuse(mmio.BadCall, "slot that can't be written", at)
	}
}

// calls does the calls of a slot, in order, until one is refused.
func (v *VGPU) calls(page []byte) (status uint32) {
	n := binary.LittleEndian.Uint32(page[4:])
	if n > uint32(len(page)/4-slotHeader) { //check:slot-length
		v.refuse(mmio.BadCall, "length of a slot", uint64(n))
		return ParaRefused
	}
	words := make([]uint32, n)
	for i := range words {
		words[i] = binary.LittleEndian.Uint32(page[4*(slotHeader+i):])
	}
	changed := map[*space]bool{}
	left := callWork
	for index := uint32(0); len(words) > 0; index++ {
		op, length := words[0]&0xff, words[0]>>callWordsAt
		if length == 0 || length > uint32(len(words)) { //check:call-length
			v.refuse(mmio.BadCall, "length of a call", uint64(words[0]))
			status = ParaRefused | index<<8
			break
		}
		cost, ok := v.one(op, words[1:length], changed, left)
		if left -= cost; !ok {
			status = ParaRefused | index<<8
			break
		}
		words = words[length:]
	}
	for s := range changed {
		if v.spaces[s.at] == s {
			v.flush(s) //check:flush-para
		}
	}
	v.stats.Entries(callWork - left)
	if status == 0 {
		status = ParaDone
	}
	return status
}

// one does a call, if it costs no more than what is left.
func (v *VGPU) one(op uint32, args []uint32, changed map[*space]bool, left int) (cost int, ok bool) {
	bad := func(what string, n uint32) (int, bool) {
		v.refuse(mmio.BadCall, what, uint64(n))
		return 0, false
	}
	if n := takes(op); n == 0 || len(args) < n { //check:call-args
		return bad("operation", op)
	}
	number := args[0]
	if op == ParaSetSpace || op == ParaBarSpace {
		number = args[1]
	}
	if op == ParaNewSpace {
		return v.paraNew(number, left)
	}
	s := v.spaces[GuestPA(number)]
	if s == nil { //check:space-number
		return bad("space", number)
	}
	switch op {
	case ParaFreeSpace:
		if s.users > 0 { //check:space-used
			return bad("space that a channel uses", number)
		}
		cost = v.spaceFrames(s) * tableCost
		v.drop(s)
		return cost, true
	case ParaSetSpace:
		if args[0] >= uint32(len(v.channels)) || !v.channels[args[0]].valid { //check:para-channel
			return bad("channel", args[0])
		}
		old := v.channels[args[0]].space
		v.channels[args[0]].space = s
		s.users++
		v.bind(int(args[0]))
		v.leave(old)
		return tableCost, true
	case ParaBarSpace:
		if args[0] > 1 { //check:para-bar
			return bad("BAR", args[0])
		}
		v.bar[args[0]] = 1<<31 | number
		return 1, true
	case ParaTables:
		return v.paraTables(s, args, left)
	}
	changed[s] = true
	return v.paraPages(s, op, args, left)
}

// takes is how many dwords an operation takes at least; 0: there is no such operation.
func takes(op uint32) int {
	switch op {
	case ParaNewSpace, ParaFreeSpace:
		return 1
	case ParaSetSpace, ParaBarSpace:
		return 2
	case ParaTables:
		return 3
	case ParaMapPages, ParaUnmap:
		return 4
	}
	return 0
}

func (v *VGPU) paraNew(number uint32, left int) (cost int, ok bool) {
	if cost = directoryFrames * tableCost; cost > left || number >= maxSpace || v.spaces[GuestPA(number)] != nil { //check:new-space
		v.refuse(mmio.BadCall, "new space", uint64(number))
		return 0, false
	}
	if _, ok := v.newSpace(GuestPA(number)); !ok {
		v.refuse(mmio.OverQuota, "new space", uint64(number))
		return 0, false
	}
	return cost, true
}

func (v *VGPU) spaceFrames(s *space) int {
	n := directoryFrames
	for _, t := range s.tables {
		n += t.frames()
	}
	return n
}

func (t tables) frames() (n int) {
	if t.large != 0 {
		n += t.largeFrames()
	}
	if t.small != 0 {
		n += t.smallFrames()
	}
	return n
}

// paraTables makes an entry of a directory refer to empty tables.
func (v *VGPU) paraTables(s *space, args []uint32, left int) (cost int, ok bool) {
	want := tables{size: uint8(args[2] >> 8 & 3)}
	if args[2]&1 != 0 {
		want.large = 1
	}
	if args[2]&2 != 0 {
		want.small = 1
	}
	have := s.tables[int(args[1]%nvc0.DirectoryLen)]
	if cost = (have.frames() + want.frames() + 1) * tableCost; cost > left || args[1] >= nvc0.DirectoryLen { //check:directory-index
		v.refuse(mmio.BadCall, "entry of a page directory", uint64(args[1]))
		return 0, false
	}
	if !v.setTables(s, int(args[1]), want) {
		return cost, false
	}
	return cost, true
}

// paraPages maps or unmaps consecutive pages of one table. Each entry is translated as one of a VM's table is; one that
// can't be ends the call.
func (v *VGPU) paraPages(s *space, op uint32, args []uint32, left int) (cost int, ok bool) {
	bad := func(what string, n uint64) (int, bool) {
		v.refuse(mmio.BadCall, what, n)
		return cost, false
	}
	va := uint64(args[1]) | uint64(args[2]&0xff)<<32
	large := args[2]&largeVA != 0
	n := int(min(args[3], maxUnmap+1))
	most := maxUnmap
	if op == ParaMapPages {
		most = ParaBatch
	}
	if cost = n; n > most || n > left { //check:batch
		return bad("number of pages", uint64(args[3]))
	}
	if op == ParaMapPages && len(args) < 4+2*n { //check:batch-args
		return bad("entries that are missing, of", uint64(n))
	}
	t := s.tables[int(va/nvc0.TableSpan)]
	to, size := t.small, uint64(nvc0.PageSize)
	if large {
		to, size = t.large, nvc0.LargePage
	}
	first := int(va % nvc0.TableSpan / size)
	if entries := int(nvc0.TableSpan / size >> t.size); to == 0 || va%size != 0 || first+n > entries { //check:table-end
		return bad("address without a table", va)
	}
	for i := range n {
		var e nvc0.PTE
		if op == ParaMapPages {
			raw := nvc0.PTE(args[4+2*i]) | nvc0.PTE(args[5+2*i])<<32
			if e = v.translate(raw, large); e == 0 && raw.Present() {
				return cost, false
			}
		}
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], uint64(e))
		v.g.hw.Store(nvc0.Mediator, to+HostPA(8*(first+i)), b[:])
	}
	return cost, true
}
