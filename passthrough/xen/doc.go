// Package xen reads what a Xen host's hypervisor, xenstore and its control domain's
// kernel know about domains and PCI devices: the domains and their devices, what pciback
// has, whether the IOMMU is enabled, the NUMA node of a device, the devices with which it
// shares its requester id (Xen's device groups), what the hypervisor's log says about
// reserved memory and DMA faults, and whether the control domain may use a device now and
// after the next boot.
//
// It changes no drivers: passthrough/bind binds devices, and libvirt attaches them.
//
// The hypervisor is called by hypercall through the kernel's privcmd device. Its control
// interface changes from release to release. An unknown release is not called
// (ErrVersion); then the program xl is used instead, as far as it can provide the same.
package xen
