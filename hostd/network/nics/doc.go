// Package nics implements the API of this host's network cards: operators list and change
// them. It combines the interfaces that hostd/network reads with the VMs that have their
// functions, and with the hosts that are reached through them. It plans changes, and
// applies the configuration file. It keeps no record: the settings are in the kernel,
// until the host restarts.
//
// libvirt attaches a virtual function to a VM; this package does not.
package nics
