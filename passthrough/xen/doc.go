// Package xen tells what a Xen host's hypervisor, its store and its control
// domain's kernel say of domains and PCI devices: which domains there are and
// which devices each one has, what pciback holds, whether the IOMMU is on, on
// which NUMA node a device is, with which others it shares its requester id
// (Xen's device groups), what the hypervisor's log says of reserved memory
// and DMA faults, and whether the control domain may use a device now and after
// the next boot.
//
// It changes nothing: devices are bound by passthrough/bind and attached by
// libvirt.
//
// The hypervisor is asked by hypercall through the kernel's privcmd device,
// whose control interface changes from release to release: a release that is
// not known is not asked (ErrVersion), and the program xl answers instead, as
// far as it can.
package xen
