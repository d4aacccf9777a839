// Package pcitest makes folders that look like sysfs for code that finds PCI devices,
// with cards and topologies of real servers.
package pcitest
