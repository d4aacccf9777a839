// Package pciconf is the PCI configuration space of a function that software shows to a
// VM: its ids, its base addresses, and its message signalled interrupt (MSI).
//
// It decides which accesses of the VM are for which BAR. It does not know how accesses
// come (packages xen and mpqemu) nor what a BAR does (mmio.Device).
//
// The VM is hostile: it may write anything anywhere, in any size. A write changes only
// bits that the PCI specification lets a driver change.
package pciconf
