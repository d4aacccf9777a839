// Package passthrough is the folder of what hands PCI devices to virtual
// machines: finding them (pci), their models (catalog), whether they may be
// given away (isolation, xen), drivers (bind), resets (reset), slices (vgpu),
// domain XML (domxml), and news of devices (uevent). Its packages know devices
// and files of the kernel, below an injected root (sysfs), and nothing of
// hosts, claims or clusters.
package passthrough
