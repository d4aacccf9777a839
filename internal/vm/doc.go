// Package vm names virtual machines. The keeper of cards, the migration and the
// hosts that take part in one use its types for a VM. libvirt's object for a VM
// is a domain (virt.Domain), and the hypervisor's is one, too (xen.Domain): who
// asks libvirt or the hypervisor makes a VM of what they answer.
//
// The package knows neither libvirt nor a hypervisor.
package vm
