// Package hostinfo says what a host is: its hypervisor, processors, memory,
// NUMA nodes, boot and network interfaces, and, for what changes often, its
// load and free memory. It reads files below an injected root, and asks the
// kernel for network interfaces through an interface of its own.
//
// In a Xen dom0 the kernel shows the processors and the memory of dom0, not of
// the machine.
//
// # Network interfaces
//
// Those are listed that traffic of this host can go through:
//
//   - a physical one that is up, with or without an address;
//   - a virtual one (bond, bridge, VLAN, veth, …) that is up and has an address
//     that is not just link-local: a host in a network namespace has nothing
//     but a veth.
//
// Not listed are the loopback, what is down, and the host's ends of guests'
// interfaces (tap, vif), virtual functions and ports of bridges without an
// address. A virtual interface that does not know its speed, or its NUMA node,
// has that of the fastest physical one below it.
package hostinfo
