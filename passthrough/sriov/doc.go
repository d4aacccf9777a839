// Package sriov reads and sets the number of a PCI device's virtual functions. Its caller,
// vgpu, knows which functions may be removed.
package sriov
