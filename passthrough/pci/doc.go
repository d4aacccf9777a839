// Package pci finds the PCI devices that gpuctl manages, display controllers
// and processing accelerators, with everything that decides whether and how
// one can be given away: all functions of its card, virtual functions, bound
// driver, BARs, link, NUMA node, ways to reset it, and the isolation group,
// which is what can only be given away together.
//
// It reads sysfs below an injected root, and nothing but files: it maps no
// BAR and wakes no device on purpose. Devices may vanish while it looks; what
// cannot be read stays empty.
//
// Isolation comes from the kernel's IOMMU groups. Where there are none, as in
// a Xen dom0, where the hypervisor owns the IOMMU, it is derived from the
// topology and the ACS capabilities of the bridges by the rules that Linux
// follows, without its list of chips that isolate though they do not say so
// and with all ports of a switch in mind: a group may be larger than Linux
// would make it, never smaller.
package pci
