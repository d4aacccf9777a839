package mmio

import "fmt"

// VM is the number of a VM at a [Router] and its devices. A transport chooses it
// when it attaches the VM; Xen's domain id will do. It is no identity: who a
// number belongs to is known by who attached it.
type VM uint32

// MaxBARs is how many base address registers a PCI function has.
const MaxBARs = 6

// Access is one load or store of a VM, as the hypervisor trapped it.
type Access struct {
	VM     VM
	BAR    uint8  // which base address register
	Size   uint8  // bytes: 1, 2, 4 or 8
	Write  bool   // a store
	Offset uint64 // from the start of the BAR
	Data   uint64 // what a store stores, in the lowest Size bytes
}

func (a Access) String() string {
	if a.Write {
		return fmt.Sprintf("VM %d: write of %d bytes, BAR%d+%#x := %#x", a.VM, a.Size, a.BAR, a.Offset, a.Data)
	}
	return fmt.Sprintf("VM %d: read of %d bytes, BAR%d+%#x", a.VM, a.Size, a.BAR, a.Offset)
}

// Ones is what a read of so many bytes gets where nothing answers, as on PCI.
func Ones(size uint8) uint64 {
	if size == 0 || size >= 8 {
		return ^uint64(0)
	}
	return 1<<(8*size) - 1
}

// Device serves the accesses of VMs. Neither method fails: what is not allowed is
// refused as hardware does it, a read by a fixed value and a write by nothing, and
// is counted. Both may be called by several goroutines, one for each vCPU,
// and return soon: the vCPU stands still meanwhile.
//
// A repeated access (Xen's count, "rep movs") is as many calls, in the order of the
// guest's direction flag.
type Device interface {
	Read(a Access) uint64
	Write(a Access)
}

// Resetter is a [Device] that can be reset for one VM, as by a function-level
// reset or by the VM's own restart. It returns when the reset is done; accesses of that VM are refused meanwhile.
type Resetter interface {
	Reset(vm VM)
}

// Window is one base address register of a [Function].
type Window struct {
	Size         uint64 // bytes, a power of two; 0: there is none
	Prefetchable bool
	Wide         bool // 64 bits: the next one is its upper half and has Size 0
}

// Function is the PCI function that a VM sees. A transport makes the
// configuration space of it.
type Function struct {
	Vendor, Device       uint16
	Subvendor, Subsystem uint16
	Revision             uint8
	Class                uint32 // 24 bits: class, subclass, interface
	BARs                 [MaxBARs]Window
	MSI                  bool // has the capability, with one vector
}

// Guest is what a transport lends to a device: the VM's memory and a way to
// interrupt it. Addresses are guest-physical and hostile: an implementation checks them, and never
// maps more than it is asked for. Methods may be called by several goroutines.
type Guest interface {
	// ReadMemory fills p from guest-physical memory. An error says that not all of
	// it is memory.
	ReadMemory(gpa uint64, p []byte) error
	// WriteMemory is likewise.
	WriteMemory(gpa uint64, p []byte) error
	// MemorySize is the end of the guest's memory, in bytes.
	MemorySize() uint64
	// Interrupt sends the function's interrupt: MSI, or INTx to level up. With
	// up false it takes INTx back; an MSI needs no such thing. It does not block.
	Interrupt(up bool)
}
