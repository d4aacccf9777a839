// Package vm has the types for virtual machines. The keeper of cards, the migration and
// the hosts that take part in it use them. libvirt and the hypervisor call a VM a domain
// (virt.Domain, xen.Domain). Code that asks them converts their answers to a VM.
//
// The package knows neither libvirt nor a hypervisor.
package vm
