// Package passthrough is the folder of what hands PCI devices to virtual
// machines. Its sub-packages know devices, files of the kernel and nothing of
// hosts, claims or clusters. So far it finds devices (pci).
package passthrough
