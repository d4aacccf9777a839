// Package nics has what operators see and change of this host's network cards.
// It combines the interfaces that hostd/network reads with the VMs that have
// their functions and the hosts that they reach. It plans changes, and applies
// the configuration to the host. Nothing is recorded: the kernel has the settings
// until the host restarts.
//
// libvirt attaches a virtual function to a VM; this package does not.
package nics
