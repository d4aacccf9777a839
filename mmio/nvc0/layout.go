package nvc0

// HostPA is an address in the GPU's own memory. A VM's idea of one is another type.
type HostPA uint64

// Sizes.
const (
	PageSize      = 4096
	LargePage     = 128 << 10
	TableSpan     = 128 << 20 // what a page directory's entry maps
	DirectoryLen  = 8192      // entries of a page directory
	DirectorySize = DirectoryLen * 8
	SmallEntries  = TableSpan / PageSize  // of a whole table of small pages
	LargeEntries  = TableSpan / LargePage // of a whole table of large pages
	Channels      = 128
	AddressBits   = 40
)

// Targets of page table entries, instance blocks and lists.
const (
	TargetVRAM       = 0
	TargetSystem     = 2
	TargetSystemFree = 3 // not snooped
)

// PTE is an entry of a page table.
type PTE uint64

// MakePTE returns an entry for a page at an address.
func MakePTE(addr uint64, target uint8, readOnly bool) PTE {
	e := PTE(1 | addr>>12<<4&0xfffffff0 | uint64(target&3)<<33)
	if readOnly {
		e |= 4
	}
	return e
}

// Present reports whether the entry maps a page.
func (e PTE) Present() bool { return e&1 != 0 }

// ReadOnly reports whether the page may not be written.
func (e PTE) ReadOnly() bool { return e&4 != 0 }

// Addr is where the page is.
func (e PTE) Addr() uint64 { return uint64(e) >> 4 & 0x0fffffff << 12 }

// Target is what kind of memory it is in.
func (e PTE) Target() uint8 { return uint8(e >> 33 & 3) }

// Kind is how the page is laid out.
func (e PTE) Kind() uint8 { return uint8(e >> 36) }

// PDE is an entry of a page directory: a table of large pages, of small ones, or both.
type PDE uint64

// Targets of a PDE's tables.
const (
	TableNone = 0
	TableVRAM = 1
)

// MakePDE returns an entry with the tables at these addresses, 0 for none, which cover
// 128 MiB >> size each.
func MakePDE(large, small HostPA, size uint8) PDE {
	e := PDE(size&3) << 2
	if large != 0 {
		e |= TableVRAM | PDE(large>>12)<<4&0xfffffff0
	}
	if small != 0 {
		e |= TableVRAM<<32 | PDE(small>>12)<<36
	}
	return e
}

// Large returns the table of large pages.
func (e PDE) Large() (addr uint64, target uint8) {
	return uint64(e) >> 4 & 0x0fffffff << 12, uint8(e & 3)
}

// Small returns the table of small pages.
func (e PDE) Small() (addr uint64, target uint8) { return uint64(e) >> 36 << 12, uint8(e >> 32 & 3) }

// Span is how many bytes of addresses the tables map.
func (e PDE) Span() uint64 { return TableSpan >> (e >> 2 & 3) }

// Offsets in an instance block (RAMIN, with RAMFC at its start).
const (
	InstUserd     = 0x008 // low: bits 0-1 target
	InstUserdHigh = 0x00c
	InstRing      = 0x048 // address of the ring of IB entries
	InstRingHigh  = 0x04c // bits 0-7 address, 16-20 order of the number of entries
	InstDirectory = 0x200 // address of the page directory, bits 0-1 target
	InstDirHigh   = 0x204
	InstLimit     = 0x208 // the last address
	InstLimitHigh = 0x20c
)

// Offsets in a USERD page.
const (
	UserdGet   = 0x44
	UserdRef   = 0x48
	UserdIBGet = 0x88
	UserdIBPut = 0x8c // the doorbell
)

// MaxRingOrder is the largest order of a ring.
const MaxRingOrder = 12

// IBEntry returns an entry of a ring: so many dwords of methods at an address.
func IBEntry(va uint64, dwords uint32) uint64 {
	return va&0xff_fffffffc | uint64(dwords&0x1fffff)<<42
}

// Incr is the header of n data words for methods that follow each other.
func Incr(subchannel, method, n uint32) uint32 {
	return 1<<29 | n&0x1fff<<16 | subchannel&7<<13 | method>>2&0xfff
}

// NonIncr is the header of n data words for the same method.
func NonIncr(subchannel, method, n uint32) uint32 {
	return 3<<29 | n&0x1fff<<16 | subchannel&7<<13 | method>>2&0xfff
}

// Inline is a header with 13 bits of data in it.
func Inline(subchannel, method, data uint32) uint32 {
	return 4<<29 | data&0x1fff<<16 | subchannel&7<<13 | method>>2&0xfff
}

// Classes.
const (
	ClassM2MF    = 0x9039
	ClassCompute = 0x90c0
)

// Methods of every subchannel.
const (
	MethodObject        = 0x00
	MethodSemaphoreHigh = 0x10
	MethodSemaphoreLow  = 0x14
	MethodSemaphoreSeq  = 0x18
	MethodSemaphore     = 0x1c // what to do
	MethodNotify        = 0x20
	MethodRef           = 0x50

	SemaphoreAcquire     = 1
	SemaphoreRelease     = 2
	SemaphoreAcquireMore = 4 // wait until it is as much or more
)

// Methods of M2MF.
const (
	M2MFOutHigh   = 0x238
	M2MFOutLow    = 0x23c
	M2MFExec      = 0x300
	M2MFData      = 0x304
	M2MFInHigh    = 0x30c
	M2MFInLow     = 0x310
	M2MFPitchIn   = 0x314
	M2MFPitchOut  = 0x318
	M2MFLength    = 0x31c
	M2MFCount     = 0x320
	M2MFQueryHigh = 0x32c
	M2MFQueryLow  = 0x330
	M2MFQuerySeq  = 0x334

	M2MFPush = 1 // in Exec: the data come by M2MFData
)

// Methods of the compute class.
const (
	ComputeGridYX    = 0x238
	ComputeGridZ     = 0x23c
	ComputeLaunch    = 0x368
	ComputeBlockYX   = 0x3ac
	ComputeBlockZ    = 0x3b0
	ComputeCodeHigh  = 0x1608
	ComputeCodeLow   = 0x160c
	ComputeQueryHigh = 0x1b00
	ComputeQueryLow  = 0x1b04
	ComputeQuerySeq  = 0x1b08
	ComputeQueryGet  = 0x1b0c
	ComputeParamHigh = 0x2384
	ComputeParamLow  = 0x2388
)

// Registers of the hardware that a mediator uses. All others of BAR0 it makes up.
const (
	RegPlaylistAddress = 0x002270
	RegPlaylistLength  = 0x002274
	RegKick            = 0x002634
	RegChannel         = 0x003000 // 8 bytes each: instance, state
	RegTLBSpace        = 0x100cb8
	RegTLBTrigger      = 0x100cbc
	RegGraphStatus     = 0x400700

	ChannelValid  = 1 << 31
	TLBFlush      = 1 << 31
	TLBAllSpaces  = 2
	PlaylistLimit = 0xfff // entries
)
