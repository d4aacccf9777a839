// Package sriov reads and sets the number of a PCI device's virtual functions, for GPUs
// and network cards. The callers know which functions may be removed: vgpu for GPUs,
// hostd/network for network cards.
package sriov
