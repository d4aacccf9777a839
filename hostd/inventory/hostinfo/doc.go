// Package hostinfo reads the properties of a host: its hypervisor, processors, memory,
// NUMA nodes, boot id and network interfaces, and its load and free memory. It reads
// files below the root that it is given, and asks the kernel for network interfaces
// through an interface of its own.
//
// In a Xen dom0, the kernel shows the processors and the memory of dom0, not of the
// computer.
//
// # Network interfaces
//
// These interfaces, which traffic of this host can use, are listed:
//
//   - a physical one that is up, with or without an address;
//   - a virtual one (bond, bridge, VLAN, veth, …) that is up and has an address
//     other than a link-local one: a host in a network namespace has only
//     a veth.
//
// The loopback, interfaces that are down, and the host's ends of VMs' interfaces (tap,
// vif), virtual functions and ports of bridges without an address are not listed. If a
// virtual interface has no speed or NUMA node of its own, it gets that of the fastest
// physical interface below it.
package hostinfo
