// Package pcitest builds trees of files that look as sysfs does to who looks
// for PCI devices, with cards and topologies as they are found in servers.
package pcitest
