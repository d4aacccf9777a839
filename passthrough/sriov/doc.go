// Package sriov reads and sets the number of a PCI device's virtual functions,
// of GPUs and of network cards alike. Who may lose one is known by who asks:
// vgpu for cards that are cut, hostd/network for those of the network.
package sriov
