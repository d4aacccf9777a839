// Package pci finds the PCI devices that gpuctl manages: display controllers and
// processing accelerators. It reads everything that decides whether and how a device can
// be given to a VM: all functions of its card, virtual functions, bound driver, BARs,
// link, NUMA node, reset methods, and the isolation group, which contains what can only
// be given away together.
//
// It reads files of sysfs below a root that the caller provides. It maps no BAR and does
// not wake devices on purpose. Devices may vanish meanwhile; what cannot be read is
// empty.
//
// Isolation comes from the kernel's IOMMU groups. If there are none, as in a Xen dom0,
// where the hypervisor controls the IOMMU, it is derived from the topology and the ACS
// capabilities of the bridges. The rules are those of Linux, but without its list of
// chips that isolate without ACS, and considering all ports of a switch. So a group may
// be larger than in Linux, but never smaller.
package pci
