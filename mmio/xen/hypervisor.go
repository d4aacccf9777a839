package xen

import "github.com/gpuctl/gpuctl/internal/vchan"

// Hypervisor is what a server needs of Xen. Linux implements it, and xentest for tests.
// Errors wrap those of the kernel.
type Hypervisor interface {
	// DeviceOp makes a dm_op hypercall for a domain. Xen writes results into op. more is a second
	// buffer, for an operation that takes one.
	DeviceOp(domain uint16, op, more []byte) error
	// MapResource maps frames of a resource of a domain.
	MapResource(domain uint16, kind, id, first uint32, frames int) (Memory, error)
	// MapForeign maps pages of a domain's memory by their guest frame numbers. All of
	// them exist, or there is an error.
	MapForeign(domain uint16, frames []uint64, writable bool) (Memory, error)
	// BindInterdomain binds to an event channel of a domain. What happened before is
	// told by an event.
	BindInterdomain(domain uint16, port uint32) (vchan.Port, error)
}

// Memory is mapped memory.
type Memory interface {
	// Bytes returns the memory. It must not be accessed after Close.
	Bytes() []byte
	Close() error
}
