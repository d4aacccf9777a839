// Package mmio is the third way to give a VM a GPU: the VM's accesses to the
// registers and apertures of a PCI function are trapped, and a mediator decides
// what each of them does to the one real device.
//
// Here live what transports and mediators agree on: an [Access], the [Device]
// that serves it, the [Function] that a VM sees, the [Guest] that a transport
// lends to a device, the [Router] that refuses what is malformed, and the [Stats]
// that count exits in each phase.
//
// Not here: what registers there are (mmio/regs), a device (mmio/nvc0), the
// mediation itself (mmio/mediate), and the transports that get accesses out of a
// hypervisor.
//
// It serves devices and software GPUs whose registers the host may own, and
// research into isolation. A GPU whose firmware owns channels and page tables
// is served by passthrough and virtual functions instead.
package mmio
