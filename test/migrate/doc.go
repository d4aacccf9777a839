// Package migrate moves VMs between two real hostds on two real libvirtds of
// this machine (test/libvirt): everything of a migration but PCI. Cards are
// moved in the lab (test/xen).
package migrate
