// Package passthrough contains the packages that give PCI devices to virtual machines:
// finding devices (pci), their models (catalog), whether they may be given to a VM
// (isolation, xen), drivers (bind), resets (reset), slices (vgpu), domain XML (domxml),
// and events of devices (uevent). They know devices and files of the kernel, below a root
// that the caller provides (sysfs). They do not know hosts, claims or clusters.
package passthrough
