// Package platform gives the keeper of cards what it needs of this machine: the
// hypervisor (Xen, or KVM through libvirt), libvirt's VMs, drivers, resets,
// isolation and the catalogue of models. Each implements an interface of
// hostd/cards. The package also listens to uevents of the kernel, events of
// libvirt and libvirt's hook, and passes them on to the keeper.
//
// It decides nothing. On a machine without a hypervisor cards are listed and
// judged, too; an attach is refused with the reason.
package platform
