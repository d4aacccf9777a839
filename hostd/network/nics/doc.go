// Package nics is what operators see and change of this host's network cards:
// it joins what hostd/network reads and sets with which VM has what and which
// hosts are reached, plans changes, and makes of a host what its configuration
// says. Nothing is recorded: the kernel has all of it, until the host restarts.
//
// Attaching a virtual function to a VM is libvirt's business.
package nics
